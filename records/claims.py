"""What may be claimed from a set of runs: statistics and verdicts, without files, clocks or printing.

Loss: a one-sided one-sample t-test with the deviation of the sample, "the mean is below the target". Time: the paired
differences of runs of one round on one machine, with a 95 % interval. Only runs that a plan announced can be certified;
a folder of logs cannot show that nothing was left out, and its verdict says so.
"""

import datetime
import functools
import math
import statistics
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field

ALPHA = 0.01          # of the loss: the public rule is p < 0.01
CONFIDENCE = 0.95     # of intervals
LEAST = 4             # runs of an arm; with 3 the mean would have to lie 4 deviations below the target
MOST = 1000           # seeds that a plan may ask for
MARGIN = 0.005        # nats: without a target, the loss must be shown to be at most so much worse
FIXED_MARGIN = 0.004  # public rule of the step-count track: (target - mean) sqrt(n), for a deviation of 0.0013
# Runs that did not finish are listed and may be made again, twice in a plan; every test is then held at a fifth of its
# level for each. Whoever redoes, of n <= 30 runs, the one or two that serve best, all outcomes known, passes at the
# true mean on 1.1 % of the plans (simulated, 2026-11).
MOST_RESTARTS, PRICE = 2, 5
HOUR_S = 3600
LONGEST_GAP_S = HOUR_S   # between two runs of a round; a longer one is mentioned
CLOCK_SHARE = 0.02    # by so much may the mean SM clocks of the arms differ unmentioned


@dataclass
class Verdict:
    """status: pass, fail, or refused where the runs cannot be judged. Certified is a pass of what a plan announced."""
    status: str
    reasons: list = field(default_factory=list)     # why it is not a pass, or what the pass rests on
    excluded: list = field(default_factory=list)    # (log, why it does not count)
    warnings: list = field(default_factory=list)    # what a reader has to know of a pass
    numbers: dict = field(default_factory=dict)

    @property
    def certified(self):
        return self.status == "pass" and self.numbers.get("planned", False)

    def as_dict(self):
        return asdict(self) | {"certified": self.certified}


@functools.cache
def scipy_stats():
    """scipy.stats, whose import takes a second that most commands need not pay."""
    try:
        from scipy import stats
    except ImportError as e:
        raise SystemExit(f"{e}. Install what records/ needs: python -m pip install -r records/requirements.txt") from None
    return stats


def refused(*reasons, **more):
    return Verdict("refused", list(reasons), **more)


def describe(values):
    """n, mean and the deviation of the sample (None for a single value) of finite numbers."""
    values = [float(x) for x in values]
    return {"n": len(values), "mean": statistics.fmean(values) if values else None,
            "sd": statistics.stdev(values) if len(values) > 1 else None}


def flat(values):
    """Whether numbers do not differ, or only by what their printing or arithmetic leaves."""
    return max(values) - min(values) <= 1e-12 * max(1.0, *map(abs, values))


def loss_test(losses, target, alpha=ALPHA):
    """Verdict on "the mean loss is below the target", one-sided.

    numbers: n, mean, sd, t, p, margin = target - mean, fixed_sd = (target - mean) sqrt(n), which the public step-count
    rule wants to be at least 0.004.
    """
    losses = sorted(map(float, losses))   # sums do not depend on the order of the files
    bad = [x for x in losses if not math.isfinite(x)]
    if bad:
        return refused(f"a loss that is no finite number: {', '.join(map(str, bad))}", numbers={"n": len(losses)})
    numbers = describe(losses) | {"target": target, "alpha": alpha}
    if not losses:
        return refused("no run to judge", numbers=numbers)
    numbers |= {"margin": target - numbers["mean"],
                "fixed_sd": (target - numbers["mean"]) * math.sqrt(len(losses)), "fixed_sd_wanted": FIXED_MARGIN}
    reasons = [f"too few runs: {len(losses)}, at least {LEAST} are needed"] if len(losses) < LEAST else []
    if len(losses) > 1 and flat(losses):
        reasons.append("no spread: all losses are equal, so these are no independent runs")
    elif len(losses) > 1:
        test = scipy_stats().ttest_1samp(losses, target, alternative="less")
        numbers |= {"t": float(test.statistic), "p": float(test.pvalue)}
    if reasons:
        return refused(*reasons, numbers=numbers)
    said = f"mean {numbers['mean']:.6f} of {len(losses)} runs, target {target:g}: p = {numbers['p']:.4g}"
    if numbers["p"] < alpha:
        return Verdict("pass", [f"{said}, below {alpha:g}"], numbers=numbers)
    return Verdict("fail", [f"{said}, not below {alpha:g}"], numbers=numbers)


