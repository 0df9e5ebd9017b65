#!/usr/bin/env python3
"""What makes a claim about a run easy to prove: plans, verdicts, comparisons, tables and pictures.

    python records/stats.py COMMAND --help

    new       start an attempt: a record's script becomes train_gpt.py
    plan      write down arms, seeds, order and decision rule before anything runs
    run       carry a plan out, one log per run; goes on where it was interrupted
    certify   judge a plan, a folder of logs, or bare losses
    compare   two sets of runs side by side
    plot      pictures and one HTML report
    freeze    make the record of a plan that was carried out
    table     write the tables of records/ from the logs
    check     the whole folder: scripts, logs, tables, nothing changed

Every command takes --json for one JSON object instead of text. Exit status: 0 done, or certified, or in order; 1 not
certified, not in order, or failed; 2 the command line is not understood; 3 refused, it cannot be judged; 4 the test
passes, but without a plan nothing is certified; 130 interrupted.
certify, compare and plot read this project's logs and those of the public repository (modded-nanogpt).
"""

import argparse
import json
import math
import sys
from pathlib import Path

import claims
import logs
import pages
import plans
from plans import Broken

OK, FAILED, REFUSED, UNPLANNED, INTERRUPTED = 0, 1, 3, 4, 130


def show(a, lines, **data):
    """Print the lines, or with --json the data."""
    print(json.dumps(data, indent=1, default=str) if a.json else "\n".join(lines))


# ---- where runs come from --------------------------------------------------------------------------------------------

def with_plan(source):
    """The folder of an attempt or record of this name that has a plan, or None."""
    if not source:
        raise Broken("an empty name: give a record, an attempt, a folder or a log")
    for folder in (plans.ATTEMPTS / source, Path(source), *named(source)):
        if (folder / "plan.json").is_file():
            return folder
    return None


def named(source):
    """[folder] of the record of this number or name, or []."""
    return [f for f in pages.folders() if source in (f.name, f.name.split("_")[0])]


def runs_of(source):
    """[(label, [Run])] of a record's number or folder, an attempt with its arms, a folder of logs, or a log."""
    folder = with_plan(source)
    if folder is not None:
        plan, events, runs, _ = plans.judge(folder)
        by_digest, slots = {run.digest: run for run in runs}, claims.attempts_of(events)
        return [(f"{plan['name']}: {arm}", [run for slot, (_, of, _) in enumerate(plan["order"]) if of == arm
                                            for run in claims.finished(slots[slot], by_digest)]) for arm in plan["arms"]]
    record = named(source)
    path = record[0] if record else Path(source)
    found = [logs.read(p) for p in logs.logs_in(path / "runs" if record else path)] if path.exists() else []
    if not found:
        raise Broken(f"{source}: neither a record, nor an attempt, nor a folder or file with logs (.log, .txt)")
    return [(path.name.replace("_", " ") if record else source, found)]


# ---- commands --------------------------------------------------------------------------------------------------------

def plan(a):
    made = plans.write(a)
    folder = plans.ATTEMPTS / a.name
    show(a, [*plans.in_words(made), "", f"Written to {folder.relative_to(plans.ROOT)}. Commit it now: its commit is the "
             f"proof that it is older than the runs.", f"Then: python records/stats.py run {a.name}"], plan=made, folder=folder)
    return OK


def run(a):
    missing = plans.carry_out(a.name, a.limit, a.quiet or a.json)
    show(a, [f"{a.name}: {missing} runs are missing; go on with: python records/stats.py run {a.name}" if missing else
             f"{a.name}: all runs are made. Judge them with: python records/stats.py certify {a.name}"], missing=missing)
    return OK


