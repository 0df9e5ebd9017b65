"""Section 6: the whole network, with every parameter moved away from its initial value."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F


def perturbed(tg, seed=0, **changes):
    """A small model in float64 whose every parameter is random, so that no mechanism is switched off."""
    cfg = replace(tg.PRESETS["tiny"], d_model=24, d_head=4, d_mlp=40, **changes)
    model = tg.Model(cfg, torch.device("cpu")).double()
    rand = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=rand, dtype=torch.float64))
        model.mix_x.add_(1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return cfg, model


def stream(T, starts, seed=1):
    tokens = np.random.default_rng(seed).integers(0, 50256, T + 1)
    tokens[starts] = 50256
    doc_start = torch.tensor([max(s for s in starts if s <= t) for t in range(T)], dtype=torch.int32)
    return torch.from_numpy(tokens[:-1]).int(), torch.from_numpy(tokens[1:]), doc_start


def view_of(tg, cfg, T):
    view = tg.view_at(cfg, 2, torch.device("cpu"), T)
    return replace(view, short=9, long=25, turn=view.turn.double())


def outputs(tg, model, tokens, doc_start, view):
    """What the head reads at each token: (T, D), from the forward pass itself."""
    seen = {}
    real = tg.softcap_loss
    tg.softcap_loss = lambda x, *rest: seen.setdefault("x", x) * 0
    try:
        with torch.no_grad():
            model(tokens, torch.zeros(len(tokens), dtype=torch.int64), doc_start, view)
    finally:
        tg.softcap_loss = real
    return seen["x"]


@pytest.mark.parametrize("t", [0, 30, 41, 77])
def test_no_output_depends_on_a_later_token(tg, t):
    cfg, model = perturbed(tg)
    tokens, _, doc_start = stream(80, [0, 31, 42])
    view = view_of(tg, cfg, 80)
    before = outputs(tg, model, tokens, doc_start, view)
    changed = tokens.clone()
    changed[t] = (changed[t] + 1234) % 50000
    after = outputs(tg, model, changed, doc_start, view)
    assert torch.equal(after[:t], before[:t])
    assert not torch.equal(after[t], before[t])


def test_no_output_depends_on_another_document(tg):
    """Every token of document A changed: B's outputs, before and behind it, keep their bits."""
    cfg, model = perturbed(tg)
    tokens, _, doc_start = stream(80, [0, 31, 60])
    view = view_of(tg, cfg, 80)
    before = outputs(tg, model, tokens, doc_start, view)
    changed = tokens.clone()
    changed[32:60] = (changed[32:60] + 777) % 50000
    after = outputs(tg, model, changed, doc_start, view)
    assert torch.equal(after[:32], before[:32]) and torch.equal(after[60:], before[60:])
    assert (after[32:60] != before[32:60]).any(1).all()


def test_within_a_document_the_window_is_used(tg):
    """A token reaches the next ones, and far ones through the layers: attention is there at all."""
    cfg, model = perturbed(tg)
    tokens, _, doc_start = stream(60, [0])
    view = view_of(tg, cfg, 60)
    before = outputs(tg, model, tokens, doc_start, view)
    changed = tokens.clone()
    changed[10] = (changed[10] + 99) % 50000
    after = outputs(tg, model, changed, doc_start, view)
    assert (after[10:] != before[10:]).any(1).all()


def dense_network(tg, model, tokens, targets, doc_start, view):
    """The network from its equations, with (T, T) masks and (T, V) logits, for one stream."""
    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt()
    T, H, E = len(tokens), model.n_heads, model.d_head
    D = H * E
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    x0 = x = norm(model.w_embed[tokens.long()])
    tables, used = model.w_value.view(-1, 50304, D), 0
    for n, layer in enumerate(tg.LAYERS):
        x = model.mix_x[n] * x + model.mix_x0[n] * x0
        h = norm(x)
        w_q, w_k = model.qk[H * n:H * (n + 1)].reshape(2, D, D)
        q, k = ((h @ w.T).view(T, H, E) for w in (w_q, w_k))
        v = (h @ model.vo[2 * n].T).view(T, H, E)
        if n in (1, 2, 8, 9):
            gate = 2 * torch.sigmoid(h[:, :12] @ model.gate_value[used].T)
            v = v + gate[:, :, None] * tables[used][tokens.long()].view(T, H, E)
            used += 1
        turned = []
        for y in (norm(q), norm(k)):
            a, b = y[..., 0::2], y[..., 1::2]
            c, s = view.turn[..., 0], -view.turn[..., 1]
            turned.append(torch.stack((a * c + b * s, b * c - a * s), -1).flatten(-2))
        window = 25 if n in (3, 10) else 9
        keep = (j <= i) & (i - j <= window) & (j >= doc_start[:, None])
        scores = torch.einsum("ihe,jhe->hij", *turned) * view.scale
        y = torch.einsum("hij,jhe->ihe", scores.masked_fill(~keep, -torch.inf).softmax(-1), v)
        x = x + y.reshape(T, D) @ model.vo[2 * n + 1].T
        x = x + torch.relu(norm(x) @ model.mlp[2 * n].T) ** 2 @ model.mlp[2 * n + 1]
    return norm(x) @ model.w_head.T, targets


