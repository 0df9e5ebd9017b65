"""Plans of runs, written before anything runs, and carried out one log per run.

A plan lies in records/attempts/NAME/: plan.json, the scripts of its arms, journal.jsonl and the logs. The journal has a
line for every start and every end, each with the hash of the line before it: none can be changed, added or removed
unseen but at its end, and that is shown by commits made on the way. `python records/stats.py run NAME` goes on where it
was interrupted.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import claims
import logs

ROOT = Path(__file__).resolve().parents[1]
ATTEMPTS = ROOT / "records" / "attempts"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
DEFAULT_SEEDS = 10
LEFT_OVER_S = 90          # so long a run of a killed `run` may take to end itself
PR_SET_PDEATHSIG = 1      # prctl(2)
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")   # what cold caches mean: new empty folders
GPU_KEYS = ("gpu_sm_mhz", "gpu_power_w", "gpu_temp_c")
OWN_FOLDERS = ("runs", "other")
OWN_KEYS = ("seed", "runs", "log_dir")                     # words that the plan gives to each run itself


class Broken(Exception):
    """Something is not as it should be: what, found, wanted, and what to do."""


def now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def git(*words):
    """What git prints in the repository's folder, or None where it fails."""
    try:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def machine():
    """(fingerprint, description): which machine this is, by its id, name and GPUs; no name is published."""
    gpus = ""
    if shutil.which("nvidia-smi"):
        gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    with contextlib.suppress(OSError):
        gpus += Path("/etc/machine-id").read_text(encoding="ascii")
    key = hashlib.sha256(f"{platform.node()} {gpus}".encode()).hexdigest()[:12]
    names = re.findall(r"GPU \d+: (.*?) \(", gpus)
    what = f"{len(names)} x {names[0]}" if names else f"{platform.machine()}, no GPU"
    return key, f"{what}, {os.cpu_count()} cores"


def seeds_of(text):
    """'1-3,7' as [1, 2, 3, 7]. Raises Broken."""
    seeds = []
    for part in text.split(","):
        m = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(m[1]), int(m[2] or m[1])) if m else (1, 0)
        if not first <= last < first + claims.MOST:
            raise Broken(f"--seeds {text}: want numbers and ranges such as 1-10 or 1,2,5, at most {claims.MOST}")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise Broken(f"--seeds {text}: every seed may occur once; repeats of a seed are no independent runs")
    return seeds


def arm_of(text):
    """'NAME=SCRIPT [key=value ...]' as (name, path, words). Raises Broken."""
    name, _, rest = text.partition("=")
    try:
        script, *words = shlex.split(rest) or [""]
    except ValueError as e:
        raise Broken(f"--arm {text}: {e}") from None
    if name in OWN_FOLDERS:
        raise Broken(f"--arm {text}: {', '.join(OWN_FOLDERS)} are no names of arms, a record has folders called so")
    if not NAME.fullmatch(name) or not Path(script).is_file():
        raise Broken(f"--arm {text}: want NAME=SCRIPT [key=value ...], NAME of small letters, digits and hyphens, "
                     f"SCRIPT a file" + (f"; {script} is none" if NAME.fullmatch(name) else ""))
    check_words(words)
    return name, Path(script), words


def check_words(words):
    """Refuse words that the plan gives itself. Raises Broken."""
    for word in words:
        if "=" not in word or word.split("=")[0] in OWN_KEYS:
            raise Broken(f"{word}: want key=value; {', '.join(OWN_KEYS)} are given by the plan")


def order_of(arms, seeds):
    """[(round, arm, seed)]: every round has all arms, and another arm begins each: AB BA AB, ABC BCA CAB."""
    order = []
    for i, seed in enumerate(seeds):
        k = i % len(arms)
        order += [(i, arm, seed) for arm in arms[k:] + arms[:k]]
    return order


