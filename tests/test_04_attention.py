"""Section 4.1: the kernels of attention in Triton's interpreter against the reference, and compiled for an H100.

The interpreter is a CPU's and slow, so tiles and shapes are small; tests/test_gpu.py has those of the record.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from conftest import ROOT

pytest.importorskip("triton")
HEADS = 2
TILES = {"square": (16, 16), "tall": (32, 16), "wide": (16, 32)}


def tile_tables(tg, monkeypatch, widths, tile):
    for table in (tg.ATTN_FORWARD, tg.ATTN_DQ, tg.ATTN_DKV):
        monkeypatch.setitem(table, widths, (*tile, 4, 1))


def documents_of(tg, T, starts):
    starts = torch.tensor(starts)
    return tg.Documents(starts[torch.searchsorted(starts, torch.arange(T), right=True) - 1].int())


def inputs(T, widths, seed, dtype=torch.float32, packed=False):
    """q, k, v and dy, scores with a spread of a few; q, k and v as views of one buffer where packed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)
    if packed:
        sizes = [HEADS * w for w in (widths[0], *widths)]
        parts = [x.unflatten(1, (HEADS, -1)) for x in draw(T, sum(sizes)).split(sizes, 1)]
        assert not any(x.is_contiguous() for x in parts)
    else:
        parts = [draw(T, HEADS, w) for w in (widths[0], *widths)]
    parts[0].mul_(0.25)                                        # scores stay within the bound of attention_into
    return [x.detach().requires_grad_() for x in parts], draw(T, HEADS, widths[1])


def results(f, xs, dy, documents, **settings):
    y = f(*xs, documents, **settings)
    return [y.detach(), *torch.autograd.grad(y, xs, dy)]


def check(tg, T, widths, documents, seed=0, tol=2e-6, dtype=torch.float32, packed=False, **settings):
    xs, dy = inputs(T, widths, seed, dtype, packed)
    compare(tg, xs, dy, documents, tol, **settings)


def compare(tg, xs, dy, documents, tol, **settings):
    assert xs[0].norm(dim=-1).max() * xs[1].norm(dim=-1).max() < tg.MOST_SCORE
    wide = [x.detach().double().requires_grad_() for x in xs]
    want = results(tg.attention_ref, wide, dy.double(), documents, **settings)
    for name, a, b in zip(("y", "dq", "dk", "dv"), results(tg.attention, xs, dy, documents, **settings), want):
        assert a.dtype == dy.dtype and a.shape == b.shape
        assert (a.double() - b).norm() <= tol * max(b.norm(), dy.norm()), name


SHAPES = {   # T, window, starts of documents; tiles have 16 or 32 places
    "ragged": (77, 20, [0, 1, 2, 17, 40]),
    "one document beyond the window": (70, 24, [0]),
    "longer than T": (37, 1000, [0]),
    "window 0": (33, 0, [0, 5]),
    "window 1": (35, 1, [0, 1, 2, 20]),
    "documents of one token": (40, 9, list(range(40))),
    "starts around the edge of a tile": (68, 30, [0, 15, 16, 17, 31, 32, 33, 47, 64]),
    "whole tiles": (64, 16, [0, 16, 48]),
    "one token": (1, 3, [0]),
}


