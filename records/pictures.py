"""Draws runs: PNGs and one self-contained report.html, all from the logs, nothing typed by hand.

`plot(out, records, groups)` writes them. Each picture has a function of its own that turns runs into a
Picture, and each number of a picture comes from a function that can be tested without drawing. The same runs
give the same bytes.
"""

import base64
import html
import io
import itertools
import math
import statistics
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

try:
    import matplotlib.style
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator
except ImportError as e:
    raise SystemExit(
        f"{e}. Install what records/ needs: python -m pip install -r records/requirements.txt") from None

TOKENS, LOSS, SECONDS = 1, 2, 3      # columns of Run.steps and Run.vals
GPU_UNITS = {2: "SM clock,\nMHz", 3: "power, W", 4: "temperature,\ndegrees C"}   # by column of Run.gpu
MS, MILLION = 1000, 1e6
SMOOTHING = 0.02      # of a run's steps: width of the moving mean over the training loss
START = 0.1           # of a run: what comes before does not rule the loss axis
LOW, HIGH = 10, 90    # percentiles of the step times
CELLS = 60            # points that the longest run has in the clock curves, at most
WORDS = ("group", "track", "which runs", "machine")   # heads of columns that are aligned to the left
FIRST_PHASE = "imports"   # only the first run of a process has it
SHORT = 0.03          # of the longest start: phases that are shorter in every start share a colour
WIDTH, DPI = 6.4, 200     # inches; 1,280 pixels
LEGEND_ROW = 0.27         # inches
LEGEND_WIDTH, LONGEST = 54, 44   # characters of a row, and of a name in it
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")   # Okabe and Ito's
DASHES = ("-", "--", ":", "-.")      # the next for each round of the colours
DARK = (COLOURS[0], COLOURS[6])      # white text is read better on them
MARKERS = "osD^vPX"
GREY = "#BBBBBB"
ONE_RUN = {"color": COLOURS[0], "alpha": 0.45, "marker": "o", "linestyle": "", "markeredgewidth": 0}
MEAN = {"color": COLOURS[1], "marker": "|", "linestyle": "", "markersize": 16, "markeredgewidth": 2.6}
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 13, "axes.labelsize": 13, "axes.titlesize": 14,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#777777",
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#E4E4E4", "axes.formatter.useoffset": False,
    "text.color": "#222222", "axes.labelcolor": "#222222", "xtick.color": "#444444", "ytick.color": "#444444",
    "lines.linewidth": 1.8, "legend.fontsize": 13, "legend.frameon": False, "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4, "legend.borderaxespad": 0.0,
    "figure.constrained_layout.h_pad": 0.05, "figure.constrained_layout.w_pad": 0.05,
}


@dataclass(frozen=True)
class Picture:
    """A section of the report: a figure with its table, or the sentence that says why there is none."""
    name: str                # of the PNG
    title: str
    figure: Figure | None = None
    alt: str = ""
    caption: str = ""
    notes: tuple = ()        # what of the runs is not in it, and why
    head: tuple = ()         # of the table
    rows: tuple = ()
    missing: str = ""


@dataclass(frozen=True)
class Look:
    """How a group is drawn, the same in every picture."""
    colour: str
    dash: str
    marker: str


@dataclass
class Curve:
    """A group in a picture of losses. Rows are (x, mean, least, most)."""
    parts: list = field(default_factory=list)    # of the training loss; the line breaks between two
    points: list = field(default_factory=list)   # of the validation loss