def verdict_lines(name, verdict):
    """A verdict for people."""
    said = {"pass": "CERTIFIED" if verdict.numbers.get("planned") else "PASSES, without a plan", "fail": "NOT CERTIFIED",
            "refused": "NOT CERTIFIED: refused"}[verdict.status]
    lines = [f"{name}: {said}"] + [f"  {reason}" for reason in verdict.reasons]
    for arm, what in verdict.numbers.get("arms", {}).items():
        loss, seconds = what["loss"], what["time"]
        lines.append(f"  arm {arm}: {loss['n']} runs, loss {loss['mean']:.6f} (sd {pages.sd(loss['sd'], 6)}), "
                     f"{seconds['mean']:.3f} s (sd {pages.sd(seconds['sd'], 3)})")
    n = verdict.numbers.get("tests", {}).get("loss", verdict.numbers)
    if n.get("mean") is not None:
        lines.append(f"  loss: n = {n['n']}, mean {n['mean']:.6f}, sd {pages.sd(n['sd'], 6)}, p = "
                     f"{n.get('p', float('nan')):.4g}, {n['margin']:+.6f} below the target")
        lines.append(f"  for comparison, the public rule with a fixed deviation: {n['fixed_sd']:.4f}, wants "
                     f"{n['fixed_sd_wanted']}")
    lines += [f"  does not count: {path}: {why}" for path, why in verdict.excluded]
    return lines + [f"  to know: {warning}" for warning in verdict.warnings]


def certify(a):
    if a.losses:
        verdict, name = claims.judge_losses(a.losses, need_target(a), a.alpha), f"{len(a.losses)} losses"
    elif not a.source:
        raise Broken("certify: give a plan, a folder of logs, or --losses")
    elif len(a.source) == 1 and with_plan(a.source[0]):
        if a.target is not None:
            raise Broken("certify: a plan has its own target, --target is for logs without one")
        _, _, _, verdict = plans.judge(with_plan(a.source[0]))
        name = a.source[0]
    else:
        runs = [run for source in a.source for _, found in runs_of(source) for run in found]
        verdict, name = claims.judge_logs(runs, need_target(a), a.alpha), ", ".join(a.source)
    show(a, verdict_lines(name, verdict), name=name, **verdict.as_dict())
    if verdict.status == "pass":
        return OK if verdict.certified else UNPLANNED
    return FAILED if verdict.status == "fail" else REFUSED


def need_target(a):
    if a.target is None or not math.isfinite(a.target):
        raise Broken("certify: logs without a plan need --target LOSS")
    return a.target


def one_set(source):
    """(label, runs that may be pooled, what was left out) of a source that has a single set of runs, or NAME:ARM."""
    name, _, arm = source.partition(":")
    found = runs_of(source) if not arm else [x for x in runs_of(name) if x[0].endswith(f": {arm}")]
    if not found:
        raise Broken(f"{source}: no such arm")
    label, runs = found[0]          # of a plan without an arm: the candidate
    kept, excluded, reasons = claims.poolable(runs)
    return label, kept, [*reasons, *(f"{path}: {why}" for path, why in excluded)]


def compare(a):
    (label_a, runs_a, out_a), (label_b, runs_b, out_b) = one_set(a.a), one_set(a.b)
    if not runs_a or not runs_b:
        raise Broken(f"nothing to compare: {'; '.join(out_a + out_b)}")
    data = {"labels": [label_a, label_b], "left_out": out_a + out_b}
    for key in ("val_loss", "train_s"):
        values = [getattr(run, key) for run in runs_a], [getattr(run, key) for run in runs_b]
        data[key] = {"a": claims.describe(values[0]), "b": claims.describe(values[1]), "welch": claims.welch(*values)}
    data["equal_steps"] = {run.n_steps for run in runs_a} == {run.n_steps for run in runs_b}
    data["same_data"] = {run.data for run in runs_a} == {run.data for run in runs_b}
    hosts = sorted({run.host for run in runs_a + runs_b})
    data["times_comparable"] = len(hosts) == 1
    data["stages"] = {label: [run.keys.get("ms_by_stage") for run in runs] for label, runs in
                      ((label_a, runs_a), (label_b, runs_b))}
    names = a.a.partition(":")[0], a.b.partition(":")[0]
    if names[0] == names[1] and with_plan(names[0]) and [r.seed for r in runs_a] == [r.seed for r in runs_b]:
        data["train_s"]["paired"] = claims.time_test([r.train_s for r in runs_a], [r.train_s for r in runs_b]).numbers
    if not data["times_comparable"] or data["train_s"].get("paired"):
        data["train_s"]["welch"] = None
    show(a, compare_lines(data, hosts), **data)
    return OK