def n_seeds(a):
    """How many seeds a plan gets without --seeds, and the power behind the number, or None."""
    if a.expect is None:
        return DEFAULT_SEEDS, None
    if a.target is None:
        raise Broken("--expect: the number of runs follows from a target; give --target")
    try:
        n = claims.runs_needed(a.expect, a.sd, a.target, a.power, a.alpha)
    except ValueError as e:
        raise Broken(f"--expect {a.expect:g}: {e}") from None
    return n, {"mean": a.expect, "sd": a.sd, "wanted": a.power, "runs": n,
               "reached": claims.power(n, a.expect, a.sd, a.target, a.alpha)}


def check_numbers(a):
    """Refuse settings of a test that make it none. Raises Broken."""
    for name, value, low, high in (("alpha", a.alpha, 0, claims.ALPHA), ("power", a.power, 0, 0.9999),
                                   ("sd", a.sd, 0, math.inf), ("margin", a.margin, 0, math.inf)):
        if not low < value <= high or math.isinf(value):
            raise Broken(f"--{name} {value:g}: want a number above {low}" + (f", at most {high}" if high < math.inf else ""))
    if a.target is not None and not math.isfinite(a.target):
        raise Broken(f"--target {a.target:g}: want a loss")
    if "<!--" in a.claim:
        raise Broken("--claim: a claim is a sentence, without marks of comments")


def place(a):
    """The folder of a new plan. Raises Broken where its name is none, or where something lies there."""
    if not NAME.fullmatch(a.name):
        raise Broken(f"{a.name}: a plan's name has small letters, digits and hyphens")
    folder = ATTEMPTS / a.name
    if (folder / "journal.jsonl").exists():
        raise Broken(f"{a.name}: this plan has started and is not changed any more. Make another: plan OTHER-NAME ...")
    if folder.exists() and not (folder / "plan.json").exists():
        raise Broken(f"{folder}: this is no plan. Move it away, or take another name")
    if folder.exists() and not a.replace:
        raise Broken(f"{a.name}: there is such a plan, and it has not started. Replace it with --replace")
    return folder


