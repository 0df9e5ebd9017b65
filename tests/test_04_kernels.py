"""Section 4 and the rows of FAST, as far as a CPU can tell: tests/test_gpu.py compares them where they run."""

import pytest
import torch

KINDS = {"bitwise", "reorder", "approx"}
COMPILED = ("loss_rows", "heads", "mix_norm", "relu2", "muon_momentum", "muon_apply", "adam_step")


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


@pytest.mark.parametrize("n_classes", (40, 37))
def test_loss_rows_equal_cross_entropy(tg, n_classes):
    """Both forms against autograd of the dense formula in fp64; masked classes get no gradient."""
    logits = 4 * draws(0)(13, 40).double()
    targets = torch.arange(13) * 5 % n_classes
    x = logits.clone().requires_grad_()
    z = 23 * torch.sigmoid((x + 5) / 7.5)
    want = torch.nn.functional.cross_entropy(z[:, :n_classes], targets, reduction="none")
    (gradient,) = torch.autograd.grad(want.sum(), x)
    for f, dtype in ((tg.loss_rows_ref, torch.float64), (tg.loss_rows_ref, torch.float32), (tg.loss_rows, torch.float32)):
        nll, dlogits = f(logits.to(dtype, copy=True), targets, n_classes, True)
        torch.testing.assert_close(nll.double(), want.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dlogits.double(), gradient, rtol=1e-4, atol=1e-6)
        assert not dlogits[:, n_classes:].any()
        nll, nothing = f(logits.to(dtype, copy=True), targets, n_classes, False)
        assert nothing is None
        torch.testing.assert_close(nll.double(), want.detach(), rtol=1e-5, atol=1e-5)
