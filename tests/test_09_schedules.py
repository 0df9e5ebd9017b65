"""Section 9 and the stage formulas: golden tables, worked out apart from the code."""

import pytest

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


def test_momentum_ramps(tg):
    cfg = tg.parse(["n_sched=1122"])                   # 1194 steps: ramps at full length
    want = {0: .85, 120: .89, 240: .93, 700: .93, 1144: .93, 1169: .89, 1193: .8516}
    for step, mu in want.items():
        assert tg.mu_at(cfg, step) == pytest.approx(mu, abs=1e-9), step
    tiny = tg.PRESETS["tiny"]                          # 42 steps: 9.6 up, 2 down
    assert tg.mu_at(tiny, 5) == pytest.approx(.85 + .08 * 5 / 9.6)
    assert tg.mu_at(tiny, 41) == pytest.approx(.89)


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
    """Stage 3 keeps stage 2's window, so it keeps its frequencies."""
    cfg = tg.RECORD
    scales = [tg.rotary_at(cfg, stage)[1] for stage in range(5)]
    assert scales == pytest.approx([.1, .116946, .127518, .127518, .131778], abs=1e-6)
    assert len(tg.rotary_at(cfg, 0)[0]) == 32 and len(tg.rotary_at(tg.PRESETS["tiny"], 0)[0]) == 4
