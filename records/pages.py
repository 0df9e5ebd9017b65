"""The folder records/: its tables, which the logs write, its check, and how a plan becomes a record.

A record is a folder NNN_date_title with README.md, the frozen train_gpt.py, runs/*.log and SHA256SUMS; one that was made
from a plan also has plan.json, journal.jsonl, a folder of logs per other arm, and other/ with the logs that do not count.
Tables stand between marks such as `<!-- numbers -->` and `<!-- end of numbers -->`.
"""

import ast
import difflib
import os
import re
import shutil
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import claims
import logs
import plans
from plans import ROOT, Broken, git

HERE = Path(__file__).resolve().parent
FOLDER = re.compile(r"(\d{3})_(\d{4}-\d\d-\d\d)_([a-z0-9-]+)")
BANNER = re.compile(r"# =+ (\d+\. .+?) =+ budget")
SUMS = "SHA256SUMS"
HEADINGS = ("Claim", "Numbers", "What changed", "Why it is fair", "Exactness", "Tried and dropped", "Reproduce",
            "Environment", "Credits")
PER_RUN = ("seed", "val_loss", "train_s", "ms_by_stage", "tokens_per_s", "cold_start_s", "peak_gpu_mib", "gpu_sm_mhz",
           "gpu_power_w", "gpu_temp_c", "compiled_on_clock")
NOTHING = "-"


@dataclass
class Record:
    """One folder: runs are those of the frozen script by seed, arms the others of its plan, if it has one."""
    folder: Path
    number: str
    date: str
    title: str
    runs: list
    arms: dict = field(default_factory=dict)      # arm -> [Run], the candidate not among them
    plan: dict | None = None
    verdict: claims.Verdict | None = None

    @property
    def track(self):
        """The preset; settings of a plan make it another track."""
        changed = self.plan and [*self.plan["words"], *(w for arm in self.plan["arms"].values() for w in arm["words"])]
        return self.runs[0].keys["preset"] + (" with other settings" if changed else "")

    @property
    def script(self):
        return self.folder / "train_gpt.py"


def folders():
    return sorted(path for path in HERE.iterdir() if path.is_dir() and FOLDER.fullmatch(path.name))


def read_record(folder):
    """The Record of a folder. Raises Broken where its logs cannot be what they should be."""
    number, date, title = FOLDER.fullmatch(folder.name).groups()
    runs = sorted((logs.read(path) for path in (folder / "runs").glob("*.log")), key=lambda run: (run.seed or 0, run.path))
    if not runs:
        raise Broken(f"{folder.name}: no logs in runs/")
    for run in runs:
        if run.problem:
            raise Broken(f"{within(run.path)}: {run.problem}")
        lost = [key for key in (*PER_RUN, "preset", "steps", "tokens", "host", "software") if key not in run.keys]
        if lost:
            raise Broken(f"{within(run.path)}: lacks the line `{lost[0]}`")
    if not (folder / "train_gpt.py").is_file():
        raise Broken(f"{folder.name}: no train_gpt.py")
    sha = plans.sha256(folder / "train_gpt.py")
    others = sorted({run.script[:12] for run in runs} - {sha[:12]})
    if others:
        raise Broken(f"{folder.name}/train_gpt.py: SHA-256 {sha[:12]} is not the script of the logs ({', '.join(others)})")
    _, excluded, reasons = claims.poolable(runs)
    if excluded or reasons:
        raise Broken(f"{folder.name}: {'; '.join([*reasons, *(f'{within(path)}: {why}' for path, why in excluded)])}")
    record = Record(folder, number, date, title.replace("-", " "), runs)
    if (folder / "plan.json").exists():
        record.plan, _, all_runs, record.verdict = plans.judge(folder)
        arms = defaultdict(list)
        for run in all_runs:
            arms[run.path.split(os.sep)[1]].append(run)
        record.arms = {arm: arms[arm] for arm in list(record.plan["arms"])[1:]}
    return record


