"""Failures inside a run: one rank fails, and all must end soon, with one cause on stderr and in the log.

Each run is started through a driver, a script that imports the trainer, plants a fault in one rank and then
calls main as the command line does. It leaves behind the ids of all processes and the time of the fault.
"""

import math
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT, bare_env, command, docs, losses, read_log, run, shard

LIMIT_S = 60        # from a fault to the end of the last process
FAULT_STEP = 3
OLD_LOG = "20200101-000000_tiny_seed1.log"
OLD_TEXT = "val_loss: 3.279000\nend: ok\n"
DRIVER = """
import os, sys, time
from pathlib import Path

sys.path.insert(0, {root!r})
import train_gpt

folder, rank = Path(__file__).parent, int(os.environ.get("RANK", 0))
(folder / f"{{os.getpid()}}.pid").touch()


def plant(owner, name, at):
    "Before call number `at` of a function of the trainer comes the fault."
    original, calls = getattr(owner, name), []

    def wrapper(*args, **options):
        calls.append(1)
        if len(calls) == at:
            (folder / "fault").write_text(str(time.time()))
            fault()
        return original(*args, **options)
    setattr(owner, name, wrapper)


def fault():
    {deed}


if rank == {rank}:
    plant({owner}, {name!r}, {at})
train_gpt.main()
"""
KILL = "os.kill(os.getpid(), 9)"
NAN = """forward = train_gpt.Model.forward
    train_gpt.Model.forward = lambda *args: float('nan') * forward(*args)"""


@pytest.fixture
def folder(tmp_path):
    """A folder with shards and the log of an older run."""
    shard(tmp_path / "train.bin", docs(50_000, 100, seed=0))
    shard(tmp_path / "val.bin", docs(5000, 100, seed=9))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / OLD_LOG).write_text(OLD_TEXT)
    return tmp_path


def words(folder, *more):
    """Command line of a short run of a narrow network on the shards in a folder; later words win."""
    return ["tiny", "stop=4", "n_micro=2", "d_model=24", "d_head=4", "d_mlp=88",
            f"train_files={folder}/train.bin", f"val_files={folder}/val.bin", "val_tokens=512", "val_seq=256",
            f"log_dir={folder}/logs", *more]


def driver(folder, deed="pass", rank=0, owner="train_gpt", name="train_step", at=FAULT_STEP):
    """Write the driver: in this rank, call number `at` of owner.name begins with the deed."""
    path = folder / "driver.py"
    path.write_text(DRIVER.format(root=str(ROOT), deed=deed, rank=rank, owner=owner, name=name, at=at))
    return path


def lives(pid):
    """Whether a process is there and is more than an entry in the table of processes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def check_end(folder, code, stderr, ranks, reports=1):
    """What every failure must leave behind; returns the new log's lines.

    reports: most FAILED lines that may be on stderr; ranks that have lost their store cannot agree on one.
    """
    now = time.time()
    assert code not in (0, None), stderr
    assert now - float((folder / "fault").read_text()) < LIMIT_S, stderr
    pids = [path.stem for path in folder.glob("*.pid")]
    assert len(pids) == ranks
    assert not any(map(lives, pids))
    assert 1 <= sum(line.startswith("FAILED: rank ") for line in stderr.splitlines()) <= reports, stderr
    old = folder / "logs" / OLD_LOG
    assert old.read_text() == OLD_TEXT
    old.unlink()
    lines, _ = read_log(folder / "logs")
    assert lines[-1].startswith("end: FAILED rank "), lines
    assert sum(line.startswith("end:") for line in lines) == 1, lines
    return lines


def send_at_fault(folder, process, number):
    """Send a signal when the planted place is reached."""
    until = time.monotonic() + 2 * LIMIT_S
    while not (folder / "fault").exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(number)


def failed(folder, ranks, *more, **planted):
    """Run with a fault planted, check the end, and return the log's last line."""
    done = run(words(folder, *more), ranks, script=driver(folder, **planted))
    return check_end(folder, done.returncode, done.stderr, ranks)[-1]


def holds(line, *parts):
    """The line has all parts; its numbers may be written with or without separators."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", line)
    missing = [str(part) for part in parts if str(part) not in plain]
    assert not missing, f"{missing} not in {line!r}"


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed(folder, rank):
    """A rank that dies without a word ends the others; the lowest living rank writes the log's last line."""
    line = failed(folder, 2, deed=KILL, rank=rank)
    holds(line, f"rank {1 - rank}: rank {rank} died without a word")