def compare_lines(data, hosts):
    lines = [f"{arm}: {label}" for arm, label in zip("ab", data["labels"])]
    for key, name, digits in (("val_loss", "validation loss", 6), ("train_s", "seconds", 3)):
        for arm in "ab":
            about = data[key][arm]
            lines.append(f"{name} of {arm}: {about['mean']:.{digits}f}, sd {pages.sd(about['sd'], digits)}, {about['n']} runs")
        if w := data[key]["welch"]:
            lines.append(f"{name}, a - b: {w['difference']:+.{digits}f}, 95 % interval {w['low']:+.{digits}f} to "
                         f"{w['high']:+.{digits}f}, two-sided p = {w['p']:.4g} (Welch)")
    if (p := data["train_s"].get("paired")) and "low" in p:
        lines.append(f"seconds, a - b in {p['n']} pairs of the plan: {p['mean']:+.3f} ({p['percent']:+.2f} %), 95 % interval "
                     f"{p['low']:+.3f} to {p['high']:+.3f}")
    for label, texts in data["stages"].items():
        lines += [f"ms per step by stage, {label}: {text}" for text in texts if text]
    if not data["equal_steps"]:
        lines.append("to know: the arms took different numbers of steps")
    if not data["same_data"]:
        lines.append("to know: the arms trained on different batches")
    if not data["times_comparable"]:
        lines.append(f"to know: times of different machines or software are not compared: {' / '.join(hosts)}")
    elif data["train_s"]["welch"]:
        lines.append("to know: these times are not paired; only a plan with alternating arms shows which is faster")
    return lines + [f"left out: {what}" for what in data["left_out"]]


def plot(a):
    import pictures                                            # matplotlib takes a second to load
    records = [pages.read_record(folder) for folder in pages.folders()]
    chosen = a.source or [record.folder.name for record in records[-1:]]
    groups, left_out = {}, []
    for label, runs in (group for source in chosen for group in runs_of(source)):
        kept, excluded, reasons = claims.poolable(runs)
        groups[label] = kept + [run for run in claims.copies(runs)[0] if run.script and run.problem]   # it names these
        left_out += reasons + [f"{path}: {why}" for path, why in excluded]
    made = pictures.plot(Path(a.out), records, groups)
    show(a, [*map(str, made), *(f"left out: {what}" for what in left_out)], files=made, left_out=left_out)
    return OK


def table(a):
    records, changed = pages.write_tables()
    n = sum(len(record.runs) + sum(map(len, record.arms.values())) for record in records)
    show(a, [f"{len(records)} record(s), {n} logs", *(f"written: {path}" for path in changed)], records=[
        {"number": r.number, "date": r.date, "title": r.title, "track": r.track,
         "loss": claims.describe(run.val_loss for run in r.runs), "time": claims.describe(run.train_s for run in r.runs),
         "verdict": r.verdict.as_dict() if r.verdict else None} for r in records], written=changed)
    return OK


def check(a):
    records, findings, notes = pages.check()
    n = sum(len(record.runs) for record in records)
    show(a, findings + notes + ([] if findings else [f"{len(records)} record(s), {n} logs: in order"]),
         ok=not findings, findings=findings, notes=notes)
    return FAILED if findings else OK


def new(a):
    folder = pages.begin(a.name, a.source, a.force)
    base = (folder / "train_gpt.py").relative_to(plans.ROOT)
    todo = [f"train_gpt.py is now the script of {folder.name}.",
            "1. Change it, and try it: python train_gpt.py tiny",
            "2. Commit it. Write the plan before anything is measured, and commit that too:",
            f"   python records/stats.py plan {a.name} --arm new=train_gpt.py --arm base={base} --target LOSS --claim '...'",
            f"3. python records/stats.py run {a.name}",
            f"4. python records/stats.py certify {a.name}",
            f"5. python records/stats.py freeze {a.name}, then complete the record's README.md"]
    show(a, todo, record=folder.name, script="train_gpt.py", next=todo[1:])
    return OK


def freeze(a):
    folder, verdict = pages.freeze(a.name, a.title)
    where = folder.relative_to(plans.ROOT)
    show(a, [*verdict_lines(a.name, verdict), "", f"Frozen as {where}.",
             f"Complete {where}/README.md (why it is fair, what was tried and dropped, credits), then commit the folder and "
             f"records/README.md.", "The attempt's folder is no longer needed."], folder=where, **verdict.as_dict())
    return OK


