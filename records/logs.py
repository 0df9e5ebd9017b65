"""Reads the logs of runs: this project's, and those of the public repository (modded-nanogpt).

`read(path)` gives a Run. Reading never fails on what a log says; what is wrong with it stands in `Run.problem`, and
what judges runs decides what that means. Names of files are shown, never used: a renamed log is the same log.
"""

import dataclasses
import functools
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

END_OK = "end: ok"
NOT_SETTINGS = ("seed", "runs", "log_dir", "save", "hashes")   # keys of `config:` that do not change what is trained
NUMBER = r"(\d[\d,]*(?:\.\d+)?|nan|-?inf)"
DECIMAL = r"(\d+(?:\.\d+)?)"
KEY = re.compile(r"([a-z_0-9]+): (.*)")
STEP = re.compile(rf"step +(\d+)/(\d+) \| tokens +([\d,]+) \| loss +{NUMBER} \| time +{DECIMAL} s")
VAL = re.compile(rf"val +(\d+)/(\d+) \| loss +{NUMBER} \| time +{DECIMAL} s")
GPU = re.compile(rf"gpu (\d+) \| time +{DECIMAL} s \| +{DECIMAL} MHz \| +{DECIMAL} W \| +{DECIMAL} C")
PHASE = re.compile(rf"phase: (.*) {DECIMAL} s")
STAGE = re.compile(r"stage (\d+) \| until step (\d+) \| T ([\d,]+)")
# The public repository: the script itself, a line of `=`, the environment, then the lines of the run.
PUBLIC = re.compile(rf"step:(\d+)/(\d+)(?: val_loss:{NUMBER})?(?: train_loss:{NUMBER})? train_time:{DECIMAL}(ms|s)\b")
RULE = re.compile(r"={10,}")
MS = 1000


@dataclass(frozen=True)
class Run:
    """What one log says. Losses are in nats per token, times in seconds; None where the log does not tell."""
    path: str                    # as it was given, for messages
    digest: str                  # SHA-256 of the log's bytes
    form: str                    # ours | public
    script: str = ""             # SHA-256 of the script that ran (public: of its text at the head of the log)
    data: str | None = None      # SHA-256 over the token batches that were trained on
    seed: int | None = None
    n_steps: int | None = None   # steps that were taken (public: of the last line)
    val_loss: float | None = None
    train_s: float | None = None
    ended: str = ""              # the last line's `end: ...`, or "" where there is none
    keys: dict = field(default_factory=dict)     # all `key: value` lines
    steps: tuple = ()            # (step, tokens, training loss, seconds)
    vals: tuple = ()             # (step, tokens or None, validation loss, seconds), the final one included
    gpu: tuple = ()              # (seconds, GPU, SM clock in MHz, power in W, temperature in C)
    phases: tuple = ()           # (name, seconds) of the start, in order
    stages: tuple = ()           # (stage, step at which it ends, tokens of a micro-batch)

    @functools.cached_property
    def settings(self):
        """The `config:` line less what does not change the training, as text that can be compared."""
        try:
            config = json.loads(self.keys.get("config", "{}"))
        except ValueError:
            config = None
        if not isinstance(config, dict):
            return self.keys["config"]
        return json.dumps({k: v for k, v in config.items() if k not in NOT_SETTINGS}, sort_keys=True)

    @property
    def group(self):
        """Runs may be pooled where these agree: script, settings, data, steps and world size."""
        return self.script, self.settings, self.data, self.n_steps, self.keys.get("world")

    @property
    def host(self):
        """The machine and the software as the log describes them; not which machine of its kind it was."""
        return "; ".join(self.keys[key] for key in ("host", "software") if key in self.keys)

    @property
    def problem(self):
        """Why this is no result of a finished run, or ''."""
        if not self.script:
            return "not the log of a run"
        if self.form == "ours" and self.ended != END_OK:
            return f"end marker missing: no last line `{END_OK}`" if not self.ended else f"failed: `{self.ended}`"
        if self.val_loss is None:
            return "final validation loss missing"
        if not math.isfinite(self.val_loss):
            return f"final validation loss is {self.val_loss}"
        if self.train_s is None or not math.isfinite(self.train_s) or self.train_s <= 0:
            return "time of the training missing"
        return ""


