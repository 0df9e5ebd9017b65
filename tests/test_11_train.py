"""Section 11: whole runs of `tiny`, started as a user starts them."""

import math
import os
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, losses, read_log, run

STOP = 6
GOLDEN = [13.485704, 13.322254, 12.707851, 11.763901, 10.087557, 10.299605]   # first losses, seed 1
FORMS = [
    r"(script|data_hash): [0-9a-f]{64}", r"git: \S+", r"preset: tiny", r"(seed|world|steps|tokens|epochs): \d+",
    r"(host|software): .+", r"config: \{.+\}", r"parameters: [\d,]+", r"train_tokens: [\d,]+ usable",
    r"phase: .+ \d+\.\d s", r"stage \d \| until step \d+ \| .+", r"val_loss: \d+\.\d{6}",
    r"step +\d+/42 \| tokens +[\d,]+ \| loss +\d+\.\d{6} \| time +\d+\.\d{3} s \| +\d+\.\d\d ms/step",
    r"val +\d+/42 \| loss +\d+\.\d{6} \| time +\d+\.\d{3} s", r"batch +\d+( \||( [0-9a-f]{8}))+", r"---",
    r"fast: none", r"record-grade: no \(ngram_rows=\d+\)", r"ms_by_stage: \d+\.\d\d(, \d+\.\d\d)*", r"tokens_per_s: \d+", r"cold_start_s: \d+\.\d",
    r"compiled_on_clock: 0", r"gpu_(sm_mhz|power_w|temp_c): n/a", r"train_s(_spread)?: \d+\.\d+", r"ms_per_step: \d+\.\d\d", r"peak_gpu_mib: (\d+|n/a)", r"saved: .+", r"end: ok",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Logs and weights of `tiny stop=6`, each distinct run made once."""
    done = {}

    def get(ranks, *more):
        if (ranks, more) not in done:
            folder = tmp_path_factory.mktemp("run")
            out = run(["tiny", f"stop={STOP}", f"log_dir={folder}", f"save={folder}/weights.pt", "hashes=true", *more],
                      ranks, timeout=400)
            assert out.returncode == 0, out.stderr[-3000:]
            lines, footer = read_log(folder)
            path = folder / "weights.pt"
            done[ranks, more] = lines, footer, torch.load(path, weights_only=True)["weights"], path
        return done[ranks, more]
    return get


def test_first_losses_are_the_known_ones(runs):
    lines, *_ = runs(1)
    assert losses(lines) == pytest.approx(GOLDEN, abs=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_world_size_changes_neither_data_nor_losses(runs, ranks):
    """The same hash of every micro-batch; losses within 0.01; the ranks, which share cores, agree on the
    time to 0.1 s."""
    (one, footer, *_), (many, other, *_) = runs(1), runs(ranks)
    batch = [line for line in one if line.startswith("batch ")]
    assert len(batch) == STOP and all(len(line.split(" | ")[1].split()) == 8 for line in batch)
    assert [line for line in many if line.startswith("batch ")] == batch
    assert other["data_hash"] == footer["data_hash"] and other["world"] == str(ranks)
    assert losses(many) == pytest.approx(losses(one), abs=0.01)
    assert float(other["val_loss"]) == pytest.approx(float(footer["val_loss"]), abs=0.01)
    assert float(other["train_s_spread"]) < 0.1


def test_validating_on_the_way_changes_no_bit_of_the_training(runs):
    """A second run with one seed and thread count, and validations between: equal losses, equal weights."""
    (plain, footer, weights, _), (often, other, same, _) = runs(1), runs(1, "val_every=2")
    assert losses(often) == losses(plain)
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert other["val_loss"] == footer["val_loss"]
    vals = [line for line in often if line.startswith("val ")]
    assert [int(line.split()[1].split("/")[0]) for line in vals] == [0, 2, 4, 6]
    at_first = float(vals[0].split("loss ")[1].split()[0])         # uniform, but for what the pointer copies already
    assert at_first < math.log(50257) and at_first == pytest.approx(10.8095, abs=0.01)


def test_another_seed_reads_the_same_data(runs):
    (_, footer, weights, _), (lines, other, others, _) = runs(1), runs(1, "seed=2")
    assert other["data_hash"] == footer["data_hash"]
    assert not torch.equal(weights["qk"], others["qk"]) and losses(lines)[0] == pytest.approx(GOLDEN[0], abs=0.02)


def test_saved_weights_continue_a_text(runs, tmp_path):
    """A file of save=PATH, read elsewhere; a file that is none is refused; greedy is the same twice."""
    weights = runs(1)[3]
    words = [f"load={weights}", "sample=The President of the", "sample_tokens=5"]
    one, two = (run([*words, "top_k=1"]).stdout for _ in range(2))
    assert one == two and one.startswith("The President of the") and len(one) > len("The President of the\n")
    (tmp_path / "none.pt").write_bytes(b"")
    out = run([f"load={tmp_path}/none.pt", "sample=x"])
    assert out.returncode == 1 and out.stderr.startswith(f"FAILED: load={tmp_path}/none.pt: not what save=PATH")


def test_every_line_of_a_log_has_a_documented_form(runs):
    for ranks, more in ((1, ()), (1, ("val_every=2",)), (2, ())):
        lines, footer, *_ = runs(ranks, *more)
        strange = [line for line in lines if not any(re.fullmatch(form, line) for form in FORMS)]
        assert not strange
        assert lines[-1] == "end: ok" and lines.count("---") == 1
        assert {"val_loss", "train_s", "script", "git", "tokens"} <= set(footer)


def test_the_main_job_learns_from_context(tg, tmp_path):
    """The whole of `tiny`: at most 6.95, and below what token frequencies alone, each count plus one, can reach."""
    threads = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2       # alone on two cores, or beside other tests
    out = run(["tiny", f"log_dir={tmp_path}"], timeout=500, OMP_NUM_THREADS=str(threads))
    assert out.returncode == 0, out.stderr[-3000:]
    lines, footer = read_log(tmp_path)
    assert lines[-1] == "end: ok" and len(losses(lines)) == 42
    train, val = (tg.open_shard(str(ROOT / f"data/sample/sample_{name}.bin")) for name in ("train_000001", "val_000000"))
    counts = np.bincount(train[:1_000_000], minlength=tg.VOCAB) + 1.0
    unigram = -np.log(counts / counts.sum())[val[1:16_385]].mean()
    assert float(footer["val_loss"]) <= 6.95 < unigram == pytest.approx(7.233849, abs=1e-6)
    assert footer["tokens"] == "180224"


SMALL = ["tiny", "stop=5", "d_model=48", "d_head=8", "d_mlp=40", "n_micro=2", "val_tokens=4096"]


def test_runs_share_a_process_and_equal_single_runs(tmp_path):
    """runs=2: a log for each seed; the second run is bit for bit that of seed=2 alone: nothing is left of the first. Fourteen
    steps, from the first to the last, with all averages shipped."""
    whole = [word for word in SMALL if word != "stop=5"] + ["n_sched=13"]
    assert run([*whole, "runs=2", f"log_dir={tmp_path}/both"]).returncode == 0
    assert run([*whole, "seed=2", f"log_dir={tmp_path}/alone"]).returncode == 0
    both = {path.stem[-1]: path.read_text().splitlines() for path in (tmp_path / "both").glob("*.log")}
    assert sorted(both) == ["1", "2"] and all(lines[-1] == "end: ok" for lines in both.values())
    alone, footer = read_log(tmp_path / "alone")
    assert len(losses(alone)) == 14 and losses(both["2"]) == losses(alone) != losses(both["1"])
    same = (f"val_loss: {footer['val_loss']}", f"data_hash: {footer['data_hash']}", "seed: 2")
    assert all(line in both["2"] for line in same) and "seed: 1" in both["1"]
    assert "cold_start_s: n/a, not the first run" in both["2"] and "cold_start_s: n/a, not the first run" not in both["1"]
    assert any(line.startswith("phase: new weights") for line in both["2"])


@pytest.mark.parametrize("stop, ships", ((0, 1), (14, 1), (15, 1), (13, 0)))
def test_a_whole_run_ships_its_averages_before_it_is_scored(tg, monkeypatch, stop, ships):
    """Once, after the last step, while the clock runs; a run that is stopped early is scored as it is. The optimizer gets the
    Pace of every step."""
    from dataclasses import replace
    from unittest.mock import MagicMock
    cfg = replace(tg.PRESETS["tiny"], n_sched=13, stop=stop)
    calls, run = [], MagicMock(cfg=cfg)
    run.optimizer.ship = lambda: calls.append("ship")
    run.optimizer.step = lambda step, pace: calls.append((step, pace))
    run.optimizer.flat.tail = torch.zeros(2, 2)
    run.loader.next = list
    run.loader.epochs = [1] * 14
    run.ring.pop = lambda wait: []
    run.comm.rank, run.comm.device = 0, torch.device("cpu")
    monkeypatch.setattr(tg, "validate", lambda run, step, long: calls.append(("score", step)) or 1.5)
    assert tg.train(run) == 1.5
    n = 13 if stop == 13 else 14
    assert calls == [*((step, tg.pace_at(cfg, step)) for step in range(n)), *["ship"] * ships, ("score", n)]


def test_t_factor_and_more_micro_batches_keep_the_tokens_of_a_step(tmp_path):
    assert run([*SMALL, "t_factor=0.5", "n_micro=4", f"log_dir={tmp_path}"]).returncode == 0
    lines, footer = read_log(tmp_path)
    assert int(footer["tokens"]) == 5 * 2 * 256 and any("T 128 | batch 512 tokens" in line for line in lines)


def test_validation_tokens_never_reach_training(tg, tmp_path):
    """Other validation files, or no validation on the way: every saved weight keeps its bits, the table's among them."""
    from conftest import docs, shard
    shard(tmp_path / "val.bin", docs(5000, 40, seed=3))
    saved = []
    for i, more in enumerate(([], ["val_every=1"], ["val_every=1", f"val_files={tmp_path}/val.bin"])):
        out = run([*SMALL, *more, f"log_dir={tmp_path}/{i}", f"save={tmp_path}/{i}.pt"])
        assert out.returncode == 0, out.stderr[-2000:]
        saved.append(torch.load(tmp_path / f"{i}.pt", weights_only=True)["weights"])
    assert saved[0]["w_gram"].any() and saved[0]["w_gram"].shape == (65_536, 48)
    for other in saved[1:]:
        assert all(torch.equal(saved[0][name], other[name]) for name in saved[0])


def test_an_uneven_number_of_validation_streams_on_two_ranks(tmp_path):
    """Three streams: in the last round one rank has none, and still gives its rows to the other."""
    words = [word for word in SMALL if not word.startswith("val_tokens")] + ["val_tokens=6144", "stop=2"]
    results = []
    for ranks in (1, 2):
        out = run([*words, f"log_dir={tmp_path}/{ranks}"], ranks)
        assert out.returncode == 0, out.stderr[-2000:]
        results.append(float(read_log(tmp_path / str(ranks))[1]["val_loss"]))
    assert results[0] == pytest.approx(results[1], abs=0.001)


def test_switches_turn_table_and_pointer_off(tmp_path):
    """Each alone changes the loss of the fifth step; a smaller table is said not to be the record's."""
    found = {}
    for word in ("ngram_rows=65536", "ngram_rows=0", "ngram_rows=32768", "pointer_block=0", "fold_case=false"):
        out = run([*SMALL, word, "ngram_lr=1", f"log_dir={tmp_path}/{word}"])
        assert out.returncode == 0, out.stderr[-2000:]
        lines, keys = read_log(tmp_path / word)
        found[word] = losses(lines)[-1]
        assert ("record-grade" in keys) == (word in ("ngram_rows=0", "ngram_rows=32768"))
    assert len(set(found.values())) == 5, found


@pytest.fixture(scope="module")
def thirty_steps(tg, tmp_path_factory):
    """`tiny` at half its width for 30 steps; beside it the sparse tables once more, dense and written out: gradients of the
    whole table by autograd, every row in every event. Returns the saved tables and the dense ones."""
    from dataclasses import replace
    from types import SimpleNamespace
    cfg = replace(tg.PRESETS["tiny"], d_model=48, d_head=8, d_mlp=40, n_micro=2, save=str(tmp_path_factory.mktemp("t") / "w.pt"))
    comm = tg.Comm(cfg, 0, 0, 1)
    model, opt = tg.make(cfg, comm, comm.device)
    loader = tg.Loader(cfg, comm, [tg.plan_at(cfg, step) for step in range(30)])
    loader.resume()
    run = SimpleNamespace(cfg=cfg, comm=comm, model=model, optimizer=opt, guard=SimpleNamespace(step=lambda: None), replay=tg.Replay(model, {}),
                          log=SimpleNamespace(line=lambda text: None))
    p = {name: getattr(model, name).detach().clone() for name in ("w_gram", "w_value")}
    g = {name: torch.zeros_like(x) for name, x in p.items()}
    row_m2, m, m2, n = torch.zeros(len(p["w_gram"])), torch.zeros_like(p["w_value"]), torch.zeros_like(p["w_value"]), 0
    for step in range(30):
        batch, k = loader.next(), tg.stage_at(cfg, step)
        view = tg.view_at(cfg, k, comm.device, cfg.stages[k].T)
        others = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
        model.near = {}
        for name, grad in g.items():
            getattr(model, name).grad = grad
        for micro_batch in batch:
            model(micro_batch, view).backward()
        for name, x in model.named_parameters():
            if name in g:
                x.grad = None
            else:
                x.grad.copy_(others[name])
        tg.train_step(run, batch, view, step)
        stands_for = step % 2 if step < 12 else 2 * (step % 4 == 3)
        if stands_for:
            n, lr = n + 1, cfg.adam_lr * 70 * tg.lr_at(cfg, step)
            b1, b2, wd = 0.75**stands_for, 0.95**stands_for, 0.005 * 5 * stands_for
            g = {name: x / 2 for name, x in g.items()}
            row_m2 = b2 * row_m2 + (1 - b2) * g["w_gram"].square().mean(1)
            slow = lr * cfg.ngram_lr
            u = slow * (1 - b2**n)**0.5 * g["w_gram"] / (row_m2.sqrt() + 1e-10)[:, None]
            p["w_gram"] -= u + (u * p["w_gram"] > 0) * slow * slow * wd * p["w_gram"]
            m, m2 = b1 * m + (1 - b1) * g["w_value"], b2 * m2 + (1 - b2) * g["w_value"].square()
            u = lr * (1 - b2**n)**0.5 / (1 - b1**n) * m / (m2.sqrt() + 1e-10)
            p["w_value"] -= u + (u * p["w_value"] > 0) * lr * lr * wd * p["w_value"]
            g = {name: torch.zeros_like(x) for name, x in p.items()}
    tg.save_weights(run)
    return torch.load(cfg.save, weights_only=True)["weights"], p


@pytest.mark.parametrize("name", ("w_gram", "w_value"))
def test_saved_rows_equal_a_dense_reimplementation(thirty_steps, name):
    """After 30 steps of 10 events, those of half the cadence among them; the step after the last event has changed nothing."""
    saved, dense = thirty_steps
    assert 0.01 < (dense["w_gram"] != 0).any(1).float().mean() < 0.5
    a, b = saved[name], dense[name]
    assert (a - b).norm() <= 1e-5 * b.norm() and ((a != 0).any(1) == (b != 0).any(1)).all()
    worst = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-3)
    assert worst.max() < 1e-2, worst.max()


@pytest.mark.parametrize("rows", (1, 3, 100))
def test_shares_of_a_table_are_joined_in_the_order_of_their_ranks(tg, monkeypatch, rows):
    """However many rows travel at once; ranks other than the first keep nothing."""
    from types import SimpleNamespace
    monkeypatch.setattr(tg, "SAVED_ROWS", rows)
    share = torch.arange(14.).view(7, 2)
    both = SimpleNamespace(rank=0, world=2, collect=lambda x: [x, x + 100])
    assert torch.equal(tg.whole(both, share), torch.cat((share, share + 100)))
    asked = []
    other = SimpleNamespace(rank=1, world=2, collect=lambda x: asked.append(x) or [x, x])
    assert tg.whole(other, share) is None and sum(map(len, asked)) == 7
