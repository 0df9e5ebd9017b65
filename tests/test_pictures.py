"""records/pictures.py: the numbers of the pictures, what the report holds and what it says it leaves out."""

import base64
import dataclasses
import html.parser
import math
import re
import statistics
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

pytest.importorskip("matplotlib")
sys.path.insert(0, str(ROOT / "records"))
import logs  # noqa: E402
import pictures  # noqa: E402

FIRST = ROOT / "records" / "001_2026-11-29_baseline"
NAMES = ["progress.png", "loss_time.png", "loss_tokens.png", "step_time.png", "start.png", "gpu.png"]
VOID = {"meta", "img", "br", "hr", "link", "input"}
ODD = "<b>&\" 'x' $\\frac{$ _z"   # as a formula it is an error


@pytest.fixture(scope="module")
def real():
    return [logs.read(path) for path in logs.logs_in(FIRST / "runs")]


def record(runs, number="001", track="solo", title="baseline"):
    return SimpleNamespace(number=number, date="2026-11-29", title=title, track=track, runs=runs)


def made(seed=1, n=40, ms=50, loss=4.0, **more):
    """A finished run of n steps in two stages of 16 and 32 tokens, the second twice as slow."""
    half, seconds, tokens, steps = n // 2, 0.0, 0, []
    for step in range(1, n + 1):
        seconds += (ms if step <= half else 2 * ms) / 1000
        tokens += 16 if step <= half else 32
        steps.append((step, tokens, loss + 6 / step + 0.01 * seed, round(seconds, 3)))
    values = {
        "path": f"{seed}.log", "digest": str(seed), "form": "ours", "script": "s", "seed": seed, "n_steps": n,
        "val_loss": steps[-1][2], "train_s": steps[-1][3], "ended": logs.END_OK,
        "keys": {"host": "a machine"},
        "steps": tuple(steps), "vals": tuple(steps[9::10]), "stages": ((0, half, 16), (1, n, 32)),
        "gpu": tuple((s / 2, gpu, 1900.0 + gpu, 600.0 + s, 50.0 + gpu) for s in range(5) for gpu in range(2)),
        "phases": (("imports", 4.0), ("model", 2.0), ("warm-up, T 16", 0.1), ("warm-up, T 16", 0.2))}
    return logs.Run(**values | more)


def public(seed=0, n=20):
    """A run as the public repository logs it: validation losses and times only."""
    vals = tuple((step, None, 3 + 7 / (1 + step), 0.1 * step + seed) for step in range(0, n + 1, 5))
    return logs.Run(f"p{seed}", f"p{seed}", "public", script="s", n_steps=n, val_loss=vals[-1][2],
                    train_s=vals[-1][3], vals=vals)


