"""Checks and times the kernels of train_gpt.py on one GPU, beside libraries that do the same.

    python tests/bench_kernels.py attention [--check | --variants] [--out results.json]

Attention: (1) results and gradients at the record's shapes against the blocked reference in fp32, and exact cases, with
--check nothing else; (2) times beside torch's varlen_attn (FlashAttention 2), compiled FlexAttention and, where installed,
FlashAttention 4, in one process, each captured in a CUDA graph, caches flushed before every call; medians; (3) with
--variants the kernels with other tiles. What fails says so and the rest goes on.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_gpt as tg   # noqa: E402

DEVICE, DTYPE = "cuda", torch.bfloat16
H, BYTES_S, FLOPS_S = 6, 4.27e12, 800e12               # heads; what one H200 copies and multiplies in bf16 a second
BEGAN = time.perf_counter()


def say(*words):
    print(f"{time.perf_counter() - BEGAN:6.1f} s |", *words, flush=True)


def attempt(what, f, *xs, **settings):
    """f(...), or None after a line on what went wrong."""
    try:
        return f(*xs, **settings)
    except Exception as error:
        say(f"FAILED {what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        print("".join(traceback.format_exc().splitlines(keepends=True)[-8:]), flush=True)
        return None


def captured_ms(make, rep):
    """Median ms, as a CUDA graph, of the function that make() returns; both run on the stream of the capture."""
    from triton.testing import do_bench
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f = make()
        for _ in range(2):
            f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = f()
    ms = do_bench(graph.replay, warmup=5, rep=rep, return_mode="median")
    del kept, graph
    return ms


# ---- documents and inputs ----------------------------------------------------------------------------------

def web_documents(T, seed=0, longest=3072):
    """Lengths like those of FineWeb: log-normal, median 420 tokens."""
    lengths = torch.randn(T, generator=torch.Generator().manual_seed(seed)).exp().mul(420).long().clamp(2, longest)
    return documents_of(T, lengths)


def documents_of(T, lengths):
    begins = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    begins = begins[begins < T].to(DEVICE)
    return tg.Documents(begins[torch.searchsorted(begins, torch.arange(T, device=DEVICE), right=True) - 1].int())


def inputs(T, widths, seed=1):
    """q, k, v, dy as the model has them: scores of about the recipe's spread."""
    draw = torch.Generator(DEVICE).manual_seed(seed)
    q, k, v, dy = (torch.randn(T, H, w, device=DEVICE, generator=draw).to(DTYPE) for w in (*widths[:1], *widths, widths[1]))
    return [(q * 0.15).requires_grad_(), k.requires_grad_(), v.requires_grad_()], dy


def n_pairs(documents, window, pairs):
    """Pairs of a query and a key that it sees, over all heads."""
    start = (documents.doubled if pairs else documents).start.long()
    place = torch.arange(len(start), device=start.device)
    return int((place - torch.maximum(start, place - window) + 1).sum()) * (H // (1 + pairs))


# ---- (1) checks ------------------------------------------------------------------------------------------------

def shape_of(T, widths, window, pairs):
    return f"{widths} T {T:,} window {window}{' pairs' if pairs else ''}"


def checked(what, good, errors, more=""):
    """One finding, said; errors are those of y, dq, dk, dv where there are four."""
    say(f"{'ok' if good else 'WRONG':5s} {what}: {' '.join(f'{x:.1e}' for x in errors)}{more}")
    return {"what": what, "errors": errors, "good": good}


def both(f, xs, dy, documents, **settings):
    y = f(*xs, documents, **settings)
    return [y.detach(), *torch.autograd.grad(y, xs, dy)]


def compare(what, T, widths, documents, *, window, pairs=False, wide=torch.float32):
    """Relative errors in norm of y, dq, dk, dv; whether a second run and results in memory of NaN have the same bits."""
    xs, dy = inputs(T, widths, seed=T + window)
    want = both(tg.attention_ref, [x.detach().to(wide).requires_grad_() for x in xs], dy.to(wide), documents,
                window=window, pairs=pairs)
    got, again = (both(tg.attention, xs, dy, documents, window=window, pairs=pairs) for _ in range(2))
    q, k, v = (x.detach() for x in xs)
    y, *grads = (torch.full_like(x, torch.nan) for x in (v, q, k, v))
    lse = tg.lse_like(q, pairs).fill_(torch.nan)
    tg.op("attention")(q, k, v, documents.start, window, pairs, y=y, lse=lse)
    tg.op("attention_grad")(dy, q, k, v, y, lse, start=documents.start, ends=documents.ends, window=window, pairs=pairs,
                            **dict(zip(("dq", "dk", "dv"), grads)))
    same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(got, again, (y, *grads)))
    scale = dy.double().norm()           # gradients of q and k vanish where every query sees one key
    errors = [((a.double() - b.double()).norm() / torch.maximum(b.double().norm(), scale * 1e-3)).item()
              for a, b in zip(got, want)]
    good = same and errors[0] <= 3e-3 and max(errors[1:]) <= 5e-3
    return checked(f"{what}: {shape_of(T, widths, window, pairs)}", good, errors, "" if same else ", NOT THE SAME BITS TWICE")


