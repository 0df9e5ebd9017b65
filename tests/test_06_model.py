"""Section 6: the whole network, with every parameter moved away from its initial value."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import rotary_at


def perturbed(tg, seed=0, **changes):
    """A small model in float64 whose every parameter is random, so that no mechanism is switched off."""
    cfg = replace(tg.PRESETS["tiny"], **{"d_model": 48, "d_head": 8, "d_mlp": 40, "ngram_rows": 1600, "pointer_block": 16} | changes)
    model = tg.Model(cfg, torch.device("cpu")).double()
    rand = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=rand, dtype=torch.float64))
        model.mix_stream.add_(1)
        model.gate_scale.add_(0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return cfg, model


def stream(T, starts, seed=1, weights=(1.0, 0.5, 0.25)):
    """A batch: tokens, many of them twice, with documents at `starts`, the next three tokens as targets, all classes."""
    rand = np.random.default_rng(seed)
    tokens = np.where(rand.random(T + 1) < 0.3, rand.integers(0, 50256, T + 1), rand.integers(700, 712, T + 1))
    tokens[starts] = 50256
    doc_start = torch.tensor([max(s for s in starts if s <= t) for t in range(T)], dtype=torch.int32)
    targets, w = torch.zeros(T, len(weights), dtype=torch.int64), torch.zeros(T, len(weights))
    for k, weight in enumerate(weights):
        targets[:T - k, k], w[:T - k, k] = torch.from_numpy(tokens[1 + k:]), weight
    return torch.from_numpy(tokens[:-1]).int(), doc_start, torch.from_numpy(tokens[:-1]).int() // 2, targets, w, None


def view_of(tg, cfg, T):
    """A view in float64: view_at's tables are its rounding to fp32."""
    view = tg.view_at(cfg, 2, torch.device("cpu"), T)
    exact = {}
    for name, wide, places in (("turn_narrow", False, 1), ("turn_paired", False, 2), ("turn_wide", True, 1)):
        freqs = rotary_at(tg, cfg, 2, wide)[0]
        freqs = torch.tensor(freqs + len(freqs) * [0.0] * wide, dtype=torch.float64)
        angle = torch.arange(places * T, dtype=torch.float64).view(T, places, 1) * freqs
        exact[name] = torch.stack((angle.cos(), -angle.sin()), -1)
        torch.testing.assert_close(getattr(view, name), exact[name].float(), rtol=0, atol=1e-6)
    return replace(view, short=9, long=25, **exact, scale_narrow=view.scale_narrow.double(),
                   scale_wide=view.scale_wide.double())


def outputs(tg, model, batch, view):
    """What the head reads at each token: (T, D)."""
    with torch.no_grad():
        return model.stream(*batch[:3], view)


def changed(batch, where, by):
    tokens = batch[0].clone()
    tokens[where] = (tokens[where] + by) % 50000
    return tokens, batch[1], tokens // 2, *batch[3:]


@pytest.mark.parametrize("t", [0, 30, 41, 77])
def test_no_output_depends_on_a_later_token(tg, t):
    cfg, model = perturbed(tg)
    batch, view = stream(80, [0, 31, 42]), view_of(tg, cfg, 80)
    before, after = outputs(tg, model, batch, view), outputs(tg, model, changed(batch, t, 1234), view)
    assert torch.equal(after[:t], before[:t])
    assert not torch.equal(after[t], before[t])


def test_no_output_depends_on_another_document(tg):
    """Every token of document A changed: B's outputs, before and behind it, keep their bits."""
    cfg, model = perturbed(tg)
    batch, view = stream(80, [0, 31, 60]), view_of(tg, cfg, 80)
    before, after = outputs(tg, model, batch, view), outputs(tg, model, changed(batch, slice(32, 60), 777), view)
    assert torch.equal(after[:32], before[:32]) and torch.equal(after[60:], before[60:])
    assert (after[32:60] != before[32:60]).any(1).all()


def test_within_a_document_the_window_is_used(tg):
    """A token reaches the next ones, and far ones through the layers: attention is there at all."""
    cfg, model = perturbed(tg)
    batch, view = stream(60, [0]), view_of(tg, cfg, 60)
    before, after = outputs(tg, model, batch, view), outputs(tg, model, changed(batch, 10, 99), view)
    assert (after[10:] != before[10:]).any(1).all()


def norm(x):
    return x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt()


