"""What the home does not have (csrc/filter.c): a key that is at home is never taken for missing.

The home is a dict here, and the test does what a residence does: takes rows, evicts, tells keys.
"""

import random
import struct

import pytest

import statekit as sk
from statekit import Store
from statekit.errors import ArgumentError, UnknownEntryError

LEAVES, ALL = 8, 1 << 62
NUMBERS = {"v": 0}


class Life:
    """A store and its home, and what they hold together."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = Store(key_groups=4, subgroups=2)
        self.store.write_back()
        self.state = self.store.state("v", "i64", int)
        self.home: dict[int, dict[bytes, int]] = {leaf: {} for leaf in range(LEAVES)}
        self.model: dict[int, int] = {}
        self.asked = self.answered = 0

    def find(self, key: int) -> int | None:
        """As a residence does: ask the home if the store does not know."""
        try:
            self.answered += 1
            return self.state.get(key)
        except UnknownEntryError:
            self.asked += 1
            encoded = self.state.codec.encode(key)
            value = self.home[self.state.leaf_of_encoded(encoded)].get(encoded)
            packed = None if value is None else struct.pack("<q", value)
            self.state.install_encoded(encoded, packed, None)
            return self.state.get(key)

    def write_home(self) -> None:
        rows, leaf, _, _ = self.store.rows_take(0, NUMBERS, self.rng.choice((5, ALL)), ALL)
        pairs = iter(rows)
        for name, row in zip(pairs, pairs, strict=True):
            assert name is not None
            at_home = self.home[int.from_bytes(name[:4])]
            if row is None:
                at_home.pop(name[6:], None)
            else:
                at_home[name[6:]] = int.from_bytes(row[1:], signed=True)
        self.store.rows_done(0, leaf, written=True)

    def step(self) -> None:
        key = self.rng.randrange(600)
        match self.rng.randrange(9):
            case 0 | 1:
                self.state.put(key, key * 7)
                self.model[key] = key * 7
            case 2:
                self.state.delete(key, blind=True)
                self.model.pop(key, None)
            case 3:
                self.write_home()
            case 4:
                self.store.evict(self.rng.choice((1, 2000, ALL)))
            case 5:
                leaf = self.rng.randrange(LEAVES)
                self.store.home_keys(self.state, leaf, [*self.home[leaf]])
            case 6 if self.rng.random() < 0.1:
                self.write_home_all()
                leaf = self.rng.randrange(LEAVES)
                self.store.mark(leaf, leaf + 1, "absent")
            case 7 if self.rng.random() < 0.1:
                leaf = self.rng.randrange(LEAVES)
                self.store.attach(self.store.detach(leaf, leaf + 1))
            case _:
                assert self.find(key) == self.model.get(key)

    def write_home_all(self) -> None:
        while self.store.stats().dirty:
            self.write_home()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_at_home_is_never_missing(seed: int) -> None:
    life = Life(seed)
    for _ in range(3000):
        life.step()
    for key in range(600):
        assert life.find(key) == life.model.get(key), f"seed {seed}"


def test_new_keys_are_not_asked_for_once_the_keys_are_told() -> None:
    life = Life(1)
    for key in range(200):
        life.state.put(key, key)
    life.write_home_all()
    life.store.evict(ALL)
    for leaf in range(LEAVES):
        life.store.home_keys(life.state, leaf, [*life.home[leaf]])
    for key in range(1000, 3000):
        assert life.find(key) is None
    assert life.asked < 100  # the filter lets only some of the 2,000 missing keys pass
    assert all(life.find(key) == key for key in range(200))


def test_a_filter_that_is_full_is_given_up() -> None:
    life = Life(2)
    life.store.home_keys(life.state, 0, [])
    for key in range(5000):
        life.state.put(key, key)
        if key % 50 == 0:
            life.write_home_all()
            life.store.evict(ALL)
    assert all(life.find(key) == key for key in range(5000))
    assert life.find(9999) is None


def test_memory_of_filters_is_counted_and_given_back() -> None:
    life = Life(3)
    before = life.store.bytes_used
    for leaf in range(LEAVES):
        life.store.home_keys(life.state, leaf, [])
    assert life.store.bytes_used > before
    life.store.mark(0, LEAVES, "absent")
    assert life.store.bytes_used == before


def test_bad_keys_and_leaves_are_refused() -> None:
    life = Life(4)
    with pytest.raises(ArgumentError):
        life.store.home_keys(life.state, LEAVES, [])
    with pytest.raises(sk.StateKitError):
        life.store.home_keys(life.state, 0, [b"not eight bytes"])
