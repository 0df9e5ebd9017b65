"""The downloader and the real client library against a hub on 127.0.0.1: every fault ends as it should."""

import errno
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_server import Hub, docs, fineweb, shard

SCRIPT = Path(__file__).resolve().parents[1] / "data" / "cached_fineweb10B.py"
VAL, TRAIN1, TRAIN2 = "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"
SMALL = fineweb()
BIG = SMALL | {VAL: shard(docs(1_000_000, 100, 7))}  # the client reads it in several parts
DEADLINE_S = 60


def command(out, *arguments):
    return [sys.executable, str(SCRIPT), "--out", str(out), "--backoff", "0.1", *map(str, arguments)]


def environment(hub, home):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return {**inherited, "HF_ENDPOINT": hub.endpoint if hub else "http://127.0.0.1:9", "HF_HOME": str(home),
            "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@pytest.fixture
def place(tmp_path):
    """Runs the downloader with its folder in `place.out`; whatever it started is gone afterwards."""
    class Place:
        out, home = tmp_path / "fineweb10B", tmp_path / "home"
        started = []

        def start(self, hub, *arguments, out=None, **more):
            env = environment(hub, self.home) | more.pop("env", {})
            process = subprocess.Popen(command(out or self.out, *arguments), env=env, text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
            self.started.append(process)
            return process

        def run(self, hub, *arguments, **more):
            process = self.start(hub, *arguments, **more)
            stdout, stderr = process.communicate(timeout=DEADLINE_S)
            assert "Traceback" not in stdout + stderr, stderr
            return process.returncode, stdout, stderr

        def named(self, files=None):
            """The shards under a final name; each must be right."""
            names = sorted(path.name for path in self.out.glob("*.bin")) if self.out.is_dir() else []
            for name in names:
                assert (self.out / name).read_bytes() == (files or SMALL)[name], f"wrong bytes in {name}"
            return names

        def leftovers(self):
            return [str(path) for path in self.out.rglob("*")
                    if ".incoming" in path.parts or "partial" in path.name]

    here = Place()
    yield here
    for process in here.started:
        process.kill()
        process.communicate()


# ======== It works ====================================================================================

def test_good_then_offline(place):
    with Hub(SMALL) as hub:
        rc, stdout, stderr = place.run(hub, 2, env={"HF_TOKEN": "hf_abc"})
        assert rc == 0, stderr
        assert "2 train + 1 val" in stdout and "6,000 tokens" in stdout
        assert "2 train + 1 val: 100%" in stderr and "B/s" in stderr
        assert place.named() == [TRAIN1, TRAIN2, VAL] and not place.leftovers()
        asked = [(server, token) for server, method, path, _, token in hub.requests if "agent" not in path]
        assert {token for server, token in asked if server == "hub"} == {"Bearer hf_abc"}
        assert {token for server, token in asked if server == "storage"} == {None}
        n_requests = len(hub.requests)
        assert place.run(hub, 2)[0] == 0 and len(hub.requests) == n_requests
    record = json.loads((place.out / (VAL + ".json")).read_text())
    status = (place.out / VAL).stat()
    assert record == {"etag": hashlib.sha256(SMALL[VAL]).hexdigest(), "size": status.st_size,
                      "mtime_ns": status.st_mtime_ns}
    (place.out / ".incoming").mkdir()  # left by a killed run that wanted more shards
    (place.out / ".incoming" / "old.incomplete").write_bytes(b"x")
    rc, stdout, _ = place.run(None, 2)
    assert rc == 0 and "all checked" in stdout and not place.leftovers()
    assert place.run(None, 2, "--verify")[0] == 0


def test_all_and_the_short_last_shard(place):
    """Without N all 103; those already there are recognised by their hash, so that few are fetched here."""
    place.out.mkdir()
    for name in list(SMALL)[1:-1]:
        (place.out / name).write_bytes(SMALL[name])
    with Hub(SMALL) as hub:
        rc, stdout, stderr = place.run(hub)
        assert rc == 0, stderr
        assert sum(hub.count(name) for name in SMALL) == 2
    assert "103 train + 1 val" in stdout
    assert "fineweb_train_000103.bin is the last shard, 1,000 tokens: shorter than the others" in stdout
    assert len(place.named()) == 104


# ======== Faults of the network and the hub =============================================================

RECOVERS = {
    "stalled": ["stall"],
    "cut in the middle": ["cut"],
    "cut before the first byte": ["none"],
    "too short, and says so": ["short"],
    "wrong bytes": ["wrong"],
    "416 when it resumes": ["cut", "416"],
    "429": ["429 1"],
    "503 twice": ["503", "503"],
    "503 to HEAD": ["head 503"],
    "slow but alive": ["slow"],
}


def test_recovers(place):
    """One run meets every fault, each on a shard of its own, and brings all of them home."""
    fault_of = dict(zip(list(SMALL)[1:], RECOVERS, strict=False))
    name_of = {fault: name for name, fault in fault_of.items()}
    files = SMALL | {name: shard(docs(300_000, 100, seed)) for seed, name in enumerate(fault_of)}
    with Hub(files, {name: RECOVERS[fault] for name, fault in fault_of.items()}) as hub:
        rc, _, stderr = place.run(hub, len(fault_of), "--timeout", 8, "--jobs", 4)
        assert rc == 0, stderr
        assert not any(hub.faults.values())
        # The client itself goes on where the line was cut; all else begins again.
        resumed = {path.rsplit("/")[-1] for *_, path, wanted, _ in hub.requests if wanted}
        assert resumed == {name_of["cut in the middle"], name_of["416 when it resumes"]}
    assert len(place.named(files)) == len(fault_of) + 1 and not place.leftovers()
    assert f"{name_of['stalled']}: no progress for 8 s after 262,144 of 601,024 bytes; try 2" in stderr
    assert f"{name_of['429']}: the hub limits the rate, waiting 2 s" in stderr
    assert name_of["slow but alive"] not in stderr


def test_recovers_from_faults_of_the_file_list(place):
    with Hub(SMALL, {"list": ["429 2", "503", "stall"]}) as hub:
        rc, stdout, stderr = place.run(hub, 0, "--timeout", 3)
        assert not hub.faults["list"]
    assert rc == 0, stderr
    title = "the file list of kjj0/fineweb10B-gpt2: "
    first, second, third = [line for line in stderr.splitlines() if line.startswith(title)]
    assert "429" in first and "try 2 of 5 in 2 s" in first
    assert "503" in second and "try 3 of 5 in 0.2 s" in second
    assert "no progress for 3 s; try 4 of 5 in 0.4 s" in third
    assert "0 train + 1 val" in stdout and place.named() == [VAL]


GIVES_UP = {
    "stalled": ("stay stall", "no progress for 5 s"),
    "wrong bytes": ("stay wrong", "wrong bytes: 5,024 with SHA-256"),
    "too short": ("stay short", "should be of size 5024"),
    "416": ("stay 416", "416"),
    "503": ("stay 503", "503"),
    "404": ("stay 404", "404"),
    "rate limit of an hour": ("stay 429 3600", "the hub asks to wait 3,601 s"),
}


def test_gives_up_and_names_what_is_missing(place):
    """The other shards arrive all the same."""
    fault_of = dict(zip(list(SMALL)[1:], GIVES_UP, strict=False))
    n_faults = len(fault_of)
    with Hub(SMALL, {name: [GIVES_UP[fault][0]] for name, fault in fault_of.items()}) as hub:
        rc, _, stderr = place.run(hub, n_faults + 1, "--tries", 2, "--timeout", 5, "--jobs", 4)
    assert rc == 1 and f"{n_faults} of {n_faults + 2} shards are missing in {place.out}" in stderr
    for name, fault in fault_of.items():
        line = next(line for line in stderr.splitlines() if line.startswith(f"  {name}"))
        assert GIVES_UP[fault][1] in line
    assert "Fix: run this again" in stderr and "Signature=secret" not in stderr
    assert place.named() == [f"fineweb_train_{n_faults + 1:06d}.bin", VAL] and not place.leftovers()


def test_hub_out_of_reach(place):
    rc, _, stderr = place.run(None, 1, "--tries", 2)
    assert rc == 1 and f"Missing: {VAL} (not there), {TRAIN1} (not there)" in stderr
    assert "Connection refused" in stderr and "check the network, HF_ENDPOINT" in stderr
    rc, _, stderr = place.run(None, 1, env={"HF_HUB_OFFLINE": "1"})
    assert rc == 1 and "offline mode is enabled" in stderr and "try 2" not in stderr


def test_dataset_without_the_file(place):
    with Hub({VAL: SMALL[VAL]}) as hub:
        rc, _, stderr = place.run(hub, 1)
    assert rc == 1 and f"has no {TRAIN1}" in stderr and f"It has 1: {VAL}" in stderr and not place.named()


def test_hub_file_is_no_shard(place):
    """Right by size and hash, and yet not what the trainer could read."""
    files = SMALL | {VAL: shard(docs(2_000, 100, 0), claim=3_000)}
    with Hub(files) as hub:
        rc, _, stderr = place.run(hub, 0)
        assert hub.count(VAL) == 1
    assert rc == 1 and "the header says 3,000 tokens, 2,000.0 are there" in stderr and not place.named()


# ======== Files that are there already ==================================================================

BAD_FILES = {
    "zero bytes": b"",
    "cut": SMALL[VAL][:-500],
    "one byte too many": SMALL[VAL] + b"\0",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 200001024\n",
    "page": b"<html>404 not found</html>" * 100,
    "other magic": shard(docs(2_000, 100, 0), magic=20240801),
}


def test_bad_files_are_replaced(place):
    (place.out / ".incoming").mkdir(parents=True)
    (place.out / ".incoming" / "old.incomplete").write_bytes(b"x")
    n = len(BAD_FILES)
    for name, blob in zip(SMALL, BAD_FILES.values(), strict=False):
        (place.out / name).write_bytes(blob)
    with Hub(SMALL) as hub:
        rc, _, stderr = place.run(hub, n - 1)
        assert rc == 0 and stderr.count("fetching it again") == n
        assert place.run(hub, n - 1)[0] == 0 and [hub.count(name) for name in list(SMALL)[:n]] == [1] * n
    assert len(place.named()) == n and not place.leftovers()


def test_bad_file_does_not_survive_without_the_hub(place):
    place.out.mkdir()
    (place.out / VAL).write_bytes(b"")
    rc, _, stderr = place.run(None, 0, "--tries", 1)
    assert rc == 1 and VAL in stderr and not place.named()


def test_changed_file_is_found(place):
    with Hub(SMALL) as hub:
        assert place.run(hub, 0)[0] == 0
        path = place.out / VAL
        before = path.stat()
        os.utime(path, ns=(1, 1))  # another mtime, the same bytes: hashed, then trusted again
        assert place.run(None, 0)[0] == 0
        assert json.loads((place.out / (VAL + ".json")).read_text())["mtime_ns"] == 1
        blob = bytearray(SMALL[VAL])
        blob[3_000] ^= 1
        path.write_bytes(blob)
        rc, _, stderr = place.run(hub, 0)
        assert rc == 0 and "was changed" in stderr and place.named() == [VAL]
        path.write_bytes(blob)     # bit rot: size and mtime as recorded
        os.utime(path, ns=(1, json.loads((place.out / (VAL + ".json")).read_text())["mtime_ns"]))
        assert path.stat().st_size == before.st_size
        assert place.run(hub, 0)[0] == 0 and path.read_bytes() == blob
        rc, _, stderr = place.run(hub, 0, "--verify")
        assert rc == 0 and "was changed" in stderr and place.named() == [VAL]


def test_own_file_under_the_name_is_kept_aside(place):
    place.out.mkdir()
    own = shard(docs(2_000, 50, 99))
    (place.out / TRAIN1).write_bytes(own)
    with Hub(SMALL) as hub:
        rc, _, stderr = place.run(hub, 1)
    assert rc == 0 and "moved to" in stderr and place.named() == [TRAIN1, VAL]
    assert (place.out / (TRAIN1 + ".not-from-hub")).read_bytes() == own


# ======== Faults of this machine ========================================================================

def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))


