"""Makes token shards from your own text, in the format the trainer reads.

    python data/tokenize_text.py OUT INPUT...       # .txt, .jsonl, .parquet files, or folders of them
    python data/tokenize_text.py my_shards books/ posts.jsonl --field body
    python data/tokenize_text.py my_shards corpus.txt --separator '<|endoftext|>'

GPT-2's BPE from the shipped vocabulary, no network. OUT then holds NAME_val_000000.bin, NAME_train_000001.bin
and so on, and report.json. Text that looks like a special token is encoded as the text it is.

A document belongs to validation if the hash of its bytes is below --val-fraction of the range. So the choice
depends on the document alone, copies of a document always fall on the same side, and of a validation document
all copies but the first are dropped: none can be in training.

All shards are built in OUT.partial, with their headers still zero, and appear as OUT in one rename at the
end: a run that was killed leaves nothing that a trainer would accept.
"""

import argparse
import array
import collections
import contextlib
import functools
import hashlib
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from check_shards import (BOS, HEADER_BYTES, VOCAB, VOCAB_FILE, VOCAB_SHA256, DataError, number,
                          refuse_missing, shard_header)

# GPT-2's splitting rule, with possessive quantifiers: they do not change what matches, only the time.
SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
PART_BYTES = 1 << 20     # text given to a worker at a time; longer documents are cut
KINDS = (".txt", ".jsonl", ".parquet")
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32

# A cut before a blank or line end that follows an ASCII letter or digit never changes the tokens: no piece of
# SPLIT reaches over such a place, and none looks back.
CUT = re.compile(rb"(?<=[A-Za-z0-9])[ \n]")

# SPLIT leaves the last blank of a run to the word behind it and finds that place by stepping back: over a
# long run its engine overflows. Cut before that blank, the run ends the text, which needs no stepping back.
# Python, unlike Unicode, counts U+001C to U+001F as blank.
BLANK = r"[^\S\x1c-\x1f]"
LONG_RUN = re.compile(rf"{BLANK}{BLANK}{{9999,}}(?=[\S\x1c-\x1f])")


# ======== Encoding (in the workers) ====================================================================

@functools.cache
def encoding():
    import tiktoken
    try:
        blob = VOCAB_FILE.read_bytes()
    except OSError as e:
        raise DataError(f"{VOCAB_FILE} cannot be read: {e.strerror}.\n"
                        "  Fix: git checkout that file, or python data/make_vocab.py ENCODER_JSON") from e
    if (digest := hashlib.sha256(blob).hexdigest()) != VOCAB_SHA256:
        raise DataError(f"{VOCAB_FILE} has SHA-256 {digest[:12]}..., want {VOCAB_SHA256[:12]}...\n"
                        "  Fix: git checkout that file, or python data/make_vocab.py ENCODER_JSON")
    tokens, at = [], 0
    while at < len(blob):
        tokens.append(blob[at + 1:at + 1 + blob[at]])
        at += 1 + blob[at]
    ranks = {token: rank for rank, token in enumerate(tokens[:BOS])}
    return tiktoken.Encoding("gpt2_shipped", pat_str=SPLIT, mergeable_ranks=ranks,
                             special_tokens={tokens[BOS].decode(): BOS}, explicit_n_vocab=VOCAB)