class Page(html.parser.HTMLParser):
    """Tags with their attributes and the text of a page; asserts that what is opened is closed, in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)


def drawn(folder, records, groups):
    """(names of the PNGs, Page): plots, and checks what holds for every report."""
    paths = pictures.plot(folder, records, groups)
    assert sorted(paths) == sorted(folder.iterdir()) and paths[-1] == folder / "report.html"
    text = paths[-1].read_text(encoding="utf-8")
    page = Page(text)
    for tag, attrs in page.tags:
        assert tag not in {"script", "link", "iframe", "object"}
        assert not {"href", "srcset", "style"} & set(attrs)
        assert tag != "img" or attrs["alt"]
    assert not re.search(r"https?:|@import|url\(|=[\"']?//", re.sub(r"base64,[^\"]*", "", text))
    head = "data:image/png;base64,"
    sources = [attrs["src"] for _, attrs in page.tags if "src" in attrs]
    assert all(source.startswith(head) for source in sources)
    images = [base64.b64decode(source.removeprefix(head)) for source in sources]
    assert images == [path.read_bytes() for path in paths[:-1]]
    return [path.name for path in paths[:-1]], page


# ---- Numbers -----------------------------------------------------------------------------------------

def test_moving_mean():
    """The mean of the finite values in reach; none at a value that is not finite."""
    values = np.array([5.0, 1.0, math.nan, 3.0, math.inf, 7.0, 2.0])
    for half in (0, 1, 2, 9):
        got = pictures.moving_mean(values, half)
        for i, x in enumerate(values):
            near = [v for v in values[max(0, i - half):i + half + 1] if math.isfinite(v)]
            assert got[i] == pytest.approx(statistics.fmean(near)) if math.isfinite(x) else math.isnan(got[i])


def test_smoothing_stays_within_a_stage():
    run = made(n=400)                                    # a mean over 9 steps
    rows = pictures.smoothed(run)
    assert [row[0] for _, row in rows] == list(range(1, 401))
    raw = [row[2] for row in run.steps]
    assert rows[100][1][2] == pytest.approx(statistics.fmean(raw[96:105]))
    assert rows[199][0] == (0, 16) and rows[199][1][2] == pytest.approx(statistics.fmean(raw[195:200]))
    assert rows[200][0] == (1, 32) and rows[200][1][2] == pytest.approx(statistics.fmean(raw[200:205]))


def test_pooling_by_seed():
    """At equal steps: mean of x, mean, least and most of the losses."""
    runs = [made(seed, ms=ms) for seed, ms in ((1, 40), (2, 50), (3, 90))]
    first, second = pictures.training_curve(runs, pictures.SECONDS)
    assert len(first) == len(second) == 20
    for k, row in enumerate(np.concatenate([first, second])):
        losses = [run.steps[k][2] for run in runs]       # 40 steps: each is its own mean
        x = statistics.fmean(run.steps[k][3] for run in runs)
        assert row == pytest.approx([x, statistics.fmean(losses), min(losses), max(losses)])
    by_tokens = pictures.training_curve(runs, pictures.TOKENS)[1]
    assert by_tokens[-1][0] == 20 * 16 + 20 * 32


def test_order_of_the_lines_does_not_matter():
    run = made()
    shuffled = dataclasses.replace(run, steps=run.steps[::-1])
    for column in (pictures.TOKENS, pictures.SECONDS):
        for a, b in zip(*(pictures.training_curve([r], column) for r in (run, shuffled)), strict=True):
            assert np.array_equal(a, b)
    assert pictures.step_times(run) == pictures.step_times(shuffled)


def test_line_breaks_where_the_runs_change():
    """A run that ends early, or has a loss that is not finite, is in no mean beyond."""
    long, short = made(1, stages=()), made(2, n=30, stages=())
    parts = pictures.training_curve([long, short], pictures.SECONDS)
    assert [len(part) for part in parts] == [30, 10]
    assert parts[1][:, 1] == pytest.approx([row[2] for row in long.steps[30:]])
    holes = tuple((*row[:2], math.nan if row[0] in (7, 8) else row[2], row[3]) for row in long.steps)
    parts = pictures.training_curve([dataclasses.replace(long, steps=holes)], pictures.SECONDS)
    assert [len(part) for part in parts] == [6, 32] and np.isfinite(np.concatenate(parts)).all()


def test_validation_points():
    runs = [made(seed) for seed in (1, 2)]
    points = pictures.validation_points(runs, pictures.TOKENS)
    assert len(points) == 4 and points[0] == pytest.approx((160, 4.0 + 0.6 + 0.015, 4.61, 4.62))
    assert pictures.validation_points([public()], pictures.TOKENS) == []
    assert len(pictures.validation_points([public()], pictures.SECONDS)) == 5


def test_first_steps_do_not_rule_the_loss_axis():
    rows = [(x, 10.0 if x < 5 else 4.0 - 0.01 * x, 0.0, 9.0 if x < 5 else 4.0) for x in range(101)]
    rows = [(x, y, y - 0.1, y + 0.1) for x, y, _, _ in rows]
    low, high = pictures.loss_limits([pictures.Curve([np.array(rows)], [(100, 2.8, 2.8, 2.8)])])
    assert 2.6 < low < 2.8 and 4.0 < high < 4.2


def test_step_times():
    """Differences of the clock from 0 on; a gap counts once, over its steps, if they are of one stage."""
    times = pictures.step_times(made(ms=50))
    assert times == {(0, 16): pytest.approx([50] * 20), (1, 32): pytest.approx([100] * 20)}
    run = made(ms=50)
    gaps = dataclasses.replace(run, steps=tuple(row for row in run.steps if row[0] not in (5, 6, 20, 21)))
    times = pictures.step_times(gaps)
    assert times[0, 16] == pytest.approx([50] * 17)      # 4, the one over 5 to 7, then 8 to 19
    assert times[1, 32] == pytest.approx([100] * 18)     # not the one over 20 to 22
    assert list(pictures.step_times(made(stages=()))) == [None]


def test_stage_times_pool_the_steps_of_all_runs():
    times = pictures.stage_times([made(1, ms=50), made(2, ms=60)])
    assert list(times) == [(0, 16), (1, 32)]
    n, low, median, high = times[0, 16]
    assert (n, low, median, high) == (40, pytest.approx(50), pytest.approx(55), pytest.approx(60))
    slower = tuple((k, 16 * k, 4.0, (k * k + k) / 2000) for k in range(1, 102))      # step k takes k ms
    times = pictures.stage_times([made(steps=slower, stages=((0, 101, 16),))])
    assert times == {(0, 16): (101, pytest.approx(11), pytest.approx(51), pytest.approx(91))}


def test_stage_times_of_a_record_are_those_of_its_log(real):
    """The trainer's own medians, up to the milliseconds of its lines."""
    for run in real:
        got = [median for _, _, median, _ in pictures.stage_times([run]).values()]
        assert got == pytest.approx([float(x) for x in run.keys["ms_by_stage"].split(", ")], abs=1.0)


