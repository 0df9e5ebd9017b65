"""Section 2: the launcher's variables, collectives, log and clock."""

import os
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run


def set_env(monkeypatch, tg, **values):
    for name in tg.LAUNCH_NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_without_torchrun_there_is_one_rank(tg, monkeypatch):
    set_env(monkeypatch, tg)
    assert tg.launch_env() == (0, 0, 1)
    set_env(monkeypatch, tg, MASTER_ADDR="somewhere")    # left behind by a cluster, means nothing alone
    assert tg.launch_env() == (0, 0, 1)


def test_with_torchrun_its_numbers_hold(tg, monkeypatch):
    set_env(monkeypatch, tg, RANK="5", LOCAL_RANK="1", WORLD_SIZE="8", MASTER_ADDR="a", MASTER_PORT="1")
    assert tg.launch_env() == (5, 1, 8)


@pytest.mark.parametrize("present", [("RANK",), ("WORLD_SIZE",), ("RANK", "LOCAL_RANK", "WORLD_SIZE")])
def test_a_half_set_environment_is_refused_naming_both_halves(tg, monkeypatch, present):
    set_env(monkeypatch, tg, **{name: "0" for name in present})
    with pytest.raises(tg.Refusal) as caught:
        tg.launch_env()
    said, missing = str(caught.value).split(" but not ")
    assert all(name in said for name in present)
    assert all(name in missing for name in tg.LAUNCH_NAMES if name not in present)


@pytest.mark.parametrize("wrong, said", [({"RANK": "a"}, "RANK=a: want numbers"), ({"RANK": "2"}, "RANK=2"),
                                         ({"MASTER_PORT": "http"}, "MASTER_PORT=http: want numbers")])
def test_numbers_that_cannot_be_are_refused(tg, monkeypatch, wrong, said):
    right = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    set_env(monkeypatch, tg, **right | wrong)
    with pytest.raises(tg.Refusal, match=said):
        tg.launch_env()


RANKS = """
import sys, torch
sys.path.insert(0, {root!r})
import train_gpt as tg
rank, local, world = tg.launch_env()
comm = tg.Comm(tg.PRESETS["tiny"], rank, local, world)

def numbers(r):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(r), dtype=torch.float64)

# the four micro-batches of a step, spread over the ranks and summed locally first
x = sum(numbers(m) for m in range(rank * 4 // world, (rank + 1) * 4 // world))
total = sum(numbers(m) for m in range(4))
y = x.clone()
pending = comm.all_reduce(y)
assert world == 1 or torch.equal(y, x), "a collective on the CPU starts at wait()"
pending.wait()
torch.testing.assert_close(y, total)
y = x.clone()
pending, part = comm.reduce_scatter(y)
pending.wait()
torch.testing.assert_close(part, total.chunk(world)[rank])
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    z = torch.zeros(8, 2, dtype=dtype)
    z.chunk(world)[rank].fill_(rank + 1)
    comm.all_gather(z).wait()
    assert z[:, 0].tolist() == [1 + i * world // 8 for i in range(8)]
assert comm.collect({{"rank": rank}}) == [{{"rank": r}} for r in range(world)]
clock = tg.Clock(comm)
clock.start()
tg.time.sleep(0.2 + 0.1 * rank)
clock.stop()
longest, spread = clock.over_ranks()
slowest = 0.2 + 0.1 * (world - 1)
assert slowest <= longest < slowest + 0.15 and spread < 0.02, (longest, spread)
comm.meet()
comm.close()
"""


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_collectives_and_clock_say_the_same_on_every_world_size(tmp_path, ranks):
    """Sums, slices and gathers; the clock stops for all when the slowest rank has finished."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(root=str(ROOT)))
    out = run([], ranks, cwd=tmp_path, script=script)
    assert out.returncode == 0, out.stderr


def test_clock_leaves_pauses_out(tg, one_rank):
    clock = tg.Clock(one_rank)
    for _ in range(2):
        clock.start()
        time.sleep(0.05)
        clock.stop()
        time.sleep(0.2)
    assert 0.1 <= clock.total < 0.18 and clock.now() == clock.total


def log_of(tg, one_rank, tmp_path):
    return tg.Log(replace(tg.PRESETS["tiny"], log_dir=str(tmp_path / "logs")), one_rank, 0.0)


def test_log_stays_in_memory_until_it_is_flushed(tg, one_rank, tmp_path, capsys):
    log = log_of(tg, one_rank, tmp_path)
    log.line("one: 1")
    assert open(log.path).read() == "" and capsys.readouterr().out == "one: 1\n"
    log.flush()
    log.end("ok")
    assert open(log.path).read() == "one: 1\nend: ok\n"


def test_frequent_lines_are_all_in_the_log_and_few_on_the_terminal(tg, one_rank, tmp_path, capsys):
    log = log_of(tg, one_rank, tmp_path)
    for i in range(50):
        log.line(f"step {i}", often=True)
    log.flush()
    assert len(open(log.path).readlines()) == 50 and len(capsys.readouterr().out.splitlines()) <= 2


def test_every_run_has_a_log_of_its_own(tg, one_rank, tmp_path):
    """Two runs of one preset and seed in one second: two files, named as documented."""
    paths = {log_of(tg, one_rank, tmp_path).path for _ in range(2)}
    assert len(paths) == 2
    assert all(re.search(r"/\d{8}-\d{6}_tiny_seed1\.log$", path) for path in paths)


def test_only_one_end_line_is_appended_in_place_of_rank_0(tg, one_rank, tmp_path):
    log = log_of(tg, one_rank, tmp_path)
    log.line("one: 1")
    log.flush()
    log.end_for_rank_0("FAILED rank 0: gone")
    log.end_for_rank_0("FAILED rank 0: gone, says rank 2")
    assert open(log.path).read() == "one: 1\nend: FAILED rank 0: gone\n"


def test_process_age_grows_with_the_clock(tg):
    before, start = tg.process_age_s(), time.perf_counter()
    time.sleep(0.1)
    assert tg.process_age_s() - before == pytest.approx(time.perf_counter() - start, abs=0.05) and before > 0


def test_pending_waits_once_it_was_started(tg):
    """Deferred work starts at wait(), other work at once."""
    calls = []

    class Work:
        def wait(self):
            calls.append("wait")

    def start():
        calls.append("start")
        return Work()
    tg.Pending(start, deferred=False).wait()
    pending = tg.Pending(start, deferred=True)
    assert calls == ["start", "wait"]
    pending.wait()
    assert calls == ["start", "wait"] * 2


FAKE_SMI = """#!{python}
import sys, time
assert sys.argv[1:] == ["--query-gpu=uuid,clocks.sm,power.draw,temperature.gpu", "-lms", "500", "-i", "GPU-a-b",
                        "--format=csv,noheader,nounits"], sys.argv
