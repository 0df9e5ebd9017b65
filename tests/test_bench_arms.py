"""tests/bench_arms.py, as far as a CPU can tell: changes end with their arm, and the table says what it should."""

import bench_arms
import pytest


@pytest.mark.parametrize("name", bench_arms.CHANGES)
def test_a_change_is_made_and_ends_with_its_arm_even_if_that_fails(tg, name):
    where, what, _ = bench_arms.CHANGES[name]()
    before = getattr(where, what)
    with pytest.raises(tg.RunFailed), bench_arms.changed([name]):
        assert getattr(where, what) is not before
        raise tg.RunFailed("an arm")
    assert getattr(where, what) is before


def test_without_networks_only_their_weights_rest(tg):
    rates = {name: lr for names, _, lr, *_ in bench_arms.without_networks() for name in names.split()}
    published = {name: lr for names, _, lr, *_ in tg.PARAMS for name in names.split()}
    still = {name for name in rates if rates[name] != published[name]}
    assert still == {"gate_w1", "gate_pre_w2", "gate_post_w2", "coef_w1", "coef_remix_w2", "coef_final_w2", "coef_group_w2"}
    assert all(rates[name] == 0 for name in still)


def test_pairs_are_compared_seed_by_seed():
    """Differences 0.1, 0.2 and 0.3 in spite of seeds that differ by more: 0.2 and twice 0.1 / sqrt(3)."""
    rows = [{"arm": arm, "seed": seed, "loss": 4 + seed + more, "raw": 4.5 + seed + more, "train_s": 10.0}
            for arm, mores in (("base", (0, 0, 0)), ("less", (0.1, 0.2, 0.3))) for seed, more in enumerate(mores)]
    _, base, less = bench_arms.table(rows + [rows[3] | {"arm": "alone", "seed": 9}], "base")[:3]
    assert "+0.00000 +- 0.00000" in base and "+0.20000 +- 0.11547" in less and "+0.50000 +- 0.00000" in less
    assert "n/a" in bench_arms.table(rows + [rows[3] | {"arm": "alone", "seed": 9}], "base")[3]