def text_of(path):
    """The text of a file. Raises Broken where it is no UTF-8, as a flipped bit makes it."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise Broken(f"{within(path)}: no text any more, byte {e.start} is not UTF-8") from None


def within(path):
    return os.path.relpath(path, HERE)


# ---- tables ----------------------------------------------------------------------------------------------------------

def row(cells):
    return f"| {' | '.join(map(str, cells))} |\n"


def table(head, lines):
    return row(head) + row(["-"] * len(head)) + "".join(map(row, lines))


def mean_sd(values, digits):
    """'mean ± deviation of the sample', or the single value."""
    about = claims.describe(values)
    return f"{about['mean']:.{digits}f}" + (f" ± {about['sd']:.{digits}f}" if about["sd"] is not None else "")


def numbers(record):
    """The table of a record's runs, their means, what was compared and how it was judged, and the starts."""
    runs = record.runs
    text = table(PER_RUN, [[run.keys[key] for key in PER_RUN] for run in runs])
    text += (f"\n{len(runs)} runs of {runs[0].n_steps} steps, {int(runs[0].keys['tokens']):,} tokens, script "
             f"{runs[0].script[:12]}: validation loss {mean_sd([run.val_loss for run in runs], 6)}, time "
             f"{mean_sd([run.train_s for run in runs], 3)} s (mean ± deviation of the sample).\n")
    if record.plan:
        text += judged(record)
    for run in [run for run in runs if not run.keys["cold_start_s"].startswith("n/a")][:1]:
        phases = ", ".join(f"{name} {s}" for name, s in run.phases)
        text += f"\nStart of seed {run.seed}, {run.keys['cold_start_s']} s, by phase: {phases}.\n"
    return text + f"\n{runs[0].keys['host']}; {runs[0].keys['software']}; fast: {runs[0].keys['fast']}.\n"


def judged(record):
    """How a plan was judged, and what was compared; claims.judge_plan has the meaning of the numbers."""
    verdict, found = record.verdict, record.verdict.numbers
    rows = [[arm, what["loss"]["n"], f"{what['loss']['mean']:.6f}", sd(what["loss"]["sd"], 6),
             f"{what['time']['mean']:.3f}", sd(what["time"]["sd"], 3)] for arm, what in found["arms"].items()]
    text = "\n" + table(("arm", "runs", "mean loss", "sd", "mean s", "sd"), rows)
    text += f"\nVerdict on the plan of {record.plan['written']}: **{word(verdict)}**.\n\n"
    text += "".join(f"- {reason}\n" for reason in verdict.reasons)
    for arm, what in found.get("loss_compared", {}).items():
        if what["welch"]:
            w = what["welch"]
            text += (f"- loss against {arm}, at {'equal' if what['equal_steps'] else 'unequal'} steps: {w['difference']:+.6f}, "
                     f"95 % interval {w['low']:+.6f} to {w['high']:+.6f} (Welch)\n")
    text += "".join(f"- listed: {warning}\n" for warning in verdict.warnings)
    return text


def sd(value, digits):
    return NOTHING if value is None else f"{value:.{digits}f}"


def word(verdict):
    """A verdict in a word or two."""
    said = {"pass": "certified", "fail": "not certified", "refused": "not certified, refused"}[verdict.status]
    tests = [f"loss < {test['target']:g}" if name == "loss" else name for name, test in
             verdict.numbers.get("tests", {}).items()]
    return f"{said} ({', '.join(tests)})" if tests else said


def delta(record):
    """Mean paired difference in time to the first other arm of the record's own plan: never to another day's time."""
    for what in (record.verdict.numbers.get("time_compared", {}) if record.verdict else {}).values():
        return f"{what['mean']:+.2f} s"
    return NOTHING


def overview(records):
    """The table of all records."""
    head = ("#", "track", "seconds", "to base", "validation loss", "runs", "verdict", "steps", "what", "kinds touched", "lines",
            "machine")
    lines, before = [], None
    for record in records:
        runs = record.runs
        lines.append((f"[{record.number}]({record.folder.name})", record.track,
                      f"{statistics.fmean(run.train_s for run in runs):.2f}", delta(record),
                      f"{statistics.fmean(run.val_loss for run in runs):.4f}", len(runs),
                      word(record.verdict) if record.verdict else "no plan", runs[0].n_steps, f"{record.title}, {record.date}",
                      ", ".join(sorted({kind for kind, _ in touched(record, before)})) or NOTHING, n_lines(record, before),
                      runs[0].keys["host"].split(",")[0]))
        before = record
    return table(head, lines)


