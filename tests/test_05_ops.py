"""Section 5: the blocked references equal the dense formulae, and their gradients are right."""

import math

import pytest
import torch
import torch.nn.functional as F


def rand(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense_attention(q, k, v, doc_start, window, scale):
    """One query, head and key after the other, from the definition."""
    T, H, E = q.shape
    rows = []
    for i in range(T):
        keys = [j for j in range(T) if doc_start[i] <= j <= i and i - window <= j]
        weight = torch.stack([scale * (q[i] * k[j]).sum(-1) for j in keys]).softmax(0)          # (J, H)
        rows.append(sum(w[:, None] * v[j] for w, j in zip(weight, keys)))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [0, 1, 7, 50, 1000])
@pytest.mark.parametrize("least, most", [(16, 64), (128, 1024)])
def test_attention_equals_its_definition(tg, monkeypatch, window, least, most):
    """Values and gradients, with documents of 1, 2, 13 and more tokens and blocks that split documents."""
    monkeypatch.setitem(tg.ATTN_ROWS, "cpu", least)
    monkeypatch.setattr(tg, "ATTN_MOST", most)
    starts = [0, 1, 3, 16, 40, 69]
    doc_start = torch.tensor([max(s for s in starts if s <= t) for t in range(71)], dtype=torch.int32)
    ours, dense = ([rand(i, 71, 2, 4).requires_grad_() for i in range(3)] for _ in range(2))
    y = tg.attention_ref(0.3 * ours[0], *ours[1:], tg.Documents(doc_start), window=window)
    want = dense_attention(*dense, doc_start.tolist(), window, 0.3)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-6)         # the softmax is taken in fp32
    dy = rand(9, 71, 2, 4)
    for got, ref in zip(torch.autograd.grad(y, ours, dy), torch.autograd.grad(want, dense, dy)):
        torch.testing.assert_close(got, ref, rtol=0, atol=1e-6)


