"""train_gpt.py: trains a GPT-2-scale language model, as fast as the hardware allows, in one readable file.

Measured with this file: preset tiny (42 steps, 180,224 tokens of English) reaches validation loss 6.53 in
73 s on two CPU cores; the frequencies of the tokens alone give 7.23. What was measured on GPUs, and with
which state of the script, stands in records/.

    torchrun --nproc_per_node=8 train_gpt.py              the record preset on 8 GPUs (1, 2, 4 or 8 work)
    python train_gpt.py tiny                              a toy run on a CPU, less than two minutes

Contents (grep -nE '^# (====|----)' train_gpt.py), with the line budget of each section:

     1  Config         270   every setting of a run, the presets, the command line
     2  Host           505   ranks and collectives, the log, the clock, how all ranks stop when one fails
     3  Numbers         45   number formats; the registry of fast replacements
     4  Kernels      1,450   attention, loss, updates, tables, pointer: what a GPU runs, beside its reference
     5  Ops             20   names for what the model uses of section 4
     6  Model          380   the layer table, the weights, the forward pass, the optimizer's parameter table
     7  Optimizers     125   ANVIL and Adam over all tensors, and how their work is spread over the ranks
     8  Data           475   token shards: reading, checking, packing documents; targets; the worker thread
     9  Schedules       90   stages, rates, windows, classes and targets as pure functions of the step
    10  Graphs         195   what is done once before the clock starts: compiling, memory, warm-up
    11  Train          340   validation, the timed loop, main

Three ways to read it: for the learning 1, 9, 6, 7; for the systems 2, 4, 8, 10; to run it 11 and README.md.

Letters, the same in the whole file:

    T  tokens of a micro-batch (one flat stream of packed documents, there is no batch axis)
    V  padded vocabulary     D  model width        F  MLP width           L  layers
    H  heads                 E  width of one head  N, R, C  matrices of a bank, rows, columns

Absent on purpose: resume, more than one node, experiment trackers, autotuning, wrappers such as DDP or FSDP.
Documents are told apart by doc_start, int32 (T,): where in the stream the token's document begins.

Sources, cited as [n]:
    [1] Muon: K. Jordan et al., kellerjordan.github.io/posts/muon, 2024
    [2] ANVIL: KellerJordan/modded-nanogpt pull requests 349 and 360
    [3] YaRN: B. Peng, J. Quesnelle, H. Fan, E. Shippole, arXiv 2309.00071, 2023
    [4] KellerJordan/modded-nanogpt, records 89 and 92: network, losses, stages, rates, windows
    [5] Adam: D. Kingma, J. Ba, arXiv 1412.6980, 2014
    [6] cautious updates: K. Liang, L. Chen, B. Liu, Q. Liu, arXiv 2411.16085, 2024
    [7] token shards: A. Karpathy, llm.c, 2024
    [8] case-folded n-grams: D. Monroe, KellerJordan/modded-nanogpt pull request 375
    [9] pointer head: N. Godey, KellerJordan/modded-nanogpt pull request 379
"""

import contextlib
import datetime
import difflib
import functools
import glob
import hashlib
import json
import math
import os
import pickle
import platform
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import unicodedata
import zlib
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


# ======== 1. Config ============================================================== budget 270 ====
# Every setting of a run is a field of Config; a preset is a Config; the command line is
# `[preset] [key=value ...]` and nothing else is read, no environment variable but torchrun's.
# Numbers that follow from other numbers are properties, so they cannot disagree.

VOCAB = 50_257           # GPT-2's tokens; a shard holds ids below this
VOCAB_PADDED = 50_304    # V: classes of the head, a multiple of 128 and of every world size
BOS = 50_256             # <|endoftext|>, the first token of every document
COPY = 50_257            # a class that is no token; it is always among the classes of the loss
SIGN_ROWS = 8192         # of random signs, from which n-grams choose by a hash
ROWS_MULTIPLE = 16       # rows of the table of n-grams: two halves, and equal shares for every world size
MOST_SCORE = 80          # of attention: e to this, times all keys of a window, is a number in fp32 and bf16
WORLDS = (1, 2, 4, 8)    # legal world sizes; n_micro must be a multiple of the one in use
STAGE_SHARES = (0.2854, 0.6063, 0.9394, 0.9994)   # stage ends as shares of n_sched / 0.9994, from [4]
REFERENCE_SCHED = 978    # n_sched from which on the inserted and the extension steps have full length
N_INSERTED, N_EXTENSION = 52, 20                  # steps added inside stage 2, and after stage 3
REFERENCE_STEPS = 1050   # n_steps for which the momentum ramps below are stated
FUTURE_WEIGHTS = (1.0, 0.5, 0.25)   # of the next token in the loss, the one after it, and the third [4]
PREFIX_WEIGHTS = (0.25, 0.20, 0.15, 0.10, 0.05)   # of the next token's prefix: stage 0, quarters of stage 1
AVERAGES = (                 # running averages of weights, blended into them at the end in this order [4]
    # of               window  every  phase  last  rate     folded  share     see ticks_at
    ("w_head w_embed", 298,    2,     1,     0,    2 / 299, True,   0.65),
    ("vo mlp",         250,    4,     1,     0,    4 / 53,  False,  1.0),
    ("w_value",        250,    4,     3,     0,    4 / 53,  False,  1.0),
    ("qk",             298,    4,     1,     2,    2 / 75,  False,  0.55),
    ("vo mlp",         298,    4,     1,     2,    2 / 75,  False,  0.3493),
)


class Refusal(Exception):
    """Something the user can mend. It is shown without a traceback."""


@dataclass(frozen=True)
class Stage:
    """One row of the curriculum: shapes and windows in tokens, lr a factor on every learning rate."""
    T: int
    max_doc: int         # documents are cut to this many tokens
    short: int           # attention window of most layers
    long: int            # attention window of the others
    lr: float


@dataclass(frozen=True)
class StepPlan:
    """What the loader must know of a step; see 9 for the schedules behind it."""
    T: int
    max_doc: int
    n_classes: int       # the loss of a micro-batch is taken over so many classes
    future: tuple        # weights of the next tokens as targets
    prefix: tuple        # () or (weight,) of the next token's longest proper prefix as a target


@dataclass(frozen=True)
class Pace:
    """What the optimizer must know of a step; see 9 for the schedules behind it."""
    lr: float            # factor on every learning rate
    mu: float            # share of the momentum, not the gradient, in what ANVIL takes as direction
    beta: float          # decay of its fast rail
    blend: float         # weight of the fast rail; the rest is the slow one's
    event: int = 0       # 0, or for how many pairs of steps the sparse tables are updated now
    tied: bool = False   # head and embedding are one matrix
    parts: bool = False  # from the next step on they are two
    ticks: tuple = ()    # rate of each of AVERAGES, 0: none now


@dataclass(frozen=True)
class Config:
    """All settings of a run; the defaults are the record."""
    # the run
    preset: str = "record"
    seed: int = 1                # initial values only; never the data order
    runs: int = 1                # so many runs in one process, with seeds from `seed` on, a log for each
    fast: str = "all"            # what a GPU runs fast: all | none | NAME,... | all,-NAME,... (rows of FAST)
    stop: int = 0                # end after this many steps and leave the schedule as it is; 0: all
    val_every: int = 0           # validate every so many steps as well as at the end; 0: only at the end
    save: str = ""               # write the final weights to this file
    load: str = ""               # answer `sample` from the weights in this file, and train nothing
    sample: str = ""             # text to continue
    sample_tokens: int = 64
    top_k: int = 1               # draw each token from the k likeliest; 1 takes the likeliest
    log_dir: str = "logs"
    hashes: bool = False         # one log line per step with the CRC-32 of each micro-batch
    # data; paths are relative to the working directory
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    vocab_file: str = "data/gpt2_vocab.bin"
    repeat: bool = False         # allow the training data to be read more than once
    val_tokens: int = 10_485_760
    val_seq: int = 262_144       # validation tokens are scored in streams of this length
    # network
    d_model: int = 768
    n_heads: int = 6
    d_head: int = 128            # of a wide head; q and k of a narrow one have half as many channels
    d_mlp: int = 2816
    dtype: str = "bf16"          # of weights and activations: bf16 or fp32
    scale_narrow: float = 0.13   # softmax scales of the first stage; YaRN raises them with the windows
    scale_wide: float = 0.085
    ngram_rows: int = 84_602_880   # of the table of n-grams, over all ranks; 0: no table
    fold_case: bool = True       # n-grams do not tell A from a
    pointer_block: int = 2048    # the pointer looks back into the block of the stream before; 0: no pointer
    val_pointer_block: int = 8192
    # schedule
    n_micro: int = 8             # micro-batches of one global step
    t_factor: float = 1.0        # factor on every stage's T, for GPUs with less memory
    n_sched: int = 978           # scheduled steps; n_steps and every boundary follow from it
    val_long: int = 2560         # long window at the final validation
    lr_floor: float = 0.30       # absolute: not a factor on the stage's lr
    p_early: int = 10_240        # classes in the loss of stages 0 and 1
    p_middle: int = 14_336       # of the first two thirds of stage 2
    p_late: int = 24_576         # of its last third; from then on all
    cooldown_from: float = 0.2   # share of the scheduled steps after which the lr falls
    mu_low: float = 0.85
    mu_high: float = 0.93
    mu_rise: int = 240           # steps from mu_low to mu_high at n_steps = 1050
    mu_fall: int = 50            # steps back to mu_low at the end, likewise
    slow_from: int = 514         # step from which ANVIL's slow rail has a part, likewise
    stages: tuple = (
        #     T      max_doc  short   long    lr
        Stage(16_384,    896,   128,   384, 1.0),
        Stage(32_768,   2048,   384,   896, 1.52),
        Stage(49_152,   3072,   640,  1408, 1.73),
        Stage(40_960,   3072,   640,  1408, 1.5793),   # 1.73 (20/24) ** 0.5
        Stage(16_384,   3072,   768,  1664, 1.0),      # the extension runs at lr_floor
    )
    # optimizers
    anvil_lr: float = 0.023
    anvil_wd: float = 2.25       # decay is wd * lr * lr: it falls with the square of the schedule
    adam_lr: float = 0.008
    adam_wd: float = 0.005       # likewise, times the row's own factor
    adam_eps: float = 1e-10
    ngram_lr: float = 1.0        # factor on the rate of the table of n-grams
    # limits in seconds
    join_limit_s: int = 120      # all ranks must have joined
    start_limit_s: int = 600     # a collective or a phase before the clock starts
    step_limit_s: int = 60       # a step, a collective or a validation stream once it has started

    @property
    def stage_ends(self):
        """Step at which each of the five stages ends; the last one is the number of steps."""
        r = min(1.0, self.n_sched / REFERENCE_SCHED)
        inserted, extension = round(N_INSERTED * r), round(N_EXTENSION * r)
        e0, e1, e2, e3 = (round(share / STAGE_SHARES[-1] * self.n_sched) for share in STAGE_SHARES)
        return e0, e1, e2 + inserted, e3 + inserted, e3 + inserted + extension

    @property
    def n_steps(self):
        """Steps of the whole schedule."""
        return self.stage_ends[-1]

    @property
    def shrink(self):
        """What step numbers and spans that are stated for n_steps = 1050 are multiplied by."""
        return min(1.0, self.n_steps / REFERENCE_STEPS)

    @property
    def n_run(self):
        """Steps that this run takes."""
        return min(self.stop, self.n_steps) if self.stop else self.n_steps


RECORD = Config()
PRESETS = {
    "record": RECORD,
    "solo": replace(   # what one of 8 GPUs does; with 1/8 of the tokens a step Adam wants a lower rate
        RECORD, preset="solo", n_micro=1, adam_lr=0.004, val_tokens=5_242_880, ngram_rows=10_575_360,
        train_files="data/proxy/proxy_train_*.bin", val_files="data/proxy/proxy_val_*.bin"),
    "tiny": replace(
        RECORD, preset="tiny", fast="none", n_sched=39, d_model=96, d_head=16, d_mlp=352, dtype="fp32",
        adam_lr=0.028, anvil_lr=0.03, scale_narrow=0.37, scale_wide=0.24, ngram_rows=65_536,
        pointer_block=128, val_pointer_block=512, ngram_lr=0.1, p_early=2048, p_middle=2048, p_late=2048,
        train_files="data/sample/sample_train_*.bin", val_files="data/sample/sample_val_*.bin",
        val_tokens=16_384, val_seq=2048, val_long=160,
        stages=(Stage(256, 112,  8,  24, 1.0),
                Stage(512, 256, 24,  56, 1.52),
                Stage(768, 384, 40,  88, 1.73),
                Stage(640, 384, 40,  88, 1.5793),
                Stage(256, 384, 48, 104, 1.0))),
}


def nearest(word, choices):
    """' Did you mean ...?' for a misspelt word, or nothing."""
    close = difflib.get_close_matches(word, choices, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def value_of(name, text, default):
    """The text of key=value as the type that the field has."""
    kind = type(default)
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "an integer"}.get(kind, "a number")
        raise Refusal(f"{name}={text}: want {wanted}, like {default}.") from None


def check_config(cfg):
    """Refuse settings that cannot work together, naming both numbers."""
    least = dict.fromkeys(("stop", "val_every", "seed", "ngram_rows", "pointer_block"), 0) | dict.fromkeys(
        ("runs", "n_sched", "n_micro", "val_tokens", "val_seq", "val_long", "top_k", "d_head", "d_mlp",
         "p_early", "p_middle", "p_late", "mu_rise", "mu_fall", "val_pointer_block", "join_limit_s",
         "start_limit_s", "step_limit_s"), 1)
    most = dict.fromkeys(("p_early", "p_middle", "p_late"), VOCAB_PADDED) | {"top_k": VOCAB}
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        if value != value or value in (math.inf, -math.inf):
            raise Refusal(f"{f.name}={value}: want a finite number.")
        if f.name in least and value < least[f.name]:
            raise Refusal(f"{f.name}={value}: want at least {least[f.name]}.")
        if f.name in most and value > most[f.name]:
            raise Refusal(f"{f.name}={value}: want at most {most[f.name]}, all that there are.")
    if cfg.n_steps % 4 != 2:     # so that the last step is one of Adam and of the tables
        near = [s for s in range(max(1, cfg.n_sched - 8), cfg.n_sched + 9)
                if replace(cfg, n_sched=s).n_steps % 4 == 2]
        below, above = [s for s in near if s < cfg.n_sched][-1:], [s for s in near if s > cfg.n_sched][:1]
        raise Refusal(f"n_sched={cfg.n_sched} makes {cfg.n_steps} steps; their number must be 2 mod 4. "
                      f"Take n_sched={' or '.join(str(s) for s in below + above)}.")
    more, score = cfg.ngram_rows % ROWS_MULTIPLE, 2 * cfg.d_head * max(cfg.scale_narrow / 2, cfg.scale_wide)
    odd = [stage.T for stage in cfg.stages if stage.T * cfg.t_factor < 1 or stage.T * cfg.t_factor % 1]
    for wrong, text in (
        (cfg.val_tokens % cfg.val_seq,
         f"val_tokens={cfg.val_tokens} is no multiple of val_seq={cfg.val_seq}. "
         f"Take val_tokens={max(1, cfg.val_tokens // cfg.val_seq) * cfg.val_seq}."),
        (cfg.n_heads * cfg.d_head != cfg.d_model or cfg.n_heads % 2 or cfg.d_head % 4 or cfg.d_model % 12,
         f"n_heads={cfg.n_heads} times d_head={cfg.d_head} must be d_model={cfg.d_model}, n_heads even, "
         f"d_head a multiple of 4, d_model a multiple of 12."),
        (score > MOST_SCORE,     # the 2 in it: 2 ** 0.5 for keys joined of two halves (4.1), 1.4 for YaRN
         f"scale_narrow={cfg.scale_narrow}, scale_wide={cfg.scale_wide}: scores up to {score:.0f}, want at "
         f"most {MOST_SCORE}. Take at most {MOST_SCORE / cfg.d_head:g} and {MOST_SCORE / cfg.d_head / 2:g}."),
        (more, f"ngram_rows={cfg.ngram_rows}: want a multiple of {ROWS_MULTIPLE}, or 0 for no table. "
               f"Take ngram_rows={cfg.ngram_rows + ROWS_MULTIPLE - more}."),
        (odd, f"t_factor={cfg.t_factor}: T={[*odd, 0][0]} times it is no positive whole number. "
              f"Take a power of two, like 0.5."),
        (not 0 <= cfg.cooldown_from < 1,
         f"cooldown_from={cfg.cooldown_from}: want at least 0 and less than 1."),
        (cfg.dtype not in ("fp32", "bf16"), f"dtype={cfg.dtype}: want fp32 or bf16."),
        (cfg.save and cfg.runs > 1,
         f"save={cfg.save} with runs={cfg.runs}: the file holds the weights of one run. Take runs=1."),
        (bool(cfg.load) != bool(cfg.sample),
         "load=FILE and sample=TEXT go together: the weights in the file continue the text."),
    ):
        if wrong:
            raise Refusal(text)


def parse(argv):
    """Config for the words of a command line: [preset] [key=value ...]. Raises Refusal."""
    words, cfg = list(argv), RECORD
    if words and "=" not in words[0]:
        name = words.pop(0)
        if name not in PRESETS:
            raise Refusal(f"no preset named {name!r}.{nearest(name, PRESETS)} "
                          f"Presets: {', '.join(PRESETS)}.")
        cfg = PRESETS[name]
    keys = [f.name for f in fields(Config) if f.name not in ("preset", "stages")]
    changes = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in keys:
            raise Refusal(f"{word!r}: " + ("no setting of that name." if equals else "want key=value.")
                          + nearest(name, keys) + f" Settings: {', '.join(keys)}.")
        changes[name] = value_of(name, text, getattr(cfg, name))
    cfg = replace(cfg, **changes)
    check_config(cfg)
    scaled = tuple(replace(stage, T=int(stage.T * cfg.t_factor)) for stage in cfg.stages)
    return replace(cfg, stages=scaled)   # frozen: nothing changes a setting after this line


# ======== 2. Host ============================================================== budget 505 ====
# The only door to the outside: environment, processes, time, the log. One rank is no special case, its
# collectives are copies. Invariants:
# (1) All ranks issue the same collectives in the same order; no other thread than the main one issues any.
# (2) Whatever ends a rank early goes through Guard.fail, which never returns and makes every rank end.
# (3) The log file is created for this run alone, and only its own run ever writes to it.
# (4) While the clock runs the log is kept in memory; it is written when the clock stands.

WATCH_S = 0.25           # how often a guard looks
GRACE_S = 3.0            # how long a failing rank waits for rank 0 to write the log
LAST_RESORT_S = 10.0     # a failing rank ends after this, whatever blocks it
SHOW_S = 0.5             # at most one step line per half second goes to the terminal
SAMPLE_MS = 500          # between two readings of a GPU's clock, power and temperature
SAMPLED = ("gpu_sm_mhz", "gpu_power_w", "gpu_temp_c")
MS, MIB, GIB = 1000, 1 << 20, 1 << 30
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
LAUNCH_NAMES = (*RANK_NAMES, "MASTER_ADDR", "MASTER_PORT")   # what torchrun sets
BF16_CAPABILITY = (8, 0)
PROC_START = 19          # starttime among the fields of /proc/self/stat that follow the name


# ---- 2.1 joining: the launcher's variables and the store that all ranks share --------------------

class RunFailed(Exception):
    """The run itself went wrong (a loss that is not finite, data at an end). Shown without a traceback."""


def launch_env():
    """(rank, local rank, world) as torchrun tells them, or (0, 0, 1) where it tells nothing."""
    missing = [name for name in LAUNCH_NAMES if not os.environ.get(name)]
    if not any(os.environ.get(name) for name in RANK_NAMES):
        return 0, 0, 1
    if missing:
        found = [name for name in LAUNCH_NAMES if name not in missing]
        raise Refusal(f"the environment has {', '.join(found)} but not {', '.join(missing)}. Either start "
                      f"with torchrun --nproc_per_node=N train_gpt.py, which sets all five, or unset "
                      f"{', '.join(found)}.")
    numbers = (*RANK_NAMES, "MASTER_PORT")
    wrong = [f"{name}={os.environ[name]}" for name in numbers if not os.environ[name].isdigit()]
    if wrong:
        raise Refusal(f"the environment has {', '.join(wrong)}: want numbers. Start with torchrun.")
    rank, local_rank, world = (int(os.environ[name]) for name in RANK_NAMES)
    if rank >= world:
        raise Refusal(f"RANK={rank} with WORLD_SIZE={world}: want a rank below {world}. Start with torchrun.")
    return rank, local_rank, world


def join(rank, world, limit_s):
    """The store that all ranks share, once every rank is there. Raises Refusal naming the absent ones."""
    if world == 1:
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"   # torchrun keeps the store itself
    limit = datetime.timedelta(seconds=limit_s)
    try:
        store = dist.TCPStore(address, port, is_master=rank == 0 and not hosted, timeout=limit,
                              wait_for_workers=False)
    except dist.DistError as e:
        why = str(e).splitlines()[0].rstrip(".")
        raise Refusal(f"rank {rank} waited {limit_s} s for the store of rank 0 at {address}:{port}: {why}. "
                      f"Start all {world} ranks, best with torchrun.") from None
    store.set(f"here/{rank}", "1")
    until = time.monotonic() + limit_s   # a collective would wait too, but could not say for whom
    while absent := [r for r in range(world) if not store.check([f"here/{r}"])]:
        if time.monotonic() > until:
            names = ", ".join(map(str, absent))
            raise Refusal(f"rank {rank} of {world} waited {limit_s} s for rank {names}, which did not start. "
                          f"Start all {world} ranks, best with torchrun, or give them more time with "
                          f"join_limit_s=N.")
        time.sleep(WATCH_S)
    return store


# ---- 2.2 Comm: collectives over NCCL, gloo or one rank -------------------------------------------

class Pending:
    """A collective under way; its result may be read after wait().

    On the CPU it starts only at wait(): whoever forgets to wait reads stale numbers and fails a test,
    where gloo alone would often have finished by luck."""

    def __init__(self, start, deferred):
        self.start = start
        self.work = None if deferred else start()

    def wait(self):
        """On the CPU return when it is done; on a GPU make the current stream wait for it."""
        work = self.start() if self.work is None else self.work
        if work is not None:
            work.wait()


class Comm:
    """The collectives of a run over NCCL (GPU), gloo (CPU) or nothing (one rank)."""

    def __init__(self, cfg, rank, local_rank, world):
        self.rank, self.world = rank, world
        self.store = join(rank, world, cfg.join_limit_s)
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            if local_rank >= torch.cuda.device_count():
                raise Refusal(f"rank {rank} wants GPU {local_rank}, present are {torch.cuda.device_count()}. "
                              f"Start torchrun with --nproc_per_node={torch.cuda.device_count()} or fewer.")
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
            capability = torch.cuda.get_device_capability()
            if cfg.dtype == "bf16" and capability < BF16_CAPABILITY:
                raise Refusal(f"{torch.cuda.get_device_name()} has compute capability {capability}, want at "
                              f"least {BF16_CAPABILITY} for dtype=bf16. Take dtype=fp32 fast=none.")
        if world > 1:
            on_gpu = self.device.type == "cuda"
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", store=dist.PrefixStore("group", self.store), rank=rank,
                world_size=world, timeout=datetime.timedelta(seconds=cfg.start_limit_s),
                device_id=self.device if on_gpu else None)

    def _run(self, collective, *tensors):
        if self.world == 1:
            return Pending(lambda: None, deferred=False)
        return Pending(lambda: collective(*tensors, async_op=True), deferred=self.device.type == "cpu")

    def all_reduce(self, x):
        """Sum of x over the ranks, in place."""
        return self._run(dist.all_reduce, x)

    def reduce_scatter(self, x):
        """(pending, part): part is this rank's slice of x along the first axis, which becomes the sum."""
        part = x.chunk(self.world)[self.rank]
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor   # up to 2.12
        return self._run(scatter, part, x), part

    def all_gather(self, x):
        """Every rank's slice of x along the first axis goes to all ranks, in place."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._run(gather, x, x.chunk(self.world)[self.rank])

    def all_to_all(self, x, sent, got):
        """(pending, out): rank r gets the next sent[r] rows of x; out has got[r] rows of each, in order."""
        out = x if self.world == 1 else x.new_empty(sum(got), *x.shape[1:])
        return self._run(dist.all_to_all_single, out, x, got, sent), out

    def collect(self, value):
        """[value of rank 0, value of rank 1, ...] for small Python values, off the clock."""
        values = [value]
        if self.world > 1:
            values = [None] * self.world
            dist.all_gather_object(values, value)
        return values

    def settle(self):
        """Return when this rank's device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def meet(self):
        """Wait until every rank has finished its work: the seconds of this host's clock at that moment."""
        moments = []
        for _ in range(2):       # with the second, no rank works on before all have read their clocks
            self.settle()
            self.all_reduce(torch.ones(1, device=self.device)).wait()
            self.settle()
            moments.append(time.perf_counter())
        return moments[0]

    def set_limit(self, limit_s):
        """From here on a collective that takes longer than this ends the run."""
        if self.world > 1:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=limit_s))

    def close(self):
        """Leave the group; nothing that matters comes after this."""
        if self.world > 1:
            timer = threading.Timer(LAST_RESORT_S, os._exit, (0,))   # NCCL's teardown can hang
            timer.daemon = True
            timer.start()
            dist.destroy_process_group()
            timer.cancel()


