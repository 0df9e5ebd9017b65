"""records/: plans that are carried out, frozen and checked; what disagrees in the folder is found and named."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, bare_env

RECORDS = ROOT / "records"
FIRST = "001_2026-11-29_baseline"

sys.path.insert(0, str(RECORDS))

import claims  # noqa: E402
import logs  # noqa: E402
import pages  # noqa: E402
import plans  # noqa: E402


def stats(root, *words, code=0):
    """records/stats.py of a copy of the repository: its standard output; the exit status must be `code`."""
    done = subprocess.run([sys.executable, str(root / "records" / "stats.py"), *map(str, words)], cwd=root, text=True,
                          capture_output=True, env=bare_env(), timeout=300)
    assert done.returncode == code and "Traceback" not in done.stderr, (done.returncode, done.stdout, done.stderr)
    return done.stdout if code in (0, 1, 3) and done.stdout else done.stderr


def copy_to(folder):
    """What a clone needs for records/ and `tiny`."""
    skip = shutil.ignore_patterns("__pycache__", "attempts")
    shutil.copytree(RECORDS, folder / "records", ignore=skip)
    shutil.copytree(ROOT / "data", folder / "data", ignore=shutil.ignore_patterns("__pycache__", "fineweb10B", "proxy"))
    shutil.copy(ROOT / "train_gpt.py", folder)
    return folder


def committed(folder):
    """The folder as a git repository with all of it in one commit."""
    name = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*name, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder


@pytest.fixture
def clone(tmp_path):
    return committed(copy_to(tmp_path))


# ---- the folder as it is ---------------------------------------------------------------------------------------------

def test_the_records_are_in_order():
    assert "in order" in stats(ROOT, "check")


def test_writing_again_changes_nothing(clone):
    before = {path: path.read_bytes() for path in clone.rglob("*.md")}
    assert "written" not in stats(clone, "table")
    assert {path: path.read_bytes() for path in clone.rglob("*.md")} == before


def test_numbers_of_a_record_are_those_of_its_logs():
    record = pages.read_record(RECORDS / FIRST)
    page = (RECORDS / FIRST / "README.md").read_text()
    for run in record.runs:
        log = open(run.path, encoding="utf-8").read()
        for key in ("val_loss", "train_s", "peak_gpu_mib"):
            value = re.search(rf"^{key}: (.*)$", log, flags=re.M)[1]
            assert f"| {value} |" in page
    mean = sum(run.val_loss for run in record.runs) / len(record.runs)
    assert f"{mean:.6f}" in page and f"{mean:.4f}" in (RECORDS / "README.md").read_text()


def test_rows_of_fast_that_a_record_touches(tmp_path):
    """Changed by its own text or by that of the functions it names; new; gone."""
    head = "def f(x):\n    return x\n\n\ndef g(x):\n    return {0}\n\n\n"
    rows = 'FAST = {{}}\nFAST["a"] = Fast("bitwise", f, f)\nFAST["b"] = Fast("reorder", f, g)\n{0}'
    (tmp_path / "old.py").write_text(head.format("x") + rows.format('FAST.update(c=Fast("approx", f, f))\n'))
    (tmp_path / "new.py").write_text(head.format("x + 1") + rows.format('FAST["d"] = Fast("approx", f, f)\n'))

    class One:
        def __init__(self, name):
            self.script = tmp_path / name
    assert pages.touched(One("new.py"), One("old.py")) == [
        ("reorder", "changed: b"), ("approx", "new: d"), ("approx", "gone: c")]
    assert pages.touched(One("new.py"), One("new.py")) == []
    assert len(pages.fast_rows(RECORDS / FIRST / "train_gpt.py")) == 9


def test_lines_by_section(tmp_path):
    banner = "# ======== {0}. {1} ==================== budget 9 ====\n"
    (tmp_path / "old.py").write_text("a\n" + banner.format(1, "One") + "b\nc\n" + banner.format(2, "Two") + "d\n")
    (tmp_path / "new.py").write_text("a\n" + banner.format(1, "One") + "b\nx\ny\n" + banner.format(2, "Two") + "d\n")
    found = {name: pages.sections(tmp_path / name) for name in ("old.py", "new.py")}
    assert list(found["new.py"]) == ["head", "1. One", "2. Two"] and found["new.py"]["1. One"][1:] == ["b", "x", "y"]


def flip(path, at=None):
    """One bit of a byte, by default of one in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def log(folder, k=0):
    return sorted((folder / "runs").glob("*.log"))[k]