def utf8(text):
    """The bytes of a text; a lone surrogate (JSON can hold one) becomes U+FFFD, as in tiktoken."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def parts_of(raw):
    """Cuts the bytes of a document where that does not change its tokens, about every megabyte."""
    start = 0
    while len(raw) - start > PART_BYTES:
        cut = CUT.search(raw, start + PART_BYTES)
        if cut is None:
            break
        yield raw[start:cut.start()]
        start = cut.start()
    yield raw[start:]


def encode(raw):
    """The token ids of a document in UTF-8."""
    ids = []
    for part in parts_of(raw):
        text, start = part.decode(), 0
        for end in [run.end() - 1 for run in LONG_RUN.finditer(text)] + [len(text)]:
            ids.append(np.array(encoding().encode_ordinary(text[start:end]), dtype="<u2"))
            start = end
    return np.concatenate(ids)


def digest_of(raw):
    return hashlib.blake2b(raw, digest_size=16).digest()


def texts_in(job):
    """The documents of a job, as bytes."""
    if job["kind"] == "texts":
        yield from job["texts"]
    elif job["kind"] == "lines":
        for line_number, line in enumerate(job["lines"], job["first"]):
            if line.strip():
                yield utf8(json_field(line, job["field"], f"{job['source']}, line {line_number}"))
    else:
        import pyarrow.parquet
        file = pyarrow.parquet.ParquetFile(job["source"])
        table = file.read_row_group(job["group"], columns=[job["field"]])
        yield from (utf8(text) for text in table[job["field"]].to_pylist() if text is not None)


def json_field(line, field, where):
    try:
        row = json.loads(line)
    except ValueError as e:
        raise DataError(f"{where} is not JSON: {e}.\n  Fix: one JSON object a line, in UTF-8") from e
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{where} has no text in field {field!r}; found: {found[:200]}.\n"
                        "  Fix: name the right one with --field")
    return row[field]


def encode_job(job):
    """(digests, byte counts, token counts, tokens of all) of a job's documents; empty ones are left out."""
    try:
        if job["kind"] == "part":
            tokens = encode(job["raw"])
            return [job["digest"]], [len(job["raw"])], [len(tokens)], tokens
        raws = [raw for raw in texts_in(job) if raw]
        tokens = [encode(raw) for raw in raws]
    except UnicodeDecodeError as e:
        around = e.object[max(0, e.start - 20):e.start + 10]
        raise DataError(f"{job['source']} is not UTF-8: {e.reason} in {around!r}.\n"
                        "  Fix: convert it, for example with iconv -f latin1 -t utf-8") from e
    except BaseException as e:
        if type(e).__name__ != "PanicException":  # tiktoken's; it cannot travel to the parent
            raise
        raise DataError(f"tiktoken cannot encode a document of {job['source']}: {e}.\n"
                        "  Fix: take that document out; often it has a giant run of one character") from e
    return ([digest_of(raw) for raw in raws], [len(raw) for raw in raws], [len(part) for part in tokens],
            np.concatenate([np.zeros(0, "<u2"), *tokens]))


def start_worker():
    """A worker ends with its parent, also when that is killed, and leaves Ctrl-C to it."""
    def watch(parent):
        multiprocessing.connection.wait([parent])
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, args=(multiprocessing.parent_process().sentinel,), daemon=True).start()


# ======== Reading (in the parent) ======================================================================

def input_files(names):
    files = []
    for path in map(Path, names):
        found = sorted(file for file in path.rglob("*") if file.suffix in KINDS) if path.is_dir() else [path]
        if not path.exists() or not found or found[0].suffix not in KINDS:
            what = "is not there" if not path.exists() else "holds no text" if path.is_dir() else "is unknown"
            raise DataError(f"{path} {what}, want {', '.join(KINDS)} files or folders of them.\n"
                            "  Fix: correct the path, or rename or convert the file")
        files += found
    return files