# ---- 2.3 Clock and Log: what a run is judged by --------------------------------------------------

class Clock:
    """Seconds of the timed section: it starts and stops when all ranks have, and pauses the same way."""

    def __init__(self, comm):
        self.comm, self.total, self.since, self.origin = comm, 0.0, None, None

    def start(self):
        """Run on, from the moment at which all ranks are ready."""
        self.since = self.comm.meet()
        if self.comm.device.type == "cuda":
            self.origin = torch.cuda.Event(enable_timing=True)
            self.origin.record()

    def stop(self):
        """Stand, from the moment at which the last rank has finished its work."""
        self.total, self.since = self.total + self.comm.meet() - self.since, None

    def now(self):
        """Seconds so far, on this host, without waiting for anything."""
        return self.total + (time.perf_counter() - self.since if self.since is not None else 0.0)

    def stamp(self):
        """A function that tells the seconds at which the device got here; ask it when that work is done."""
        if self.origin is None:          # a CPU
            return lambda seconds=self.now(): seconds
        total, origin, here = self.total, self.origin, torch.cuda.Event(enable_timing=True)
        here.record()
        return lambda: total + origin.elapsed_time(here) / MS

    def over_ranks(self):
        """(longest, longest - shortest) of the ranks' totals."""
        totals = self.comm.collect(self.total)
        return max(totals), max(totals) - min(totals)


class Telemetry:
    """SM clock, power and temperature of all GPUs in use, while a clock runs, as nvidia-smi tells them.

    One child of rank 0 writes a line per GPU twice a second, a thread here reads them. samples: (seconds on
    the clock, GPU, MHz, W, degrees C). Without nvidia-smi, or on a CPU, there are none."""

    def __init__(self, comm):
        self.clock, self.samples, self.child = None, [], None
        on_gpu = comm.device.type == "cuda"
        uuids = comm.collect(f"GPU-{torch.cuda.get_device_properties(comm.device).uuid}" if on_gpu else "")
        if comm.rank == 0 and on_gpu and shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=uuid,clocks.sm,power.draw,temperature.gpu", "-lms",
                     str(SAMPLE_MS), "-i", ",".join(uuids), "--format=csv,noheader,nounits"]
            # The pipe ends the child when this process dies, however it dies.
            self.child = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(uuids,), daemon=True, name="telemetry").start()

    def _read(self, uuids):
        for line in self.child.stdout:
            uuid, *numbers = line.strip().split(", ")
            if self.clock is not None and self.clock.since is not None and uuid in uuids:
                with contextlib.suppress(ValueError):        # a driver may say [N/A]
                    self.samples.append((self.clock.now(), uuids.index(uuid), *map(float, numbers)))

    def summary(self):
        """Footer lines on the GPUs while the clock ran, n/a without samples."""
        columns = list(zip(*self.samples))[2:] or [()] * len(SAMPLED)
        return [f"{name}: " + (f"mean {np.mean(x):.0f}, least {min(x):.0f}, most {max(x):.0f}"
                               if x else "n/a") for name, x in zip(SAMPLED, columns)]

    def end(self):
        """No more samples."""
        if self.child is not None:
            self.child.terminate()
            self.child.wait()


def process_age_s():
    """Seconds since this process was started, interpreter and imports included; 0 where /proc is missing."""
    try:
        with open("/proc/self/stat", encoding="ascii") as f:
            ticks = int(f.read().rpartition(")")[2].split()[PROC_START])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Log:
    """The log of a run: `key: value` and fixed-column lines, kept by rank 0; on others a call does nothing.

    path is the same on every rank: if rank 0 is killed, the lowest living rank appends the FAILED line."""

    def __init__(self, cfg, comm, phase_from):
        self.lock, self.lines, self.shown, self.file, path = threading.Lock(), [], 0.0, None, None
        self.phase_from = phase_from     # age of the process at which the next phase begins
        if comm.rank == 0:
            self.file, path = self._create(cfg)
        self.path = comm.collect(path)[0]

    @staticmethod
    def _create(cfg):
        try:
            os.makedirs(cfg.log_dir, exist_ok=True)
            while True:
                stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
                path = os.path.join(cfg.log_dir, f"{stamp}_{cfg.preset}_seed{cfg.seed}.log")
                try:
                    return open(path, "x", encoding="utf-8"), path
                except FileExistsError:   # two runs in one second: the later one takes the next second
                    time.sleep(SHOW_S)
        except OSError as e:
            raise Refusal(f"log_dir={cfg.log_dir}: no log can be created there ({e.strerror}). "
                          f"Choose another folder with log_dir=PATH.") from None

    def line(self, text, often=False):
        """Add a line; `often` marks lines of which the terminal shows at most two a second."""
        if self.file is None:
            return
        with self.lock:
            self.lines.append(text)
        if not often or time.monotonic() - self.shown > SHOW_S:
            self.shown = time.monotonic()
            self.show(text)

    @staticmethod
    def show(text):
        """Text for the terminal; one that is gone costs the line, not the run."""
        with contextlib.suppress(OSError):
            print(text, flush=True)

    def phase(self, name):
        """One line with the seconds that a phase of the start took, from the end of the one before."""
        age = process_age_s()
        self.line(f"phase: {name} {age - self.phase_from:.1f} s")
        self.phase_from = age

    def flush(self):
        """Write what has been collected; called while the clock stands."""
        if self.file is not None:
            with self.lock:
                self.file.write("".join(text + "\n" for text in self.lines))
                self.lines.clear()
                self.file.flush()

    def end(self, how):
        """The last line: `end: ok` or `end: FAILED what`."""
        self.line(f"end: {how}")
        self.flush()

    def end_for_rank_0(self, how):
        """Append the last line in place of a rank 0 that could not, unless somebody has."""
        with open(self.path, "r+", encoding="utf-8") as f:
            if not any(text.startswith("end: ") for text in f.read().splitlines()):
                f.write(f"end: {how}\n")


# ---- 2.4 Guard: how the failure of one rank ends all ---------------------------------------------

def in_collective(trace):
    """Whether an error came out of a collective; one that did not is this rank's own."""
    codes = Pending.wait.__code__, Comm.collect.__code__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


class Guard:
    """Makes the failure of one rank the end of all, with one FAILED line on stderr and one in the log.

    A daemon thread watches three things: whether another rank has reported a failure in the store, whether
    the launcher has sent SIGTERM because a rank died without a word, and whether this rank still makes
    progress. It works while the main thread is blocked in a collective, and ends the process itself."""

    def __init__(self, comm, limit_s):
        self.rank, self.world, self.limit_s, self.log = comm.rank, comm.world, limit_s, None
        self.store = comm.store.clone()   # made while the store lives: cloning a dead one waits for minutes
        self.store.set_timeout(datetime.timedelta(seconds=GRACE_S))
        self.once, self.beat, self.over = threading.Lock(), time.monotonic(), False
        # A Python signal handler waits for the main thread, which may sit in a collective for a minute. The
        # C level does not: it writes the signal's number to a pipe, and the thread below reads it.
        self.ear, mouth = os.pipe()
        os.set_blocking(mouth, False)
        for number in (signal.SIGTERM, signal.SIGINT):   # without a handler nothing is written to the pipe
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(mouth)
        sys.excepthook = self._uncaught
        threading.excepthook = lambda e: self._uncaught(e.exc_type, e.exc_value, e.exc_traceback)
        self.thread = threading.Thread(target=self._watch, daemon=True, name="guard")
        self.thread.start()

    def step(self, limit_s=None):
        """Progress was made; the next sign of it must come within limit_s from here."""
        self.limit_s = limit_s or self.limit_s
        self.beat = time.monotonic()

    def finish(self):
        """The run is complete: what happens from here on is no failure."""
        self.over = True
        self.thread.join()   # Trap: a thread that is in the store while Python ends aborts the process

    def _uncaught(self, kind, error, trace):
        if issubclass(kind, (Refusal, RunFailed)):
            self.fail(str(error))
        sys.__excepthook__(kind, error, trace)
        why = f"{kind.__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        self.fail(self._who_died(why) if isinstance(error, RuntimeError) and in_collective(trace) else why)

    def _who_died(self, why):
        """A broken collective or a SIGTERM is mostly the echo of another rank's end: name that rank."""
        try:
            self.store.set("ending", "1")            # asks the guards of all ranks for a sign of life
            self.store.set(f"ending/{self.rank}", "1")
            until = time.monotonic() + GRACE_S / 2
            while time.monotonic() < until:
                if self.store.check(["failed"]):
                    return why
                time.sleep(WATCH_S)
            # A living rank has put up its sign by now; one that was killed has not.
            silent = [r for r in range(self.world) if not self.store.check([f"ending/{r}"])]
            return f"rank {', '.join(map(str, silent))} died without a word; {why}" if silent else why
        except RuntimeError:
            return f"{why}; the store is gone"

    @staticmethod
    def _tell(text):
        with contextlib.suppress(OSError, ValueError):   # the terminal may be gone, the log is still to end
            sys.stderr.write(f"FAILED: {text}\n")
            sys.stderr.flush()

    def fail(self, why):
        """Report, see to the log's last line, end this process with code 1. Never returns."""
        if self.over:
            os._exit(0)
        if not self.once.acquire(blocking=False):
            time.sleep(LAST_RESORT_S)    # another thread is ending this process
        timer = threading.Timer(LAST_RESORT_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        cause = f"rank {self.rank}: {why}"
        store = self.store
        try:
            if store.add("failures", 1) == 1:
                self._tell(cause)
                store.set("failed", cause)
            cause = store.get("failed").decode()
        except RuntimeError:             # the store died with rank 0 or the launcher
            store = None
            self._tell(cause)
        if self.log is not None:
            self._end_log(f"FAILED {cause}".replace("\n", " "), store)
        os._exit(1)

    def _end_log(self, how, store):
        """Rank 0 writes; if it does not, the lowest living rank does, since each waits a little longer."""
        try:
            if self.rank == 0:
                self.log.end(how)
                if store is not None:
                    store.set("logged", "1")
                return
            until = time.monotonic() + GRACE_S + self.rank * WATCH_S
            while time.monotonic() < until:
                if store is not None and store.check(["logged"]):
                    return
                time.sleep(WATCH_S / 2)
            self.log.end_for_rank_0(how)
        except (OSError, RuntimeError) as e:
            self._tell(f"rank {self.rank} cannot write the log: {e}")

    def _watch(self):
        while not self.over:
            if select.select([self.ear], [], [], WATCH_S)[0]:
                number = os.read(self.ear, 1)[0]
                if number == signal.SIGINT:
                    self.fail("interrupted (SIGINT)")
                self.fail(self._who_died("told to stop by the launcher (SIGTERM)"))
            try:
                reported = self.store.check(["failed"])
                if self.store.check(["ending"]):
                    self.store.set(f"ending/{self.rank}", "1")
            except RuntimeError:
                if not self.over:
                    self.fail("the store is gone, so rank 0 or the launcher is")
                return
            if reported:
                self.fail("another rank failed")
            if time.monotonic() - self.beat > self.limit_s:
                self.fail(f"no progress for {self.limit_s} s: a rank hangs, or the machine is too slow; "
                          f"step_limit_s=N (before the first step start_limit_s=N) gives more time")


def told(default, *query):
    """What a program prints for a query, or the default where there is none or it fails."""
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=LAST_RESORT_S,
                              check=True).stdout.strip() or default
    except (OSError, subprocess.SubprocessError):
        return default


def host_lines(comm):
    """What the log's header says about the machine and the software."""
    on_gpu = comm.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else f"CPU {platform.machine()}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    cuda = ""
    if on_gpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
        triton = next((d.version for d in metadata.distributions(name="triton")), "none")
        driver = told("n/a", "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()[0]
        cuda = f", CUDA {torch.version.cuda}, NCCL {nccl}, Triton {triton}, driver {driver}"
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads a rank"
    return [f"host: {comm.world} x {device}, {threads}",
            f"software: {versions}{cuda}, {platform.system()} {platform.release()}"]


def script_lines():
    """Hash of this file and the commit it lies in; `git: none` outside a checkout."""
    here = os.path.abspath(__file__)
    with open(here, "rb") as f:
        sha = hashlib.sha256(f.read()).hexdigest()
    git = told("none", "git", "-C", os.path.dirname(here), "describe", "--always", "--dirty")
    return [f"script: {sha}", f"git: {git}"]


# ======== 3. Numbers ============================================================ budget 45 ====
# Number formats, and the registry of fast replacements, without knowledge of who uses them. Weights and
# activations have the format of the run, sums and states of optimizers are fp32; 4.6 has the fp32 masters of
# bf16 weights.

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NORM_EPS = 2.0 ** -23        # fp32 epsilon, for bf16 inputs too: bf16's own would drown embeddings of 0.005
BF16_TOL = 0.01              # some roundings of 2^-9 each


def rms_norm(x):
    """x divided by its root mean square over the last axis, with no learned gain."""
    return F.rms_norm(x, x.shape[-1:], eps=NORM_EPS)


@dataclass(frozen=True)
class Fast:
    """A replacement of a plain computation by the same computation, rounding aside; one row of FAST.

    kind     bitwise: the same bits. reorder: the same formula, rounded elsewhere. approx: other numbers
    ref      plain PyTorch, the specification; it runs anywhere
    fast     what runs on a GPU
    example  (rand, size) -> (arguments, keyword arguments) for both; rand(*shape) draws normal numbers,
             size is "small" or "record"
    build    "": runs as it is. glue, step: compiled; glue only where gradients are wanted
    tol      bound on the relative error, in norm, of every result, changed argument and gradient in bf16
    """
    kind: str
    ref: object
    fast: object
    example: object
    build: str = ""
    tol: float = BF16_TOL


FAST = {}                    # one row per replacement, beside what it replaces in section 4


def references():
    """The plain computation of every row of FAST, by name: what `fast=none` and the CPU run."""
    return SimpleNamespace(**{name: row.ref for name, row in FAST.items()})


# ======== 4. Kernels ========================================================== budget 1,450 ====
# Computations that a GPU does in another way than plain PyTorch says it: each beside its reference, which is
# the specification, runs on the CPU and with fast=none, and is blocked, so that neither a (T, T) nor a (T, V)
# tensor exists at any size. They know nothing of layers or steps. Every pair is a row of FAST.
# Kernels are written in Triton and stand behind ops of one library, whose results are arguments: they go
# where the caller wants them, nothing is copied, no op waits for the device, a graph can capture them all.

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    class Missing:
        """In place of Triton where there is none: kernels can be read, a launch says what is missing."""
        constexpr = None

        def __init__(self, *what, **how):
            pass

        @classmethod
        def jit(cls, kernel=None, **how):
            return cls(kernel) if kernel else cls

        def __getitem__(self, grid):
            raise RuntimeError("this kernel needs the package triton, which is not installed: install it, or "
                               "run with fast=none")

    triton = tl = TensorDescriptor = Missing

# Two copies of this file can be imported under two names, so each has a library of its own.
LIBRARY = torch.library.Library("speedrun_" + re.sub(r"\W", "_", __name__), "DEF")
ANYWHERE = "CompositeExplicitAutograd"   # the device of an op: a GPU, or a CPU under Triton's interpreter


def op(name):
    """An op of LIBRARY."""
    return getattr(getattr(torch.ops, LIBRARY.ns), name).default


EXAMPLE_T = {"small": 192, "record": 49_152}
EXAMPLE_H, EXAMPLE_E, EXAMPLE_F, EXAMPLE_V = 6, 128, 2816, 50_304   # widths of the record
EXAMPLE_CUT = 2.5            # a normal number above this begins a document: one in 161 tokens
EXAMPLE_QKV, EXAMPLE_EVENTS = 3, 5
EXAMPLE_PART = 64            # windows are T over this; so many rows of one id; so many rows of a matrix


# ---- 4.1 attention: inside documents, over a window ----------------------------------------------

ATTN_ROWS = {"cpu": 128, "cuda": 1024}   # queries that attention takes at once for windows up to this
ATTN_MOST = 1024             # and at most, for any window


class Documents:
    """The documents of a stream. start: (T,) int32, where in the stream each token's document begins."""

    def __init__(self, start):
        self.start = start

    @functools.cached_property
    def ends(self):
        """Where each token's document ends, its last place + 1: (T,) int32."""
        return torch.searchsorted(self.start, self.start, right=True, out_int32=True)

    @functools.cached_property
    def goes_on(self):
        """Whether a token has a predecessor in its document: (T, 1) bool."""
        position = torch.arange(len(self.start), device=self.start.device)
        return (self.start < position)[:, None]

    @functools.cached_property
    def doubled(self):
        """The same documents in a stream with two places for every token."""
        return Documents(2 * self.start.repeat_interleave(2))


def paired(x):
    """Heads 2p and 2p + 1 in one stream of two places a token: (T, H, E) -> (2T, H/2, E)."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(0, 1)


def unpaired(x):
    """The inverse of paired."""
    return x.unflatten(0, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _attend(q, k, v, bias):
    """Softmax attention of one block. q: (I, H, E), k, v: (J, H, E), bias: (I, J) fp32 -> (I, H, E)."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))                               # (H, ., E)
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) + bias     # (H, I, J)
    return (scores.softmax(-1).type_as(v) @ v).transpose(0, 1)