def needs_its_worst(losses, target, alpha=ALPHA):
    """A warning where the test passes, but not without the highest loss: how a run too many makes a pass."""
    fewer = sorted(losses)[:-1]
    without = loss_test(fewer, target, alpha)
    if loss_test(losses, target, alpha).status == "pass" and without.status != "pass":
        return [f"passes only with its worst run ({max(losses):.6f}); without it: {without.reasons[0]}. The number of "
                f"runs was fixed by no plan, and adding runs until a test passes makes false passes"]
    return []


def time_test(new, base, confidence=CONFIDENCE):
    """Verdict on "the new arm is faster", from seconds of runs paired by round: the interval lies below 0.

    numbers: n pairs, mean difference new - base in s, sd, low, high, p (one-sided), percent of the base's mean.
    """
    differences = [a - b for a, b in zip(new, base, strict=True)]
    numbers = describe(differences)
    if len(differences) < LEAST:
        return refused(f"too few pairs: {len(differences)}, at least {LEAST} are needed", numbers=numbers)
    if flat(differences):
        return refused("no spread: all pairs differ by the same time", numbers=numbers)
    low, high = map(float, scipy_stats().t.interval(confidence, len(differences) - 1, loc=numbers["mean"],
                                                    scale=numbers["sd"] / math.sqrt(len(differences))))
    numbers |= {"low": low, "high": high, "percent": 100 * numbers["mean"] / statistics.fmean(base),
                "p": float(scipy_stats().ttest_1samp(differences, 0, alternative="less").pvalue)}
    said = (f"{numbers['mean']:+.3f} s ({numbers['percent']:+.2f} %) in {len(differences)} pairs, "
            f"{100 * confidence:g} % interval {low:+.3f} to {high:+.3f} s")
    return Verdict("pass" if high < 0 else "fail", [f"{said}, {'below' if high < 0 else 'not below'} 0"], numbers=numbers)


def not_worse_test(new, base, margin, confidence=CONFIDENCE):
    """Verdict on "the loss of the new arm is at most `margin` worse": the Welch interval of new - base lies below it."""
    about = welch(new, base, confidence)
    if about is None:
        return refused("no spread: all losses are equal, so these are no independent runs")
    said = (f"{about['difference']:+.6f}, {100 * confidence:g} % interval {about['low']:+.6f} to {about['high']:+.6f}, "
            f"{'below' if about['high'] < margin else 'not below'} the margin of {margin:g}")
    return Verdict("pass" if about["high"] < margin else "fail", [said], numbers=about | {"margin": margin})


def welch(a, b, confidence=CONFIDENCE):
    """Difference of means a - b of independent samples, its interval and two-sided p; None where undefined."""
    if min(len(a), len(b)) < 2 or flat([*a, *b]):
        return None
    test = scipy_stats().ttest_ind(a, b, equal_var=False)
    low, high = test.confidence_interval(confidence)
    return {"difference": statistics.fmean(a) - statistics.fmean(b), "low": float(low), "high": float(high),
            "p": float(test.pvalue)}


def power(n, mean, sd, target, alpha=ALPHA):
    """Chance that n runs of this true mean and deviation pass the loss test (noncentral t)."""
    return float(scipy_stats().nct.cdf(scipy_stats().t.ppf(alpha, n - 1), n - 1, (mean - target) / sd * math.sqrt(n)))


def runs_needed(mean, sd, target, wanted, alpha=ALPHA):
    """Least number of runs that passes with the wanted chance. Raises ValueError where none up to 1000 does."""
    for n in range(LEAST, MOST + 1):
        if power(n, mean, sd, target, alpha) >= wanted:
            return n
    raise ValueError(f"no number of runs up to {MOST} shows with a chance of {wanted:g} that a mean of {mean:g} with a "
                     f"deviation of {sd:g} is below {target:g}")


# ---- a folder of logs, without a plan --------------------------------------------------------------------------------

def copies(runs):
    """(runs without byte copies, [(log, why)]): of equal files the one whose path sorts first stays."""
    first, excluded = {}, []
    for run in sorted(runs, key=lambda run: run.path):
        if first.setdefault(run.digest, run) is not run:
            excluded.append((run.path, f"byte copy of {first[run.digest].path}"))
    return list(first.values()), excluded


