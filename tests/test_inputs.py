"""Inputs as they really occur, right and wrong: the trainer started as a user starts it, on shards made here.

A wrong input is refused before anything slow: exit code 1, one FAILED line that says what was found where and
what was wanted, no traceback, no log. An unusual but right one works to the last line of the log.
"""

import math
import re
import socket

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPT, docs, losses, read_log, run, shard

GOOD = docs(50_000, 100, seed=0)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 200001024\n"
WEB_PAGE = b"<html>404 not found</html>" * 100
CHECKED = "phase: model"   # begins a line of the log that follows all checks


@pytest.fixture
def folder(tmp_path):
    """A folder with one good training shard, train_1.bin, and one good validation shard, val.bin."""
    shard(tmp_path / "train_1.bin", GOOD)
    shard(tmp_path / "val.bin", docs(5000, 100, seed=9))
    return tmp_path


def words(folder, *more, preset="tiny"):
    """Command line of a run of a few steps on the shards in a folder; later words win."""
    return [preset, "stop=2", f"train_files={folder}/train_*.bin", f"val_files={folder}/val.bin",
            "val_tokens=4096", "val_seq=2048", f"log_dir={folder}/logs", *more]


def refusal(folder, *more, preset="tiny", ranks=1, **env):
    """Start a run that must be refused; returns its FAILED line, of which one process writes exactly one."""
    done = run(words(folder, *more, preset=preset), ranks, **env)
    lines = [line for line in done.stderr.splitlines() if line.startswith("FAILED: ")]
    assert done.returncode == 1, done.stderr
    assert len(lines) == 1 if ranks == 1 else lines, done.stderr
    assert CHECKED not in done.stdout
    assert f'File "{SCRIPT}"' not in done.stderr   # torchrun adds a traceback of its own
    assert not list((folder / "logs").glob("*"))
    return lines[0]


def complete(folder, *more, steps=2):
    """Start a run that must work; returns lines and values of its log."""
    done = run(words(folder, f"stop={steps}", *more))
    assert done.returncode == 0, done.stderr
    assert CHECKED in done.stdout
    lines, values = read_log(folder / "logs")
    assert lines[-1] == "end: ok"
    assert len(losses(lines)) == steps == int(values["steps"])
    assert math.isfinite(float(values["val_loss"]))
    return lines, values


def holds(line, *parts):
    """The line has all parts; its numbers may be written with or without separators."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", line)
    missing = [str(part) for part in parts if str(part) not in plain]
    assert not missing, f"{missing} not in {line!r}"


# ---- shards

@pytest.mark.parametrize("n, fault, found, wanted", [
    (1000, {"claim": 2000}, "present are 1000", "claims 2000"),
    (2000, {"claim": 1000}, "present are 2000", "claims 1000"),
    (1000, {"tail": b"\x00"}, "present are 1000", "claims 1000"),
    (50_000, {"magic": 20240801}, 20240801, 20240520),
    (50_000, {"version": 2}, "version 2", "want 1"),
], ids=["cut", "too long", "odd byte", "magic", "version"])
def test_header_that_lies(folder, n, fault, found, wanted):
    """A header that disagrees with the file, or is another format's, is refused with both values."""
    path = shard(folder / "train_1.bin", docs(n, 100, seed=0), **fault)
    holds(refusal(folder), path, found, wanted)


@pytest.mark.parametrize("content, looks", [
    (b"", "an empty file"), (LFS_POINTER, "Git LFS pointer"), (WEB_PAGE, "a web page")],
    ids=["empty", "lfs pointer", "web page"])
@pytest.mark.parametrize("name", ["train_1.bin", "val.bin"])
def test_file_that_is_no_shard(folder, name, content, looks):
    """What lies there instead of a shard is recognised, and the downloader named."""
    (folder / name).write_bytes(content)
    holds(refusal(folder), folder / name, looks, "data/cached_fineweb10B.py")


@pytest.mark.parametrize("ranks", [1, 2])
def test_bad_shard_among_good_ones(folder, ranks):
    """One bad shard of three is refused at the start, on one rank and on two, even if no step reaches it."""
    for i in range(3):
        shard(folder / f"train_{i}.bin", docs(20_000, 100, seed=i), claim=40_000 if i == 1 else None)
    holds(refusal(folder, "stop=8", ranks=ranks), folder / "train_1.bin", 40000, 20000)


