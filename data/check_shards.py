"""Checks token shards; also holds what the scripts beside it share: the header, the reader, atomic writing.

    python data/check_shards.py data/fineweb10B
    python data/check_shards.py my/text_train_*.bin --val my/text_val_*.bin

A shard is 256 little-endian int32 (magic 20240520, version 1, number of tokens n, zeros), then n uint16 token
ids. Every document begins with token 50256 (BOS); the last document of a shard may go on in the next one.
Shards with `_val_` in their name are validation. Exit status 1 if a shard is bad or the overlap is too large.
"""

import argparse
import contextlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
BOS = 50256
VOCAB = 50257
VOCAB_FILE = Path(__file__).resolve().parent / "gpt2_vocab.bin"
VOCAB_SHA256 = "a622700e3255b4a6186e052c4c715c1d05634cb6041c12ab6c95c9ee0a2c9772"

BLOCK = 512        # tokens compared at a time between validation and training
WINDOW = 1 << 20   # start positions hashed at a time: about 60 MB of work space


class DataError(Exception):
    """Says what is wrong, what was found, what was wanted and what to do."""


# ======== For the commands ============================================================================

def number(kind, low, high, what):
    """A type for argparse: a number in a range, or a message that says which."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"found {text!r}, want {what}")
        return value
    return parse


def refuse_missing(packages, command):
    if absent := [name for name in packages if find_spec(name) is None]:
        raise DataError(f"{sys.executable} has no {', '.join(absent)}.\n  Fix: {command}")


# ======== Shard files =================================================================================

@contextlib.contextmanager
def atomic_write(path):
    """A binary file that appears under its name whole or not at all, also after a crash or a power cut."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def shard_header(n_tokens):
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = MAGIC, VERSION, n_tokens
    return header.tobytes()


def likeness(head):
    """What a file that is no shard seems to be, from its first bytes."""
    if not head.strip(b"\0"):
        return "It is empty or all zeros: an unfinished write or download."
    if head.startswith(b"version https://git-lfs"):
        return "It looks like a Git LFS pointer: the file itself was never fetched."
    if head.lstrip()[:1] == b"<":
        return "It looks like an HTML page: an error page saved as a file."
    if int.from_bytes(head[:4], "little") == 20240801:
        return "That is the magic of llama-3 shards (uint32 tokens): another tokenizer."
    return "It is another format, or damaged."


def shard_length(path):
    """The number of tokens in a shard, from its header; DataError unless header and file size agree."""
    path = Path(path)
    fix = f"  Fix: rm {path}, then make it again (FineWeb: python data/cached_fineweb10B.py)"
    try:
        n_bytes = path.stat().st_size
        with open(path, "rb") as f:
            head = f.read(HEADER_BYTES)
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}.\n"
                        "  Fix: check the path and its permissions") from e
    if n_bytes < HEADER_BYTES:
        raise DataError(f"{path} is no token shard: {n_bytes:,} bytes, want at least {HEADER_BYTES:,}.\n"
                        f"  {likeness(head)}\n{fix}")
    magic, version, n_tokens = (int(x) for x in np.frombuffer(head[:12], dtype="<i4"))
    if magic != MAGIC:
        raise DataError(f"{path} is no token shard: it starts with {magic}, want {MAGIC}.\n"
                        f"  {likeness(head)}\n{fix}")
    if version != VERSION:
        raise DataError(f"{path} has shard version {version}, want {VERSION}.\n{fix}")
    if n_bytes != HEADER_BYTES + 2 * n_tokens:
        raise DataError(f"{path} is cut or padded: the header says {n_tokens:,} tokens, "
                        f"{(n_bytes - HEADER_BYTES) / 2:,.1f} are there.\n"
                        f"  It is {n_bytes:,} bytes, want {HEADER_BYTES + 2 * n_tokens:,}.\n{fix}")
    return n_tokens


def read_shard(path):
    """The tokens of a shard, read from disk when touched."""
    if shard_length(path) == 0:
        return np.zeros(0, dtype="<u2")  # an empty region cannot be mapped
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)


# ======== Checks ======================================================================================

def check_ids(path, tokens):
    for start in range(0, len(tokens), WINDOW):
        part = tokens[start:start + WINDOW]
        if part.max() >= VOCAB:
            at = int(np.argmax(part >= VOCAB))
            raise DataError(f"{path} holds token id {int(part[at])} at offset {start + at:,}, "
                            f"want at most {VOCAB - 1}.\n"
                            "  It was made with another tokenizer, or is damaged.\n"
                            "  Fix: make it again with data/tokenize_text.py, or download it again")