def test_disk_full_while_writing(place):
    """A file-size limit makes the write itself fail (EFBIG), on the path that a full disk takes (ENOSPC)."""
    with Hub(BIG) as hub:
        rc, _, stderr = place.run(hub, 1, preexec_fn=limit_file_size)
        assert rc == 1 and f"Writing {VAL} failed" in stderr and os.strerror(errno.EFBIG) in stderr
        assert "free space on the disk" in stderr and "try 2" not in stderr
        assert VAL not in place.named(BIG) and not place.leftovers()
        assert place.run(hub, 1)[0] == 0
    assert place.named(BIG) == [TRAIN1, VAL]


def test_too_little_space_is_said_before_the_first_byte(place):
    mounted = place.out.parent / "small_disk"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mounted]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        with Hub(BIG) as hub:
            rc, _, stderr = place.run(hub, 3, out=mounted)
            assert rc == 1 and "1,048,576 bytes free, want 2,016,096 for 4 shards" in stderr.replace(
                f"{os.statvfs(mounted).f_bavail * os.statvfs(mounted).f_frsize:,}", "1,048,576")
            assert not hub.count(VAL) and not list(mounted.glob("*.bin"))
            # A disk that fills up later, by somebody else's hand.
            filler = mounted / "filler"
            files = SMALL | {VAL: shard(docs(400_000, 100, 7))}
            hub.files, hub.faults = files, {VAL: ["slow"]}
            process = place.start(hub, 0, out=mounted)
            while not hub.count(VAL):
                time.sleep(0.01)
            with open(filler, "wb", buffering=0) as f, pytest.raises(OSError):
                while f.write(b"\0" * 4096):
                    pass
            _, stderr = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 1 and "No space left" in stderr and "free space" in stderr
            assert not list(mounted.glob("*.bin")) and not list(mounted.rglob("*.incomplete"))
    finally:
        subprocess.run(["umount", "-l", mounted], check=True)


