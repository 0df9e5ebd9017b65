"""run.sh: what it starts, with an interpreter that only says what it was asked for."""

import os
import shutil
import subprocess

import pytest
from conftest import ROOT

FAKE = """#!/bin/sh
case "$2" in
  *device_count*) echo "$FAKE_GPUS" ;;
  import*) exit 0 ;;
  *) echo "ran: $*" ;;
esac
"""


def start(tmp_path, gpus, *words, fineweb=False):
    shutil.copy(ROOT / "run.sh", tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True, exist_ok=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text(FAKE)
    python.chmod(0o755)
    if fineweb:
        (tmp_path / "data/fineweb10B").mkdir(parents=True)
        for name in ("val_000000", "train_000001"):
            (tmp_path / f"data/fineweb10B/fineweb_{name}.bin").touch()
    return subprocess.run(["./run.sh", *words], cwd=tmp_path, env=os.environ | {"FAKE_GPUS": str(gpus)}, text=True,
                          capture_output=True, timeout=60)


def launch(n):
    return f"ran: -m torch.distributed.run --standalone --nproc_per_node={n} train_gpt.py"


def test_no_gpu_trains_tiny_and_says_what_the_real_thing_needs(tmp_path):
    out = start(tmp_path, 0)
    assert out.stdout == "ran: train_gpt.py tiny\n"
    assert len(out.stderr.splitlines()) == 1 and "no GPU" in out.stderr and "cached_fineweb10B.py" in out.stderr


def test_gpu_without_fineweb_trains_tiny_and_says_what_is_missing(tmp_path):
    out = start(tmp_path, 8)
    assert out.stdout == "ran: train_gpt.py tiny\n" and "no FineWeb" in out.stderr and "9" in out.stderr


@pytest.mark.parametrize("gpus, ranks", [(2, 2), (3, 2), (4, 4), (5, 4), (7, 4), (8, 8), (9, 8)])
def test_gpus_and_fineweb_train_the_record_on_a_legal_number_of_ranks(tmp_path, gpus, ranks):
    out = start(tmp_path, gpus, "seed=3", fineweb=True)
    assert out.stdout == f"{launch(ranks)} record seed=3\n"
    assert out.stderr == ("" if gpus == ranks else
                          f"run.sh: {gpus} GPUs are no legal world size (1, 2, 4, 8): using {ranks}\n")


def test_one_gpu_needs_no_torchrun(tmp_path):
    assert start(tmp_path, 1, fineweb=True).stdout == "ran: train_gpt.py record\n"


def test_a_preset_is_taken_as_given(tmp_path):
    assert start(tmp_path, 4, "record", "stop=5").stdout == f"{launch(4)} record stop=5\n"
    assert start(tmp_path, 4, "solo").stdout == "ran: train_gpt.py solo\n"
    assert start(tmp_path, 0, "tiny", "stop=5").stdout == "ran: train_gpt.py tiny stop=5\n"


def test_settings_without_a_preset_go_to_the_chosen_one(tmp_path):
    assert start(tmp_path, 0, "stop=5").stdout == "ran: train_gpt.py tiny stop=5\n"


def test_sampling_is_one_process_and_no_training(tmp_path):
    out = start(tmp_path, 8, "load=w.pt", "sample=Once upon a time", fineweb=True)
    assert out.stdout == "ran: train_gpt.py load=w.pt sample=Once upon a time\n"


def test_test_runs_pytest_with_its_arguments(tmp_path):
    """Without any, pytest.ini names the folder, so that a file given here is the only one that runs."""
    assert start(tmp_path, 0, "test").stdout == "ran: -m pytest\n"
    assert start(tmp_path, 0, "test", "tests/test_text.py", "-k", "x").stdout == \
        "ran: -m pytest tests/test_text.py -k x\n"
