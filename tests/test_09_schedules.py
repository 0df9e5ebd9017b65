"""Section 9 and the stage formulas: golden tables, worked out apart from the code."""

from dataclasses import replace

import pytest

from conftest import rotary_at

STAGES = {     # n_sched: (stage ends, tokens of the whole record run)
    978: ((279, 593, 971, 1030, 1050), 289_472_512),
    1122: ((320, 681, 1107, 1174, 1194), 328_663_040),
    963: ((275, 584, 956, 1014, 1034), None),
    240: ((69, 146, 239, 253, 258), None),
}


@pytest.mark.parametrize("n_sched", STAGES)
def test_stage_ends_and_tokens(tg, n_sched):
    cfg = tg.parse([f"n_sched={n_sched}"])
    ends, tokens = STAGES[n_sched]
    assert cfg.stage_ends == ends
    if tokens:
        assert cfg.n_micro * sum(cfg.stages[tg.stage_at(cfg, s)].T for s in range(cfg.n_steps)) == tokens


def test_solo_sees_an_eighth_of_the_record_and_tiny_its_own_count(tg):
    def tokens(cfg):
        return cfg.n_micro * sum(cfg.stages[tg.stage_at(cfg, s)].T for s in range(cfg.n_steps))
    assert tokens(tg.PRESETS["solo"]) == 36_184_064
    assert tokens(tg.PRESETS["tiny"]) == 180_224
    assert tg.PRESETS["tiny"].stage_ends == (11, 24, 39, 41, 42)


def test_stage_at_changes_at_the_ends(tg):
    cfg = tg.RECORD
    assert [tg.stage_at(cfg, s) for s in (0, 278, 279, 592, 593, 970, 971, 1029, 1030, 1049, 1050)] == \
        [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4]


def test_learning_rate_of_1122_scheduled_steps(tg):
    """The values that the public record's log shows, to its three decimals."""
    cfg = tg.parse(["n_sched=1122"])
    want = {0: 1.0, 319: .937, 320: 1.408, 680: .941, 681: 1.050, 1106: .403, 1107: .391, 1173: .301, 1174: .3}
    for step, lr in want.items():
        assert tg.lr_at(cfg, step) == pytest.approx(lr, abs=5.1e-4), step


def test_cooldown_of_978_starts_after_206_and_ends_on_the_floor(tg):
    cfg = tg.RECORD
    assert tg.lr_at(cfg, 206) == 1.0 > tg.lr_at(cfg, 207)
    assert tg.lr_at(cfg, 1030) == tg.lr_at(cfg, 1049) == pytest.approx(0.3)


@pytest.mark.parametrize("n_sched, n_steps, ramp, switch", [
    (978, 1050, {0: .85, 120: .89, 239: .93 - .08 / 240, 240: .93, 700: .93, 1000: .93, 1001: .9284, 1025: .89, 1049: .8516, 1050: .85}, 514),
    (1122, 1194, {0: .85, 120: .89, 240: .93, 700: .93, 1144: .93, 1169: .89, 1193: .8516, 1194: .85}, 514),
    (240, 258, {0: .85, 29: .85 + .08 * 29 / 58.971429, 59: .93, 245: .93, 250: .93 - .08 * 4.285714 / 12.285714, 258: .85}, 127)])
def test_rails(tg, n_sched, n_steps, ramp, switch):
    """mu up, flat and back to 0.85; beta is mu until the slow rail joins, then 0.85 with a weight of 0.4385."""
    cfg = tg.parse([f"n_sched={n_sched}"])
    assert cfg.n_steps == n_steps and cfg.shrink == pytest.approx(min(1, n_steps / 1050))
    for step, want in ramp.items():
        assert tg.rails_at(cfg, step)[0] == pytest.approx(want, abs=1e-7), step
    rails = [tg.rails_at(cfg, step) for step in range(n_steps)]
    assert all(beta == mu and blend == 1.0 for mu, beta, blend in rails[:switch])
    assert {rest[1:] for rest in rails[switch:]} == {(0.85, 0.4385)} and len(rails) > switch


def test_a_setting_moves_the_step_at_which_the_slow_rail_joins(tg):
    tiny = tg.PRESETS["tiny"]                          # 42 steps: 9.6 up, 2 down
    assert tg.rails_at(tiny, 5)[0] == pytest.approx(.85 + .08 * 5 / 9.6) and tg.rails_at(tiny, 41)[0] == pytest.approx(.89)
    for slow_from, first in ((0, 0), (514, 21), (10_000, 42)):
        cfg = replace(tiny, slow_from=slow_from)
        assert [tg.rails_at(cfg, s)[2] == 1.0 for s in range(42)] == [True] * first + [False] * (42 - first)


