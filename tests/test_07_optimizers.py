"""Section 7: polar factor, Muon, Adam, and the sharded optimizer as a whole."""

import copy
from dataclasses import replace

import pytest
import torch
from conftest import run


def rand(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 24, 96), (2, 96, 96), (2, 352, 96), (1, 1, 8)])
def test_polar_keeps_singular_vectors_and_brings_values_near_one(tg, shape):
    g = rand(0, *shape).double()
    U, S, Vt = torch.linalg.svd(g, full_matrices=False)
    got = torch.diagonal(U.mT @ tg.polar(g) @ Vt.mT, dim1=1, dim2=2)
    well = S > 0.003 * 1.03 * g.norm(dim=(1, 2))[:, None]
    assert ((got[well] > 0.85) & (got[well] < 1.15)).all()
    rest = tg.polar(g) - U @ torch.diag_embed(got) @ Vt
    assert rest.abs().max() < 1e-10


def test_polar_follows_the_scalar_map(tg):
    """The map of a singular value as published for five rounds: 0.01 -> 1.03, 0.1 -> 1.06, 0.3 -> 0.98."""
    for s, want in ((1e-3, .86), (.01, 1.03), (.1, 1.06), (.3, .98), (.6, .87), (.98, .98)):
        x = s
        for a, b, c in tg.POLAR_STEPS:
            x = x * (a + b * x**2 + c * x**4)
        assert x == pytest.approx(want, abs=.011)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_polar_of_zero_tiny_and_huge_is_finite(tg, size):
    u = tg.polar(size * rand(0, 2, 16, 48).clamp(-1, 1))
    assert u.isfinite().all() and (size > 0 or not u.any())


def muon_step(tg, p, g, m, *, lr, mu, wd):
    """One step of the two functions that the optimizer calls around polar."""
    u = tg.polar(tg.muon_momentum(g, m, torch.tensor(mu), 1.0, torch.float32))
    tg.muon_apply(p, None, u, torch.tensor(lr), torch.tensor(wd))


def adam_step(tg, p, g, m, m2, *, lr, betas, wd, eps, count):
    """tg.adam_step with the bias correction that the optimizer puts into the rate."""
    rate = lr * (1 - betas[1] ** count) ** 0.5 / (1 - betas[0] ** count)
    tg.adam_step(p, g, m, m2, torch.tensor(rate), torch.tensor(lr * lr * wd), betas=betas, eps=eps, share=1.0)


def test_first_muon_step_is_semi_orthogonal_and_decay_is_cautious(tg):
    p, g, m = rand(0, 2, 16, 40), rand(1, 2, 16, 40), torch.zeros(2, 16, 40)
    before = p.clone()
    muon_step(tg, p, g, m, lr=0.1, mu=0.9, wd=0.0)
    u = (before - p) / 0.1
    S = torch.linalg.svdvals(u)
    assert S.min() > 0.8 and S.max() < 1.2
    torch.testing.assert_close(m, 0.1 * g)
    q = before.clone()
    muon_step(tg, q, g, torch.zeros_like(m), lr=0.1, mu=0.9, wd=0.5)
    agrees = (u * before >= 0)
    torch.testing.assert_close(q, p - 0.1 * 0.5 * before * agrees, rtol=0, atol=1e-6)
    assert 0 < agrees.float().mean() < 1


def test_muon_momentum_is_nesterov(tg):
    """Two steps against the recurrence written out."""
    p, m, gs, mu = torch.zeros(1, 8, 8), torch.zeros(1, 8, 8), [rand(i, 1, 8, 8) for i in (3, 4)], 0.8
    for g in gs:
        muon_step(tg, p, g, m, lr=1.0, mu=mu, wd=0.0)
    m1 = 0.2 * gs[0]
    m2 = 0.8 * m1 + 0.2 * gs[1]
    want = -tg.polar(0.2 * gs[0] + 0.8 * m1) - tg.polar(0.2 * gs[1] + 0.8 * m2)
    torch.testing.assert_close(p, want, rtol=0, atol=1e-4)     # polar multiplies rounding by up to a thousand


def test_zero_gradient_moves_nothing_but_decay(tg):
    p = rand(0, 1, 8, 8)
    q = p.clone()
    muon_step(tg, q, torch.zeros_like(p), torch.zeros_like(p), lr=0.1, mu=0.9, wd=0.5)
    torch.testing.assert_close(q, p * 0.95)
    adam_step(tg, q := p.clone(), torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p),
              lr=0.1, betas=(.9, .99), wd=.5, eps=1e-10, count=1)
    assert torch.equal(q, p)