def forward_only(what, T, widths, *, window, pairs=False):
    """Lengths of validation, without gradients."""
    documents, (xs, _) = web_documents(T), inputs(T, widths)
    with torch.no_grad():
        want = tg.attention_ref(*(x.float() for x in xs), documents, window=window, pairs=pairs)
        got = tg.attention(*xs, documents, window=window, pairs=pairs)
        error = ((got - want).norm() / want.norm()).item()
        tail = ((got - want)[-1000:].norm() / want[-1000:].norm()).item()
    return checked(f"{what}: {shape_of(T, widths, window, pairs)}, all and the last 1,000 tokens",
                   max(error, tail) <= 3e-3, [error, tail])


def exact(T, widths, zero, n=64):
    """Scores 0, n keys a query, integers: all but the rounding of ds to bf16 is exact, and that can be foretold."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, dy = (torch.randint(-1, 2, (T, H, w), device=DEVICE, generator=draw).float()
                   for w in (*widths[:1], *widths, widths[1]))
    (q if zero == "q" else k).zero_()
    y, dq, dk, dv = (torch.zeros_like(x) for x in (v, q, k, v))
    for a in range(0, T, 1024):
        i, first = slice(a, a + 1024), max(a - n + 1, 0)
        j = slice(first, min(a + 1024, T))
        place_i, place_j = (torch.arange(T, device=DEVICE)[x] for x in (i, j))
        seen = ((place_j <= place_i[:, None]) & (place_j > place_i[:, None] - n)).float()
        y[i] = torch.einsum("ij,jhe->ihe", seen, v[j]) / n
        dp = torch.einsum("ihe,jhe->hij", dy[i], v[j]) - (y[i] * dy[i]).sum(-1).T[:, :, None]
        ds = (dp * seen / n).to(DTYPE).float()
        dq[i] = torch.einsum("hij,jhe->ihe", ds, k[j])
        dk[j] += torch.einsum("hij,ihe->jhe", ds, q[i])
        dv[j] += torch.einsum("ij,ihe->jhe", seen, dy[i]) / n
    xs = [x.to(DTYPE).requires_grad_() for x in (q, k, v)]
    got = both(tg.attention, xs, dy.to(DTYPE), documents_of(T, torch.tensor([T])), window=n - 1)
    inner = slice(2 * n, T - 2 * n)      # where every query sees n keys, and is one of n that see a key
    other = [(a[inner] != b.to(DTYPE)[inner]).float().mean().item() for a, b in zip(got, (y, dq, dk, dv))]
    good = not other[0] and not other[3] and max(other) < 0.01       # ds may be half way between two numbers
    return checked(f"integers, {zero} = 0: {widths} T {T:,}, shares not exact", good, other)


@contextlib.contextmanager
def tabled(table, key, tile):
    """Within, a table of train_gpt has another tile."""
    kept, table[key] = table[key], tile
    try:
        yield
    finally:
        table[key] = kept


OTHER_DQ = ((64, 32, 4, 3), (64, 64, 4, 3))            # of pairs, checked beside the one of the table


def checks():
    """[finding or None]: every row of the tables, pairs at windows below, at and beyond what a document has."""
    T, web = 49_152, web_documents(49_152)
    ones, short = (documents_of(T, x) for x in (torch.ones(T).long(), torch.arange(T) % 7 + 1))
    one = documents_of(T, torch.tensor([T]))
    ragged, long = web_documents(T - 37), documents_of(4_099, torch.tensor([9_999]))
    narrow, middle, wide = (64, 64), (64, 128), (128, 128)
    rows = [("web", T, narrow, web, 128), ("web", T, narrow, web, 640), ("web", T, middle, web, 640),
            ("web", T, middle, web, 384), ("web", T, wide, web, 1408),
            *(("web", T, middle, web, window, True) for window in (128, 384, 640, 768)),
            ("one document", T, middle, one, 640, True), ("one document", T, wide, one, 1408),
            ("tokens alone", T, middle, ones, 640), ("tokens alone", T, middle, ones, 640, True),
            ("short documents", T, narrow, short, 128), ("short documents", T, middle, short, 640, True),
            ("ragged", T - 37, middle, ragged, 640, True), ("ragged", T - 37, wide, ragged, 1407),
            ("longer than T", 4_099, middle, long, 10**9), ("longer than T", 4_099, middle, long, 10**9, True),
            ("window 0", 5_000, narrow, web_documents(5_000), 0), ("window 1", 5_000, wide, web_documents(5_000), 1),
            ("window 1", 5_000, middle, web_documents(5_000), 1, True)]
    found = [attempt(row[0], compare, *row[:4], window=row[4], pairs=len(row) > 5) for row in rows]
    for tile in OTHER_DQ:
        with tabled(tg.ATTN_DQ, middle, tile):
            what = f"dq by {tile[0]}x{tile[1]} s{tile[3]}"
            found += [attempt(what, compare, what, T, middle, web, window=window, pairs=True) for window in (128, 640)]
    found.append(attempt("fp64", compare, "fp64", 16_384, middle, web_documents(16_384), window=640, wide=torch.float64))
    found += [attempt("integers", exact, T, widths, zero) for widths in (narrow, middle, wide) for zero in "qk"]
    found.append(attempt("validation", forward_only, "validation", 262_144, wide, window=2560))
    found.append(attempt("validation", forward_only, "validation", 262_144, middle, window=768, pairs=True))
    torch.cuda.empty_cache()
    return found


# ---- (2) beside libraries ----------------------------------------------------------------------------------------

SHAPES = (   # T, window, widths, pairs: what the recipe has, and both short windows before at the largest T
    *((T, short, (64, v), pairs) for T, short in ((16_384, 128), (32_768, 384), (49_152, 128), (49_152, 384), (49_152, 640))
      for v, pairs in ((64, False), (128, False), (128, True))),
    (16_384, 384, (128, 128), False), (32_768, 896, (128, 128), False), (49_152, 1408, (128, 128), False))
FLEX_T = 49_152              # it compiles 6 to 9 s for every T and widths


class Library:
    """One library's attention on (T, H, E) tensors with documents given; paired heads are copied to a stream and back."""
    seconds = 60             # of building and timing at most

    def fits(self, T):
        return True

    def of(self, documents, window, pairs):
        if not pairs:
            return self.single(documents, window)
        inner = self.single(documents.doubled, window)
        return lambda *xs: tg.unpaired(inner(*map(tg.paired, xs)))