class Lengths:
    """Document lengths of consecutive shards, BOS included; a document may run over a shard's end."""

    def __init__(self):
        self.closed = []     # arrays of lengths
        self.open = None     # tokens so far of the document that has not ended; None before the first BOS
        self.headless = 0    # tokens before the first BOS

    def add(self, path, tokens):
        starts = np.flatnonzero(tokens == BOS)
        if not len(starts):
            raise DataError(f"{path} has no BOS ({BOS}) in its {len(tokens):,} tokens, want one a document.\n"
                            "  Fix: make it again with data/tokenize_text.py, which writes them")
        if self.open is None:
            self.headless = int(starts[0])
        else:
            self.closed.append(np.array([self.open + starts[0]]))
        self.closed.append(np.diff(starts))
        self.open = len(tokens) - int(starts[-1])
        return len(starts), int(starts[0])

    def all(self):
        return np.concatenate([*self.closed, [self.open or 0]])


# A polynomial hash modulo 2^64: with the running sum P of hash(token[i]) * BASE^i, the hash of any stretch is
# (P[end] - P[start]) * BASE^-start, so all stretches of a shard cost a few passes of numpy over it.
TOKEN_HASH = np.random.default_rng(0).integers(0, 2**64, 1 << 16, dtype=np.uint64)
BASE = 0x9E3779B97F4A7C15  # odd: has an inverse modulo 2^64


