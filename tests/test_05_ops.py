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


@pytest.mark.parametrize("n_classes", [40, 37])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_loss_equals_the_dense_form_and_honours_its_gradient(tg, monkeypatch, n_classes, rows):
    """Also where the rows are no multiple of the block, and for any factor behind the loss."""
    monkeypatch.setitem(tg.LOSS_ROWS, "cpu", rows)
    x, w, y = rand(0, 13, 6), 3 * rand(1, 40, 6), torch.arange(13) * 5 % n_classes
    x.requires_grad_(), w.requires_grad_()
    got, want = tg.softcap_loss(x, w, y, n_classes, tg.loss_rows_ref), dense_loss(x, w, y, n_classes)
    torch.testing.assert_close(got, want)
    for factor in (1.0, -2.5):
        ours, ref = (torch.autograd.grad(factor * loss, (x, w), retain_graph=True) for loss in (got, want))
        torch.testing.assert_close(ours, ref)


def test_loss_gradcheck_in_float64(tg):
    x, w = rand(0, 7, 4).requires_grad_(), rand(1, 11, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: tg.softcap_loss(x, w, torch.arange(7), 11, tg.loss_rows_ref), (x, w))


def test_loss_in_bf16_has_an_fp32_sum(tg):
    x, w, y = rand(0, 64, 16, dtype=torch.bfloat16), rand(1, 500, 16, dtype=torch.bfloat16), torch.arange(64)
    got = tg.softcap_loss(x, w, y, 500, tg.loss_rows_ref)
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