def resum(folder):
    """What a forger would do after an edit."""
    (folder / "SHA256SUMS").write_text(pages.sums(folder))


DAMAGE = {
    "script": (lambda f: flip(f / "train_gpt.py"), f"{FIRST}/train_gpt.py: not the file that was frozen"),
    "log": (lambda f: flip(log(f)), "seed1.log: not the file that was frozen"),
    "table": (lambda f: flip(f / "README.md", (f / "README.md").read_bytes().index(b"3.740654")), f"{FIRST}/README.md: its table"),
    "script, sums made to fit": (lambda f: (flip(f / "train_gpt.py"), resum(f)), "is not the script of the logs (ab1111ff8985)"),
    "log, sums made to fit": (lambda f: (edit(log(f), "val_loss: 3.74", "val_loss: 3.64"), resum(f)),
                              "seed1.log: changed since the commit that froze the record"),
    "all made to fit": (lambda f: (edit(log(f), "val_loss: 3.74", "val_loss: 3.64"), resum(f),
                                   stats(f.parents[1], "table")), "seed1.log: changed since the commit that froze"),
    "unfinished log": (lambda f: (edit(log(f), "end: ok\n", ""), resum(f)), "end marker missing"),
    "nan": (lambda f: (edit(log(f), "val_loss: 3.740654", "val_loss: nan"), resum(f)), "final validation loss is nan"),
    "seed twice": (lambda f: (edit(log(f, 1), "seed: 2", "seed: 1"), resum(f)), "seed 1 2 times"),
    "byte copy": (lambda f: (shutil.copy(log(f), f / "runs" / "z.log"), resum(f)), "byte copy of"),
    "other data": (lambda f: (edit(log(f), "data_hash: f3", "data_hash: 00"), resum(f)), "other training data"),
    "line": (lambda f: (edit(log(f), "tokens_per_s: ", "tokens_a_s: "), resum(f)), "lacks the line `tokens_per_s`"),
    "file too many": (lambda f: (f / "more.txt").write_text("x"), f"{FIRST}/more.txt: not listed in SHA256SUMS"),
    "file gone": (lambda f: log(f).unlink(), "missing, SHA256SUMS lists it"),
    "no logs": (lambda f: shutil.rmtree(f / "runs"), f"{FIRST}: no logs in runs/"),
    "no sums": (lambda f: (f / "SHA256SUMS").unlink(), f"{FIRST}: no SHA256SUMS"),
    "sums broken": (lambda f: (f / "SHA256SUMS").write_text("x\n"), "want lines of a SHA-256"),
    "mark": (lambda f: edit(f / "README.md", "<!-- numbers -->", ""), "<!-- end of numbers --> once each"),
    "heading": (lambda f: edit(f / "README.md", "## Exactness", "## Precision"), "its headings are Claim, Numbers"),
    "overview": (lambda f: edit(f.parent / "README.md", "3.7461", "3.6461"), "README.md: its table is not what the logs say"),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return committed(copy_to(tmp_path_factory.mktemp("pristine")))


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found(pristine, tmp_path, what):
    """Each with a message of its own."""
    shutil.copytree(pristine, tmp_path / "c")
    damage, message = DAMAGE[what]
    damage(tmp_path / "c" / "records" / FIRST)
    said = stats(tmp_path / "c", "check", code=1)
    assert message in said
    told = json.loads(stats(tmp_path / "c", "check", "--json", code=1))
    assert not told["ok"] and any(message in finding for finding in told["findings"])


def test_outside_a_checkout_it_is_said(tmp_path):
    copy_to(tmp_path)
    said = subprocess.run([sys.executable, str(tmp_path / "records" / "stats.py"), "check"], text=True, capture_output=True,
                          env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)})
    assert said.returncode == 0 and "not a git checkout" in said.stdout and "in order" in said.stdout


