"""Section 4 and the rows of FAST, as far as a CPU can tell: tests/test_gpu.py compares them where they run."""

import pytest
import torch

KINDS = {"bitwise", "reorder", "approx"}
COMPILED = ("loss_rows", "heads", "relu2", "smear", "key_offset", "exclude_self", "muon_momentum", "muon_apply", "adam_step")


def draws(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def test_rows_are_complete(tg):
    for name, row in tg.FAST.items():
        assert row.kind in KINDS and callable(row.ref) and callable(row.fast) and 0 < row.tol < 0.1, name
        assert row.build in ("", "glue", "step"), name
        assert row.fast is not row.ref or row.build, f"{name} replaces nothing"
    assert set(COMPILED) == {name for name, row in tg.FAST.items() if row.build}
    assert vars(tg.references()) == {name: row.ref for name, row in tg.FAST.items()}


def all_results(name, row, f, seed, T):
    """Results and, for glue, gradients; for the others the arguments as they are afterwards."""
    args, settings = row.example(draws(seed), "small")
    assert len(args[0]) in (T, T // 64, max(T // 64, 1)), "the example follows EXAMPLE_T"
    floats = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
    leaves = [] if row.build != "glue" else floats[:1] if name == "heads" else floats
    for x in leaves:
        x.requires_grad_()
    with torch.set_grad_enabled(bool(leaves)):
        out = f(*args, **settings)
    out = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    if leaves:
        draw = draws(seed + 1)
        return [*out, *torch.autograd.grad(out, leaves, [draw(*x.shape) for x in out])]
    return [*out, *(x for x in args if isinstance(x, torch.Tensor) and name != "loss_rows")]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_rows_equal_their_reference_at_any_length_with_one_compilation(tg, name, monkeypatch):
    """Traced as on a GPU, but with PyTorch's own kernels below; results, gradients and changes in place, in fp32."""
    torch._dynamo.reset()
    row, before = tg.FAST[name], tg.n_compiled()
    fast = tg.compiled(row, backend="aot_eager")
    for seed, T in enumerate((192, 320, 1024)):
        monkeypatch.setitem(tg.EXAMPLE_T, "small", T)
        got, want = (all_results(name, row, f, seed, T) for f in (fast, row.ref))
        assert len(got) == len(want)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert tg.n_compiled() == before + 1


def test_glue_runs_uncompiled_where_no_gradient_is_wanted(tg):
    calls = []
    row = tg.Fast("reorder", lambda x: calls.append("ref"), lambda x: calls.append("fast"), None, "glue")
    with torch.no_grad():
        tg.compiled(row, backend="eager")(torch.ones(2))
    assert calls == ["ref"]


def test_add_rows_equals_its_reference(tg):
    row = tg.FAST["add_rows"]
    (grad, ids, dy), _ = row.example(draws(0), "small")
    grad.fill_(1.0)
    plain, fast = grad.clone(), grad.clone()
    row.ref(plain, ids, dy)
    row.fast(fast, ids, dy)
    torch.testing.assert_close(fast, plain)
    want = torch.ones_like(grad)
    for i, y in zip(ids.tolist(), dy):
        want[i] += y
    torch.testing.assert_close(plain, want)


@pytest.mark.parametrize("starts", ([0], [0, 1, 2, 3], [0, 5, 6, 40], [0, 63]))
def test_bounds_of_documents(tg, starts):
    start = torch.tensor([max(s for s in starts if s <= t) for t in range(64)], dtype=torch.int32)
    documents = tg.Documents(start)
    assert documents.bounds.dtype == torch.int32 and documents.bounds.tolist() == [*starts, 64]
    assert documents.longest == max(b - a for a, b in zip(starts, [*starts[1:], 64]))


def test_paired_heads_equal_an_explicit_interleave(tg):
    """Row 2t + j of stream p is head 2p + j of token t; attention over that stream, and back."""
    q, k, v = (draws(i)(7, 6, e).double() for i, e in ((0, 4), (1, 4), (2, 8)))
    x = tg.paired(q)
    assert x.shape == (14, 3, 4) and torch.equal(tg.unpaired(x), q)
    assert all(torch.equal(x[2 * t + j, p], q[t, 2 * p + j]) for t in range(7) for j in range(2) for p in range(3))
    documents = tg.Documents(torch.tensor([0, 0, 0, 3, 3, 5, 5], dtype=torch.int32))
    assert documents.doubled.start.tolist() == [0] * 6 + [6] * 4 + [10] * 4
    assert documents.goes_on[:, 0].tolist() == [False, True, True, False, True, False, True]
    y = tg.attention_ref(q, k, v, documents, window=3, pairs=True)
    for t, head in ((0, 0), (0, 1), (2, 0), (2, 1), (4, 4), (6, 3), (6, 5)):
        p, place = head // 2, 2 * t + head % 2
        seen = [c for c in range(14) if 2 * documents.start[t] <= c <= place and c >= place - 3]
        scores = torch.stack([q[t, head] @ k[c // 2, 2 * p + c % 2] for c in seen]).softmax(0)
        want = sum(w * v[c // 2, 2 * p + c % 2] for w, c in zip(scores, seen))
        torch.testing.assert_close(y[t, head], want, rtol=1e-6, atol=1e-6)


def test_smear_and_key_offset_stay_inside_the_document(tg):
    """Three-line forms: the token before counts only where the document goes on."""
    documents = tg.Documents(torch.tensor([0, 0, 2, 2, 2, 5], dtype=torch.int32))
    e, gate, k = draws(0)(6, 8), draws(1)(6, 1), draws(2)(6, 2, 8)
    got, moved = tg.smear(e, documents.goes_on, gate), tg.key_offset(k, documents.goes_on)
    for t in range(6):
        inside = t in (1, 3, 4)
        torch.testing.assert_close(got[t], e[t] + gate[t] * e[t - 1] if inside else e[t])
        assert torch.equal(moved[t], torch.cat((k[t, :, :4], k[t - inside, :, 4:]), -1))
    assert torch.equal(k, draws(2)(6, 2, 8)), "key_offset makes a new tensor"


def test_exclude_self_takes_the_own_value_out(tg):
    """With tanh(alpha) = 1 nothing along v is left, with alpha = 0 nothing is taken; v = 0 does no harm."""
    y, v = draws(0)(5, 3, 8), draws(1)(5, 3, 8)
    v[2] = 0
    all_out = tg.exclude_self(y, v, torch.full((5, 3), 50.0))
    torch.testing.assert_close((all_out * v).sum(-1), torch.zeros(5, 3), rtol=0, atol=1e-5)
    assert torch.equal(tg.exclude_self(y, v, torch.zeros(5, 3)), y) and torch.equal(all_out[2], y[2])
    half = tg.exclude_self(y, v, torch.full((5, 3), 0.3))
    torch.testing.assert_close(half, y + (all_out - y) * torch.tensor(0.3).tanh())


@pytest.mark.parametrize("n_classes", (40, 37))
def test_loss_rows_equal_cross_entropy(tg, n_classes):
    """Both forms against autograd of the dense formula in fp64; masked classes get no gradient."""
    logits = 4 * draws(0)(13, 40).double()
    targets, weights = torch.arange(13)[:, None] * 5 % n_classes, torch.ones(13, 1)
    x = logits.clone().requires_grad_()
    z = 23 * torch.sigmoid((x + 5) / 7.5)
    want = torch.nn.functional.cross_entropy(z[:, :n_classes], targets[:, 0], reduction="none")
    (gradient,) = torch.autograd.grad(want.sum(), x)
    for f, dtype in ((tg.loss_rows_ref, torch.float64), (tg.loss_rows_ref, torch.float32), (tg.loss_rows, torch.float32)):
        nll, dlogits = f(logits.to(dtype, copy=True), targets, weights, n_classes, True)
        torch.testing.assert_close(nll.double(), want.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dlogits.double(), gradient, rtol=1e-4, atol=1e-6)
        assert not dlogits[:, n_classes:].any()
        nll, nothing = f(logits.to(dtype, copy=True), targets, weights, n_classes, False)
        assert nothing is None
        torch.testing.assert_close(nll.double(), want.detach(), rtol=1e-5, atol=1e-5)