def powers(base, n):
    factors = np.full(n, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


class StretchHash:
    """Hashes of stretches of up to `limit` tokens."""

    def __init__(self, limit):
        self.power = powers(BASE, limit)
        self.inverse = powers(pow(BASE, -1, 2**64), limit)

    def load(self, tokens):
        self.sums = np.zeros(len(tokens) + 1, np.uint64)
        np.cumsum(TOKEN_HASH[tokens] * self.power[:len(tokens)], out=self.sums[1:])

    def __call__(self, starts, ends):
        return (self.sums[ends] - self.sums[starts]) * self.inverse[starts]


def documents(tokens, n_more=0):
    """Starts (after BOS) and ends of the documents, without those that begin in the last `n_more` tokens."""
    bos = np.flatnonzero(tokens == BOS)
    starts, ends = bos + 1, np.append(bos[1:], len(tokens))
    keep = (starts < ends) & (bos < len(tokens) - n_more)
    return starts[keep], ends[keep]


def windows(tokens):
    """(tokens of a window, number of start positions in it): the rest belongs to the next window."""
    for start in range(0, len(tokens), WINDOW):
        yield np.asarray(tokens[start:start + WINDOW + BLOCK]), min(WINDOW, len(tokens) - start)


class Finder:
    """Which of a set of hashes occur in training. `weight` is the number of tokens each stands for."""

    def __init__(self, hashes, weights):
        self.hashes, where = np.unique(hashes, return_inverse=True)
        self.weight = np.bincount(where, weights=weights, minlength=len(self.hashes))
        self.count = np.bincount(where, minlength=len(self.hashes))
        self.found = np.zeros(len(self.hashes), bool)
        self.may_be = np.zeros(1 << 22, bool)  # most stretches are in none: one look-up rejects them
        self.may_be[self.hashes >> np.uint64(42)] = True

    def look_for(self, hashes):
        hashes = hashes[self.may_be[hashes >> np.uint64(42)]]
        at = np.searchsorted(self.hashes, hashes)
        at[at == len(self.hashes)] = 0
        self.found[at[self.hashes[at] == hashes]] = True


def overlap(val_paths, train_paths):
    """(pieces of validation, those that occur in training too, their share of the compared tokens).

    A piece is a block of 512 tokens, or a whole document of fewer. Blocks are looked for at every position of
    the training shards, so a copy is found wherever it was packed; a short document must match as a whole.
    """
    stretch = StretchHash(WINDOW + BLOCK)
    blocks, shorts, short_lengths = [], [], []
    for path in val_paths:
        tokens = read_shard(path)
        for window, n_starts in windows(tokens):
            stretch.load(window)
            starts, ends = documents(window, n_more=len(window) - n_starts)
            short = ends - starts < BLOCK
            shorts.append(stretch(starts[short], ends[short]))
            short_lengths.append((ends - starts)[short])
            # Cut at the window's end, a long document loses the blocks beyond it, fewer than one in 1,000.
            for start, end in zip(starts[~short], ends[~short], strict=True):
                cuts = np.arange(start, end - BLOCK + 1, BLOCK)
                blocks.append(stretch(cuts, cuts + BLOCK))
    blocks = np.concatenate([np.zeros(0, np.uint64), *blocks])
    lengths = np.concatenate([np.zeros(0, np.int64), *short_lengths])
    block_finder = Finder(blocks, np.full(len(blocks), BLOCK))
    short_finder = Finder(np.concatenate([np.zeros(0, np.uint64), *shorts]), lengths)
    for path in train_paths:
        for window, n_starts in windows(read_shard(path)):
            stretch.load(window)
            starts = np.arange(min(n_starts, max(0, len(window) - BLOCK + 1)))
            if len(blocks):
                block_finder.look_for(stretch(starts, starts + BLOCK))
            starts, ends = documents(window, n_more=len(window) - n_starts)
            short = ends - starts < BLOCK
            if len(lengths):
                short_finder.look_for(stretch(starts[short], ends[short]))
    finders = (block_finder, short_finder)
    n_pieces = sum(int(finder.count.sum()) for finder in finders)
    n_found = sum(int(finder.count[finder.found].sum()) for finder in finders)
    n_tokens = sum(finder.weight.sum() for finder in finders)
    share = sum(finder.weight[finder.found].sum() for finder in finders) / max(n_tokens, 1)
    return n_pieces, n_found, float(share)


# ======== Command =====================================================================================

def check_set(name, paths):
    """Prints one line per shard and one for the set; returns the paths of the good shards."""
    lengths, good = Lengths(), []
    for path in paths:
        try:
            tokens = read_shard(path)
            check_ids(path, tokens)
            n_docs, first = lengths.add(path, tokens)
        except DataError as e:
            print(f"BAD  {e}", file=sys.stderr)
            continue
        good.append(path)
        head = "" if first == 0 else f", the first {first:,} tokens continue a document"
        print(f"ok   {path}: {len(tokens):,} tokens, {n_docs:,} documents{head}")
    if good:
        n = lengths.all()
        n_tokens = int(n.sum()) + lengths.headless
        print(f"{name}: {len(good)} shards, {n_tokens:,} tokens, {len(n):,} documents; tokens per document: "
              f"mean {n.mean():.1f}, median {np.median(n):.0f}, min {n.min():,}, max {n.max():,}")
    return good


def expand(names):
    """Folders stand for the shards in them."""
    paths = [sorted(Path(name).glob("*.bin")) if Path(name).is_dir() else [Path(name)] for name in names]
    return [path for group in paths for path in group]


def main(argv):
    parser = argparse.ArgumentParser(description="Check token shards, and validation against training.")
    parser.add_argument("shards", nargs="*", help="shards or folders; _val_ in a name marks validation")
    parser.add_argument("--val", nargs="+", default=[], help="validation shards, whatever their name")
    parser.add_argument("--max-overlap", type=float, default=5.0, metavar="PERCENT",
                        help="share of validation tokens that may occur in training too (default 5)")
    options = parser.parse_args(argv)
    val = expand(options.val)
    rest = [path for path in expand(options.shards) if path not in val]
    val += [path for path in rest if "_val_" in path.name]
    train = [path for path in rest if "_val_" not in path.name]
    if not val and not train:
        print(f"No shard in {' '.join(options.shards) or 'the arguments'}, want at least one .bin file.\n"
              "  Fix: name shards or a folder with some; python data/cached_fineweb10B.py fetches them",
              file=sys.stderr)
        return 2
    good_val, good_train = check_set("validation", val), check_set("training", train)
    is_fine = len(good_val) + len(good_train) == len(val) + len(train)
    if good_val and good_train:
        n_pieces, n_found, share = overlap(good_val, good_train)
        print(f"overlap: {n_found:,} of {n_pieces:,} validation pieces (blocks of {BLOCK} tokens, shorter "
              f"documents whole) occur in training: {100 * share:.2f} % of the tokens compared")
        if 100 * share > options.max_overlap:
            print(f"BAD  {100 * share:.2f} % of validation is in the training shards, want at most "
                  f"{options.max_overlap:g} %.\n  A validation loss would measure memory.\n"
                  "  Fix: hold other documents out (data/tokenize_text.py removes copies), or --max-overlap",
                  file=sys.stderr)
            is_fine = False
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
