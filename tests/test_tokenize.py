"""Own text becomes shards: the right tokens, no validation text in training, nothing half-done left over."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hub_server import docs, shard

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "data"))
import check_shards  # noqa: E402
import tokenize_text  # noqa: E402

BOS = 50256
DEADLINE_S = 90


def run(script, *arguments):
    done = subprocess.run([sys.executable, REPO / "data" / script, *map(str, arguments)], text=True,
                          capture_output=True, timeout=DEADLINE_S)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def random_documents(n, seed):
    """Words, blanks of all kinds, contractions, special-token text, and characters of every plane."""
    rand = np.random.default_rng(seed)
    ready = ["the", "Token", "isn't", "WE'LL", "we've", "'s", "123", "4567890", "...", "!?", "<|endoftext|>",
             "a" * 40, "naïve", "日本語", "नमस्ते", "👩‍👩‍👧", "\x00", "\x1c", "\x85", "\ufeff"]
    blanks = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u3000", "\u00a0", "\u2028", ""]

    def piece():
        kind = rand.integers(4)
        if kind == 0:
            return ready[rand.integers(len(ready))]
        if kind == 1:
            return "".join(map(chr, rand.integers(97, 123, rand.integers(1, 12))))
        if kind == 2:
            return blanks[rand.integers(len(blanks))]
        code = int(rand.integers(17)) * 0x10000 + int(rand.integers(0x10000))
        return "" if 0xD800 <= code < 0xE000 else chr(code)

    return ["".join(piece() + " " * int(rand.integers(2)) for _ in range(rand.integers(1, 60)))
            for _ in range(n)]


def prose(n, seed, n_words=200):
    """Texts of made-up words, for speed rather than for corners."""
    rand = np.random.default_rng(seed)
    words = ["".join(map(chr, rand.integers(97, 123, rand.integers(2, 9)))) for _ in range(3_000)]
    return [" ".join(words[i] for i in rand.integers(3_000, size=rand.integers(5, 2 * n_words))) + "."
            for _ in range(n)]


def shard_documents(folder, split):
    """(texts, all tokens) of a split, read back."""
    paths = sorted(folder.glob(f"*_{split}_*.bin"))
    tokens = np.concatenate([np.asarray(check_shards.read_shard(path)) for path in paths])
    assert tokens[0] == BOS
    pieces = np.split(tokens, np.flatnonzero(tokens == BOS))[1:]
    return [tokenize_text.encoding().decode(piece[1:].tolist()) for piece in pieces], tokens


# ======== Tokens ======================================================================================

def test_equals_tiktokens_own_encoding():
    """tiktoken builds GPT-2 from the published files, by its own loader and with the pattern it ships."""
    folders = [path.parent for path in REPO.parent.glob("*/data/gpt2/vocab.bpe")]
    if not folders:
        pytest.skip("needs GPT-2's published vocab.bpe and encoder.json in a folder beside the repository")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str
    ranks = data_gym_to_mergeable_bpe_ranks(str(folders[0] / "vocab.bpe"), str(folders[0] / "encoder.json"))
    own = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks,
                            special_tokens={"<|endoftext|>": BOS}, explicit_n_vocab=50257)
    texts = random_documents(1_000, seed=1)
    assert {ord(char) >> 16 for text in texts for char in text} == set(range(17))
    for text in texts:
        ids = tokenize_text.encode(text.encode())
        assert ids.tolist() == own.encode_ordinary(text)
        assert own.decode(ids.tolist()) == text


def split_by_hand(text):
    """GPT-2's splitting rule, with the categories of unicodedata in the place of a regular expression."""
    kinds = ["b" if char.isspace() and not "\x1c" <= char <= "\x1f" else unicodedata.category(char)[0]
             for char in text]
    kinds = [kind if kind in "bLN" else "o" for kind in kinds]
    at = 0
    while at < len(text):
        end = at
        if match := re.match(r"'(s|d|m|t|ll|ve|re)", text[at:]):
            end = at + match.end()
        else:
            first = at + (text[at] == " " and at + 1 < len(text) and kinds[at + 1] != "b")
            end = first + 1
            while end < len(text) and kinds[end] == kinds[first]:
                end += 1
            if kinds[first] == "b" and end < len(text) and end - first > 1:
                end -= 1
        yield text[at:end]
        at = end


def merge_by_hand(word, ranks):
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        rank, i = min((ranks.get(parts[i] + parts[i + 1], 10**9), i) for i in range(len(parts) - 1))
        if rank == 10**9:
            break
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]