def rotated(x, position, freqs):
    """x (T, H, E) turned by position (T, H) times the frequencies; channels without one stay."""
    y = x.clone()
    for m, f in enumerate(freqs):
        c, s = torch.cos(position * f), torch.sin(position * f)
        a, b = x[..., 2 * m], x[..., 2 * m + 1]
        y[..., 2 * m], y[..., 2 * m + 1] = a * c + b * s, b * c - a * s
    return y


def dense_attention(q, k, v, doc_start, window):
    """(T, T) scores, one head after the other."""
    T, i = len(q), torch.arange(len(q))
    keep = (i[None] <= i[:, None]) & (i[:, None] - i[None] <= window) & (i[None] >= doc_start[:, None])
    return torch.stack([(q[:, h] @ k[:, h].T).masked_fill(~keep, -torch.inf).softmax(-1) @ v[:, h]
                        for h in range(q.shape[1])], 1)


def paired_attention(q, k, v, doc_start, window):
    """Heads 2p and 2p + 1 of every token at places 2t and 2t + 1 of one stream, written out place by place."""
    T, H, _ = q.shape
    y = torch.zeros_like(v)
    for p in range(H // 2):
        row = [(t, 2 * p + j) for t in range(T) for j in range(2)]
        q2, k2, v2 = (torch.stack([x[t, h] for t, h in row])[:, None] for x in (q, k, v))
        starts = torch.tensor([2 * int(doc_start[t]) for t, _ in row])
        out = dense_attention(q2, k2, v2, starts, window)[:, 0]
        y = y.index_put((torch.tensor([t for t, _ in row]), torch.tensor([h for _, h in row])), out)
    return y


def before(x, doc_start):
    """The row of the token before in the same document, and where there is one."""
    t = torch.arange(len(x))
    return x[(t - 1).clamp(min=0)], t > doc_start


def dense_network(tg, model, cfg, batch, stage=2, short=9, long=25):
    """The network from its equations (record 92), layer by layer: (T, V) logits."""
    tokens, doc_start, folded, *_ = batch
    T, H, D, slot = len(tokens), model.n_heads, model.vo.shape[1], model.d_head
    (f_n, s_n), (f_w, s_w) = rotary_at(tg, cfg, stage, False), rotary_at(tg, cfg, stage, True)
    s_n, s_w = (torch.tensor(x, dtype=torch.float32).double() for x in (s_n, s_w))
    t = torch.arange(T, dtype=torch.float64)
    gelu, sigmoid = F.gelu, torch.sigmoid

    def attend(a, h, kind, value, alpha=None, out=None):
        wide, half = kind == "wide", kind == "half"
        E, Ev = slot if wide else slot // 2, slot // 2 if half else slot
        q, k = ((h @ w.T).view(T, H, slot)[:, :, :E] for w in model.qk[6 * a:6 * a + 6].reshape(2, D, D))
        v = model.mix_v[a] * (h @ model.vo[2 * a].T).view(T, H, slot)[:, :, :Ev]
        if value is not None:
            v = v + value.view(T, H, slot)[:, :, :Ev]
        place = t[:, None].repeat(1, H)
        if kind == "paired":
            place = 2 * place + torch.arange(H) % 2
        q, k = (rotated(norm(x), place, f_w if wide else f_n) for x in (q, k))
        if wide:
            old, there = before(k, doc_start)
            k = torch.cat((k[:, :, :E // 2], torch.where(there[:, None, None], old, k)[:, :, E // 2:]), -1)
        q = q * (s_w if wide else s_n)
        y = (paired_attention if kind == "paired" else dense_attention)(q, k, v, doc_start, long if wide else short)
        if alpha is not None:
            y = y - torch.tanh(alpha)[:, :, None] * (y * v).sum(-1, keepdim=True) / \
                (v * v).sum(-1, keepdim=True).clamp(min=1e-8) * v
        if out is not None:
            y = out[:, :, None] * y
        full = torch.zeros(T, H, slot, dtype=torch.float64)
        full[:, :, :Ev] = y
        return model.mix_o[a] * full.view(T, D) @ model.vo[2 * a + 1].T

    def mlp(n, h):
        return torch.relu(h @ model.mlp[2 * n].T) ** 2 @ model.mlp[2 * n + 1]

    e = model.w_embed[tokens.long()]
    old, there = before(e, doc_start)
    x0 = norm(e + model.mix_smear * there[:, None] * sigmoid(e[:, :12] @ model.gate_smear)[:, None] * old)
    ve = dict(zip((1, 2, 8, 10), model.w_value.view(4, -1, D)[:, tokens.long()]))
    G = dense_grams(model, folded.tolist(), doc_start.tolist()) if model.ngram_rows else torch.zeros_like(x0)

    def value(i, plane, h):
        g = 2 * sigmoid(torch.cat((h[:, :6], ve[i][:, :6]), 1) @ model.gate_value[plane].T)
        return (g[:, :, None] * ve[i].view(T, H, slot)).view(T, D)

    def gates(which, net, x):
        w2, b = getattr(model, f"gate_{which}_w2"), getattr(model, f"gate_{which}_bias")
        return model.gate_scale * (gelu(x @ model.gate_w1[net].T) @ w2.T + b)

    ra, rm = model.mix_stream.T
    pre = gates("pre", 0, x0)            # n-gram 0 | x0 0 | xsa 1, x0 1, n-gram 1 | x0 2 | xsa 3, out 3
    gram_0, x0_0, xsa1, x0_1, gram_1, x0_2, xsa3, out3 = (pre[:, i] for i in (
        slice(0, 1), slice(1, 2), slice(2, 8), slice(8, 9), slice(9, 10), slice(10, 11), slice(11, 17), slice(17, 23)))
    x = c0 = x0 + gram_0 * G
    pm, pa = model.mix_mlp, model.mix_attn
    x = ra[0] * x + pa[0] * attend(0, norm(x), "paired", None) + x0_0 * x0
    x = rm[0] * x + pm[0] * mlp(0, norm(x))
    h = norm(x)
    x = ra[1] * x + pa[1] * attend(1, h, "half", value(1, 0, h), alpha=xsa1) + x0_1 * x0 + gram_1 * G
    x = rm[1] * x + pm[1] * mlp(1, norm(x))
    h = norm(x)
    x = ra[2] * x + pa[2] * attend(2, h, "paired", value(2, 1, h)) + x0_2 * x0
    x = rm[2] * x + pm[2] * mlp(2, norm(x))
    x = ra[3] * x + pa[3] * attend(3, norm(x), "wide", None, alpha=xsa3, out=out3)
    x = c3 = rm[3] * x + pm[3] * mlp(3, norm(x))
    post = gates("post", 1, x)           # x0 4, n-gram 4 | x0 5, n-gram 5 | skip 6 | x0 7 | n-gram 9 | out 10
    x0_4, gram_4, x0_5, gram_5, skip, x0_7, gram_9, out10 = (post[:, i] for i in (
        *(slice(i, i + 1) for i in range(7)), slice(7, 13)))
    x = ra[4] * x + x0_4 * x0 + gram_4 * G
    x = rm[4] * x + pm[4] * mlp(4, norm(x))
    x = ra[5] * x + pa[4] * attend(4, norm(x), "paired", None) + x0_5 * x0 + gram_5 * G
    x = rm[5] * x + pm[5] * mlp(5, norm(x))
    x = x + sigmoid(model.mix_skip) * skip * c3
    x = rm[6] * x + pm[6] * mlp(6, norm(x))
    x = c7 = rm[7] * (ra[7] * x + x0_7 * x0)
    h7 = norm(c7)
    x = ra[8] * x + pa[5] * attend(5, h7, "half", value(8, 2, h7))
    h = norm(x)
    x = rm[8] * x + pm[8] * (mlp(7, h) + mlp(10, h))
    x = ra[9] * x + gram_9 * G
    x = c9 = rm[9] * x + pm[9] * mlp(8, norm(x))
    mu = 0.1 * (gelu(x @ model.coef_w1[0].T) @ model.coef_remix_w2.T + model.coef_remix_bias)
    mu = [m[:, None] for m in mu.T]
    extra = mu[0] * c0 + mu[1] * c7 + mu[2] * x
    g10 = torch.cat((mu[6].repeat(1, H // 2), mu[7].repeat(1, H // 2)), 1)
    v10 = (g10[:, :, None] * ve[10].view(T, H, slot)).view(T, D) + extra
    mixed = (1 + mu[5]) * x + mu[3] * c0 + mu[4] * c7
    x = mu[8] * mixed + mu[9] * attend(6, h7, "wide", v10, out=out10) + mu[10] * c0 + mu[11] * G
    h = norm(x)
    x = mu[12] * x + mu[13] * mlp(9, h)
    hidden = gelu(x @ model.coef_w1[1].T)
    c = 0.1 * (hidden @ model.coef_final_w2.T + model.coef_final_bias)
    delta = 0.1 * (hidden @ model.coef_group_w2.T).view(T, 10, 12)
    for k, s in enumerate((c0, c7, c9, ve[1], c3, ve[2], ve[10], ve[8], h, h7)):
        x = x + ((c[:, k, None] + delta[:, k])[:, :, None] * s.view(T, 12, -1)).view(T, D)
    return norm(x)


def dense_grams(model, x, start):
    """G from the definition (record 92, 3.2 and 3.3), token by token; all products fit into 64 bits."""
    half, rows = len(model.w_gram) // 2, []

    def mixed(t, factors):
        h = 0
        for back, factor in enumerate(factors):
            h ^= (x[t - back] * factor) % 2**32
        return h - 2**32 * (h >= 2**31)
    for t in range(len(x)):
        two, three = t - 1 >= start[t], t - 2 >= start[t]
        bi = mixed(t, (36313, 27191)) % (half - 1) if two else half - 1
        tri = half + (mixed(t, (17351, 60961, 45259)) % (half - 1) if three else half - 1)
        sign_bi = model.signs[mixed(t, (48271, 30011)) % 8192 if two else 0]
        sign_tri = model.signs[mixed(t, (58699, 39779, 26801)) % 8192 if three else 0]
        rows.append(model.w_gram[bi] * sign_bi + model.w_gram[tri] * sign_tri)
    return torch.stack(rows)


def dense_pointer(model, x, batch, block):
    """(A, s): weights of all tokens, (T, T), and of the sink, from the definition (after92, 2.3)."""
    start, E, weights = batch[1].tolist(), len(model.w_sink), []
    q, k = model.mix_pointer * norm(x @ model.w_pointer[0].T), norm(x @ model.w_pointer[1].T)
    for i in range(len(x)):
        seen = [j for j in range(i) if j >= start[i] and j >= (i // block - 1) * block]
        row = torch.cat((q[i] @ model.w_sink[:, None], q[i] @ k[seen].T)) / E**0.5
        weights.append(torch.zeros(len(x) + 1, dtype=torch.float64).index_put((torch.tensor([0] + [j + 1 for j in seen]),), row.softmax(0)))
    weights = torch.stack(weights)
    return weights[:, 1:], weights[:, 0]


def dense_distribution(model, x, batch, block=16, n_classes=50304):
    """The mixture over all classes, <copy> left out: (T, n_classes)."""
    z = 23 * torch.sigmoid((x @ model.w_head.T + 5) / 7.5)[:, :n_classes]
    pi = z.softmax(1)
    a, (weights, s) = pi[:, 50257:50258], dense_pointer(model, x, batch, block)
    copied = torch.zeros_like(pi).index_add(1, batch[0].long(), weights)
    p = pi / (1 - a) * (1 - a * (1 - s[:, None])) + a * copied
    return torch.cat((p[:, :50257], p[:, 50258:]), 1)


def dense_loss(model, x, batch, n_classes=50304):
    """The first target by the mixture, every further one by a cross-entropy of its own, times their weights."""
    _, _, _, targets, weights, _ = batch
    z, first = 23 * torch.sigmoid((x @ model.w_head.T + 5) / 7.5)[:, :n_classes], None
    losses = [F.cross_entropy(z, targets[:, k], reduction="none") for k in range(targets.shape[1])]
    if model.has_pointer:
        losses[0] = -dense_distribution(model, x, batch, n_classes=n_classes).gather(1, targets[:, :1])[:, 0].log()
    return sum((weights[:, k].double() * loss).sum() for k, loss in enumerate(losses))


@pytest.mark.parametrize("off", ({}, {"ngram_rows": 0}, {"pointer_block": 0}), ids=("all", "no table", "no pointer"))
def test_loss_and_every_gradient_equal_the_dense_equations(tg, off):
    cfg, model = perturbed(tg, **off)
    batch = stream(70, [0, 20, 21, 50])
    loss = model(batch, view_of(tg, cfg, 70))
    loss.backward()
    want = dense_loss(model, dense_network(tg, model, cfg, batch), batch)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(want, [getattr(model, name) for name in names])
    for name, grad in zip(names, grads):
        got = getattr(model, name).grad
        assert grad.abs().max() > 0, name
        assert (got - grad).abs().max() <= 1e-5 * grad.abs().max(), name


def test_validation_masks_the_classes_that_are_no_tokens(tg):
    cfg, model = perturbed(tg)
    batch, view = stream(30, [0], weights=(1.0,)), view_of(tg, cfg, 30)
    with torch.no_grad():
        want = dense_loss(model, dense_network(tg, model, cfg, batch), batch, 50258)
        torch.testing.assert_close(model(batch, view, True), want, rtol=1e-6, atol=0)
        assert model(batch, view, True) < model(batch, view)


def test_the_start_is_uniform_over_the_padded_vocabulary(tg):
    cfg = tg.PRESETS["tiny"]
    model = tg.Model(cfg, torch.device("cpu"))
    with torch.no_grad():
        line, ones = torch.arange(257), torch.ones(256, 1)            # no token occurs twice: there is nothing to copy
        batch = line[:-1].int(), torch.zeros(256).int(), line[:-1].int(), line[1:, None], ones, None
        loss = model(batch, tg.view_at(cfg, 0, torch.device("cpu"), 256)) / 256
    assert abs(loss.item() - np.log(50304)) < 0.01


def test_initial_values_depend_on_seed_and_name_only(tg):
    tiny = tg.PRESETS["tiny"]
    one, same, other = (tg.Model(replace(tiny, seed=s), torch.device("cpu")) for s in (1, 1, 2))
    torch.manual_seed(5)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters()):
        assert torch.equal(a, b), name
        drawn = name != "w_gram" and not name.startswith(("mix", "gate", "coef")) or name.endswith("_w1")
        assert torch.equal(a, c) != drawn, name
    assert torch.equal(one.signs, same.signs) and not torch.equal(one.signs, other.signs)
    assert (one.signs.abs() == 1).all() and 0.49 < (one.signs > 0).float().mean() < 0.51 and not one.w_gram.any()
    assert one.signs.shape == (8192, 96) and one.mix_pointer.item() == 1
    assert torch.equal(one.w_embed, one.w_head) and not torch.equal(one.gate_w1, one.coef_w1)


def test_banks_are_padded_with_zeros_to_whole_matrices_for_eight_ranks(tg):
    model = tg.Model(tg.PRESETS["tiny"], torch.device("cpu"))
    for bank, live in ((model.qk, 42), (model.vo, 14), (model.mlp, 22)):
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
    """Embedding, head and four planes of values of 50304 x 768; banks of 48, 16 and 24; the small ones as listed."""
    want = {"w_embed": (50304, 768), "w_head": (50304, 768), "w_value": (4 * 50304, 768), "qk": (48, 256, 768),
            "vo": (16, 768, 768), "mlp": (24, 2816, 768), "mix_v": (7,), "mix_o": (7,), "mix_smear": (), "mix_skip": (),
            "mix_attn": (7,), "mix_mlp": (11,), "mix_stream": (11, 2), "gate_smear": (12,), "gate_value": (3, 6, 12),
            "gate_w1": (2, 64, 768), "gate_scale": (), "gate_pre_bias": (23,), "gate_pre_w2": (23, 64),
            "gate_post_bias": (13,), "gate_post_w2": (13, 64), "coef_w1": (2, 64, 768), "coef_remix_bias": (14,),
            "coef_remix_w2": (14, 64), "coef_final_bias": (10,), "coef_final_w2": (10, 64), "coef_group_w2": (120, 64),
            "w_gram": (84_602_880, 768), "w_pointer": (2, 128, 768), "w_sink": (128,), "mix_pointer": ()}
    model = tg.Model(tg.RECORD, torch.device("meta"))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == want
    assert sum(getattr(model, name).numel() for name in tg.POINTER) == 196_737
    share = tg.Model(tg.RECORD, torch.device("meta"), part=(3, 8))
    assert share.w_gram.shape == (10_575_360, 768) and share.w_value.shape == (25_152, 768)


def test_initial_values_of_gates_and_coefficients(tg):
    """As listed for record 92: what a gate gives at first, whatever the token."""
    cfg = tg.PRESETS["tiny"]
    model = tg.Model(cfg, torch.device("cpu"))
    gates = {}
    for which, second in (("pre", False), ("post", True)):
        values = model.gate_scale * getattr(model, f"gate_{which}_bias")
        widths = [6 if name in ("xsa", "out") else 1 for name, _ in tg.gate_lanes(second)]
        gates |= dict(zip(tg.gate_lanes(second), values.split(widths)))
        assert not getattr(model, f"gate_{which}_w2").any()
    want = {"out": 0.25, "gram": 0.05, "skip": 0.5, "xsa": 0.0, "x0": 0.0}
    assert all(torch.allclose(x, torch.tensor(want[name])) for (name, _), x in gates.items())
    assert sorted(i for name, i in gates if name == "x0") == [0, 1, 2, 4, 5, 7]
    assert sorted(i for name, i in gates if name == "gram") == [-1, 1, 4, 5, 9]
    root = 1.1 ** 0.5
    assert torch.allclose(0.1 * model.coef_remix_bias, torch.tensor(
        [0, 0, 0, 0, 0, 0, 2, 2, root, 1, 0, 0.05, root, 1]))
    assert torch.allclose(0.1 * model.coef_final_bias, torch.tensor([0, -0.5] + 8 * [0.0]))
    assert torch.allclose(model.mix_stream, torch.tensor(root)) and model.mix_skip.item() == -1.5
    assert (model.mix_v == 0.5).all() and (model.mix_o == 1).all() and float(model.mix_smear) == 0
    assert (model.mix_attn == 1).all() and (model.mix_mlp == 1).all() and not model.gate_value.any()


# ---- mechanisms one by one, each against a form of its own -------------------------------------------------

def alone(tg, T=12):
    """A model with random parameters, what its parts share while a stream runs, and a stream (T, D)."""
    cfg, model = perturbed(tg, seed=3)
    rand = torch.Generator().manual_seed(9)
    draw = lambda *shape: torch.randn(*shape, generator=rand, dtype=torch.float64)   # noqa: E731
    run = SimpleNamespace(x0=draw(T, 48), gram=draw(T, 48), first=draw(T, 48), behind={i: draw(T, 48) for i in range(11)},
                          values={i: draw(T, 48) for i in (1, 2, 8, 10)}, before_remix=draw(T, 48), mlp_input=draw(T, 48), norm_read=draw(T, 48),
                          docs=tg.Documents((torch.arange(T) // 5 * 5).int()), view=view_of(tg, cfg, T),
                          banks=model.matrices(), gates={})
    for which, second in (("pre", False), ("post", True)):
        model.open_gates(run, which, draw(T, 48))
    return model, run, draw(T, 48)


def test_value_gate_alone(tg):
    model, run, h = alone(tg)
    for i, plane in ((1, 0), (2, 1), (8, 2)):
        got = model.gated_value(run, i, h)
        for head in range(6):
            w = model.gate_value[plane, head]
            gate = 2 / (1 + torch.exp(-(h[:, :6] @ w[:6] + run.values[i][:, :6] @ w[6:])))
            torch.testing.assert_close(got[:, head], gate[:, None] * run.values[i][:, 8 * head:8 * head + 8])


def test_output_gate_alone(tg):
    """An output gate times two is an attention times two, head by head."""
    model, run, h = alone(tg)
    plain = model.attend(run, 3, h, None)
    run.gates["out", 3] = run.gates["out", 3] * 2
    torch.testing.assert_close(model.attend(run, 3, h, None), 2 * plain)
    run.gates["out", 3] = torch.zeros(12, 6, dtype=torch.float64)
    assert not model.attend(run, 3, h, None).any()


def test_skip_alone(tg):
    model, run, x = alone(tg)
    with torch.no_grad():
        model.mlp.zero_()
    run.banks = model.matrices()
    want = x + torch.sigmoid(model.mix_skip) * run.gates["skip", 6] * run.behind[3]
    torch.testing.assert_close(model.layer(run, 6, x), model.mix_stream[6, 1] * want)


def test_parallel_mlp_alone(tg):
    """Both MLPs of layer 8 read the same norm; the second one stands at the end of the bank."""
    model, run, x = alone(tg)
    with torch.no_grad():
        model.vo.zero_()
    run.banks = model.matrices()
    x8 = model.mix_stream[8, 0] * x
    h, up, down = norm(x8), model.mlp[0::2], model.mlp[1::2]
    both = sum(torch.relu(h @ up[n].T) ** 2 @ down[n] for n in (7, 10))
    torch.testing.assert_close(model.layer(run, 8, x), model.mix_stream[8, 1] * x8 + model.mix_mlp[8] * both)


def test_gated_additions_alone(tg):
    """What layer 4 adds beside the stream: the first stream and the n-gram vector, each times its gate."""
    model, run, x = alone(tg)
    with torch.no_grad():
        model.mlp.zero_()
    run.banks = model.matrices()
    want = model.mix_stream[4, 0] * x + run.gates["x0", 4] * run.x0 + run.gates["gram", 4] * run.gram
    torch.testing.assert_close(model.layer(run, 4, x), model.mix_stream[4, 1] * want)


def test_final_mix_alone(tg):
    """Token by token, group by group."""
    model, run, x = alone(tg)
    got, values = model.final_mix(run, x), run.values
    sources = (run.first, run.behind[7], run.before_remix, values[1], run.behind[3], values[2], values[10], values[8],
               run.mlp_input, run.norm_read)
    for t in (0, 7):
        hidden = F.gelu(model.coef_w1[1] @ x[t])
        for group in (0, 5, 11):
            c = 0.1 * (model.coef_final_w2 @ hidden + model.coef_final_bias
                       + model.coef_group_w2.view(10, 12, 64)[:, group] @ hidden)
            here = slice(4 * group, 4 * group + 4)
            torch.testing.assert_close(got[t, here], x[t, here] + sum(c[k] * sources[k][t, here] for k in range(10)))


def test_whole_loss_against_finite_differences(tg):
    """fp64, all parameters at once along five random directions, sampled classes and several targets."""
    cfg, model = perturbed(tg)
    tokens, doc_start, folded, targets, weights, _ = stream(40, [0, 13], weights=(1.0, 0.5, 0.25))
    classes = torch.unique(torch.cat((targets.flatten(), torch.arange(100, 400), torch.tensor([50_257]))))
    batch = tokens, doc_start, folded, torch.searchsorted(classes, targets), weights, classes
    view, parameters = view_of(tg, cfg, 40), list(model.parameters())
    model(batch, view).backward()
    start, rand = [p.detach().clone() for p in parameters], torch.Generator().manual_seed(4)
    for _ in range(5):
        way = [torch.randn(p.shape, generator=rand, dtype=torch.float64) for p in parameters]
        slope = sum((p.grad * d).sum() for p, d in zip(parameters, way))
        ends = []
        with torch.no_grad():
            for step in (1e-7, -1e-7):
                for p, x, d in zip(parameters, start, way):
                    p.copy_(x + step * d)
                ends.append(model(batch, view))
        assert float(slope) == pytest.approx(float(ends[0] - ends[1]) / 2e-7, rel=1e-4)


def test_head_gradients_of_different_classes_add_up_to_the_dense_one(tg):
    """Two micro-batches over classes of their own: the sum of their dense expansions, zero for all others."""
    cfg, model = perturbed(tg, pointer_block=0)
    view, want = view_of(tg, cfg, 30), torch.zeros_like(model.w_head)
    for seed, chosen in ((1, torch.arange(0, 50_304, 7)), (2, torch.arange(3, 50_304, 11))):
        tokens, doc_start, folded, targets, weights, _ = stream(30, [0], seed)
        classes = torch.unique(torch.cat((targets.flatten(), chosen)))
        batch = tokens, doc_start, folded, torch.searchsorted(classes, targets), weights, classes
        x = model.stream(tokens, doc_start, folded, view).detach()
        w = model.w_head.detach()[classes].requires_grad_()
        z = 23 * torch.sigmoid((x @ w.T + 5) / 7.5)
        loss = sum((weights[:, k].double() * F.cross_entropy(z, batch[3][:, k], reduction="none")).sum() for k in range(3))
        want[classes] += torch.autograd.grad(loss, w)[0]
        model(batch, view).backward()
    torch.testing.assert_close(model.w_head.grad, want.detach())
    assert not model.w_head.grad[[1, 2, 50_303]].any() or want[[1, 2, 50_303]].any()


# ---- tables at hand and the pointer ------------------------------------------------------------------------

def test_rows_at_hand_equal_the_whole_table(tg, one_rank):
    """With the wanted rows brought beside the tables: the same loss, and gradients for these rows that are the dense ones."""
    cfg, model = perturbed(tg)
    batches, view = [stream(50, [0, 20], seed) for seed in (1, 2)], view_of(tg, cfg, 50)
    whole = sum(model(batch, view) for batch in batches)
    whole.backward()
    want = {name: getattr(model, name).grad.clone() for name in ("w_gram", "w_value")}
    model.near = {name: tg.Rows(ids, getattr(model, name).data, 1, one_rank.all_to_all, True)
                  for name, ids in model.wanted(batches).items()}
    near = sum(model(batch, view) for batch in batches)
    near.backward()
    torch.testing.assert_close(near, whole)
    for name, dense in want.items():
        ids, grad = model.near[name].ids, model.near[name].grad
        assert (ids.diff() > 0).all() and ids.dtype == torch.int64
        torch.testing.assert_close(torch.zeros_like(dense).index_put((ids,), grad), dense)
        assert torch.equal(getattr(model, name).grad, dense) and (dense != 0).any(1).sum() <= len(ids)


def test_no_ngram_row_crosses_a_document(tg):
    """Another last token of a document changes no n-gram of the next one."""
    cfg, model = perturbed(tg)
    tokens, start, folded, *_ = stream(40, [0, 17])
    other = folded.clone()
    other[15:17] += 1
    a, b = model.grams(folded, start), model.grams(other, start)
    assert torch.equal(a[17:], b[17:]) and not torch.equal(a[16], b[16])


@pytest.mark.parametrize("block", (4, 16, 1000))
def test_pointer_equals_its_definition(tg, monkeypatch, block):
    """c and s by the dense weights, documents with and without sources; no gradient but through what it copies."""
    monkeypatch.setattr(tg, "POINTER_ROWS", 3)
    cfg, model = perturbed(tg)
    batch = stream(50, [0, 1, 20, 49])
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights, s = dense_pointer(model, x, batch, block)
    following = torch.cat((batch[0][1:], batch[0][:1])).long()
    c = (weights * (batch[0][None] == following[:, None])).sum(1)
    with torch.no_grad():
        parts = *tg.pointer_parts(x, model.w_pointer, model.mix_pointer), model.w_sink
        got = tg.pointer(*parts, batch[0], following, (batch[1], block, tg.references()))
    torch.testing.assert_close(got, torch.stack((c, s), 1))
    assert s[[0, 1, 20, 49]].tolist() == [1.0] * 4 and not c[[0, 1, 20, 49]].any() and (c > 0.01).any() and (s < 1).any()
    for t in (1, 19, 50):       # what the last token of a stream copies
        of_all, sink = tg.copies(*(y[:t] if y.ndim > 1 else y for y in parts), batch[0][:t],
                                 (batch[1][:t], block), 50_257)
        want = torch.zeros(50_257, dtype=torch.float64).index_add(0, batch[0][:t].long(), weights[t - 1, :t])
        torch.testing.assert_close((of_all, sink), (want, s[t - 1]))


def test_the_validation_distribution_sums_to_one(tg):
    """Over the 50,257 tokens; each of its values is what the validation loss gives for that token as the target."""
    cfg, model = perturbed(tg)
    for T, starts in ((37, [0, 20]), (30, [0, 29])):
        tokens, start, folded, *_ = stream(T, starts)
        view = view_of(tg, cfg, T)
        with torch.no_grad():
            p = model.probabilities(tokens, start, folded, view)
            assert p.shape == (50_257,) and abs(p.double().sum().item() - 1) < 1e-6 and (p > 0).all()
            dense = dense_distribution(model, dense_network(tg, model, cfg, (tokens, start, folded)), (tokens, start), n_classes=50_258)
            assert abs(dense[-1].sum().item() - 1) < 1e-9
            torch.testing.assert_close(p.double(), dense[-1], rtol=1e-4, atol=1e-12)
            for y in (700, 705, 5, 50_256, 50_000):
                targets, weights = torch.zeros(T, 1, dtype=torch.int64), torch.zeros(T, 1)
                targets[-1], weights[-1] = y, 1
                loss = model((tokens, start, folded, targets, weights, None), view, True)
                assert float(loss) == pytest.approx(-float(p[y].log()), abs=1e-5)


def test_without_a_pointer_the_distribution_is_the_softmax(tg):
    cfg, model = perturbed(tg, pointer_block=0)
    tokens, start, folded, *_ = stream(20, [0])
    with torch.no_grad():
        p = model.probabilities(tokens, start, folded, view_of(tg, cfg, 20))
        x = dense_network(tg, model, cfg, (tokens, start, folded))[-1]
    torch.testing.assert_close(p, (23 * torch.sigmoid((model.w_head[:50_257] @ x + 5) / 7.5)).softmax(0).float())
    assert not any(name in dict(model.named_parameters()) for name in tg.POINTER)