def test_frozen_scripts_import_under_their_own_names():
    """A user loads a record's script beside the current one."""
    for number, path in enumerate(sorted(RECORDS.glob("[0-9]*/train_gpt.py"))):
        spec = importlib.util.spec_from_file_location(f"record_{number}", path)
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.parse(["tiny"]).preset == "tiny"


# ---- logs of the public repository -----------------------------------------------------------------------------------

RULE = "=" * 100


def public(folder, name, code, last, early="step:0/100 val_loss:10.8258 train_time:0ms step_avg:nanms\n"):
    body = f"{code}\n{RULE}\nRunning Python 3.12\n{RULE}\n{early}step:99/100 train_time:69300ms step_avg:700.00ms\n{last}\n"
    (folder / name).write_text(body)


def test_a_folder_with_everything_wrong(tmp_path):
    """T14 of the project's test inputs: two logs count, five are excluded by name, and nothing is certified."""
    def final(loss, n=100):
        return f"step:{n}/{n} val_loss:{loss} train_time:70000ms step_avg:700.00ms"
    public(tmp_path, "a.txt", "X", final("3.2785"))
    shutil.copy(tmp_path / "a.txt", tmp_path / "b.txt")
    public(tmp_path, "c.txt", "X", "step:100/100 train_time:70000ms step_avg:700.00ms")
    public(tmp_path, "d.txt", "X", final("nan"))
    public(tmp_path, "e.txt", "Y", final("3.2760"))
    public(tmp_path, "f.txt", "X", final("3.2790", 110))
    public(tmp_path, "g.txt", "X", final("3.2792"))
    said = json.loads(stats(ROOT, "certify", tmp_path, "--target", "3.28", "--json", code=3))
    assert not said["certified"] and said["numbers"]["n"] == 2 and round(said["numbers"]["p"], 4) == 0.0940
    why = {os.path.basename(path): reason for path, reason in said["excluded"]}
    assert set(why) == {"b.txt", "c.txt", "d.txt", "e.txt", "f.txt"}
    for name, part in (("b", "byte copy"), ("c", "validation loss missing"), ("d", "is nan"), ("e", "another script"),
                       ("f", "110 steps, the others 100")):
        assert part in why[f"{name}.txt"]
    text = stats(ROOT, "certify", tmp_path, "--target", "3.28", code=3)
    assert "NOT CERTIFIED" in text and "p = 0.09404" in text and text.count("does not count:") == 5


def test_public_logs_are_read(tmp_path):
    public(tmp_path, "a.txt", "X", "step:100/100 val_loss:3.2785 train_time:70000ms step_avg:700.00ms")
    run = logs.read(tmp_path / "a.txt")
    assert (run.form, run.n_steps, run.val_loss, run.train_s, run.seed) == ("public", 100, 3.2785, 70.0, None)
    assert [(step, loss) for step, _, loss, _ in run.vals] == [(0, 10.8258), (100, 3.2785)]
    (tmp_path / "none.txt").write_text("some notes\n")
    assert logs.read(tmp_path / "none.txt").problem == "not the log of a run"