def test_equals_a_plain_python_encoder():
    blob, ranks = (REPO / "data" / "gpt2_vocab.bin").read_bytes(), {}
    while blob:
        ranks[blob[1:1 + blob[0]]] = len(ranks)
        blob = blob[1 + blob[0]:]
    assert ranks.pop(b"<|endoftext|>") == BOS and len(ranks) == BOS
    for text in random_documents(200, seed=2) + prose(5, seed=2):
        # Characters that one of the two Unicode tables does not know yet would compare the tables.
        text = "".join(char for char in text if unicodedata.category(char) != "Cn")
        want = [rank for word in split_by_hand(text) for rank in merge_by_hand(word.encode(), ranks)]
        assert tokenize_text.encode(text.encode()).tolist() == want


def test_special_token_text_is_text():
    text = "a <|endoftext|> b<|endoftext|>"
    ids = tokenize_text.encode(text.encode())
    assert BOS not in ids and tokenize_text.encoding().decode(ids.tolist()) == text


def test_cuts_do_not_change_tokens(monkeypatch):
    whole = tokenize_text.encoding().encode_ordinary
    texts = random_documents(300, seed=3) + prose(20, seed=3)
    monkeypatch.setattr(tokenize_text, "PART_BYTES", 20)
    run_of_two = tokenize_text.LONG_RUN.pattern.replace("9999", "1")
    monkeypatch.setattr(tokenize_text, "LONG_RUN", re.compile(run_of_two))
    n_parts = 0
    for text in texts:
        n_parts += sum(1 for _ in tokenize_text.parts_of(text.encode()))
        assert tokenize_text.encode(text.encode()).tolist() == whole(text)
    assert n_parts > 1_000


def test_a_million_blanks():
    """Where tiktoken's own encode() panics."""
    for text in (" " * 1_000_000 + "y", "x" + "\n" * 1_000_000 + "y "):
        assert tokenize_text.encoding().decode(tokenize_text.encode(text.encode()).tolist()) == text


def test_lone_surrogate_as_in_tiktoken():
    text = "a\ud800b\ude00"
    assert tokenize_text.encode(tokenize_text.utf8(text)).tolist() == \
        tokenize_text.encoding().encode_ordinary(text)


# ======== Shards ======================================================================================

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The same 400 documents as a folder of .txt, one .txt with separators, .jsonl and .parquet."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = list(dict.fromkeys(text.strip() for text in random_documents(300, seed=4) + prose(100, seed=4)))
    texts = [text for text in texts if text and "<|endoftext|>" not in text and "\ufeff" not in text]
    (folder / "files").mkdir()
    for i, text in enumerate(texts):
        (folder / "files" / f"{i:04d}.txt").write_bytes(text.encode())
    (folder / "one.txt").write_bytes("\n<|endoftext|>\n".join(texts).encode())
    (folder / "posts.jsonl").write_text("".join(json.dumps({"id": i, "body": text}) + "\n"
                                                for i, text in enumerate(texts)))
    return folder, texts


def check_corpus(out, texts, n_copies=0):
    """Every document once, in order within its split; report.json says what the shards hold."""
    val, val_tokens = shard_documents(out, "val")
    train, train_tokens = shard_documents(out, "train")
    assert sorted(val + train) == sorted(texts) and not set(val) & set(train)
    assert train == [text for text in texts if text in set(train)]
    report = json.loads((out / "report.json").read_text())
    assert report["copies_removed"] == n_copies
    for name, found, tokens in (("validation", val, val_tokens), ("training", train, train_tokens)):
        lengths = np.diff(np.append(np.flatnonzero(tokens == BOS), len(tokens)))
        n_bytes = sum(len(text.encode()) for text in found)
        want = dict(documents=len(found), tokens=len(tokens), median_tokens=float(np.median(lengths)),
                    mean_tokens=round(lengths.mean(), 2), bytes=n_bytes,
                    bytes_per_token=round(n_bytes / (len(tokens) - len(found)), 4))
        assert {key: report[name][key] for key in want} == want
    return val, train


