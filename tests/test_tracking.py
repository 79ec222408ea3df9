"""Several who need changes of one store: each gets deltas from where it was, or all entries."""

from statekit.native import Block, Store
from statekit.residence.tracking import Tracking


def blocks(store: Store, since: int) -> list[Block]:
    return list(Block.each(store.encode_leaf(0, None, since)))


def one_leaf() -> Store:
    store = Store(1, 1)
    store.state("v", "i64").put_many([f"k{i}" for i in range(100)], range(100))
    return store


def test_deletions_are_remembered_back_to_the_oldest_that_anybody_needs() -> None:
    store = one_leaf()
    tracking = Tracking(store)
    first = store.advance_epoch()
    tracking.hold("shadow", first)
    store.state("v", "i64").delete("k1")
    second = store.advance_epoch()
    tracking.hold("checkpoints", second)
    store.state("v", "i64").delete("k2")
    for since, deleted in ((first, 2), (second, 1)):
        (block,) = blocks(store, since)
        assert block.is_delta
        assert sum(block.marks or ()) == deleted


def test_who_falls_behind_the_oldest_gets_all_entries_and_nothing_wrong() -> None:
    store = one_leaf()
    tracking = Tracking(store)
    first = store.advance_epoch()
    tracking.hold("shadow", first)
    store.state("v", "i64").delete("k1")
    tracking.release("shadow")
    tracking.hold("checkpoints", store.advance_epoch())
    for i in range(2, 60):  # the table is made anew, and forgets what nobody needs
        store.state("v", "i64").delete(f"k{i}")
    (block,) = blocks(store, first)
    assert not block.is_delta
    assert block.entries == store.stats().entries


def test_when_nobody_needs_them_deletions_are_not_remembered() -> None:
    store = one_leaf()
    tracking = Tracking(store)
    tracking.hold("shadow", store.advance_epoch())
    store.state("v", "i64").delete("k1")
    assert store.stats().tombstones == 1
    tracking.release("shadow")
    tracking.release("shadow")
    store.state("v", "i64").delete("k2")
    assert store.stats().tombstones <= 1
    assert "nobody" in repr(tracking)
    epoch = store.advance_epoch()
    tracking.hold("again", epoch)
    store.state("v", "i64").delete("k3")
    (block,) = blocks(store, epoch)
    assert sum(block.marks or ()) == 1


def test_an_older_need_does_not_make_others_forget() -> None:
    store = one_leaf()
    tracking = Tracking(store)
    first = store.advance_epoch()
    second = store.advance_epoch()
    tracking.hold("a", second)
    tracking.hold("b", first)  # older than what is remembered: all entries for it
    store.state("v", "i64").delete("k1")
    tracking.hold("b", store.advance_epoch())
    (block,) = blocks(store, second)
    assert sum(block.marks or ()) == 1