class Ours(Library):
    def of(self, documents, window, pairs):
        return lambda q, k, v: tg.attention(q, k, v, documents, window=window, pairs=pairs)


class Varlen(Library):
    def single(self, documents, window):
        from torch.nn.attention.varlen import varlen_attn
        bounds, longest = bounds_of(documents)

        def run(q, k, v):
            if missing := v.shape[-1] - q.shape[-1]:
                q, k = (torch.nn.functional.pad(x, (0, missing)) for x in (q, k))
            return varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=1.0, window_size=(window, 0))
        return run


def bounds_of(documents):
    begins = (~documents.goes_on).nonzero()[:, 0]
    bounds = torch.nn.functional.pad(begins, (0, 1), value=len(documents.start)).int()
    return bounds, int(bounds.diff().max())


class Flex(Library):
    def __init__(self):
        from torch.nn.attention.flex_attention import flex_attention
        torch._dynamo.config.cache_size_limit = 64
        self.op = torch.compile(flex_attention, dynamic=False)

    def fits(self, T):
        return T == FLEX_T

    def single(self, documents, window):
        mask = block_mask(documents, window)

        def run(q, k, v):
            return self.op(*(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=mask, scale=1.0)[0].transpose(0, 1)
        return run


def block_mask(documents, window, block=128):
    """FlexAttention's blocks from the first key of a block's first and last query; no T x T tensor."""
    from torch.nn.attention.flex_attention import BlockMask
    start, T = documents.start, len(documents.start)
    place, width = torch.arange(T, device=DEVICE, dtype=torch.int32), torch.tensor(window, device=DEVICE, dtype=torch.int32)
    low = torch.maximum(start, place - width)
    row = torch.arange(T // block, device=DEVICE)
    touched = (row >= (low[::block] // block)[:, None]) & (row <= row[:, None])
    whole = touched & (row * block >= low[block - 1::block, None]) & (row < row[:, None])

    def sparse(mask):
        return mask.sum(1).int()[None, None], mask.int().argsort(dim=1, descending=True, stable=True).int()[None, None].contiguous()

    def visible(b, h, i, j):
        return (j <= i) & (j >= start[i]) & (j >= i - width)
    mask = BlockMask.from_kv_blocks(*sparse(touched & ~whole), *sparse(whole), BLOCK_SIZE=block, mask_mod=visible)
    for name, x in vars(mask).items():
        if isinstance(x, torch.Tensor):
            setattr(mask, name, x.contiguous())
    return mask


class Flash4(Library):
    def __init__(self):
        from flash_attn.cute import flash_attn_varlen_func
        self.op = flash_attn_varlen_func

    def single(self, documents, window):
        bounds, longest = bounds_of(documents)

        def run(q, k, v):
            out = self.op(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest,
                          softmax_scale=1.0, causal=True, window_size=(window, 0))
            return out[0] if isinstance(out, tuple) else out
        return run


LIBRARIES = {"ours": Ours, "varlen": Varlen, "flex": Flex, "flash4": Flash4}


def time_one(library, shape, documents, xs, dy, want, rep):
    """ms of forward and backward, and the error of y against ours."""
    _, window, _, pairs = shape
    f = library.of(documents, window, pairs)
    with torch.no_grad():
        y = f(*xs)
        error = ((y.float() - want.float()).norm() / want.float().norm()).item() if want is not None else 0.0
        forward = captured_ms(lambda: lambda: f(*xs), rep)
    del y

    def backward():
        y = f(*xs)
        return lambda: torch.autograd.grad(y, xs, dy, retain_graph=True)
    return {"forward": forward, "backward": captured_ms(backward, rep), "error": error}


def beside(rep):
    """Times of every library at every shape: [{shape, pairs of places, floors, library: times}]."""
    libraries, spent, rows = {}, {}, []
    for name, make in LIBRARIES.items():
        if (library := attempt(name, make)) is not None:
            libraries[name], spent[name] = library, 0.0
    for shape in sorted(SHAPES, reverse=True):
        T, window, widths, pairs = shape
        documents, (xs, dy) = web_documents(T), inputs(T, widths)
        useful, (e, ev) = n_pairs(documents, window, pairs), widths
        row = {"T": T, "window": window, "widths": widths, "pairs": pairs, "seen": useful,
               "flops": [2 * (e + ev) * useful, 2 * (3 * e + 2 * ev) * useful],
               "bytes": [2 * T * H * 2 * (e + ev), 2 * T * H * 4 * (e + ev)]}
        with torch.no_grad():
            want = attempt("ours", tg.attention, *xs, documents, window=window, pairs=pairs)
        for name, library in libraries.items():
            if spent[name] > library.seconds or not library.fits(T):
                continue
            begin = time.perf_counter()
            row[name] = attempt(f"{name} {shape}", time_one, library, shape, documents, xs, dy, want, rep)
            spent[name] += time.perf_counter() - begin
        rows.append(row)
        say(line_of(row))
        torch.cuda.empty_cache()
    say("seconds by library:", {name: round(x, 1) for name, x in spent.items()})
    return rows


def line_of(row):
    e, ev = row["widths"]
    words = [f"T {row['T']:6,d} w {row['window']:4d} {e:3d},{ev:3d} {'pairs' if row['pairs'] else '     '}"]
    for name in LIBRARIES:
        if found := row.get(name):
            words.append(f"{name} {found['forward']:.3f} / {found['backward']:.3f}"
                         + (f" ({found['error']:.0e})" if found["error"] > 5e-3 else ""))
    if found := row.get("ours"):
        rates = [row["flops"][i] / found[side] / 1e9 for i, side in enumerate(("forward", "backward"))]
        of_bytes, of_flops = ([found[side] / (row[what][i] / rate * 1e3) for i, side in enumerate(("forward", "backward"))]
                              for what, rate in (("bytes", BYTES_S), ("flops", FLOPS_S)))
        words.append(f"TFLOP/s {rates[0]:.0f} / {rates[1]:.0f}, times the floor of bytes {of_bytes[0]:.1f} / {of_bytes[1]:.1f}, "
                     f"of products {of_flops[0]:.1f} / {of_flops[1]:.1f}")
    return " | ".join(words)


# ---- (3) variants ------------------------------------------------------------------------------------------------

FORWARD = ((64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4), (128, 32, 8, 3), (128, 64, 8, 2))
DQ = ((64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4), (128, 64, 8, 2), (128, 32, 8, 3))
DKV = ((32, 64, 4, 2), (32, 64, 4, 3), (32, 64, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (32, 128, 8, 3))
KINDS = {"forward": FORWARD, "dq": DQ, "dkv": DKV}
TABLES = {"forward": "ATTN_FORWARD", "dq": "ATTN_DQ", "dkv": "ATTN_DKV"}
KERNELS = {"forward": "_attention_kernel", "dq": "_attention_dq_kernel", "dkv": "_attention_dkv_kernel"}
TUNED = (((64, 64), False, (128, 384, 640)), ((64, 128), False, (640,)), ((64, 128), True, (128, 384, 640)),
         ((128, 128), False, (384, 1408)))


class Instead:
    """A kernel that is not launched: f gets its arguments."""

    def __init__(self, f):
        self.f = f

    def __getitem__(self, grid):
        return lambda *xs, **options: self.f(*xs)


class Setting:
    """Arguments of attention_into and attention_grad_into for one shape."""

    def __init__(self, T, widths, window, pairs):
        self.documents, (xs, self.dy) = web_documents(T), inputs(T, widths)
        self.q, self.k, self.v = (x.detach() for x in xs)
        self.window, self.pairs, self.widths, self.delta = window, pairs, widths, None
        self.y, self.lse = torch.empty_like(self.v), tg.lse_like(self.q, pairs)
        self.grads = {name: torch.empty_like(x) for name, x in (("dq", self.q), ("dk", self.k), ("dv", self.v))}

    def forward(self, tile):
        tg.attention_into(self.q, self.k, self.v, self.documents.start, self.window, self.pairs,
                          y=self.y, lse=self.lse, tile=tile)

    def backward(self, dq=None, dkv=None):
        tiles = (dq or tg.ATTN_DQ[self.widths], dkv or tg.ATTN_DKV[self.widths])
        tg.attention_grad_into(self.dy, self.q, self.k, self.v, self.y, self.lse, start=self.documents.start,
                               ends=self.documents.ends, window=self.window, pairs=self.pairs, tiles=tiles, **self.grads)

    def prepare(self):
        """What the kernels of the backward pass read: y, lse and delta."""
        self.forward(tg.ATTN_FORWARD[self.widths])
        with replaced("dkv", lambda *xs: setattr(self, "delta", xs[7].base.clone())):
            self.backward()

    def run(self, kind, tile):
        """One kernel alone; in place of dq its delta is copied."""
        if kind == "forward":
            self.forward(tile)
        elif kind == "dq":
            with replaced("dkv", lambda *xs: None):
                self.backward(dq=tile)
        else:
            with replaced("dq", lambda *xs: self.delta is not None and xs[7].copy_(self.delta)):
                self.backward(dkv=tile)


@contextlib.contextmanager
def replaced(kind, f):
    """Within, a kernel is not launched: f gets its arguments."""
    kernel = getattr(tg, KERNELS[kind])
    setattr(tg, KERNELS[kind], Instead(f))
    try:
        yield
    finally:
        setattr(tg, KERNELS[kind], kernel)


def build(job):
    """In a process of its own: compile one kernel by launching it on little."""
    kind, widths, pairs, tile = job
    begin = time.perf_counter()
    try:
        Setting(1024, widths, 128, pairs).run(kind, tile)
        torch.cuda.synchronize()
        return job, time.perf_counter() - begin, None
    except Exception as error:
        return job, time.perf_counter() - begin, f"{type(error).__name__}: {error}\n{traceback.format_exc()[-600:]}"


def jobs_of(with_variants):
    """(kind, widths, pairs, tile): those of the tables, those that the checks need too, variants."""
    shapes = [(kind, widths, pairs) for widths, pairs, _ in TUNED for kind in KINDS]
    shipped = [(kind, widths, pairs, getattr(tg, TABLES[kind])[widths]) for kind, widths, pairs in shapes]
    needed = [("dq", (64, 128), True, tile) for tile in OTHER_DQ]
    more = [(*shape, tile) for shape in shapes for tile in KINDS[shape[0]]] if with_variants else []
    return shipped, needed, [job for job in more if job not in shipped + needed]


def gathered(pending, limit_s):
    """Wait for kernels under way, [(job, result)]: {job: error} of those that failed or took too long."""
    until, seconds, failed = time.perf_counter() + limit_s, 0.0, {}
    for job, result in pending:
        try:
            _, took, error = result.get(timeout=max(until - time.perf_counter(), 0.1))
            seconds += took
        except Exception as caught:
            error = f"{type(caught).__name__} {caught}"
        if error:
            failed[job] = error
            say(f"does not build: {job}: {error if len(failed) < 4 else error[:160]}")
    say(f"{len(pending) - len(failed)} of {len(pending)} kernels built, {seconds:.0f} s of all processes")
    return failed


def time_variants(jobs, rep):
    """Every kernel alone, with every tile, at the windows of the recipe; the best first."""
    found = []
    for widths, pairs, windows in TUNED:
        for window in windows:
            setting = Setting(49_152, widths, window, pairs)
            setting.prepare()
            for kind in KINDS:
                rows = []
                for job in jobs:
                    if job[:3] == (kind, widths, pairs):
                        ms = attempt(str(job), captured_ms, lambda: lambda: setting.run(kind, job[3]), rep)
                        if ms is not None:
                            rows.append((ms, job[3]))
                            found.append({"kind": kind, "widths": widths, "pairs": pairs, "window": window, "tile": job[3], "ms": ms})
                rows.sort(key=lambda row: row[0])
                say(f"{kind} {widths}{' pairs' if pairs else ''} w {window}: " + "; ".join(
                    f"{ms:.4f} {tile[0]}x{tile[1]} w{tile[2]} s{tile[3]}" for ms, tile in rows))
    return found


# ---- all of it ------------------------------------------------------------------------------------------------------

def attention(options):
    shipped, needed, more = jobs_of(options.variants)
    # Forked before this process touches the GPU, so that none of them imports torch again.
    pool = multiprocessing.get_context("fork").Pool(max(1, os.cpu_count() - 2))
    results = {"torch": torch.__version__}
    first, waiting = ([(job, pool.apply_async(build, (job,))) for job in jobs] for jobs in (shipped + needed, more))
    failed = gathered(first, 120)
    results |= {"gpu": torch.cuda.get_device_name(), "built": {str(k): v for k, v in failed.items()}}
    say(results["gpu"], "torch", torch.__version__)

    def keep(name, value):
        results[name] = value
        if options.out:
            Path(options.out).write_text(json.dumps(results, indent=1))
    keep("checks", attempt("checks", checks))
    if more:
        failed |= gathered(waiting, 90)
    pool.terminate()
    if not options.check:
        keep("times", attempt("times", beside, options.rep))
    if more:
        jobs = [job for job in (*shipped, *needed, *more) if job not in failed]
        keep("variants", attempt("variants", time_variants, jobs, options.rep))
    if results.get("times"):
        print(f"\nforward / backward ms, H {H}, log-normal documents, {results['gpu']}")
        print(*map(line_of, results["times"]), sep="\n")
    found = results["checks"] or [None]
    wrong = [x["what"] if x else "one that failed" for x in found if not x or not x["good"]]
    print(f"checks: {len(found)} made, {len(wrong)} wrong{': ' * bool(wrong)}{'; '.join(wrong)}")
    return 1 if wrong else 0


def main(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attention",))
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="check results, time nothing")
    how.add_argument("--variants", action="store_true", help="time other tiles too")
    parser.add_argument("--out", help="where results go as JSON")
    parser.add_argument("--rep", type=int, default=25, help="ms of repetitions behind a median")
    options = parser.parse_args(words)
    return {"attention": attention}[options.what](options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
