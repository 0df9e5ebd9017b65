"""What differs between a GPU and the CPU: fast replacements, compilation, events, memory, NCCL. Run with -m gpu."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT, SCRIPT, bare_env, command, docs, losses, read_log, run, shard

N_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not N_GPUS, reason="no GPU")]
two_gpus = pytest.mark.skipif(N_GPUS < 2, reason=f"{N_GPUS} GPU, the test needs 2")
NAMES = ("attention", "add_rows", "loss_rows", "heads", "relu2", "smear", "mix", "signed_sum", "key_offset", "exclude_self",
         "anvil_momentum", "anvil_apply", "adam_step", "ngrams", "row_event", "pointer_read", "pointer_slopes")


def rand_on(device, seed, dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, device=device, generator=generator).to(dtype)


IN_PLACE = {"add_rows", "anvil_momentum", "anvil_apply", "adam_step", "row_event"}   # they change arguments and have no gradient


def copied(x, wide):
    """A copy of an argument; bf16 becomes fp32 where wide."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone().to(torch.float32 if wide and x.dtype == torch.bfloat16 else x.dtype)
    return torch.float32 if wide and x is torch.bfloat16 else x


def answers(name, f, args, settings, *, wide, seed, join):
    """All that a row's function gives, in fp64: results, then gradients or changed arguments."""
    wide = wide and name != "anvil_apply"                              # the parts of a master stay what they are
    xs, settings = [copied(x, wide) for x in args], {key: copied(x, wide) for key, x in settings.items()}
    floats = [x for x in xs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    floats = floats[:1] if name == "heads" else floats                 # its tables are no inputs
    wants_grad = name not in IN_PLACE | {"loss_rows", "ngrams"}
    with torch.set_grad_enabled(wants_grad):
        for x in floats:
            x.requires_grad_(wants_grad)
        out = f(*xs, **settings)
    out = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    draw, more = rand_on("cuda", seed), []
    if wants_grad:
        more = torch.autograd.grad(out, floats, [draw(*x.shape).to(x.dtype) for x in out])
    elif name == "anvil_apply":
        more = [xs[0], join(xs[0], xs[1]), xs[4]]       # low bits alone say nothing
    elif name in IN_PLACE:
        more = [x for x in xs if isinstance(x, torch.Tensor)]
    return [x.detach().double() for x in (*out, *more)]


def error(got, want, n):
    """Relative error in norm; of a sum over n random terms, relative to its typical size at least."""
    return ((got - want).norm() / want.norm().clamp(min=n ** 0.5 if want.numel() == 1 else 1e-30)).item()


def compare(tg, name, size, seed, op):
    """Relative errors, result by result, of the fast row and of its reference in bf16, both against fp32."""
    row = tg.FAST[name]
    args, settings = row.example(rand_on("cuda", seed), size)
    want = answers(name, row.ref, args, settings, wide=True, seed=seed + 100, join=tg.join_master)
    errors = []
    for f in (op, row.ref):
        got = answers(name, f, args, settings, wide=False, seed=seed + 100,
                      join=tg.join_master)
        assert [x.shape for x in got] == [x.shape for x in want]
        errors.append([error(a, b, args[0].numel()) for a, b in zip(got, want)])
    return errors


@pytest.mark.parametrize("size", ("small", "record"))
@pytest.mark.parametrize("name", NAMES)
def test_fast_equals_ref(tg, name, size):
    """Results, changed arguments and gradients of every row, at the record's shapes and at ragged ones, 3 seeds."""
    row = tg.FAST[name]
    op = tg.compiled(row) if row.build else row.fast
    for seed in range(3):
        got, plain = compare(tg, name, size, seed, op)
        print(name, size, [f"{x:.1e}" for x in got], [f"{x:.1e}" for x in plain])
        assert all(x <= max(row.tol, 2 * y) for x, y in zip(got, plain)), (got, plain)


@pytest.mark.parametrize("width_qk, width_v, pairs", ((64, 128, True), (64, 64, False), (128, 128, False), (64, 128, False)))
@pytest.mark.parametrize("T, window", ((49_152, 640), (1_009, 37)))
def test_attention_at_every_width_of_the_network(tg, T, window, width_qk, width_v, pairs):
    """Fast attention and its gradients against the reference in fp32, documents of 1 token and longer than T too."""
    rand = rand_on("cuda", T)
    q, k = (rand(T, 6, width_qk) for _ in range(2))
    v, q = rand(T, 6, width_v), q * 0.1
    starts = torch.tensor([0, 1, 2, 5, 130, 700, 705] + list(range(1_008, T, 613)), device="cuda")
    token = torch.arange(T, device="cuda")
    documents = tg.Documents(starts[torch.searchsorted(starts, token, right=True) - 1].int())
    dy, answers = rand(T, 6, width_v), []
    for f, dtype in ((tg.attention_ref, torch.float32), (tg.attention, torch.bfloat16)):
        xs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        y = f(*xs, documents, window=window, pairs=pairs)
        answers.append((y, *torch.autograd.grad(y, xs, dy.to(dtype))))
    errors = [error(a.detach().double(), b.detach().double(), 1) for b, a in zip(*answers)]
    print(T, width_qk, width_v, pairs, [f"{x:.1e}" for x in errors])
    assert max(errors) < 0.01


@pytest.mark.parametrize("width_qk, width_v, pairs", ((64, 128, True), (64, 64, False), (128, 128, False)))
def test_attention_waits_for_nothing_and_can_be_captured(tg, width_qk, width_v, pairs):
    """No call waits for the device; a graph of results and gradients, replayed on other inputs and documents, gives the bits
    of the calls, in memory that held NaN before."""
    T, rand = 3_001, rand_on("cuda", 0)
    xs = [rand(T, 6, w).requires_grad_() for w in (width_qk, width_qk, width_v)]
    dy, start = rand(T, 6, width_v), torch.zeros(T, dtype=torch.int32, device="cuda")

    def both():
        y = tg.attention(*xs, tg.Documents(start), window=300, pairs=pairs)
        return y, *torch.autograd.grad(y, xs, dy)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = both()
    for seed in range(2):
        rand = rand_on("cuda", seed + 1)
        with torch.no_grad():
            for x in (*xs, dy):
                x.copy_(rand(*x.shape))
        start.copy_(torch.where(rand(T) > 2.0, torch.arange(T, device="cuda"), 0).cummax(0).values)
        for x in results:
            x.detach().fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, both()))