def test_one_start_of_each_group_is_drawn(real):
    """The others are told by their range."""
    first, *_ = [run for run in real if pictures.cold_starts([run])]
    slower = made(phases=((pictures.FIRST_PHASE, 3.0), ("more", 5.5)))
    picture = pictures.start_picture({"a": [first, slower, slower], "b": [slower], "c": [made(phases=())]})
    assert picture.head[1:] == (("a", pictures.seeds([first])), ("b", pictures.seeds([slower])))
    assert picture.notes == ("a: 2 further starts, 8.5 to 8.5 s.", "c: no run has all phases.")


def test_cold_starts(real):
    """The first run of a process; its phases sum to the start that the log tells."""
    assert [run.seed for run in pictures.cold_starts(real)] == [1]
    phases = pictures.phase_seconds(real[0])
    assert sum(phases.values()) == pytest.approx(float(real[0].keys["cold_start_s"]), abs=0.3)
    assert phases["warm-up, T 16,384"] == pytest.approx(0.2)
    assert pictures.long_phases([phases]) == ["imports", "joining and checks", "model", "warm-up, T 49,152",
                                              "warm-up, optimizer", "warm-up, validation"]
    many = [{f"phase {k}": 1.0 + k for k in range(20)}]
    assert pictures.long_phases(many) == [f"phase {k}" for k in range(13, 20)]


def test_gpu_curve():
    """Per cell: each GPU of each run by its mean, then mean, least and most of these."""
    samples = (0.1, 0, 1000), (0.6, 0, 1200), (0.2, 1, 1500), (1.5, 1, 900)
    rows = tuple((s, gpu, mhz, 0.0, 0.0) for s, gpu, mhz in samples)
    curve = pictures.gpu_curve([made(gpu=rows), made(gpu=((0.4, 0, 2000.0, 0.0, 0.0),))], 2, 1)
    assert curve.tolist() == [[0.5, pytest.approx(4600 / 3), 1100, 2000], [1.5, 900, 900, 900]]
    assert pictures.cell_width([made(gpu=rows)]) == 1
    assert pictures.cell_width([made(gpu=((601.0, 0, 1.0, 1.0, 1.0),))]) == 11


def test_numbers_in_cells():
    assert pictures.spread([1.0, 2.0, None, math.nan], "{:.1f}") == ("1.5", "1.0 to 2.0")
    assert pictures.spread([2.0], "{:.1f}") == pictures.spread([2.0, 2.01], "{:.1f}") == "2.0"
    assert pictures.spread([None], "{:.1f}") == "n/a"


# ---- The report --------------------------------------------------------------------------------------

def test_record_001(real, tmp_path):
    """All pictures, and in the tables what the logs say."""
    names, page = drawn(tmp_path / "out", [record(real)], {"001 baseline": real})
    assert names == NAMES and "Left out" not in page.text
    loss, seconds = ([float(run.keys[key]) for run in real] for key in ("val_loss", "train_s"))
    assert f"{statistics.fmean(seconds):.2f} {min(seconds):.2f} to {max(seconds):.2f}" in page.text
    assert f"{statistics.fmean(loss):.4f} {min(loss):.4f} to {max(loss):.4f}" in page.text
    for words in ("seeds 1, 2 and 3", "1 x NVIDIA H200", "001 baseline, seed 1"):
        assert words in page.text


def test_same_runs_same_bytes(real, tmp_path):
    """Neither the time, nor what was drawn before, nor earlier settings of matplotlib are in the files."""
    import matplotlib
    groups = {"a": real, "b": [made(seed) for seed in (1, 2)]}
    first, other = tmp_path / "first", tmp_path / "other"
    pictures.plot(first, [record(real)], groups)
    pictures.plot(other, [], {"c": [made(phases=())]})
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        pictures.plot(other, [record(real)], groups)
    assert dict(matplotlib.rcParams) == before
    once, again = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in (first, other))
    assert once == again


def test_groups_of_different_length(tmp_path):
    names, page = drawn(tmp_path, [], {"long": [made(1), made(2, n=30)], "one": [made(3, n=20)]})
    assert names == NAMES[1:] and "30 to 40" in page.text
    assert "Records: there are no records." in page.text