@pytest.mark.parametrize("starts, found", [([], "no document start"), ([49_999], "the first document start")],
                         ids=["none", "last token"])
def test_documents_without_bos(folder, starts, found):
    """Tokens of another tokenizer have no BOS where one is due: id, file and number of tokens are named."""
    tokens = np.ones(50_000, np.uint16)
    tokens[starts] = 50256
    for i in (1, 2):
        shard(folder / f"train_{i}.bin", tokens)
    holds(refusal(folder), folder / "train_1.bin", found, "BOS, id 50256", "50000 tokens")


@pytest.mark.parametrize("name", ["train_1.bin", "val.bin"])
def test_id_outside_the_vocabulary(folder, name):
    """An id that the model has no row for is refused with its position, not met as a failed look-up."""
    tokens = docs(50_000, 100, seed=0)
    tokens[10:20] = 60_000
    path = shard(folder / name, tokens)
    holds(refusal(folder), path, "id 60000", "token 10,", 50257, 50304)


def test_no_files(folder):
    """A pattern that names no file is refused with the pattern and the folder from which it was looked up."""
    pattern = f"train_files={folder}/fineweb_*.bin"
    holds(refusal(folder, pattern), pattern, "no such file", ROOT)


@pytest.mark.parametrize("how", ["itself", "link", "copy"])
def test_validation_file_among_the_training_files(folder, how):
    """A file cannot be both, under its own name or another one, nor can a copy."""
    path = one = folder / "train_1.bin"
    if how != "itself":
        path = folder / "other.bin"
        path.symlink_to(one) if how == "link" else path.write_bytes(one.read_bytes())
    holds(refusal(folder, f"val_files={path}"), path, one, "validation", "training")


# ---- amounts

def test_one_shard_is_enough(folder):
    """A single training shard that holds enough tokens works."""
    lines, values = complete(folder, steps=10)
    assert values["tokens"] == "20480"
    assert values["train_tokens"] == "50,000 usable"
    assert values["epochs"] == "1"


def test_too_few_tokens(folder, tg):
    """The tokens that all steps need and those present are named before the first step."""
    shard(folder / "train_2.bin", docs(50_000, 100, seed=1))
    cfg, needed, before = tg.PRESETS["tiny"], 0, 0
    for stage, end in zip(cfg.stages, cfg.stage_ends, strict=True):
        needed += (end - before) * cfg.n_micro * (stage.T + 1)
        before = end
    line = refusal(folder, "stop=0")
    holds(line, f"{cfg.n_steps} steps", needed, 100000, folder / "train_*.bin", "repeat=true")