@pytest.mark.parametrize("kind", ["files", "separator", "jsonl", "parquet"])
def test_reads(corpus, tmp_path, kind):
    folder, texts = corpus
    arguments = {"files": [folder / "files"], "jsonl": [folder / "posts.jsonl", "--field", "body"],
                 "separator": [folder / "one.txt", "--separator", r"\n<|endoftext|>\n"],
                 "parquet": [folder / "table.parquet"]}[kind]
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"text": [*texts, None, ""], "id": range(len(texts) + 2)})
        parquet.write_table(table, folder / "table.parquet", row_group_size=100)
    rc, stdout, stderr = run("tokenize_text.py", tmp_path / "out", *arguments, "--val-fraction", 0.1,
                             "--shard-tokens", 3_000, "--procs", 2, "--name", "mine")
    assert rc == 0, stderr
    assert "MB/s in 2 processes" in stdout and "bytes per token" in stdout and "tokenize: 100%" in stderr
    check_corpus(tmp_path / "out", texts)
    sizes = [check_shards.shard_length(path) for path in sorted((tmp_path / "out").glob("mine_train_*.bin"))]
    assert len(sizes) > 3 and all(3_000 <= size < 3_000 + 1_000 for size in sizes[:-1])
    for path in (tmp_path / "out").glob("*.bin"):
        assert check_shards.read_shard(path)[0] == BOS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    rc, stdout, stderr = run("check_shards.py", tmp_path / "out")
    assert rc == 0, stderr
    assert re.search(r"overlap: \d+ of \d+ validation pieces", stdout)


def test_copies_of_validation_documents_are_removed(corpus, tmp_path):
    """The whole corpus twice: each validation document once in validation and never in training."""
    folder, texts = corpus
    rc, _, stderr = run("tokenize_text.py", tmp_path / "once", folder / "posts.jsonl", "--field", "body",
                        "--val-fraction", 0.2, "--procs", 1)
    assert rc == 0, stderr
    val, train = check_corpus(tmp_path / "once", texts)
    rc, _, stderr = run("tokenize_text.py", tmp_path / "twice", folder / "posts.jsonl", folder / "files",
                        "--field", "body", "--val-fraction", 0.2, "--procs", 2)
    assert rc == 0, stderr
    assert shard_documents(tmp_path / "twice", "val")[0] == val
    assert shard_documents(tmp_path / "twice", "train")[0] == train + train
    assert json.loads((tmp_path / "twice" / "report.json").read_text())["copies_removed"] == len(val)


def test_long_documents_keep_their_order(tmp_path):
    """Each of several parts; twice the same one, which must not be in both splits."""
    texts = [" ".join(prose(1_500, seed)) for seed in (5, 6)] + ["short"]
    (tmp_path / "long.txt").write_text("\n====\n".join([*texts, texts[0]]))
    shards = []
    for procs in (1, 2):
        out = tmp_path / f"out{procs}"
        rc, _, stderr = run("tokenize_text.py", out, tmp_path / "long.txt", "--separator", r"\n====\n",
                            "--val-fraction", 0.5, "--procs", procs)
        assert rc == 0, stderr
        shards.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert shards[0] == shards[1]
    val, train = shard_documents(out, "val")[0], shard_documents(out, "train")[0]
    assert set(val + train) == set(texts) and not set(val) & set(train) and len(val) == len(set(val))