def looks(groups):
    """A Look for each label."""
    n = len(COLOURS)
    return {label: Look(COLOURS[k % n], DASHES[k // n % len(DASHES)], MARKERS[k % len(MARKERS)])
            for k, label in enumerate(groups)}


# ---- Numbers -----------------------------------------------------------------------------------------

def finite(x):
    """Whether there is such a number."""
    return x is not None and math.isfinite(x)


def finished(runs):
    """The runs whose result counts."""
    return [run for run in runs if not run.problem]


def stage_of(run, step):
    """(stage, T) of a step, or None where the log names no stages."""
    return next(((stage, t) for stage, end, t in run.stages if step <= end), None)


def in_order(rows):
    return sorted(rows, key=lambda row: row[0])


def moving_mean(values, half):
    """For each finite value the mean of the finite ones among it and `half` on each side; nan for others."""
    good = np.isfinite(values)
    total, n = (np.concatenate([[0], np.cumsum(x)]) for x in (np.where(good, values, 0.0), good))
    at = np.arange(len(values))
    start, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return np.where(good, (total[end] - total[start]) / np.maximum(n[end] - n[start], 1), np.nan)


def smoothed(run):
    """[(stage, row of Run.steps with the moving mean for its loss)]; the mean stays within a stage."""
    half = round(SMOOTHING * len(run.steps) / 2)
    found = []
    for stage, part in itertools.groupby(in_order(run.steps), lambda row: stage_of(run, row[0])):
        part = list(part)
        means = moving_mean(np.array([row[LOSS] for row in part], float), half)
        found += [(stage, (*row[:LOSS], mean, row[SECONDS])) for row, mean in zip(part, means, strict=True)]
    return found


def over_runs(members, column):
    """(mean x, mean loss, least, most) of one row per run."""
    x, losses = ([row[k] for row in members] for k in (column, LOSS))
    return statistics.fmean(x), statistics.fmean(losses), min(losses), max(losses)


def training_curve(runs, column):
    """Parts of the smoothed training loss over the runs, step by step: arrays of (x, mean, least, most).

    A new part begins where a stage does, and where other runs than before have a loss at the step.
    """
    steps = defaultdict(dict)
    for k, run in enumerate(runs):
        for stage, row in smoothed(run):
            members = steps[row[0]]
            if finite(row[LOSS]) and finite(row[column]):
                members[k, stage] = row
    parts = itertools.groupby(sorted(steps), lambda step: tuple(steps[step]))
    return [np.array([over_runs(steps[step].values(), column) for step in part])
            for who, part in parts if who]


def validation_points(runs, column):
    """Rows (x, mean, least, most) over the runs, one per step at which any was validated."""
    steps = defaultdict(list)
    for row in (row for run in runs for row in run.vals):
        if finite(row[LOSS]) and finite(row[column]) and row[0] is not None:
            steps[row[0]].append(row)
    return [over_runs(steps[step], column) for step in sorted(steps)]


def loss_limits(curves):
    """Least and largest loss that is drawn after the first START of each curve, with a margin."""
    shown = []
    for curve in curves:
        rows = np.array([row for part in curve.parts for row in part] + curve.points)
        late = rows[rows[:, 0] >= START * rows[:, 0].max()]
        shown += [late[:, 2].min(), late[:, 3].max()]
    margin = 0.04 * (max(shown) - min(shown)) or 0.05
    return min(shown) - margin, max(shown) + margin


def step_times(run):
    """{(stage, T) or None: ms per step}, from the differences of the step lines' seconds.

    The clock starts at 0. Where lines are missing, a difference counts once, over the steps that it spans,
    unless another stage begins within.
    """
    found, before = defaultdict(list), (0, 0.0)
    for step, _, _, s in in_order(run.steps):
        stage, n = stage_of(run, step), step - before[0]
        if n > 0 and (n == 1 or stage == stage_of(run, before[0] + 1)):
            found[stage].append(MS * (s - before[1]) / n)
        before = step, s
    return dict(found)


def stages_in_order(stages):
    """Stages by their number and T; None, for a log without stages, comes first."""
    return sorted(stages, key=lambda stage: stage or (-1, 0))


def stage_times(runs):
    """{(stage, T) or None: (number, LOW percentile, median, HIGH percentile)} of the steps of all runs."""
    found = defaultdict(list)
    for run in runs:
        for stage, ms in step_times(run).items():
            found[stage] += ms
    return {stage: (len(found[stage]), *map(float, np.percentile(found[stage], (LOW, 50, HIGH))))
            for stage in stages_in_order(found)}


def cold_starts(runs):
    """The runs whose logs have every phase of the start of a process."""
    return [run for run in runs if run.phases and run.phases[0][0] == FIRST_PHASE]


def phase_seconds(run):
    """{phase: seconds}, in order; phases of one name are added up."""
    found = {}
    for name, s in run.phases:
        found[name] = found.get(name, 0.0) + s
    return found


def long_phases(starts):
    """The phases that get a colour, in order: those that reach SHORT of the longest start in any of them."""
    most = {}
    for name, s in (item for phases in starts for item in phases.items()):
        most[name] = max(s, most.get(name, 0.0))
    least = SHORT * max(sum(phases.values()) for phases in starts)
    kept = sorted((name for name in most if most[name] >= least), key=lambda name: -most[name])[:len(COLOURS)]
    return [name for name in most if name in kept]


def cell_width(runs):
    """Whole seconds of the clock that make one point of the clock curves."""
    return max(1, math.ceil(max((row[0] for run in runs for row in run.gpu), default=0) / CELLS))


def gpu_curve(runs, column, width):
    """Array of (seconds, mean, least, most) over the GPUs of all runs, each by its mean within a cell."""
    cells = defaultdict(lambda: defaultdict(list))
    for k, run in enumerate(runs):
        for row in run.gpu:
            cells[int(row[0] // width)][k, row[1]].append(row[column])
    means = [(cell, [statistics.fmean(x) for x in cells[cell].values()]) for cell in sorted(cells)]
    return np.array([((cell + 0.5) * width, statistics.fmean(x), min(x), max(x)) for cell, x in means])


# ---- Words -------------------------------------------------------------------------------------------

def listed(words):
    """Words as one phrase."""
    words = [str(word) for word in words]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def seeds(runs):
    """The seeds of runs, or how many there are where a log does not tell one."""
    if any(run.seed is None for run in runs):
        return f"{len(runs)} run{'s' * (len(runs) != 1)}"
    return f"seed{'s' * (len(runs) != 1)} {listed(sorted(run.seed for run in runs))}"


def spread(values, form):
    """Cell of a table: the mean, below it the range."""
    values = [x for x in values if finite(x)]
    if not values:
        return "n/a"
    if len(values) == 1:
        return form.format(values[0])
    low, high = form.format(min(values)), form.format(max(values))
    return (form.format(statistics.fmean(values)), f"{low} to {high}") if low != high else low


def drawn(text):
    """A label as matplotlib draws it: no formulae, no line breaks."""
    return " ".join(text.split()).replace("$", r"\$")


def cut(text, n):
    """The first n characters of a text; dots stand for more."""
    return text if len(text) <= n else text[:n - 3].rstrip() + "..."


def short(text, n):
    """A label as matplotlib draws it, of at most n characters."""
    return drawn(cut(text, n))


def folded(text, n, lines=3):
    """A label in lines of n characters, cut after the last of them."""
    return "\n".join(map(drawn, textwrap.wrap(text, n, max_lines=lines, placeholder="...")))


# ---- Pictures ----------------------------------------------------------------------------------------

def canvas(height, names, rows=1, columns=1, **more):
    """A figure with this height for its axes and more for a legend of names; the axes, (rows, columns)."""
    height += LEGEND_ROW * math.ceil(len(names) / legend_columns(names))
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def legend_columns(names):
    """How many names stand beside each other."""
    return max(1, min(len(names), LEGEND_WIDTH // (max(min(len(name), LONGEST) for name in names) + 6)))


def legend(figure, handles, names):
    """A legend above the axes."""
    columns = legend_columns(names)
    figure.legend(handles, [short(name, LONGEST) for name in names], loc="outside upper left", ncols=columns)


def ticks():
    """Few ticks, at plain numbers."""
    return MaxNLocator(4, steps=(1, 2, 2.5, 5, 10))


def band(axes, rows, look):
    """Mean and range of (x, mean, least, most); a single row as a dot."""
    x, mean, least, most = np.array(rows).T
    axes.fill_between(x, least, most, color=look.colour, alpha=0.2, linewidth=0)
    axes.plot(x, mean, color=look.colour, linestyle=look.dash, marker="." if len(rows) == 1 else "")


def draw_track(axes, track, rows):
    """One row per record: dots for the runs, a bar for their mean."""
    units = {"train_s": "training time, s", "val_loss": "validation loss"}
    for ax, (name, unit) in zip(axes, units.items(), strict=True):
        means = [statistics.fmean(getattr(run, name) for run in runs) for _, runs in rows]
        ax.plot(means, range(len(rows)), color=GREY, linewidth=1.2, zorder=1)
        for y, (_, runs) in enumerate(rows):
            ax.plot([getattr(run, name) for run in runs], [y] * len(runs), **ONE_RUN)
        ax.plot(means, range(len(rows)), **MEAN)
        ax.set(xlabel=unit, ylim=(len(rows) - 0.4, -0.6), yticks=range(len(rows)))
        ax.margins(x=0.12)
        ax.xaxis.set_major_locator(ticks())
        ax.tick_params(axis="y", length=0)
        ax.set_yticklabels([])
    axes[0].set_yticklabels([folded(f"{record.number} {record.title}", 18, 2) for record, _ in rows])
    axes[0].set_title(short(track, 30), loc="left", fontweight="bold")


def progress(records):
    """Training seconds and validation loss of each record's finished runs, from Run.train_s and Run.val_loss.

    A pair of panels per track, since tracks differ in corpus and machine. One row per record, in order.
    """
    name, title = "progress.png", "Records"
    tracks, notes = defaultdict(list), []
    for record in records:
        if runs := finished(record.runs):
            tracks[record.track].append((record, runs))
        else:
            notes.append(f"{record.number} {record.title}: not drawn, it has no finished run.")
    if not tracks:
        why = "no record has a finished run." if records else "there are no records."
        return Picture(name, title, missing=" ".join([why, *notes]))
    heights = [0.95 + 0.5 * len(rows) for rows in tracks.values()]
    names = ["one run", "mean of the record"]
    figure, axes = canvas(sum(heights), names, len(tracks), 2, gridspec_kw={"height_ratios": heights})
    figure.get_layout_engine().set(wspace=0.06)
    for pair, (track, rows) in zip(axes, tracks.items(), strict=True):
        draw_track(pair, track, rows)
    legend(figure, [Line2D([], [], **ONE_RUN), Line2D([], [], **MEAN)], names)
    table_rows = tuple(((f"{record.number} {record.title}", record.date), track, str(len(runs)),
                        spread([run.train_s for run in runs], "{:.2f}"),
                        spread([run.val_loss for run in runs], "{:.4f}"))
                       for track, rows in tracks.items() for record, runs in rows)
    return Picture(
        name, title, figure, f"Training time and validation loss by record on {listed(tracks)}.",
        "Time on the clock and final validation loss of the finished runs. Tracks have panels of their own: "
        "they differ in corpus and machine, and cannot be compared. The scales do not begin at 0.",
        tuple(notes), ("record", "track", "runs", "seconds", "validation loss"), table_rows)


def loss_curves(groups, column, what):
    """({label: Curve}, sentences on the groups and losses that are not drawn)."""
    curves, notes = {}, []
    for label, runs in groups.items():
        curve = Curve(training_curve(runs, column), validation_points(runs, column))
        if curve.parts or curve.points:
            curves[label] = curve
            if not curve.parts:
                notes.append(f"{label}: no line, its logs have no training losses with {what}.")
        else:
            notes.append(f"{label}: not drawn, its logs have no losses with {what}.")
        if odd := sum(not finite(row[LOSS]) for run in runs for row in (*run.steps, *run.vals)):
            notes.append(f"{label}: losses that are not finite, left out: {odd:,}.")
    return curves, tuple(notes)


def draw_losses(axes, curves, scale, look):
    """Lines and bands for training, markers with their range for validation."""
    for label, curve in curves.items():
        for part in curve.parts:
            band(axes, part * (1 / scale, 1, 1, 1), look[label])
        if curve.points:
            x, mean, least, most = np.array(curve.points).T
            reach = np.maximum((mean - least, most - mean), 0)   # rounding may put a mean beyond equal values
            axes.errorbar(x / scale, mean, reach, color=look[label].colour,
                          linestyle="" if curve.parts else ":", linewidth=1, elinewidth=1.4, zorder=3,
                          marker=look[label].marker, markersize=6.5, markeredgecolor="white")


def loss_picture(groups, look, against):
    """Losses of the groups against `time` or `tokens`: a line for training, markers for validation.

    From Run.steps and Run.vals, pooled over the runs of a group at equal steps.
    """
    name, title = f"loss_{against}.png", f"Loss against {against}"
    column, scale, unit, what = {"time": (SECONDS, 1, "training time, s", "times"),
                                 "tokens": (TOKENS, MILLION, "training tokens, millions", "tokens")}[against]
    curves, notes = loss_curves(groups, column, what)
    if not curves:
        return Picture(name, title, missing=" ".join([f"no log has losses with {what}.", *notes]))
    figure, axes = canvas(4.3, curves)
    draw_losses(axes[0, 0], curves, scale, look)
    axes[0, 0].set(xlabel=unit, ylabel="loss, nats per token", ylim=loss_limits(curves.values()))
    axes[0, 0].set_xlim(left=0)
    handles = [Line2D([], [], color=look[label].colour, linestyle=look[label].dash if curve.parts else ":",
                      marker=look[label].marker if curve.points else "", markersize=7,
                      markeredgecolor="white")
               for label, curve in curves.items()]
    legend(figure, handles, curves)
    return Picture(
        name, title, figure, f"Training and validation loss against {against}: {listed(curves)}.",
        f"Lines: training loss, a moving mean over {SMOOTHING:.0%} of a run's steps, then the mean over the "
        "runs at equal steps; bands: least to largest run. Markers: validation loss, mean and range of the "
        "runs. Lines break between stages: the training loss may be another sum in each, so compare lines "
        "within a stage, and not with markers. The loss axis spans what follows the first "
        f"{START:.0%} of each group.",
        notes, *(result_table if against == "time" else token_table)(groups))


def result_table(groups):
    """Head and rows: what the finished runs reached, and when."""
    rows = [(label, f"{len(finished(runs))} of {len(runs)}",
             spread([run.train_s for run in finished(runs)], "{:.2f}"),
             spread([run.val_loss for run in finished(runs)], "{:.4f}")) for label, runs in groups.items()]
    return ("group", "finished runs", "seconds", "final validation loss"), tuple(rows)


def tokens_of(run):
    """Millions of tokens that a run read, or None."""
    most = max((row[TOKENS] or 0 for row in (*run.steps, *run.vals)), default=0)
    return most / MILLION if most else None


def token_table(groups):
    """Head and rows: how long the finished runs were."""
    rows = [(label, f"{len(finished(runs))} of {len(runs)}",
             spread([run.n_steps for run in finished(runs)], "{:,.0f}"),
             spread([tokens_of(run) for run in finished(runs)], "{:,.2f}")) for label, runs in groups.items()]
    return ("group", "finished runs", "steps", "tokens, millions"), tuple(rows)


def stage_name(stage):
    """A stage and its T."""
    return ("all steps", "") if stage is None else (f"stage {stage[0]}", f"T {stage[1]:,}")


def step_time_table(times, stages):
    """Rows of the table of step times; a stage is named in the first of its rows."""
    rows = []
    for stage in stages:
        name = stage_name(stage)
        for label in (label for label in times if stage in times[label]):
            n, low, median, high = times[label][stage]
            rows.append((name, label, f"{n:,}", f"{median:.1f}", f"{low:.1f} to {high:.1f}"))
            name = ""
    return tuple(rows)


def draw_step_times(axes, times, stages, look):
    """A row per stage, in it a marker and a bar per group, one below the other."""
    for k, (label, by_stage) in enumerate(times.items()):
        shift = (k - (len(times) - 1) / 2) * 0.7 / len(times)
        y = np.array([stages.index(stage) for stage in by_stage]) + shift
        _, low, median, high = np.array(list(by_stage.values())).T
        axes.hlines(y, low, high, color=look[label].colour, linewidth=3, alpha=0.5)
        axes.plot(median, y, look[label].marker, color=look[label].colour, markersize=8,
                  markeredgecolor="white")
    axes.set(xlabel="ms per step", yticks=range(len(stages)), ylim=(len(stages) - 0.45, -0.55))
    axes.set_yticklabels(["\n".join(stage_name(stage)) for stage in stages])
    axes.tick_params(axis="y", length=0)


def step_time_picture(groups, look):
    """Median and range of the ms per step by stage, over the steps of a group's runs, from Run.steps."""
    name, title = "step_time.png", "Step time by stage"
    times = {label: stage_times(runs) for label, runs in groups.items()}
    notes = tuple(f"{label}: not drawn, its logs time no steps." for label in times if not times[label])
    times = {label: by_stage for label, by_stage in times.items() if by_stage}
    if not times:
        return Picture(name, title, missing="no log times its steps.")
    stages = stages_in_order({stage for by_stage in times.values() for stage in by_stage})
    figure, axes = canvas(0.8 + len(stages) * max(0.52, 0.26 * len(times)), times)
    draw_step_times(axes[0, 0], times, stages, look)
    legend(figure, [Line2D([], [], color=look[label].colour, marker=look[label].marker, markersize=8,
                           linewidth=3, markeredgecolor="white") for label in times], times)
    return Picture(
        name, title, figure, f"Milliseconds per step by stage: {listed(times)}.",
        f"Marker: median; bar: {LOW} to {HIGH} % of the steps, of all runs of a group together. A step is "
        "timed by the difference of the clock between its line and the one before, in whole milliseconds; "
        "the clock stands during validation. T: tokens of a micro-batch. The scale does not begin at 0.",
        notes, ("stage", "group", "steps", "median, ms", f"{LOW} to {HIGH} %, ms"),
        step_time_table(times, stages))


def draw_bars(axes, starts, phases):
    """A stacked bar per start; the phases without a colour come last, in grey."""
    longest = max(sum(start.values()) for start in starts)
    for y, start in enumerate(starts):
        rest = sum(s for name, s in start.items() if name not in phases)
        left = 0.0
        parts = [(start.get(name, 0.0), colour) for name, colour in zip(phases, COLOURS, strict=False)]
        for s, colour in [*parts, (rest, GREY)]:
            axes.barh(y, s, 0.62, left, color=colour, edgecolor="white", linewidth=0.8)
            if s >= 0.065 * longest:
                axes.text(left + s / 2, y, f"{s:.1f}", ha="center", va="center", fontsize=12,
                          color="white" if colour in DARK else "black")
            left += s
        axes.text(left + 0.01 * longest, y, f"{left:.1f} s", va="center")
    axes.set(xlabel="seconds", xlim=(0, 1.14 * longest))
    axes.set(ylim=(len(starts) - 0.5, -0.5), yticks=range(len(starts)))
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)


def further_starts(runs):
    """What the starts after the first took, or that there is none."""
    seconds = [sum(phase_seconds(run).values()) for run in cold_starts(runs)[1:]]
    if not seconds:
        return "no run has all phases."
    return f"{len(seconds)} further starts, {min(seconds):.1f} to {max(seconds):.1f} s."


def start_picture(groups):
    """What the start of a process took, phase by phase, from Run.phases of the runs that began one."""
    name, title = "start.png", "Start-up"
    named = [(label, run) for label, runs in groups.items() for run in cold_starts(runs)[:1]]
    notes = tuple(f"{label}: {further_starts(runs)}" for label, runs in groups.items()
                  if len(cold_starts(runs)) != 1)
    if not named:
        return Picture(name, title, missing=f"no log has all phases of a start, from `{FIRST_PHASE}` on.")
    starts = [phase_seconds(run) for _, run in named]
    phases = long_phases(starts)
    rest = list(dict.fromkeys(name for start in starts for name in start if name not in phases))
    labels = [f"{folded(label, 16, 2)}\n{seeds([run])}" for label, run in named]
    height = 0.18 + 0.22 * (1 + max(label.count("\n") for label in labels))
    names = [*phases, *["the others"] * bool(rest)]
    figure, axes = canvas(0.75 + height * len(starts), names)
    draw_bars(axes[0, 0], starts, phases)
    axes[0, 0].set_yticklabels(labels)
    legend(figure, [Patch(color=colour) for colour in [*COLOURS[:len(phases)], *[GREY] * bool(rest)]], names)
    rows = [(phase, *(f"{start[phase]:.1f}" if phase in start else "-" for start in starts))
            for phase in (*phases, *rest)]
    return Picture(
        name, title, figure, f"Seconds by phase of the start: {listed(dict(named))}.",
        "From the start of the process to that of the clock, of each group's first run whose log has every "
        f"phase: {listed(f'{label}, {seeds([run])}' for label, run in named)}. "
        + "Grey: phases that are short in every start." * bool(rest), notes,
        ("phase, s", *((cut(label, 20), seeds([run])) for label, run in named)),
        (*rows, ("sum", *(f"{sum(start.values()):.1f}" for start in starts))))


def gpu_table(having):
    """Rows: mean and range of all samples of each group."""
    return tuple((label, str(len(runs)), str(len({row[1] for run in runs for row in run.gpu})),
                  *(spread([row[k] for run in runs for row in run.gpu], "{:,.0f}") for k in GPU_UNITS))
                 for label, runs in having.items())


def gpu_picture(groups, look):
    """SM clock, power and temperature of the GPUs while the clock ran, from Run.gpu."""
    name, title = "gpu.png", "Clocks, power and temperature"
    having = {label: [run for run in runs if run.gpu] for label, runs in groups.items()}
    notes = tuple(f"{label}: {len(runs) - len(having[label])} of {len(runs)} runs have no samples of a GPU."
                  for label, runs in groups.items() if len(having[label]) < len(runs))
    having = {label: runs for label, runs in having.items() if runs}
    if not having:
        return Picture(name, title, missing="no log has samples of a GPU.")
    width = cell_width([run for runs in having.values() for run in runs])
    figure, axes = canvas(4.9, having, len(GPU_UNITS), sharex=True)
    for ax, (column, unit) in zip(axes[:, 0], GPU_UNITS.items(), strict=True):
        for label, runs in having.items():
            band(ax, gpu_curve(runs, column, width), look[label])
        ax.set_ylabel(unit)
        ax.yaxis.set_major_locator(ticks())
    figure.align_ylabels()
    axes[-1, 0].set_xlabel("training time, s")
    axes[-1, 0].set_xlim(left=0)
    handles = [Line2D([], [], color=look[label].colour, linestyle=look[label].dash) for label in having]
    legend(figure, handles, having)
    return Picture(
        name, title, figure, f"SM clock, power and temperature against training time: {listed(having)}.",
        "Line: mean over the GPUs of a group's runs; band: least to largest of them; each GPU by its mean "
        f"within {width} s. The scales do not begin at 0. The table has mean, least and most of all samples.",
        notes,
        ("group", "runs", "GPUs", "MHz", "W", "degrees C"), gpu_table(having))


# ---- The report --------------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Records and runs</title>
<style>
:root { color-scheme: light dark; --ink: #1d1d1f; --soft: #5a5a60; --paper: #ffffff; --line: #dcdce0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececee; --soft: #a9a9b0; --paper: #17181a; --line: #3a3b40; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 0.9rem 2.5rem; max-width: 80rem; overflow-wrap: anywhere;
  color: var(--ink); background: var(--paper); font: 1rem/1.45 system-ui, Roboto, Arial, sans-serif; }
h1 { font-size: 1.55rem; margin: 0 0 0.4rem; }
h2 { font-size: 1.15rem; margin: 0 0 0.5rem; }
main { margin-top: 1.8rem; }
section { break-inside: avoid; padding-bottom: 2.4rem; }
@media (min-width: 66rem) { body { padding: 1.6rem 2rem 2rem; } main { columns: 2; column-gap: 2.5rem; } }
img { display: block; width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; }
p { margin: 0.55rem 0; max-width: 46rem; }
section p, li { color: var(--soft); font-size: 0.9rem; }
ul { margin: 0.4rem 0; padding-left: 1.2rem; }
.wide { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; margin: 0.7rem 0 0; font-size: 0.85rem; line-height: 1.3;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th { text-align: right; vertical-align: bottom; font-weight: 600; color: var(--soft);
  border-bottom: 2px solid var(--line); }
td { text-align: right; vertical-align: top; white-space: nowrap; border-bottom: 1px solid var(--line); }
th, td { padding: 0.3rem 0 0.3rem 0.6rem; }
th:first-child, td:first-child { padding-left: 0; }
.word, .name { overflow-wrap: anywhere; min-width: 3rem; white-space: normal; }
.word { text-align: left; }
.word:first-child { min-width: 4.6rem; }
small { display: block; color: var(--soft); white-space: nowrap; font-weight: 400; }
@media (max-width: 30rem) {
  table { font-size: 0.8rem; }
  th, td { padding-left: 0.5rem; }
  .word:first-child { min-width: 3.7rem; }
}
</style>
</head>
<body>
"""


def cell(value):
    """A cell's text; of a pair, the second is set smaller below the first."""
    if isinstance(value, tuple):
        large, small = map(html.escape, value)
        return f"{large}<small>{small}</small>" if small else large
    return html.escape(value)


def table(head, rows):
    """HTML of a table, '' without rows."""
    if not rows:
        return ""
    kinds = [' class="word"' if k == 0 or name in WORDS else ' class="name"' * isinstance(name, tuple)
             for k, name in enumerate(head)]
    lines = [[f'<th{kind} scope="col">{cell(x)}</th>' for kind, x in zip(kinds, head, strict=True)]]
    lines += [[f"<td{kind}>{cell(x)}</td>" for kind, x in zip(kinds, row, strict=True)] for row in rows]
    body = "".join(f"<tr>{''.join(line)}</tr>\n" for line in lines)
    return f'<div class="wide"><table>\n{body}</table></div>\n'


def listing(notes):
    """HTML of a list of sentences, '' for none."""
    body = "".join(f"<li>{html.escape(note)}</li>\n" for note in notes)
    return f"<ul>\n{body}</ul>\n" if notes else ""


def section(picture, png):
    """HTML of a picture with what belongs to it."""
    image = base64.b64encode(png).decode()
    width, height = (round(DPI * x) for x in picture.figure.get_size_inches())
    return (f"<section>\n<h2>{html.escape(picture.title)}</h2>\n"
            f'<img src="data:image/png;base64,{image}" width="{width}" height="{height}" '
            f'alt="{html.escape(picture.alt)}">\n<p>{html.escape(picture.caption)}</p>\n'
            f"{listing(picture.notes)}{table(picture.head, picture.rows)}</section>\n")


def warnings_on(groups):
    """Sentences on what a reader must know before comparing: other tracks or machines, unfinished runs."""
    notes = [f"{label} has no runs." for label, runs in groups.items() if not runs]
    for key, what in (("preset", "tracks"), ("host", "machines")):
        found = {run.keys[key] for runs in groups.values() for run in runs if key in run.keys}
        if len(found) > 1:
            notes.append(f"The runs are of different {what}: {'; '.join(sorted(found))}.")
    return notes + [f"{label}, {seeds([run])}: no result, {run.problem}." for label, runs in groups.items()
                    for run in runs if run.problem]


def report(pictures, pngs, groups):
    """The text of report.html."""
    rows = [(label, seeds(runs) if runs else "none",
             "; ".join(sorted({run.keys.get("host", "n/a") for run in runs})) or "n/a")
            for label, runs in groups.items()]
    missing = [f"{picture.title}: {picture.missing}" for picture in pictures if picture.missing]
    text = PAGE + "<h1>Records and runs</h1>\n<p>Drawn from the logs of the runs.</p>\n"
    text += table(("group", "which runs", "machine"), rows) + listing(warnings_on(groups)) + "<main>\n"
    text += "".join(section(picture, pngs[picture.name]) for picture in pictures if picture.figure)
    if missing:
        text += f"<section>\n<h2>Left out</h2>\n{listing(missing)}</section>\n"
    return text + "</main>\n</body>\n</html>\n"


def png_of(figure):
    """The bytes of a figure, with no mark of the time or the program."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DPI, metadata={"Software": None})
    return data.getvalue()


def plot(out, records, groups):
    """Draw records and groups of runs into the folder `out`: a PNG per picture, and report.html with all.

    records: objects with number, date, title, track and runs, in order. groups: {label: runs}. Returns the
    paths that were written. A picture with nothing to show is not written, one of an earlier call is removed,
    and the report says why.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    look = looks(groups)
    with matplotlib.style.context(["default", STYLE]):
        pictures = [progress(records),
                    loss_picture(groups, look, "time"), loss_picture(groups, look, "tokens"),
                    step_time_picture(groups, look), start_picture(groups), gpu_picture(groups, look)]
        pngs = {picture.name: png_of(picture.figure) for picture in pictures if picture.figure}
    for picture in pictures:
        (out / picture.name).unlink(missing_ok=True)
    files = pngs | {"report.html": report(pictures, pngs, groups).encode()}
    for name, data in files.items():
        (out / name).write_bytes(data)
    return [out / name for name in files]