for i in range(1000):
    print("GPU-a-b, 1755, %d.50, 61" % (600 + i), flush=True)
    print("GPU-other, 1, 2, 3", flush=True)
    print("GPU-a-b, [N/A], 5, 6", flush=True)
    time.sleep(0.01)
"""


def test_telemetry_samples_only_while_the_clock_runs(tg, one_rank, tmp_path, monkeypatch):
    """Other GPUs and values that a driver does not know are left out; the child ends."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(FAKE_SMI.format(python=sys.executable))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a-b"))
    comm = SimpleNamespace(rank=0, device=torch.device("cuda"), collect=lambda x: [x])
    telemetry, clock = tg.Telemetry(comm), tg.Clock(one_rank)
    telemetry.clock = clock
    time.sleep(0.3)
    assert not telemetry.samples
    clock.start()
    time.sleep(0.5)
    clock.stop()
    time.sleep(0.05)
    n = len(telemetry.samples)
    time.sleep(0.2)
    assert 3 < n == len(telemetry.samples)
    telemetry.end()
    assert telemetry.child.poll() is not None
    seconds, gpus, mhz, watts, degrees = zip(*telemetry.samples)
    assert 0 <= min(seconds) and max(seconds) <= clock.total + 0.05 and set(gpus) == {0}
    assert set(mhz) == {1755} and set(degrees) == {61} and all(w >= 600.5 for w in watts)
    assert telemetry.summary()[0] == "gpu_sm_mhz: mean 1755, least 1755, most 1755"


def test_without_a_gpu_there_is_no_telemetry(tg, one_rank):
    telemetry = tg.Telemetry(one_rank)
    telemetry.end()
    assert telemetry.child is None and telemetry.samples == []
    assert telemetry.summary() == ["gpu_sm_mhz: n/a", "gpu_power_w: n/a", "gpu_temp_c: n/a"]


def test_stamps_tell_the_seconds_of_their_making(tg, one_rank):
    clock = tg.Clock(one_rank)
    clock.start()
    time.sleep(0.05)
    first = clock.stamp()
    time.sleep(0.05)
    clock.stop()
    time.sleep(0.05)
    clock.start()
    second = clock.stamp()
    clock.stop()
    assert 0.05 <= first() < 0.09 and clock.total - 0.02 < second() < clock.total and first() == first()


def test_gpus_without_bf16_are_refused(tg, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an older GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(tg.Refusal, match=r"older GPU has compute capability \(7, 5\).*fast=none"):
        tg.Comm(tg.PRESETS["solo"], 0, 0, 1)
    assert tg.Comm(replace(tg.PRESETS["solo"], dtype="fp32"), 0, 0, 1).device.type == "cuda"