def test_adam_equals_torch_adam(tg):
    """Ten steps; torch adds eps after the bias correction, which at 1e-10 is no difference."""
    p = rand(0, 50)
    ref = p.clone().requires_grad_()
    m, m2, adam = torch.zeros(50), torch.zeros(50), torch.optim.Adam([ref], lr=0.01, betas=(0.8, 0.95), eps=1e-10)
    for count in range(1, 11):
        ref.grad = rand(count, 50)
        adam.step()
        adam_step(tg, p, ref.grad, m, m2, lr=0.01, betas=(0.8, 0.95), wd=0.0, eps=1e-10, count=count)
    torch.testing.assert_close(p, ref.data, rtol=1e-5, atol=1e-6)


def test_adam_decay_acts_only_where_it_agrees_and_with_lr_squared(tg):
    p, g = rand(0, 200), rand(1, 200)
    runs = []
    for wd in (0.0, 3.0):
        q = p.clone()
        adam_step(tg, q, g, torch.zeros(200), torch.zeros(200), lr=0.1, betas=(.5, .9), wd=wd, eps=1e-10, count=1)
        runs.append(q)
    update = p - runs[0]
    torch.testing.assert_close(runs[1], runs[0] - (update * p > 0) * 0.01 * 3.0 * p)


def optimizer_of(tg, comm, model, cfg):
    return tg.Optimizer(tg.param_table(model, cfg), comm, n_micro=cfg.n_micro, muon_lr=cfg.muon_lr,
                        muon_wd=cfg.muon_wd, adam_lr=cfg.adam_lr, adam_wd=cfg.adam_wd, adam_eps=cfg.adam_eps)


def small_model(tg, **changes):
    cfg = replace(tg.PRESETS["tiny"], d_model=48, d_head=8, d_mlp=40, **{"ngram_rows": 1600} | changes)
    return cfg, tg.Model(cfg, torch.device("cpu"))


def set_gradients(model, seed, opt=None):
    """Random gradients for all parameters; with opt also for every third row of the sparse tables."""
    for i, p in enumerate(p for p in model.parameters() if p.grad is not None):
        p.grad.add_(rand(100 * seed + i, *p.shape).to(p.dtype))
    if opt is not None:
        near = opt.pull({name: torch.arange(0, len(getattr(model, name)), 3) for name in ("w_value", "w_gram")}, True)
        for rows in near.values():
            rows.grad.copy_(rand(seed, *rows.grad.shape))
        return {name: torch.zeros(getattr(model, name).shape).index_put((rows.ids,), rows.grad) for name, rows in near.items()}


def test_adam_parameters_step_on_odd_steps_with_the_sum_of_two_gradients(tg, one_rank):
    """Step 0 leaves them alone, step 1 equals one Adam step on the mean over micro-batches of the sum."""
    cfg, model = small_model(tg)
    opt = optimizer_of(tg, one_rank, model, cfg)
    model.w_gram.data.copy_(rand(3, *model.w_gram.shape))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    sparse = set_gradients(model, 1, opt)
    opt.step(0, 1.0, 0.9)
    tables = tuple(name for names, kind, *_ in tg.PARAMS if kind != "bank" for name in names.split())
    assert all(torch.equal(getattr(model, name), start[name]) for name in tables)
    assert all(not torch.equal(getattr(model, name), start[name]) for name in ("qk", "vo", "mlp"))
    more = set_gradients(model, 2, opt)
    total = {name: getattr(model, name).grad.clone() for name in tables if name not in sparse}
    total |= {name: grad + more[name] for name, grad in sparse.items()}
    opt.step(1, 1.0, 0.9, 1)
    for row in tg.param_table(model, cfg):
        if row.name == "w_gram":
            p, g, lr = start["w_gram"], total["w_gram"] / 8, cfg.adam_lr * 70 * cfg.ngram_lr
            u = g / (0.05 * g.square().mean(1, keepdim=True)).sqrt().add(1e-10) * lr * 0.05 ** 0.5
            want = p - (u + (u * p > 0) * lr * lr * 0.005 * 5 * p)
            torch.testing.assert_close(model.w_gram.data, want)
            assert torch.equal(model.w_gram.data[1::3], p[1::3])
        elif row.name in tables:
            p = start[row.name].clone()
            adam_step(tg, p, total[row.name] / 8, torch.zeros_like(p), torch.zeros_like(p), lr=cfg.adam_lr * row.lr_mul,
                      betas=row.betas, wd=0.005 * row.wd_mul, eps=1e-10, count=1)
            torch.testing.assert_close(getattr(model, row.name).data, p)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    assert model.w_gram.grad is None and model.w_value.grad is None and not any(opt.arrived.values())