def test_target_not_writable(place):
    place.out.write_bytes(b"a file")
    for out in (place.out, place.out / "below", Path("/proc/fineweb10B")):
        rc, _, stderr = place.run(None, 0, out=out)
        assert rc == 1 and f"{out} cannot be written" in stderr and "--out" in stderr
    folder = place.out.parent / "closed"
    folder.mkdir(mode=0o555)
    if os.geteuid():  # root may write anywhere
        rc, _, stderr = place.run(None, 0, out=folder)
        assert rc == 1 and f"{folder} cannot be written" in stderr


def test_folder_under_a_shard_name(place):
    (place.out / VAL).mkdir(parents=True)
    rc, _, stderr = place.run(None, 0)
    assert rc == 1 and "cannot be read: Is a directory" in stderr


def test_bad_argument(place):
    for argument in ("-1", "abc", "104", "1.5", ""):
        rc, _, stderr = place.run(None, argument)
        assert rc == 2 and f"found {argument!r}, want a number of training shards from 0 to 103" in stderr
        assert not place.out.exists()


def test_bad_options(place):
    for option in (["--jobs", "0"], ["--timeout", "nan"], ["--tries", "x"]):
        rc, _, stderr = place.run(None, 0, *option)
        assert rc == 2 and f"found {option[1]!r}, want" in stderr