def test_logs_of_a_folder_that_pass_are_no_certificate(tmp_path):
    for k, loss in enumerate((3.2772, 3.2781, 3.2780, 3.2784, 3.2773, 3.2786, 3.2779, 3.2765)):
        public(tmp_path, f"{k}.txt", "X", f"step:100/100 val_loss:{loss} train_time:7{k}000ms step_avg:700.00ms")
    said = stats(ROOT, "certify", tmp_path, "--target", "3.28")
    assert "PASSES, without a plan" in said and "no plan" in said and "no seeds" in said
    said = json.loads(stats(ROOT, "compare", RECORDS / FIRST / "runs", tmp_path, "--json"))
    assert said["val_loss"]["b"]["n"] == 8 and not said["equal_steps"] and said["train_s"]["welch"] is None
    assert "are not compared" in stats(ROOT, "compare", "001", tmp_path)


def test_bare_losses(tmp_path):
    assert "p = 0.01372" in stats(ROOT, "certify", "--losses", 3.2772, 3.2756, 3.2784, 3.2783, "--target", 3.28, code=1)
    assert "no finite number" in stats(ROOT, "certify", "--losses", 3.2772, "nan", 3.2780, "--target", 3.28, code=3)


# ---- plans -----------------------------------------------------------------------------------------------------------

ARMS = ("--arm", "new=train_gpt.py", "--arm", f"base=records/{FIRST}/train_gpt.py")


@pytest.mark.parametrize("words, said", [
    (["Bad name", *ARMS], "small letters"), (["p", "--arm", "new=nothing.py"], "nothing.py is none"),
    (["p", "--arm", "runs=train_gpt.py"], "no names of arms"), (["p", *ARMS, "--seeds", "1,1,2,3"], "every seed may occur once"),
    (["p", *ARMS, "--seeds", "x"], "want numbers and ranges"), (["p", *ARMS, "--seeds", "1-3"], "3 seeds: too few runs"),
    (["p", *ARMS, "--words", "seed=3"], "given by the plan"), (["p", *ARMS, "--expect", "3.279"], "give --target"),
    (["p", *ARMS, "--target", "3.28", "--expect", "3.27999"], "no number of runs up to 1000"),
    (["p", "--arm", "new=train_gpt.py"], "decides nothing"), (["p", *ARMS, ARMS[0], ARMS[1]], "a name of its own")])
def test_plans_that_are_refused(clone, words, said):
    assert said in stats(clone, "plan", *words, code=1)
    assert not list((clone / "records").glob("attempts/*/plan.json"))


def test_the_number_of_runs_follows_from_the_wanted_power(clone):
    said = json.loads(stats(clone, "plan", "p", *ARMS, "--target", "3.28", "--expect", "3.2785", "--json"))["plan"]
    assert len(said["seeds"]) == said["power"]["runs"] == 15 and said["power"]["reached"] >= 0.9
    text = stats(clone, "plan", "p", "--replace", *ARMS, "--target", "3.28", "--expect", "3.2785")
    assert "15 runs show a true mean of 3.2785" in text and "new 1, base 1; base 2, new 2; new 3, base 3" in text
    assert "Replace it with --replace" in stats(clone, "plan", "p", *ARMS, "--target", "3.28", code=1)


def test_arms_alternate():
    order = plans.order_of(["a", "b", "c"], [5, 6, 7, 8])
    assert [arm for _, arm, _ in order] == list("abcbcacababc")
    assert [seed for _, _, seed in order[::3]] == [5, 6, 7, 8] and [i for i, _, _ in order[::3]] == [0, 1, 2, 3]


def test_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "LEFT_OVER_S", 1)
    with plans.alone(tmp_path), pytest.raises(plans.Broken, match="by another process"), plans.alone(tmp_path):
        pass