def test_padding_matrices_never_move(tg, one_rank):
    cfg, model = small_model(tg)
    opt = optimizer_of(tg, one_rank, model, cfg)
    for step in range(4):
        for bank in (model.qk, model.vo, model.mlp):
            bank.grad[:22] = rand(step, *bank[:22].shape)
        opt.step(step, 1.0, 0.9)
    assert not model.vo[22:].any() and not model.mlp[22:].any() and not model.qk[66:].any()


def test_weights_and_gradients_keep_their_addresses(tg, one_rank):
    cfg, model = small_model(tg)
    opt = optimizer_of(tg, one_rank, model, cfg)
    find = lambda: [x.data_ptr() for p in model.parameters() for x in (p, p.grad) if x is not None]   # noqa: E731
    places = find()
    for step in range(2):
        set_gradients(model, step, opt)
        opt.step(step, 1.0, 0.9, step)
    assert places == find()


def test_bf16_banks_follow_their_fp32_twins(tg, one_rank):
    """Masters kept as bf16 + int16 move like fp32 weights: 20 small steps that bf16 alone would lose."""
    cfg, exact = small_model(tg)
    low = copy.deepcopy(exact)
    low.qk.data = low.qk.data.bfloat16()
    exact.qk.data = low.qk.data.float()
    opts = [optimizer_of(tg, one_rank, model, cfg) for model in (exact, low)]
    start = exact.qk.detach().clone()
    for step in range(20):
        for model, opt in zip((exact, low), opts):
            model.qk.grad.copy_(torch.ones_like(start))
            opt.step(2 * step, 1e-3, 0.9)
    moved = (exact.qk - start).norm()
    master = tg.join_master(low.qk.data, opts[1].state["qk"]["lo"])
    assert (master - exact.qk).norm() < 0.02 * moved
    assert (low.qk.float() - exact.qk).abs().max() <= exact.qk.abs().max() * 2**-8


RANKS = """
import sys, torch
sys.path.insert(0, {root!r})
import train_gpt as tg
from dataclasses import replace
rank, local, world = tg.launch_env()
cfg = replace(tg.PRESETS["tiny"], d_model=48, d_head=8, d_mlp=40, ngram_rows=1600)
comm = tg.Comm(cfg, rank, local, world)
model = tg.Model(cfg, comm.device, None, (rank, world))
def drawn(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))
opt = tg.Optimizer(tg.param_table(model, cfg), comm, n_micro=8, muon_lr=.02, muon_wd=1., adam_lr=.01, adam_wd=.1,
                   adam_eps=1e-10)
n_rows = {{"w_value": 4 * 50304, "w_gram": 1600}}
for step in range(4):
    mine = range(rank * 8 // world, (rank + 1) * 8 // world)
    # what a micro-batch reads: a tenth of the rows; in step 1 micro-batch 3 nothing, in step 2 all rows of the first owner
    read = {{(name, m): (drawn(10 * step + m, n) < 0.1).nonzero()[:, 0] % (n // 8 if step == 2 else n) *
             (step != 1 or m != 3) for name, n in n_rows.items() for m in range(8)}}
    read = {{key: ids.unique()[:len(ids) * (step != 1 or key[1] != 3)] for key, ids in read.items()}}
    near = opt.pull({{name: torch.cat([read[name, m] for m in mine]).unique() for name in n_rows}}, True)
    for name, rows in near.items():
        whole = tg.whole(comm, getattr(model, name).data)
        want = comm.collect(whole if rank == 0 else None)[0][rows.ids]
        assert torch.equal(rows.values.detach(), want), "another row came"
        for m in mine:
            ids = read[name, m]
            mean = torch.randn(48, generator=torch.Generator().manual_seed(len(name)))
            rows.grad.index_add_(0, torch.searchsorted(rows.ids, ids), mean * (0.5 + drawn(1000 * step + m, len(ids), 48)))
    for m in mine:
        names = sorted(dict(model.named_parameters()), key=lambda name: name in ("w_gram", *tg.POINTER))
        for i, name in enumerate(names):
            p = getattr(model, name)
            if name in n_rows:
                continue
            mean = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            noise = torch.rand(p.shape, generator=torch.Generator().manual_seed(1000 * step + 100 * m + i))
            p.grad.add_(mean * (0.5 + noise))   # no cancellation: Adam would turn its rounding into a full step
    opt.step(step, 1.0, 0.9, step % 2)
sums = [p.double().sum().item() for name, p in model.named_parameters() if name not in n_rows]
assert all(s == sums for s in comm.collect(sums)), "ranks disagree"
tables = [tg.whole(comm, x) for name in n_rows for x in (getattr(model, name).data, opt.state[name]["m2"])]
if rank == 0:
    torch.save(tables + [p.data for name, p in model.named_parameters() if name not in n_rows], sys.argv[1])
comm.close()
"""


