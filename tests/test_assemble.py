"""A leaf as one whole: what is here over its base. The oracle is a dict to which all changes are
applied in the order in which they happened.
"""

import random

import pytest

from statekit.homes.rows import block_rows
from statekit.native import Block, Store
from statekit.residence.assemble import Assembly, rows_over
from statekit.schema import StateSchema

SEEDS = range(20)
KEYS = [f"k{at}" for at in range(200)]  # many: with few keys a delta would be a full block
SCHEMAS = [StateSchema("n", "value", "s", "int"), StateSchema("t", "value", "s", "bytes")]


def store_of_one() -> Store:
    store = Store(1, 1)
    store.state("n", "i64")
    store.state("t", "bytes")
    return store


class Life:
    """Changes in rounds, and the blocks of each round. The last round is what is here."""

    def __init__(self, seed: int, rounds: int) -> None:
        rng = random.Random(seed)
        self.model: dict[tuple[str, str], object] = {}
        self.steps: list[bytes] = []  # oldest first
        self.rows: list[tuple[int, bytes, bytes]] = []  # what a home has before the last round
        store = store_of_one()
        n, t = store.state("n", "i64"), store.state("t", "bytes")
        epoch = 0
        for at in range(rounds):
            if at == rounds - 1:
                self.rows = [(number, key, row) for number, key, row in rows_of(store)]
            for key in KEYS if at == 0 else rng.sample(KEYS, 40):
                name = rng.choice("nt")
                if rng.random() < 0.4:
                    (n if name == "n" else t).delete(key)
                    self.model.pop((name, key), None)
                elif name == "n":
                    n.put(key, at)
                    self.model[name, key] = at
                else:
                    t.put(key, b"%d" % at)
                    self.model[name, key] = b"%d" % at
            self.steps.append(store.encode_leaf(0, since=epoch))
            epoch = store.advance_epoch()
            store.track(epoch)


def rows_of(store: Store) -> list[tuple[int, bytes, bytes]]:
    return [
        ("nt".index(block.name), key, row)
        for block in Block.each(store.encode_leaf(0))
        for key, row in zip(block.key_list(), block_rows(block), strict=True)
        if row is not None
    ]


def image(blocks: bytes) -> dict[tuple[str, str], object]:
    assert not any(block.is_delta for block in Block.each(blocks))
    return {
        (block.name, key.decode()): value for block in Block.each(blocks) for key, value in block
    }


def assembly() -> Assembly:
    return Assembly.beside(store_of_one(), SCHEMAS, None)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_here_wins_over_a_chain_and_each_step_over_the_older_ones(seed: int) -> None:
    life = Life(seed, rounds=4)
    *below, here = life.steps
    one = assembly()
    assert image(one.over_steps(0, here, below[::-1])) == life.model
    assert image(one.over_steps(0, b"", life.steps[::-1])) == life.model  # and once more, there
    one.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_here_wins_over_the_rows_of_a_home(seed: int) -> None:
    life = Life(seed, rounds=3)
    one = assembly()
    blocks = one.over_rows(0, life.steps[-1], life.rows)
    assert image(blocks) == life.model
    only = one.over_rows(0, life.steps[-1], life.rows, "t")
    assert image(only) == {key: value for key, value in life.model.items() if key[0] == "t"}


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_that_stay_rows_follow_the_same_rule(seed: int) -> None:
    life = Life(seed, rounds=3)
    here = {
        ("nt".index(block.name), key): row
        for block in Block.each(life.steps[-1])
        for key, row in zip(block.key_list(), block_rows(block), strict=True)
    }
    merged = {place: row for place, row in rows_over(here, life.rows).items() if row is not None}
    whole = Store(1, 1)
    whole.decode_leaf(0, assembly().over_rows(0, life.steps[-1], life.rows))
    assert merged == {(number, key): row for number, key, row in rows_of(whole)}


def test_an_older_step_may_be_of_another_type() -> None:
    old = Store(1, 1)
    old.state("x", "i64").put_many(["a", "b"], [1, 2])
    new = Store(1, 1)
    new.mark(0, 1, "absent")
    floats = new.state("x", "f64")
    floats.install("a", bytes(8))
    one = Assembly.beside(new, [], None)
    found = image(one.over_steps(0, new.encode_leaf(0), [old.encode_leaf(0)]))
    assert found == {("x", "a"): 0.0, ("x", "b"): 2.0}


def test_a_state_that_is_stored_and_not_declared_is_assembled_too() -> None:
    life = Life(1, rounds=2)
    empty = Store(1, 1)
    found = image(Assembly.beside(empty, SCHEMAS, None).over_rows(0, b"", life.rows))
    assert found.keys() == {("nt"[number], key.decode()) for number, key, _ in life.rows}


def test_an_assembly_holds_nothing_between_two_leaves() -> None:
    one = assembly()
    life = Life(2, rounds=2)
    one.over_steps(0, b"", life.steps[::-1])
    assert one._scratch.stats().entries == 0
    with pytest.raises(IndexError):
        one.over_rows(0, b"", [(7, b"k", b"v")])
    assert one._scratch.residency(0) == "away"
