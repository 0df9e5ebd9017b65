"""records/: frozen scripts, logs and tables agree, and what disagrees is found."""

import importlib.util
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

RECORDS = ROOT / "records"
FIRST = "001_2026-11-29_baseline"


def stats(folder, *words):
    return subprocess.run([sys.executable, str(folder / "stats.py"), *words], capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(RECORDS, tmp_path / "records", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "records"


def test_the_records_are_in_order():
    done = stats(RECORDS, "--check")
    assert done.returncode == 0, done.stderr
    assert "in order" in done.stdout


def test_writing_again_changes_nothing(copy):
    before = {path: path.read_bytes() for path in copy.rglob("*.md")}
    assert stats(copy).returncode == 0
    assert {path: path.read_bytes() for path in copy.rglob("*.md")} == before


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def log(copy, k=0):
    return sorted((copy / FIRST / "runs").glob("*.log"))[k]


DAMAGE = {
    "script": (lambda c: flip(c / FIRST / "train_gpt.py"), "another script"),
    "unfinished log": (lambda c: log(c).write_text(log(c).read_text().removesuffix("end: ok\n")), "not the log of a finished"),
    "value in a log": (lambda c: log(c).write_text(log(c).read_text().replace("val_loss: 3.74", "val_loss: 3.64")), "its table"),
    "seed twice": (lambda c: shutil.copy(log(c), log(c).with_name("copy.log")), "twice"),
    "number in a page": (lambda c: (c / FIRST / "README.md").write_text(
        (c / FIRST / "README.md").read_text().replace("3.740654", "3.640654")), "its table"),
    "number in the overview": (lambda c: (c / "README.md").write_text(
        (c / "README.md").read_text().replace("3.7461", "3.6461")), "its table"),
    "mark": (lambda c: (c / "README.md").write_text("# Records\n"), "once each"),
    "line": (lambda c: log(c).write_text(log(c).read_text().replace("train_s: ", "train_seconds: ")), "lacks the line 'train_s'"),
    "no logs": (lambda c: shutil.rmtree(c / FIRST / "runs"), "no logs"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found(copy, what):
    damage, message = DAMAGE[what]
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    damage(copy)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} != before
    done = stats(copy, "--check")
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_frozen_scripts_import_under_their_own_names():
    """A user loads a record's script beside the current one."""
    for number, path in enumerate(sorted(RECORDS.glob("[0-9]*/train_gpt.py"))):
        spec = importlib.util.spec_from_file_location(f"record_{number}", path)
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.parse(["tiny"]).preset == "tiny"