def test_one_two_four_and_eight_ranks_make_the_same_step(tg, tmp_path):
    """The same micro-batch gradients spread over 1, 2, 4 and 8 gloo ranks: weights equal to 1e-6 relative. Rows that are
    brought are those of their owners, also where a rank wants none, or all want the rows of one owner."""
    from conftest import ROOT
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(root=str(ROOT)))
    weights = []
    for ranks in (1, 2, 4, 8):
        out = run([tmp_path / f"{ranks}.pt"], ranks, cwd=tmp_path, script=script)
        assert out.returncode == 0, out.stderr
        weights.append(torch.load(tmp_path / f"{ranks}.pt"))
    for other in weights[1:]:
        for a, b in zip(weights[0], other, strict=True):
            assert a.any() and (a - b).norm() <= 1e-6 * a.norm()


# ---- sparse tables -----------------------------------------------------------------------------------------

def test_an_event_takes_the_gradients_of_all_steps_since_the_last_one(tg, one_rank):
    """Four steps, an event after the fourth with decays squared and double weight decay; nothing moves before, nothing is lost."""
    cfg, model = small_model(tg)
    opt = optimizer_of(tg, one_rank, model, cfg)
    model.w_gram.data.copy_(rand(3, *model.w_gram.shape))
    start, total = {name: getattr(model, name).detach().clone() for name in ("w_gram", "w_value")}, {}
    for step in range(4):
        grads = set_gradients(model, step, opt)
        total = {name: total.get(name, 0) + g for name, g in grads.items()}
        assert all(torch.equal(getattr(model, name).data, x) for name, x in start.items())
        opt.step(step, 1.0, 0.9, 2 * (step == 3))
    beta2, lr = 0.95**2, cfg.adam_lr * 70 * cfg.ngram_lr
    p, g = start["w_gram"], total["w_gram"] / 8
    m2 = (1 - beta2) * g.square().mean(1)
    u = g / m2.sqrt().add(1e-10)[:, None] * lr * (1 - beta2) ** 0.5
    torch.testing.assert_close(model.w_gram.data, p - (u + (u * p > 0) * lr * lr * 0.005 * 10 * p))
    torch.testing.assert_close(opt.state["w_gram"]["m2"], m2)
    p = start["w_value"].clone()
    adam_step(tg, p, total["w_value"] / 8, torch.zeros_like(p), torch.zeros_like(p), lr=lr / cfg.ngram_lr, betas=(0.75**2, beta2),
              wd=0.005 * 10, eps=1e-10, count=1)
    torch.testing.assert_close(model.w_value.data, p)


def test_pulling_for_validation_leaves_no_trace(tg, one_rank):
    """Between two steps and within a cycle: routes and what has arrived stay, and the next event is the same."""
    results = []
    for validates in (False, True):
        cfg, model = small_model(tg)
        opt = optimizer_of(tg, one_rank, model, cfg)
        for step in range(4):
            set_gradients(model, step, opt)
            if validates:
                routes, arrived = dict(opt.near), {name: list(x) for name, x in opt.arrived.items()}
                near = opt.pull({"w_value": torch.tensor([1, 2]), "w_gram": torch.tensor([0, 1, 7])}, False)
                assert all(rows.grad is None and not rows.values.requires_grad for rows in near.values())
                assert opt.near == routes and opt.arrived == arrived
            opt.step(step, 1.0, 0.9, 2 * (step == 3))
        results.append([x.clone() for x in (*opt.tensors(), *opt.lazy()["w_gram"])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_gradient_has_the_size_of_the_table(tg, one_rank):
    """Nothing that a step makes is as long as the table but the table, its second moments and its counts."""
    cfg, model = small_model(tg, ngram_rows=80_000)
    opt = optimizer_of(tg, one_rank, model, cfg)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out])
                         if isinstance(x, torch.Tensor) and x.data_ptr() != model.w_gram.data_ptr() and x.shape[-1:] == (48,)
                         and len(x) == len(model.w_gram))
            return out
    ids = {"w_value": torch.arange(0, 4000, 7), "w_gram": torch.arange(0, 80_000, 9)}
    with Watch():
        near = opt.pull(ids, True)
        for rows in near.values():
            rows.grad.add_(1)
        opt.step(1, 1.0, 0.9, 1)
    assert not sizes and model.w_gram.data[::9].all()