def test_tracks_have_panels_of_their_own():
    """No axis has the records of two tracks."""
    records = [record([made(1)]), record([made(1)], "002", "tiny"), record([made(2)], "003")]
    figure = pictures.progress(records).figure
    labels = [[t.get_text() for t in axes.get_yticklabels()] for axes in figure.axes]
    assert labels == [["001 baseline", "003 baseline"], ["", ""], ["002 baseline"], [""]]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["solo", "", "tiny", ""]


def test_public_runs(tmp_path):
    """Times and validation losses only: one picture, and a sentence on each of the others."""
    names, page = drawn(tmp_path, [record([public()], track="public")], {"theirs": [public(0), public(1)]})
    assert names == ["progress.png", "loss_time.png"]
    assert "theirs: no line, its logs have no training losses with times." in page.text
    for sentence in ("Loss against tokens: no log has losses with tokens.",
                     "Step time by stage: no log times its steps.", "Start-up: no log has all phases",
                     "Clocks, power and temperature: no log has samples"):
        assert sentence in page.text
    assert "theirs 2 runs n/a" in page.text


def test_public_beside_ours(tmp_path):
    names, page = drawn(tmp_path, [], {"ours": [made()], "theirs": [public()]})
    assert names == NAMES[1:]
    for sentence in ("theirs: not drawn, its logs have no losses with tokens.",
                     "theirs: not drawn, its logs time no steps.", "theirs: no run has all phases.",
                     "theirs: 1 of 1 runs have no samples of a GPU."):
        assert sentence in page.text


def test_nothing_at_all(tmp_path):
    names, page = drawn(tmp_path, [], {})
    assert names == [] and page.text.count("there are no records") == 1 and page.text.count("no log") == 5
    assert drawn(tmp_path, [], {"empty": []})[1].text.count("empty has no runs.") == 1


def test_runs_without_a_result(tmp_path):
    """They are drawn as far as they went, counted in no mean, and named."""
    failed = made(2, n=30, val_loss=None, train_s=None, vals=(), gpu=(), phases=(),
                  ended="end: FAILED rank 1: loss")
    names, page = drawn(tmp_path, [record([failed])], {"a": [made(1), failed]})
    assert names == NAMES[1:] and "001 baseline: not drawn, it has no finished run." in page.text
    assert "a, seed 2: no result, failed: `end: FAILED rank 1: loss`." in page.text
    assert "a 1 of 2 3.00 4.1600" in page.text


def test_losses_that_are_not_finite(tmp_path):
    bad = tuple((*row[:2], math.nan if row[0] > 30 else row[2], row[3]) for row in made().steps)
    names, page = drawn(tmp_path, [], {"a": [made(steps=bad, vals=((40, 960, math.inf, 3.0),))]})
    assert "loss_time.png" in names and "a: losses that are not finite, left out: 11." in page.text
    every = tuple((*row[:2], math.nan, row[3]) for row in made().steps)
    names, page = drawn(tmp_path, [], {"a": [made(steps=every, vals=())]})
    assert "loss_time.png" not in names and "step_time.png" in names


def test_different_machines_and_tracks_are_said(tmp_path):
    a, b = (made(keys={"host": f"machine {k}", "preset": k}) for k in ("solo", "tiny"))
    text = drawn(tmp_path, [], {"a": [a], "b": [b]})[1].text
    assert "of different tracks: solo; tiny." in text
    assert "of different machines: machine solo; machine tiny." in text


def test_labels_are_text(tmp_path):
    """What users write is neither markup nor a formula, in any place."""
    run = made(keys={"host": ODD}, phases=((pictures.FIRST_PHASE, 3.0), (ODD, 5.0)), ended=ODD)
    groups = {ODD: [run], "_": [made()], "x" * 200: [made()]}
    _, page = drawn(tmp_path, [record([made()], ODD, ODD, ODD)], groups)
    assert page.text.count(ODD) > 10 and not [tag for tag, _ in page.tags if tag == "b"]
    assert sum(ODD in attrs.get("alt", "") for _, attrs in page.tags) == 6


def test_many_groups(tmp_path):
    """More groups than colours still differ."""
    groups = {f"group {k}": [made(k)] for k in range(16)}
    assert len(set(pictures.looks(groups).values())) == 16
    assert drawn(tmp_path, [], groups)[0] == NAMES[1:]


def test_a_picture_of_before_is_removed(tmp_path):
    drawn(tmp_path, [], {"a": [made()]})
    assert drawn(tmp_path, [], {"a": [public()]})[0] == ["loss_time.png"]
