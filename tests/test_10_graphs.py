"""Section 10: what happens before the clock leaves no trace."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch


def test_warm_up_leaves_everything_bit_equal(tg, one_rank):
    """Weights, gradients, states, the count of Adam steps and the random number generator."""
    cfg = replace(tg.PRESETS["tiny"], d_model=48, d_head=8, d_mlp=40, val_seq=64)
    cfg = replace(cfg, stages=tuple(replace(stage, T=stage.T // 8) for stage in cfg.stages))
    model = tg.Model(cfg, torch.device("cpu"))
    opt = tg.Optimizer(tg.param_table(model, cfg), one_rank, n_micro=8, muon_lr=.02, muon_wd=1., adam_lr=.01,
                       adam_wd=.1, adam_eps=1e-10)
    for i, x in enumerate(opt.tensors()):            # states as in the middle of a run
        x.uniform_(generator=torch.Generator().manual_seed(i))
    before, rng, n_adam = [x.clone() for x in opt.tensors()], torch.get_rng_state(), opt.n_adam
    plans = {}
    for k, (stage, step) in enumerate(zip(cfg.stages, (0, *cfg.stage_ends))):
        plan = replace(tg.plan_at(cfg, step), n_classes=(500, 50_304)[k % 2])
        plans[plan] = tg.view_at(cfg, k, one_rank.device, stage.T)
    touched = []
    real = opt.step
    opt.step = lambda *rest: (real(*rest), touched.append(not torch.equal(opt.tensors()[0], before[0])))
    told = []
    tg.warm_up(cfg, model, opt, plans, tg.view_at(cfg, 4, one_rank.device, 64, 160), tell=told.append)
    assert touched == [True, True]
    assert told == ["T 32, 500 classes", "T 64, 50,304 classes", "T 96, 500 classes", "T 80, 50,304 classes",
                    "T 32, 500 classes", "optimizer", "validation"]
    assert all(torch.equal(x, y) for x, y in zip(opt.tensors(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), rng) and opt.n_adam == n_adam


def test_synthetic_tokens_are_legal_and_differ(tg):
    plan = tg.StepPlan(5000, 0, 50_304, (1.0, 0.5), (0.1,))
    tokens, doc_start, targets, weights, classes = tg.synthetic(plan, torch.device("cpu"))
    assert tokens.max() < tg.VOCAB and len(set(tokens.tolist())) == 5000 and torch.equal(tokens[1:], targets[:-1, 0])
    assert not doc_start.any() and targets.shape == weights.shape == (5000, 3) and classes is None
    *_, targets, _, classes = tg.synthetic(replace(plan, n_classes=700), torch.device("cpu"))
    assert len(classes) == 700 and targets.max() < 700


@pytest.mark.parametrize("switch, names", (
    ("none", set()), ("relu2", {"relu2"}), ("none,relu2", {"relu2"}), ("relu2,heads", {"relu2", "heads"})))
def test_pick(tg, switch, names):
    assert tg.pick(switch) == names


def test_pick_all_and_less(tg):
    assert tg.pick("all") == set(tg.FAST)
    assert tg.pick("all,-relu2,-heads") == set(tg.FAST) - {"relu2", "heads"}


@pytest.mark.parametrize("switch", ("every", "all,relu", "relu2,-nothing", ""))
def test_pick_refuses_what_it_does_not_know(tg, switch):
    with pytest.raises(tg.Refusal, match="no replacement named .*Names: attention, "):
        tg.pick(switch)


def test_a_cpu_runs_the_references(tg):
    names, ops = tg.choose(tg.PRESETS["solo"], torch.device("cpu"))
    assert names == [] and vars(ops) == vars(tg.references())


def on_gpu_with(monkeypatch, tg, free_bytes, **changes):
    """check_memory of solo, as on a GPU with so much free memory."""
    cfg = replace(tg.PRESETS["solo"], **changes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 1 << 40))
    comm = SimpleNamespace(rank=0, world=1, device=torch.device("cuda"))
    return cfg, lambda: tg.check_memory(cfg, comm)


def test_memory_that_suffices_is_no_matter(tg, monkeypatch):
    on_gpu_with(monkeypatch, tg, 80 << 30)[1]()


@pytest.mark.parametrize("gib", (12, 16, 20))
def test_the_cure_for_too_little_memory_fits(tg, monkeypatch, gib):
    """Bytes needed and free are named; the settings named keep the tokens of a step and pass the check."""
    cfg, check = on_gpu_with(monkeypatch, tg, gib << 30)
    with pytest.raises(tg.Refusal) as e:
        check()
    text = str(e.value)
    needed, free = (int(x.replace(",", "")) for x in
                    re.search(r"need about ([\d,]+) bytes.*free are ([\d,]+) ", text).groups())
    assert free == gib << 30 and needed > free
    words = re.findall(r"(?:t_factor|n_micro|val_seq)=[\d.]*\d", text.split("Take ")[1])
    cured = tg.parse(["solo", *words])
    assert cured.t_factor * cured.n_micro == 1 or cured.t_factor == 1
    on_gpu_with(monkeypatch, tg, gib << 30, stages=cured.stages, val_seq=cured.val_seq)[1]()


def test_weights_that_do_not_fit_have_no_cure(tg, monkeypatch):
    with pytest.raises(tg.Refusal, match="The weights alone do not fit"):
        on_gpu_with(monkeypatch, tg, 1 << 30)[1]()


def test_make_on_meta_has_the_sizes_of_the_real_thing(tg, one_rank):
    cfg = replace(tg.PRESETS["tiny"], d_model=48, d_head=8, d_mlp=40)
    meta, real = (sum(x.nbytes for x in tg.make(cfg, one_rank, torch.device(d))[1].tensors()) for d in ("meta", "cpu"))
    assert meta == real > 0


def test_fast_attention_in_fp32_is_refused(tg):
    cfg = replace(tg.PRESETS["solo"], dtype="fp32")
    with pytest.raises(tg.Refusal, match="dtype=fp32 with fast=all: .*fast=all,-attention"):
        tg.choose(cfg, torch.device("cuda"))
    names, ops = tg.choose(replace(cfg, fast="add_rows"), torch.device("cuda"))
    assert names == ["add_rows"] and ops.add_rows is tg.add_rows and ops.attention is tg.attention_ref
