"""Trains arms of settings with the same seeds in one process, and compares their validation losses pair by pair.

    python tests/bench_arms.py PRESET [key=value ...] --seeds 3 --out FOLDER --arm "base" --arm "no_table ngram_rows=0" ...

An arm is a name and settings; the first one is what the others are compared with. A word without `=` after the name is
one of CHANGES, for what has no setting. Every run is validated twice: with its last weights, and with the averages
blended in, which is its result. One log a run, results.jsonl, and a table at the end: mean, and mean difference of the
pairs with two standard errors. An arm that fails is reported, and the next one begins.
"""

import argparse
import contextlib
import gc
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_gpt as tg   # noqa: E402

POLAR_EXPRESS = (      # five rounds, N. Amsel et al., arXiv 2505.16932
    (8.156554524902461, -22.48329292557795, 15.878769915207462), (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393), (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))
MUON_WD = 1.2          # of record 001


def polar(g):
    """The polar factor of each matrix by Polar Express, as record 001 had it."""
    x = g / (g.float().norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-6).type_as(g)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT if x.size(1) <= x.size(2) else x.mT @ x
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a) if x.size(1) <= x.size(2) else torch.baddbmm(x, x, poly, beta=a)
    return x


def muon_bank(self, row, lr_mul, p, g, state, pace):
    """Plain Muon: one momentum, no equaliser, decay where the update itself agrees."""
    g, m = g.float() * self.share, state["fast"]
    m.lerp_(g, 1 - pace.mu)
    u = polar(g.lerp(m, pace.mu).to(p.dtype))
    master = tg.join_master(p, state["lo"]) if "lo" in state else p
    lr = self.lr * pace.lr
    new = master - lr * lr_mul * (u + MUON_WD * lr * master * (u * master >= 0))
    for kept, half in zip((p, state.get("lo")), tg.split_master(new) if "lo" in state else (new,)):
        kept.copy_(half)


def without_networks():
    """PARAMS in which the networks behind gates and coefficients stay at zero: what remains are learned constants."""
    still = {"gate_w1", "gate_pre_w2", "gate_post_w2", "coef_w1", "coef_remix_w2", "coef_final_w2", "coef_group_w2"}
    return tuple((names, kind, 0.0 if set(names.split()) <= still else lr, *rest) for names, kind, lr, *rest in tg.PARAMS)


CHANGES = {            # name: (object, attribute, other value)
    "muon": lambda: (tg.Anvil, "bank", muon_bank),
    "constant_gates": lambda: (tg, "PARAMS", without_networks()),
    "one_target": lambda: (tg, "targets_at", lambda cfg, step: ((1.0,), ())),
}


@contextlib.contextmanager
def changed(names):
    """The trainer with some of CHANGES made."""
    places = [CHANGES[name]() for name in names]
    before = [getattr(where, what) for where, what, _ in places]
    for where, what, value in places:
        setattr(where, what, value)
    try:
        yield
    finally:                         # an arm that fails must not change the next one
        for (where, what, _), value in zip(places, before):
            setattr(where, what, value)


def train_seeds(cfg, seeds, comm, guard, ops, telemetry):
    """Yields (seed, log's footer as a dict, loss with the last weights, seconds of the start) of each run."""
    run = None
    for seed in range(cfg.seed, cfg.seed + seeds):
        one, begun = replace(cfg, seed=seed), time.monotonic()
        log = guard.log = tg.Log(one, comm, tg.process_age_s())
        log.line(f"config: {json.dumps(tg.asdict(one))}")
        run = tg.prepare(one, comm, log, guard, ops=ops, telemetry=telemetry) if run is None else tg.renew(run, one, log)
        start_s, raw = time.monotonic() - begun, []
        blend = type(run.optimizer).ship

        def ship(run=run, raw=raw):
            raw.append(tg.validate(run, run.cfg.n_run, run.cfg.val_long))
            run.clock.start()
            run.loader.resume()
            blend(run.optimizer)
        run.optimizer.ship = ship
        val_loss = tg.train(run)
        tg.footer(run, val_loss)
        log.end("ok")
        lines = Path(log.path).read_text().splitlines()
        yield seed, dict(line.split(": ", 1) for line in lines if ": " in line and " | " not in line), raw[0], start_s


def table(results, first):
    """Lines: of every arm n, mean loss, and its difference from the first arm with two standard errors."""
    lines = [f"{'arm':24s} {'n':>2s} {'loss':>9s} {'2 se':>7s} {'against ' + first:>24s} {'raw - blended':>17s} {'train_s':>8s}"]

    def mean_error(xs):
        error = 2 * statistics.stdev(xs) / math.sqrt(len(xs)) if len(xs) > 1 else math.nan
        return statistics.mean(xs), error
    for arm in dict.fromkeys(row["arm"] for row in results):
        rows = {row["seed"]: row for row in results if row["arm"] == arm}
        base = {row["seed"]: row for row in results if row["arm"] == first}
        mean, error = mean_error([row["loss"] for row in rows.values()])
        both = [rows[seed]["loss"] - base[seed]["loss"] for seed in rows if seed in base]
        gain, gain_error = mean_error([row["raw"] - row["loss"] for row in rows.values()])
        against = "{:+.5f} +- {:.5f}".format(*mean_error(both)) if both else "n/a"
        seconds = statistics.mean(row["train_s"] for row in rows.values())
        lines.append(f"{arm:24s} {len(rows):2d} {mean:9.5f} {error:7.5f} {against:>24s} {gain:+8.5f} +- {gain_error:.5f} {seconds:8.2f}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", metavar="preset or key=value")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", default="logs")
    parser.add_argument("--arm", action="append", required=True)
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    arms = [arm.split() for arm in args.arm]
    plans = [(name, tg.parse([*args.words, *(w for w in words if "=" in w), f"log_dir={out}"]),
              [w for w in words if "=" not in w]) for name, *words in arms]
    comm, all_ops, results = tg.Comm(plans[0][1], 0, 0, 1), {}, []
    guard, telemetry = tg.Guard(comm, plans[0][1].start_limit_s), tg.Telemetry(comm)
    for cfg in {(cfg.train_files, cfg.val_files): cfg for _, cfg, _ in plans}.values():
        tg.check_files(cfg, comm)
    for name, cfg, changes in plans:
        guard.step()
        if cfg.fast not in all_ops:
            all_ops[cfg.fast] = tg.choose(cfg, comm.device)[1]
        try:
            with changed(changes):
                for seed, footer, raw, start_s in train_seeds(cfg, args.seeds, comm, guard, all_ops[cfg.fast], telemetry):
                    row = {"arm": name, "seed": seed, "loss": float(footer["val_loss"]), "raw": raw, "start_s": start_s,
                           "train_s": float(footer["train_s"]), "ms_by_stage": footer["ms_by_stage"],
                           "peak_gpu_mib": footer["peak_gpu_mib"],
                           "reserved_mib": torch.cuda.max_memory_reserved() >> 20}     # what of graphs and caches stays, too
                    results.append(row)
                    with open(out / "results.jsonl", "a") as f:
                        f.write(json.dumps(row) + "\n")
                    print(f"{tg.process_age_s():6.1f} s  {json.dumps(row)}", flush=True)
        except (tg.RunFailed, RuntimeError, ValueError) as e:
            print(f"{name}: {type(e).__name__}: {e}", flush=True)
        gc.collect()
        if comm.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print("\n".join(table(results, arms[0][0])), flush=True)
    telemetry.end()
    guard.finish()
    comm.close()


if __name__ == "__main__":
    main()