def children(pid):
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [other for child in found for other in [child, *children(child)]]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_killed_half_way(tmp_path, sent):
    texts = prose(1_000, seed=7) * 8
    with open(tmp_path / "posts.jsonl", "w") as f:
        f.writelines(json.dumps({"text": f"{i} {text}"}) + "\n" for i, text in enumerate(texts))
    out = tmp_path / "out"
    command = [sys.executable, REPO / "data" / "tokenize_text.py", out, tmp_path / "posts.jsonl",
               "--procs", "2", "--shard-tokens", "100000"]
    process, workers = subprocess.Popen(command, stderr=subprocess.PIPE, text=True), []
    try:
        end = time.monotonic() + DEADLINE_S
        while len(list(tmp_path.glob("out.partial/*.bin"))) < 4:  # at least two are whole by now
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        workers = children(process.pid)
        assert len(workers) >= 2
        process.send_signal(sent)
        _, stderr = process.communicate(timeout=20)  # until the workers, which hold stderr too, have ended
        assert not out.exists()
        if sent == signal.SIGTERM:
            assert process.returncode == 130 and "was not made" in stderr and not list(tmp_path.glob("out*"))
        left = list(tmp_path.rglob("*.bin"))
        assert len(left) >= (4 if sent == signal.SIGKILL else 0)
        for path in left:
            with pytest.raises(check_shards.DataError, match="unfinished"):
                check_shards.shard_length(path)
    finally:
        for pid in [process.pid, *map(int, workers)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
    if sent == signal.SIGKILL:
        again_within_bounds(command, sum(len(text) for text in texts))
        assert sorted(path.name for path in tmp_path.glob("out*")) == ["out"]


def again_within_bounds(command, n_bytes):
    """Runs to the end; checks the rate it reports and the memory of all its processes together."""
    start, peak_kib = time.monotonic(), {}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        assert time.monotonic() - start < DEADLINE_S
        for pid in [process.pid, *map(int, children(process.pid))]:
            with contextlib.suppress(OSError, IndexError):
                status = Path(f"/proc/{pid}/status").read_text()
                peak_kib[pid] = int(re.findall(r"VmHWM:\s+(\d+)", status)[0])
        time.sleep(0.02)
    stdout, stderr = process.communicate()
    seconds = time.monotonic() - start
    assert process.returncode == 0, stderr
    assert len(peak_kib) >= 3 and sum(peak_kib.values()) < 1_000_000
    rate = re.search(r"([\d.]+) MB/s in 2 processes", stdout)
    assert float(rate[1]) > 0.9 * n_bytes / 1e6 / seconds


def test_messages(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin1"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n{"body": "b"}\n')
    (tmp_path / "cut.jsonl").write_text('{"text": "a"}\n{"text": "b\n')
    (tmp_path / "none").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "text_train_000001.bin").write_bytes(b"")
    cases = [
        ("out", "missing.txt", [], "missing.txt is not there"),
        ("out", "none", [], "none holds no text, want .txt, .jsonl, .parquet"),
        ("out", "full/text_train_000001.bin", [], "is unknown, want"),
        ("out", "latin.txt", [], "latin.txt is not UTF-8"),
        ("out", "rows.jsonl", [], "rows.jsonl, line 3 has no text in field 'text'; found: body"),
        ("out", "cut.jsonl", [], "cut.jsonl, line 2 is not JSON"),
        ("out", "a.txt", ["--val-fraction", "0.5"], "of 1 documents fell to text_"),
        ("full", "a.txt", [], "full exists and is not an empty folder"),
        ("a.txt/out", "a.txt", [], "Fix: check the disk, the paths"),
        ("out", "a.txt", ["--val-fraction", "0.7"], "found '0.7', want a share from 0 to 0.5"),
        ("out", "a.txt", ["--procs", "none"], "found 'none', want 1 to 512"),
        ("out", "a.txt", ["--name", "a/b"], "found 'a/b', want letters"),
    ]
    for out, source, more, message in cases:
        rc, _, stderr = run("tokenize_text.py", tmp_path / out, tmp_path / source, "--procs", 1, *more)
        assert rc and message in stderr, (message, stderr)
        assert "Fix:" in stderr or "want" in stderr
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out.partial*"))


def test_two_runs_into_one_folder(tmp_path):
    from filelock import FileLock
    (tmp_path / "a.txt").write_text("one document")
    with FileLock(tmp_path / "out.partial.lock"):
        rc, _, stderr = run("tokenize_text.py", tmp_path / "out", tmp_path / "a.txt", "--val-fraction", 0)
    assert rc == 1 and "Another run is writing" in stderr
    assert run("tokenize_text.py", tmp_path / "out", tmp_path / "a.txt", "--val-fraction", 0)[0] == 0


# ======== check_shards.py =============================================================================

BAD_SHARDS = {
    "claims more": (shard(docs(1_000, 100, 0), claim=2_000), "says 2,000 tokens, 1,000.0 are there"),
    "claims fewer": (shard(docs(2_000, 100, 0), claim=1_000), "says 1,000 tokens, 2,000.0 are there"),
    "one byte more": (shard(docs(1_000, 100, 0), tail=b"\0"), "says 1,000 tokens, 1,000.5 are there"),
    "empty": (b"", "0 bytes, want at least 1,024.\n  It is empty or all zeros"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64, "Git LFS pointer"),
    "page": (b"<html>404 not found</html>" * 100, "looks like an HTML page"),
    "magic": (shard(docs(50_000, 100, 0), magic=20240801), "starts with 20240801, want 20240520.\n  That is"),
    "version": (shard(docs(50_000, 100, 0), version=2), "has shard version 2, want 1"),
    "no BOS": (shard(np.ones(50_000)), "has no BOS (50256) in its 50,000 tokens"),
    "ids": (shard(np.r_[docs(10, 10, 0), [60_000] * 10]), "token id 60000 at offset 10, want at most"),
}


def test_bad_shards_are_named(tmp_path):
    (tmp_path / "good_train_000001.bin").write_bytes(shard(docs(2_000, 100, 0)))
    for kind, (blob, message) in BAD_SHARDS.items():
        path = tmp_path / "bad_train_000002.bin"
        path.write_bytes(blob)
        rc, stdout, stderr = run("check_shards.py", tmp_path)
        assert rc == 1 and f"BAD  {path}" in stderr and message in stderr and "Fix:" in stderr, (kind, stderr)
        assert "ok   " in stdout and "2,000 tokens, 20 documents" in stdout


def test_statistics_over_shard_borders(tmp_path):
    """A document that runs over the border counts once, with its whole length."""
    tokens = docs(3_000, 3_000, 0)
    tokens[[700, 1_500, 2_600]] = BOS
    (tmp_path / "a_train_000001.bin").write_bytes(shard(tokens[:1_000]))
    (tmp_path / "a_train_000002.bin").write_bytes(shard(tokens[1_000:]))
    rc, stdout, _ = run("check_shards.py", tmp_path)
    assert rc == 0 and "the first 500 tokens continue a document" in stdout
    assert "3,000 tokens, 4 documents; tokens per document: mean 750.0, median 750, min 400, " in stdout


def test_overlap_is_found_wherever_it_lies(tmp_path, monkeypatch):
    """Blocks at any offset, whole short documents, and across the borders of the windows it works in."""
    monkeypatch.setattr(check_shards, "WINDOW", 3_000)
    val, train = docs(40_000, 4_000, 1), docs(50_000, 700, 2)
    val[20_000::200] = BOS                             # 5 long documents: 7 blocks each; then 100 short ones
    train[11_111:11_111 + 512] = val[1:513]            # a block, inside another document
    train[2_700:2_700 + 1_024] = val[4_001:5_025]      # two blocks, over a window's border
    train[30_000:30_201] = np.append(val[20_200:20_400], BOS)  # a short document, whole
    train[40_000:40_150] = val[20_400:20_550]          # only a part of one: no copy
    for name, tokens in (("x_val_000000.bin", val), ("x_train_000001.bin", train)):
        (tmp_path / name).write_bytes(shard(tokens))
    _, n_found, _ = check_shards.overlap([tmp_path / "x_val_000000.bin"], [tmp_path / "x_train_000001.bin"])
    assert n_found == 4
    monkeypatch.undo()
    rc, stdout, stderr = run("check_shards.py", tmp_path)
    share = 100 * (3 * 512 + 199) / (5 * 7 * 512 + 100 * 199)
    assert rc == 0 and "overlap: 4 of 135 validation pieces" in stdout and f": {share:.2f} % of" in stdout
    rc, _, stderr = run("check_shards.py", tmp_path, "--max-overlap", 4)
    assert rc == 1 and f"{share:.2f} % of validation is in the training shards, want at most 4 %" in stderr
    rc, _, stderr = run("check_shards.py", "--val", tmp_path / "x_val_000000.bin", "--", tmp_path)
    assert rc == 0, stderr
    assert run("check_shards.py", tmp_path / "nothing.bin")[0] == 1
    assert run("check_shards.py")[0] == 2


# ======== The trainer ==================================================================================

def test_trainer_trains_on_them(tmp_path):
    with open(tmp_path / "posts.jsonl", "w") as f:
        f.writelines(json.dumps({"text": text}) + "\n" for text in prose(1_500, seed=8))
    rc, _, stderr = run("tokenize_text.py", tmp_path / "out", tmp_path / "posts.jsonl", "--procs", 2,
                        "--val-fraction", 0.1, "--shard-tokens", 200_000)
    assert rc == 0, stderr
    done = subprocess.run([sys.executable, "train_gpt.py", "tiny", "stop=4", "val_tokens=4096",
                           f"train_files={tmp_path}/out/text_train_*.bin",
                           f"val_files={tmp_path}/out/text_val_*.bin", f"log_dir={tmp_path}/logs"],
                          env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads that wait for cores cost most
                          cwd=REPO, text=True, capture_output=True, timeout=3 * DEADLINE_S)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    val_loss = re.search(r"val_loss: +(\d+\.\d+)", done.stdout)
    assert val_loss and float(val_loss[1]) < np.log(BOS) - 0.1, done.stdout[-2_000:]