def test_loss_and_every_gradient_equal_the_dense_equations(tg):
    cfg, model = perturbed(tg)
    batch = stream(70, [0, 20, 21, 50])
    view = view_of(tg, cfg, 70)
    loss = model(*batch, view)
    loss.backward()
    logits, targets = dense_network(tg, model, *batch, view)
    want = F.cross_entropy(23 * torch.sigmoid((logits + 5) / 7.5), targets, reduction="sum")
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(want, [getattr(model, name) for name in names])
    for name, grad in zip(names, grads):
        got = getattr(model, name).grad
        assert grad.abs().max() > 0, name
        assert (got - grad).abs().max() <= 1e-5 * grad.abs().max(), name


def test_validation_masks_the_classes_that_are_no_tokens(tg):
    cfg, model = perturbed(tg)
    batch, view = stream(30, [0]), view_of(tg, cfg, 30)
    with torch.no_grad():
        logits, targets = dense_network(tg, model, *batch, view)
        z = 23 * torch.sigmoid((logits + 5) / 7.5)
        want = F.cross_entropy(z[:, :50257], targets, reduction="sum")
        torch.testing.assert_close(model(*batch, view, tg.VOCAB), want, rtol=1e-6, atol=0)
        assert model(*batch, view, tg.VOCAB) < model(*batch, view)


def test_the_start_is_uniform_over_the_padded_vocabulary(tg):
    cfg = tg.PRESETS["tiny"]
    model = tg.Model(cfg, torch.device("cpu"))
    with torch.no_grad():
        loss = model(*stream(256, [0, 100]), tg.view_at(cfg, 0, torch.device("cpu"), 256)) / 256
    assert abs(loss.item() - np.log(50304)) < 0.01


def test_initial_values_depend_on_seed_and_name_only(tg):
    tiny = tg.PRESETS["tiny"]
    one, same, other = (tg.Model(replace(tiny, seed=s), torch.device("cpu")) for s in (1, 1, 2))
    torch.manual_seed(5)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters()):
        assert torch.equal(a, b), name
        assert name.startswith(("mix", "gate")) or not torch.equal(a, c), name
    assert not torch.equal(one.w_embed, one.w_head)


def test_banks_are_padded_with_zeros_to_whole_matrices_for_eight_ranks(tg):
    model = tg.Model(tg.PRESETS["tiny"], torch.device("cpu"))
    for bank, live in ((model.qk, 66), (model.vo, 22), (model.mlp, 22)):
        assert len(bank) % 8 == 0 and not bank[live:].any() and bank[:live].any((1, 2))[::2].all()
    assert not model.mlp[1::2].any()                   # down


def test_every_parameter_is_in_exactly_one_row(tg):
    model = tg.Model(tg.PRESETS["tiny"], torch.device("cpu"))
    rows = tg.param_table(model, tg.PRESETS["tiny"])
    assert sorted(row.name for row in rows) == sorted(name for name, _ in model.named_parameters())
    assert all(row.param is getattr(model, row.name) for row in rows)
    model.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match="extra"):
        tg.param_table(model, tg.PRESETS["tiny"])


def test_parameter_count_of_the_record(tg):
    """Embedding, head and four value tables of 50304 x 768, three banks, 22 mixes and 4 x 6 x 12 gate weights."""
    with torch.device("meta"):
        shapes = {"w_embed": 50304 * 768, "w_head": 50304 * 768, "w_value": 4 * 50304 * 768, "qk": 72 * 256 * 768,
                  "vo": 24 * 768 * 768, "mlp": 24 * 2816 * 768, "mix_x": 11, "mix_x0": 11, "gate_value": 288}
    cfg = replace(tg.PRESETS["tiny"], d_model=24, d_head=4, d_mlp=88)
    model = tg.Model(cfg, torch.device("cpu"))
    small = {name: p.numel() for name, p in model.named_parameters()}
    scale = {"w_embed": 32, "w_head": 32, "w_value": 32, "qk": 32 * 32, "vo": 32 * 32, "mlp": 32 * 32}
    assert {name: n * scale.get(name, 1) for name, n in small.items()} == shapes