def unlike(run, ref):
    """In what a run differs from those that are counted."""
    what = []
    if run.script != ref.script:
        what.append(f"another script ({run.script[:12]}, the others {ref.script[:12]})")
    if run.n_steps != ref.n_steps:
        what.append(f"{run.n_steps} steps, the others {ref.n_steps}")
    elif run.data != ref.data:
        what.append("other training data")
    if run.script == ref.script and run.n_steps == ref.n_steps and run.settings != ref.settings:
        what.append("other settings")
    if run.keys.get("world") != ref.keys.get("world"):
        what.append(f"world size {run.keys.get('world')}, the others {ref.keys.get('world')}")
    return "; ".join(what)


def twice(runs):
    """Seeds that occur more than once, as text, or ''."""
    n = Counter(run.seed for run in runs if run.seed is not None)
    return ", ".join(f"seed {seed} {k} times" for seed, k in sorted(n.items()) if k > 1)


def poolable(runs):
    """(runs that may be pooled, [(log, why)], reasons to refuse): finished, of one script, data and step count."""
    runs, excluded = copies(runs)
    excluded += [(run.path, run.problem) for run in runs if not run.script]     # some other text
    runs, n_harmless = [run for run in runs if run.script], len(excluded)
    excluded += [(run.path, run.problem) for run in runs if run.problem]
    groups = defaultdict(list)
    for run in runs:
        if not run.problem:
            groups[run.group].append(run)
    sizes = sorted(map(len, groups.values()), reverse=True)
    if len(sizes) > 1 and sizes[0] == sizes[1]:
        few = [f"{len(g)} of script {g[0].script[:12]} with {g[0].n_steps} steps" for g in groups.values()]
        return [], excluded, [f"mixed runs, no group is the largest: {'; '.join(sorted(few))}"]
    kept = max(groups.values(), key=len, default=[])
    excluded += [(run.path, unlike(run, kept[0])) for g in groups.values() if g is not kept for run in g]
    reasons = []
    if len(excluded) > n_harmless:
        reasons.append(f"unplanned exclusions: {len(excluded) - n_harmless} of {len(runs)} logs do not count")
    if repeated := twice(kept):
        reasons.append(f"seeds counted twice, repeats of a seed are no independent runs: {repeated}")
    return kept, excluded, reasons


def judge_logs(runs, target, alpha=ALPHA):
    """Verdict on the loss of a folder of logs. It never depends on their order or names, nor on copies."""
    kept, excluded, reasons = poolable(runs)
    losses = [run.val_loss for run in kept]
    verdict = loss_test(losses, target, alpha)
    verdict.excluded = excluded
    verdict.numbers |= {"planned": False}
    if reasons or verdict.status == "refused":
        verdict.reasons = reasons + verdict.reasons
        verdict.status = "refused"
        return verdict
    verdict.warnings += ["no plan: that nothing was left out, and that the number of runs was fixed before, is not shown"]
    if any(run.seed is None for run in kept):
        verdict.warnings.append("logs tell no seeds: that none was used twice is not shown")
    if any(run.data is None for run in kept):
        verdict.warnings.append("logs tell no hash of their data: that all trained on the same is not shown")
    verdict.warnings += needs_its_worst(losses, target, alpha)
    return verdict


def judge_losses(losses, target, alpha=ALPHA):
    """Verdict on bare numbers."""
    verdict = loss_test(losses, target, alpha)
    if verdict.status != "refused":
        verdict.warnings = ["bare numbers: script, data, seeds and completeness are not shown",
                            *needs_its_worst(losses, target, alpha)]
    verdict.numbers |= {"planned": False}
    return verdict


# ---- runs that a plan announced --------------------------------------------------------------------------------------

def attempts_of(events):
    """slot -> its starts in order, each with what became of it: {start event} | {end event}, `code` None if none."""
    slots = defaultdict(list)
    for event in events:
        if event["event"] == "start":
            slots[event["slot"]].append({"code": None, "digest": None, "n_files": None} | event)
        elif event["event"] == "end":
            mine = [a for a in slots[event["slot"]] if a["attempt"] == event["attempt"]]
            if mine:
                mine[0].update(code=event["code"], digest=event["digest"], n_files=event["n_files"])
    return slots


def slot_name(plan, slot):
    _, arm, seed = plan["order"][slot]
    return f"run {slot + 1} of {len(plan['order'])} (arm {arm}, seed {seed})"