def attention_ref(q, k, v, documents, *, window, pairs=False):
    """Causal attention inside documents over the last `window` places and the place itself.

    math     y_i = sum_j softmax_j(q_i k_j) v_j over start[i] <= j and i - window <= j <= i
    shapes   q, k: (T, H, E), v, y: (T, H, E of v)
    dtypes   that of q, k, v; scores in fp32
    With pairs, heads 2p and 2p + 1 share a stream in which a token has two places, see paired. Blocks of
    queries look at the keys [first - window, stop); each is recomputed in the backward pass.
    """
    if pairs:
        q, k, v = map(paired, (q, k, v))
        return unpaired(attention_ref(q, k, v, documents.doubled, window=window))
    rows = min(ATTN_MOST, max(ATTN_ROWS[q.device.type], 2 ** math.ceil(math.log2(max(window, 1)))))
    position = torch.arange(len(q), device=q.device)
    outputs = []
    for start in range(0, len(q), rows):
        stop, first = min(start + rows, len(q)), max(start - window, 0)
        i, j = position[start:stop, None], position[None, first:stop]
        hidden = (j > i) | (j < i - window) | (j < documents.start[start:stop, None])
        bias = torch.zeros(hidden.shape, device=q.device).masked_fill(hidden, -math.inf)
        block = (q[start:stop], k[first:stop], v[first:stop], bias)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(_attend, *block, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(_attend(*block))
    return torch.cat(outputs)


# A stream is what attention runs over: the tokens of one head, or the two places that a token has in a pair
# of heads. Place i of stream h is head PLACES h + i % PLACES of token i // PLACES: kernels index it, nothing
# is copied. Query i sees key j if low(i) <= j <= i, with low(i) = max(start, i - window); key j is seen by
# query i if j <= i <= high(j), with high(j) = min(ends - 1, j + window). Neither bound ever decreases along a
# stream, so those of a tile's first and last place say which tiles it meets at all, and which of them have to
# be masked. What lies beyond T is read as zeros and masked, and not written.
# A left operand of a product is read from shared memory, or made anew in registers in each step of a loop:
# ptxas 12.8 to 13.0, but not 13.4, may give the registers of one that a loop only reads to another value.
# No maximum is taken out of scores before exp: those of normed rows, q times a scale, are at most
# sqrt(2) scale E, as key_offset joins halves of two rows. Programs of one tile, for all heads, run together.

ATTN_FORWARD = {             # (width of q and k, of v): (queries, keys) of a tile, warps, stages
    (64, 64): (64, 32, 4, 3),
    (64, 128): (64, 32, 4, 3),
    (128, 128): (64, 32, 4, 3),
}
ATTN_DQ = {
    (64, 64): (64, 32, 4, 3),
    (64, 128): (64, 64, 4, 2),
    (128, 128): (64, 64, 4, 2),
}
ATTN_DKV = {
    (64, 64): (32, 64, 4, 3),
    (64, 128): (64, 64, 4, 3),
    (128, 128): (64, 64, 4, 2),
}
LOG2E = math.log2(math.e)    # exponentials and logarithms in kernels have base 2
MMA_COLUMNS = 16             # the fewest that a product of tiles can have
TMA_BYTES = 16               # addresses and distances that descriptors can have are multiples of this
LSE_MULTIPLE = 4             # entries of fp32, the same


@triton.jit
def _tile(x, first, h, PLACES: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr):
    """Places [first, first + BLOCK) of stream h through the descriptor x, a right operand: (BLOCK, E)."""
    if PLACES == 1:
        return x.load([first, h * E])
    else:
        return x.load([first // PLACES, h * PLACES, 0]).reshape(BLOCK, E)


@triton.jit
def _rows(x, pitch, first, h, T, PLACES: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr):
    """_tile by the pointer x, into registers."""
    i = first + tl.arange(0, BLOCK)
    rows = x + (i // PLACES).to(tl.int64) * pitch + (h * PLACES + i % PLACES) * E
    return tl.load(rows[:, None] + tl.arange(0, E)[None, :], mask=(i < T)[:, None], other=0.0)


@triton.jit
def _held(x, pitch, first, h, T, PLACES: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr):
    """_tile for a left operand. Of pairs x is a pointer: what a descriptor reads stays in registers there."""
    if PLACES == 1:
        return _tile(x, first, h, PLACES, BLOCK, E)
    else:
        return _rows(x, pitch, first, h, T, PLACES, BLOCK, E)


@triton.jit
def _put(x, value, first, h, PLACES: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr):
    """Write value (BLOCK, E) to places [first, first + BLOCK) of stream h through the descriptor x."""
    if PLACES == 1:
        x.store([first, h * E], value.to(x.dtype))
    else:
        value = value.to(x.dtype).reshape(BLOCK // PLACES, PLACES, E)
        x.store([first // PLACES, h * PLACES, 0], value)


@triton.jit
def _low(start_ptr, i, T, window, PLACES: tl.constexpr):
    """The first key that query i sees."""
    return tl.maximum(tl.load(start_ptr + tl.minimum(i, T - 1) // PLACES) * PLACES, i - window)


@triton.jit
def _high(ends_ptr, j, T, window, PLACES: tl.constexpr):
    """The last query that sees key j."""
    return tl.minimum(tl.load(ends_ptr + tl.minimum(j, T - 1) // PLACES) * PLACES - 1, j + window)


@triton.jit
def _within(x, low, high):
    """Whether low <= x <= high, for low <= high: one comparison of numbers without a sign."""
    return (x - low).to(tl.uint32, bitcast=True) <= (high - low).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["T", "window", "lse_pitch"])
def _attention_kernel(q, k, v, y, lse_ptr, start_ptr, T, window, lse_pitch, q_pitch, PLACES: tl.constexpr,
                      I: tl.constexpr, J: tl.constexpr, E: tl.constexpr, E_V: tl.constexpr,
                      COLUMNS: tl.constexpr = MMA_COLUMNS, LOG2E: tl.constexpr = LOG2E):
    h, first = tl.program_id(0), tl.program_id(1) * I
    i = first + tl.arange(0, I)
    low = _low(start_ptr, i, T, window, PLACES)
    lowest = _low(start_ptr, first, T, window, PLACES)
    inside = _low(start_ptr, first + I - 1, T, window, PLACES)      # from here on all queries see
    q_tile = _held(q, q_pitch, first, h, T, PLACES, I, E)
    acc, total = tl.zeros((I, E_V), tl.float32), tl.zeros((I, COLUMNS), tl.float32)
    ones = tl.full((J, COLUMNS), 1.0, q_tile.dtype)
    for start in range(lowest // J * J, tl.minimum(first + I, T), J):
        s = tl.dot(q_tile, _tile(k, start, h, PLACES, J, E).T)
        edge = (start < inside) | (start + J > first)
        if edge:
            j = start + tl.arange(0, J)
            s = tl.where(_within(j[None, :], low[:, None], i[:, None]), s, float("-inf"))
        v_tile = _tile(v, start, h, PLACES, J, E_V)
        p = tl.exp2(s * LOG2E).to(v_tile.dtype)
        acc = tl.dot(p, v_tile, acc)
        total = tl.dot(p, ones, total)
    total = tl.max(total, 1)                # all columns are equal
    tl.store(lse_ptr + h * lse_pitch + i, tl.log2(total), mask=i < lse_pitch)
    _put(y, acc * (1 / total)[:, None], first, h, PLACES, I, E_V)


@triton.jit(do_not_specialize=["T", "window", "lse_pitch"])
def _attention_dq_kernel(q, k, v, y, dy, dq, lse_ptr, delta_ptr, start_ptr, T, window, lse_pitch, q_pitch,
                         y_pitch, dy_pitch, PLACES: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
                         E: tl.constexpr, E_V: tl.constexpr, LOG2E: tl.constexpr = LOG2E):
    h, first = tl.program_id(0), tl.program_id(1) * I
    i = first + tl.arange(0, I)
    low = _low(start_ptr, i, T, window, PLACES)
    lowest = _low(start_ptr, first, T, window, PLACES)
    inside = _low(start_ptr, first + I - 1, T, window, PLACES)
    lse = tl.load(lse_ptr + h * lse_pitch + i, mask=i < lse_pitch, other=0.0)
    y_tile = _rows(y, y_pitch, first, h, T, PLACES, I, E_V)
    dy_tile = _held(dy, dy_pitch, first, h, T, PLACES, I, E_V)
    q_tile = _held(q, q_pitch, first, h, T, PLACES, I, E)
    delta = tl.sum(y_tile.to(tl.float32) * dy_tile.to(tl.float32), 1)
    tl.store(delta_ptr + h * lse_pitch + i, delta, mask=i < lse_pitch)
    acc = tl.zeros((I, E), tl.float32)
    for start in range(lowest // J * J, tl.minimum(first + I, T), J):
        k_tile = _tile(k, start, h, PLACES, J, E)
        s = tl.dot(q_tile, k_tile.T)
        dp = tl.dot(dy_tile, _tile(v, start, h, PLACES, J, E_V).T)
        p = tl.exp2(s * LOG2E - lse[:, None])
        edge = (start < inside) | (start + J > first)
        if edge:
            j = start + tl.arange(0, J)
            p = tl.where(_within(j[None, :], low[:, None], i[:, None]), p, 0.0)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc)
    _put(dq, acc, first, h, PLACES, I, E)


@triton.jit(do_not_specialize=["T", "window", "lse_pitch"])
def _attention_dkv_kernel(q, k, v, dy, dk, dv, lse, delta, ends_ptr, T, window, lse_pitch, k_pitch, v_pitch,
                          PLACES: tl.constexpr, I: tl.constexpr, J: tl.constexpr, E: tl.constexpr,
                          E_V: tl.constexpr, LOG2E: tl.constexpr = LOG2E):
    h, first = tl.program_id(0), tl.program_id(1) * J
    j = first + tl.arange(0, J)
    high = _high(ends_ptr, j, T, window, PLACES)
    highest = _high(ends_ptr, first + J - 1, T, window, PLACES)
    inside = _high(ends_ptr, first, T, window, PLACES) + 1 - I      # tiles up to here see the first key
    k_tile = _held(k, k_pitch, first, h, T, PLACES, J, E)
    v_tile = _held(v, v_pitch, first, h, T, PLACES, J, E_V)
    dk_acc, dv_acc = tl.zeros((J, E), tl.float32), tl.zeros((J, E_V), tl.float32)
    for start in range(first // I * I, highest + 1, I):
        q_tile, dy_tile = _tile(q, start, h, PLACES, I, E), _tile(dy, start, h, PLACES, I, E_V)
        lses = lse.load([h * lse_pitch + start])
        s = tl.dot(k_tile, q_tile.T)                                # (J, I), and so the others
        # dp before p, so that it is multiplied beside the exponentials; delta is loaded no earlier, and taken
        # off no later: both cost registers, and so a program a multiprocessor or 2 to 10 % of the time
        dp = tl.dot(v_tile, dy_tile.T) - delta.load([h * lse_pitch + start])[None, :]
        p = tl.exp2(s * LOG2E - lses[None, :])
        edge = (start < first + J) | (start > inside)
        if edge:
            i = start + tl.arange(0, I)
            p = tl.where(_within(i[None, :], j[:, None], high[:, None]), p, 0.0)
        dv_acc = tl.dot(p.to(dy_tile.dtype), dy_tile, dv_acc)
        ds = p * dp
        dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc)
    _put(dk, dk_acc, first, h, PLACES, J, E)
    _put(dv, dv_acc, first, h, PLACES, J, E_V)


def _laid(x):
    """x, or a copy where kernels cannot read it: a token's heads lie side by side, all begins at 16 bytes."""
    aligned = (x.data_ptr() | x.stride(0) * x.itemsize) % TMA_BYTES == 0
    fits = aligned and x.stride()[1:] == (x.shape[2], 1)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _tiles(x, places, block):
    """Descriptor of the tiles of `block` places of x (T, H, E), for one or two places a token."""
    (T, H, E), pitch = x.shape, x.stride(0)
    if places == 1:
        return TensorDescriptor(x, [T, H * E], [pitch, 1], [block, E])
    return TensorDescriptor(x, [T, H, E], [pitch, E, 1], [block // places, places, E])


def lse_like(q, pairs):
    """Room for one fp32 number for every query of every stream: (H, T) or (H / 2, 2T), rounded up."""
    T, H = len(q) * (1 + pairs), q.shape[1] // (1 + pairs)
    return q.new_empty(H, -(-T // LSE_MULTIPLE) * LSE_MULTIPLE, dtype=torch.float32)


ATTENTION = LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, Tensor start, int window, bool pairs, *, "
                           "Tensor(a!) y, Tensor(b!) lse) -> ()")
ATTENTION_GRAD = LIBRARY.define("attention_grad(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, "
                                "Tensor lse, *, Tensor start, Tensor ends, int window, bool pairs, "
                                "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()")


@torch.library.register_fake(f"{LIBRARY.ns}::attention", lib=LIBRARY)
@torch.library.register_fake(f"{LIBRARY.ns}::attention_grad", lib=LIBRARY)
def _writes_only(*xs, **results):
    """What both ops return."""


@torch.library.impl(LIBRARY, "attention", ANYWHERE)
def attention_into(q, k, v, start, window, pairs, *, y, lse, tile=None):
    """Attention of every stream, and the log-sum-exp of its scores, into y and lse.

    math     s_ij = q_i k_j;  lse_i = log2 sum_j exp(s_ij);  y_i = sum_j exp(s_ij) v_j / sum_j exp(s_ij)
             |s_ij| must stay within MOST_SCORE: exp(s_ij) is taken as it is, without a maximum
    shapes   q, k: (T, H, E), v, y: (T, H, E of v), any distance from token to token; start: (T,);
             lse: lse_like
    dtypes   q, k, v, y alike, with the range of bf16 or fp32; s, sums and lse in fp32; exp(s) is rounded to
             v's dtype, and its sum taken after that: where one key is seen, y is its v
    tiling   I queries of one stream a program, over the tiles of J keys between low(first) and itself, by the
             table ATTN_FORWARD
    kind     reorder; attention_ref
    source   ours, after FlashAttention: T. Dao, arXiv 2307.08691
    """
    places, E, E_V = 1 + pairs, q.shape[2], v.shape[2]
    T = len(q) * places
    I, J, warps, stages = tile or ATTN_FORWARD[E, E_V]
    q, k, v = map(_laid, (q, k, v))
    _attention_kernel[len(lse), -(-T // I)](
        q if pairs else _tiles(q, places, I), _tiles(k, places, J), _tiles(v, places, J),
        _tiles(y, places, I), lse, start, T, min(window, T), lse.stride(0), q.stride(0), places, I, J, E, E_V,
        num_warps=warps, num_stages=stages)


@torch.library.impl(LIBRARY, "attention_grad", ANYWHERE)
def attention_grad_into(dy, q, k, v, y, lse, *, start, ends, window, pairs, dq, dk, dv, tiles=None):
    """The gradients of attention_into, into dq, dk and dv, from its results; two kernels, no atomics.

    math     p_ij = 2^(s_ij log2(e) - lse_i);  delta_i = dy_i y_i;  ds_ij = p_ij (dy_i v_j - delta_i)
             dq_i = sum_j ds_ij k_j;  dk_j = sum_i ds_ij q_i;  dv_j = sum_i p_ij dy_i
    shapes   as in attention_into; dq, dk, dv like q, k, v, any distance from token to token; ends: (T,)
    dtypes   those of q, k, v; s, p, ds and sums in fp32, p and ds rounded for the products
    tiling   dq: as forward, by ATTN_DQ; it leaves delta behind. dk and dv: J keys of one stream a program,
             over the tiles of I queries between itself and high(last), by ATTN_DKV, with s transposed: p and
             ds are left operands in registers
    kind     reorder; attention_ref
    source   ours, after FlashAttention: T. Dao, arXiv 2307.08691
    """
    places, E, E_V = 1 + pairs, q.shape[2], v.shape[2]
    T, window = len(q) * places, min(window, len(q) * places)
    dy, q, k, v, y = map(_laid, (dy, q, k, v, y))
    delta, widths = torch.empty_like(lse), (E, E_V)
    I, J, warps, stages = tiles[0] if tiles else ATTN_DQ[widths]
    held_q, held_dy = (x if pairs else _tiles(x, places, I) for x in (q, dy))
    _attention_dq_kernel[len(lse), -(-T // I)](
        held_q, _tiles(k, places, J), _tiles(v, places, J), y, held_dy, _tiles(dq, places, I), lse,
        delta, start, T, window, lse.stride(0), q.stride(0), y.stride(0), dy.stride(0), places, I, J, E, E_V,
        num_warps=warps, num_stages=stages)
    I, J, warps, stages = tiles[1] if tiles else ATTN_DKV[widths]
    held = (k, v) if pairs else (_tiles(k, places, J), _tiles(v, places, J))
    vectors = (TensorDescriptor(x, [x.numel()], [1], [I]) for x in (lse, delta))
    _attention_dkv_kernel[len(lse), -(-T // J)](
        _tiles(q, places, I), *held, _tiles(dy, places, I), _tiles(dk, places, J), _tiles(dv, places, J),
        *vectors, ends, T, window, lse.stride(0), k.stride(0), v.stride(0), places, I, J, E, E_V,
        num_warps=warps, num_stages=stages)


class Attention(torch.autograd.Function):
    """attention, with its gradients."""

    @staticmethod
    def forward(ctx, q, k, v, documents, window, pairs):
        y, lse = v.new_empty(v.shape), lse_like(q, pairs)
        op("attention")(q, k, v, documents.start, window, pairs, y=y, lse=lse)
        ctx.documents, ctx.window, ctx.pairs = documents, window, pairs
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, y, lse = ctx.saved_tensors
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        op("attention_grad")(dy, q, k, v, y, lse, start=ctx.documents.start, ends=ctx.documents.ends,
                             window=ctx.window, pairs=ctx.pairs, dq=dq, dk=dk, dv=dv)
        return dq, dk, dv, None, None, None


def attention(q, k, v, documents, *, window, pairs=False):
    """attention_ref by kernels that look at no key outside of window and document; bf16 on a GPU, and scores
    within MOST_SCORE."""
    return Attention.apply(q, k, v, documents, window, pairs)


def _attention_example(rand, size):
    """Documents of 161 tokens on average, a window shorter than most of them, scores of a few."""
    T = EXAMPLE_T[size]
    q, k, v = rand(T, EXAMPLE_QKV, EXAMPLE_H, EXAMPLE_E).unbind(1)
    position = torch.arange(T, device=q.device)
    start = torch.where(rand(T) > EXAMPLE_CUT, position, 0).cummax(0).values.int()
    return (q, k * EXAMPLE_E ** -0.5, v, Documents(start)), {"window": T // EXAMPLE_PART}


FAST["attention"] = Fast("reorder", attention_ref, attention, _attention_example)


# ---- 4.2 add_rows: rows out of a table, gradients of rows into one --------------------------------

def add_rows_ref(grad, ids, dy):
    """Add the rows dy (T, D) to the rows `ids` of grad, in place."""
    grad.index_add_(0, ids, dy.type_as(grad))


def add_rows(grad, ids, dy):
    """add_rows_ref that sums the rows of one id in fp32 before they are rounded to bf16."""
    # Adding one by one into bf16 loses 1.8 % of the gradient of 49,152 tokens; this 0.15 %, in 0.57 ms
    # against 0.31 (one H200, 2026-11).
    grad += torch.ops.aten.embedding_dense_backward(dy, ids, len(grad), -1, False)


def _add_rows_example(rand, size):
    """Every id some dozens of times, in no order."""
    T = EXAMPLE_T[size]
    dy = rand(T, EXAMPLE_H * EXAMPLE_E)
    return (torch.zeros_like(dy), dy[:, 0].argsort().int() // EXAMPLE_PART, dy), {}


FAST["add_rows"] = Fast("reorder", add_rows_ref, add_rows, _add_rows_example)


class Lookup(torch.autograd.Function):
    """Rows `ids` of the table w: (*ids, D). Their gradients are added to grad in place by the function add: a
    gradient of the table's size for each of a step's micro-batches would cost more than the step on a CPU."""

    @staticmethod
    def forward(ctx, w, grad, ids, add):
        ctx.grad, ctx.add = grad, add
        ctx.save_for_backward(ids)
        return F.embedding(ids, w)

    @staticmethod
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        ctx.add(ctx.grad, ids.flatten(), dy.flatten(0, -2))
        return None, None, None, None


# ---- 4.3 loss_rows: soft-capped cross-entropy of a block of rows ----------------------------------

CAP, CAP_SHIFT, CAP_SLOPE = 23.0, 5.0, 7.5   # logits l are capped to z = 23 sigmoid((l + 5) / 7.5), from [4]
GATE_FLOOR = 1e-6            # of what <copy> leaves to the tokens
LOSS_BLOCK = {"cpu": 128, "cuda": 4096}   # rows of logits at once; on a CPU they should stay in its cache


def mixture(pi, a, c, s):
    """(p, g_target, g_copy, dc, ds) of a token of probability pi = exp z / sum, from [9].

    math     p = pi (1 + a s r) + a c with r = 1 / (1 - a): the share a of <copy> goes to what the pointer
             copies, c, and the pointer's sink s gives its part back to all tokens
    shapes   all (rows, 1)
    -log p has the gradient g_target [v = y] + g_copy [v = <copy>] - (g_target + g_copy) pi_v in z_v, and dc,
    ds in c and s.
    """
    r = 1 / (1 - a).clamp(min=GATE_FLOOR)
    lifted = pi * (1 + a * s * r)
    p = lifted + a * c
    return p, -lifted / p, -a * (pi * s * r * r + c) / p, -a / p, -pi * a * r / p


def loss_rows_ref(logits, targets, weights, n_classes, wants_grad, mix=None, *, copy=None, spare=None):
    """(nll, dlogits, dmix) of a block of rows: the loss of each, and its gradients or None.

    math     z = 23 sigmoid((l + 5) / 7.5);  nll = sum_k w_k (log(sum_{c < n_classes} exp z_c) - z_target_k)
    shapes   logits, dlogits: (rows, P); targets: (rows, K) int64, weights: (rows, K) fp32; nll: (rows,)
             mix, dmix: (rows, 2) fp32, what the pointer gives to the first target and to its sink, or None
             copy: (1,) int64, column of <copy>; with mix the first target's term is -w_0 log p, see mixture
    dtypes   softmax and nll at least fp32; dlogits as logits, which are overwritten
    spare    memory like logits in the softmax's dtype: a CPU is slow at getting it anew for every block
    A target of weight 0 counts for nothing.
    """
    sig = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shift, floor, weights = sig.new_tensor(CAP_SHIFT / CAP_SLOPE), sig.new_tensor(-CAP), weights.type_as(sig)
    torch.add(shift, sig, alpha=1 / CAP_SLOPE, out=sig).sigmoid_()
    p = torch.add(floor, sig, alpha=CAP, out=spare).exp_()                     # z < 23: no maximum is needed
    p[:, n_classes:] = 0
    total, all_hits, lead = p.sum(1, keepdim=True), -weights, weights.sum(1, keepdim=True)
    logs = CAP * sig.gather(1, targets) - CAP - total.log()                           # log pi, (rows, K)
    if mix is not None:
        first, rest = weights[:, :1], weights[:, 1:]
        q, g_target, g_copy, *dmix = mixture(logs[:, :1].exp(), p.index_select(1, copy) / total,
                                             *mix.type_as(sig).split(1, 1))
        logs = torch.cat((q.log(), logs[:, 1:]), 1)
        all_hits, lead = torch.cat((first * g_target, -rest), 1), lead - first * (1 + g_target + g_copy)
        copy_hit, dmix = first * g_copy, first * torch.cat(dmix, 1)
    nll = -(weights * logs).sum(1)
    if not wants_grad:
        return nll, None, None
    slope = CAP / CAP_SLOPE
    p.mul_(slope * lead / total).scatter_add_(1, targets, slope * all_hits)           # slope dnll/dz
    if mix is not None:
        p.index_add_(1, copy, slope * copy_hit)
    dlogits = p.mul_(sig.addcmul_(sig, sig, value=-1)).type_as(logits)                # times sig (1 - sig)
    return nll, dlogits, None if mix is None else dmix.type_as(mix)


def loss_rows(logits, targets, weights, n_classes, wants_grad, mix=None, *, copy=None, spare=None):
    """loss_rows_ref for the compiler, which makes it one pass over the logits and needs no spare memory."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    sig = torch.sigmoid((logits.float() + CAP_SHIFT) / CAP_SLOPE)
    p = torch.exp(CAP * sig - CAP) * (classes < n_classes)
    total, hits, lead = p.sum(1, keepdim=True), (-weights).unbind(1), weights.sum(1, keepdim=True)
    logs, at_copy, dmix = CAP * sig.gather(1, targets) - CAP - total.log(), 0, None
    if mix is not None:
        first = weights[:, :1]
        gate = (p * (classes == copy)).sum(1, keepdim=True) / total
        q, g_target, g_copy, *dmix = mixture(logs[:, :1].exp(), gate, *mix.split(1, 1))
        logs = torch.cat((q.log(), logs[:, 1:]), 1)
        hits, lead = ((first * g_target)[:, 0], *hits[1:]), lead - first * (1 + g_target + g_copy)
        at_copy, dmix = first * g_copy * (classes == copy), first * torch.cat(dmix, 1)
    nll = -(weights * logs).sum(1)
    if not wants_grad:
        return nll, None, None
    at_targets = sum(h[:, None] * (classes == y[:, None]) for h, y in zip(hits, targets.unbind(1)))
    dz = lead * p / total + at_targets + at_copy
    return nll, (dz * sig * (1 - sig) * (CAP / CAP_SLOPE)).type_as(logits), dmix


def _loss_rows_example(rand, size):
    """Two likely targets for every row, and a last class that is none."""
    logits = rand(EXAMPLE_T[size] // EXAMPLE_PART, EXAMPLE_V)
    targets, mix = logits[:, 1:].topk(2).indices, logits[:, -2:].float().softmax(1)
    copy = torch.full((1,), EXAMPLE_V - 2, device=logits.device)
    return (logits, targets, logits[:, :2].float().square(), EXAMPLE_V - 1, True, mix), {"copy": copy}


FAST["loss_rows"] = Fast("reorder", loss_rows_ref, loss_rows, _loss_rows_example, "step")


# ---- 4.4 loss: of a stream, one block of rows after the other ---------------------------------------

def loss_blocks(x, w, goals, n_classes, rows_op, *, copy, rows, wants_grad):
    """(loss, dx, dw, dmix) of all rows of x (T, D), `rows` at a time by rows_op.

    goals: (targets, weights, mix or None), see loss_rows_ref.
    """
    dx, dw = (torch.empty_like(x), torch.zeros_like(w)) if wants_grad else (None, None)
    nll, dmix, logits = [], [], x.new_empty(min(rows, len(x)), len(w))
    acc = torch.promote_types(x.dtype, torch.float32)
    spare = None if x.is_cuda else torch.empty_like(logits, dtype=acc)
    for start in range(0, len(x), rows):
        here = slice(start, min(start + rows, len(x)))
        n = here.stop - start
        block = torch.mm(x[here], w.T, out=logits[:n])
        targets, weights, mix = (goal if goal is None else goal[here] for goal in goals)
        some, dlogits, dmix_here = rows_op(block, targets, weights, n_classes, wants_grad, mix, copy=copy,
                                           spare=None if spare is None else spare[:n])
        nll.append(some)
        if wants_grad:
            torch.mm(dlogits, w, out=dx[here])
            dw.addmm_(dlogits.T, x[here])
            dmix.append(dmix_here)
    return torch.cat(nll).sum(), dx, dw, torch.cat(dmix) if wants_grad and goals[-1] is not None else None


class SoftcapLoss(torch.autograd.Function):
    """Sum of the losses of all rows; the gradients have a closed form and are made with it."""

    @staticmethod
    def forward(ctx, x, w, mix, grad, goals, settings):
        (targets, weights, classes, copy), (n_classes, rows_op, rows) = goals, settings
        w = w if classes is None else F.embedding(classes, w)                                    # (P, D)
        loss, dx, dw, dmix = loss_blocks(x, w, (targets, weights, mix), n_classes, rows_op, copy=copy,
                                         rows=rows, wants_grad=ctx.needs_input_grad[0])
        ctx.grad = grad
        ctx.save_for_backward(dx, dw, dmix, classes)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        dx, dw, dmix, classes = ctx.saved_tensors
        if classes is None:
            ctx.grad.add_(dw * dloss)
        else:
            ctx.grad.index_add_(0, classes, dw * dloss)      # every row once
        return dx * dloss, None, None if dmix is None else dmix * dloss, None, None, None

    @classmethod
    def of(cls, x, w, grad, targets, weights, *, classes, n_classes, rows_op, mix=None, copy=None):
        """Sum over the rows of the weighted cross-entropies of soft-capped logits, see loss_rows_ref.

        x: (T, D), w, grad: (V, D), targets, weights: (T, K), classes: (P,) int64, ascending, or None for all
        V. Targets are positions in classes. The softmax is over the first n_classes of the classes. The
        gradient of w is added to grad in place. mix: (T, 2) or None, copy: (1,), see loss_rows_ref.
        """
        goals, settings = (targets, weights, classes, copy), (n_classes, rows_op, LOSS_BLOCK[x.device.type])
        return cls.apply(x, w, mix, grad, goals, settings)

    @staticmethod
    def chances(logits, copied):
        """Probabilities of n tokens, fp32 (n,), for logits (n,), or (n + 1,) with that of <copy> at the end.

        copied: None, or what the pointer copies of each token (n,), and its sink's weight (), see mixture.
        """
        pi = (CAP * torch.sigmoid((logits.float() + CAP_SHIFT) / CAP_SLOPE)).softmax(0)
        return pi if copied is None else mixture(pi[:-1], pi[-1], *copied)[0]


# ---- 4.5 glue: small functions between the matrix products ---------------------------------------

SELF_FLOOR = 1e-8            # of |v|^2 in exclude_self
ROTARY_BASE = 1024           # the slowest pair of channels turns by 1 / 1024 radian per token
YARN_TURNS = (1.0, 32.0)     # turns in a window at which a frequency is stretched fully, and not at all [4]
YARN_GAIN = 0.2


def relu2(z):
    """relu(z) squared."""
    return torch.relu(z).square()


def rotate(x, turn):
    """Turn adjacent pairs of channels, read as complex numbers, by the angle of the position.

    x: (T, H, E)   turn: (T, J, E/2, 2) fp32, real and imaginary part of exp(-i angle); 1 for pairs that have
    no position. Head h takes the angle of place h mod J of its token.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    wide = wide.unflatten(1, (-1, turn.shape[1]))                                # (T, H/J, J, E/2, 2)
    turned = torch.view_as_complex(wide) * torch.view_as_complex(turn)[:, None]
    return torch.view_as_real(turned).flatten(-2).flatten(1, 2).type_as(x)


def yarn(freqs, scale, old, new):
    """Frequencies and softmax scale after the window has grown from old to new tokens [3].

    Slow frequencies, with less than one turn in the old window, are stretched by new / old; fast ones, with
    more than 32, stay; those between are blended."""
    low, high = YARN_TURNS
    keep = [min(max((old * f / (2 * math.pi) - low) / (high - low), 0.0), 1.0) for f in freqs]
    shrunk = [f * (old / new + k * (1 - old / new)) for f, k in zip(freqs, keep)]
    return shrunk, scale * (1 + YARN_GAIN * math.log(new / old))


def rotary(n, scale, windows):
    """(n angular frequencies, falling; softmax scale) for the last of these windows, with one YaRN step for
    every growth on the way to it; scale: for the first."""
    freqs = [ROTARY_BASE ** (-i / max(n - 1, 1)) for i in range(n)]
    for before, here in zip(windows, windows[1:]):
        if here != before:
            freqs, scale = yarn(freqs, scale, before, here)
    return freqs, scale


def turns(freqs, n_positions, n_still, device):
    """Rotary table, see rotate: (n_positions, 1, E/2, 2), with n_still pairs that do not turn."""
    position = torch.arange(n_positions, dtype=torch.float64, device=device)
    angle = torch.outer(position, torch.tensor(freqs, dtype=torch.float64, device=device))
    turning = torch.stack((angle.cos(), -angle.sin()), -1).float()
    return torch.cat((turning, turning.new_tensor((1.0, 0.0)).expand(n_positions, n_still, 2)), 1)[:, None]


@dataclass(frozen=True)
class View:
    """What attention and pointer know of a stage: windows and block in tokens; softmax scales (); rotary
    tables (see rotate). Paired heads are narrow ones whose table has two places a token."""
    short: int
    long: int
    pointer_block: int
    scale_narrow: Tensor
    scale_wide: Tensor
    turn_narrow: Tensor
    turn_paired: Tensor
    turn_wide: Tensor

    @classmethod
    def of(cls, sizes, short, long, n_positions, device):
        """sizes: short, long, pointer_block. short, long: what rotary takes for narrow and wide heads."""
        (narrow, scale_narrow), (wide, scale_wide) = rotary(*short), rotary(*long)
        scales = (torch.tensor(x, device=device) for x in (scale_narrow, scale_wide))
        doubled = turns(narrow, 2 * n_positions, 0, device)
        return cls(*sizes, *scales, doubled[:n_positions], doubled.view(n_positions, 2, -1, 2),
                   turns(wide, n_positions, len(wide), device))


def heads_ref(qk, turn, scale):
    """(scale q, k) for attention, normed and rotated: (T, H, E) each. qk: (T, 2, H, E), scale: fp32 ()."""
    q, k = (rotate(rms_norm(x), turn) for x in qk.unbind(1))
    return scale * q, k


def heads(qk, turn, scale):
    """heads_ref for the compiler, which knows no complex numbers; rounds once, at the end."""
    x = rms_norm(qk.float()).unflatten(2, (-1, turn.shape[1]))
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)                                   # (T, 2, H/J, J, E/2)
    c, s = turn[:, None, None].unbind(-1)
    q, k = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).flatten(2, -2).unbind(1)
    return (scale * q).type_as(qk), k.type_as(qk)


def previous(x):
    """The row before each row of x; the first one stands before itself."""
    return torch.cat((x[:1], x[:-1]))


def smear(e, goes_on, gate):
    """e plus gate times the token before, where its document goes on. e: (T, D), goes_on, gate: (T, 1)."""
    return e + torch.where(goes_on, gate * previous(e), 0)


def key_offset(k, goes_on):
    """Keys (T, H, E) with the second half of the token before, where its document goes on: (T, 1) bool."""
    turning, still = k.chunk(2, -1)
    return torch.cat((turning, torch.where(goes_on[:, :, None], previous(still), still)), -1)


def exclude_self(y, v, alpha):
    """y less tanh(alpha) times its part along the token's own v. y, v: (T, H, E), alpha: (T, H)."""
    along = (y * v).sum(-1) / (v * v).sum(-1).clamp(min=SELF_FLOOR)
    return y - (torch.tanh(alpha) * along)[:, :, None] * v


def mix(c, *xs):
    """Sum of xs, (T, D) each, times their columns of c: (T, n), or (T, n, G) for G groups of channels."""
    c = c if c.ndim > 2 else c[:, :, None]
    parts = [coef[:, :, None] * x.unflatten(1, (c.shape[2], -1)) for coef, x in zip(c.unbind(1), xs)]
    return sum(parts[1:], parts[0]).flatten(1)


def weigh(terms, op):
    """Sum of terms (c, x): streams x (T, D), each times c, () or (T, 1). op: mix, or what replaces it."""
    factors, xs = zip(*terms)
    return op(torch.cat([c.type_as(xs[0]).expand(len(xs[0]), 1) for c in factors], 1), *xs)


def network(x, w1, w2, bias):
    """A small network with one hidden layer: (T, outputs); its weights come in fp32."""
    return F.linear(F.gelu(F.linear(x, w1.type_as(x))), w2.type_as(x), bias.type_as(x))


def signed_sum(rows, signs):
    """Rows times signs, all n of a token in one vector. rows, signs: (T, n, D) -> (T, D)."""
    return (rows * signs).sum(1)


def _heads_example(rand, size):
    """One place for every token."""
    T = EXAMPLE_T[size]
    turn = F.normalize(rand(T, 1, EXAMPLE_E // 2, 2).float(), dim=-1)
    return (rand(T, 2, EXAMPLE_H, EXAMPLE_E), turn, turn.new_tensor(0.5)), {}


def _relu2_example(rand, size):
    """A row of hidden units for every token."""
    return (rand(EXAMPLE_T[size], EXAMPLE_F),), {}


def _smear_example(rand, size):
    """A stream, and a gate for every token."""
    (x, _, _, documents), _ = _attention_example(rand, size)
    x = x.flatten(1)
    return (x, documents.goes_on, x[:, :1].sigmoid()), {}


def _key_offset_example(rand, size):
    """Keys of documents of 161 tokens on average."""
    (k, _, _, documents), _ = _attention_example(rand, size)
    return (k, documents.goes_on), {}


def _exclude_self_example(rand, size):
    """What the heads have read, their own values, and a factor for each."""
    (y, v, w, _), _ = _attention_example(rand, size)
    return (y, v, w[:, :, 0]), {}


def _mix_example(rand, size):
    """Three streams, coefficients for six groups of channels."""
    T, n = EXAMPLE_T[size], EXAMPLE_QKV
    return (rand(T, n, EXAMPLE_H), *rand(n * T, EXAMPLE_H * EXAMPLE_E).chunk(n)), {}


def _signed_sum_example(rand, size):
    """Two rows for every token."""
    rows, signs = rand(2 * EXAMPLE_T[size], 2, EXAMPLE_H * EXAMPLE_E).chunk(2)
    return (rows, signs.sign()), {}


FAST["heads"] = Fast("reorder", heads_ref, heads, _heads_example, "glue")
FAST["relu2"] = Fast("reorder", relu2, relu2, _relu2_example, "glue")
FAST["smear"] = Fast("reorder", smear, smear, _smear_example, "glue")
FAST["mix"] = Fast("reorder", mix, mix, _mix_example, "glue")
FAST["signed_sum"] = Fast("reorder", signed_sum, signed_sum, _signed_sum_example, "glue")
FAST["key_offset"] = Fast("bitwise", key_offset, key_offset, _key_offset_example, "glue")
FAST["exclude_self"] = Fast("reorder", exclude_self, exclude_self, _exclude_self_example, "glue")


# ---- 4.6 updates: of one tensor, without communication -------------------------------------------
# A bf16 weight that an optimizer changes by less than its last bit needs an fp32 master; it is kept as the
# bf16 weight itself and the 16 bits that it lacks, so nothing is stored twice. The weight is the rounded
# master: a truncated one is biased towards zero.

CASCADE = (                  # (a, b, c) of each map, from [2]
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245),
)
CASCADE_MARGIN = 1.05
CASCADE_SINGLE = 0.99        # (sum s^4)^(1/4) / (sum s^2)^(1/2) from which the margin grows
CASCADE_FLOOR = 1e-30        # of the largest entry
SLOW_BETA, LANE_BETA = 0.98, 0.9
LANE_FLOOR = 1e-10           # of a lane's energy, and of a norm
HALF_ULP = 1 << 15           # half of bf16's last place, in the bits of an fp32
LOW_BITS = 16


def split_master(x):
    """fp32 -> (hi bf16, lo int16) of the same shape: hi is x rounded to nearest, the two together are x."""
    bits = x.view(torch.int32)
    hi = (bits + HALF_ULP) >> LOW_BITS
    return hi.to(torch.int16).view(torch.bfloat16), (bits - (hi << LOW_BITS)).to(torch.int16)


def join_master(hi, lo):
    """The fp32 that split_master took apart, bit for bit."""
    bits = (hi.view(torch.int16).to(torch.int32) << LOW_BITS) + lo.to(torch.int32)
    return bits.view(torch.float32)


def across(x):
    """The axis that a lane of (N, R, C) lies along: lanes are rows, unless there are fewer than columns."""
    return 1 + (x.shape[1] >= x.shape[2])


def anvil_momentum(g, fast, slow, *, beta, blend, mu, share, dtype):
    """The direction that ANVIL orthogonalises [2], in dtype; both rails, means of share g, change in place.

    math     U = (1 - mu) g + mu (blend fast + (1 - blend) slow)
    shapes   g: (N, R, C), fast, slow: fp32 of that shape, beta, blend, mu: fp32 (), share: a number
    """
    g = g.float() * share
    fast.lerp_(g, 1 - beta)
    slow.lerp_(g, 1 - SLOW_BETA)
    return g.lerp(slow.lerp(fast, blend), mu).to(dtype)


def cascade(g):
    """About U V.T where U S V.T = g, for each of (N, R, C): six maps s to s (a + b s^2 + c s^4) of its
    singular values s [2], which take [0.003, 1 / 1.05] of their root sum of squares to [0.995, 1.0004].

    Above 1.00006 / 1.05 they diverge, and rounding in bf16 takes a matrix of nearly rank 1 there. The first
    Gram matrix tells: sum s^4 / (sum s^2)^2 is near 1, and the margin grows. Products are from the shorter
    side."""
    wide, tall = torch.promote_types(g.dtype, torch.float32), g.shape[1] > g.shape[2]

    def gram_of(x):
        return x.mT @ x if tall else x @ x.mT
    most = g.abs().amax((1, 2), keepdim=True).to(wide).clamp(min=CASCADE_FLOOR)
    x = g / most.log2().floor().exp2().type_as(g)      # a power of two: exact, and no square is out of range
    gram = gram_of(x)
    square = gram.diagonal(dim1=1, dim2=2).sum(1, dtype=wide)[:, None, None]
    fourth = torch.linalg.vector_norm(gram, dim=(1, 2), keepdim=True, dtype=wide)
    single = (fourth / square.clamp(min=1)).sqrt() / CASCADE_SINGLE
    size = (CASCADE_MARGIN * single.clamp(min=1) * square.sqrt()).clamp(min=1)       # 1: of a zero matrix
    x, gram = (x / size).type_as(g), (gram / size.square()).type_as(g)
    for n, (a, b, c) in enumerate(CASCADE):
        gram = gram_of(x) if n else gram
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, poly, beta=a) if tall else torch.baddbmm(x, poly, x, beta=a)
    return x


def equalise(u, energy):
    """u (N, R, C) with lanes of the same mean energy over time, of the norm that it had [2].

    There is a lane for each place of the longer side. energy: fp32 (N, R, 1) or (N, 1, C), their mean
    squares, averaged over the steps; changes in place.
    """
    here = u.float().square().mean(across(u), keepdim=True)
    energy.lerp_(here, 1 - LANE_BETA)
    gain = energy.clamp(min=LANE_FLOOR).rsqrt()
    before, after = (x.sum((1, 2), keepdim=True).sqrt() for x in (here, gain.square() * here))
    return u * (gain * before / after.clamp(min=LANE_FLOOR)).type_as(u)


def anvil_apply(p, lo, u, slow, energy, lr, *, wd):
    """Take lr times u, equalised, off the weights p; decay those that the slow rail pulls the same way [6].

    p, u, slow: (N, R, C); lo: int16, the low bits of p's master, or None; energy: see equalise; lr: () or
    (N, 1, 1), wd: (), fp32. p, lo and energy change in place.
    """
    master = p if lo is None else join_master(p, lo)
    agrees = slow * master >= 0
    new = master - lr * (equalise(u, energy) + wd * master * agrees)
    for kept, half in zip((p, lo), (new,) if lo is None else split_master(new)):
        kept.copy_(half)


def adam_step(p, g, m, m2, rate, decay, *, betas, eps, share):
    """One Adam step with the gradient share g; p, m and m2 change in place.

    m, m2: fp32, p, g: any dtype, rate, decay: fp32 (), betas: two numbers or fp32 (). rate holds the bias
    correction, see Adam.rates; as in [4], eps is added before it. The decay is wd * lr * lr, cautious [6].
    """
    beta1, beta2 = betas
    g = g.float() * share
    m.lerp_(g, 1 - beta1)
    m2.lerp_(g.square(), 1 - beta2)
    u = m / m2.sqrt().add_(eps)
    agrees = u * p > 0
    p.sub_(u.mul_(rate).add_((p * agrees).mul_(decay)))


def _anvil_momentum_example(rand, size):
    """A bank of square matrices after some steps."""
    g = rand(EXAMPLE_T[size] // EXAMPLE_PART, EXAMPLE_PART, EXAMPLE_PART)
    beta, blend, mu = rand(EXAMPLE_QKV).float().sigmoid()
    return (g, rand(*g.shape).float(), rand(*g.shape).float()), {
        "beta": beta, "blend": blend, "mu": mu, "share": 0.5, "dtype": g.dtype}


def _anvil_apply_example(rand, size):
    """Weights with a master, a learning rate for every matrix."""
    p = rand(EXAMPLE_T[size] // EXAMPLE_PART, EXAMPLE_PART, EXAMPLE_PART).bfloat16()
    lr, energy = rand(len(p), 1, 1).float() / EXAMPLE_PART, rand(len(p), EXAMPLE_PART, 1).float().square()
    return (p, torch.zeros_like(p, dtype=torch.int16), rand(*p.shape), rand(*p.shape).float(), energy, lr), {
        "wd": lr.mean()}


def _adam_step_example(rand, size):
    """A table after some steps."""
    p, g = rand(2 * EXAMPLE_T[size], EXAMPLE_E).chunk(2)
    m, m2, rate = rand(*p.shape).float(), rand(*p.shape).float().square(), rand().float()
    return (p, g, m, m2, rate, rate / EXAMPLE_PART), {"betas": (0.5, 0.5), "eps": NORM_EPS, "share": 0.5}


FAST["anvil_momentum"] = Fast("reorder", anvil_momentum, anvil_momentum, _anvil_momentum_example, "step")
FAST["anvil_apply"] = Fast("reorder", anvil_apply, anvil_apply, _anvil_apply_example, "step")
FAST["adam_step"] = Fast("reorder", adam_step, adam_step, _adam_step_example, "step")


# ---- 4.7 ngrams: their rows in a table -------------------------------------------------------------

ROW_FACTORS = ((36_313, 27_191), (17_351, 60_961, 45_259))    # of a token, the one before it, ... [4]
SIGN_FACTORS = ((48_271, 30_011), (58_699, 39_779, 26_801))


def ngrams(tokens, start, n_rows, n_signs):
    """Rows of each token's bigram and trigram in a table, then of both in a pool of signs: (T, 4) int64.

    math     product of each token with its factor in 32 bits, joined by XOR, modulo half the rows less 1
    shapes   tokens, start: (T,) int32, start as in Documents
    The last row of each half of the table, with sign row 0, is that of all n-grams that would begin before
    their document.
    """
    half, position, out = n_rows // 2, torch.arange(len(tokens), device=tokens.device), []
    for factors in (*ROW_FACTORS, *SIGN_FACTORS):
        mixed = torch.zeros_like(tokens)
        for back, factor in enumerate(factors):
            # Trap: in int32, since products of more than 32 bits have to wrap.
            mixed = mixed ^ F.pad(tokens, (back, 0))[:len(tokens)] * factor
        inside, n, mixed = position - (len(factors) - 1) >= start, len(out), mixed.long()
        if n < len(ROW_FACTORS):
            out.append(torch.where(inside, mixed % (half - 1), half - 1) + n * half)
        else:
            out.append(torch.where(inside, mixed % n_signs, 0))
    return torch.stack(out, 1)


def _ngrams_example(rand, size):
    """Tokens of documents of 161 tokens on average."""
    (q, _, _, documents), _ = _attention_example(rand, size)
    return (q[:, 0, 0].argsort().int() % EXAMPLE_V, documents.start, EXAMPLE_V, EXAMPLE_PART), {}


FAST["ngrams"] = Fast("bitwise", ngrams, ngrams, _ngrams_example, "step")


# ---- 4.8 rows: of tables too large for a gradient of their size -----------------------------------

BEYOND = 1 << 62             # larger than any row's number
EVENT_ROWS = {"cpu": 4096, "cuda": 1 << 16}   # rows that an event updates at once


class Rows:
    """Rows of a table that lies in shares, at hand where they are read.

    ids     (n,) int64, ascending: which of the whole table. table: (share, D), the rows that lie here
    values  (n, D), the rows; grad: (n, D), at least fp32, where their gradients are added up, or None
    asked   (m,) int64: which rows of this share the readers, first to last, have asked for
    exchange(x, sent, got) is Comm.all_to_all: all owners make and deliver Rows together.
    """

    def __init__(self, ids, table, n_owners, exchange, wants_grad):
        owners, ones = torch.arange(n_owners + 1, device=ids.device), [1] * n_owners
        counts = torch.searchsorted(ids, len(table) * owners).diff()
        pending, got = exchange(counts, ones, ones)
        pending.wait()
        # The host waits for the device here: only sizes that it knows can be sent.
        self.ids, self.exchange, self.sent, self.got = ids, exchange, counts.tolist(), got.tolist()
        pending, self.asked = exchange(ids % len(table), self.sent, self.got)
        pending.wait()
        pending, values = exchange(F.embedding(self.asked, table), self.got, self.sent)
        pending.wait()
        wide = torch.promote_types(table.dtype, torch.float32)
        self.values, self.grad = values.requires_grad_(wants_grad), None
        if wants_grad:
            self.grad = torch.zeros_like(values, dtype=wide)

    def deliver(self):
        """(asked, pending, parts (m, D)): gradients of this share's rows, from all who have read them."""
        return self.asked, *self.exchange(self.grad.to(self.values.dtype), self.sent, self.got)


class Room:
    """Rows at fixed addresses, n at most, for a captured step that reads them in place of those of Rows."""

    def __init__(self, n, table):
        self.ids = torch.full((n,), BEYOND, device=table.device)
        self.values = table.new_zeros(n, table.shape[1]).requires_grad_()
        self.grad = torch.zeros_like(self.values, dtype=torch.promote_types(table.dtype, torch.float32))

    @torch.no_grad()
    def hold(self, rows):
        """Take in Rows, which from now on have their gradients here."""
        n = len(rows.ids)
        self.ids[:n], self.ids[n:], self.values[:n] = rows.ids, BEYOND, rows.values
        rows.grad = self.grad[:n].zero_()


def merged(ids, parts, add):
    """(ids, sums): each id once, ascending, with the fp32 sum of its parts (n, D), taken in their order."""
    ids, place = ids.unique(return_inverse=True)
    sums = parts.new_zeros(len(ids), parts.shape[1], dtype=torch.promote_types(parts.dtype, torch.float32))
    add(sums, place, parts.type_as(sums))
    return ids, sums


def dense_pieces(whole, ids, g, n):
    """(p, dense gradient, *states) of a table, n rows at a time; whole: (p, *states), ids, g: see merged."""
    ends = torch.searchsorted(ids, torch.arange(0, len(whole[0]) + n, n, device=ids.device)).tolist()
    for i, (p, *states) in enumerate(zip(*(x.split(n) for x in whole))):
        here, dense = slice(ends[i], ends[i + 1]), torch.zeros_like(p, dtype=g.dtype)
        dense[ids[here] - i * n] = g[here]
        yield p, dense, *states


def row_apply(p, m2, g, rate, decay, *, eps):
    """New rows p (n, D) for their second moments m2 (n,) and gradients g (n, D): Adam with beta1 = 0 [5]."""
    old = p.type_as(g)
    u = g / m2.sqrt().add(eps)[:, None] * rate
    return old - (u + decay * old * (u * old > 0))


def row_event_ref(p, m2, last, ids, g, *, betas2, rate, decay, eps):
    """One event of a table with one second moment for each row: rows `ids` of p, m2 and last change in place.

    math     m2 = beta2_k m2 for every event k since the row's last one, in turn; for this event it is
             beta2 m2 + (1 - beta2) mean(g^2);  u = rate g / (sqrt(m2) + eps);  p -= u + decay p [u p > 0]
    shapes   p: (R, D), m2: (R,) fp32, last: (R,) int32, events until the row's last one; ids: (n,), each
             once, g: (n, D) fp32; betas2: (events,) fp32, of all events, this one included
    Rows without a gradient need nothing until they get one: beta1 is 0, and the decay is cautious [6], so
    all they owe is the decay of m2. It is made up for in the order of a dense step, bit for bit.
    """
    moment, seen = m2[ids], last[ids]
    for k in range(int(seen.min()) if len(ids) else len(betas2), len(betas2) - 1):
        moment = torch.where(seen <= k, moment * betas2[k], moment)
    moment = moment * betas2[-1] + (1 - betas2[-1]) * g.square().mean(1)
    p[ids] = row_apply(p[ids], moment, g, rate, decay, eps=eps).type_as(p)
    m2[ids], last[ids] = moment, len(betas2)


def row_event(p, m2, last, ids, g, *, betas2, rate, decay, eps):
    """row_event_ref with one product for all events that a row has missed, so that the host need not wait."""
    logs = F.pad(betas2.double().log().cumsum(0), (1, 0))
    missed = (logs[-2] - logs[last[ids]]).exp().float()
    moment = m2[ids] * missed * betas2[-1] + (1 - betas2[-1]) * g.square().mean(1)
    p[ids] = row_apply(p[ids], moment, g, rate, decay, eps=eps).type_as(p)
    m2[ids], last[ids] = moment, torch.full_like(last[ids], len(betas2))


def _row_event_example(rand, size):
    """Every second row of a table, after five events, most of which it has missed."""
    p, g = rand(2 * EXAMPLE_T[size], EXAMPLE_E).chunk(2)
    m2, rate = rand(len(p)).float().square(), rand().float().abs()
    last = m2.argsort().int() % EXAMPLE_EVENTS
    return (p, m2, last, torch.arange(0, len(p), 2, device=p.device), g[::2].float()), {
        "betas2": rand(EXAMPLE_EVENTS + 1).float().sigmoid(), "rate": rate, "decay": rate / EXAMPLE_PART,
        "eps": NORM_EPS}


FAST["row_event"] = Fast("reorder", row_event_ref, row_event, _row_event_example)


# ---- 4.9 steps: of ANVIL and Adam with the rates of a run ------------------------------------------

TABLE_ROWS = {"cpu": 4096, "cuda": 1 << 24}   # Adam's pieces of a table; a CPU should hold one in its cache


@dataclass(frozen=True)
class ParamRow:
    """How the optimizer treats one parameter.

    kind     bank: ANVIL, sharded by matrix. table: Adam, sharded by row. small: Adam, on every rank. shared:
             Adam, every rank has a share of the rows and is sent those it reads. lazy: likewise, but only
             rows that have a gradient change
    lr_mul   factor on the learning rate: a number, or one per matrix, (N, 1, 1)
    wd_mul   factor on the weight decay
    """
    name: str
    param: nn.Parameter
    kind: str
    lr_mul: object
    betas: tuple
    wd_mul: float


def zero_state(kind, p):
    """States of a slice p, zero. Of a bank: both rails, the energy of its lanes, and lo, its master's low
    bits. Of a table: momentum m, second moment m2. Of a lazy one: m2 for each row, and last, how many events
    there had been at its last one."""
    if kind == "lazy":
        dtypes = {"m2": torch.float32, "last": torch.int32}
        return {name: p.new_zeros(len(p), dtype=dtype) for name, dtype in dtypes.items()}
    names = ("fast", "slow") if kind == "bank" else ("m", "m2")
    state = {name: torch.zeros_like(p, dtype=torch.float32) for name in names}
    if kind == "bank":
        state["energy"] = state["slow"].mean(across(p), keepdim=True)
        if p.dtype == torch.bfloat16:
            state["lo"] = torch.zeros_like(p, dtype=torch.int16)
    return state


@dataclass(frozen=True)
class Anvil:
    """ANVIL [2]. lr, wd: of the run; share: factor on all gradients; ops: a function for each row of FAST."""
    lr: float
    wd: float
    share: float
    ops: object

    def bank(self, row, lr_mul, p, g, state, pace):
        """One step of matrices p (N, R, C); p and state change in place.

        row: settings, see ParamRow; lr_mul: its factors for these matrices.
        """
        # Trap: as tensors, since every new number would compile anew.
        beta, blend, mu, rate = (torch.full((), x, device=p.device) for x in
                                 (pace.beta, pace.blend, pace.mu, self.lr * pace.lr))
        fast, slow, energy = (state[name] for name in ("fast", "slow", "energy"))
        u = cascade(self.ops.anvil_momentum(g, fast, slow, beta=beta, blend=blend, mu=mu, share=self.share,
                                            dtype=p.dtype))
        self.ops.anvil_apply(p, state.get("lo"), u, slow, energy, rate * lr_mul,
                             wd=self.wd * rate * row.wd_mul)


@dataclass(frozen=True)
class Adam:
    """Adam [5] for parameters with settings of their own: row, see ParamRow. n: number of the step, from 1.

    lr, wd, eps: of the run; share: factor on all gradients; ops: a function for each row of FAST. The lr of a
    step is a factor on the rate.
    """
    lr: float
    wd: float
    eps: float
    share: float
    ops: object

    def rates(self, row, lr, n):
        """(rate, decay) of a step as tensors, see adam_step."""
        lr, (beta1, beta2) = self.lr * row.lr_mul * lr, row.betas
        rate, decay = lr * (1 - beta2 ** n) ** 0.5 / (1 - beta1 ** n), lr * lr * self.wd * row.wd_mul
        return [torch.full((), x, device=row.param.device) for x in (rate, decay)]

    def dense(self, row, tensors, lr, n, op=adam_step):
        """A step, by op, of (p, g, m, m2)."""
        op(*tensors, *self.rates(row, lr, n), betas=row.betas, eps=self.eps, share=self.share)

    def table(self, row, whole, lr, n):
        """A step of a table, some rows at a time: 5 times faster on a CPU than all at once (2026-11)."""
        for some in zip(*(x.split(TABLE_ROWS[x.device.type]) for x in whole)):
            self.dense(row, some, lr, n, self.ops.adam_step)

    def event(self, row, whole, arrived, lr, events):
        """An event of a sparse table, whole = (p, *states), with all gradients that have arrived for it.

        arrived: [(ids, pending, parts), ...], see Rows.deliver. events: of each one so far, this one too, for
        how many ordinary ones it stands; its decays are those of so many.
        """
        for _, pending, _ in arrived:
            pending.wait()
        ids, _, parts = zip(*arrived)
        ids, g = merged(torch.cat(ids), torch.cat(parts), self.ops.add_rows)
        betas2 = torch.tensor([row.betas[1] ** k for k in events], device=ids.device)
        row = replace(row, betas=[beta ** events[-1] for beta in row.betas], wd_mul=row.wd_mul * events[-1])
        rate, decay = self.rates(row, lr, len(events))
        if row.kind == "shared":
            # Trap: as tensors, since the decays of a later event would compile anew.
            betas = [torch.full((), beta, device=ids.device) for beta in row.betas]
            for some in dense_pieces(whole, ids, g, TABLE_ROWS[ids.device.type]):
                self.ops.adam_step(*some, rate, decay, betas=betas, eps=self.eps, share=self.share)
            return
        n = EVENT_ROWS[ids.device.type]
        for some, rows in zip(ids.split(n), (g * self.share).split(n)):
            self.ops.row_event(*whole, some, rows, betas2=betas2, rate=rate, decay=decay, eps=self.eps)


RING = 8                     # entries of two steps each whose loss may be under way


class LossRing:
    """Sum of losses and finite flags of the last steps, on their way from the device to the log."""

    def __init__(self, device, shape):
        self.cuda = device.type == "cuda"
        self.host = torch.zeros(RING, *shape, pin_memory=self.cuda)
        self.queue, self.n = [], 0

    def push(self, steps, tail, stamps):
        """Send the tail that holds these steps; stamps go with it. Call pop between two pushes."""
        entry, done = self.host[self.n % RING], torch.cuda.Event() if self.cuda else None
        entry.copy_(tail, non_blocking=True)
        if self.cuda:
            done.record()
        self.queue.append((steps, entry, stamps, done))
        self.n += 1

    def pop(self, wait=False):
        """Entries that have arrived, in order: (steps, tail, stamps). Waits for the oldest of a full ring."""
        while self.queue:
            steps, entry, stamps, done = self.queue[0]
            if done is not None:
                if wait or len(self.queue) == RING:
                    done.synchronize()
                elif not done.query():
                    return
            self.queue.pop(0)
            yield steps, entry.tolist(), stamps


class Flat:
    """The small parameters of rows in one vector p, their gradients in one, grad, that ends in the tail; the
    tail's way to the host is the ring."""

    def __init__(self, rows, tail_shape):
        self.rows, self.sizes = rows, [row.param.numel() for row in rows]
        self.p = torch.cat([row.param.data.flatten() for row in rows])
        self.grad = self.p.new_zeros(len(self.p) + math.prod(tail_shape))
        self.tail, self.ring = self.grad[len(self.p):].view(tail_shape), LossRing(self.p.device, tail_shape)
        self.m, self.m2 = torch.zeros_like(self.p), torch.zeros_like(self.p)
        self.tensors = self.m, self.m2, self.p, self.grad      # all that a step changes
        for row, p, g in zip(rows, self.p.split(self.sizes), self.grad[:len(self.p)].split(self.sizes)):
            row.param.data, row.param.grad = p.view_as(row.param), g.view_as(row.param)

    def step(self, adam, lr, n):
        """A step of adam, piece by piece because pieces have rates of their own; gradients become zero."""
        whole = self.p, self.grad[:len(self.p)], self.m, self.m2
        for row, *some in zip(self.rows, *(x.split(self.sizes) for x in whole)):
            adam.dense(row, some, lr, n)
        self.grad[:len(self.p)] = 0


class Averages:
    """Running averages, fp32, of w = {name: this rank's slice of a parameter}, to be blended into it.

    rows: [(names of parameters, share of their average in the blend)]. The parameters in `rescaled` get the
    norm back that they had, over all ranks: an average of unlike weights is shorter than they.
    """

    def __init__(self, rows, w, rescaled):
        self.w, self.rescaled, self.begun, self.shares = w, rescaled, set(), [share for _, share in rows]
        self.of = [{name: torch.zeros_like(w[name], dtype=torch.float32) for name in names}
                   for names, _ in rows]

    def tick(self, rates):
        """Move each row's averages towards the weights by its rate, at first all the way; 0: not now."""
        for i, rate in enumerate(rates):
            if rate:
                for name, average in self.of[i].items():
                    average.lerp_(self.w[name].float(), rate if i in self.begun else 1.0)
                self.begun.add(i)

    def ship(self, reduce):
        """Blend them into the weights, row by row, each into what the rows before it have left; rounded once.

        reduce: Comm.all_reduce, of sums of squares before and after. Returns the names of what has changed.
        """
        blends = {}
        for i in sorted(self.begun):
            for name, average in self.of[i].items():
                blends[name] = blends.get(name, self.w[name].float()).lerp(average, self.shares[i])
        if blends:
            sums = torch.stack([x.float().square().sum() for name, blend in blends.items()
                                for x in (self.w[name], blend)])
            reduce(sums).wait()
            for (name, blend), (before, after) in zip(blends.items(), sums.view(-1, 2)):
                factor = (before / after.clamp(min=LANE_FLOOR)).sqrt() if name in self.rescaled else 1.0
                self.w[name].copy_(blend * factor)
        return list(blends)


# ---- 4.10 pointer: what a token copies from those before it ----------------------------------------
# Two blocks of keys at a time, never all (T, T); the products are torch's, what lies between is compiled.

POINTER_ROWS = 2048          # queries that the pointer takes at once


def pointer_blocks(T, block):
    """[(queries, keys)] as slices: queries of one block of the stream, keys of it and the block before."""
    starts = [(at, i) for at in range(0, T, block) for i in range(at, min(at + block, T), POINTER_ROWS)]
    return [(slice(i, min(i + POINTER_ROWS, at + block, T)), slice(max(at - block, 0), min(at + block, T)))
            for at, i in starts]


def pointer_weights(scores, of_sink, rows, cols, scale):
    """(A (I, J), s (I, 1), hits (I, J)): weights of keys and sink, together 1; which keys copy the target.

    math     softmax of scale scores_ij over start[i] <= j < i and of of_sink_i; hits: tokens[j] = target[i]
    shapes   scores: (I, J), of_sink: (I, 1); rows: (I, 3) int64, i, start and target of each query;
             cols: (2, J) int64, j and token of each key; weights at least fp32
    """
    (i, start, target), (j, tokens) = rows.split(1, 1), cols.split(1, 0)
    scores = scores.to(of_sink.dtype) * scale
    scores = scores.masked_fill((j >= i) | (j < start), -math.inf)
    top = torch.maximum(scores.amax(1, keepdim=True), of_sink)
    weights, sink = (scores - top).exp(), (of_sink - top).exp()
    total = weights.sum(1, keepdim=True) + sink
    return weights / total, sink / total, tokens == target


def pointer_read(scores, of_sink, rows, cols, *, scale):
    """(I, 2): the weight that copies each query's target, and that of the sink; see pointer_weights."""
    weights, sink, hits = pointer_weights(scores, of_sink, rows, cols, scale)
    return torch.cat(((weights * hits).sum(1, keepdim=True), sink), 1)


def pointer_slopes(scores, of_sink, rows, cols, dmix, *, scale):
    """(du (I, J) as scores, du_sink (I, 1)): gradients of scores and of_sink for those of pointer_read.

    With D_i = dc_i c_i + ds_i s_i: du_ij = A_ij (dc_i [hit] - D_i), du_sink = s_i (ds_i - D_i).
    """
    weights, sink, hits = pointer_weights(scores, of_sink, rows, cols, scale)
    dc, ds = dmix.split(1, 1)
    mean = dc * (weights * hits).sum(1, keepdim=True) + ds * sink
    return (scale * weights * (dc * hits - mean)).type_as(scores), sink * (ds - mean)


def _pointer_read_example(rand, size):
    """A block of queries that see the keys before them in their document, and a third of the ids."""
    I, J = EXAMPLE_T[size] // EXAMPLE_PART, EXAMPLE_PART
    scores, i = rand(I, J), torch.arange(I, device=rand(1).device)
    rows = torch.stack((i, i // 2, i % EXAMPLE_QKV), 1)
    j = torch.arange(J, device=i.device)
    return (scores, rand(I, 1).float(), rows, torch.stack((j, j % EXAMPLE_QKV))), {"scale": 0.5}


def _pointer_slopes_example(rand, size):
    """The same, with gradients of what is read."""
    xs, settings = _pointer_read_example(rand, size)
    return (*xs, rand(len(xs[0]), 2).float()), settings


FAST["pointer_read"] = Fast("reorder", pointer_read, pointer_read, _pointer_read_example, "step")
FAST["pointer_slopes"] = Fast("reorder", pointer_slopes, pointer_slopes, _pointer_slopes_example, "step")


def normed_parts(x, w, gain):
    """Query, times gain, and key of every token, normed: (T, E) each. w: (2, E, D) fp32, gain: fp32 ()."""
    q, k = (rms_norm(F.linear(x, part).type_as(gain)) for part in w.type_as(x))
    return (gain * q).type_as(x), k.type_as(x)


class Pointer(torch.autograd.Function):
    """(T, 2), at least fp32: the weight that copies a token's target, and that of the sink; see [9].

    A query looks at tokens of its document before it, in its block of the stream and the one before. c_i is
    the sum of A_ij over the j with tokens[j] = following[i]. Weights are made anew in the backward pass.
    """

    @staticmethod
    def parts(q, sink, tokens, following, start):
        """(of_sink, rows, cols) of all queries and keys, see pointer_weights."""
        wide, i = torch.promote_types(q.dtype, torch.float32), torch.arange(len(q), device=q.device)
        of_sink = (q.to(wide) @ sink.to(wide) * q.shape[1] ** -0.5)[:, None]
        return of_sink, torch.stack((i, start.long(), following.long()), 1), torch.stack((i, tokens.long()))

    @staticmethod
    def forward(ctx, q, k, sink, tokens, following, where):
        start, block, ops = where
        of_sink, rows, cols = Pointer.parts(q, sink, tokens, following, start)
        ctx.save_for_backward(q, k, sink, of_sink, rows, cols)
        ctx.block, ctx.ops = block, ops
        return torch.cat([ops.pointer_read(q[here] @ k[there].T, of_sink[here], rows[here], cols[:, there],
                                           scale=q.shape[1] ** -0.5)
                          for here, there in pointer_blocks(len(q), block)])

    @staticmethod
    def backward(ctx, dmix):
        """Blocks overlap in their keys, whose gradients add up in dmix's dtype."""
        q, k, sink, of_sink, rows, cols = ctx.saved_tensors
        dq, dk, of_sinks = torch.empty_like(q), torch.zeros_like(k, dtype=dmix.dtype), []
        scale = len(sink) ** -0.5
        for here, there in pointer_blocks(len(q), ctx.block):
            du, du_sink = ctx.ops.pointer_slopes(q[here] @ k[there].T, of_sink[here], rows[here],
                                                 cols[:, there], dmix[here], scale=scale)
            dq[here] = du @ k[there]
            dk[there] += du.T @ q[here]
            of_sinks.append(du_sink)
        du_sink = scale * torch.cat(of_sinks)
        dsink = (du_sink * q.to(dmix.dtype)).sum(0)
        return dq + (du_sink * sink).type_as(q), dk.type_as(k), dsink.type_as(sink), None, None, None

    @staticmethod
    def last(q, k, sink, tokens, where, n):
        """(c (n,), s ()) of the last token of a stream: what it copies of each of n tokens, and its sink."""
        (here, there), (start, block) = pointer_blocks(len(q), where[1])[-1], where
        of_sink, rows, cols = Pointer.parts(q, sink, tokens, tokens, start)
        weights, sink, _ = pointer_weights(q[here] @ k[there].T, of_sink[here], rows[here], cols[:, there],
                                           q.shape[1] ** -0.5)
        return weights.new_zeros(n).index_add(0, tokens[there].long(), weights[-1]), sink[-1, 0]


# ======== 5. Ops ================================================================ budget 20 ====
# Section 4 as the model uses it: names for what has a backward pass of its own. These add gradients where
# they belong, so that autograd sums none of a table's size. They know nothing of layers or steps. What else
# the model uses of section 4 are rows of FAST.

LOSS_ROWS = LOSS_BLOCK           # rows of logits at once
documents = Documents            # of a stream, made once for all layers
view = View.of                   # of a stage, once for all its steps
param_row = ParamRow             # of a parameter: how it is trained
mixed, small_network = weigh, network   # of streams; behind gates and coefficients
lookup = Lookup.apply            # rows of a table
pointer = Pointer.apply          # what is copied of a token
pointer_parts = normed_parts     # its query and key
copies = Pointer.last            # what is copied of all tokens behind a stream
softcap_loss = SoftcapLoss.of    # of a stream
chances = SoftcapLoss.chances    # of all tokens behind a stream


# ======== 6. Model ============================================================== budget 380 ====
# The network: a table with one row per layer, the weights, the forward pass over one flat stream, one row
# per parameter for the optimizer. Nothing here knows the step, the world size or the optimizer. Matrices of
# one shape lie in one bank (N, R, C), N padded to a multiple of 8: every rank gets as many whole ones.

GATE_INPUTS = 12             # channels that the smear's gate and a value gate read
GATE_WIDTH = 64              # hidden units of the networks behind gates and coefficients
GATE_SCALE = 0.1             # learned factor on all gates, at first
COEF_SCALE = 0.1             # fixed factor on all coefficients
REMIX = (3, 3, 2, 4, 2)      # of the coefficients of a remix: for v, the stream, gates, attention, the MLP
GROUPS = 12                  # of channels, with coefficients of their own in the final mix
INIT_LINEAR = 3.0 ** 0.5 / 2   # uniform bound of a matrix, times fan_in ** -0.5, from [4]
INIT_HEAD = 0.005
INIT_VALUE = 0.01
INIT_POINTER = 3.0 ** 0.5    # uniform bound of the pointer's matrices, times fan_in ** -0.5, from [9]
INIT_GATES = {"out": 0.25, "gram": 0.05, "skip": 0.5, "xsa": 0.0, "x0": 0.0}
INIT_SKIP = -1.5
INIT_STREAM = 1.1 ** 0.5     # factor on the stream in each half of a layer
INIT_REMIX = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, INIT_STREAM, 1.0, 0.0, 0.05, INIT_STREAM, 1.0)
INIT_FINAL = (0.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
KEPT, ALIVE = (10, 2), (20, 2)   # activations of width D and F: of a layer, for its backward pass; at once
KEPT_ROWS, KEPT_STEPS = 3, 4   # copies of n-grams' rows in a forward pass; steps before an event, at most
SEED_BYTES = 7               # of a hash; torch takes seeds below 2^63
BANK_MULTIPLE = max(WORLDS)


@dataclass(frozen=True)
class Layer:
    """One row of the network's plan; Model.layer and Model.attend say what the fields do."""
    attention: str = ""      # "": none. single: every head for itself. paired: two heads share a stream
    wide: bool = False       # q and k have d_head channels, half of them without position; else half as many
    half_v: bool = False     # v has half of d_head's channels
    long: bool = False       # the long window
    value: bool = False      # a plane of value embeddings is added to v
    xsa: bool = False        # each head takes its own v out of what it has read
    offset: bool = False     # the channels of k without position are those of the token before
    gated: bool = False      # a gate for each head on what it has read
    reads: int = -1          # attention reads the stream behind that layer, normed; -1: the stream before it
    x0: bool = False         # adds the first stream, times a gate
    gram: bool = False       # adds the n-gram vector, times a gate
    skip: int = -1           # in place of attention adds the stream behind that layer, times a gate
    mlps: int = 1
    opens: bool = False      # the second gate network looks at the stream before this layer
    remix: bool = False      # coefficients of each token in place of gates and fixed factors


LAYERS = (
    Layer("paired", x0=True),
    Layer("single", half_v=True, value=True, xsa=True, x0=True, gram=True),
    Layer("paired", value=True, x0=True),
    Layer("single", wide=True, long=True, xsa=True, offset=True, gated=True),
    Layer(x0=True, gram=True, opens=True),
    Layer("paired", x0=True, gram=True),
    Layer(skip=3),
    Layer(x0=True, mlps=0),
    Layer("single", half_v=True, value=True, reads=7, mlps=2),
    Layer(gram=True),
    Layer("single", wide=True, long=True, value=True, offset=True, gated=True, reads=7, remix=True),
)


# {layer: its place in a bank, among the layers that have such a thing}
ATTENDS = {i: n for n, i in enumerate(i for i, layer in enumerate(LAYERS) if layer.attention)}
VALUES = {i: n for n, i in enumerate(i for i, layer in enumerate(LAYERS) if layer.value)}
VALUE_GATES = {i: VALUES[i] for i in VALUES if not LAYERS[i].remix}
MLPS = {i: n for n, i in enumerate(i for i, layer in enumerate(LAYERS) if layer.mlps)}
N_MLPS = sum(layer.mlps for layer in LAYERS)     # the second one of a layer stands behind the first ones
OPENS = min(i for i, layer in enumerate(LAYERS) if layer.opens)
START = -1                   # what the stream gets before the first layer


def gate_lanes(second):
    """[(gate, layer), ...] in the order of a gate network's outputs; "xsa" and "out" have one a head."""
    rows = [(i, layer) for i, layer in enumerate(LAYERS) if (i >= OPENS) == second]
    lanes = [(name, i) for i, layer in rows for name, has in
             (("xsa", layer.xsa), ("out", layer.gated), ("x0", layer.x0), ("gram", layer.gram),
              ("skip", layer.skip >= 0)) if has]
    return lanes if second else [("gram", START), *lanes]


def drawn(cfg, name, shape, spread, kind, device):
    """Initial values that depend on the seed and the name alone: `uniform` within spread, or `normal`."""
    if device.type == "meta":    # only shapes are wanted
        return torch.empty(shape, device=device)
    digest = hashlib.sha256(f"{cfg.seed}/{name}".encode()).digest()
    rand = torch.Generator().manual_seed(int.from_bytes(digest[:SEED_BYTES], "little"))
    x = torch.empty(shape)
    if kind == "uniform":
        return x.uniform_(-spread, spread, generator=rand)
    return x.normal_(0, spread, generator=rand)


class Model(nn.Module):
    """Rows of the banks: qk holds, per attention, the H/2 head pairs of Q and then of K, d_head rows a head;
    vo holds V and O, mlp up and down, and behind the layers' own the second one of a layer that has two.
    Down is stored like up, (F, D), and used from the other side. Narrow heads use the leading rows of a head,
    half-width v the leading rows of V and columns of O; the others rest at zero gradient.
    part = (i, n): w_value and w_gram are the i-th of n shares of their rows. near: {name: Rows} that are at
    hand in place of such a table, see Optimizer.pull."""
    view = staticmethod(view)

    def __init__(self, cfg, device, ops=None, part=(0, 1)):
        super().__init__()
        self.near, self.ngram_rows, self.has_pointer = {}, cfg.ngram_rows, cfg.pointer_block > 0
        self.n_heads, self.d_head, self.ops = cfg.n_heads, cfg.d_head, ops or references()
        D, H, dtype, bound = cfg.d_model, cfg.n_heads, DTYPES[cfg.dtype], INIT_LINEAR * cfg.d_model ** -0.5

        def weight(name, shape, spread, kind, multiple=1, dtype=dtype):
            n, live = -(-shape[0] // multiple) * multiple, shape[0]
            x = drawn(cfg, name, (n, *shape[1:]), spread, kind, device)
            x[live:] = 0                                       # the padding of a bank
            setattr(self, name, nn.Parameter(x.to(device, dtype)))

        def small(name, values):
            setattr(self, name, nn.Parameter(torch.as_tensor(values, dtype=torch.float32, device=device)))

        weight("w_embed", (VOCAB_PADDED, D), INIT_HEAD, "normal")
        self.w_head = nn.Parameter(self.w_embed.detach().clone())
        weight("w_value", (len(VALUES) * VOCAB_PADDED, D), INIT_VALUE, "normal")
        self.w_value.data = self.w_value.data.chunk(part[1])[part[0]].clone()
        if self.ngram_rows:
            self.w_gram = nn.Parameter(torch.zeros(cfg.ngram_rows // part[1], D, dtype=dtype, device=device))
            signs = drawn(cfg, "signs", (SIGN_ROWS, D), 1.0, "normal", device)
            self.register_buffer("signs", (1.0 - 2.0 * (signs < 0)).to(device, dtype))
        if self.has_pointer:
            E, fp32 = cfg.d_head, torch.float32
            weight("w_pointer", (2, E, D), INIT_POINTER * D ** -0.5, "uniform", dtype=fp32)   # of q and of k
            weight("w_sink", (E,), E ** -0.5, "normal", dtype=fp32)
            small("mix_pointer", 1.0)
        n = len(ATTENDS)
        weight("qk", (n * H, 2 * self.d_head, D), bound, "uniform", BANK_MULTIPLE)
        weight("vo", (2 * n, D, D), bound, "uniform", BANK_MULTIPLE)
        weight("mlp", (2 * N_MLPS, cfg.d_mlp, D), bound, "uniform", BANK_MULTIPLE)
        with torch.no_grad():
            self.mlp.view(-1, 2, cfg.d_mlp, D)[:, 1] = 0       # down: at first an MLP adds nothing
        L, hidden = len(LAYERS), (2, GATE_WIDTH, D)
        for name, start in (("v", [0.5] * n), ("o", [1.0] * n), ("smear", 0.0), ("skip", INIT_SKIP),
                            ("attn", [1.0] * n), ("mlp", [1.0] * L), ("stream", [[INIT_STREAM] * 2] * L)):
            small(f"mix_{name}", start)
        small("gate_smear", torch.zeros(GATE_INPUTS))
        small("gate_value", torch.zeros(len(VALUE_GATES), H, GATE_INPUTS))
        weight("gate_w1", hidden, D ** -0.5, "uniform", dtype=torch.float32)
        small("gate_scale", GATE_SCALE)
        for which, second in (("pre", False), ("post", True)):
            bias = [INIT_GATES[name] / GATE_SCALE for name, _ in gate_lanes(second)
                    for _ in range(H if name in ("xsa", "out") else 1)]
            small(f"gate_{which}_bias", bias)
            small(f"gate_{which}_w2", torch.zeros(len(bias), GATE_WIDTH))
        weight("coef_w1", hidden, D ** -0.5, "uniform", dtype=torch.float32)
        for which, bias in (("remix", INIT_REMIX), ("final", INIT_FINAL)):
            small(f"coef_{which}_bias", [x / COEF_SCALE for x in bias])
            small(f"coef_{which}_w2", torch.zeros(len(bias), GATE_WIDTH))
        small("coef_group_w2", torch.zeros(len(INIT_FINAL) * GROUPS, GATE_WIDTH))

    def forward(self, batch, view, only_tokens=False):
        """Summed loss of one stream: fp32 (). only_tokens: as at validation, no class but tokens has a part.
        batch: (tokens, doc_start and folded, the tokens for n-grams, (T,) int32, targets (T, K) int64,
        weights (T, K) fp32, classes (P,) int64 or None), see softcap_loss."""
        tokens, doc_start, folded, targets, weights, classes = batch
        x, mix, copy = self.stream(tokens, doc_start, folded, view), None, None
        if self.has_pointer:
            copy = torch.full((1,), COPY, device=x.device)
            following = targets[:, 0] if classes is None else classes[targets[:, 0]]
            copy = copy if classes is None else torch.searchsorted(classes, copy)
            where = doc_start, view.pointer_block, self.ops
            parts = pointer_parts(x, self.w_pointer, self.mix_pointer)
            mix = pointer(*parts, self.w_sink, tokens, following, where)
        n_classes = COPY + self.has_pointer if only_tokens else VOCAB_PADDED
        return softcap_loss(x, self.w_head, self.w_head.grad, targets, weights, classes=classes,
                            n_classes=n_classes, rows_op=self.ops.loss_rows, mix=mix, copy=copy)

    def probabilities(self, tokens, doc_start, folded, view):
        """Of each token to follow the last one of a stream, as validation counts them: fp32 (VOCAB,)."""
        x, copied = self.stream(tokens, doc_start, folded, view), None
        if self.has_pointer:
            parts = pointer_parts(x, self.w_pointer, self.mix_pointer)
            copied = copies(*parts, self.w_sink, tokens, (doc_start, view.pointer_block), VOCAB)
        return chances(F.linear(x[-1], self.w_head[:COPY + self.has_pointer]), copied)

    def wanted(self, batches):
        """{table: ids, ascending, of the rows of it that forward passes over these batches read}."""
        tokens = torch.cat([tokens for tokens, *_ in batches])
        plane = VOCAB_PADDED * torch.arange(len(VALUES), device=tokens.device)[:, None]
        ids = {"w_value": (plane + tokens.unique()).flatten()}
        if self.ngram_rows:
            # Trap: not of empty streams, for which functions would be compiled on the clock.
            grams = [self.grams(folded, start)[:, :2] for _, start, folded, *_ in batches if len(start)]
            ids["w_gram"] = torch.cat([tokens.new_zeros(0, 2).long(), *grams]).unique()
        return ids

    def most_rows(self, n_tokens):
        """{table: rows of it that so many tokens read at most}."""
        values = {"w_value": len(VALUES) * min(n_tokens, VOCAB_PADDED)}
        return values | ({"w_gram": 2 * n_tokens} if self.ngram_rows else {})

    def grams(self, folded, doc_start):
        """Rows of the table and of the signs, see ngrams: (T, 4) int64."""
        return self.ops.ngrams(folded, doc_start, self.ngram_rows, len(self.signs))

    def stream(self, tokens, doc_start, folded, view):
        """What the head reads: the normed, mixed residual stream behind the last layer, (T, D)."""
        docs, add = documents(doc_start), self.ops.add_rows
        e = lookup(self.w_embed, self.w_embed.grad, tokens, add)                   # (T, D)
        gate = torch.sigmoid(F.linear(e[:, :GATE_INPUTS], self.gate_smear.type_as(e)[None]))
        x0 = rms_norm(self.ops.smear(e, docs.goes_on, self.mix_smear.type_as(e) * gate))
        values = {i: self.rows("w_value", VOCAB_PADDED * n + tokens.long()) for i, n in VALUES.items()}
        run = SimpleNamespace(docs=docs, view=view, x0=x0, gram=torch.zeros_like(x0), values=values, gates={},
                              behind={}, banks=self.matrices())
        if self.ngram_rows:           # a bigram's row and a trigram's, each times its signs
            rows, signs = self.grams(folded, doc_start).chunk(2, 1)                # (T, 2) each
            run.gram = self.ops.signed_sum(self.rows("w_gram", rows), F.embedding(signs, self.signs))
        self.open_gates(run, "pre", x0)
        x = run.first = x0 + run.gates["gram", START] * run.gram
        for i, layer in enumerate(LAYERS):
            if layer.opens:
                self.open_gates(run, "post", x)
            x = self.remix(run, i, x) if layer.remix else self.layer(run, i, x)
            run.behind[i] = x
        return rms_norm(self.final_mix(run, x))

    def matrices(self):
        """{bank: its matrices}, taken apart once: of qk (2, H, d_head, D) for every attention."""
        n = len(ATTENDS)
        qk = self.qk[:n * self.n_heads].view(n, 2, self.n_heads, self.d_head, -1)
        return {"qk": qk.unbind(0), "vo": self.vo.unbind(0), "mlp": self.mlp.unbind(0)}

    def rows(self, name, ids):
        """Rows `ids`, int64, of a table: of those at hand, or of the whole one: (*ids, D)."""
        w, near, add = getattr(self, name), self.near.get(name), self.ops.add_rows
        if near is None:
            return lookup(w, w.grad, ids, add)
        return lookup(near.values, near.grad, torch.searchsorted(near.ids, ids.contiguous()), add)

    def open_gates(self, run, which, x):
        """Put the gates of the network `which`, which looks at x, into run.gates: (T, H) or (T, 1)."""
        second, lanes = which == "post", gate_lanes(which == "post")
        w2, bias = (getattr(self, f"gate_{which}_{part}") for part in ("w2", "bias"))
        out = self.gate_scale.type_as(x) * small_network(x, self.gate_w1[int(second)], w2, bias)
        widths = [self.n_heads if name in ("xsa", "out") else 1 for name, _ in lanes]
        run.gates |= dict(zip(lanes, out.split(widths, 1)))

    def layer(self, run, i, x):
        """A layer: attention or skip, what is added beside it, and the MLPs."""
        layer, gates = LAYERS[i], run.gates
        stream_a, stream_m = self.mix_stream[i]
        if layer.skip >= 0:
            x = x + torch.sigmoid(self.mix_skip).type_as(x) * gates["skip", i] * run.behind[layer.skip]
        else:
            terms = [(stream_a, x)]
            if layer.attention:
                h = rms_norm(x if layer.reads < 0 else run.behind[layer.reads])
                value = self.gated_value(run, i, h) if layer.value else None
                terms.append((self.mix_attn[ATTENDS[i]], self.attend(run, i, h, value)))
            terms += [(gates[name, i], extra) for name, extra, has in
                      (("x0", run.x0, layer.x0), ("gram", run.gram, layer.gram)) if has]
            x = mixed(terms, self.ops.mix)
        terms, h = [(stream_m, x)], rms_norm(x)
        for place in (MLPS.get(i), N_MLPS - 1)[:layer.mlps]:
            terms.append((self.mix_mlp[i], self.mlp_of(run, place, h)))
        return mixed(terms, self.ops.mix)

    def mlp_of(self, run, place, h):
        """The MLP at a place of the bank: (T, D)."""
        up, down = run.banks["mlp"][2 * place:2 * place + 2]
        return self.ops.relu2(F.linear(h, up)) @ down                              # down is stored like up

    def remix(self, run, i, x):
        """A layer whose mixing factors are 14 coefficients of each token, from the stream before it."""
        seven, first = run.behind[LAYERS[i].reads], run.first
        c = COEF_SCALE * small_network(x, self.coef_w1[0], self.coef_remix_w2, self.coef_remix_bias)
        extra, inner, gate, outer, last = c.split(REMIX, 1)
        gate = gate.repeat_interleave(self.n_heads // 2, 1)                                       # (T, H)
        value = self.by_head(run.values[i]) * gate[:, :, None]
        value = value + self.by_head(self.ops.mix(extra, first, seven, x))
        mixed = x + self.ops.mix(inner, first, seven, x)
        run.norm_read, run.before_remix = rms_norm(seven), x
        y = self.attend(run, i, run.norm_read, value)
        x = self.ops.mix(outer, mixed, y, first, run.gram)
        run.mlp_input = rms_norm(x)
        return self.ops.mix(last, x, self.mlp_of(run, MLPS[i], run.mlp_input))

    def final_mix(self, run, x):
        """x plus ten earlier vectors, each times a coefficient for every token and group of channels."""
        bias = torch.cat((self.coef_final_bias, self.coef_group_w2.new_zeros(len(self.coef_group_w2))))
        c = small_network(x, self.coef_w1[1], torch.cat((self.coef_final_w2, self.coef_group_w2)), bias)
        plain, grouped = c.split((len(INIT_FINAL), len(INIT_FINAL) * GROUPS), 1)
        c = plain[:, :, None] + grouped.unflatten(1, (-1, GROUPS))                               # (T, 10, 12)
        (skipped,) = {layer.skip for layer in LAYERS if layer.skip >= 0}
        (read,) = {layer.reads for layer in LAYERS if layer.reads >= 0}
        one, two, eight, ten = (run.values[i] for i in VALUES)
        sources = (run.first, run.behind[read], run.before_remix, one, run.behind[skipped], two, ten, eight,
                   run.mlp_input, run.norm_read)
        return x + self.ops.mix(COEF_SCALE * c, *sources)

    def by_head(self, x):
        """(T, H E) -> (T, H, E)."""
        return x.unflatten(1, (self.n_heads, -1))

    def gated_value(self, run, i, h):
        """Value embeddings of a layer, times a gate in (0, 2) for every token and head: (T, H, d_head)."""
        rows, half = run.values[i], GATE_INPUTS // 2
        inputs = torch.cat((h[:, :half], rows[:, :half]), 1)
        gate = 2 * torch.sigmoid(F.linear(inputs, self.gate_value[VALUE_GATES[i]].type_as(h)))   # (T, H)
        return self.by_head(rows) * gate[:, :, None]

    def attend(self, run, i, h, value):
        """Attention of a layer that reads h, with value (T, H, d_head) or None added to v: (T, D)."""
        layer, view, a = LAYERS[i], run.view, ATTENDS[i]
        width_qk = self.d_head if layer.wide else self.d_head // 2
        width_v = self.d_head // 2 if layer.half_v else self.d_head
        w_qk = run.banks["qk"][a][:, :, :width_qk].flatten(0, 2)
        w_v, w_o = run.banks["vo"][2 * a:2 * a + 2]
        w_v = w_v.unflatten(0, (self.n_heads, -1))[:, :width_v].flatten(0, 1)
        w_o = w_o.unflatten(1, (self.n_heads, -1))[:, :, :width_v].flatten(1)
        qk = F.linear(h, w_qk).unflatten(1, (2, self.n_heads, -1))
        v = self.by_head(F.linear(h, self.mix_v[a].type_as(h) * w_v))                            # (T, H, E)
        if value is not None:
            v = v + value[:, :, :width_v]
        pairs = layer.attention == "paired"
        turn = view.turn_wide if layer.wide else view.turn_paired if pairs else view.turn_narrow
        q, k = self.ops.heads(qk, turn, view.scale_wide if layer.wide else view.scale_narrow)
        k = self.ops.key_offset(k, run.docs.goes_on) if layer.offset else k
        window = view.long if layer.long else view.short
        y = self.ops.attention(q, k, v, run.docs, window=window, pairs=pairs)
        y = self.ops.exclude_self(y, v, run.gates["xsa", i]) if layer.xsa else y
        y = y * run.gates["out", i][:, :, None] if layer.gated else y
        return F.linear(y.flatten(1), self.mix_o[a].type_as(h) * w_o)


def stream_bytes(cfg, T, n):
    """About the GPU memory in bytes that a stream of T tokens takes: (when trained on, as one of a step's n,
    when scored). tests/test_gpu.py compares the first with the measured peak."""
    size, fp32 = DTYPES[cfg.dtype].itemsize, torch.float32.itemsize
    kept, alive = (T * size * (d * cfg.d_model + f * cfg.d_mlp) for d, f in (KEPT, ALIVE))
    block = LOSS_ROWS["cuda"] * VOCAB_PADDED * (2 * size + fp32)
    rows = 2 * T * cfg.d_model * (cfg.ngram_rows > 0)        # of bigrams and trigrams
    used, waiting = KEPT_ROWS * size, n * ((1 + KEPT_STEPS) * size + fp32)
    return len(LAYERS) * kept + block + rows * (used + waiting), alive + block + rows * (used + size)


POINTER = ("w_pointer", "w_sink", "mix_pointer")
PARAMS = (                   # parameters with the same settings, those sent first on top; rates from [4], [9]
    # names                                          kind      lr_mul  betas          wd_mul
    ("qk vo mlp",                                    "bank",   1.0,    None,          1.0),
    ("w_head w_embed",                               "table",  1.0,    (0.5, 0.95),   150.0),
    ("w_value",                                      "shared", 70.0,   (0.75, 0.95),  5.0),
    ("w_gram",                                       "lazy",   70.0,   (0.0, 0.95),   5.0),
    ("mix_v mix_o mix_smear mix_skip",               "small",  5.0,    (0.9, 0.99),   0.0),
    ("mix_attn mix_mlp",                             "small",  1.0,    (0.9, 0.95),   0.0),
    ("mix_stream",                                   "small",  5.0,    (0.9, 0.95),   0.0),
    ("gate_smear",                                   "small",  0.01,   (0.9, 0.99),   0.0),
    ("gate_value w_pointer",                         "small",  1.0,    (0.9, 0.99),   1.0),
    ("w_sink mix_pointer",                           "small",  1.0,    (0.9, 0.99),   0.0),
    ("gate_w1 gate_pre_w2 gate_post_w2",             "small",  0.1,    (0.9, 0.99),   1.0),
    ("gate_pre_bias gate_post_bias gate_scale",      "small",  0.1,    (0.9, 0.99),   0.0),
    ("coef_w1 coef_remix_w2 coef_final_w2 coef_group_w2", "small", 0.25, (0.9, 0.99), 1.0),
    ("coef_remix_bias coef_final_bias",              "small",  0.25,   (0.9, 0.99),   0.0),
)


def param_table(model, cfg):
    """One ParamRow for every parameter of the model."""
    absent = ("w_gram",) * (not model.ngram_rows) + POINTER * (not model.has_pointer)
    rows = {name: param_row(name, getattr(model, name), *rest)
            for names, *rest in PARAMS for name in names.split() if name not in absent}
    # The factor max(1, R / C) ** 0.5 of [1] for tall matrices, and down learns twice as fast as up [4]
    up = max(1.0, cfg.d_mlp / cfg.d_model) ** 0.5
    lr_mul = torch.tensor([up, 2 * up], device=model.mlp.device).repeat(len(model.mlp) // 2)[:, None, None]
    rows["mlp"] = replace(rows["mlp"], lr_mul=lr_mul)
    if table := rows.get("w_gram"):
        rows["w_gram"] = replace(table, lr_mul=table.lr_mul * cfg.ngram_lr)
    if astray := {name for name, _ in model.named_parameters()} - set(rows):
        raise RuntimeError(f"PARAMS has no row for {', '.join(sorted(astray))}")
    return list(rows.values())


# ======== 7. Optimizers ======================================================== budget 125 ====
# ANVIL [2] for the banks, Adam [5] for the rest, both with cautious decay [6]. Invariants:
# (1) A gradient is the sum of the losses' gradients over all micro-batches; 1 / n_micro is applied here.
# (2) Banks step every step. Adam steps on odd steps, with the sum of two steps' gradients.
# (3) A rank updates only its own slice of a bank or table, then sends it to all; small parameters live in
#     one flat vector that every rank updates alike. So all ranks hold equal weights of these after a step.
# (4) These, their gradients and all states keep their addresses. A zero gradient gives a zero update.
# (5) Of sparse tables a rank holds a range of rows; those that are read are sent, their gradients return.
# (6) Tied, the head takes both gradients, the embedding the head's weights and, when they part, its states.

TAIL = (2, 2)                # for each of two steps: the summed loss, and sum of 2^rank over failed ranks


class Optimizer:
    """Owns the gradients and states of the parameters of a table of rows (see ParamRow for its fields)."""

    def __init__(self, rows, comm, *, n_micro, anvil_lr, anvil_wd, adam_lr, adam_wd, adam_eps, averages=(),
                 ops=None):
        self.comm, self.n_adam, self.rows, rest = comm, 0, rows, (1 / n_micro, ops or references())
        self.anvil, self.adam = Anvil(anvil_lr, anvil_wd, *rest), Adam(adam_lr, adam_wd, adam_eps, *rest)
        self.banks = [row for row in rows if row.kind == "bank"]
        self.tables = [row for row in rows if row.kind == "table"]
        self.sparse = [row for row in rows if row.kind in ("shared", "lazy")]
        # Of the sparse tables: this step's rows, what has arrived for the next event, a number for each event
        self.state, self.near, self.arrived, self.events = {}, {}, {row.name: [] for row in self.sparse}, []
        for row in self.banks + self.tables:
            row.param.grad = torch.zeros_like(row.param)
            self.state[row.name] = zero_state(row.kind, self._mine(row.param.data))
        for row in self.sparse:
            self.state[row.name] = zero_state(row.kind, row.param.data)
        self.flat = Flat([row for row in rows if row.kind == "small"], TAIL)
        dense = {row.name: self._mine(row.param.data) for row in self.banks + self.tables}
        shares = {row.name: row.param.data for row in self.sparse}
        self.averages = Averages(averages, dense | shares, set(dense))

    def _mine(self, x):
        """This rank's slice of a bank, a table or what goes with it."""
        return x.chunk(self.comm.world)[self.comm.rank]

    def tensors(self):
        """Everything that a step changes but lazy tables and counts: weights, gradients, states."""
        rows = [row for row in self.banks + self.tables + self.sparse if row.kind != "lazy"]
        big = [x for row in rows for x in (row.param.data, row.param.grad, *self.state[row.name].values())]
        return [x for x in (*big, *self.flat.tensors) if x is not None]

    def lazy(self):
        """{table: [rows, second moments, last events]} of this rank's share of the lazy tables."""
        rows = [row for row in self.sparse if row.kind == "lazy"]
        return {row.name: [row.param.data, *self.state[row.name].values()] for row in rows}

    def rooms(self, most):
        """{table: Room for so many of its rows}."""
        return {row.name: Room(most[row.name], row.param.data) for row in self.sparse}

    def pull(self, wanted, wants_grad):
        """{table: Rows} for {table: ids, ascending}; all ranks ask together. With wants_grad the next step
        takes the gradients of these rows to their owners."""
        near = {row.name: Rows(wanted[row.name], row.param.data, self.comm.world, self.comm.all_to_all,
                               wants_grad) for row in self.sparse}
        self.near = near if wants_grad else self.near
        return near

    @torch.no_grad()
    def step(self, step, pace):
        """Reduce the gradients, update, send the weights, move the averages."""
        adam, head, embed = step % 2 == 1, "w_head", "w_embed"
        w = {row.name: row.param for row in self.tables}
        alone = [row for row in self.tables if not (pace.tied and row.name == embed)]
        sharded = self.banks + alone if adam else self.banks
        if adam and pace.tied:
            w[head].grad += w[embed].grad
            w[embed].grad.zero_()
        # All reductions start before the first update, so that they can hide behind it (on a GPU).
        sent = [self.comm.reduce_scatter(row.param.grad) for row in sharded]
        flat = self.comm.all_reduce(self.flat.grad) if adam else None
        for name, rows in self.near.items():
            self.arrived[name].append(rows.deliver())
        self.near = {}
        gathers = []
        self.n_adam += adam
        for row, (pending, g) in zip(sharded, sent):
            pending.wait()
            p, state = self._mine(row.param.data), self.state[row.name]
            if row.kind == "bank":
                lr_mul = self._mine(row.lr_mul) if isinstance(row.lr_mul, Tensor) else row.lr_mul
                self.anvil.bank(row, lr_mul, p, g, state, pace)
            else:
                self.adam.table(row, (p, g, *state.values()), pace.lr, self.n_adam)
            gathers.append(self.comm.all_gather(row.param.data))
        if adam:
            flat.wait()
            self.flat.step(self.adam, pace.lr, self.n_adam)
        for row, pending in zip(sharded, gathers):
            pending.wait()
            row.param.grad.zero_()
        if adam and pace.tied:
            w[embed].data.copy_(w[head].data)
        if pace.parts:
            for name, x in self.state[embed].items():
                x.copy_(self.state[head][name])
        self.events += [pace.event] * (pace.event > 0)
        for row in self.sparse if pace.event else ():
            arrived, self.arrived[row.name] = self.arrived[row.name], []
            whole = row.param.data, *self.state[row.name].values()
            self.adam.event(row, whole, arrived, pace.lr, self.events)
        self.averages.tick(pace.ticks)

    @torch.no_grad()
    def ship(self):
        """Blend the averages into the weights, on all ranks."""
        names = self.averages.ship(self.comm.all_reduce)
        sent = [row.param.data for row in self.banks + self.tables if row.name in names]
        for pending in [self.comm.all_gather(x) for x in sent]:
            pending.wait()

    def reset(self, n_adam=0, events=()):
        """Counts of steps and events as they were, and no averages."""
        self.n_adam, self.events = n_adam, [*events]
        self.averages.begun.clear()
        self.flat.ring = LossRing(self.flat.p.device, TAIL)


# ======== 8. Data =============================================================== budget 475 ====
# Shards of tokens [7]: 256 little-endian int32 (magic, version, number of tokens, zeros), then uint16 tokens.
# All files together are one list of documents, each beginning with BOS; a headless piece at a file's start is
# skipped. What a micro-batch holds depends on its number alone. A worker thread, which never issues
# collectives, prepares the next steps.

SHARD_MAGIC, SHARD_VERSION = 20240520, 1
SHARD_HEADER_BYTES = 1024
OTHER_MAGICS = {20240801: "a Llama 3 shard of uint32 tokens"}
HEADER_WORDS = 3
CHECK_TOKENS = 1_000_000     # of each shard, looked at before the start
INDEX_TOKENS = 1 << 22       # document starts are searched in pieces of this many tokens
N_SLOTS = 3                  # batches in host memory: one being filled, one ready, one being copied
PEEK_BYTES = 64
SHOWN_BYTES = 16
LFS_HEAD = b"version https://git-lfs"
VOCAB_FILE_SHA256 = "a622700e3255b4a6186e052c4c715c1d05634cb6041c12ab6c95c9ee0a2c9772"
FIX_DATA = "python data/cached_fineweb10B.py fetches FineWeb again"


# ---- 8.1 shards: opening and checking them before anything slow ----------------------------------

def files_of(pattern, name):
    """The files that a path pattern names, sorted. Raises Refusal where there is none."""
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise Refusal(f"{name}={pattern}: no such file, seen from {os.getcwd()}. Fetch FineWeb with "
                      f"python data/cached_fineweb10B.py 9, or give other shards with {name}=PATTERN.")
    return paths


def looks_like(head):
    """A guess at what a file is that is no shard."""
    if head.startswith(LFS_HEAD):
        return "a Git LFS pointer: the clone did not fetch the file itself"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page, as a failed download leaves it"
    return f"something that begins with {head[:SHOWN_BYTES]!r}" if head else "an empty file"


def open_shard(path):
    """The tokens of a shard as a read-only memory map, uint16 (n,). Raises Refusal unless it is whole."""
    try:
        n_bytes = os.path.getsize(path)
        with open(path, "rb") as f:
            head = f.read(PEEK_BYTES)
    except OSError as e:
        raise Refusal(f"{path}: cannot be read ({e.strerror}).") from None
    if n_bytes < SHARD_HEADER_BYTES or head.startswith(LFS_HEAD):
        raise Refusal(f"{path} is no token shard: {n_bytes:,} bytes, {looks_like(head)}. {FIX_DATA}.")
    magic, version, claimed = np.frombuffer(head, "<i4", HEADER_WORDS).tolist()
    if magic != SHARD_MAGIC:
        what = OTHER_MAGICS.get(magic) or looks_like(head)
        raise Refusal(f"{path} is no token shard: its magic number is {magic}, want {SHARD_MAGIC}; "
                      f"it is {what}. {FIX_DATA}.")
    if version != SHARD_VERSION:
        raise Refusal(f"{path}: version {version}, want {SHARD_VERSION}. {FIX_DATA}.")
    present, half = divmod(n_bytes - SHARD_HEADER_BYTES, 2)
    if (present, half) != (claimed, 0):
        raise Refusal(f"{path}: its header claims {claimed:,} tokens, present are {present:,}"
                      f"{' and a half' if half else ''}; it was cut short or added to. {FIX_DATA}.")
    return np.memmap(path, "<u2", "r", SHARD_HEADER_BYTES, (claimed,)) if claimed else np.zeros(0, "<u2")


def check_range(tokens, where):
    """Raise Refusal at the first id that is no token."""
    if len(tokens) and int(tokens.max()) >= VOCAB:
        at = int(np.argmax(tokens >= VOCAB))
        raise Refusal(f"{where}: id {int(tokens[at])} at token {at}, but the vocabulary has {VOCAB} ids "
                      f"(padded to {VOCAB_PADDED}). It was made with another tokenizer than GPT-2's.")


def check_ids(path, tokens):
    """Check the ids of a shard's first million tokens. Returns the position of the first BOS, or -1."""
    looked = np.asarray(tokens[:CHECK_TOKENS])
    check_range(looked, path)
    starts = np.flatnonzero(looked == BOS)
    return int(starts[0]) if len(starts) else -1


def check_train_shard(path, tokens):
    """Raise Refusal unless documents begin early in the shard. Returns the tokens from the first one on."""
    first, looked = check_ids(path, tokens), min(len(tokens), CHECK_TOKENS)
    if first < 0 or first > looked // 2:
        found = f"{'no' if first < 0 else 'the first'} document start (BOS, id {BOS})"
        where = f"in the first {looked:,}" if first < 0 else f"is token {first:,}"
        raise Refusal(f"{path}: {found} {where} of {len(tokens):,} tokens. Every document must begin with "
                      f"{BOS}, as in GPT-2 shards; python data/tokenize_text.py makes such shards.")
    return len(tokens) - first


def check_amounts(cfg, n_train, n_val):
    """Refuse a run that the tokens present cannot feed; documents cut to size only make it hungrier."""
    ends = cfg.stage_ends
    steps = [min(end, cfg.n_run) - min(start, cfg.n_run) for start, end in zip((0, *ends), ends)]
    needed = sum(n * cfg.n_micro * (stage.T + 1) for n, stage in zip(steps, cfg.stages))
    if n_train < needed and not cfg.repeat:
        raise Refusal(f"{cfg.n_run} steps need at least {needed:,} training tokens, present are {n_train:,} "
                      f"in {cfg.train_files}. Fetch more shards (python data/cached_fineweb10B.py N), take "
                      f"fewer steps with stop=K, or allow repetition with repeat=true.")
    if n_val < cfg.val_tokens + 1:
        fits = max(n_val - 1, 0) // cfg.val_seq * cfg.val_seq
        cure = f"val_tokens={fits}" if fits else "a smaller val_seq and val_tokens"
        raise Refusal(f"val_tokens={cfg.val_tokens} needs {cfg.val_tokens + 1:,} tokens, present are "
                      f"{n_val:,} in {cfg.val_files}. Take {cure}.")


def check_vocabulary(path):
    """The bytes of a vocabulary file. Raises Refusal unless it is the one that the repository ships."""
    try:
        with open(path, "rb") as f:
            packed = f.read()
    except OSError as e:
        raise Refusal(f"vocab_file={path}: cannot be read ({e.strerror}).") from None
    sha = hashlib.sha256(packed).hexdigest()
    if sha != VOCAB_FILE_SHA256:
        raise Refusal(f"vocab_file={path}: its SHA-256 is {sha}, want {VOCAB_FILE_SHA256}. "
                      f"Restore the file that the repository ships.")
    return packed


def check_files(cfg, comm):
    """Check every shard before anything slow: headers and sizes on every rank, ids shared out over the ranks.

    Raises the same Refusal on every rank. Returns the usable number of training tokens."""
    try:
        check_vocabulary(cfg.vocab_file)
        paths = files_of(cfg.train_files, "train_files"), files_of(cfg.val_files, "val_files")
        train, val = ([(path, open_shard(path)) for path in group] for group in paths)
        for path, tokens in val:
            twin = [other for other, same in train if os.path.samefile(path, other)   # or is a copy of it
                    or len(tokens) == len(same) and (tokens[:CHECK_TOKENS] == same[:CHECK_TOKENS]).all()]
            if twin:
                raise Refusal(f"{path} is among the validation files and the training files ({twin[0]}). "
                              f"Give disjoint val_files and train_files.")
        sizes = [check_train_shard(*shard) for shard in train[comm.rank::comm.world]]
        for shard in val[comm.rank::comm.world]:
            check_ids(*shard)
        check_amounts(cfg, sum(len(tokens) for _, tokens in train), sum(len(tokens) for _, tokens in val))
        verdict = sum(sizes), None
    except Refusal as e:
        verdict = 0, str(e)
    verdicts = comm.collect(verdict)
    if trouble := [text for _, text in verdicts if text]:
        raise Refusal(trouble[0])
    return sum(n for n, _ in verdicts)


# ---- 8.2 documents: packing them into micro-batches, finding and reading them --------------------

def pack(start, stop, first, n_tokens, max_doc):
    """Take documents from number `first` on until they hold n_tokens + 1 tokens.

    start, stop   int64 arrays: where each document begins and ends
    returns       (begins, lengths, next document), or None if the documents do not suffice
    Each document is cut to max_doc, the last one to fit; what is cut off is dropped, so every span begins
    with BOS. The + 1 is there because targets are the inputs shifted by one."""
    some = slice(first, first + n_tokens + 1)
    lengths = np.minimum(stop[some] - start[some], max_doc)
    filled = np.cumsum(lengths)
    last = int(np.searchsorted(filled, n_tokens + 1))
    if last == len(filled):
        return None
    lengths = lengths[:last + 1]
    lengths[-1] -= filled[last] - (n_tokens + 1)
    return start[first:first + last + 1], lengths, first + last + 1


class Corpus:
    """The documents of all training files in order, found piece by piece as the run needs them."""

    def __init__(self, paths, repeat):
        self.paths, self.repeat = paths, repeat
        self.shards = [open_shard(path) for path in paths]
        self.offsets = np.cumsum([0] + [len(tokens) for tokens in self.shards])   # of each shard in the whole
        self.start, self.stop = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.looked = 0              # tokens of the whole that have been searched for document starts
        self.open = None             # start of the document whose end has not been found
        self.next_doc, self.epoch_docs = 0, None

    def find_more(self):
        """Search the next piece for document starts. False when there is none left."""
        if self.looked == self.offsets[-1]:
            return False
        shard = int(np.searchsorted(self.offsets, self.looked, "right")) - 1
        low, end = self.offsets[shard], self.offsets[shard + 1]
        upto = min(self.looked + INDEX_TOKENS, end)
        starts = np.flatnonzero(self.shards[shard][self.looked - low:upto - low] == BOS) + self.looked
        if self.open is not None:
            starts = np.concatenate(([self.open], starts))
        stops = starts[1:]
        self.open = starts[-1] if len(starts) else None
        if upto == end and self.open is not None:   # a document ends with its file
            stops, self.open = np.append(stops, end), None
        self.start = np.concatenate((self.start, starts[:len(stops)]))
        self.stop = np.concatenate((self.stop, stops))
        self.looked = upto
        return True

    def take(self, n_tokens, max_doc):
        """Spans of the next micro-batch, as pack returns them; the same whoever asks, if asked in order."""
        while (spans := pack(self.start, self.stop, self.next_doc, n_tokens, max_doc)) is None:
            if self.find_more():
                continue
            if not self.repeat or not len(self.start):
                raise RunFailed(
                    f"the training data is at an end: {len(self.start):,} documents, {self.offsets[-1]:,} "
                    f"tokens in {len(self.paths)} file(s), of documents longer than {max_doc} only that "
                    f"many. Fetch more shards or allow repetition with repeat=true.")
            self.epoch_docs = self.epoch_docs or len(self.start)   # the whole list once more, behind the end
            self.start = np.concatenate((self.start, self.start[:self.epoch_docs]))
            self.stop = np.concatenate((self.stop, self.stop[:self.epoch_docs]))
        begins, lengths, self.next_doc = spans
        return begins, lengths

    @property
    def epoch(self):
        """Epoch of the last document taken, from 1."""
        return 1 + (self.next_doc - 1) // self.epoch_docs if self.epoch_docs else 1

    def read(self, begins, lengths):
        """The tokens of spans, one behind the other: uint16. Checks their ids."""
        out, at = np.empty(int(lengths.sum()), np.uint16), 0
        for begin, n in zip(begins.tolist(), lengths.tolist()):
            shard = int(np.searchsorted(self.offsets, begin, "right")) - 1
            low = begin - int(self.offsets[shard])
            out[at:at + n] = self.shards[shard][low:low + n]
            at += n
        if int(out.max()) >= VOCAB:
            check_range(np.asarray(self.shards[shard]), self.paths[shard])
            check_range(out, f"a batch from {self.paths[shard]} and the file before")
        return out


# ---- 8.3 validation: streams and what they are compared with -------------------------------------

def doc_starts(tokens):
    """Stream position of the BOS of each token's document, 0 before the first one: int32 (T,)."""
    position = np.arange(len(tokens), dtype=np.int32)
    return np.maximum.accumulate(np.where(tokens == BOS, position, 0))


def read_validation(cfg, comm, vocabulary):
    """This rank's validation streams: [batch, ...] as Model.forward takes them, on the CPU, in order.

    Stream i of val_tokens / val_seq goes to rank i mod world. Streams do not begin at a document's start.
    Every rank gets the same number, some perhaps an empty one at the end."""
    shards = [open_shard(path) for path in files_of(cfg.val_files, "val_files")]
    flat, streams = np.concatenate([x[:cfg.val_tokens + 1] for x in shards])[:cfg.val_tokens + 1], []
    rounds = -(-(cfg.val_tokens // cfg.val_seq) // comm.world)
    for i in range(comm.rank, rounds * comm.world, comm.world):
        piece = flat[i * cfg.val_seq:(i + 1) * cfg.val_seq + 1]
        check_range(piece, f"stream {i} of {cfg.val_files}")
        inputs, targets = piece[:-1].astype(np.int32), piece[1:, None].astype(np.int64)
        ones, folded = np.ones(targets.shape, np.float32), vocabulary.folded[inputs]
        values = inputs, doc_starts(inputs), folded, targets, ones
        streams.append((*map(torch.from_numpy, values), None))
    return streams


# ---- 8.4 Vocabulary: GPT-2's tokens as bytes, text to tokens and back -----------------------------

def class_of(kind):
    """A regular expression's character class of all characters whose Unicode category begins with `kind`."""
    inside = [c for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)).startswith(kind)]
    breaks = [i for i in range(1, len(inside)) if inside[i] != inside[i - 1] + 1]
    runs = zip([0, *breaks], [*breaks, len(inside)])
    return "".join(f"{re.escape(chr(inside[a]))}-{re.escape(chr(inside[b - 1]))}" for a, b in runs)


class Vocabulary:
    """The byte strings of GPT-2's tokens in id order. The merge rank of a token is its id."""

    def __init__(self, path, fold_case):
        packed, self.bytes, at, self.fold_case = check_vocabulary(path), [], 0, fold_case
        while at < len(packed):      # a length byte, then the token
            self.bytes.append(packed[at + 1:at + 1 + packed[at]])
            at += 1 + packed[at]
        self.ids = {token: i for i, token in enumerate(self.bytes)}

    def encode(self, text):
        """Token ids of a text, without BOS. Special-token text is text like any other."""
        letter, number = class_of("L"), class_of("N")
        words = re.compile(f"'(?:s|t|re|ve|m|ll|d)| ?[{letter}]+| ?[{number}]+| ?[^\\s{letter}{number}]+"
                           f"|\\s+(?!\\S)|\\s+")
        return [i for word in words.findall(text) for i in self._merge(word.encode())]

    def _merge(self, word):
        """Byte-pair encoding of one word: the pair with the lowest rank is merged until none is left."""
        parts = [word[i:i + 1] for i in range(len(word))]
        while pairs := [(rank, i) for i in range(len(parts) - 1)
                        if (rank := self.ids.get(parts[i] + parts[i + 1])) is not None]:
            i = min(pairs)[1]
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]

    def decode(self, ids):
        """The text of token ids; bytes that are no UTF-8 become a replacement character."""
        return b"".join(self.bytes[i] for i in ids).decode("utf-8", "replace")

    @functools.cached_property
    def prefixes(self):
        """For every token the longest proper prefix of its bytes that is a token, or -1: (V,) int32 [4]."""
        table = np.full(VOCAB_PADDED, -1, np.int32)
        for i, token in enumerate(self.bytes[:BOS]):     # BOS is no text
            table[i] = next((self.ids[token[:n]] for n in range(len(token) - 1, 0, -1)
                             if token[:n] in self.ids), -1)
        return table

    @functools.cached_property
    def folded(self):
        """For every token the first one whose text is the same but for case, accents and blanks: (V,) int32.

        The text is normed by NFKC and NFD, loses accents, becomes lower case, has one space for blanks [8].
        Tokens that are no text by themselves or leave nothing stay what they are; without fold_case all do.
        """
        table, first = np.arange(VOCAB_PADDED, dtype=np.int32), {}
        for i, token in enumerate(self.bytes[:BOS] if self.fold_case else ()):
            with contextlib.suppress(UnicodeDecodeError):
                text = token.decode()
                if not text.isascii():
                    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
                    text = "".join(c for c in text if unicodedata.category(c) != "Mn")
                text = re.sub("[ \t\r\n]+", " ", text.lower())
                if text := text.strip() or text * (text == " "):
                    table[i] = first.setdefault(text, i)
        return table


# ---- 8.5 targets: what the loss of a micro-batch is taken over -------------------------------------

SWEEP_STRIDE = 20_011        # coprime with the number of classes: the sweep meets all of them


def candidates(targets, n_classes, start):
    """(classes, next start): the targets, COPY and further classes, n_classes in all, ascending: int64.

    The further ones are met on a sweep k -> 20011 k mod V from k = start on, which ends with the last one
    taken. Raises RunFailed where the targets alone are too many."""
    taken = np.zeros(VOCAB_PADDED, bool)
    taken[targets] = taken[COPY] = True
    missing = n_classes - int(taken.sum())
    if missing < 0:
        raise RunFailed(f"a micro-batch has {n_classes - missing} different targets, more than the "
                        f"{n_classes} classes of its loss. Raise p_early, p_middle or p_late.")
    sweep = (start + np.arange(VOCAB_PADDED)) * SWEEP_STRIDE % VOCAB_PADDED
    free = np.flatnonzero(~taken[sweep])[:missing]
    taken[sweep[free]] = True
    return np.flatnonzero(taken), (start + int(free[-1]) + 1) % VOCAB_PADDED if missing else start


def weighted_targets(following, plan, prefix_of):
    """(targets (T, K) int64, weights (T, K) fp32) of T next tokens `following`; -1 where there is none."""
    T, shape = len(following), (len(following), len(plan.future) + len(plan.prefix))
    targets, weights = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
    for k, weight in enumerate(plan.future):
        targets[:T - k, k], weights[:T - k, k] = following[k:], weight
    if plan.prefix:
        targets[:, -1] = prefix_of[following]
        weights[:, -1] = plan.prefix[0]
    return targets, weights


# ---- 8.6 Loader: the worker thread ---------------------------------------------------------------

class Loader:
    """Prepares the batches of a plan on a worker thread, while the clock runs.

    plan: one StepPlan per step. A batch is what Model.forward takes, one for each micro-batch of this rank,
    at fixed addresses on the device. A host slot is filled again only when the copy that read it has
    finished; without that the next batch would overwrite the one in flight."""

    def __init__(self, cfg, comm, plan):
        self.corpus = Corpus(files_of(cfg.train_files, "train_files"), cfg.repeat)
        self.plan, self.n_micro, self.device = plan, cfg.n_micro, comm.device
        n = cfg.n_micro // comm.world
        self.mine = range(comm.rank * n, (comm.rank + 1) * n)
        self.vocabulary = Vocabulary(cfg.vocab_file, cfg.fold_case)
        self.sweeps = [VOCAB_PADDED * m // cfg.n_micro for m in range(cfg.n_micro)]
        kinds = torch.int32, torch.int32, torch.int32, torch.int64, torch.float32, torch.int64
        on_gpu = comm.device.type == "cuda"
        sizes = [n * max(map(math.prod, shapes)) for shapes in zip(*map(self.shapes, plan))]
        self.slots = [[torch.empty(size, dtype=t, pin_memory=on_gpu) for size, t in zip(sizes, kinds)]
                      for _ in range(N_SLOTS)]
        self.on_device = [torch.empty(size, dtype=t, device=comm.device) for size, t in zip(sizes, kinds)]
        # A slot goes round: free, filled by the worker, ready, copied by next(), and free again.
        self.free, self.ready = queue.Queue(), queue.Queue()
        for i in range(N_SLOTS):
            self.free.put((i, torch.cuda.Event() if on_gpu else None))
        self.clock_runs, self.crcs, self.epochs = threading.Lock(), [], []
        self.clock_runs.acquire()
        threading.Thread(target=self._work, daemon=True, name="loader").start()

    @staticmethod
    def shapes(plan):
        """Shapes of a micro-batch: tokens, doc_start, folded, targets, weights, classes (none if all)."""
        T, targets = (plan.T,), (plan.T, len(plan.future) + len(plan.prefix))
        return T, T, T, targets, targets, (plan.n_classes % VOCAB_PADDED,)

    def views(self, buffers, plan):
        """Of every buffer the part that a step of the plan uses, one row a micro-batch."""
        n = len(self.mine)
        return [x[:n * math.prod(shape)].view(n, *shape) for x, shape in zip(buffers, self.shapes(plan))]

    def resume(self):
        """The clock runs: prepare batches."""
        self.clock_runs.release()

    def pause(self):
        """The clock is to stop: return when nothing is being prepared, and prepare nothing."""
        self.clock_runs.acquire()

    def _work(self):
        """The thread: fill free slots in the order of the plan, each only while the clock runs."""
        try:
            for plan in self.plan:
                i, copied = self.free.get()
                if copied is not None:
                    copied.synchronize()
                with self.clock_runs:
                    crcs, epoch = self._fill(self.views(self.slots[i], plan), plan)
                self.ready.put((i, copied, plan, crcs, epoch))
        except BaseException as e:   # the consumer raises it in the main thread; here it would go unseen
            self.ready.put(e)

    def _fill(self, slot, plan):
        """Pack all micro-batches of a step and read this rank's into the slot."""
        crcs = []
        for m in range(self.n_micro):
            spans = self.corpus.take(plan.T, plan.max_doc)
            if m not in self.mine:       # only the cursor moves on: packing is cheap, reading is not
                continue
            piece = self.corpus.read(*spans)
            crcs.append(zlib.crc32(piece))
            starts = np.repeat(np.cumsum(spans[1]) - spans[1], spans[1])[:-1]
            folded = self.vocabulary.folded[piece[:-1]]
            values = piece[:-1], starts, folded, *self._targets(piece[1:], plan, m)
            for buffer, value in zip(slot, values):
                buffer[m - self.mine[0]].numpy()[...] = value
        return crcs, self.corpus.epoch

    def _targets(self, following, plan, m):
        """(targets, weights, classes) of micro-batch m; the targets are positions in its classes."""
        targets, weights = weighted_targets(following, plan, self.vocabulary.prefixes)
        classes = np.zeros(0, np.int64)
        if plan.n_classes < VOCAB_PADDED:
            classes, self.sweeps[m] = candidates(following, plan.n_classes, self.sweeps[m])
            position = np.full(VOCAB_PADDED + 1, -1)       # the last one is for what is no class
            position[classes] = np.arange(len(classes))
            targets = position[targets]
        weights[targets < 0] = 0                           # a prefix that is no candidate is dropped
        return np.maximum(targets, 0), weights, classes

    def next(self):
        """The batches of the next step, one per micro-batch."""
        batch = self.ready.get()
        if isinstance(batch, BaseException):
            raise batch
        i, copied, plan, crcs, epoch = batch
        on_device = self.views(self.on_device, plan)
        for source, target in zip(self.views(self.slots[i], plan), on_device):
            target.copy_(source, non_blocking=True)
        if copied is not None:
            copied.record()
        self.free.put((i, copied))
        self.crcs.append(crcs)
        self.epochs.append(epoch)
        if plan.n_classes == VOCAB_PADDED:
            on_device[-1] = [None] * len(self.mine)
        return list(zip(*on_device))


# ======== 9. Schedules =========================================================== budget 90 ====
# What changes during a run, as pure functions of (cfg, step): no tensor, no rank, no state. Steps count
# from 0. Stage boundaries are in section 1 (Config.stage_ends), since the command line is checked against
# them; everything here follows from them.

FAST_BETA, FAST_SHARE = 0.85, 0.4385   # of ANVIL's fast rail, once the slow one has a part [2]
LATE_SHARE = (2, 3)          # of stage 2 have passed when its loss takes more classes
EVENT_EVERY = 4              # steps between two events of the tables, half as many at first
EVENT_SWITCH = 336           # step from which they are rarer, at n_steps = 1050 [4]


def stage_at(cfg, step):
    """Number of the stage that the step belongs to."""
    return next((i for i, end in enumerate(cfg.stage_ends) if step < end), len(cfg.stages) - 1)


def lr_at(cfg, step):
    """Factor on every learning rate: the stage's own, drawn in a straight line from the start of the cooldown
    on towards lr_floor, which is reached with the first step of the extension and kept."""
    scheduled = cfg.stage_ends[-2]
    start = math.floor(cfg.cooldown_from * scheduled)
    cool = min(max((step - start) / (scheduled - start), 0.0), 1.0)
    return cfg.stages[stage_at(cfg, step)].lr * (1 - cool) + cfg.lr_floor * cool


def rails_at(cfg, step):
    """(mu, beta, blend) of ANVIL, see Pace: mu rises and falls, beta with it until the slow rail joins in."""
    rise, fall = cfg.mu_rise * cfg.shrink, cfg.mu_fall * cfg.shrink
    up = min(step / rise, 1.0)
    down = min(max((step - (cfg.n_steps - fall)) / fall, 0.0), 1.0)
    mu = cfg.mu_low + (cfg.mu_high - cfg.mu_low) * (up - down)
    return (mu, mu, 1.0) if step < cfg.slow_from * cfg.shrink else (mu, FAST_BETA, FAST_SHARE)


def n_classes_at(cfg, step):
    """Classes in the loss of a step: few at first, more in the last third of stage 2, then all."""
    stage, (_, start, end, *_) = stage_at(cfg, step), cfg.stage_ends
    if stage > 2:
        return VOCAB_PADDED
    late = (end - start) * LATE_SHARE[0] <= (step - start) * LATE_SHARE[1]
    return cfg.p_early if stage < 2 else cfg.p_late if late else cfg.p_middle


def event_at(cfg, step):
    """0, or for how many pairs of steps the sparse tables are updated after a step: 1, later 2. The last step
    of all updates them in any case, as if for 2, so that no gradient is lost."""
    if step < EVENT_EVERY * round(EVENT_SWITCH * cfg.shrink / EVENT_EVERY):
        return step % 2
    return 2 * (step % EVENT_EVERY == EVENT_EVERY - 1 or step == cfg.n_steps - 1)


def ticks_at(cfg, step):
    """How far each row of AVERAGES moves towards the weights after a step: begun `window` steps before the
    end, after the steps s with s mod every = phase and the `last` ones. A folded rate is that of one step:
    the window's first step begins the average, a later one stands for two, the very last for one."""
    rates, left = [], cfg.n_steps - 1 - step
    for _, window, every, phase, last, rate, folded, _ in AVERAGES:
        begin, rate = cfg.n_steps - window * cfg.shrink, min(rate / cfg.shrink, 1.0)
        due = step % every == phase or left < last or (folded and step < begin + 1)
        rate = 1 - (1 - rate) ** every if folded and left else rate
        rates.append(rate if due and step >= begin else 0.0)
    return tuple(rates)


def pace_at(cfg, step):
    """The Pace of a step. Head and embedding part after the first odd step of the extension."""
    last_tied = cfg.stage_ends[-2] | 1
    return Pace(lr_at(cfg, step), *rails_at(cfg, step), event_at(cfg, step), step <= last_tied,
                step == last_tied, ticks_at(cfg, step))


def targets_at(cfg, step):
    """(weights of the next tokens as targets, () or (weight,) of the next token's prefix), falling [4]."""
    stage, ends = stage_at(cfg, step), (0, *cfg.stage_ends)
    if stage > 1:
        return FUTURE_WEIGHTS[:1], ()
    done = (step - ends[stage]) / (ends[stage + 1] - ends[stage])
    *kept, last = FUTURE_WEIGHTS if stage == 0 else FUTURE_WEIGHTS[:2]
    quarter = 0 if stage == 0 else 1 + int(done * (len(PREFIX_WEIGHTS) - 1))
    return (*kept, last * (1 - done)), (PREFIX_WEIGHTS[quarter],)


def plan_at(cfg, step):
    """The StepPlan of a step."""
    stage = cfg.stages[stage_at(cfg, step)]
    return StepPlan(stage.T, stage.max_doc, n_classes_at(cfg, step), *targets_at(cfg, step))


# ======== 10. Graphs ============================================================ budget 195 ====
# What is done once a process before the clock starts: which replacements run, whether the memory suffices,
# every shape run once on synthetic tokens and captured, so that what cannot work fails early.
# (1) After warm-up weights, gradients, optimizer states, random numbers and loader are bit-equal to before.
# (2) Nothing is compiled while the clock runs: the footer says so.

SYNTHETIC_STRIDE = 7919       # prime: the ids walk through the whole vocabulary
REPLAY = "replay"             # captured steps, in the switch `fast`; no row of FAST: they compute the same
COMPILED_WIDTHS = 64          # of one function, over all runs of a process
SHIFTS = 5                    # so many halvings of a setting are tried until it fits


def pick(switch):
    """Names of the rows of FAST, and REPLAY, that a switch turns on. Refusal for a name that is none."""
    words, known = [word.strip() for word in switch.split(",")], [*FAST, REPLAY]
    names = set(known) if words[0] == "all" else set()
    for word in words[words[0] in ("all", "none"):]:
        if word.removeprefix("-") not in known:
            raise Refusal(f"fast={switch}: no replacement named {word!r}.{nearest(word, known)} "
                          f"Want all, none or names, after all also -NAME. Names: {', '.join(known)}.")
        names = names - {word[1:]} if word.startswith("-") else names | {word}
    return names


def compiled(row, backend="inductor"):
    """row.fast through the compiler, with the length of the first argument open, all other sizes fixed."""
    torch._dynamo.config.automatic_dynamic_shapes = False    # a second width compiles anew, it opens nothing
    torch._dynamo.config.recompile_limit = COMPILED_WIDTHS
    built = torch.compile(row.fast, fullgraph=True, backend=backend)

    def call(*xs, **settings):
        if row.build == "glue" and not torch.is_grad_enabled():
            return row.ref(*xs, **settings)
        for x in xs:
            if isinstance(x, Tensor) and x.ndim and len(x) == len(xs[0]):
                torch._dynamo.mark_dynamic(x, 0)
        return built(*xs, **settings)
    return call


def choose(cfg, device):
    """(names, ops): the rows of FAST that run, and a function for every row. A CPU runs the references."""
    names = pick(cfg.fast) if device.type == "cuda" else set()
    if "attention" in names and cfg.dtype != "bf16":
        raise Refusal(f"dtype={cfg.dtype} with fast={cfg.fast}: the fast attention wants bf16. "
                      f"Take fast=all,-attention, or dtype=bf16.")
    ops = references()
    for name in names - {REPLAY}:
        setattr(ops, name, compiled(FAST[name]) if FAST[name].build else FAST[name].fast)
    ops.captures = REPLAY in names
    return sorted(names), ops


def n_compiled():
    """Functions that torch.compile has built in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["aot_autograd"]["total"] if dynamo else 0


def make(cfg, comm, device, ops=None):
    """(Model, Optimizer) of a run on a device; on `meta` they have shapes only."""
    model = Model(cfg, device, ops, (comm.rank, comm.world))
    return model, Optimizer(param_table(model, cfg), comm, n_micro=cfg.n_micro, anvil_lr=cfg.anvil_lr,
                            anvil_wd=cfg.anvil_wd, adam_lr=cfg.adam_lr, adam_wd=cfg.adam_wd,
                            adam_eps=cfg.adam_eps, ops=ops,
                            averages=[(row[0].split(), row[-1]) for row in AVERAGES])


def memory_needed(cfg, comm):
    """Bytes of GPU memory: (weights, states and their copy in warm-up, the n-grams' table's share, rooms)."""
    model, optimizer = make(cfg, comm, torch.device("meta"))
    rooms = optimizer.rooms(model.most_rows(cfg.n_micro // comm.world * max(stage.T for stage in cfg.stages)))
    held = [*optimizer.tensors() * 2, *(x for of in optimizer.averages.of for x in of.values())]
    return tuple(sum(x.nbytes for x in xs) for xs in (
        held, sum(optimizer.lazy().values(), []), [x for r in rooms.values() for x in vars(r).values()]))


def check_memory(cfg, comm):
    """Refuse a setting that does not fit the GPU's free memory, before anything is compiled."""
    if comm.device.type != "cuda":
        return
    (held, table, rooms), free = memory_needed(cfg, comm), torch.cuda.mem_get_info()[0]
    lengths, wish = (max(stage.T for stage in cfg.stages), cfg.val_seq), REPLAY in pick(cfg.fast)

    def takes(captured, *halvings):     # a captured step has its own memory beside that of the run before it
        training, validation = (stream_bytes(cfg, n >> i, (cfg.n_micro << i) // comm.world)[scored]
                                for scored, (n, i) in enumerate(zip(lengths, halvings)))
        return held + captured * (rooms + training) + max(training, validation)
    if (needed := takes(wish, 0, 0) + table) <= free:
        return
    tries = ((c, i, j) for c in (wish, False) for i in range(SHIFTS) for j in range(SHIFTS))
    captured, i, j = next((one for one in tries if takes(*one) <= free), (False, SHIFTS - 1, SHIFTS - 1))
    spare = free - takes(captured, i, j)
    rows = spare * cfg.ngram_rows // max(table, 1) // ROWS_MULTIPLE * ROWS_MULTIPLE
    cures = [text for wanted, text in (
        (i, f"t_factor={cfg.t_factor / 2 ** i:g} n_micro={cfg.n_micro * 2 ** i} (as many tokens a step)"),
        (j, f"val_seq={cfg.val_seq >> j}"),
        (captured != wish, f"fast={cfg.fast},-{REPLAY}"),
        (table > spare, f"ngram_rows={rows}, the largest table that fits")) if wanted]
    take = f"Take {' and '.join(cures)}." if spare >= 0 else "No shorter streams fit beside the weights."
    raise Refusal(f"rank {comm.rank}: T={lengths[0]:,}, val_seq={cfg.val_seq:,} and "
                  f"ngram_rows={cfg.ngram_rows:,} need about {needed:,} bytes ({needed / GIB:.1f} GiB) of "
                  f"GPU memory, free are {free:,} ({free / GIB:.1f} GiB). {take}")


class Replay:
    """Forward and backward of a micro-batch: as they are or captured on a GPU, once for every shape, and
    replayed: one launch for thousands. rooms: see Optimizer.rooms, or {}, and nothing is captured."""

    def __init__(self, model, rooms):
        self.model, self.rooms, self.made, self.stream = model, rooms, {}, None
        if rooms:
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def hold(self, near):
        """Let the model read these Rows in the next micro-batches."""
        for name, room in self.rooms.items():
            room.hold(near[name])
        self.model.near = self.rooms or near

    def __call__(self, batch, view):
        """Summed loss of a micro-batch; its gradients are added where they belong."""
        if (made := self.made.get(self.shape(batch, view))) is None:
            loss = self.model(batch, view)
            loss.backward()
            return loss.detach()
        graph, inputs, loss, _ = made
        for kept, x in zip(inputs, batch):
            if kept is not None:
                kept.copy_(x)
        graph.replay()
        return loss

    @staticmethod
    def shape(batch, view):
        """What a captured step depends on."""
        return view.short, view.long, *(None if x is None else x.shape for x in batch)

    def capture(self, batch, view):
        """Run a micro-batch once and, where that is wanted, capture it; the largest first."""
        if self.stream is None:
            return self(batch, view)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):     # all that is made once must be made outside of the capture
            self(batch, view)
        graph = torch.cuda.CUDAGraph()
        # Trap: not "global", the default, with which a call of another thread, like NCCL's, ends the capture.
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            loss = self(batch, view)
        self.made[self.shape(batch, view)] = graph, batch, loss, view


def synthetic(plan, device):
    """A batch of the plan's shapes to which no corpus contributed."""
    T, P, n_targets = plan.T, plan.n_classes, len(plan.future) + len(plan.prefix)
    ids = torch.arange(T + 1, device=device) * SYNTHETIC_STRIDE % VOCAB
    targets = (ids[1:] % P)[:, None].repeat(1, n_targets)
    few = [*range(P - 1), max(P - 1, COPY)]
    classes = torch.tensor(few, device=device) if P < VOCAB_PADDED else None
    return (ids[:-1].int(), torch.zeros(T, dtype=torch.int32, device=device), ids[:-1].int(), targets,
            torch.ones(T, n_targets, device=device), classes)


def warm_up(cfg, model, optimizer, plans, val_view, *, replay, tell):
    """One micro-batch of every shape, two optimizer steps, one validation stream; then undo it all.

    plans: {StepPlan of a shape: View}, largest T first. tell(text) is called after every part."""
    device, counts = model.w_embed.device, (optimizer.n_adam, [*optimizer.events])
    # Two steps, because Adam steps on odd ones only. Nothing here draws a random number or asks the loader.
    before, rows = [x.clone() for x in optimizer.tensors()], []
    for plan, view in plans.items():
        batch = synthetic(plan, device)
        replay.hold(optimizer.pull(model.wanted([batch]), True))
        replay.capture(batch, view)
        optimizer.comm.settle()
        tell(f"T {plan.T:,}, {plan.n_classes:,} classes")
    for name, xs in optimizer.lazy().items():      # too large for a copy: the rows that will change
        ids = optimizer.near[name].asked
        rows += [(x, ids, x[ids]) for x in xs]
    for step in range(2):
        optimizer.step(step, Pace(1.0, cfg.mu_low, cfg.mu_low, 1.0, event=step))
    optimizer.comm.settle()
    tell("optimizer")
    with torch.no_grad():
        batch = synthetic(StepPlan(cfg.val_seq, 0, VOCAB_PADDED, (1.0,), ()), device)
        model.near = optimizer.pull(model.wanted([batch]), False)
        model(batch, val_view, True)
        for x, old in zip(optimizer.tensors(), before):
            x.copy_(old)
        for x, ids, old in rows:
            x[ids] = old
    optimizer.reset(*counts)
    model.near = {}
    optimizer.comm.settle()
    tell("validation")


# ======== 11. Train ============================================================= budget 340 ====
# A run from the command line to the last line of the log. Invariants:
# (1) The clock runs from the barrier after warm-up to the barrier after the last step's work; validation
#     forwards and the log's file lie outside, reading and packing tokens inside.
# (2) The host waits for the device only for rows of tables (6, 4.8, 4.9) and for losses 16 steps old.
# (3) Every decision to stop is made from numbers that all ranks share, or by the Guard.

SAVED_ROWS = 1 << 18         # rows of a table that travel at once to be saved


def view_at(cfg, stage, device, n_positions, long=None, block=None):
    """View of a stage for streams of n_positions tokens; `long` and `block` replace its long window and the
    pointer's block, and change no table. Narrow heads follow the short windows, wide ones the long."""
    rows, n = cfg.stages[:stage + 1], cfg.d_head // 2 // 2
    return Model.view((rows[-1].short, long or rows[-1].long, block or cfg.pointer_block),
                      (n, cfg.scale_narrow, [row.short for row in rows]),
                      (n, cfg.scale_wide, [row.long for row in rows]), n_positions, device)


def tokens_until(cfg, step):
    """Training tokens of the first `step` steps, over all ranks."""
    ends = cfg.stage_ends
    steps = (min(end, step) - min(start, step) for start, end in zip((0, *ends), ends))
    return cfg.n_micro * sum(n * stage.T for n, stage in zip(steps, cfg.stages))


@dataclass
class Run:
    """What the functions of a run share."""
    cfg: Config
    comm: Comm
    log: Log
    guard: Guard
    clock: Clock
    model: Model
    optimizer: Optimizer
    telemetry: Telemetry
    loader: Loader
    replay: Replay
    seconds: list                # what the clock showed at the end of every step that was reported
    cold_start_s: float          # from the start of the process to that of the clock; 0 for a later run
    n_compiled: int              # functions compiled before the clock started


# ---- 11.1 timed loop: what happens between start and end of the clock ----------------------------

def begin(cfg, comm, log, guard, *, model, optimizer, telemetry, replay):
    """A Run whose weights and states are those before the first step."""
    plan = [plan_at(cfg, step) for step in range(cfg.n_run)]
    telemetry.clock, telemetry.samples = Clock(comm), []
    log.flush()
    return Run(cfg, comm, log, guard, telemetry.clock, model, optimizer, telemetry, Loader(cfg, comm, plan),
               replay, [], 0.0, 0)


def prepare(cfg, comm, log, guard, *, ops, telemetry):
    """Everything up to the start of the clock that is done once per process. Returns a Run."""
    model, optimizer = make(cfg, comm, comm.device, ops)
    numbers = [row.param.numel() * (comm.world if row in optimizer.sparse else 1) for row in optimizer.rows]
    log.line(f"parameters: {sum(numbers):,}")
    log.phase("model")
    guard.step()

    def tell(part):
        log.phase(f"warm-up, {part}")
        log.flush()
        guard.step()
    most = model.most_rows(cfg.n_micro // comm.world * max(stage.T for stage in cfg.stages))
    replay = Replay(model, optimizer.rooms(most) if getattr(ops, "captures", False) else {})
    last, shapes = stage_at(cfg, cfg.n_run - 1), {}
    for step in range(cfg.n_run):
        plan = plan_at(cfg, step)
        shapes.setdefault((plan.T, plan.n_classes, len(plan.future)), (plan, stage_at(cfg, step)))
    warm_up(cfg, model, optimizer, {plan: view_at(cfg, k, comm.device, plan.T) for plan, k in
                                    sorted(shapes.values(), key=lambda x: -x[0].T)},
            view_at(cfg, last, comm.device, cfg.val_seq, cfg.val_long, cfg.val_pointer_block), replay=replay,
            tell=tell)
    return begin(cfg, comm, log, guard, model=model, optimizer=optimizer, telemetry=telemetry, replay=replay)


def renew(run, cfg, log):
    """A Run like `run` with the seed of cfg: new weights at the old addresses, states zero."""
    least = replace(cfg, ngram_rows=min(cfg.ngram_rows, ROWS_MULTIPLE))    # the table itself begins at zero
    weights = Model(least, torch.device("cpu"), part=(run.comm.rank, run.comm.world)).state_dict()
    with torch.no_grad():
        for x in (*run.optimizer.tensors(), *sum(run.optimizer.lazy().values(), [])):
            x.zero_()
    for arrived in run.optimizer.arrived.values():       # after the last event of the run before
        arrived.clear()
    run.model.load_state_dict({name: x for name, x in weights.items() if name != "w_gram"}, strict=False)
    run.optimizer.reset()
    log.phase("new weights")
    return begin(cfg, run.comm, log, run.guard, model=run.model, optimizer=run.optimizer,
                 telemetry=run.telemetry, replay=run.replay)


def train_step(run, batch, view, step):
    """Forward and backward of this rank's micro-batches, then the optimizer; the tail gets loss and flag."""
    tail = run.optimizer.flat.tail[step % 2].zero_()
    run.replay.hold(run.optimizer.pull(run.model.wanted(batch), True))
    for micro_batch in batch:
        tail[0] += run.replay(micro_batch, view)
        run.guard.step()
    tail[1] = (~torch.isfinite(tail[0])) * 2.0 ** run.comm.rank
    run.optimizer.step(step, pace_at(run.cfg, step))


def report(run, wait=False):
    """Log the steps whose losses have arrived; RunFailed at the first that is not finite."""
    cfg = run.cfg
    for steps, tail, stamps in run.optimizer.flat.ring.pop(wait):
        for step, stamp in zip(steps, stamps):
            seconds, before = stamp(), run.seconds[-1] if run.seconds else 0.0
            run.seconds.append(seconds)
            total, bad_ranks = tail[step % 2]
            if bad_ranks or not math.isfinite(total):
                ranks = [str(r) for r in range(max(WORLDS)) if int(bad_ranks) >> r & 1]
                raise RunFailed(f"the loss of step {step + 1} is not finite on rank {', '.join(ranks)}. "
                                f"Lower learning rates (anvil_lr, adam_lr) are the usual cure.")
            loss = total / (cfg.n_micro * cfg.stages[stage_at(cfg, step)].T)
            run.log.line(f"step {step + 1:5d}/{cfg.n_steps} | tokens {tokens_until(cfg, step + 1):11,d} | "
                         f"loss {loss:9.6f} | time {seconds:8.3f} s | {MS * (seconds - before):8.2f} ms/step",
                         often=True)


def validate(run, step, long=None):
    """Mean loss over all validation tokens before step `step`. When it returns, the clock stands.

    On the clock: rotary table, reading the tokens, bringing the rows of the tables. Off it: the forward
    passes, which mask the classes that are no tokens and have the rows brought again, one stream's at a time.
    A stream's loss does not depend on the rank that computes it, nor their order of summing."""
    cfg, comm, sums = run.cfg, run.comm, []
    view = view_at(cfg, stage_at(cfg, step - 1), comm.device, cfg.val_seq, long, cfg.val_pointer_block)
    streams = read_validation(cfg, comm, run.loader.vocabulary)
    streams = [[x if x is None else x.to(comm.device) for x in stream] for stream in streams]
    for stream in streams:
        run.optimizer.pull(run.model.wanted([stream]), False)
    run.loader.pause()
    run.clock.stop()
    report(run, wait=True)
    with torch.no_grad():
        for stream in streams:
            run.model.near = run.optimizer.pull(run.model.wanted([stream]), False)
            if len(stream[0]):           # item() waits for the device, which is right: the clock stands
                sums.append(run.model(stream, view, True).item())
            run.guard.step()
    by_rank, n_streams = comm.collect(sums), cfg.val_tokens // cfg.val_seq
    loss = sum(by_rank[i % comm.world][i // comm.world] for i in range(n_streams)) / cfg.val_tokens
    run.log.line(f"val  {step:5d}/{cfg.n_steps} | loss {loss:9.6f} | time {run.clock.total:8.3f} s")
    run.log.flush()
    return loss


def train(run):
    """The timed loop, from the start of the clock to the end of the last validation. Returns its loss."""
    cfg, k, view, stamps = run.cfg, None, None, []
    run.comm.meet()                              # with the long limit: another rank may be warming up
    run.comm.set_limit(cfg.step_limit_s)
    run.guard.step(cfg.step_limit_s)
    run.n_compiled = n_compiled()
    run.clock.start()
    run.loader.resume()
    for step in range(cfg.n_run):
        if cfg.val_every and step % cfg.val_every == 0:
            validate(run, step)
            run.clock.start()
            run.loader.resume()
        if stage_at(cfg, step) != k:
            k = stage_at(cfg, step)
            stage, view = cfg.stages[k], view_at(cfg, k, run.comm.device, cfg.stages[k].T)
            run.log.line(f"stage {k} | until step {cfg.stage_ends[k]} | T {stage.T:,} | batch "
                         f"{cfg.n_micro * stage.T:,} tokens | max_doc {stage.max_doc} | "
                         f"windows {stage.short}/{stage.long} | lr {stage.lr}")
        batch = run.loader.next()
        if run.loader.epochs[-1] != (run.loader.epochs[step - 1] if step else 1):
            run.log.line(f"epoch {run.loader.epochs[-1]} | begins in step {step + 1}")
        train_step(run, batch, view, step)
        run.guard.step()
        stamps.append(run.clock.stamp())
        if step % 2 == 1:                        # the tail was summed with the small gradients
            run.optimizer.flat.ring.push((step - 1, step), run.optimizer.flat.tail, stamps)
            stamps = []
            report(run)
    if stamps:                                   # stopped after an even step: its loss is summed alone
        run.comm.all_reduce(run.optimizer.flat.tail).wait()
        run.optimizer.flat.ring.push((cfg.n_run - 1,), run.optimizer.flat.tail, stamps)
    if cfg.n_run == cfg.n_steps:
        run.optimizer.ship()
    return validate(run, cfg.n_run, cfg.val_long)


# ---- 11.2 main: from the command line to the last line of the log --------------------------------

def whole(comm, share):
    """On rank 0 the ranks' shares of a table, one behind the other, on the CPU; elsewhere nothing."""
    pieces = (comm.collect(piece.cpu()) for piece in share.split(SAVED_ROWS))
    kept = [piece for piece in pieces if comm.rank == 0]
    return torch.cat([piece[rank] for rank in range(comm.world) for piece in kept]) if kept else None


def save_weights(run):
    """Rank 0 writes the weights with the settings that made them; a killed save leaves no such file."""
    tables = {row.name: whole(run.comm, row.param.data) for row in run.optimizer.sparse}
    weights = run.model.state_dict() | tables
    if run.comm.rank == 0:
        part = run.cfg.save + ".part"
        torch.save({"config": asdict(run.cfg), "weights": weights}, part)
        os.replace(part, run.cfg.save)
        run.log.line(f"saved: {run.cfg.save}")


def footer(run, val_loss):
    """The summary of a complete run, one `key: value` a line."""
    cfg, comm = run.cfg, run.comm
    # Nothing is timed any more. The hashes say whether two runs, on any machines, read the same data.
    n_new = n_compiled() - run.n_compiled
    train_s, spread = run.clock.over_ranks()
    by_rank = comm.collect(run.loader.crcs[:cfg.n_run])
    steps = [[f"{crc:08x}" for crcs in by_step for crc in crcs] for by_step in zip(*by_rank)]
    if cfg.hashes:
        for step, crcs in enumerate(steps):
            run.log.line(f"batch {step + 1:5d} | {' '.join(crcs)}", often=True)
    for seconds, gpu, mhz, watts, degrees in run.telemetry.samples:
        run.log.line(f"gpu {gpu} | time {seconds:8.3f} s | {mhz:5.0f} MHz | {watts:6.1f} W | "
                     f"{degrees:3.0f} C", often=True)
    ms = np.diff([0.0, *run.seconds]) * MS
    by_stage = [ms[start:end] for start, end in zip((0, *cfg.stage_ends), cfg.stage_ends)]
    for text in (
        "---",
        f"val_loss: {val_loss:.6f}",
        f"train_s: {train_s:.3f}",
        f"train_s_spread: {spread:.6f}",
        f"ms_per_step: {MS * train_s / cfg.n_run:.2f}",
        f"steps: {cfg.n_run}",
        f"tokens: {tokens_until(cfg, cfg.n_run)}",
        f"epochs: {run.loader.epochs[cfg.n_run - 1]}",
        f"data_hash: {hashlib.sha256(json.dumps(steps).encode()).hexdigest()}",
        f"ms_by_stage: {', '.join(f'{np.median(x):.2f}' for x in by_stage if len(x))}",
        f"tokens_per_s: {tokens_until(cfg, cfg.n_run) / train_s:.0f}",
        f"cold_start_s: {f'{run.cold_start_s:.1f}' if run.cold_start_s else 'n/a, not the first run'}",
        f"compiled_on_clock: {n_new}",
        f"peak_gpu_mib: {torch.cuda.max_memory_allocated() // MIB if comm.device.type == 'cuda' else 'n/a'}",
        *run.telemetry.summary(),
    ):
        run.log.line(text)


def continuation(cfg):
    """cfg.sample, continued by sample_tokens tokens from the weights in cfg.load: text. Slow and simple."""
    try:
        saved = torch.load(cfg.load, map_location="cpu", weights_only=True)
        stages = tuple(Stage(**row) for row in saved["config"]["stages"])
        made = Config(**{f.name: saved["config"][f.name] for f in fields(Config)} | {"stages": stages})
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as e:
        raise Refusal(f"load={cfg.load}: not what save=PATH of this script writes "
                      f"({type(e).__name__}). Give such a file.") from None
    model, vocabulary = Model(made, torch.device("cpu")), Vocabulary(cfg.vocab_file, made.fold_case)
    model.load_state_dict(saved["weights"])
    ids, rand = [BOS, *vocabulary.encode(cfg.sample)], torch.Generator().manual_seed(cfg.seed)
    for _ in range(cfg.sample_tokens):
        view = view_at(made, stage_at(made, made.n_run - 1), torch.device("cpu"), len(ids), made.val_long,
                       made.val_pointer_block)
        tokens, folded = (torch.tensor(x, dtype=torch.int32) for x in (ids, vocabulary.folded[ids]))
        with torch.no_grad():    # top_k=1 leaves one choice: greedy
            best = model.probabilities(tokens, torch.zeros_like(tokens), folded, view).topk(cfg.top_k)
        ids.append(int(best.indices[torch.multinomial(best.values, 1, generator=rand)]))
    return vocabulary.decode(ids[1:])


def open_run(argv):
    """Settings and ranks of a command line: (Config, Comm), without Comm for a sample. Raises Refusal."""
    cfg = parse(argv)
    if cfg.sample:
        return cfg, None
    rank, local_rank, world = launch_env()
    if world not in WORLDS or cfg.n_micro % world:
        legal = [n for n in WORLDS if cfg.n_micro % n == 0]
        raise Refusal(f"world size {world}: want one of {', '.join(map(str, legal))}, because it must divide "
                      f"n_micro={cfg.n_micro}. Start torchrun with --nproc_per_node={legal[-1]}.")
    if cfg.save and not os.path.isdir(os.path.dirname(os.path.abspath(cfg.save))):
        raise Refusal(f"save={cfg.save}: its folder does not exist. Create it or choose another.")
    if os.path.isdir(cfg.save):
        raise Refusal(f"save={cfg.save}: is a folder. Give the name of a file.")
    pick(cfg.fast)                   # refuses a name that is none
    return cfg, Comm(cfg, rank, local_rank, world)


def main(argv=None):
    """Run the command line; ends with code 0 and `end: ok`, or with code 1 and a FAILED line on stderr."""
    imported_s = process_age_s()
    try:
        cfg, comm = open_run(sys.argv[1:] if argv is None else argv)
        if cfg.sample:
            return Log.show(continuation(cfg))
    except Refusal as e:
        sys.exit(f"FAILED: {e}")
    guard = Guard(comm, cfg.start_limit_s)
    usable = check_files(cfg, comm)
    check_memory(cfg, comm)
    guard.step()
    names, ops = choose(cfg, comm.device)
    telemetry, run = Telemetry(comm), None
    for seed in range(cfg.seed, cfg.seed + cfg.runs):
        one = replace(cfg, seed=seed)
        guard.log = log = Log(one, comm, imported_s if run is None else process_age_s())
        # A log begins once the checks have passed: a refused start leaves none behind.
        for text in (*script_lines(), f"preset: {cfg.preset}", f"seed: {seed}", f"world: {comm.world}",
                     f"fast: {','.join(names) or 'none'}", *host_lines(comm),
                     f"config: {json.dumps(asdict(one))}", f"train_tokens: {usable:,} usable"):
            log.line(text)
        if cfg.ngram_rows < PRESETS[cfg.preset].ngram_rows:
            log.line(f"record-grade: no (ngram_rows={cfg.ngram_rows})")
        if run is None:
            log.line(f"phase: imports {imported_s:.1f} s")
            log.phase("joining and checks")
            run = prepare(one, comm, log, guard, ops=ops, telemetry=telemetry)
            run.cold_start_s = process_age_s()
        else:
            run = renew(run, one, log)
        val_loss = train(run)
        guard.step(cfg.start_limit_s)    # nothing is timed any more, and a slow disk is no failure
        comm.set_limit(cfg.start_limit_s)
        footer(run, val_loss)
        if cfg.save:
            save_weights(run)
        comm.meet()
        log.end("ok")
    telemetry.end()
    guard.finish()
    comm.close()


if __name__ == "__main__":
    main()