def jobs_of(path, options):
    """(job, bytes of the file it stands for) for the workers, small enough to keep many under way."""
    if path.suffix == ".txt":
        yield from batches(path, txt_documents(path, options.separator))
    elif path.suffix == ".jsonl":
        with open(path, "rb") as f:
            lines, first, n_bytes = [], 1, 0
            for line in f:
                lines.append(line.removeprefix(b"\xef\xbb\xbf"))
                n_bytes += len(line)
                if n_bytes >= PART_BYTES:
                    yield dict(kind="lines", source=str(path), lines=lines, first=first,
                               field=options.field), n_bytes
                    lines, first, n_bytes = [], first + len(lines), 0
            yield dict(kind="lines", source=str(path), lines=lines, first=first, field=options.field), n_bytes
    else:
        refuse_missing(["pyarrow"], "python -m pip install pyarrow")
        import pyarrow.parquet
        table = pyarrow.parquet.ParquetFile(path)
        if options.field not in table.schema_arrow.names:
            raise DataError(f"{path} has no column {options.field!r}; found: "
                            f"{', '.join(table.schema_arrow.names)}.\n  Fix: name the right one with --field")
        for group in range(table.num_row_groups):
            yield (dict(kind="rows", source=str(path), group=group, field=options.field),
                   path.stat().st_size // table.num_row_groups)


def txt_documents(path, separator):
    """The documents of a .txt file, which is mapped: a large one need not fit into memory."""
    if path.stat().st_size == 0:
        return
    with open(path, "rb") as f:
        text = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    start = 3 if text[:3] == b"\xef\xbb\xbf" else 0  # a byte order mark is no text
    if not separator:
        yield memoryview(text)[start:]  # never copied as a whole; the mapping ends with its last view
        return
    mark = separator.encode()
    while (end := text.find(mark, start)) != -1:
        yield text[start:end].strip(b"\r\n")
        start = end + len(mark)
    yield text[start:].strip(b"\r\n")


def batches(path, documents):
    texts, n_bytes = [], 0
    for raw in documents:
        if len(raw) > PART_BYTES:  # several workers share one long document; order is kept
            digest = digest_of(raw)
            for i, part in enumerate(parts_of(raw)):
                yield (dict(kind="part", source=str(path), raw=bytes(part), digest=digest, starts=i == 0),
                       len(part))
            continue
        texts.append(bytes(raw))
        n_bytes += len(raw)
        if n_bytes >= PART_BYTES:
            yield dict(kind="texts", source=str(path), texts=texts), n_bytes
            texts, n_bytes = [], 0
    yield dict(kind="texts", source=str(path), texts=texts), n_bytes


def in_order(pool, jobs, n_ahead):
    """(job, bytes, result) in the order of the jobs, a bounded number of them under way."""
    under_way = collections.deque()
    for job, n_bytes in jobs:
        under_way.append(({key: job[key] for key in ("kind", "starts") if key in job}, n_bytes,
                          pool.submit(encode_job, job)))
        if len(under_way) >= n_ahead:
            brief, n, future = under_way.popleft()
            yield brief, n, future.result()
    for brief, n, future in under_way:
        yield brief, n, future.result()


# ======== Writing ======================================================================================

class Split:
    """Validation or training: its shards, not yet valid, and its statistics."""

    def __init__(self, folder, stem, first_index, shard_tokens):
        self.folder, self.stem, self.first_index, self.shard_tokens = folder, stem, first_index, shard_tokens
        self.counts, self.file = [], None           # tokens per shard; the shard being written
        self.lengths, self.n_bytes = array.array("Q"), 0

    def path(self, i):
        return self.folder / f"{self.stem}_{self.first_index + i:06d}.bin"

    def begin(self):
        """Begins a document, and a shard if the last one is full: so every shard begins with BOS.

        FineWeb's shards have exactly the given size instead and end inside a document; then a last shard can
        hold nothing but the rest of a document, which no trainer can use.
        """
        if self.file is None or self.counts[-1] >= self.shard_tokens:
            self.close()
            self.file = open(self.path(len(self.counts)), "wb")
            self.file.write(b"\0" * HEADER_BYTES)  # no valid header before publish()
            self.counts.append(0)
        self.lengths.append(0)
        self.add(np.array([BOS], "<u2"), 0)

    def add(self, tokens, n_bytes):
        """Tokens of the document that was begun last."""
        self.file.write(tokens.tobytes())
        self.counts[-1] += len(tokens)
        self.lengths[-1] += len(tokens)
        self.n_bytes += n_bytes
        if self.counts[-1] > MAX_SHARD_TOKENS:
            raise DataError(f"One document has more than {MAX_SHARD_TOKENS:,} tokens, want less in a shard.\n"
                            "  Fix: split the input into documents (--separator)")

    def close(self):
        if self.file is not None:
            self.file.close()
            self.file = None

    def publish(self):
        self.close()
        for i, n_tokens in enumerate(self.counts):
            with open(self.path(i), "rb+") as f:
                f.write(shard_header(n_tokens))
                f.flush()
                os.fsync(f.fileno())

    def report(self):
        n_docs, n_tokens = len(self.lengths), sum(self.lengths)
        if not n_docs:
            return dict(shards=0, documents=0, tokens=0)
        return dict(shards=len(self.counts), documents=n_docs, tokens=n_tokens,
                    mean_tokens=round(n_tokens / n_docs, 2),
                    median_tokens=float(np.median(np.frombuffer(self.lengths, np.uint64))),
                    bytes=self.n_bytes, bytes_per_token=round(self.n_bytes / max(1, n_tokens - n_docs), 4))


def tokenize(options, files, folder, bar):
    """Writes both splits, unpublished, into `folder`; returns them and the number of copies left out."""
    val = Split(folder, f"{options.name}_val", 0, options.shard_tokens)
    train = Split(folder, f"{options.name}_train", 1, options.shard_tokens)
    limit, seen, n_copies = int(options.val_fraction * 2**64), set(), 0
    jobs = (job for path in files for job in jobs_of(path, options))
    pool = ProcessPoolExecutor(options.procs, multiprocessing.get_context("spawn"), start_worker)
    try:
        split = None
        for brief, n_read, (digests, byte_counts, lengths, tokens) in in_order(pool, jobs, 4 * options.procs):
            at = 0
            for digest, n_bytes, length in zip(digests, byte_counts, lengths, strict=True):
                if brief.get("starts", True):
                    split = val if int.from_bytes(digest[:8], "big") < limit else train
                    if split is val:
                        if digest in seen:
                            n_copies += 1
                            split = None
                        seen.add(digest)
                    if split:
                        split.begin()
                if split:
                    split.add(tokens[at:at + length], n_bytes)
                at += length
            bar.update(n_read)
        bar.update(bar.total - bar.n)  # separators and the like
    finally:
        pool.shutdown(cancel_futures=True)
        val.close()
        train.close()
    return val, train, n_copies


@contextlib.contextmanager
def staging(out):
    """The folder OUT.partial, renamed to OUT if all goes well, else removed."""
    from filelock import FileLock, Timeout
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not an empty folder, want a new one.\n"
                        f"  Fix: choose another name, or rm -r {out}")
    partial = out.with_name(out.name + ".partial")
    lock = FileLock(partial.with_suffix(".partial.lock"))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as e:
        raise DataError(f"Another run is writing {out}.\n  Fix: wait for it, or choose another folder") from e
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a killed run
        partial.mkdir()
        yield partial
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