def test_the_journal_shows_what_was_done_to_it(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = plans.Journal(path)
    for k in range(4):
        journal.add("start", slot=k)
    assert [e["slot"] for e in plans.Journal(path).events] == [0, 1, 2, 3]
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for wrong in (lines[:1] + lines[2:], lines[1:], [lines[0], lines[1].replace(b'"slot": 1', b'"slot": 7'), *lines[2:]],
                  [lines[1], lines[0], *lines[2:]], [b"x\n", *lines]):
        path.write_bytes(b"".join(wrong))
        with pytest.raises(plans.Broken, match="a line was changed, added or removed"):
            plans.Journal(path)
    path.write_bytes(whole + b'{"event": "sta')                # an append that a kill cut off
    plans.Journal(path).add("end", slot=3)
    assert [e["event"] for e in plans.Journal(path).events] == ["start"] * 4 + ["end"]


def test_a_run_that_fails_is_said_and_listed(clone):
    """Before its first step a script may refuse as often as it likes."""
    stats(clone, "plan", "p", "--arm", "new=train_gpt.py", "--preset", "tiny", "--words", "d_head=3", "--caches", "cold",
          "--target", "9", "--seeds", "1-4")
    for start in (1, 2, 3):
        said = stats(clone, "run", "p", "--quiet", code=1)
        assert f"start {start}" in said
    said = stats(clone, "certify", "p", code=3)
    assert said.count("did not finish, exit code 1") == 3 and "finished 0 times, wanted once" in said
    assert "4 of 4 runs are missing" in stats(clone, "freeze", "p", code=1)
    assert "has started and is not changed any more" in stats(clone, "plan", "p", "--replace", *ARMS, "--target", "9", code=1)


def test_another_machine_is_refused(clone):
    stats(clone, "plan", "p", *ARMS, "--preset", "tiny", "--target", "9", "--seeds", "1-4")
    path = clone / "records" / "attempts" / "p" / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "0" * 12}))
    assert "planned for another machine" in stats(clone, "run", "p", code=1)
    edit(path, '"' + "0" * 12 + '"', "null")
    flip(path.parent / "base" / "train_gpt.py")
    assert "changed since the plan was written" in stats(clone, "run", "p", code=1)


# ---- a plan from its beginning to a record ---------------------------------------------------------------------------