def test_repeated_data(folder, tg):
    """With repeat=true too few tokens work, and the log says in which step the second epoch begins."""
    for i in (1, 2):
        shard(folder / f"train_{i}.bin", docs(3000, 100, seed=i))
    cfg = tg.PRESETS["tiny"]
    docs_a_step = cfg.n_micro * -(-(cfg.stages[0].T + 1) // 100)   # every micro-batch begins with a new one
    lines, values = complete(folder, "repeat=true", steps=4)
    assert f"epoch 2 | begins in step {60 // docs_a_step + 1}" in lines
    assert sum(line.startswith("epoch ") for line in lines) == 1
    assert values["epochs"] == "2"


def test_documents_of_four_tokens(folder):
    """There is no table of documents that very short ones could overflow."""
    for i in (1, 2):
        shard(folder / f"train_{i}.bin", docs(60_000, 4, seed=0))
    complete(folder)


def test_validation_file_just_long_enough(folder, tg, one_rank):
    """val_tokens + 1 tokens are enough for val_tokens targets, the last of which is the file's last token."""
    tokens = docs(4097, 100, seed=9)
    shard(folder / "val.bin", tokens)
    streams = tg.read_validation(tg.parse(words(folder)), one_rank, tg.Vocabulary("data/gpt2_vocab.bin", True))
    assert np.array_equal(torch.cat([targets[:, 0] for _, _, _, targets, _, _ in streams]), tokens[1:])
    complete(folder)


def test_validation_file_too_short(folder):
    """One token less is refused with both amounts."""
    path = shard(folder / "val.bin", docs(4096, 100, seed=9))
    holds(refusal(folder), path, "val_tokens=4096", 4097, "4096 in")


def test_validation_tokens_no_multiple(folder):
    """Validation tokens that do not fill whole streams are refused, with the next lower number that does."""
    holds(refusal(folder, "val_tokens=4100"), "val_tokens=4100", "val_seq=2048", "val_tokens=4096")


# ---- launch

def rendezvous():
    """Address and a free port for ranks that are started by hand."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}


def test_plain_python(folder):
    """Without torchrun the trainer runs as one process; it may stop after an odd number of steps."""
    lines, values = complete(folder, steps=1)
    assert values["world"] == "1"


@pytest.mark.parametrize("env", [{"RANK": "0"}, {"WORLD_SIZE": "3"}], ids=["RANK", "WORLD_SIZE"])
def test_half_an_environment(folder, env):
    """Some of torchrun's variables without the others: both are listed."""
    (present,) = env
    absent = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - {present}
    holds(refusal(folder, **env), f"has {present}", *absent, "torchrun")


def test_three_ranks(folder):
    """A number of ranks that does not divide the micro-batches is refused with those that do."""
    holds(refusal(folder, ranks=3), "world size 3", "1, 2, 4, 8", "n_micro=8")


@pytest.mark.parametrize("started", [0, 1])
def test_rank_that_never_starts(folder, started):
    """One of two ranks alone gives up after join_limit_s and says for whom it waited."""
    env = rendezvous() | {"RANK": str(started), "LOCAL_RANK": str(started), "WORLD_SIZE": "2"}
    line = refusal(folder, "join_limit_s=5", **env)
    holds(line, f"rank {started}", "waited 5 s", f"rank {1 - started}", "Start all 2 ranks")


# ---- settings

@pytest.mark.parametrize("argv, parts", [
    (["tinny"], ["'tinny'", "Did you mean 'tiny'?", "record, solo, tiny"]),
    (["tiny", "anivl_lr=0.1"], ["anivl_lr", "Did you mean 'anvil_lr'?"]),
    (["record", "n_sched=1060"], ["n_sched=1060", "1132", "1058", "1062"]),
], ids=["preset", "key", "schedule"])
def test_setting_that_cannot_be(folder, argv, parts):
    """A misspelt or impossible setting is answered with the nearest one that can be."""
    holds(refusal(folder, *argv[1:], preset=argv[0]), *parts)


def test_log_folder_that_cannot_be(folder):
    """A log folder below a regular file is refused before the run, not met when the first line is written."""
    log_dir = folder / "val.bin" / "logs"
    line = refusal(folder, f"log_dir={log_dir}")
    holds(line, f"log_dir={log_dir}", "Not a directory", "log_dir=PATH")


@pytest.mark.parametrize("name, found", [("none/weights.pt", "folder does not exist"), (".", "is a folder")],
                         ids=["no folder", "a folder"])
def test_save_into_no_file(folder, name, found):
    """Weights that could not be saved at the end are refused at the start."""
    holds(refusal(folder, f"save={folder}/{name}"), f"save={folder}/{name}", found)


def test_saved_weights(folder, tg):
    """save=PATH leaves one file with the config and the weights, readable without running code from it."""
    path = folder / "weights.pt"
    lines, _ = complete(folder, f"save={path}", steps=4)    # some weights move only behind others, with step 4
    assert f"saved: {path}" in lines
    assert not list(folder.glob("*.part"))
    saved = torch.load(path, weights_only=True)
    cfg = tg.PRESETS["tiny"]
    assert saved["config"]["d_model"] == cfg.d_model
    model = tg.Model(cfg, torch.device("cpu"))
    fresh = {name: p.clone() for name, p in model.state_dict().items()}
    model.load_state_dict(saved["weights"])
    assert all(p.isfinite().all() for p in model.state_dict().values())
    assert [name for name, p in model.state_dict().items() if torch.equal(p, fresh[name])] == ["signs"]   # the seed's