def write(a):
    """Write the plan that the arguments of `stats.py plan` describe. Returns it. Raises Broken."""
    check_numbers(a)
    folder = place(a)
    arms = [arm_of(text) for text in a.arm]
    if len({name for name, _, _ in arms}) < len(arms):
        raise Broken("--arm: every arm has a name of its own")
    check_words(a.words)
    n, why = n_seeds(a)
    seeds = seeds_of(a.seeds) if a.seeds else list(range(1, n + 1))
    if len(seeds) < claims.LEAST:
        raise Broken(f"{len(seeds)} seeds: too few runs to judge, at least {claims.LEAST} are needed")
    decide = ["loss"] if a.target is not None else ["not worse"] if len(arms) > 1 else []
    if not decide:
        raise Broken("this plan decides nothing: give --target LOSS, or a second --arm to compare with")
    decide += ["time"] if len(arms) > 1 and not a.no_time else []
    plan = {"name": a.name, "written": now(), "claim": a.claim, "preset": a.preset, "words": a.words,
            "ranks": a.ranks, "caches": a.caches, "target": a.target, "alpha": a.alpha, "margin": a.margin, "decide": decide,
            "power": why, "machine": None if a.any_machine else machine()[0],
            "machine_text": "the one of the first run" if a.any_machine else machine()[1], "arms": {}, "seeds": seeds}
    part = folder.with_name(folder.name + ".part")      # so that a failure leaves what was there
    shutil.rmtree(part, ignore_errors=True)
    for name, script, words in arms:
        (part / name).mkdir(parents=True)
        shutil.copyfile(script, part / name / "train_gpt.py")
        plan["arms"][name] = {"from": os.path.relpath(script.resolve(), ROOT), "words": words,
                              "sha256": sha256(part / name / "train_gpt.py")}
    plan["order"] = order_of(list(plan["arms"]), seeds)
    (part / "plan.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return plan


def in_words(plan):
    """The plan as lines that a person reads."""
    rule = {"loss": f"mean validation loss below {plan['target']}, one-sided t-test, p < {plan['alpha']}",
            "not worse": f"mean validation loss shown to be less than {plan['margin']} above every other arm's",
            "time": f"faster than every other arm, 95 % interval of the paired difference below 0 "
                    f"(at least {claims.LEAST} pairs)"}
    lines = [f"plan {plan['name']}, written {plan['written']}", f"claim: {plan['claim'] or 'none stated'}"]
    lines += [f"arm {name}{' (the candidate)' if i == 0 else ''}: {arm['from']}, SHA-256 {arm['sha256'][:12]}"
              + "".join(f" {word}" for word in arm["words"]) for i, (name, arm) in enumerate(plan["arms"].items())]
    lines.append(f"runs: {' '.join([plan['preset'], *plan['words']])} on {plan['ranks']} rank(s), caches {plan['caches']}, "
                 f"machine {plan['machine_text']}")
    lines += [f"passes if: {rule[test]}" for test in plan["decide"]]
    if plan["power"]:
        why = plan["power"]
        lines.append(f"power: {why['runs']} runs show a true mean of {why['mean']:g} with a deviation of {why['sd']:g} "
                     f"with a chance of {why['reached']:.3f} (wanted {why['wanted']:g})")
    rounds = [[f"{arm} {seed}" for i, arm, seed in plan["order"] if i == k] for k in range(len(plan["seeds"]))]
    return lines + [f"order, {len(plan['order'])} runs, arm and seed: {'; '.join(', '.join(r) for r in rounds)}"]


# ---- the journal -----------------------------------------------------------------------------------------------------

class Journal:
    """The events of a plan: a JSON object per line, each with the SHA-256 of the line before it in `prev`."""

    def __init__(self, path):
        self.path, self.events, self.last = Path(path), [], ""
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        for i, line in enumerate(lines[:-1], 1):   # what follows the last newline is an append that was cut off
            try:
                event = json.loads(line)
                intact = event["prev"] == self.last
            except (ValueError, KeyError, TypeError):
                intact = False
            if not intact:
                raise Broken(f"{self.path}: line {i} is not what was written there: a line was changed, added or removed")
            self.events.append(event)
            self.last = hashlib.sha256(line).hexdigest()
        self.cut = len(lines[-1])

    def add(self, event, **more):
        """Append an event and see it on disk before anything else happens."""
        entry = {"event": event, "time": now()} | more | {"prev": self.last}
        line = json.dumps(entry).encode()
        with open(self.path, "r+b" if self.path.exists() else "wb") as f:
            f.truncate(f.seek(0, os.SEEK_END) - self.cut)
            f.seek(0, os.SEEK_END)
            f.write(line + b"\n")
            f.flush()
            os.fsync(f.fileno())
        self.cut, self.last = 0, hashlib.sha256(line).hexdigest()
        self.events.append(entry)


def load(folder):
    """(plan, Journal) of an attempt or of a record made from one. Raises Broken if either was changed after the start."""
    folder = Path(folder)
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        arms, seeds = [name for name, arm in plan["arms"].items() if arm["sha256"]], plan["seeds"]
        as_planned = plan["order"] == [list(run) for run in order_of(arms, seeds)] and len(set(seeds)) == len(seeds)
        sane = 0 < plan["alpha"] <= claims.ALPHA and plan["caches"] in ("warm", "cold") and plan["decide"]
    except OSError:
        raise Broken(f"{folder}: no plan.json there. Plans lie in records/attempts; write one with: stats.py plan") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise Broken(f"{folder / 'plan.json'}: not what `stats.py plan` writes ({type(e).__name__}: {e})") from None
    if not as_planned or not sane:
        raise Broken(f"{folder / 'plan.json'}: its order or its rule is not one that `stats.py plan` writes")
    journal = Journal(folder / "journal.jsonl")
    if journal.events and journal.events[0].get("sha256") != sha256(folder / "plan.json"):
        raise Broken(f"{folder / 'plan.json'}: changed after the first run was started")
    return plan, journal


def runs_in(folder):
    """All logs below an attempt or a record as Runs, with paths relative to it."""
    here = os.path.dirname(os.path.abspath(folder))
    return [dataclasses.replace(logs.read(path), path=os.path.relpath(path, here)) for path in logs.logs_in(folder)]


def judge(folder):
    """(plan, events, runs, verdict) of an attempt or of a record made from one."""
    plan, journal = load(folder)
    runs = runs_in(folder)
    return plan, journal.events, runs, claims.judge_plan(plan, journal.events, runs)


# ---- carrying it out -------------------------------------------------------------------------------------------------

def commit_of(path):
    """The commit that is checked out, if it holds the file as it is now; else None."""
    name = path.relative_to(ROOT).as_posix()
    held = git("rev-parse", f"HEAD:./{name}")
    return git("rev-parse", "HEAD").strip() if held is not None and held == git("hash-object", "--", name) else None


@contextlib.contextmanager
def alone(folder):
    """Hold the plan: one `run` at a time. A trainer that outlives a killed `run` holds it too, until it has ended."""
    with open(folder / "lock", "wb") as lock:
        for k in range(LEFT_OVER_S):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if k == 0:
                    print("waiting for a process that makes runs of this plan, or for what it left", file=sys.stderr)
                time.sleep(1)
        else:
            raise Broken(f"{folder.name}: its runs are being made by another process")
        yield lock


def end_with_parent():
    """In the child: SIGTERM when the process that started it dies, so that kill -9 leaves no run behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def log_of(folder):
    """The only log in a run's folder as a Run, or None."""
    found = logs.logs_in(folder) if folder.is_dir() else []
    return logs.read(found[0]) if len(found) == 1 else None


def start(plan, folder, arm, words, lock, quiet):
    """Make one run of an arm; its log goes to `folder`. Returns the exit code."""
    script = (ATTEMPTS / plan["name"] / arm / "train_gpt.py").relative_to(ROOT)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={plan['ranks']}"] * (plan["ranks"] > 1)
    command = [sys.executable, *launch, str(script), plan["preset"], *plan["words"], *plan["arms"][arm]["words"],
               *words, f"log_dir={folder.relative_to(ROOT)}"]
    with tempfile.TemporaryDirectory() as fresh:
        caches = {name: os.path.join(fresh, name) for name in CACHES} if plan["caches"] == "cold" else {}
        out = subprocess.DEVNULL if quiet else None
        child = subprocess.Popen(command, cwd=ROOT, env=os.environ | caches, stdout=out, pass_fds=[lock.fileno()],
                                 preexec_fn=end_with_parent)
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:      # the trainer got it as well and ends itself
                print("interrupted: waiting for the run to end", file=sys.stderr)


def n_files(folder):
    return sum(path.is_file() for path in folder.rglob("*")) if folder.is_dir() else 0


def close(journal, base, event, code):
    """Write the end of a started run into the journal; code None: it was interrupted."""
    run = log_of(base / event["log_dir"])
    if code is None and run is not None and not run.problem:
        code = 0                           # it had finished, only its end was not written down
    if code == 0 and (run is None or run.problem):
        code = 1
    what = {"arm": event["arm"]} if event["event"] == "smoke" else {"slot": event["slot"], "attempt": event["attempt"]}
    journal.add("smoke end" if event["event"] == "smoke" else "end", **what, code=code,
                digest=run.digest if run else None, n_files=n_files(base / event["log_dir"]),
                val_loss=run.val_loss if run else None, train_s=run.train_s if run else None,
                **{key: run.keys.get(key) for key in GPU_KEYS if run})
    return code, run


def open_starts(events):
    """Starts of which no end is written."""
    ends = {(e.get("slot"), e.get("attempt"), e.get("arm")) for e in events if e["event"].endswith("end")}
    return [e for e in events if e["event"] == "start" and (e["slot"], e["attempt"], None) not in ends
            or e["event"] == "smoke" and (None, None, e["arm"]) not in ends]


def check_machine(plan, journal):
    """(fingerprint, description) of this machine, which must be the plan's and that of all runs so far."""
    key, text = machine()
    wanted = {e["machine"] for e in journal.events if e["event"] == "start"} | {plan["machine"]} - {None}
    if wanted - {key}:
        raise Broken(f"{plan['name']}: planned for another machine ({plan['machine_text']}, fingerprint "
                     f"{', '.join(sorted(wanted))}); this is {text}, {key}. Runs of different machines cannot be compared")
    return key, text


def carry_out(name, limit=None, quiet=False):
    """Make the runs of a plan that are missing, in its order, at most `limit` of them. Returns the number still missing.

    Raises Broken when a run fails: it may be made again by calling this again, once if it had begun to train.
    """
    base = ATTEMPTS / name
    plan, _ = load(base)
    with alone(base) as lock:
        plan, journal = load(base)
        for arm, what in plan["arms"].items():
            if sha256(base / arm / "train_gpt.py") != what["sha256"]:
                raise Broken(f"{base / arm / 'train_gpt.py'}: changed since the plan was written")
        key, text = check_machine(plan, journal)
        if not journal.events:
            commit = commit_of(base / "plan.json")
            if commit is None:
                print(f"{name}: the plan is in no commit, so nothing will show that it is older than its runs", file=sys.stderr)
            journal.add("plan", sha256=sha256(base / "plan.json"), commit=commit)
        for event in open_starts(journal.events):
            close(journal, base, event, None)
        warm(plan, journal, base, lock, quiet)
        made = 0
        for slot in range(len(plan["order"])):
            mine = claims.attempts_of(journal.events)[slot]
            if any(a["code"] == 0 for a in mine):
                continue
            if made == limit:
                break
            check_restarts(name, journal.events)
            make(plan, journal, base, slot, len(mine) + 1, lock, quiet, machine=key, machine_text=text)
            made += 1
        slots = claims.attempts_of(journal.events)
        return sum(not any(a["code"] == 0 for a in slots[slot]) for slot in range(len(plan["order"])))


def check_restarts(name, events):
    """Raise Broken where too many runs of a plan were begun again."""
    n = claims.n_restarts(claims.attempts_of(events))
    if n > claims.MOST_RESTARTS:
        raise Broken(f"{name}: {n} starts did not finish; at most {claims.MOST_RESTARTS} of a plan may be made again, or bad "
                     f"runs could be dropped. This plan cannot be finished: write another")


def warm(plan, journal, base, lock, quiet):
    """With warm caches: one step per arm that fills them, counted for nothing and listed."""
    if plan["caches"] != "warm":
        return
    done = {e["arm"] for e in journal.events if e["event"] == "smoke end" and e["code"] == 0}
    for arm in plan["arms"]:
        if arm not in done:
            n = sum(e["event"] == "smoke" and e["arm"] == arm for e in journal.events) + 1
            journal.add("smoke", arm=arm, log_dir=f"smoke-{arm}-{n}")
            print(f"{plan['name']}: warming the caches with one step of arm {arm}, which does not count", flush=True)
            code = start(plan, base / f"smoke-{arm}-{n}", arm, ["stop=1"], lock, quiet)
            close(journal, base, journal.events[-1], code)
            if code:
                raise Broken(f"{plan['name']}: the step that warms the caches of arm {arm} failed with exit code {code}")


def make(plan, journal, base, slot, attempt, lock, quiet, **where):
    """Make the run of a slot. Raises Broken if it fails."""
    _, arm, seed = plan["order"][slot]
    name, folder = claims.slot_name(plan, slot), f"run-{slot + 1:02d}-{arm}-seed{seed}-start{attempt}"
    print(f"{plan['name']}: {name}, start {attempt}", flush=True)
    journal.add("start", slot=slot, arm=arm, seed=seed, attempt=attempt, caches=plan["caches"], log_dir=folder, **where)
    code, run = close(journal, base, journal.events[-1], start(plan, base / folder, arm, [f"seed={seed}"], lock, quiet))
    if code or run is None or run.problem:
        why = f"exit code {code}" if code else run.problem if run else "it left no log"
        raise Broken(f"{name}: {why}. It is listed; `run {plan['name']}` makes it again")
    print(f"{plan['name']}: {name}: loss {run.val_loss:.6f}, {run.train_s:.3f} s", flush=True)