# ======== Several processes, and killed ones ============================================================

def test_two_at_once(place):
    with Hub(BIG, {VAL: ["slow"]}) as hub:
        first, second = place.start(hub, 2), place.start(hub, 2)
        outputs = [process.communicate(timeout=DEADLINE_S) for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), outputs
        assert sum("Another download is at work" in stderr for _, stderr in outputs) == 1
        assert [hub.count(name) for name in (VAL, TRAIN1, TRAIN2)] == [1, 1, 1]
    assert place.named(BIG) == [TRAIN1, TRAIN2, VAL] and not place.leftovers()


def test_waiting_for_a_stopped_process_has_an_end(place):
    with Hub(BIG, {VAL: ["stay stall"]}) as hub:
        first = place.start(hub, 0)
        wait_for(lambda: hub.count(VAL))
        first.send_signal(signal.SIGSTOP)
        rc, _, stderr = place.run(hub, 0, "--timeout", 1)
    assert rc == 1 and "has done nothing for 1 s" in stderr and "end that process" in stderr


def wait_for(condition, seconds=DEADLINE_S):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(pid):
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_killed_half_way_and_again(place, sent):
    with Hub(BIG, {VAL: ["stall"]}) as hub:
        process = place.start(hub, 1)
        wait_for(lambda: (place.out / TRAIN1).exists() and any(
            path.stat().st_size > 500_000 for path in place.out.rglob("*.incomplete")))
        downloads = children(process.pid)
        assert downloads
        process.send_signal(sent)
        _, stderr = process.communicate(timeout=DEADLINE_S)
        assert place.named(BIG) == [TRAIN1]
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in downloads), seconds=5)
        if sent == signal.SIGKILL:
            assert process.returncode == -sent and place.leftovers()
        else:
            assert process.returncode == 130 and "whole shards are kept" in stderr and not place.leftovers()
        rc, _, stderr = place.run(hub, 1)
        assert rc == 0, stderr
        assert [hub.count(VAL), hub.count(TRAIN1)] == [2, 1]
    assert place.named(BIG) == [TRAIN1, VAL] and not place.leftovers()