def n_restarts(slots):
    """Starts of a plan that did not finish and may have trained: one that left no log at all refused at once."""
    return sum(a["code"] != 0 and not ((a["code"] or 0) > 0 and a["n_files"] == 0) for mine in slots.values() for a in mine)


def finished(attempts, by_digest):
    """The runs of a slot that ended well: [Run]."""
    runs = [by_digest.get(a["digest"]) for a in attempts if a["code"] == 0]
    return [run for run in runs if run is not None and not run.problem]


def faults_of_slot(plan, slot, attempts, by_digest):
    """(reasons to refuse, warnings) of one planned run."""
    _, arm, seed = plan["order"][slot]
    name, reasons = slot_name(plan, slot), []
    lost = [a for a in attempts if a["digest"] is not None and a["digest"] not in by_digest]
    if lost:
        return [f"{name}: its log is missing or was changed since it was written (SHA-256 {lost[0]['digest'][:12]})"], []
    done = finished(attempts, by_digest)
    failed = [a for a in attempts if not finished([a], by_digest)]
    warnings = [f"{name}: start {a['attempt']} did not finish, "
                + ("interrupted" if a["code"] is None else f"exit code {a['code']}") for a in failed]
    if len(done) != 1:
        why = next((by_digest[a["digest"]].problem for a in failed if a["digest"] in by_digest), "")
        reasons.append(f"{name}: finished {len(done)} times, wanted once" + (f"; {why}" if why else ""))
    for run in done[:1]:
        if run.script != plan["arms"][arm]["sha256"]:
            reasons.append(f"{name}: another script ({run.script[:12]}) than the plan's ({plan['arms'][arm]['sha256'][:12]})")
        if run.seed != seed:
            reasons.append(f"{name}: its log says seed {run.seed}")
    return reasons, warnings


def faults_of_arms(plan, runs):
    """Reasons to refuse that concern the runs of an arm together; runs: arm -> [Run]."""
    reasons = []
    for arm, mine in runs.items():
        unlikes = {unlike(run, mine[0]) or "other settings" for run in mine if run.group != mine[0].group}
        reasons += [f"arm {arm}: mixed runs: {what}" for what in sorted(unlikes)]
        if repeated := twice(mine):
            reasons.append(f"arm {arm}: seeds counted twice: {repeated}")
    hosts = {run.host for mine in runs.values() for run in mine}
    if len(hosts) > 1:
        reasons.append(f"different machines or software, by the logs: {' / '.join(sorted(hosts))}")
    digests = Counter(run.digest for mine in runs.values() for run in mine)
    reasons += [f"byte copies: one log (SHA-256 {digest[:12]}) stands for {n} runs" for digest, n in digests.items() if n > 1]
    return reasons


def faults_of_order(plan, events):
    """Reasons to refuse for when and where the runs were started."""
    starts, reasons, n = [e for e in events if e["event"] == "start"], [], n_restarts(attempts_of(events))
    if n > MOST_RESTARTS:
        reasons.append(f"{n} starts did not finish, at most {MOST_RESTARTS} of a plan may be made again")
    first = list(dict.fromkeys(e["slot"] for e in starts))
    if first != sorted(first):
        reasons.append("the runs were not started in the order of the plan")
    machines = {e["machine"]: e["machine_text"] for e in starts}
    if len(machines) > 1:
        reasons.append(f"different machines: {'; '.join(f'{text} [{key}]' for key, text in sorted(machines.items()))}")
    if {e["caches"] for e in starts} - {plan["caches"]}:
        reasons.append(f"caches not {plan['caches']} in every run, as the plan says")
    leaders = [arm for i, (_, arm, _) in enumerate(plan["order"]) if i % len(plan["arms"]) == 0]
    if len(plan["arms"]) > 1 and len(leaders) > 1 and len(set(leaders)) == 1:
        reasons.append(f"order never alternated: arm {leaders[0]} ran first in every round")
    return reasons


def remarks(plan, events, arms):
    """What a reader of a pass has to know of how the runs were made; arms: arm -> its runs in order."""
    said, ended, last = [], {}, None
    if not events or not events[0].get("commit"):
        said.append("the plan was in no commit when its first run started: that it is older is not shown")
    for e in events:
        at = datetime.datetime.fromisoformat(e["time"])
        if e["event"] == "start":
            i = plan["order"][e["slot"]][0]
            if i == last and (gap := (at - ended.get(last, at)).total_seconds()) > LONGEST_GAP_S:
                said.append(f"{gap / HOUR_S:.1f} hours lie between two runs of round {i + 1}")
            last = i
        elif e["event"] == "end":
            ended[last] = at
    clocks = [statistics.fmean(mhz) for mine in arms.values()
              if (mhz := [row[2] for run in mine for row in run.gpu])]
    if len(clocks) > 1 and max(clocks) > min(clocks) * (1 + CLOCK_SHARE):
        said.append(f"the mean SM clocks of the arms differ: {', '.join(f'{x:.0f} MHz' for x in clocks)}")
    return said


