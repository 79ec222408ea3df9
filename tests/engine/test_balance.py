"""Who gets which key-groups: even, and as few as possible move."""

import random
from itertools import product

import pytest

from statekit.engine.balance import TOLERANCE, rebalance, weigh


@pytest.mark.parametrize("seed", range(50))
def test_key_groups_are_even_and_as_few_as_possible_move(seed: int) -> None:
    rng = random.Random(seed)
    groups = rng.choice((1, 8, 128))
    before = [f"t{rng.randrange(rng.randint(1, 5))}" for _ in range(groups)]
    tasks = [f"t{i}" for i in range(rng.randint(1, min(6, groups)))]
    after = rebalance(before, tasks)
    held = [after.count(name) for name in tasks]
    assert sum(held) == groups
    assert max(held) - min(held) <= 1
    # Whatever the shares are, a task can keep no more than the larger share, and than it had.
    most, more = -(-groups // len(tasks)), groups % len(tasks) or len(tasks)
    kept = sorted((min(before.count(name), most) for name in tasks), reverse=True)
    at_best = sum(min(n, most if at < more else most - 1) for at, n in enumerate(kept))
    assert sum(old == now for old, now in zip(before, after, strict=True)) == at_best


def loads(owners: list[str], tasks: list[str], weights: list[float]) -> list[float]:
    return [sum(w for o, w in zip(owners, weights, strict=True) if o == name) for name in tasks]


@pytest.mark.parametrize("seed", range(50))
def test_weights_are_even_enough(seed: int) -> None:
    rng = random.Random(seed)
    weights = [rng.random() ** rng.choice((1, 4)) for _ in range(rng.choice((16, 128)))]
    before = [f"t{rng.randrange(3)}" for _ in weights]
    tasks = [f"t{i}" for i in range(rng.randint(1, 6))]
    found = loads(rebalance(before, tasks, weights), tasks, weights)
    assert sum(found) == pytest.approx(sum(weights))
    # No single key-group that could go from who has most to who has least would help.
    share = sum(weights) / len(tasks)
    assert max(found) - min(found) <= max(TOLERANCE * share, max(weights)) + 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_what_has_most_to_do_has_little_more_than_it_must(seed: int) -> None:
    """The oracle: all ways of dealing seven key-groups out to three tasks."""
    rng = random.Random(seed)
    weights = [float(rng.randint(1, 9)) for _ in range(7)]
    tasks = ["a", "b", "c"]
    best = min(max(loads([*way], tasks, weights)) for way in product(tasks, repeat=len(weights)))
    found = max(loads(rebalance(["a"] * 7, tasks, weights), tasks, weights))
    assert found <= best * 4 / 3 + 1e-9  # what dealing the largest first promises


def test_who_is_balanced_keeps_everything() -> None:
    before = ["a", "b"] * 64
    weights = [1 + 0.001 * (group % 7) for group in range(128)]
    assert rebalance(before, ["a", "b"], weights) == before
    assert rebalance(before, ["a", "b"]) == before


def test_who_leaves_has_nothing_and_the_others_keep_theirs() -> None:
    before = [*"abc"] * 5
    after = rebalance(before, ["a", "c"])
    assert [now for old, now in zip(before, after, strict=True) if old != "b"] == [*"ac"] * 5
    assert "b" not in after


def test_a_key_group_weighs_its_records_and_its_bytes() -> None:
    records, sizes = [10, 0, 0, 0], [0, 0, 1, 1]
    a, b, c, d = weigh(records, sizes)
    assert a > c == d > b > 0
    assert weigh([0, 0], [0, 0]) == [pytest.approx(0.05)] * 2
