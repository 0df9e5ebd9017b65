"""Times whole steps of the trainer on one GPU, by stage, beside the matrix products that they cannot do without.

    python tests/bench_step.py [--varlen] [preset] [key=value ...]        the command line of train_gpt.py; needs its shards

Steps are real ones, like the last of each stage: tokens of the training files, packed by the loader; four steps (Adam
steps on every second, sparse tables on every second or fourth) count as four. The products run alone, with the shapes of
the step at the largest T, in the same process. With --varlen attention is torch's varlen_attn (FlashAttention 2), on
documents like those of the web in place of the batch's own: a captured step cannot ask how many a batch has.
"""

import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bench_kernels     # noqa: E402
import train_gpt as tg   # noqa: E402

CYCLE = 4              # steps after which all repeats
WARM, TIMED = 2 * CYCLE, 8 * CYCLE


class Varlen(bench_kernels.Varlen):
    """varlen_attn as a row of FAST, on the same documents in every call with the same lengths and window."""

    def __init__(self):
        self.calls, self.longest = {}, 0

    def __call__(self, q, k, v, documents, *, window, pairs=False):
        key = len(q), self.longest, window, pairs
        if key not in self.calls:
            self.calls[key] = self.of(bench_kernels.web_documents(len(q), longest=self.longest), window, pairs)
        return self.calls[key](q, k, v)


def median_ms(f):
    return do_bench(f, warmup=20, rep=100, return_mode="median")


def products(model, T, n_classes):
    """[(name, how often in a step, ms)] of the matrix products of one micro-batch of T tokens and of an update."""
    D, slot, heads = model.vo.shape[2], model.d_head, model.n_heads
    shapes = {}
    for layer in tg.LAYERS:
        if layer.attention:
            qk, v = heads * slot // (1 if layer.wide else 2), heads * slot // (2 if layer.half_v else 1)
            for key in (("q and k", 2 * qk, D), ("v", v, D), ("o", D, v)):
                shapes[key] = shapes.get(key, 0) + 1
    shapes |= {("up", model.mlp.shape[1], D): tg.N_MLPS, ("down", D, model.mlp.shape[1]): tg.N_MLPS}
    rows = []
    for (name, outputs, inputs), n in shapes.items():
        x, w, dy = (torch.randn(*s, device="cuda").bfloat16() for s in ((T, inputs), (outputs, inputs), (T, outputs)))
        rows += [(f"{name} {outputs} x {inputs}, {what}", n, median_ms(f)) for what, f in
                 (("y", lambda: x @ w.T), ("dx", lambda: dy @ w), ("dw", lambda: dy.T @ x))]
    block = min(T, tg.LOSS_ROWS["cuda"])
    x, dy, w = (torch.randn(*s, device="cuda").bfloat16() for s in ((block, D), (block, n_classes), (n_classes, D)))
    rows += [(f"head, {what}, {block} rows", T / block, median_ms(f)) for what, f in
             (("y", lambda: x @ w.T), ("dx", lambda: dy @ w), ("dw", lambda: dy.T @ x))]
    for name in ("qk", "vo", "mlp"):
        g = torch.randn_like(getattr(model, name).data)
        rows.append((f"update of {name}", 1, median_ms(lambda: tg.cascade(g))))
    return rows


def main(argv):
    words = [word for word in argv if word != "--varlen"]
    cfg = tg.parse(words or ["solo"])
    comm, varlen = tg.Comm(cfg, 0, 0, 1), Varlen()
    names, ops = tg.choose(cfg, comm.device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, fast: {','.join(names) or 'none'}")
    if "--varlen" in argv:
        ops.attention = varlen
        print("attention by varlen_attn")
    model, optimizer = tg.make(cfg, comm, comm.device, ops)
    guard, by_stage = SimpleNamespace(step=lambda: None), {}
    most = model.most_rows(cfg.n_micro * max(stage.T for stage in cfg.stages))
    replay = tg.Replay(model, optimizer.rooms(most) if model.ops.captures else {})
    for k, stage in enumerate(cfg.stages):
        plan = tg.plan_at(cfg, cfg.stage_ends[k] - 1)
        loader = tg.Loader(cfg, comm, [plan] * (WARM + TIMED))
        loader.resume()
        run = SimpleNamespace(cfg=cfg, comm=comm, guard=guard, model=model, optimizer=optimizer, replay=replay)
        view, marks, batch = tg.view_at(cfg, k, comm.device, stage.T), [], tg.synthetic(plan, comm.device)
        varlen.longest = stage.max_doc
        replay.hold(optimizer.pull(model.wanted([batch]), True))
        replay.capture(batch, view)
        begin = -((0, *cfg.stage_ends)[k] // -CYCLE) * CYCLE
        for step in range(begin, begin + WARM + TIMED):
            tg.train_step(run, loader.next(), view, step)
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        torch.cuda.synchronize()
        cycles = [a.elapsed_time(b) / CYCLE for a, b in zip(marks[WARM - 1::CYCLE], marks[WARM + CYCLE - 1::CYCLE])]
        by_stage[k] = statistics.median(cycles)
        print(f"stage {k}: T {stage.T:6,d} | {by_stage[k]:7.2f} ms a step | least {min(cycles):.2f}, most {max(cycles):.2f}")
    T = max(stage.T for stage in cfg.stages)
    largest = max(range(len(cfg.stages)), key=lambda k: cfg.stages[k].T)
    rows = products(model, T, tg.plan_at(cfg, cfg.stage_ends[largest] - 1).n_classes)
    for name, n, ms in rows:
        print(f"{name:36s} {n:5.0f} x {ms:7.3f} ms")
    total = sum(n * ms for _, n, ms in rows) * 1.0
    step = by_stage[max(by_stage, key=lambda k: cfg.stages[k].T)]
    print(f"T {T:,}: step {step:.2f} ms, its matrix products {total:.2f} ms, ratio {step / total:.2f}; "
          f"peak {torch.cuda.max_memory_allocated() >> 20:,} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])