# ---- command line ----------------------------------------------------------------------------------------------------

def positive(text):
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def parser():
    top = argparse.ArgumentParser(prog="stats.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(function, what):
        sub = commands.add_parser(function.__name__, help=what, description=what[0].upper() + what[1:] + ".")
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        sub.set_defaults(function=function)
        return sub

    def test(sub):
        sub.add_argument("--target", type=float, metavar="LOSS", help="the mean validation loss must be shown to lie below it")
        sub.add_argument("--alpha", type=float, default=claims.ALPHA, help="of the one-sided test of the loss (%(default)s)")

    sub = command(new, "start an attempt: copy a record's script to train_gpt.py")
    sub.add_argument("name")
    sub.add_argument("--from", dest="source", metavar="RECORD", help="number or folder; the newest if not given")
    sub.add_argument("--force", action="store_true", help="overwrite a train_gpt.py with changes that are in no commit")

    sub = command(plan, "write a plan before anything runs; a plan that has started is never changed")
    sub.add_argument("name")
    sub.add_argument("--arm", action="append", required=True, metavar="NAME=SCRIPT [key=value ...]",
                     help="a script and its own settings; the first arm is the candidate, give --arm again for others")
    sub.add_argument("--seeds", help="such as 1-10; the same in every arm")
    sub.add_argument("--preset", default="record", choices=("record", "solo", "tiny"), help="(%(default)s)")
    sub.add_argument("--words", nargs="*", default=[], metavar="key=value", help="settings of all arms")
    sub.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4, 8), help="GPUs or processes of a run (%(default)s)")
    sub.add_argument("--caches", default="warm", choices=("warm", "cold"),
                     help="compiler caches: filled by one step per arm that does not count, or new and empty for every run")
    test(sub)
    sub.add_argument("--margin", type=float, default=claims.MARGIN,
                     help="without a target: by so much the loss must be shown to be worse at most (%(default)s)")
    sub.add_argument("--no-time", action="store_true", help="decide on the loss alone")
    sub.add_argument("--claim", default="", help="what the plan is to show, in a sentence")
    sub.add_argument("--expect", type=float, metavar="MEAN", help="choose the number of seeds for this true mean loss")
    sub.add_argument("--sd", type=float, default=0.0014, help="deviation that --expect reckons with (%(default)s)")
    sub.add_argument("--power", type=float, default=0.9, help="chance of passing that --expect asks for (%(default)s)")
    sub.add_argument("--any-machine", action="store_true", help="the first run decides on which machine all are made")
    sub.add_argument("--replace", action="store_true", help="replace a plan that has not started")

    sub = command(run, "make the runs of a plan that are missing, interleaved, one log per run")
    sub.add_argument("name")
    sub.add_argument("--limit", type=positive, metavar="N", help="stop after so many runs")
    sub.add_argument("--quiet", action="store_true", help="do not show what the trainer prints")

    sub = command(certify, "judge a plan that was carried out, or a folder of logs, or bare losses")
    sub.add_argument("source", nargs="*", help="a plan's name, a record, folders or logs")
    sub.add_argument("--losses", nargs="+", type=float, help="bare final losses")
    test(sub)

    sub = command(compare, "compare the loss and the time of two sets of runs")
    for name in "ab":
        sub.add_argument(name, metavar=name.upper(), help="a record, a plan's name or NAME:ARM, a folder of logs, a log")

    sub = command(plot, "draw pictures and one self-contained HTML report")
    sub.add_argument("source", nargs="*", help="records, plans, folders or logs to compare; the newest record if not given")
    sub.add_argument("--out", default="report", help="folder to write into (%(default)s)")

    sub = command(freeze, "make the record of a plan that was carried out, and write the tables")
    sub.add_argument("name")
    sub.add_argument("--title", help="of the folder; the plan's name if not given")
    command(table, "write the tables of records/ from the logs")
    command(check, "tell whether the whole folder is in order")
    return top


def main(argv=None):
    a = parser().parse_args(argv)
    try:
        return a.function(a)
    except KeyboardInterrupt:
        print("stats.py: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (Broken, OSError) as e:
        if a.json:
            print(json.dumps({"error": str(e)}))
        print(f"stats.py: {e}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