@pytest.mark.parametrize("pairs", (False, True))
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_reference(tg, monkeypatch, shape, pairs):
    """Results and gradients, at every kind of edge."""
    T, window, starts = SHAPES[shape]
    T = max(T // 2, 1) if pairs and T > 40 else T              # a pair's stream has twice as many places
    tile_tables(tg, monkeypatch, (16, 32), TILES["square"])
    check(tg, T, (16, 32), documents_of(tg, T, [s for s in starts if s < T]), window=window, pairs=pairs)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("widths", ((16, 16), (32, 32)))
def test_tiles_and_widths_do_not_matter(tg, monkeypatch, tile, widths):
    tile_tables(tg, monkeypatch, widths, TILES[tile])
    check(tg, 75, widths, documents_of(tg, 75, [0, 30, 31]), window=21)


@pytest.mark.parametrize("widths, pairs", (((64, 64), False), ((64, 128), False), ((64, 128), True), ((128, 128), False)))
def test_tiles_of_the_network_at_the_boundary_of_64(tg, widths, pairs):
    """The tables as they are: documents that begin at 63, 64 and 65, and one alone."""
    assert all(list(table) == [(64, 64), (64, 128), (128, 128)] for table in (tg.ATTN_FORWARD, tg.ATTN_DQ, tg.ATTN_DKV))
    for seed, starts in enumerate(([0, 63, 64, 65], [0])):
        check(tg, 130, widths, documents_of(tg, 130, starts), seed, 4e-6, window=100, pairs=pairs)


@pytest.mark.parametrize("pairs", (False, True))
def test_views_are_read_and_written_where_they_lie(tg, monkeypatch, pairs):
    """q, k, v and their gradients in buffers of one row a token; what was in the results' place is overwritten."""
    T, widths, window = 41, (16, 32), 13
    tile_tables(tg, monkeypatch, widths, TILES["square"])
    documents = documents_of(tg, T, [0, 3, 30])
    (q, k, v), dy = inputs(T, widths, 1, packed=True)
    want = results(tg.attention_ref, (q, k, v), dy, documents, window=window, pairs=pairs)
    nan = [torch.full((T, HEADS * (2 * widths[0] + 2 * widths[1]) + 16), torch.nan) for _ in range(2)]
    y, dq, dk, dv = (x.unflatten(1, (HEADS, -1)) for x in nan[0][:, 8:-8].split([HEADS * w for w in (32, 16, 16, 32)], 1))
    lse = tg.lse_like(q, pairs).fill_(torch.nan)
    monkeypatch.setattr(tg, "_laid", lambda x: x)              # no copy saves a layout that kernels cannot read
    tg.attention_into(q, k, v, documents.start, window, pairs, y=y, lse=lse)
    tg.attention_grad_into(dy, q, k, v, y, lse, start=documents.start, ends=documents.ends, window=window,
                           pairs=pairs, dq=dq, dk=dk, dv=dv)
    for a, b in zip((y, dq, dk, dv), want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert nan[0][:, :8].isnan().all() and nan[0][:, -8:].isnan().all(), "nothing beside the results is touched"
    check(tg, T, widths, documents, 2, packed=True, window=window, pairs=pairs)


def test_layouts_that_descriptors_cannot_read_are_copied(tg, monkeypatch):
    """Heads apart from each other, a gradient that is one number for all, and addresses off 16 bytes."""
    tile_tables(tg, monkeypatch, (16, 16), TILES["square"])
    documents, draw = documents_of(tg, 20, [0, 9]), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(20, HEADS, 3, 16, generator=draw).unbind(2)
    v = torch.randn(20 * HEADS * 16 + 1, generator=draw)[1:].view(20, HEADS, 16)
    xs = [x.requires_grad_() for x in (q, k, v)]
    got, want = ([y := f(*xs, documents, window=5), *torch.autograd.grad(y.sum(), xs)] for f in (tg.attention, tg.attention_ref))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_small_integers_are_exact(tg, monkeypatch):
    """All scores equal, 2^n keys for every query, values of -1, 0 and 1: sums of halves, without any rounding."""
    T, widths = 64, (16, 16)
    tile_tables(tg, monkeypatch, widths, TILES["square"])
    documents = documents_of(tg, T, range(T))
    v = torch.randint(-1, 2, (T, HEADS, 16), generator=torch.Generator().manual_seed(0)).half()
    q = torch.ones(T, HEADS, 16, dtype=torch.float16)
    assert torch.equal(tg.attention(q, q / 2, v, documents, window=T), v)
    one = documents_of(tg, T, [0])
    y = tg.attention(q, q / 2, v, one, window=7)
    for i in (0, 1, 3, 7, 20, 63):
        assert torch.equal(y[i], v[max(i - 7, 0):i + 1].float().mean(0).half())


def test_half_precision(tg, monkeypatch):
    tile_tables(tg, monkeypatch, (16, 32), TILES["square"])
    check(tg, 60, (16, 32), documents_of(tg, 60, [0, 11]), tol=2e-3, dtype=torch.float16, window=33)


@pytest.mark.parametrize("pairs", (False, True))
def test_a_query_that_sees_one_key_gets_its_v(tg, monkeypatch, pairs):
    """To the last bit, though exp(s) is rounded; scores then have no gradient, but for the rounding of dy v."""
    T, widths = 40, (16, 32)
    tile_tables(tg, monkeypatch, widths, TILES["wide"])
    (q, k, v), dy = inputs(T, widths, 7, torch.float16)
    k = (k.detach() / 4).requires_grad_()
    y, dq, dk, dv = results(tg.attention, (q, k, v), dy, documents_of(tg, T, range(T)), window=0, pairs=pairs)
    assert torch.equal(y, v) and (dv - dy).norm() <= 2e-3 * dy.norm()
    assert max(dq.double().norm(), dk.double().norm()) <= 1e-5 * dy.norm()


@pytest.mark.parametrize("pairs", (False, True))
def test_large_scores(tg, monkeypatch, pairs):
    """Without a running maximum: scores of 60 and -60 side by side, and queries that see only one or the other."""
    T, widths = 52, (16, 32)
    tile_tables(tg, monkeypatch, widths, TILES["square"])
    (q, k, v), dy = inputs(T, widths, 5)
    place = torch.arange(T)[:, None, None]
    signs = torch.where((place < 20) | (place >= 40) & (place % 3 > 0), 1.0, -1.0)
    q, k = (torch.where(place % 8 == 7, x / x.norm(dim=-1, keepdim=True) * length, y) for x, y, length in (
        (q, torch.tensor(2.0), 8), (k, 1.875 * signs, 7.5)))                       # 16 * 2 * 1.875 = 60
    assert {-60, 60} <= set(torch.einsum("ihe,jhe->ijh", q, k).unique().tolist())
    xs = [x.detach().requires_grad_() for x in (q, k, v)]
    documents = documents_of(tg, T, [0, 10, 20, 30, 40, 49])
    compare(tg, xs, dy, documents, 2e-5, window=25, pairs=pairs)


def test_scores_of_the_network_are_within_the_bound(tg):
    """By a factor of two in every stage, and what check_config reckons is no less. Rows that lie as well as they can: q along a
    k that key_offset joined of two rows with all their length in the halves that it takes."""
    for cfg in tg.PRESETS.values():
        half, scores = torch.arange(cfg.d_head) < cfg.d_head // 2, []
        k = torch.where(half, 2.0, 0.0) ** 0.5 + torch.where(half, 0.0, 2.0) ** 0.5
        for stage in range(len(cfg.stages)):
            view = tg.view_at(cfg, stage, "cpu", 8)
            scores += [float(view.scale_narrow) * cfg.d_head / 2,
                       float(k / k.norm() * cfg.d_head ** 0.5 * view.scale_wide @ k)]
        assert max(scores) <= 2 * cfg.d_head * max(cfg.scale_narrow / 2, cfg.scale_wide) and max(scores) < tg.MOST_SCORE / 2


def test_two_runs_give_the_same_bits(tg, monkeypatch):
    tile_tables(tg, monkeypatch, (16, 16), TILES["square"])
    documents = documents_of(tg, 50, [0, 20])
    xs, dy = inputs(50, (16, 16), 3)
    for a, b in zip(*(results(tg.attention, xs, dy, documents, window=30) for _ in range(2))):
        assert torch.equal(a, b)


@pytest.mark.parametrize("pairs", (False, True))
def test_ops_are_what_their_schemas_say(tg, monkeypatch, pairs):
    tile_tables(tg, monkeypatch, (16, 16), TILES["square"])
    documents = documents_of(tg, 20, [0, 7])
    (q, k, v), dy = inputs(20, (16, 16), 0)
    q, k, v = (x.detach() for x in (q, k, v))
    y, lse = torch.empty_like(v), tg.lse_like(q, pairs)
    torch.library.opcheck(tg.op("attention"), (q, k, v, documents.start, 5, pairs), {"y": y, "lse": lse})
    tg.op("attention")(q, k, v, documents.start, 5, pairs, y=y, lse=lse)
    torch.library.opcheck(tg.op("attention_grad"), (dy, q, k, v, y, lse), {
        "start": documents.start, "ends": documents.ends, "window": 5, "pairs": pairs,
        **{name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}})


@pytest.mark.parametrize("starts", ([0], [0, 1, 2, 3], [0, 5, 6, 40], [0, 63]))
def test_ends_of_documents(tg, starts):
    documents = documents_of(tg, 64, starts)
    assert documents.ends.dtype == torch.int32
    assert documents.ends.tolist() == [min([s for s in starts if s > t], default=64) for t in range(64)]


def test_the_file_can_be_imported_without_triton(tmp_path):
    """The stand-in lets everything be read; a launch says what is missing."""
    (tmp_path / "triton.py").write_text("raise ImportError('absent')\n")
    code = ("import torch, train_gpt as tg\n"
            "x = torch.zeros(4, 2, 64)\n"
            "documents = tg.Documents(torch.zeros(4, dtype=torch.int32))\n"
            "assert tg.attention_ref(x, x, x, documents, window=2).shape == x.shape\n"
            "try:\n    tg.attention(x, x, x, documents, window=2)\n"
            "except RuntimeError as error:\n    print(error)\n")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "needs the package triton" in done.stdout, done.stderr


MOST_REGISTERS = {"_attention_kernel": 128, "_attention_dq_kernel": 168, "_attention_dkv_kernel": 240}
STEP = 16                    # of the sum that one tensor core instruction takes


def test_kernels_compile_for_a_gpu_without_spills():
    """Every tile of the tables for sm_90a: nothing in local memory, no tensor core instruction that waits for the last, and
    no left operand in registers but p and ds, of which none is written while a product may read it."""
    import triton
    if not (ROOT / "tests" / "triton_inspect.py").exists() or not os.path.exists(
            os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")):
        pytest.skip("this Triton has no ptxas")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, ROOT / "tests" / "triton_inspect.py"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 12
    for row in rows:
        print(row)
        assert row["stack"] == 0 and not row["serialised"] and row["wgmma"] and not row["mma"], row
        narrow = row["widths"] == [64, 64]
        assert row["registers"] <= (128 if narrow else MOST_REGISTERS[row["kernel"]]), row
        assert row["programs"] >= (4 if narrow else 2), row
        made = row["tile"][0] if "dkv" in row["kernel"] else row["tile"][1]
        made *= 1 if "dq" in row["kernel"] else 2                # p and ds; p for its sum and for y; ds
        assert row["left_in_registers"] == made // STEP and row["in_flight"] == 0, row