TAILS = {      # n_sched: the steps after which each average moves: head and embedding, vo and mlp, values, qk, vo and mlp
    1122: ([896, *range(897, 1194, 2)], [*range(945, 1194, 4)], [*range(947, 1192, 4)], sorted([*range(897, 1194, 4), 1192])),
    978: ([752, *range(753, 1050, 2)], [*range(801, 1050, 4)], [*range(803, 1048, 4)], sorted([*range(753, 1050, 4), 1048])),
    240: ([*range(185, 258, 2)], [*range(197, 258, 4)], [*range(199, 256, 4)], sorted([*range(185, 258, 4), 256])),
}


@pytest.mark.parametrize("n_sched", TAILS)
def test_steps_and_rates_of_the_averages(tg, n_sched):
    """Of one and of two steps for head and embedding, 4/53 and 2/75 for the others; in a shorter run larger ones."""
    cfg = tg.parse([f"n_sched={n_sched}"])
    r = min(1.0, cfg.n_steps / 1050)
    by_row = list(zip(*(tg.ticks_at(cfg, step) for step in range(cfg.n_steps))))
    ends, tail, value, slow = TAILS[n_sched]
    for rates, steps in zip(by_row, (ends, tail, value, slow, slow), strict=True):
        assert [step for step, rate in enumerate(rates) if rate] == steps
    if n_sched == 1122:
        assert [len(x) for x in TAILS[n_sched]] == [1 + 149, 63, 62, 75 + 1] and tail[-1] == 1193 and value[-1] == 1191
    one = 2 / 299 / r
    assert by_row[0][-1] == pytest.approx(one, rel=1e-12)
    assert [by_row[0][step] for step in ends[1:-1]] == pytest.approx([1 - (1 - one) ** 2] * (len(ends) - 2), rel=1e-12)
    for rates, rate in zip(by_row[1:], (4 / 53, 4 / 53, 2 / 75, 2 / 75)):
        moves = [x for x in rates if x]
        assert moves == pytest.approx([rate / r] * len(moves), rel=1e-12)


def test_what_is_averaged_and_how_much_of_it_stays(tg):
    """In the order in which it is shipped; the banks last; a rate is never above 1."""
    assert [(row[0], row[-1]) for row in tg.AVERAGES] == [
        ("w_head w_embed", 0.65), ("vo mlp", 1.0), ("w_value", 1.0), ("qk", 0.55), ("vo mlp", 0.3493)]
    tiny = tg.PRESETS["tiny"]
    assert tg.ticks_at(tiny, 33) == (pytest.approx(1 - (1 - 2 / 299 / .04) ** 2), 1.0, 0.0) + (pytest.approx(2 / 75 / .04),) * 2
    assert not any(tg.ticks_at(tiny, 29)) and tg.ticks_at(tiny, 40) == (0, 0, 0) + (pytest.approx(2 / 75 / .04),) * 2


@pytest.mark.parametrize("n_sched, last", ((978, 1031), (1122, 1175), (240, 253), (963, 1015)))
def test_head_and_embedding_part_after_the_first_odd_step_of_the_extension(tg, n_sched, last):
    """The Pace of every step holds what the schedules say; tied up to and including that step, parts only there."""
    cfg = tg.parse([f"n_sched={n_sched}"])
    paces = [tg.pace_at(cfg, step) for step in range(cfg.n_steps)]
    assert [pace.tied for pace in paces] == [True] * (last + 1) + [False] * (cfg.n_steps - 1 - last)
    assert [step for step, pace in enumerate(paces) if pace.parts] == [last]
    for step in (0, 126, 127, 200, last, cfg.n_steps - 1):
        pace = paces[step]
        assert pace.lr == tg.lr_at(cfg, step) and (pace.mu, pace.beta, pace.blend) == tg.rails_at(cfg, step)
        assert pace.event == tg.event_at(cfg, step) and pace.ticks == tg.ticks_at(cfg, step)


def test_yarn_vectors(tg):
    """Frequencies and scales after each growth of the long window: 384, 896, 1408, 1664 tokens."""
    freqs, scale = [1024 ** (-i / 31) for i in range(32)], 0.1
    assert [freqs[i] for i in (1, 5, 10, 15, 31)] == pytest.approx([.799638, .32694, .10689, .034946, .000977], rel=5e-4)
    golden = [(384, 896, .116946, {3: .504225, 5: .254507, 8: .100042, 10: .056711, 15: .015709, 31: .000419}),
              (896, 1408, .127518, {3: .504225, 5: .254507, 8: .079232, 10: .040803, 15: .010225, 31: .000266}),
              (1408, 1664, .131778, {0: 1, 3: .504225, 8: .073630, 10: .036175, 15: .008717, 31: .000225})]
    for old, new, want_scale, want in golden:
        freqs, scale = tg.yarn(freqs, scale, old, new)
        assert scale == pytest.approx(want_scale, abs=1e-6)
        assert [freqs[i] for i in want] == pytest.approx(list(want.values()), rel=2e-3)