def judge_plan(plan, events, runs):
    """Verdict on a plan that was carried out.

    plan: as plans.write makes it. events: its journal. runs: all Runs whose logs lie in its folder, in any order. The
    first arm is the candidate. It passes if every test that the plan names passes: `loss` against the target, `time`
    against each other arm. numbers: arms -> loss and time, tests -> their numbers, losses compared.
    """
    runs, excluded = copies(runs)
    by_digest, slots = {run.digest: run for run in runs}, attempts_of(events)
    warnings, reasons = [], list(faults_of_order(plan, events))
    for slot in range(len(plan["order"])):
        bad, said = faults_of_slot(plan, slot, slots.get(slot, []), by_digest)
        reasons, warnings = reasons + bad, warnings + said
    known = {e.get("digest") for e in events}
    strangers = [run for run in runs if run.digest not in known and run.script]
    unfinished = {a["log_dir"] for slot in slots.values() for a in slot if a["digest"] is None}
    unfinished |= {e["log_dir"] for e in events if e["event"] == "smoke"}
    for run in strangers:
        if any(f"/{folder}/" in f"/{run.path}" for folder in unfinished):
            excluded.append((run.path, "log of a start that was interrupted"))
        else:
            excluded.append((run.path, "not of a run of the plan"))
            reasons.append(f"{run.path}: a log that the plan does not account for")
    arms = {arm: [] for arm in plan["arms"]}
    for slot, (_, arm, _) in enumerate(plan["order"]):
        arms[arm] += finished(slots.get(slot, []), by_digest)[:1]
    reasons += faults_of_arms(plan, {arm: mine for arm, mine in arms.items() if mine})
    numbers = {"planned": True, "arms": {
        arm: {"loss": describe(run.val_loss for run in mine), "time": describe(run.train_s for run in mine)}
        for arm, mine in arms.items() if mine}}
    if reasons:
        return refused(*reasons, excluded=excluded, warnings=warnings, numbers=numbers)
    warnings += remarks(plan, events, arms)
    return decide(plan, arms, PRICE ** n_restarts(slots),
                  Verdict("pass", excluded=excluded, warnings=warnings, numbers=numbers))


def decide(plan, arms, price, verdict):
    """Fill a verdict with the tests of the plan, their levels divided by price; arms: arm -> runs by round."""
    candidate, *others = plan["arms"]
    alpha, confidence = plan["alpha"] / price, 1 - (1 - CONFIDENCE) / price
    if price > 1:
        verdict.warnings.append(f"runs were made again: all tests are held at a {price}th of their level")
    losses, seconds = ({arm: [getattr(run, key) for run in mine] for arm, mine in arms.items()}
                       for key in ("val_loss", "train_s"))
    tests = {}
    if "loss" in plan["decide"]:
        tests["loss"] = loss_test(losses[candidate], plan["target"], alpha)
    for other in others:
        if "time" in plan["decide"]:
            tests[f"time against {other}"] = time_test(seconds[candidate], seconds[other], confidence)
        if "not worse" in plan["decide"]:
            tests[f"loss against {other}"] = not_worse_test(losses[candidate], losses[other], plan["margin"], confidence)
        equal = {run.n_steps for run in arms[candidate] + arms[other]}
        verdict.numbers.setdefault("loss_compared", {})[other] = {
            "equal_steps": len(equal) == 1, "welch": welch(losses[candidate], losses[other])}
        verdict.numbers.setdefault("time_compared", {})[other] = time_test(seconds[candidate], seconds[other]).numbers
    verdict.numbers["tests"] = {name: test.numbers | {"status": test.status} for name, test in tests.items()}
    verdict.reasons = [f"{name}: {reason}" for name, test in tests.items() for reason in test.reasons]
    statuses = {test.status for test in tests.values()}
    verdict.status = next((s for s in ("refused", "fail") if s in statuses), "pass" if tests else "refused")
    if not tests:
        verdict.reasons = ["the plan names no test: it has neither a target nor a second arm"]
    return verdict
