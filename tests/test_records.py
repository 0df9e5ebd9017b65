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
from types import SimpleNamespace

import pytest
from conftest import ROOT, bare_env

RECORDS = ROOT / "records"
FIRST = "001_2026-11-29_baseline"
NEXT = f"{len(list(RECORDS.glob('[0-9]*'))) + 1:03d}"     # of the record that a test freezes

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
    return done.stdout + done.stderr if "--json" not in words else done.stdout


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

    new, old = (SimpleNamespace(script=tmp_path / name) for name in ("new.py", "old.py"))
    assert pages.touched(new, old) == [("reorder", "changed: b"), ("approx", "new: d"), ("approx", "gone: c")]
    assert pages.touched(new, new) == []
    (tmp_path / "new.py").write_text("x = Fast('bitwise', f, f)\nx[1:] = Fast()\nFAST[name()] = Fast(kind, f)\n")
    assert pages.touched(new, new) == []
    assert len(pages.fast_rows(RECORDS / FIRST / "train_gpt.py")) == 9


def test_lines_by_section(tmp_path):
    banner = "# ======== {0}. {1} ==================== budget 9 ====\n"
    (tmp_path / "old.py").write_text("a\n" + banner.format(1, "One") + "b\nc\n" + banner.format(2, "Two") + "d\ne\n")
    (tmp_path / "new.py").write_text("a\n" + banner.format(1, "One") + "b\nx\ny\n" + banner.format(2, "Two") + "e\n")
    one, two = (SimpleNamespace(script=tmp_path / name, number=name) for name in ("old.py", "new.py"))
    said = pages.changes(two, one)
    assert "| 1. One | +2 | -1 |\n| 2. Two | +0 | -1 |" in said and "head" not in said and "Against record old.py" in said
    assert pages.n_lines(two, one) == "+0" and "The script is the same" in pages.changes(one, one)
    assert pages.n_lines(one, None) == "7" and "| 2. Two | +3 | -0 |" in pages.changes(one, None)