@pytest.mark.parametrize("width_qk, width_v", ((64, 64), (64, 128), (128, 128)))
def test_attention_of_integers_is_exact(tg, width_qk, width_v):
    """Scores 0 and 64 keys a query, at the record's T: y and dv are sums of 64ths, without any rounding."""
    T, n, generator = 49_152, 64, torch.Generator("cuda").manual_seed(0)
    v, dy = (torch.randint(-1, 2, (T, 6, width_v), device="cuda", generator=generator).bfloat16() for _ in range(2))
    xs = [rand_on("cuda", 1)(T, 6, width_qk), torch.zeros(T, 6, width_qk, device="cuda", dtype=torch.bfloat16), v]
    xs = [x.requires_grad_() for x in xs]
    y = tg.attention(*xs, tg.Documents(torch.zeros(T, dtype=torch.int32, device="cuda")), window=n - 1)
    dv = torch.autograd.grad(y, xs, dy)[2]
    sums = [torch.nn.functional.pad(x.detach().double().cumsum(0), (0, 0, 0, 0, 1, 0)) for x in (v, dy)]
    assert torch.equal(y[n:].double(), (sums[0][n + 1:] - sums[0][1:-n]) / n)
    assert torch.equal(dv[n:T - n].double(), ((sums[1][n:] - sums[1][:-n]) / n)[n:T - n])