def n_lines(record, before):
    n = len(text_of(record.script).splitlines())
    return f"{n - len(text_of(before.script).splitlines()):+,}" if before else f"{n:,}"


def sections(path):
    """Title of a section -> its lines; what stands before the first banner is `head`."""
    found, title = defaultdict(list), "head"
    for line in text_of(path).splitlines():
        if m := BANNER.match(line):
            title = m[1]
        found[title].append(line)
    return found


def fast_rows(path):
    """Name -> (kind, what it is made of) of every row of FAST in a script: FAST[name] = Fast(...), or name=Fast(...)."""
    tree = ast.parse(text_of(path))
    functions = {node.name: ast.dump(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    rows = {}
    for node in ast.walk(tree):
        call, name = getattr(node, "value", None), getattr(node, "arg", None)
        if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "Fast" and call.args):
            continue
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            name = getattr(node.targets[0].slice, "value", None)
        if not name:
            continue
        used = sorted({x.id for x in ast.walk(call) if isinstance(x, ast.Name)} & set(functions))
        rows[name] = getattr(call.args[0], "value", NOTHING), ast.dump(call) + "".join(functions[x] for x in used)
    return rows


def touched(record, before):
    """[(kind, 'new|changed|gone: name')] of the rows of FAST that differ from the record before."""
    rows, old = fast_rows(record.script), fast_rows(before.script) if before else {}
    what = [(kind, f"{'new' if name not in old else 'changed'}: {name}") for name, (kind, text) in rows.items()
            if old.get(name) != (kind, text)]
    return what + [(kind, f"gone: {name}") for name, (kind, _) in old.items() if name not in rows]


def changes(record, before):
    """What changed against the record before, by section of the script, and in FAST."""
    new, old = sections(record.script), sections(before.script) if before else {}
    rows = []
    for title in [*new, *(title for title in old if title not in new)]:
        lines = [line[0] for line in difflib.unified_diff(old.get(title, []), new.get(title, []), n=0, lineterm="")
                 if not line.startswith(("---", "+++"))]
        if "+" in lines or "-" in lines:
            rows.append((title, f"+{lines.count('+')}", f"-{lines.count('-')}"))
    text = f"Against {'record ' + before.number if before else 'nothing, it is the first'}; lines by section of the script:\n\n"
    text += table(("section", "added", "removed"), rows) if rows else "The script is the same.\n"
    kinds = "; ".join(f"{what} ({kind})" for kind, what in touched(record, before))
    return text + f"\nRows of `FAST`: {kinds or 'none touched'}.\n"


def filled(path, page, name, text):
    """A page's text with a table between its marks. Raises Broken where they are not there once each."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise Broken(f"{within(path)}: want the lines {begin.strip()} and {end.strip()} once each, in this order")
    return page[:page.index(begin)] + begin + text + page[page.index(end):]


def wanted_pages(records):
    """Path -> what the page must be, by the logs."""
    path, before = HERE / "README.md", None
    pages = {path: filled(path, text_of(path), "numbers", overview(records))}
    for record in records:
        path = record.folder / "README.md"
        page = filled(path, text_of(path), "numbers", numbers(record))
        pages[path], before = filled(path, page, "changes", changes(record, before)), record
    return pages


def write_tables():
    """Write every table from the logs. Returns (records, pages that changed). Raises Broken."""
    records = [read_record(folder) for folder in folders()]
    changed = []
    for path, text in wanted_pages(records).items():
        if text_of(path) != text:
            path.write_text(text, encoding="utf-8")
            changed.append(within(path))
    return records, changed


# ---- check -----------------------------------------------------------------------------------------------------------

def frozen(folder):
    """The files of a record that never change: all but its page, the sums and what Python leaves."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("README.md", SUMS)
                  and "__pycache__" not in path.parts)


