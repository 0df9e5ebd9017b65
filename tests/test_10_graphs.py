"""Section 10: what happens before the clock leaves no trace."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch


def test_warm_up_leaves_everything_bit_equal(tg, one_rank):
    """Weights, gradients, states, averages, the count of Adam steps and the random number generator."""
    cfg = replace(tg.PRESETS["tiny"], d_model=48, d_head=8, d_mlp=40, val_seq=64)
    cfg = replace(cfg, stages=tuple(replace(stage, T=stage.T // 8) for stage in cfg.stages))
    model = tg.Model(cfg, torch.device("cpu"))
    opt = tg.Optimizer(tg.param_table(model, cfg), one_rank, n_micro=8, anvil_lr=.02, anvil_wd=1., adam_lr=.01,
                       adam_wd=.1, adam_eps=1e-10, averages=[(row[0].split(), row[-1]) for row in tg.AVERAGES])
    opt.events = [1, 1, 2]                           # states as in the middle of a run
    everything = lambda: [*opt.tensors(), *sum(opt.lazy().values(), [])]   # noqa: E731
    for i, x in enumerate(everything()):
        x.copy_(torch.rand(x.shape, generator=torch.Generator().manual_seed(i)) * (3.9 if x.dtype == torch.int32 else 1))
    averages = [x.fill_(3.0) for of in opt.averages.of for x in of.values()]
    before, rng, n_adam = [x.clone() for x in everything()], torch.get_rng_state(), opt.n_adam
    plans = {}
    for k, (stage, step) in enumerate(zip(cfg.stages, (0, *cfg.stage_ends))):
        plan = replace(tg.plan_at(cfg, step), n_classes=(500, 50_304)[k % 2])
        plans[plan] = tg.view_at(cfg, k, one_rank.device, stage.T)
    touched = []
    real = opt.step
    opt.step = lambda step, pace: (real(step, pace), touched.append(
        [not torch.equal(x, y) for x, y in zip(everything(), before)]))
    told = []
    tg.warm_up(cfg, model, opt, plans, tg.view_at(cfg, 4, one_rank.device, 64, 160), replay=tg.Replay(model, {}),
               tell=told.append)
    assert touched[0][0] and all(touched[1][-3:]) and not any(touched[0][-3:])      # the table moves with the event
    assert told == ["T 32, 500 classes", "T 64, 50,304 classes", "T 96, 500 classes", "T 80, 50,304 classes",
                    "T 32, 500 classes", "optimizer", "validation"]
    assert all(torch.equal(x, y) for x, y in zip(everything(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), rng) and opt.n_adam == n_adam and opt.events == [1, 1, 2]
    assert not opt.near and not any(opt.arrived.values()) and not model.near
    assert len(averages) == 8 and all((x == 3.0).all() for x in averages) and not opt.averages.begun


def test_rooms_stand_in_for_rows(tg, one_rank):
    """Steps that read rows at fixed addresses, as captured ones do, have the losses and gradients of those that read what was
    brought; in a step with fewer rows nothing of the step before is left."""
    cfg = replace(tg.PRESETS["tiny"], d_model=48, d_head=8, d_mlp=40)
    plan = replace(tg.plan_at(cfg, 0), T=64, n_classes=500)
    results = []
    for fixed in (False, True):
        model, opt = tg.make(cfg, one_rank, torch.device("cpu"))
        view = tg.view_at(cfg, 0, one_rank.device, 64)
        for i, p in enumerate(model.parameters()):
            p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.02)
        replay, found = tg.Replay(model, {}), []
        if fixed:
            replay.rooms = opt.rooms(model.most_rows(2 * 64))
            places = [(x.data_ptr(), len(x)) for room in replay.rooms.values() for x in (room.ids, room.values, room.grad)]
        for factor in (3, 5, 1):                     # the last stream has one token again and again
            tokens, *rest = tg.synthetic(plan, one_rank.device)
            batch = (tokens * factor % 997 if factor > 1 else tokens * 0, rest[0], *rest[1:])
            near = opt.pull(model.wanted([batch, batch]), True)
            replay.hold(near)
            found += [replay(batch, view), replay(batch, view)]
            found += [x for name in near for x in (near[name].ids, near[name].grad.clone())]
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            assert (model.near is near) != fixed
        if fixed:
            assert places == [(x.data_ptr(), len(x)) for room in replay.rooms.values() for x in (room.ids, room.values, room.grad)]
            assert places[0][1] == 4 * 128 and places[3][1] == 2 * 128 and len(near["w_value"].ids) == 4
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_a_captured_step_depends_on(tg, one_rank):
    """Lengths, classes, targets and windows of a batch: every stage of the recipe, and every part of one, has a key of its own."""
    cfg = tg.PRESETS["tiny"]
    keys = set()
    for step in range(cfg.n_steps):
        plan, k = tg.plan_at(cfg, step), tg.stage_at(cfg, step)
        view = SimpleNamespace(short=cfg.stages[k].short, long=cfg.stages[k].long)
        keys.add(tg.Replay.shape(tg.synthetic(plan, one_rank.device), view))
    assert len(keys) == 5


def test_warm_up_compiles_all_that_the_run_will_need(tg, one_rank):
    """Events of the sparse tables, of one pair of steps and later of two, the slow rail, head and embedding tied and then
    apart, and an empty validation stream."""
    cfg = replace(tg.PRESETS["tiny"], d_model=48, d_head=8, d_mlp=40, val_seq=64)
    cfg = replace(cfg, stages=tuple(replace(stage, T=stage.T // 8) for stage in cfg.stages))
    ops = tg.references()
    for name in ("anvil_momentum", "anvil_apply", "adam_step", "ngrams"):
        setattr(ops, name, tg.compiled(tg.FAST[name], backend="aot_eager"))
    model = tg.Model(cfg, torch.device("cpu"), ops)
    opt = tg.Optimizer(tg.param_table(model, cfg), one_rank, n_micro=8, anvil_lr=.02, anvil_wd=1., adam_lr=.01,
                       adam_wd=.1, adam_eps=1e-10, ops=ops,
                       averages=[(row[0].split(), row[-1]) for row in tg.AVERAGES])
    plan = replace(tg.plan_at(cfg, 0), n_classes=500)
    view = tg.view_at(cfg, 0, one_rank.device, plan.T)
    before = tg.n_compiled()
    tg.warm_up(cfg, model, opt, {plan: view}, tg.view_at(cfg, 4, one_rank.device, 64, 160), replay=tg.Replay(model, {}),
               tell=lambda text: None)
    warmed = tg.n_compiled()
    assert warmed > before
    for step, event in ((0, 0), (1, 1), (2, 0), (3, 2), (4, 0), (5, 2)):
        batch = tg.synthetic(plan, one_rank.device)
        model.near = opt.pull(model.wanted([batch]), True)
        model(batch, view).backward()
        opt.step(step, tg.Pace(1.0, 0.9, 0.85, 0.4, event, step < 4, step == 3, (0.5,) * 5))
    assert opt.events == [1, 2, 2]
    empty = [x[:0] for x in tg.synthetic(plan, one_rank.device)[:3]]
    assert len(model.wanted([empty])["w_gram"]) == 0 and model.wanted([empty])["w_gram"].dtype == torch.int64
    assert tg.n_compiled() == warmed


def test_synthetic_tokens_are_legal_and_differ(tg):
    plan = tg.StepPlan(5000, 0, 50_304, (1.0, 0.5), (0.1,))
    tokens, doc_start, folded, targets, weights, classes = tg.synthetic(plan, torch.device("cpu"))
    assert tokens.max() < tg.VOCAB and len(set(tokens.tolist())) == 5000 and torch.equal(tokens[1:], targets[:-1, 0])
    assert not doc_start.any() and targets.shape == weights.shape == (5000, 3) and classes is None
    *_, targets, _, classes = tg.synthetic(replace(plan, n_classes=700), torch.device("cpu"))
    assert len(classes) == 700 and targets.max() < 700 and classes[-1] == 50_257 and (classes.diff() > 0).all()
    assert torch.equal(folded, tokens)
    *_, classes = tg.synthetic(replace(plan, n_classes=50_260), torch.device("cpu"))
    assert classes[-1] == 50_259 and classes[50_257] == 50_257


@pytest.mark.parametrize("switch, names", (
    ("none", set()), ("relu2", {"relu2"}), ("none,relu2", {"relu2"}), ("relu2,heads", {"relu2", "heads"})))
def test_pick(tg, switch, names):
    assert tg.pick(switch) == names


def test_pick_all_and_less(tg):
    assert tg.pick("all") == {*tg.FAST, "replay"}
    assert tg.pick("all,-relu2,-heads,-replay") == set(tg.FAST) - {"relu2", "heads"}
    assert tg.pick("none") == set() and tg.pick("replay") == {"replay"}


@pytest.mark.parametrize("switch", ("every", "all,relu", "relu2,-nothing", ""))
def test_pick_refuses_what_it_does_not_know(tg, switch):
    with pytest.raises(tg.Refusal, match="no replacement named .*Names: attention, "):
        tg.pick(switch)


def test_a_cpu_runs_the_references(tg):
    names, ops = tg.choose(tg.PRESETS["solo"], torch.device("cpu"))
    assert names == [] and vars(ops) == vars(tg.references()) | {"captures": False}


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
    words = re.findall(r"(?:t_factor|n_micro|val_seq|ngram_rows)=[\d.]*\d|fast=[a-z,-]+", text.split("Take ")[1])
    cured = tg.parse(["solo", *words])
    assert cured.t_factor * cured.n_micro == 1 or cured.t_factor == 1
    on_gpu_with(monkeypatch, tg, gib << 30, stages=cured.stages, n_micro=cured.n_micro, val_seq=cured.val_seq,
                ngram_rows=cured.ngram_rows, fast=cured.fast)[1]()


@pytest.mark.parametrize("world, gib", ((1, 80), (2, 80), (4, 40), (8, 36)))
def test_the_largest_table_that_fits_is_named(tg, monkeypatch, world, gib):
    """130 GB of rows on `world` GPUs; the number named fits, with a little more it would not; streams keep their length."""
    def check(**changes):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gib << 30, 1 << 40))
        tg.check_memory(replace(tg.RECORD, **changes), SimpleNamespace(rank=0, world=world, device=torch.device("cuda")))
    assert tg.memory_needed(tg.RECORD, SimpleNamespace(rank=0, world=world))[1] == 84_602_880 // world * (768 * 2 + 4 + 4)
    with pytest.raises(tg.Refusal, match=r"ngram_rows=84,602,880 need about .* GiB\). Take ngram_rows=\d+, the largest") as e:
        check()
    rows = int(re.search(r"Take ngram_rows=(\d+)", str(e.value))[1])
    assert 0 < rows < 84_602_880 and rows % 16 == 0
    check(ngram_rows=rows)
    with pytest.raises(tg.Refusal):
        check(ngram_rows=rows + 32)


def test_weights_that_do_not_fit_have_no_cure(tg, monkeypatch):
    for gib in (1, 9):
        with pytest.raises(tg.Refusal, match=r"free are .* GiB\). No shorter streams fit beside the weights"):
            on_gpu_with(monkeypatch, tg, gib << 30)[1]()


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