def test_loss_not_finite_on_one_rank(folder):
    """All ranks stop at a loss that only one of them saw, and the log names that rank and the step."""
    line = failed(folder, 2, deed=NAN, rank=1)
    holds(line, f"the loss of step {FAULT_STEP} is not finite on rank 1.")


def test_error_in_the_loader(folder):
    """An error in a rank's worker thread is raised where its batch is due."""
    line = failed(folder, 2, deed="raise OSError('the disk is gone')", rank=1, owner="train_gpt.Loader",
                  name="_fill")
    holds(line, "rank 1: OSError: the disk is gone")


@pytest.mark.parametrize("error", ["ValueError", "RuntimeError"])
def test_error_in_one_rank(folder, error):
    """The rank whose error it was is blamed, not the one that waits for it."""
    line = failed(folder, 2, deed=f"raise {error}('no such thing')", rank=1)
    holds(line, f"end: FAILED rank 1: {error}: no such thing")


def test_hang_of_one_rank(folder):
    """A rank that makes no progress ends the run after step_limit_s."""
    line = failed(folder, 2, "step_limit_s=8", deed="time.sleep(1000)", rank=1)
    holds(line, "no progress for 8 s")


def test_data_at_an_end(folder):
    """Headers can promise more than documents cut to size hold: the run says so, after the steps it took."""
    shard(folder / "train.bin", docs(40_000, 1000, seed=0))
    done = run(words(folder, "stop=12"), script=driver(folder, at=1))
    lines = check_end(folder, done.returncode, done.stderr, ranks=1)
    holds(lines[-1], "the training data is at an end", "40 documents", "40000 tokens", "112")
    assert len(losses(lines)) == 6


def test_id_outside_the_vocabulary_late_in_a_shard(folder):
    """Only the first million ids are looked at beforehand; one behind them is met when its batch is made."""
    tokens = docs(1_300_000, 100_000, seed=0)
    tokens[1_100_010] = 60_000
    path = shard(folder / "train.bin", tokens)
    holds(failed(folder, 1, at=1), path, "id 60000", "token 1100010")


def test_log_that_cannot_be_ended(folder):
    """If the line that makes a run complete cannot be written, the run has failed."""
    line = failed(folder, 1, deed="raise OSError('the disk is full')", owner="train_gpt.Log", name="end",
                  at=1)
    holds(line, "the disk is full")


def start(folder, ranks, *more, **planted):
    """Start a run without waiting for it."""
    argv, pipe = command(words(folder, *more), ranks, driver(folder, **planted)), subprocess.PIPE
    return subprocess.Popen(argv, cwd=ROOT, env=bare_env(), text=True, stdout=pipe, stderr=pipe)


@pytest.mark.parametrize("name, ranks", [("SIGTERM", 1), ("SIGINT", 1), ("SIGTERM", 2)])
def test_signal(folder, name, ranks):
    """A run that is told to stop, as one process or through its launcher, says so in its log."""
    with start(folder, ranks, "stop=0", at=2) as process:
        send_at_fault(folder, process, getattr(signal, name))
        _, stderr = process.communicate(timeout=LIMIT_S)
    holds(check_end(folder, process.returncode, stderr, ranks)[-1], name)


def test_launcher_killed(folder):
    """Ranks whose launcher was killed do not train on: the store has gone with it, and the log still ends."""
    with start(folder, 2, "stop=0", at=2) as process:
        send_at_fault(folder, process, signal.SIGKILL)
        _, stderr = process.communicate(timeout=LIMIT_S)   # until the last rank has closed its end
    holds(check_end(folder, process.returncode, stderr, 2, reports=2)[-1], "the store is gone")


def test_terminal_gone(folder):
    """A reader of the output that closes it does not cost the log."""
    with start(folder, 1) as process:
        process.stdout.close()
        process.stderr.read()
    (folder / "logs" / OLD_LOG).unlink()
    assert read_log(folder / "logs")[0][-1].startswith("end: ")


def test_no_fault(folder):
    """The same driver with nothing planted, on four ranks: the run is complete and no process is left."""
    done = run(words(folder, "stop=6", "n_micro=8"), 4, script=driver(folder, rank=None))
    assert done.returncode == 0, done.stderr
    assert not any(lives(path.stem) for path in folder.glob("*.pid"))
    (folder / "logs" / OLD_LOG).unlink()
    lines, values = read_log(folder / "logs")
    assert lines[-1] == "end: ok"
    assert len(losses(lines)) == int(values["steps"]) == 6
    assert math.isfinite(float(values["val_loss"]))