# ======== Command ======================================================================================

def parse_options(argv):
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(description="Make token shards from text (GPT-2 BPE, no network).")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help=".txt, .jsonl, .parquet, or folders")
    parser.add_argument("--field", default="text", help="field or column that holds the text (text)")
    parser.add_argument("--separator", default="", help=r"splits .txt files into documents; \n is a line end "
                        "(without it, a file is a document)")
    parser.add_argument("--val-fraction", type=number(float, 0, 0.5, "a share from 0 to 0.5"), default=0.01,
                        metavar="F", help="share of documents held out for validation (0.01)")
    parser.add_argument("--shard-tokens", type=number(int, 1, 10**9, "1 to 1000000000"), metavar="N",
                        default=100_000_000,
                        help="a shard ends with the document that reaches this many tokens (100000000)")
    parser.add_argument("--procs", type=number(int, 1, 512, "1 to 512"), default=n_cores,
                        help=f"processes ({n_cores})")
    parser.add_argument("--name", default="text", help="first part of the file names (text)")
    options = parser.parse_args(argv)
    if not re.fullmatch(r"[\w.-]+", options.name) or "_val_" in options.name:
        parser.error(f"argument --name: found {options.name!r}, want letters, digits, . _ - and no _val_")
    options.separator = options.separator.replace(r"\n", "\n").replace(r"\t", "\t")
    return options


def require_documents(options, splits):
    n_docs = sum(len(split.lengths) for split in splits)
    for split, wanted in zip(splits, (options.val_fraction > 0, True), strict=True):
        if wanted and not split.lengths:
            raise DataError(f"0 of {n_docs:,} documents fell to {split.stem}, want at least 1.\n"
                            "  Fix: give more documents (--separator splits files), or change --val-fraction "
                            f"{options.val_fraction:g}")


def main(argv):
    options = parse_options(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        refuse_missing(["tiktoken", "tqdm", "filelock"], "python -m pip install -r data/requirements.txt")
        from tqdm import tqdm
        files = input_files(options.inputs)
        encoding()  # a missing vocabulary is said here, not by every worker
        with staging(options.out) as folder:
            with tqdm(total=sum(file.stat().st_size for file in files), desc="tokenize", unit="B",
                      unit_scale=True, mininterval=0.2 if sys.stderr.isatty() else 10) as bar:
                val, train, n_copies = tokenize(options, files, folder, bar)
                seconds = bar.format_dict["elapsed"]
            require_documents(options, (val, train))
            report = dict(validation=val.report(), training=train.report(), copies_removed=n_copies)
            (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
            train.publish()
            val.publish()
    except DataError as e:
        print(e, file=sys.stderr)
        return 1
    except BrokenProcessPool:
        print(f"A worker process died: killed, or out of memory ({options.procs} were running).\n"
              "  Fix: run it again with a smaller --procs", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"{type(e).__name__}: {e}.\n  Fix: check the disk, the paths and their permissions",
              file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Stopped; {options.out} was not made.\n  Fix: run it again", file=sys.stderr)
        return 130
    for name in ("validation", "training"):
        if report[name]["documents"]:
            print("{}: {shards} shards, {documents:,} documents, {tokens:,} tokens; per document mean "
                  "{mean_tokens:.1f}, median {median_tokens:.0f}; {bytes_per_token:.3f} bytes per token"
                  .format(name, **report[name]))
    n_bytes = sum(report[name].get("bytes", 0) for name in ("validation", "training"))
    print(f"{n_copies:,} copies of validation documents removed; {n_bytes:,} bytes of text in "
          f"{seconds:.1f} s: {n_bytes / 1e6 / seconds:.1f} MB/s in {options.procs} processes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
