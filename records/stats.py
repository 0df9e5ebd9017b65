"""Writes the tables of records/ from the logs: nothing in them is typed by hand.

    python records/stats.py            write the tables in README.md and in each record's README.md
    python records/stats.py --check    change nothing; exit status 1 if a table, a log or a script is not as it should be

A record is a folder NNN_date_name with README.md, the frozen train_gpt.py and runs/*.log. Tables stand between the
lines `<!-- numbers -->` and `<!-- end of numbers -->`.
"""

import hashlib
import re
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- numbers -->\n", "<!-- end of numbers -->\n"


class Broken(Exception):
    """What is wrong with a record, and where."""


def read(path):
    """The `key: value` lines of a finished log. Raises Broken for any other file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines[-1:] != ["end: ok"]:
        raise Broken(f"{path}: not the log of a finished run, its last line is {(lines or [''])[-1]!r}")
    keys = dict(re.fullmatch(r"(\w+): (.*)", line).groups() for line in lines if re.fullmatch(r"(\w+): (.*)", line))
    keys["phases"] = [re.fullmatch(r"phase: (.*) ([\d.]+) s", line).groups() for line in lines if line.startswith("phase: ")]
    return keys


def runs_of(record):
    """The logs of a record in the order of their seeds, all of its frozen script and of different seeds."""
    sha = hashlib.sha256((record / "train_gpt.py").read_bytes()).hexdigest()
    runs = sorted((read(path) for path in (record / "runs").glob("*.log")), key=lambda run: int(run["seed"]))
    if not runs:
        raise Broken(f"{record}: no logs in runs/")
    if {run["script"] for run in runs} != {sha}:
        raise Broken(f"{record}: a log is of another script than train_gpt.py beside it ({sha})")
    if len({(run["seed"], run["preset"]) for run in runs}) < len(runs):
        raise Broken(f"{record}: one seed counted twice")
    if len({(run["data_hash"], run["steps"]) for run in runs}) > 1:
        raise Broken(f"{record}: the runs differ in their data or their number of steps")
    return runs


def mean_and_spread(values):
    values = [float(x) for x in values]
    return statistics.mean(values), max(values) - min(values)


def numbers(runs):
    """Markdown: a table with a row per run, and the start of the one that has it."""
    head = ("seed", "val_loss", "train_s", "ms_by_stage", "tokens_per_s", "cold_start_s", "peak_gpu_mib", "gpu_sm_mhz",
            "gpu_power_w", "gpu_temp_c", "compiled_on_clock")
    rows = [head, ["-"] * len(head), *([run[key] for key in head] for run in runs)]
    loss, spread = mean_and_spread(run["val_loss"] for run in runs)
    seconds, slack = mean_and_spread(run["train_s"] for run in runs)
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    text += f"\n{len(runs)} runs of {runs[0]['steps']} steps, {int(runs[0]['tokens']):,} tokens: mean validation loss "
    text += f"{loss:.6f} (largest less smallest {spread:.6f}), mean time {seconds:.3f} s ({slack:.3f} s).\n"
    for run in runs:
        if not run["cold_start_s"].startswith("n/a"):
            phases = ", ".join(f"{name} {s}" for name, s in run["phases"])
            text += f"\nCold start of seed {run['seed']}, seconds by phase: {phases}.\n"
    return text + f"\n{runs[0]['host']}; {runs[0]['software']}; fast: {runs[0]['fast']}.\n"


def overview(records):
    """Markdown: one row per record."""
    rows = ["| # | track | seconds | validation loss | runs | steps | host | what |\n", "|" + " - |" * 8 + "\n"]
    for record, runs in records.items():
        number, date, what = re.fullmatch(r"(\d{3})_(\d{4}-\d\d-\d\d)_(.+)", record.name).groups()
        loss, seconds = (mean_and_spread(run[key] for run in runs)[0] for key in ("val_loss", "train_s"))
        rows.append(f"| [{number}]({record.name}) | {runs[0]['preset']} | {seconds:.2f} | {loss:.4f} | {len(runs)} | "
                    f"{runs[0]['steps']} | {runs[0]['host'].split(',')[0]} | {what.replace('-', ' ')}, {date} |\n")
    return "".join(rows)


def filled(path, table):
    """The text of a README with the table between its two marks."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise Broken(f"{path}: want the lines {BEGIN.strip()} and {END.strip()} once each")
    return text.split(BEGIN)[0] + BEGIN + table + END + text.split(END)[1]


def main(argv):
    if argv not in ([], ["--check"]):
        raise SystemExit(__doc__)
    try:
        records = {record: runs_of(record) for record in sorted(HERE.glob("[0-9][0-9][0-9]_*"))}
        pages = {HERE / "README.md": filled(HERE / "README.md", overview(records))}
        pages |= {record / "README.md": filled(record / "README.md", numbers(runs)) for record, runs in records.items()}
        for path, text in pages.items():
            if argv and path.read_text(encoding="utf-8") != text:
                raise Broken(f"{path}: its table is not what the logs say; run python records/stats.py")
            path.write_text(text, encoding="utf-8")
    except (Broken, KeyError, OSError) as e:
        raise SystemExit(f"{e}" if isinstance(e, (Broken, OSError)) else f"a log lacks the line {e}") from None
    print(f"{len(records)} record(s), {sum(map(len, records.values()))} logs: in order")


if __name__ == "__main__":
    main(sys.argv[1:])