def test_attention_without_gradient_is_the_same(tg):
    q, k, v = (rand(i, 300, 2, 8, dtype=torch.float32) for i in range(3))
    documents = tg.Documents((torch.arange(300) // 90 * 90).int())
    with torch.no_grad():
        alone = tg.attention_ref(q, k, v, documents, window=40)
    assert torch.equal(alone, tg.attention_ref(q.requires_grad_(), k, v, documents, window=40))


def test_rotate_turns_pairs_and_leaves_the_second_half(tg):
    x, angle = rand(0, 5, 3, 8), torch.tensor([[0.1, 0.01]]) * torch.arange(5)[:, None]
    angle = F.pad(angle, (0, 2)).double()[:, None]
    y = tg.rotate(x, torch.stack((angle.cos(), -angle.sin()), -1))
    for t in range(5):
        for m in range(2):
            c, s = math.cos(angle[t, 0, m]), math.sin(angle[t, 0, m])
            a, b = x[t, :, 2 * m], x[t, :, 2 * m + 1]
            torch.testing.assert_close(y[t, :, 2 * m], a * c + b * s)
            torch.testing.assert_close(y[t, :, 2 * m + 1], b * c - a * s)
    assert torch.equal(y[..., 4:], x[..., 4:])


def dense_loss(x, w, targets, n_classes):
    z = 23 * torch.sigmoid((x @ w.T + 5) / 7.5)
    return F.cross_entropy(z[:, :n_classes], targets, reduction="sum")


def loss_and_gradients(tg, x, w, targets, weights, *, classes=None, n_classes=10**6, factor=1.0):
    """(loss, dx, dw) of softcap_loss; what w's gradient held before stays in it."""
    grad = torch.ones_like(w)
    loss = tg.softcap_loss(x, w.detach(), grad, targets, weights, classes=classes, n_classes=n_classes,
                           rows_op=tg.loss_rows_ref)
    (dx,) = torch.autograd.grad(factor * loss, [x])
    return loss, dx, grad - 1


def test_several_weighted_targets_over_some_classes(tg, monkeypatch):
    """Each target's cross-entropy over the candidate classes alone, times its weight; two targets may coincide;
    over all classes the sampled loss is the full one."""
    monkeypatch.setitem(tg.LOSS_ROWS, "cpu", 5)
    x, w = rand(0, 13, 6).requires_grad_(), (3 * rand(1, 40, 6)).requires_grad_()
    classes = torch.tensor([1, 2, 3, 5, 8, 13, 21, 34, 39])
    targets, weights = torch.arange(39).view(13, 3) * 5 % 9, torch.rand(13, 3, generator=torch.Generator().manual_seed(3))
    targets[4] = 7
    weights[2, 1] = weights[12] = 0
    z = 23 * torch.sigmoid((x @ w[classes].T + 5) / 7.5)
    want = sum((weights[:, k].double() * F.cross_entropy(z, targets[:, k], reduction="none")).sum() for k in range(3))
    got, dx, dw = loss_and_gradients(tg, x, w, targets, weights, classes=classes)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close((dx, dw), torch.autograd.grad(want, (x, w)))
    assert not dx[12].any() and not dw[0].any()
    sampled = loss_and_gradients(tg, x, w, targets, weights, classes=torch.arange(40))
    for a, b in zip(sampled, loss_and_gradients(tg, x, w, targets, weights)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("n_classes", [40, 37])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_loss_equals_the_dense_form_and_honours_its_gradient(tg, monkeypatch, n_classes, rows):
    """Also where the rows are no multiple of the block, and for any factor behind the loss."""
    monkeypatch.setitem(tg.LOSS_ROWS, "cpu", rows)
    x, w, y = rand(0, 13, 6), 3 * rand(1, 40, 6), torch.arange(13) * 5 % n_classes
    x.requires_grad_(), w.requires_grad_()
    want = dense_loss(x, w, y, n_classes)
    for factor in (1.0, -2.5):
        got, dx, dw = loss_and_gradients(tg, x, w, y[:, None], torch.ones(13, 1), n_classes=n_classes, factor=factor)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close((dx, dw), torch.autograd.grad(factor * want, (x, w), retain_graph=True))


def test_loss_gradcheck_in_float64(tg):
    x, w = rand(0, 7, 4).requires_grad_(), rand(1, 11, 4).requires_grad_()
    y, weights = torch.arange(21).view(7, 3) % 11, rand(2, 7, 3).abs()
    classes = torch.tensor([0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    for chosen, full in ((None, w), (classes, rand(3, 12, 4))):
        call = lambda x: tg.softcap_loss(x, full, torch.zeros_like(full), y, weights, classes=chosen, n_classes=11,   # noqa
                                         rows_op=tg.loss_rows_ref)
        assert torch.autograd.gradcheck(call, (x,))
    # and w, whose gradient is added in place: central differences of the loss itself
    full, step = rand(3, 12, 4), 1e-6
    _, _, dw = loss_and_gradients(tg, x, full, y, weights, classes=classes)
    for i, j in ((0, 0), (2, 3), (11, 1), (1, 2)):
        moved = [full.index_put((torch.tensor(i), torch.tensor(j)), full[i, j] + s) for s in (step, -step)]
        up, down = (tg.softcap_loss(x, m, None, y, weights, classes=classes, n_classes=12, rows_op=tg.loss_rows_ref)
                    for m in moved)
        assert dw[i, j].item() == pytest.approx((up - down).item() / (2 * step), abs=1e-6)
    assert not dw[1].any()                            # no class of the loss


def test_loss_in_bf16_has_an_fp32_sum(tg):
    x, w, y = rand(0, 64, 16, dtype=torch.bfloat16), rand(1, 500, 16, dtype=torch.bfloat16), torch.arange(64)
    got, *_ = loss_and_gradients(tg, x.requires_grad_(), w, y[:, None], torch.ones(64, 1), n_classes=500)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), dense_loss(x.double(), w.double(), y, 500), rtol=5e-3, atol=0)


def test_lookup_adds_to_the_gradient_in_place(tg):
    """Rows as by indexing; repeated ids add up; what the gradient held before stays in it."""
    w = rand(0, 9, 3).requires_grad_()
    w.grad = torch.ones_like(w)
    ids, address = torch.tensor([4, 1, 4, 8]), w.grad.data_ptr()
    y = tg.lookup(w, w.grad, ids, tg.add_rows_ref)
    assert torch.equal(y, w[ids])
    dy = rand(1, 4, 3)
    y.backward(dy)
    want = torch.ones(9, 3, dtype=torch.float64)
    for i, row in zip(ids, dy):
        want[i] += row
    torch.testing.assert_close(w.grad, want)
    assert w.grad.data_ptr() == address


def test_rms_norm_uses_the_same_epsilon_in_bf16(tg):
    """Rows of size 0.005 in bf16 come out with root mean square 1; bf16's own epsilon would make them 0.06."""
    x = 0.005 * rand(0, 50, 64, dtype=torch.bfloat16)
    rms = tg.rms_norm(x).float().square().mean(-1).sqrt()
    assert ((rms - 1).abs() < 0.01).all()


@pytest.mark.parametrize("block", (3, 8, 100))
def test_pointer_gradients_against_fp64_autograd(tg, monkeypatch, block):
    """Closed form against central differences and against autograd through dense weights; a part of the rows at a time."""
    monkeypatch.setattr(tg, "POINTER_ROWS", 4)
    q, k, sink = rand(0, 19, 4).requires_grad_(), rand(1, 19, 4).requires_grad_(), rand(2, 4).requires_grad_()
    tokens = torch.tensor([9, 1, 2, 1, 2, 9, 2, 2, 1, 3, 1, 2, 1, 3, 3, 9, 1, 1, 2])
    start = torch.tensor([0] * 5 + [5] * 10 + [15] * 4)
    following = tokens.roll(-1)
    call = lambda q, k, sink: tg.pointer(q, k, sink, tokens, following, (start, block, tg.references()))   # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, sink))
    i, j = torch.arange(19)[:, None], torch.arange(19)[None]
    seen = (j < i) & (j >= start[:, None]) & (j >= (i // block - 1) * block)
    scores = torch.cat((q @ sink[:, None], (q @ k.T).masked_fill(~seen, -torch.inf)), 1) / 2
    weights = scores.softmax(1)
    dense = torch.stack(((weights[:, 1:] * (tokens[None] == following[:, None])).sum(1), weights[:, 0]), 1)
    dy = rand(3, 19, 2)
    torch.testing.assert_close(call(q, k, sink), dense)
    torch.testing.assert_close(torch.autograd.grad(call(q, k, sink), (q, k, sink), dy), torch.autograd.grad(dense, (q, k, sink), dy))
    low = tg.pointer(*(x.detach().bfloat16() for x in (q, k, sink)), tokens, following, (start, block, tg.references()))
    assert low.dtype == torch.float32 and (low - dense).abs().max() < 0.05


@pytest.mark.parametrize("chosen", (None, (0, 2, 3, 4, 5, 6, 7, 8, 9, 10)))
def test_mixture_loss_and_gradients_against_fp64_autograd(tg, monkeypatch, chosen):
    """-log of the mixture for the first target, cross-entropies for the others, also where columns coincide: a target that
    is <copy>, two equal targets; extreme gates; weights of all signs of use."""
    monkeypatch.setitem(tg.LOSS_ROWS, "cpu", 3)
    x, w = (2 * rand(0, 8, 5)).requires_grad_(), (2 * rand(1, 12, 5)).requires_grad_()
    mix = rand(2, 8, 3).softmax(1)[:, :2].clone().requires_grad_()
    classes = None if chosen is None else torch.tensor(chosen)
    P, copy = (12, 10) if chosen is None else (10, 9)
    targets = torch.tensor([[1, 2, 3], [4, 4, 4], [0, copy, 1], [5, 6, copy], [7, 1, 7], [2, 2, copy], [3, 0, 0], [8, 8, 1]])
    weights = rand(3, 8, 3).abs()
    weights[2, 0], weights[5, 1] = 0, 0
    with torch.no_grad():
        w[10] *= torch.linspace(1, 6, 5)                  # gates between 0 and 1
    grad = torch.zeros_like(w)
    loss = tg.softcap_loss(x, w.detach(), grad, targets, weights, classes=classes, n_classes=P, rows_op=tg.loss_rows_ref,
                           mix=mix, copy=torch.tensor([copy]))
    z = 23 * torch.sigmoid((x @ (w if classes is None else w[classes]).T + 5) / 7.5)
    pi = z.softmax(1)
    a, (c, s) = pi[:, copy], mix.unbind(1)
    first = pi.gather(1, targets[:, :1])[:, 0]
    p = first / (1 - a) * (1 - a * (1 - s)) + a * c
    want = -(weights[:, 0] * p.log()).sum() - (weights[:, 1:] * pi.log().gather(1, targets[:, 1:])).sum()
    torch.testing.assert_close(loss, want)
    dx, dmix = torch.autograd.grad(-2.5 * loss, (x, mix))
    torch.testing.assert_close((dx, grad, dmix), torch.autograd.grad(-2.5 * want, (x, w, mix)))