def flip(path, at=None, bit=0):
    """One bit of a byte, by default of one in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1 << bit
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
    "high bit of the script": (lambda f: flip(f / "train_gpt.py", bit=7), f"{FIRST}/train_gpt.py: not the file that was frozen"),
    "high bit of a log": (lambda f: flip(log(f), bit=7), "seed1.log: not the file that was frozen"),
    "high bit of a page": (lambda f: flip(f / "README.md", bit=7), f"{FIRST}/README.md: no text any more"),
    "high bit of the overview": (lambda f: flip(f.parent / "README.md", bit=7), "README.md: no text any more"),
    "high bit of the sums": (lambda f: flip(f / "SHA256SUMS", bit=7), f"{FIRST}/SHA256SUMS: no text any more"),
    "a record removed": (lambda f: (shutil.rmtree(f), edit(f.parent / "README.md", f"| [001]({FIRST})", "| gone")),
                         f"{FIRST}: this record was frozen, and is gone or has another name"),
    "a record renamed": (lambda f: f.rename(f.with_name("001_2026-11-29_better")),
                         f"{FIRST}: this record was frozen, and is gone or has another name"),
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


def test_what_git_cannot_tell_is_said(tmp_path, pristine, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    bare = copy_to(tmp_path / "bare")
    said = stats(bare, "check")
    assert "not a git checkout" in said and "in order" in said
    subprocess.run(["git", "init", "-q", str(bare)], check=True)
    assert "without a commit" in stats(bare, "check")
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{pristine}", str(tmp_path / "shallow")], check=True)
    assert "a shallow clone" in stats(tmp_path / "shallow", "check")


def test_a_checkout_may_lie_in_a_larger_repository(tmp_path):
    """Every kind of file is compared with the commit that froze the record."""
    (tmp_path / "sub").mkdir()
    copy_to(tmp_path / "sub")
    folder = tmp_path / "sub" / "records" / FIRST
    for name in ("plan.txt", "journal.jsonl", "x.json"):
        (folder / name).write_text("{}\n")
    resum(folder)
    committed(tmp_path)
    for name in ("plan.txt", "journal.jsonl", "x.json"):
        flip(folder / name, 0)
    resum(folder)
    said = stats(tmp_path / "sub", "check", code=1)
    for name in ("plan.txt", "journal.jsonl", "x.json"):
        assert f"{FIRST}/{name}: changed since the commit that froze the record" in said


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


@pytest.mark.parametrize("text", [
    b"", b"\0\xff\xfe", b"script: " + b"a" * 64 + b"\nconfig: [1]\nval_loss: 1.2.3\nseed: x\nend: ok",
    b"script: " + b"a" * 64 + b"\nstep 1/2 | tokens 1,2 | loss 1.2.3 | time 1.2.3 s\nconfig: {\ntrain_s: -1",
    b"step:1/1 val_loss:1.2.3 train_time:1.2.3ms", b"step:1/1 val_loss:3.1 train_time:1ms\nstep:x"])
def test_reading_never_fails_on_what_a_log_says(tmp_path, text):
    (tmp_path / "x.log").write_bytes(text)
    run = logs.read(tmp_path / "x.log")
    assert isinstance(run.group, tuple) and (run.problem or run.val_loss == 3.1)


def test_logs_of_a_folder_that_pass_are_no_certificate(tmp_path):
    for k, loss in enumerate((3.2772, 3.2781, 3.2780, 3.2784, 3.2773, 3.2786, 3.2779, 3.2765)):
        public(tmp_path, f"{k}.txt", "X", f"step:100/100 val_loss:{loss} train_time:7{k}000ms step_avg:700.00ms")
    (tmp_path / "notes.txt").write_text("These are my runs.\n")
    said = stats(ROOT, "certify", tmp_path, "--target", "3.28", code=4)
    assert "PASSES, without a plan" in said and "no plan" in said and "no seeds" in said and "no hash of their data" in said
    assert "notes.txt: not the log of a run" in said
    told = json.loads(stats(ROOT, "certify", tmp_path, "--target", "3.28", "--json", code=4))
    assert told["status"] == "pass" and not told["certified"]
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
    (["p", "--arm", "new=train_gpt.py"], "decides nothing"), (["p", *ARMS, ARMS[0], ARMS[1]], "a name of its own"),
    (["p", *ARMS, "--alpha", "0.05"], "--alpha 0.05: want a number above 0, at most 0.01"),
    (["p", *ARMS, "--alpha", "0"], "want a number above 0"), (["p", *ARMS, "--target", "inf"], "want a loss"),
    (["p", *ARMS, "--sd", "0"], "--sd 0: want"), (["p", *ARMS, "--margin", "-1"], "--margin -1: want"),
    (["p", *ARMS, "--seeds", "5-1"], "numbers and ranges"), (["p", *ARMS, "--seeds", "1-99999999"], "at most 1000"),
    (["p", "--arm", "new='train_gpt.py"], "No closing quotation"), (["p", *ARMS, "--claim", "<!-- numbers -->"], "a sentence")])
def test_plans_that_are_refused(pristine, tmp_path, words, said):
    shutil.copytree(pristine, tmp_path / "c")
    assert said in stats(tmp_path / "c", "plan", *words, code=1)
    assert not list((tmp_path / "c" / "records").glob("attempts/*"))


def test_replacing_a_plan_loses_nothing(clone):
    stats(clone, "plan", "p", *ARMS, "--target", "3.28")
    own = clone / "records" / "attempts" / "p"
    before = (own / "plan.json").read_text()
    stats(clone, "plan", "p", "--replace", "--arm", f"new={own}/new/nothing.py", code=1)
    assert (own / "plan.json").read_text() == before
    stats(clone, "plan", "p", "--replace", "--arm", f"only={own}/new/train_gpt.py", "--target", "3")
    assert (own / "only" / "train_gpt.py").is_file() and not (own / "new").exists()
    (own.parent / "notes").mkdir()
    assert "this is no plan" in stats(clone, "plan", "notes", "--replace", *ARMS, "--target", "3", code=1)


@pytest.mark.parametrize("change", [
    {"order": [[0, "new", 1]]}, {"alpha": 0.05}, {"seeds": [1, 1, 1, 1]}, {"arms": []}, {"decide": []}, {"caches": "hot"}])
def test_a_plan_that_was_written_by_hand_is_refused(clone, change):
    stats(clone, "plan", "p", *ARMS, "--preset", "tiny", "--target", "9", "--seeds", "1-4")
    path = clone / "records" / "attempts" / "p" / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for command in ("run", "certify"):
        assert "plan.json: " in stats(clone, command, "p", code=1)


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


# A trainer that trains nothing: it writes the log of a run and ends as its word `fake` says.
FAKE = '''
import hashlib, os, sys
words = dict(word.split("=", 1) for word in sys.argv[2:])
seed, how = int(words.get("seed", 1)), words.get("fake", "ok")
if how == "refuse":
    sys.exit(1)
os.makedirs(words["log_dir"])
keys = dict(
    script=hashlib.sha256(open(__file__, "rb").read()).hexdigest(), preset=sys.argv[1], seed=seed, world=1, fast="none",
    host="a machine", software=f"caches {os.path.basename(os.environ.get('TRITON_CACHE_DIR', 'as they were'))}", config="{}",
    val_loss=3 + 0.001 * (seed * 7 % 5) + float(words.get("worse", 0)), train_s=50 + seed % 3 + float(words.get("slower", 0)) * (
    1 + 0.01 * seed), steps=10, tokens=100, data_hash="d" * 64, ms_by_stage=1, tokens_per_s=1, cold_start_s=1.0,
    compiled_on_clock=0, peak_gpu_mib=1, gpu_sm_mhz="mean 1900, least 1800, most 1980", gpu_power_w="mean 1", gpu_temp_c="mean 2")
if how == "no line":
    del keys["tokens_per_s"]
with open(words["log_dir"] + "/x.log", "w") as f:
    f.write("".join(f"{key}: {value}\\n" for key, value in keys.items()))
    f.write("end: ok\\n" if how != "no end" else "")
open(words["log_dir"] + "/caches.json", "w").write(os.environ.get("TRITON_CACHE_DIR", ""))
sys.exit(how == "fail")
'''


@pytest.fixture
def fake(clone):
    (clone / "fake.py").write_text(FAKE)
    return clone


def plan_fakes(root, *words, more="worse=0.0003 slower=2"):
    stats(root, "plan", "p", "--arm", "new=fake.py", "--arm", f"base=fake.py {more}", "--preset", "tiny", "--seeds", "1-4",
          *words)
    return root / "records" / "attempts" / "p"


def test_a_plan_that_was_committed_is_certified_without_a_word(fake):
    folder = plan_fakes(fake, "--target", "3.02")
    committed(fake)
    assert "no commit" not in stats(fake, "run", "p")
    said = stats(fake, "certify", "p")
    assert "p: CERTIFIED" in said and "to know" not in said
    assert re.search(r"loss: n = 4, mean 3\.0\d+, sd 0\.00\d+, p = \S+, \+0\.0\d+ below the target", said)
    event = next(e for e in journal_of(fake, "p") if e["event"] == "end")
    assert event["gpu_sm_mhz"].startswith("mean 1900") and event["gpu_power_w"] == "mean 1" and event["gpu_temp_c"] == "mean 2"
    assert all(e["caches"] == "warm" for e in journal_of(fake, "p") if e["event"] == "start")
    assert "--target is for logs without one" in stats(fake, "certify", "p", "--target", "3.5", code=1)
    seconds = {arm: [e["train_s"] for e in journal_of(fake, "p") if e["event"] == "end" and e["slot"] in slots]
               for arm, slots in (("new", (0, 3, 4, 7)), ("base", (1, 2, 5, 6)))}
    difference = sum(seconds["new"]) / 4 - sum(seconds["base"]) / 4
    stats(fake, "freeze", "p")
    row = next(line for line in (fake / "records" / "README.md").read_text().splitlines() if line.startswith(f"| [{NEXT}]"))
    assert f"| {difference:+.2f} s |" in row and difference < -1.5 and "| tiny with other settings |" in row
    assert "certified (loss < 3.02, time against base)" in row
    assert f"is the record {NEXT}_" in stats(fake, "freeze", "p", code=1)
    (folder / "plan.json").unlink()
    assert "in order" in stats(fake, "check")


def test_a_faster_arm_with_a_worse_loss_is_not_certified(fake):
    plan_fakes(fake, more="worse=-0.2 slower=2")
    stats(fake, "run", "p")
    said = stats(fake, "certify", "p", code=1)
    assert "loss against base" in said and "not below the margin" in said


def test_cold_caches_are_new_for_every_run(fake):
    folder = plan_fakes(fake, "--target", "3.02", "--caches", "cold")
    stats(fake, "run", "p", "--limit", "3")
    used = {path.read_text() for path in folder.glob("run-*/caches.json")}
    assert len(used) == 3 and "" not in used and not any(os.path.exists(path) for path in used)
    assert not list(folder.glob("smoke-*"))


@pytest.mark.parametrize("how, times", [("fail", 3), ("no end", 3), ("refuse", 5)])
def test_runs_that_fail_are_listed_and_not_made_for_ever(fake, how, times):
    """Twice in a plan a run may be made again; as often as one likes where the script refused before it had a log."""
    plan_fakes(fake, "--target", "9", "--caches", "cold", "--words", f"fake={how}")
    for k in range(times):
        assert f"start {k + 1}" in stats(fake, "run", "p", code=1)
    said = stats(fake, "run", "p", code=1)
    assert ("This plan cannot be finished" in said) == (how != "refuse")
    said = stats(fake, "certify", "p", code=3)
    assert said.count("did not finish, exit code 1") == times + (how == "refuse") and "finished 0 times, wanted once" in said
    assert ("3 starts did not finish, at most 2" in said) == (how != "refuse")
    assert "8 of 8 runs are missing" in stats(fake, "freeze", "p", code=1)
    assert "has started and is not changed any more" in stats(fake, "plan", "p", "--replace", *ARMS, "--target", "9", code=1)


def test_freezing_what_cannot_be_frozen_leaves_nothing(fake):
    plan_fakes(fake, "--target", "3.02", "--words", "fake=no line")
    stats(fake, "run", "p")
    assert "lacks the line `tokens_per_s`" in stats(fake, "freeze", "p", code=1)
    assert not list((fake / "records").glob(f"{NEXT}_*")) and "in order" in stats(fake, "check")


def test_a_plan_of_another_session_is_marked(fake):
    plan_fakes(fake, "--target", "3.02")
    assert "the plan is in no commit" in stats(fake, "run", "p")
    assert "that it is older is not shown" in stats(fake, "certify", "p")


def test_pictures_say_what_is_left_out(fake, tmp_path):
    folder = plan_fakes(fake, "--target", "3.02")
    stats(fake, "run", "p")
    (tmp_path / "mixed").mkdir()
    for k, path in enumerate(sorted(folder.glob("run-*/x.log"))):
        shutil.copy(path, tmp_path / "mixed" / f"{k}.log")
    shutil.copy(tmp_path / "mixed" / "0.log", tmp_path / "mixed" / "z.log")
    said = json.loads(stats(fake, "plot", tmp_path / "mixed", "--out", tmp_path / "out", "--json"))
    assert any("byte copy" in what for what in said["left_out"])


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
    """A plan of 2 arms and 5 seeds that was killed with SIGKILL half-way, and taken up again."""
    root = copy_to(tmp_path_factory.mktemp("plan"))
    stats(root, "plan", "lower-rate", "--arm", "new=train_gpt.py", "--arm", "base=train_gpt.py adam_lr=0.019", "--preset", "tiny",
          "--words", "stop=1", "val_tokens=2048", "d_model=48", "d_head=8", "d_mlp=40", "--seeds", "1-5", "--target", "12", "--no-time", "--claim", "It learns.")
    command = [sys.executable, str(root / "records" / "stats.py"), "run", "lower-rate", "--quiet"]
    child = subprocess.Popen(command, cwd=root, env=bare_env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 200
    folder = root / "records" / "attempts" / "lower-rate"
    while not list(folder.glob("run-05-*/*.log")):             # the log of the fifth run: it is on its way
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.05)
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
    (folder,) = (root / "records").glob(f"{NEXT}_*_a-lower-rate")
    return committed(root), folder, said


def test_a_killed_plan_goes_on(carried_out):
    """Every start is in the journal; the interrupted one was made again, in its place, and leaves no process."""
    root, said = carried_out
    assert trainers(root) == []
    starts = [e for e in journal_of(root, "lower-rate") if e["event"] == "start"]
    assert [e["slot"] for e in starts] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9] and [e["attempt"] for e in starts].count(2) == 1
    assert "".join(e["arm"][0] for e in starts) == "nbbnnnbbnnb"
    assert "run 5 of 10 (arm new, seed 3), start 2" in said and "run 4 of 10" not in said
    assert "all runs are made" in stats(root, "run", "lower-rate")
    assert len(journal_of(root, "lower-rate")) == 1 + 2 * 2 + 2 * 11


def test_its_verdict(carried_out):
    root, _ = carried_out
    said = stats(root, "certify", "lower-rate")
    assert "lower-rate: CERTIFIED" in said and "run 5 of 10 (arm new, seed 3): start 1 did not finish, interrupted" in said
    assert "held at a 5th of their level" in said and "in no commit" in said
    told = json.loads(stats(root, "certify", "lower-rate", "--json"))
    assert told["certified"] and told["numbers"]["planned"] and told["numbers"]["tests"]["loss"]["alpha"] == 0.002
    ends = [e for e in journal_of(root, "lower-rate") if e["event"] == "end" and e["code"] == 0]
    mine = [e["val_loss"] for e in ends if e["slot"] in (0, 3, 4, 7, 8)]
    assert told["numbers"]["arms"]["new"]["loss"]["mean"] == pytest.approx(sum(mine) / 5) and len(ends) == 10
    pairs = json.loads(stats(root, "compare", "lower-rate:new", "lower-rate:base", "--json"))
    assert pairs["train_s"]["paired"]["n"] == 5 and pairs["equal_steps"] and pairs["same_data"]


@pytest.mark.parametrize("damage, said", [
    (lambda f: next(f.glob("run-04*/*.log")).unlink(), "run 4 of 10 (arm new, seed 2): its log is missing or was changed"),
    (lambda f: flip(next(f.glob("run-04*/*.log"))), "run 4 of 10 (arm new, seed 2): its log is missing or was changed"),
    (lambda f: shutil.copy(next(f.parents[1].glob("001*/runs/*.log")), f / "x.log"), "a log that the plan does not account for"),
    (lambda f: edit(f / "plan.json", '"target": 12.0', '"target": 13.0'), "plan.json: changed after the first run"),
    (lambda f: edit(f / "journal.jsonl", '"attempt": 2', '"attempt": 3'), "is not what was written there")])
def test_a_plan_that_was_tampered_with(carried_out, tmp_path, damage, said):
    shutil.copytree(carried_out[0], tmp_path / "c")
    damage(tmp_path / "c" / "records" / "attempts" / "lower-rate")
    done = subprocess.run([sys.executable, str(tmp_path / "c" / "records" / "stats.py"), "certify", "lower-rate"],
                          capture_output=True, text=True)
    assert done.returncode in (1, 3) and said in done.stdout + done.stderr and "lower-rate: CERTIFIED" not in done.stdout


def test_a_frozen_record_is_in_order(record):
    root, folder, said = record
    assert f"Frozen as records/{NEXT}_" in said and "in order" in stats(root, "check")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert [n for n in names if n.startswith("runs/")] == [f"runs/0{k}.log" for k in range(1, 6)]
    assert [n for n in names if n.startswith("base/")] == [f"base/0{k}.log" for k in range(1, 6)] + ["base/train_gpt.py"]
    assert [logs.read(folder / "runs" / f"0{k}.log").seed for k in range(1, 6)] == [1, 2, 3, 4, 5]
    page = (folder / "README.md").read_text()
    assert "It learns." in page and f"Against record {int(NEXT) - 1:03d}" in page and "interrupted" in page
    assert re.search(r"Verdict on the plan of .*: \*\*certified \(loss < 12\)\*\*", page)
    row = next(line for line in (root / "records" / "README.md").read_text().splitlines() if line.startswith(f"| [{NEXT}]"))
    assert "| tiny with other settings |" in row and " s | " in row and "a lower rate" in row
    assert stats(root, "table").count("written") == 0


@pytest.mark.parametrize("damage, said", [
    (lambda f: flip(f / "train_gpt.py"), "is not the script of the logs"),
    (lambda f: flip(f / "base" / "02.log"), "base/02.log: not the file that was frozen"),
    (lambda f: flip(f / "runs" / "03.log"), "runs/03.log: not the file that was frozen"),
    (lambda f: (flip(f / "base" / "02.log"), resum(f)), "base/02.log: changed since the commit that froze"),
    (lambda f: edit(f / "README.md", "| new | 5 |", "| new | 6 |"), "README.md: its table is not what the logs say"),
    (lambda f: edit(f / "plan.json", '"alpha": 0.01', '"alpha": 0.005'), "plan.json: changed after the first run was started"),
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
    (clone / "records" / "attempts" / "faster").mkdir(parents=True)
    assert "such an attempt already" in stats(clone, "new", "faster", "--force", code=1)
    shutil.rmtree(clone / "records" / "attempts")
    assert "no such record" in stats(clone, "new", "faster", "--from", "009", code=1)


@pytest.mark.parametrize("command", ["new", "plan", "run", "certify", "compare", "plot", "freeze", "table", "check"])
def test_every_command_helps(command):
    said = stats(ROOT, command, "--help")
    assert "--json" in said and said.startswith(f"usage: stats.py {command}")


@pytest.mark.parametrize("words, said", [
    (["certify"], "give a plan"), (["certify", "001"], "need --target"), (["certify", "nothing", "--target", "1"], "neither a record"),
    (["run", "nothing"], "no plan.json there"), (["freeze", "nothing"], "no plan.json there"),
    (["compare", "001", "nothing"], "nothing: neither a record"), (["compare", "001", "001:x"], "no such arm"),
    (["certify", "", "--target", "1"], "an empty name"), (["compare", "00", "001"], "00: neither a record")])
def test_errors_say_what_to_do(words, said):
    assert said in stats(ROOT, *words, code=1)
    assert said in json.loads(stats(ROOT, *words, "--json", code=1))["error"]


def test_arguments_that_are_none():
    assert "invalid positive value" in stats(ROOT, "run", "p", "--limit", "-1", code=2)


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
    assert plans.open_starts(journal.events) == [] and claims.n_restarts(claims.attempts_of(journal.events)) == 0