def sums(folder):
    return "".join(f"{plans.sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in frozen(folder))


def against_sums(folder):
    """Findings: files that are not those of SHA256SUMS."""
    if not (folder / SUMS).is_file():
        return [f"{folder.name}: no {SUMS}"]
    lines = text_of(folder / SUMS).splitlines()
    if not all(re.fullmatch(r"[0-9a-f]{64}  \S.*", line) for line in lines):
        return [f"{folder.name}/{SUMS}: want lines of a SHA-256, two blanks and a path"]
    wanted = {path: digest for digest, path in (line.split("  ", 1) for line in lines)}
    have = {path.relative_to(folder).as_posix(): plans.sha256(path) for path in frozen(folder)}
    found = [f"{folder.name}/{path}: missing, {SUMS} lists it" for path in wanted if path not in have]
    found += [f"{folder.name}/{path}: not the file that was frozen (its SHA-256 is not the one in {SUMS})"
              for path in have if path in wanted and have[path] != wanted[path]]
    return found + [f"{folder.name}/{path}: not listed in {SUMS}" for path in have if path not in wanted]


def against_git(folder):
    """Findings: files that differ from the commit that froze the record, the one that added SHA256SUMS, if any."""
    here = folder.relative_to(ROOT).as_posix()
    commits = (git("log", "--diff-filter=A", "--format=%H", "--", f"{here}/{SUMS}") or "").split()
    if not commits:
        return []
    tree = git("ls-tree", "-r", "-z", commits[-1], "--", here).split("\0")[:-1]
    was = {path: entry.split()[2] for entry, path in (line.split("\t") for line in tree)}
    there = [path for path in was if (ROOT / path).is_file() and not path.endswith("/README.md")]
    blobs = git("hash-object", "--", *(str(ROOT / path) for path in there)).split()
    return [f"{within(ROOT / path)}: changed since the commit that froze the record ({commits[-1][:12]})"
            for path, blob in zip(there, blobs, strict=True) if was[path] != blob]


def gone():
    """Findings: records that a commit froze and that are not there any more."""
    lines = (git("log", "--diff-filter=A", "--format=", "--name-only", "--relative", "--", f"records/*/{SUMS}") or "").split()
    return [f"{Path(line).parent.name}: this record was frozen, and is gone or has another name"
            for line in sorted(set(lines)) if not (ROOT / line).parent.is_dir() and FOLDER.fullmatch(Path(line).parent.name)]


def blind():
    """Notes: what git cannot tell here."""
    if git("rev-parse", "HEAD") is None:
        return ["not a git checkout, or without a commit: that no file changed since its commit was not checked"]
    if (git("rev-parse", "--is-shallow-repository") or "").strip() == "true":
        return ["a shallow clone: that no file changed since its commit was checked only as far back as it goes"]
    return []


def against_headings(record):
    """Findings: headings of a page that lack or stand in another order."""
    text = text_of(record.folder / "README.md")
    have = tuple(re.findall(r"^## (.+)$", text, flags=re.M))
    if have != HEADINGS:
        return [f"{record.folder.name}/README.md: its headings are {', '.join(have)}; want {', '.join(HEADINGS)}"]
    return []


def check():
    """(records, findings, notes) on the whole folder; without findings all is in order."""
    records, findings = [], gone()
    for folder in folders():
        try:
            findings += against_sums(folder) + against_git(folder)
            records.append(read_record(folder))
            findings += against_headings(records[-1])
        except (Broken, OSError) as e:
            findings.append(str(e))
    if len(records) == len(folders()):
        try:
            findings += [f"{within(path)}: its table is not what the logs say; write it with: python records/stats.py table"
                         for path, text in wanted_pages(records).items() if text_of(path) != text]
        except (Broken, OSError) as e:
            findings.append(str(e))
    return records, findings, blind()


# ---- a plan becomes a record -----------------------------------------------------------------------------------------

PAGE = """# {number}: {title}

## Claim

{claim}

## Numbers

<!-- numbers -->
<!-- end of numbers -->

## What changed

<!-- changes -->
<!-- end of changes -->

## Why it is fair

The plan was written on {written}, before the first run, and stands in plan.json;
journal.jsonl has every start. All runs were made on one machine ({machine}),
caches {caches}, in the order of the plan. The clock runs from the barrier after warm-up to the barrier after the last step.

## Exactness

The rows of `FAST` that were touched stand above. Nothing more was stated.

## Tried and dropped

Nothing was written down.

## Reproduce

    {command}

with seeds {seeds}, in the order of plan.json.

## Environment

As in the logs.

## Credits

See the bibliography in the script.
"""


def freeze(name, title):
    """Make the record of a plan that was carried out, and write the tables. Returns the folder. Raises Broken."""
    title = title or name
    if not plans.NAME.fullmatch(title):
        raise Broken(f"{title}: a title has small letters, digits and hyphens")
    base = plans.ATTEMPTS / name
    plan, events, _, verdict = plans.judge(base)
    slots = claims.attempts_of(events)
    missing = sum(not any(a["code"] == 0 for a in slots[slot]) for slot in range(len(plan["order"])))
    if missing:
        raise Broken(f"{name}: {missing} of {len(plan['order'])} runs are missing; make them with: run {name}")
    twin = [record.name for record in folders() if (record / "plan.json").is_file()
            and plans.sha256(record / "plan.json") == plans.sha256(base / "plan.json")]
    if twin:
        raise Broken(f"{name}: this plan is the record {twin[0]} already")
    taken = [FOLDER.fullmatch(folder.name)[1] for folder in folders()]
    number = f"{int(max(taken, default='0')) + 1:03d}"
    folder = HERE / f"{number}_{plans.now()[:10]}_{title}"
    candidate, *others = plan["arms"]
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    shutil.copyfile(base / candidate / "train_gpt.py", part / "train_gpt.py")
    for file in ("plan.json", "journal.jsonl"):
        shutil.copyfile(base / file, part / file)
    for arm in others:
        (part / arm).mkdir()
        shutil.copyfile(base / arm / "train_gpt.py", part / arm / "train_gpt.py")
    counted = {a["log_dir"]: (a["arm"], plan["order"][slot][0]) for slot, mine in slots.items() for a in mine if a["code"] == 0}
    for log in logs.logs_in(base):
        start = log.relative_to(base).parts[0]
        arm, k = counted.get(start, ("", 0))
        to = part / ("runs" if arm == candidate else arm) / f"{k + 1:02d}.log" if arm else part / "other" / start / log.name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, to)
    words = " ".join([plan["preset"], *plan["words"], *plan["arms"][candidate]["words"]])
    launch = f"torchrun --standalone --nproc_per_node={plan['ranks']}" if plan["ranks"] > 1 else "python"
    (part / "README.md").write_text(PAGE.format(
        number=number, title=title.replace("-", " "), claim=plan["claim"] or "None was stated.", written=plan["written"],
        machine=plan["machine_text"], caches=plan["caches"], command=f"{launch} train_gpt.py {words}",
        seeds=", ".join(map(str, plan["seeds"]))), encoding="utf-8")
    (part / SUMS).write_text(sums(part), encoding="utf-8")
    part.rename(folder)
    try:
        write_tables()
    except BaseException:
        shutil.rmtree(folder)                # the attempt is still there
        raise
    return folder, verdict


def begin(name, source, force):
    """Start an attempt: a record's script becomes train_gpt.py. Returns the record's folder. Raises Broken."""
    if not plans.NAME.fullmatch(name):
        raise Broken(f"{name}: an attempt's name has small letters, digits and hyphens")
    found = [folder for folder in folders() if source is None or folder.name.startswith(source)]
    if not found:
        raise Broken(f"--from {source}: no such record. There are: {', '.join(folder.name for folder in folders())}")
    if (plans.ATTEMPTS / name).exists():
        raise Broken(f"{name}: there is such an attempt already")
    script, here = found[-1] / "train_gpt.py", ROOT / "train_gpt.py"
    tracked = (git("rev-parse", "HEAD:train_gpt.py") or "").strip()
    if here.exists() and here.read_bytes() != script.read_bytes() and not force:
        if not tracked or (git("hash-object", "--", "train_gpt.py") or "").strip() != tracked:
            raise Broken("train_gpt.py has changes that are in no commit and would be lost. Commit them, or give --force")
    shutil.copyfile(script, here)
    return found[-1]