def number(text):
    return float(text.replace(",", ""))


def rows(form, lines, *kinds):
    """One tuple per line that has the form, each group turned by its kind."""
    found = (form.match(line) for line in lines)
    return tuple(tuple(kind(text) for kind, text in zip(kinds, m.groups(), strict=True)) for m in found if m)


def count(text):
    return int(text.replace(",", ""))


def maybe(kind, text):
    """kind(text), or None where the text is none of that kind."""
    try:
        return kind(text)
    except (TypeError, ValueError):
        return None


def read_ours(run, lines):
    """A log of this project: `key: value` lines and fixed columns, `end: ok` last."""
    keys = dict(m.groups() for m in map(KEY.fullmatch, lines) if m and m[1] != "phase")
    steps = tuple((step, tokens, loss, s) for step, _, tokens, loss, s in rows(STEP, lines, count, count, count, number, number))
    tokens = {step: n for step, n, _, _ in steps}
    vals = [(step, tokens.get(step), loss, s) for step, _, loss, s in rows(VAL, lines, count, count, number, number)]
    val_loss, train_s = maybe(float, keys.get("val_loss")), maybe(float, keys.get("train_s"))
    if val_loss is not None:
        n = maybe(int, keys.get("steps"))
        vals = [row for row in vals if row[0] != n] + [(n, maybe(int, keys.get("tokens")), val_loss, train_s)]
    return dataclasses.replace(
        run, script=keys.get("script", ""), data=keys.get("data_hash"), seed=maybe(int, keys.get("seed")),
        n_steps=maybe(int, keys.get("steps")), val_loss=val_loss, train_s=train_s,
        ended=lines[-1] if lines[-1].startswith("end: ") else "", keys=keys, steps=steps, vals=tuple(vals),
        gpu=tuple((s, gpu, mhz, w, c) for gpu, s, mhz, w, c in rows(GPU, lines, count, number, number, number, number)),
        phases=rows(PHASE, lines, str, float), stages=rows(STAGE, lines, count, count, count))


def read_public(run, lines, source):
    """A log of the public repository: the last step's line carries loss and time."""
    steps, vals = [], []
    for m in filter(None, map(PUBLIC.match, lines)):
        step, last, val, loss, time, unit = m.groups()
        seconds = float(time) / (MS if unit == "ms" else 1)
        if val:
            vals.append((int(step), None, number(val), seconds))
        elif loss:
            steps.append((int(step), None, number(loss), seconds))
        final = int(step), int(last), val, seconds
    step, last, val, seconds = final
    done = step == last and val is not None
    return dataclasses.replace(
        run, form="public", script=hashlib.sha256(source.encode()).hexdigest(), n_steps=last,
        val_loss=number(val) if done else None, train_s=seconds if done else None, steps=tuple(steps), vals=tuple(vals))


def read(path):
    """The Run of a log file of either kind. Raises OSError where the file cannot be read."""
    data = Path(path).read_bytes()
    lines = data.decode("utf-8", errors="replace").splitlines()
    run = Run(str(path), hashlib.sha256(data).hexdigest(), "ours")
    if any(map(re.compile(r"script: [0-9a-f]{64}$").match, lines)):
        return read_ours(run, lines)
    public = [i for i, line in enumerate(lines) if PUBLIC.match(line)]
    if not public:
        return run
    rules = [i for i, line in enumerate(lines[:public[0]]) if RULE.fullmatch(line)]
    return read_public(run, lines, "\n".join(lines[:(rules or public)[0]]).strip())


def logs_in(path):
    """The log files at a path: itself, or all .log and .txt below a folder, sorted."""
    path = Path(path)
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.suffix in (".log", ".txt") and p.is_file())