def test_rotary_at_takes_one_yarn_step_for_each_new_window(tg):
    """Narrow heads follow the short windows, wide ones the long; stage 3 keeps stage 2's, so all stays as it is."""
    cfg = tg.RECORD
    narrow, wide = ([rotary_at(tg, cfg, stage, wide)[1] for stage in range(5)] for wide in (False, True))
    assert narrow == pytest.approx([.1300, .1586, .1748, .1748, .1811], abs=5e-5)
    assert wide == pytest.approx([.0850, .0994, .1084, .1084, .1120], abs=5e-5)
    freqs = [1024 ** (-i / 31) for i in range(32)]
    for before, after in ((128, 384), (384, 640), (640, 768)):
        freqs, _ = tg.yarn(freqs, 1.0, before, after)
    assert rotary_at(tg, cfg, 4, False)[0] == pytest.approx(freqs) != rotary_at(tg, cfg, 4, True)[0]
    assert rotary_at(tg, cfg, 0, False)[0] == rotary_at(tg, cfg, 0, True)[0] and len(freqs) == 32
    assert len(rotary_at(tg, tg.PRESETS["tiny"], 0, True)[0]) == 4


def changes(values):
    """[(step, value)] where a sequence takes a new value."""
    return [(i, x) for i, x in enumerate(values) if i == 0 or x != values[i - 1]]


@pytest.mark.parametrize("n_sched, classes, prefix", [
    (978, [0, 593, 845, 971], [0, 279, 358, 436, 515, 593]),
    (1122, [0, 681, 965, 1107], [0, 320, 411, 501, 591, 681]),
    (963, [0, 584, 832, 956], [0, 275, 353, 430, 507, 584]),
    (240, [0, 146, 208, 239], [0, 69, 89, 108, 127, 146])])
def test_classes_and_prefix_weights(tg, n_sched, classes, prefix):
    """The steps at which they change; published for 1122, settled for 978, by the same rule for the others."""
    cfg = replace(tg.RECORD, n_sched=n_sched)
    steps = range(cfg.n_steps)
    assert changes([tg.n_classes_at(cfg, s) for s in steps]) == list(zip(classes, (10_240, 14_336, 24_576, 50_304)))
    assert changes([tg.targets_at(cfg, s)[1] for s in steps]) == list(zip(
        prefix, ((0.25,), (0.2,), (0.15,), (0.1,), (0.05,), ())))


def test_weights_of_further_targets(tg):
    """(1, .5, .25 to 0) in stage 0, (1, .5 to 0) in stage 1, then the next token alone."""
    cfg = tg.RECORD
    assert tg.targets_at(cfg, 0)[0] == (1.0, 0.5, 0.25)
    assert tg.targets_at(cfg, 93)[0] == pytest.approx((1.0, 0.5, 0.25 * (1 - 93 / 279)))
    assert tg.targets_at(cfg, 278)[0] == pytest.approx((1.0, 0.5, 0.25 / 279))
    assert tg.targets_at(cfg, 279)[0] == (1.0, 0.5)
    assert tg.targets_at(cfg, 436)[0] == pytest.approx((1.0, 0.25))
    assert tg.targets_at(cfg, 592)[0] == pytest.approx((1.0, 0.5 / 314))
    assert {tg.targets_at(cfg, s) for s in range(593, 1050)} == {((1.0,), ())}


def test_plan_at_holds_all_that_the_loader_must_know(tg):
    cfg = tg.RECORD
    assert tg.plan_at(cfg, 0) == tg.StepPlan(16_384, 896, 10_240, (1.0, 0.5, 0.25), (0.25,))
    assert tg.plan_at(cfg, 850) == tg.StepPlan(49_152, 3072, 24_576, (1.0,), ())
    assert tg.plan_at(cfg, 1049) == tg.StepPlan(16_384, 3072, 50_304, (1.0,), ())
    shapes = {(p.T, p.n_classes, len(p.future), len(p.prefix)) for p in (tg.plan_at(cfg, s) for s in range(1050))}
    assert len(shapes) == 6                  # as many shapes, and graphs to come, as stages and their parts


def test_events_of_the_tables(tg):
    """Every second step, then every fourth, and the last one; all steps are covered once."""
    cfg = tg.RECORD
    events = [s for s in range(1050) if tg.event_at(cfg, s)]
    assert events == [*range(1, 336, 2), *range(339, 1050, 4), 1049] and events[-2:] == [1047, 1049]
    assert all(tg.event_at(cfg, s) == (1 if s < 336 else 2) for s in events)
    tiny = [(s, tg.event_at(tg.PRESETS["tiny"], s)) for s in range(42) if tg.event_at(tg.PRESETS["tiny"], s)]
    assert tiny == [(s, 1) for s in range(1, 12, 2)] + [(s, 2) for s in (*range(15, 42, 4), 41)]
    for n_sched in (39, 240, 963, 978, 1122):
        cfg = tg.parse([f"n_sched={n_sched}"])
        steps = [s for s in range(cfg.n_steps) if tg.event_at(cfg, s)]
        assert steps[-1] == cfg.n_steps - 1 and max(b - a for a, b in zip([-1, *steps], steps)) <= 4