def journal_of(root, name):
    path = root / "records" / "attempts" / name / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trainers(root):
    """Processes that run a script below a folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline", "rb").read().decode().split("\0")
            if any(word.endswith("train_gpt.py") for word in words) and os.readlink(f"/proc/{pid}/cwd") == str(root):
                found.append(pid)
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory):
    """A plan of 2 arms and 4 seeds that was killed with SIGKILL in its third run, and taken up again."""
    root = copy_to(tmp_path_factory.mktemp("plan"))
    stats(root, "plan", "lower-rate", "--arm", "new=train_gpt.py", "--arm", "base=train_gpt.py adam_lr=0.019", "--preset", "tiny",
          "--words", "stop=1", "val_tokens=2048", "--seeds", "1-4", "--target", "12", "--claim", "It learns.")
    command = [sys.executable, str(root / "records" / "stats.py"), "run", "lower-rate", "--quiet"]
    child = subprocess.Popen(command, cwd=root, env=bare_env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 200
    while sum(e["event"] == "start" for e in journal_of(root, "lower-rate")) < 3:
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    time.sleep(2)                                              # the third run is on its way
    child.send_signal(signal.SIGKILL)
    child.wait()
    said = stats(root, "run", "lower-rate", "--quiet")
    assert "all runs are made" in said
    return root, said


@pytest.fixture(scope="module")
def record(carried_out, tmp_path_factory):
    """The record that was frozen from it, in a commit."""
    root = tmp_path_factory.mktemp("frozen") / "c"
    shutil.copytree(carried_out[0], root)
    said = stats(root, "freeze", "lower-rate", "--title", "a-lower-rate")
    (folder,) = (root / "records").glob("002_*_a-lower-rate")
    return committed(root), folder, said


def test_a_killed_plan_goes_on(carried_out):
    """Every start is in the journal; the interrupted one was made again, in its place, and leaves no process."""
    root, said = carried_out
    assert trainers(root) == []
    starts = [e for e in journal_of(root, "lower-rate") if e["event"] == "start"]
    assert [e["slot"] for e in starts] == [0, 1, 2, 2, 3, 4, 5, 6, 7] and [e["attempt"] for e in starts].count(2) == 1
    assert [e["arm"] for e in starts] == ["new", "base", "base", "base", "new", "new", "base", "base", "new"]
    assert "run 3 of 8 (arm base, seed 2), start 2" in said and "run 2 of 8" not in said
    assert "all runs are made" in stats(root, "run", "lower-rate")
    assert len(journal_of(root, "lower-rate")) == 1 + 2 * 2 + 2 * 9


def test_its_verdict(carried_out):
    root, _ = carried_out
    verdict = plans.judge(root / "records" / "attempts" / "lower-rate")[3]
    assert verdict.status in ("pass", "fail") and verdict.numbers["tests"]["loss"]["status"] == "pass"
    assert ["start 1 did not finish, interrupted" in warning for warning in verdict.warnings] == [True]
    losses = [e["val_loss"] for e in journal_of(root, "lower-rate") if e["event"] == "end" and e["code"] == 0]
    assert verdict.numbers["arms"]["new"]["loss"]["n"] == 4 and len(losses) == 8
    code = {"pass": 0, "fail": 1}[verdict.status]
    said = stats(root, "certify", "lower-rate", code=code)
    assert ("lower-rate: CERTIFIED" in said) == (code == 0) and "interrupted" in said
    said = json.loads(stats(root, "certify", "lower-rate", "--json", code=code))
    assert said["certified"] == (code == 0) and said["numbers"]["planned"]
    pairs = json.loads(stats(root, "compare", "lower-rate:new", "lower-rate:base", "--json"))
    assert pairs["train_s"]["paired"]["n"] == 4 and pairs["equal_steps"] and pairs["same_data"]


@pytest.mark.parametrize("damage, said", [
    (lambda f: next(f.glob("run-04*/*.log")).unlink(), "run 4 of 8 (arm new, seed 2): its log is missing or was changed"),
    (lambda f: flip(next(f.glob("run-04*/*.log"))), "run 4 of 8 (arm new, seed 2): its log is missing or was changed"),
    (lambda f: shutil.copy(next(f.parents[1].glob("001*/runs/*.log")), f / "x.log"), "a log that the plan does not account for"),
    (lambda f: edit(f / "plan.json", '"target": 12.0', '"target": 13.0'), "plan.json: changed after the first run"),
    (lambda f: edit(f / "journal.jsonl", '"attempt": 2', '"attempt": 3'), "is not what was written there")])
def test_a_plan_that_was_tampered_with(carried_out, tmp_path, damage, said):
    shutil.copytree(carried_out[0], tmp_path / "c")
    damage(tmp_path / "c" / "records" / "attempts" / "lower-rate")
    done = subprocess.run([sys.executable, str(tmp_path / "c" / "records" / "stats.py"), "certify", "lower-rate"],
                          capture_output=True, text=True)
    assert done.returncode in (1, 3) and said in done.stdout + done.stderr and "CERTIFIED\n" not in done.stdout.replace("NOT ", "")


def test_a_frozen_record_is_in_order(record):
    root, folder, said = record
    assert "Frozen as records/002_" in said and "in order" in stats(root, "check")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert [n for n in names if n.startswith("runs/")] == [f"runs/0{k}.log" for k in range(1, 5)]
    assert [n for n in names if n.startswith("base/")] == [f"base/0{k}.log" for k in range(1, 5)] + ["base/train_gpt.py"]
    assert [logs.read(folder / "runs" / f"0{k}.log").seed for k in range(1, 5)] == [1, 2, 3, 4]
    page = (folder / "README.md").read_text()
    assert "It learns." in page and "Against record 001" in page and "interrupted" in page
    assert re.search(r"Verdict on the plan of .*: \*\*(not )?certified\*\*", page)
    row = next(line for line in (root / "records" / "README.md").read_text().splitlines() if line.startswith("| [002]"))
    assert "| tiny |" in row and " s | " in row and "a lower rate" in row
    assert stats(root, "table").count("written") == 0


@pytest.mark.parametrize("damage, said", [
    (lambda f: flip(f / "train_gpt.py"), "is not the script of the logs"),
    (lambda f: flip(f / "base" / "02.log"), "base/02.log: not the file that was frozen"),
    (lambda f: flip(f / "runs" / "03.log"), "runs/03.log: not the file that was frozen"),
    (lambda f: (flip(f / "base" / "02.log"), resum(f)), "base/02.log: changed since the commit that froze"),
    (lambda f: edit(f / "README.md", "| new | 4 |", "| new | 5 |"), "README.md: its table is not what the logs say"),
    (lambda f: edit(f / "plan.json", '"alpha": 0.01', '"alpha": 0.05'), "plan.json: changed after the first run was started"),
    (lambda f: edit(f / "README.md", "certified", "approved"), "README.md: its table is not what the logs say")])
def test_damage_to_a_frozen_record_is_found(record, tmp_path, damage, said):
    root, folder, _ = record
    shutil.copytree(root, tmp_path / "c")
    damage(tmp_path / "c" / "records" / folder.name)
    assert said in stats(tmp_path / "c", "check", code=1)


# ---- a new attempt, and the command line -----------------------------------------------------------------------------

def test_new_starts_from_a_record(clone):
    said = stats(clone, "new", "faster", "--from", "001")
    assert (clone / "train_gpt.py").read_bytes() == (clone / "records" / FIRST / "train_gpt.py").read_bytes()
    assert f"plan faster --arm new=train_gpt.py --arm base=records/{FIRST}/train_gpt.py" in said
    (clone / "train_gpt.py").write_text("print(1)\n")
    assert "would be lost" in stats(clone, "new", "faster", code=1)
    assert (clone / "train_gpt.py").read_text() == "print(1)\n"
    stats(clone, "new", "faster", "--force")
    assert "no such record" in stats(clone, "new", "faster", "--from", "009", code=1)


@pytest.mark.parametrize("command", ["new", "plan", "run", "certify", "compare", "plot", "freeze", "table", "check"])
def test_every_command_helps(command):
    said = stats(ROOT, command, "--help")
    assert "--json" in said and said.startswith(f"usage: stats.py {command}")


@pytest.mark.parametrize("words, said", [
    (["certify"], "give a plan"), (["certify", "001"], "need --target"), (["certify", "nothing", "--target", "1"], "neither a record"),
    (["run", "nothing"], "no plan.json there"), (["freeze", "nothing"], "no plan.json there"),
    (["compare", "001", "nothing"], "nothing: neither a record"), (["compare", "001", "001:x"], "no such arm")])
def test_errors_say_what_to_do(words, said):
    assert said in stats(ROOT, *words, code=1)
    assert said in json.loads(stats(ROOT, *words, "--json", code=1))["error"]


def test_pictures_of_the_records(tmp_path):
    said = json.loads(stats(ROOT, "plot", "--out", tmp_path, "--json"))["files"]
    assert str(tmp_path / "report.html") in said and sum(name.endswith(".png") for name in said) >= 4
    assert all(os.path.getsize(name) > 1000 for name in said)


def test_an_interrupted_run_that_had_finished_counts(tmp_path, monkeypatch):
    """Killed between the end of a run and its line in the journal: the log is taken as it is, not made again."""
    finished = logs.logs_in(RECORDS / FIRST / "runs")[0]
    (tmp_path / "run-01").mkdir()
    shutil.copy(finished, tmp_path / "run-01")
    journal = plans.Journal(tmp_path / "journal.jsonl")
    journal.add("start", slot=0, arm="new", attempt=1, log_dir="run-01")
    assert plans.open_starts(journal.events) == journal.events
    plans.close(journal, tmp_path, journal.events[0], None)
    assert journal.events[-1]["code"] == 0 and journal.events[-1]["val_loss"] == 3.740654
    assert plans.open_starts(journal.events) == [] and claims.n_restarts(claims.attempts_of(journal.events)[0]) == 0
