"""What the tests share: the trainer as a module, shards made on the spot, the trainer started as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")   # before anything imports triton
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SCRIPT = ROOT / "train_gpt.py"
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)                         # threads that wait for cores cost most


def docs(n, length, seed):
    """n random GPT-2 tokens, a document start every `length` of them: uint16 (n,)."""
    tokens = np.random.default_rng(seed).integers(0, 50256, n).astype(np.uint16)
    tokens[::length] = 50256
    return tokens


def shard(path, tokens, magic=20240520, version=1, claim=None, tail=b""):
    """Write a shard; claim and tail make a header or a size that lies."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if claim is None else claim
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes() + tail)
    return path


def bare_env(**more):
    """The environment without what torchrun or an outer test run may have set; one thread, so that ranks share."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    return {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"} | more


def command(words, ranks, script=SCRIPT):
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launch, str(script), *map(str, words)]


def run(words, ranks=1, cwd=ROOT, script=SCRIPT, timeout=240, **env):
    """Start the trainer (under torchrun for more than one rank) and wait: CompletedProcess with text output."""
    return subprocess.run(command(words, ranks, script), cwd=cwd, env=bare_env(**env), text=True,
                          capture_output=True, timeout=timeout)


def read_log(folder):
    """(lines, {key: value of the `key: value` lines}) of the only log in a folder."""
    (path,) = Path(folder).glob("*.log")
    lines = path.read_text().splitlines()
    return lines, dict(line.split(": ", 1) for line in lines if ": " in line and " | " not in line)


def losses(lines):
    """Training losses of a log, by step."""
    return [float(line.split("loss ")[1].split(" |")[0]) for line in lines if line.startswith("step ")]


def rotary_at(tg, cfg, stage, wide):
    """(frequencies, softmax scale) of a stage's heads: wide ones follow the long windows."""
    windows = [row.long if wide else row.short for row in cfg.stages[:stage + 1]]
    return tg.rotary(cfg.d_head // 4, cfg.scale_wide if wide else cfg.scale_narrow, windows)


@pytest.fixture(scope="session")
def tg():
    import train_gpt
    return train_gpt


@pytest.fixture
def one_rank(tg):
    """Comm of a single rank on the CPU."""
    return tg.Comm(tg.PRESETS["tiny"], 0, 0, 1)
