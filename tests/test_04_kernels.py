"""Section 4 and the rows of FAST, as far as a CPU can tell: tests/test_gpu.py compares them where they run."""

import pytest
import torch

KINDS = {"bitwise", "reorder", "approx"}
COMPILED = ("loss_rows", "heads", "relu2", "smear", "mix", "signed_sum", "key_offset", "exclude_self", "anvil_momentum", "anvil_apply",
            "adam_step", "ngrams", "pointer_read", "pointer_slopes")


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
        nll, dlogits, _ = f(logits.to(dtype, copy=True), targets, weights, n_classes, True)
        torch.testing.assert_close(nll.double(), want.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dlogits.double(), gradient, rtol=1e-4, atol=1e-6)
        assert not dlogits[:, n_classes:].any()
        nll, nothing, _ = f(logits.to(dtype, copy=True), targets, weights, n_classes, False)
        assert nothing is None
        torch.testing.assert_close(nll.double(), want.detach(), rtol=1e-5, atol=1e-5)


# ---- n-grams -----------------------------------------------------------------------------------------------

LINE = torch.tensor([50256, 262, 3797, 3332, 261, 262, 2603, 13], dtype=torch.int32)   # "The cat sat on the mat.", folded


def test_ngrams_are_the_published_ones(tg):
    rows = tg.ngrams(LINE, torch.zeros(8, dtype=torch.int32), 84_602_880, 8192)
    assert rows.dtype == torch.int64 and rows.T.tolist() == [
        [42301439, 20144454, 13299658, 17915303, 15465955, 16606725, 12847419, 28004665],
        [84602879, 84602879, 43894772, 66538160, 64673410, 54499366, 49718109, 79161173],
        [0, 5162, 3737, 4395, 3623, 8061, 6247, 3498], [0, 0, 7525, 4693, 6334, 7913, 2750, 5704]]


@pytest.mark.parametrize("half", (500_001, 42_301_440, 8))
def test_ngrams_equal_their_definition_token_by_token(tg, half):
    """In Python's own integers, wrapped by hand; nothing is hashed across the start of a document."""
    tokens = torch.randint(0, 50_257, (300,), generator=torch.Generator().manual_seed(5)).int()
    starts = [0, 1, 2, 3, 50, 100, 101, 103, 290]
    start = torch.tensor([max(s for s in starts if s <= t) for t in range(300)], dtype=torch.int32)
    x = tokens.tolist()

    def mixed(t, factors):
        h = 0
        for back, factor in enumerate(factors):
            h ^= (x[t - back] * factor) % 2**32
        return h - 2**32 * (h >= 2**31)
    got, wrapped = tg.ngrams(tokens, start, 2 * half, 8192), 0
    for t in range(300):
        two, three = t - 1 >= start[t], t - 2 >= start[t]
        wrapped += bool(three and mixed(t, (17351, 60961, 45259)) < 0)
        want = [mixed(t, (36313, 27191)) % (half - 1) if two else half - 1,
                half + mixed(t, (17351, 60961, 45259)) % (half - 1) if three else 2 * half - 1,
                mixed(t, (48271, 30011)) & 8191 if two else 0, mixed(t, (58699, 39779, 26801)) & 8191 if three else 0]
        assert got[t].tolist() == want, t
    assert wrapped > 50 and tg.ngrams(tokens[:0], start[:0], 2 * half, 8192).shape == (0, 4)


# ---- rows of sparse tables ---------------------------------------------------------------------------------

def dense_event(p, m2, g, beta2, rate, decay, eps):
    """The same for all rows at once, those without a gradient too."""
    m2 = m2 * beta2 + (1 - beta2) * g.square().mean(1)
    u = g / (m2.sqrt() + eps)[:, None] * rate
    return p - (u + decay * p * (u * p > 0)), m2


@pytest.mark.parametrize("seed", range(5))
def test_lazy_rows_equal_dense_ones_bit_for_bit(tg, seed):
    """50 events with random rows, none and all among them; beta2 changes on the way, as in a run."""
    R, D, rand = 40, 6, draws(seed)
    pick = torch.Generator().manual_seed(seed)
    p, m2, last = rand(R, D) * (torch.arange(R) % 2)[:, None], torch.zeros(R), torch.zeros(R, dtype=torch.int32)
    dense, dense_m2, betas2, owed = p.clone(), m2.clone(), torch.tensor([0.95] * 20 + [0.9025] * 30), 0
    for event in range(50):
        touched = torch.rand(R, generator=pick) < (0.0, 0.05, 0.3, 1.0)[int(torch.randint(4, (1,), generator=pick))]
        g, rate, decay = rand(R, D) * touched[:, None], torch.tensor(0.1 + 0.01 * event), torch.tensor(0.03)
        ids = touched.nonzero()[:, 0]
        tg.row_event_ref(p, m2, last, ids, g[ids], betas2=betas2[:event + 1], rate=rate, decay=decay, eps=1e-10)
        dense, dense_m2 = dense_event(dense, dense_m2, g, betas2[event], rate, decay, 1e-10)
        assert torch.equal(p, dense) and torch.equal(m2[ids], dense_m2[ids])
        assert (last[ids] == event + 1).all()
        owed += not torch.equal(m2, dense_m2)
    assert owed > 20                                 # rows that were not touched owe decays


def test_row_event_equals_its_reference(tg):
    row = tg.FAST["row_event"]
    (p, m2, last, ids, g), settings = row.example(draws(0), "small")
    assert 0 < (last[ids] < 4).sum() < len(ids) and int(last.min()) == 0
    plain, fast = ([x.clone() for x in (p, m2, last)] for _ in range(2))
    row.ref(*plain, ids, g, **settings), row.fast(*fast, ids, g, **settings)
    torch.testing.assert_close(fast, plain)
    others = torch.ones(len(p), dtype=torch.bool).index_fill(0, ids, False)
    for x, before in zip(plain, (p, m2, last)):
        assert torch.equal(x[others], before[others]) and not torch.equal(x[ids], before[ids])


def test_merged_rows_and_dense_pieces(tg):
    """Repeated ids add up in fp32, in any order of ids; pieces of any length hold each sum where its row is."""
    ids, parts = torch.tensor([7, 2, 7, 0, 2, 7]), draws(0)(6, 3).bfloat16()
    once, sums = tg.merged(ids, parts, tg.add_rows_ref)
    assert once.tolist() == [0, 2, 7] and sums.dtype == torch.float32
    torch.testing.assert_close(sums, torch.stack([parts[ids == i].float().sum(0) for i in (0, 2, 7)]))
    table = draws(1)(9, 3)
    want = torch.zeros(9, 3).index_put((once,), sums)
    for n in (1, 2, 4, 9, 100):
        pieces = list(tg.dense_pieces((table, 2 * table), once, sums, n))
        assert torch.equal(torch.cat([g for _, g, _ in pieces]), want)
        assert torch.equal(torch.cat([p for p, _, _ in pieces]), table)
        pieces[0][2].zero_()
    none = list(tg.dense_pieces((table, table), once[:0], sums[:0], 4))
    assert len(none) == 3 and not any(g.any() for _, g, _ in none)