@pytest.mark.parametrize("width, places", ((64, 1), (64, 2), (128, 1)))
def test_heads_at_every_width_of_the_network(tg, width, places):
    rand = rand_on("cuda", width)
    qk, turn = rand(49_152, 2, 6, width), torch.nn.functional.normalize(rand(49_152, places, width // 2, 2).float(), dim=-1)
    scale, dy = torch.tensor(0.13, device="cuda"), [rand(49_152, 6, width) for _ in range(2)]
    answers = []
    for f, dtype in ((tg.heads_ref, torch.float32), (tg.compiled(tg.FAST["heads"]), torch.bfloat16)):
        x = qk.to(dtype).requires_grad_()
        out = f(x, turn, scale)
        answers.append((*out, *torch.autograd.grad(out, [x], [d.to(dtype) for d in dy])))
    assert max(error(a.detach().double(), b.detach().double(), 1) for b, a in zip(*answers)) < 0.01


@pytest.mark.parametrize("n, n_targets", ((10_240, 4), (10_240, 3), (14_336, 1), (24_576, 1), (50_304, 1)))
def test_loss_rows_at_every_shape_of_the_schedule(tg, n, n_targets):
    rand = rand_on("cuda", n)
    logits, weights = 3 * rand(4096, n), rand(4096, n_targets).float().abs()
    targets = torch.randint(0, n, (4096, n_targets), device="cuda")
    mix, copy = rand(4096, 3).float().softmax(1)[:, :2], torch.tensor([n - 47], device="cuda")
    op = tg.compiled(tg.FAST["loss_rows"])
    for more, column in ((None, None), (mix, copy)):
        want = tg.loss_rows_ref(logits.float(), targets, weights, n, True, more, copy=column)
        got = op(logits, targets, weights, n, True, more, copy=column)
        pairs = [(a.double(), b.double()) for a, b in zip(got, want) if b is not None]
        assert len(pairs) == 2 + (more is not None) and all(error(a, b, 1) < 0.01 for a, b in pairs)


def test_every_row_is_tested(tg):
    assert set(NAMES) == set(tg.FAST)


@pytest.mark.parametrize("name", ("heads", "relu2", "smear", "mix", "signed_sum", "key_offset", "exclude_self", "loss_rows", "ngrams"))
def test_one_compilation_serves_every_length(tg, name, monkeypatch):
    """T differs from stage to stage; a second compilation would fall on the clock."""
    torch._dynamo.reset()            # what other tests compiled would be used again
    op, before = tg.compiled(tg.FAST[name]), tg.n_compiled()
    for T in (49_152, 16_384, 1_008):
        monkeypatch.setitem(tg.EXAMPLE_T, "small", T)
        args, settings = tg.FAST[name].example(rand_on("cuda", T), "small")
        answers(name, op, args, settings, wide=False, seed=T, join=None)
    assert tg.n_compiled() == before + 1


def children(parent, name):
    """Living children of a process whose command line has `name`, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = stat.read_text().rpartition(")")[2].split()
            if int(words[1]) == parent and name in (stat.parent / "cmdline").read_text():
                found.append(int(stat.parent.name))
    return sorted(found)


def solo(words, folder, ranks=1, timeout=240):
    """`solo` at 1/16 of its lengths on shards made here: the finished process, its log's lines and keys."""
    folder.mkdir(exist_ok=True)
    train, val = shard(folder / "train.bin", docs(600_000, 300, 1)), shard(folder / "val.bin", docs(20_000, 300, 2))
    done = run(["solo", "t_factor=0.0625", f"train_files={train}", f"val_files={val}", "val_tokens=16384",
                "val_seq=8192", f"log_dir={folder}", *words], ranks=ranks, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    return done, *read_log(folder)


def test_all_stages_run_and_nothing_is_compiled_on_the_clock(tmp_path):
    """38 steps through the five stages, all numbers of classes and targets among them."""
    _, lines, keys = solo(["n_sched=35", "p_early=4096", "p_middle=5120", "p_late=8192"], tmp_path)
    assert keys["compiled_on_clock"] == "0" and keys["end"] == "ok" and len(losses(lines)) == 38
    assert [line.split(" |")[0] for line in lines if line.startswith("stage ")] == [f"stage {k}" for k in range(5)]


def test_fast_and_plain_train_alike(tg, tmp_path):
    """fast=all against fast=none; nothing is compiled on the clock; the footer is complete."""
    _, fast, keys = solo(["stop=12"], tmp_path / "fast")
    _, plain, plain_keys = solo(["stop=12", "fast=none"], tmp_path / "plain")
    assert len(losses(fast)) == 12 and max(abs(a - b) for a, b in zip(losses(fast), losses(plain))) < 0.02
    assert abs(float(keys["val_loss"]) - float(plain_keys["val_loss"])) < 0.02
    assert keys["fast"] == ",".join(sorted([*tg.FAST, "replay"])) and plain_keys["fast"] == "none"
    assert keys["compiled_on_clock"] == "0" and float(keys["cold_start_s"]) > 0 and int(keys["peak_gpu_mib"]) > 0
    assert keys["end"] == "ok"
    ms = [float(line.split("|")[-1].split()[0]) for line in fast if line.startswith("step ")]
    assert min(ms) > 0 and sum(ms) / 1000 == pytest.approx(float(keys["train_s"]), rel=0.05, abs=0.02)


def test_a_captured_step_is_the_step(tg):
    """Three steps of every shape, captured and as they are, from the same weights: equal losses and gradients, also where a step
    has two micro-batches and where the second step reads other rows than the first."""
    cfg = tg.parse(["solo", "t_factor=0.0625", "ngram_rows=1048576", "n_micro=2"])
    comm, results = tg.Comm(cfg, 0, 0, 1), []
    for switch in ("all", "all,-replay"):
        torch.manual_seed(0)
        model, optimizer = tg.make(cfg, comm, comm.device, tg.choose(replace(cfg, fast=switch), comm.device)[1])
        most = model.most_rows(2 * max(stage.T for stage in cfg.stages))
        replay = tg.Replay(model, optimizer.rooms(most) if model.ops.captures else {})
        found = []
        for step in (cfg.stage_ends[1], 0, cfg.n_steps - 1):
            plan, view = tg.plan_at(cfg, step), tg.view_at(cfg, tg.stage_at(cfg, step), comm.device, tg.plan_at(cfg, step).T)
            batch = tg.synthetic(plan, comm.device)
            replay.hold(optimizer.pull(model.wanted([batch]), True))
            replay.capture([x if x is None else x.clone() for x in batch], view)      # which keeps them as its inputs
            for x in optimizer.tensors():
                if x.is_floating_point() and x.data_ptr() in {row.param.grad.data_ptr() for row in optimizer.rows if row.param.grad is not None}:
                    x.zero_()
            for shift in (1, 2, 3):
                tokens = (batch[0] * shift % tg.VOCAB).int()
                other = (tokens, batch[1], tokens, *batch[3:])
                near = optimizer.pull(model.wanted([batch, other]), True)
                replay.hold(near)
                found += [replay(batch, view).clone(), replay(other, view).clone()]
                found += [near[name].grad.clone() for name in near]
            found += [row.param.grad.clone() for row in optimizer.rows if row.param.grad is not None]
        assert len(replay.made) == (3 if switch == "all" else 0)
        results.append([x.double() for x in found])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm(), (tuple(a.shape), float((a - b).norm() / b.norm()))
    losses_of = [[x for x in found if not x.ndim] for found in results]
    assert max(float(abs(a / b - 1)) for a, b in zip(*losses_of)) < 1e-3


def test_switch_turns_single_rows_off(tmp_path):
    _, _, keys = solo(["stop=2", "fast=all,-relu2,-adam_step"], tmp_path)
    assert "relu2" not in keys["fast"] and "adam_step" not in keys["fast"] and "heads" in keys["fast"]


def test_runs_share_one_start_and_equal_single_runs(tmp_path):
    both = tmp_path / "both"
    train, val = shard(tmp_path / "train.bin", docs(600_000, 300, 1)), shard(tmp_path / "val.bin", docs(20_000, 300, 2))
    words = ["solo", "t_factor=0.0625", f"train_files={train}", f"val_files={val}", "val_tokens=16384", "val_seq=8192",
             "stop=7"]
    done = run([*words, "runs=2", f"log_dir={both}"])
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (path.read_text().splitlines() for path in sorted(both.glob("*.log"), key=lambda p: p.name[-5]))
    assert "seed: 1" in first and "seed: 2" in second and first[-1] == second[-1] == "end: ok"
    assert any(line.startswith("cold_start_s: n/a") for line in second)
    alone = run([*words, "seed=2", f"log_dir={tmp_path / 'alone'}"])
    assert alone.returncode == 0, alone.stderr[-2000:]
    lines, _ = read_log(tmp_path / "alone")
    assert max(abs(a - b) for a, b in zip(losses(lines), losses(second))) < 0.01
    assert abs(losses(first)[0] - losses(second)[0]) > 1e-4


def test_telemetry_and_its_end(tmp_path):
    """Samples lie on the clock; the child does not outlive a trainer that was killed."""
    train, val = shard(tmp_path / "train.bin", docs(600_000, 300, 1)), shard(tmp_path / "val.bin", docs(20_000, 300, 2))
    words = ["solo", "t_factor=0.0625", f"train_files={train}", f"val_files={val}", "val_tokens=16384", "val_seq=8192",
             f"log_dir={tmp_path}"]
    done = run([*words, "stop=100"])
    assert done.returncode == 0, done.stderr[-2000:]
    lines, keys = read_log(tmp_path)
    samples = [float(line.split("time")[1].split()[0]) for line in lines if line.startswith("gpu ")]
    assert samples and 0 <= min(samples) and max(samples) <= float(keys["train_s"])
    for key in ("gpu_sm_mhz", "gpu_power_w", "gpu_temp_c"):
        assert re.fullmatch(r"mean \d+, least \d+, most \d+", keys[key]), keys[key]
    killed = subprocess.Popen(command([*words, "repeat=true"], 1), cwd=ROOT, env=bare_env(), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
    for line in killed.stdout:
        if line.startswith("step "):
            break
    smi = children(killed.pid, "nvidia-smi")
    assert smi
    killed.kill()
    killed.wait()
    until = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in smi):
        assert time.monotonic() < until, "nvidia-smi lives on"
        time.sleep(0.2)


def test_settings_that_do_not_fit_are_refused(tmp_path):
    """T times 16 on the record's network: before any compilation, with bytes needed, bytes free and the cure."""
    train, val = shard(tmp_path / "train.bin", docs(1_600_000, 300, 1)), shard(tmp_path / "val.bin", docs(20_000, 300, 2))
    words = ["solo", f"train_files={train}", f"val_files={val}", "val_tokens=16384", "val_seq=8192", "repeat=true",
             "stop=1", f"log_dir={tmp_path}"]
    start = time.monotonic()
    done = run([*words, "t_factor=16"])
    seconds = time.monotonic() - start
    print(done.stderr)
    assert done.returncode == 1 and not list(tmp_path.glob("*.log")) and seconds < 60
    needed, free = (int(x.replace(",", "")) for x in re.search(
        r"need about ([\d,]+) bytes .* free are ([\d,]+)", done.stderr).groups())
    assert needed > free > 0
    factor, n_micro = re.search(r"t_factor=([\d.]+) n_micro=(\d+)", done.stderr).groups()
    assert float(factor) * int(n_micro) == 16 and "Traceback" not in done.stderr


def test_memory_estimate_is_near_the_peak(tg, one_rank):
    """Within 25 % of what a step at the largest T takes, states and their copy included."""
    cfg = tg.PRESETS["solo"]
    comm = tg.Comm(cfg, 0, 0, 1)
    held, table, _ = tg.memory_needed(cfg, comm)
    training, _ = tg.stream_bytes(cfg, 49_152, 1)
    gc.collect()                     # what a test before this one left behind would be freed in the middle of it
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    names, ops = tg.choose(cfg, comm.device)
    model, optimizer = tg.make(cfg, comm, comm.device, ops)
    averages = sum(x.nbytes for of in optimizer.averages.of for x in of.values())
    states = sum(x.nbytes for x in optimizer.tensors()) + table + averages
    assert torch.cuda.memory_allocated() - base == pytest.approx(states, rel=0.02)
    assert held + table == 2 * states - table - averages and averages > 1 << 30
    plan = tg.StepPlan(49_152, 3072, 50_304, (1.0,), ())
    batch = tg.synthetic(plan, comm.device)
    model.near = optimizer.pull(model.wanted([batch]), True)
    model(batch, tg.view_at(cfg, 2, comm.device, 49_152)).backward()
    activations = torch.cuda.max_memory_allocated() - base - states
    print(f"estimate {training:,}, measured {activations:,}, ratio {training / activations:.3f}")
    assert 0.95 < training / activations < 1.25


def test_warm_up_leaves_everything_bit_equal(tg):
    cfg = tg.parse(["solo", "t_factor=0.0625", "val_tokens=8192", "val_seq=8192", "ngram_rows=1048576"])
    comm = tg.Comm(cfg, 0, 0, 1)
    model, optimizer = tg.make(cfg, comm, comm.device, tg.choose(cfg, comm.device)[1])
    everything = [*optimizer.tensors(), *sum(optimizer.lazy().values(), [])]
    for x in everything:
        if x.is_floating_point():
            x.data.add_(torch.randn_like(x, dtype=torch.float32).to(x.dtype), alpha=0.01)
    before, states = [x.clone() for x in everything], (torch.get_rng_state(), torch.cuda.get_rng_state())
    plans = {tg.plan_at(cfg, step): tg.view_at(cfg, k, comm.device, cfg.stages[k].T)
             for k, step in enumerate((0, *cfg.stage_ends[:-1]))}
    told = []
    tg.warm_up(cfg, model, optimizer, plans, tg.view_at(cfg, 4, comm.device, 8192, 2560), replay=tg.Replay(model, {}),
               tell=told.append)
    assert all(torch.equal(a, b) for a, b in zip(before, everything)) and optimizer.n_adam == 0 and told
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[1], torch.cuda.get_rng_state())


def test_slots_are_not_overwritten_while_the_device_lags(tg, tmp_path):
    """Every copy waits behind a slow kernel; the batches still equal those of a loader on the CPU."""
    path = shard(tmp_path / "train.bin", docs(400_000, 200, 1))
    cfg = tg.parse(["solo", f"train_files={path}", "stop=12"])
    plan = [tg.StepPlan(16_384, 896, 20_480, (1.0, 0.5), (0.2,))] * 12
    seen = []
    for device in ("cuda", "cpu"):
        loader = tg.Loader(cfg, SimpleNamespace(rank=0, world=1, device=torch.device(device)), plan)
        loader.resume()
        batches = []
        for _ in plan:
            if device == "cuda":
                torch.cuda._sleep(50_000_000)        # cycles: some 30 ms
            batches.append([x.clone() for x in loader.next()[0]])
        seen.append([[x.cpu() for x in batch] for batch in batches])
    assert all(torch.equal(a, b) for x, y in zip(*seen) for a, b in zip(x, y))


def test_loss_that_is_not_finite_ends_the_run(tmp_path):
    train, val = shard(tmp_path / "train.bin", docs(600_000, 300, 1)), shard(tmp_path / "val.bin", docs(20_000, 300, 2))
    done = run(["solo", "t_factor=0.0625", f"train_files={train}", f"val_files={val}", "val_tokens=16384",
                "val_seq=8192", "anvil_lr=1e30", "stop=40", f"log_dir={tmp_path}"])
    assert done.returncode == 1 and done.stderr.count("FAILED") == 1 and "not finite" in done.stderr
    lines, _ = read_log(tmp_path)
    assert lines[-1].startswith("end: FAILED") and int(re.search(r"step (\d+)", lines[-1])[1]) < 20


# ---- two GPUs: NCCL ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("D, n_rows", [(768, 10_575_360)])
def test_rows_beyond_2_to_the_31_entries_are_those_that_were_meant(tg, D, n_rows):
    """The table of `solo`: rows on both sides of the entry that 32 bits cannot count are brought and updated."""
    assert n_rows * D > 2**32
    check_rows(tg, torch.device("cuda"), D, n_rows, [0, 2**31 // D - 1, 2**31 // D + 1, n_rows - 1])


def check_rows(tg, device, D, n_rows, ids):
    """Rows brought from a table and updated by an event are those of a table that holds nothing else."""
    comm, ids = tg.Comm(tg.PRESETS["solo"], 0, 0, 1), torch.tensor(ids, device=device)
    draw = rand_on(device, 0)
    table, m2 = torch.zeros(n_rows, D, dtype=torch.bfloat16, device=device), torch.zeros(n_rows, device=device)
    last, few, g = torch.zeros(n_rows, dtype=torch.int32, device=device), draw(len(ids), D), draw(len(ids), D).float()
    for i, values in zip(ids.tolist(), few):
        table[i].copy_(values)
    assert torch.equal(tg.Rows(ids, table, 1, comm.all_to_all, False).values, few)
    own = [few.clone(), torch.zeros(len(ids), device=device), torch.zeros(len(ids), dtype=torch.int32, device=device)]
    how = {"betas2": torch.tensor([0.95, 0.9025], device=device), "rate": torch.tensor(0.1, device=device),
           "decay": torch.tensor(0.01, device=device), "eps": 1e-10}
    for f in (tg.row_event, tg.row_event_ref):
        f(table, m2, last, ids, g, **how)
        f(*own, torch.arange(len(ids), device=device), g, **how)
        for i, *mine in zip(ids.tolist(), *own):
            for x, here in zip((table, m2, last), mine, strict=True):
                assert torch.equal(x[i], here)
        assert int((last != 0).sum()) == len(ids) and not torch.equal(own[0], few)


@two_gpus
def test_two_ranks_equal_one(tmp_path):
    """The same micro-batches on two ranks and on one; clocks of the ranks within 2 ms."""
    results = {}
    for ranks in (1, 2):
        _, lines, keys = solo(["n_micro=2", "stop=40", "hashes=true"], tmp_path / str(ranks), ranks=ranks)
        results[ranks] = keys, [line for line in lines if line.startswith("batch ")]
    (one, batches), (two, same) = results[1], results[2]
    assert batches == same and len(batches) == 40 and one["data_hash"] == two["data_hash"]
    assert abs(float(one["val_loss"]) - float(two["val_loss"])) < 0.02
    assert float(two["train_s_spread"]) < 0.002


@two_gpus
@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSTOP))
def test_a_dead_or_stopped_rank_ends_all(tmp_path, number):
    """NCCL does not tell: within 60 s all end, with one FAILED line in the log."""
    train, val = shard(tmp_path / "train.bin", docs(600_000, 300, 1)), shard(tmp_path / "val.bin", docs(20_000, 300, 2))
    words = ["solo", "n_micro=2", "t_factor=0.0625", f"train_files={train}", f"val_files={val}", "val_tokens=16384",
             "val_seq=8192", "repeat=true", "step_limit_s=20", f"log_dir={tmp_path}"]
    job = subprocess.Popen(command(words, 2), cwd=ROOT, env=bare_env(), stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True)
    for line in job.stdout:
        if line.startswith("step "):
            break
    victim, start = children(job.pid, SCRIPT.name)[1], time.monotonic()
    os.kill(victim, number)
    _, stderr = job.communicate(timeout=90)
    print(f"{number.name}: {time.monotonic() - start:.1f} s")
    if number == signal.SIGSTOP and os.path.exists(f"/proc/{victim}"):
        os.kill(victim, signal.SIGKILL)
    lines, _ = read_log(tmp_path)
    assert job.returncode != 0 and time.monotonic() - start < 60
    assert lines[-1].startswith("end: FAILED") and sum(line.startswith("end: ") for line in lines) == 1


@two_gpus
def test_collectives_over_nccl(tmp_path):
    """Sums, slices and gathers of bf16, fp32 and int tensors equal the plain ones."""
    script = tmp_path / "collectives.py"
    script.write_text(f'''
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
import train_gpt as tg
comm = tg.Comm(tg.PRESETS["solo"], *tg.launch_env())
for dtype in (torch.bfloat16, torch.float32, torch.int32):
    each = [torch.arange(64, dtype=torch.float32).view(8, 8).mul(r + 1).to(dtype).cuda() for r in range(2)]
    x = each[comm.rank].clone()
    comm.all_reduce(x).wait()
    assert torch.equal(x, each[0] + each[1])
    x = each[comm.rank].clone()
    pending, part = comm.reduce_scatter(x)
    pending.wait()
    assert torch.equal(part, (each[0] + each[1]).chunk(2)[comm.rank])
    x = torch.zeros_like(each[0])
    x.chunk(2)[comm.rank].copy_(each[comm.rank].chunk(2)[comm.rank])
    comm.all_gather(x).wait()
    assert torch.equal(x, torch.cat([each[r].chunk(2)[r] for r in range(2)]))
assert comm.collect(comm.rank) == [0, 1]
comm.meet()
print("collectives hold")
comm.close()
''')
    done = run([], ranks=2, script=script)
    assert done.returncode == 0 and done.stdout.count("collectives hold") == 2, done.stderr[-2000:]
