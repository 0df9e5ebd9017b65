"""Section 1: the command line, presets, and what is refused before anything starts."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest


def refusal(tg, *words):
    with pytest.raises(tg.Refusal) as caught:
        tg.parse(words)
    return str(caught.value)


@pytest.mark.parametrize("name", ["record", "solo", "tiny"])
def test_every_preset_parses_and_passes_its_own_checks(tg, name):
    cfg = tg.parse([name])
    assert cfg == tg.PRESETS[name] and cfg.preset == name


def test_no_words_mean_the_record(tg):
    assert tg.parse([]) == tg.RECORD and tg.parse(["seed=7"]).seed == 7


def test_values_take_the_type_of_their_field(tg):
    cfg = tg.parse(["tiny", "repeat=True", "anvil_lr=3e-2", "stop=5", "train_files=a=b*.bin"])
    assert (cfg.repeat, cfg.anvil_lr, cfg.stop, cfg.train_files) == (True, 0.03, 5, "a=b*.bin")


@pytest.mark.parametrize("words, parts", [
    (["tinny"], ["'tinny'", "Did you mean 'tiny'?", "record, solo, tiny"]),
    (["tiny", "sead=3"], ["'sead=3'", "Did you mean 'seed'?"]),
    (["tiny", "seed"], ["'seed'", "want key=value"]),
    (["stop=3.5"], ["stop=3.5", "want an integer"]),
    (["anvil_lr=fast"], ["anvil_lr=fast", "want a number", "0.023"]),
    (["repeat=yes"], ["repeat=yes", "true or false"]),
    (["stages=1"], ["no setting of that name"]),
    (["stop=-1"], ["stop=-1", "at least 0"]),
    (["val_seq=0"], ["val_seq=0", "at least 1"]),
    (["tiny", "val_tokens=4100"], ["4100", "2048", "val_tokens=4096"]),
    (["tiny", "d_head=32"], ["d_head=32", "d_model=96"]),
    (["cooldown_from=1"], ["cooldown_from=1.0", "less than 1"]),
    (["anvil_lr=nan"], ["anvil_lr=nan", "finite"]),
    (["top_k=60000"], ["top_k=60000", "50257"]),
    (["tiny", "d_model=8", "d_head=4", "n_heads=2"], ["d_model=8", "multiple of 12"]),
    (["mu_rise=0"], ["mu_rise=0", "at least 1"]),
    (["load=x.pt"], ["load=FILE", "sample=TEXT"]),
    (["dtype=fp16"], ["dtype=fp16", "fp32 or bf16"]),
    (["tiny", "d_model=64", "d_head=16", "n_heads=4"], ["d_model=64", "multiple of 12"]),
    (["p_late=60000"], ["p_late=60000", "50304"]),
    (["runs=0"], ["runs=0", "at least 1"]),
    (["ngram_rows=1000"], ["ngram_rows=1000", "multiple of 16", "ngram_rows=1008"]),
    (["ngram_rows=-16"], ["ngram_rows=-16", "at least 0"]),
    (["scale_wide=0.32"], ["scale_wide=0.32", "scores up to 82, want at most 80", "at most 0.625 and 0.3125"]),
    (["scale_narrow=0.63"], ["scale_narrow=0.63", "scores up to 81, want at most 80", "at most 0.625 and 0.3125"]),
    (["pointer_block=-1"], ["pointer_block=-1", "at least 0"]),
    (["val_pointer_block=0"], ["val_pointer_block=0", "at least 1"]),
    (["runs=2", "save=x.pt"], ["save=x.pt", "runs=2", "runs=1"]),
    (["t_factor=0.0001"], ["t_factor=0.0001", "T=16384", "0.5"]),
    (["tiny", "t_factor=0.3"], ["t_factor=0.3", "T=256"]),
    (["t_factor=-1"], ["t_factor=-1.0"]),
    (["n_sched=1060"], ["1132 steps", "2 mod 4", "1058 or 1062"]),
])
def test_what_cannot_work_is_refused_with_the_value_and_what_to_do(tg, words, parts):
    message = refusal(tg, *words)
    assert all(part in message for part in parts), message


def test_a_config_cannot_be_changed(tg):
    with pytest.raises(FrozenInstanceError):
        tg.RECORD.seed = 2


def test_every_setting_has_a_value_that_the_command_line_can_give_back(tg):
    for field in fields(tg.Config):
        value = getattr(tg.RECORD, field.name)
        if field.name not in ("preset", "stages", "load", "sample"):
            assert getattr(tg.parse([f"{field.name}={value}"]), field.name) == value


def test_t_factor_scales_every_stage_and_nothing_else(tg):
    cfg, whole = tg.parse(["solo", "t_factor=0.25"]), tg.PRESETS["solo"]
    assert [stage.T for stage in cfg.stages] == [4096, 8192, 12_288, 10_240, 4096]
    assert [replace(a, T=b.T) for a, b in zip(cfg.stages, whole.stages)] == list(whole.stages)
    assert replace(cfg, stages=whole.stages, t_factor=1.0) == whole


def test_table_pointer_and_folding_can_be_switched_off(tg):
    cfg = tg.parse(["solo", "ngram_rows=0", "pointer_block=0", "fold_case=false"])
    assert (cfg.ngram_rows, cfg.pointer_block, cfg.fold_case) == (0, 0, False)
    assert [tg.PRESETS[name].ngram_rows for name in ("record", "solo", "tiny")] == [84_602_880, 10_575_360, 65_536]
    assert [(tg.PRESETS[name].pointer_block, tg.PRESETS[name].val_pointer_block) for name in ("record", "tiny")] == \
        [(2048, 8192), (128, 512)]
