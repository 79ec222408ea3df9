"""What random lives (tests/lives) have found, each as a small test."""

from pathlib import Path

import statekit as sk

GEOMETRY = {"key_groups": 8, "subgroups": 1}


def test_who_has_handed_over_its_timers_has_no_next_one() -> None:
    old, new = sk.open("memory:", **GEOMETRY), sk.open("memory:", owned=(), **GEOMETRY)
    timers = old.timers("timers")
    timers.set("alice", 300)
    new.fetch_from(old.serve().address, strategy="on_demand")  # it is still kept here, and shut
    assert timers.next_due is None
    assert new.timers("timers").next_due == 300
    timers_left = sk.open("memory:").timers("timers")
    timers_left.set("bob", 2**63 - 1)
    assert timers_left.next_due == 2**63 - 1
    new.close()
    old.close()


def test_late_part_has_nothing_of_what_is_on_its_way_elsewhere(tmp_path: Path) -> None:
    first = sk.open("memory:", owned=range(4, 8), **GEOMETRY)
    second = sk.open("memory:", owned=range(4), **GEOMETRY)
    third = sk.open("memory:", owned=(), **GEOMETRY)
    expected = {}
    for kv in (first, second):
        state = kv.value("counts", int)
        for number in range(100):
            if kv.owner_of(key := f"k{number}") is kv:
                state[key] = number
                if kv is second:
                    expected[key] = number
    third.fetch_from(first.serve().address, key_groups=range(4, 8), strategy="on_demand")
    first.checkpoint(tmp_path, barrier=1)  # the barrier has passed one ...
    arrival = first.fetch_from(second.serve().address)  # ... who takes over from another
    assert arrival.late_checkpoint is not None
    late = arrival.late_checkpoint.wait(60)
    assert [*late.key_groups] == [range(4)]
    back = sk.restore(late)
    assert dict(back.value("counts", int).items()) == expected
    for kv in (back, third, first, second):
        kv.close()


def test_rollback_leaves_timers_alone_that_are_being_handed_over(tmp_path: Path) -> None:
    """They had moved in from a checkpoint, and were still to be brought into memory."""
    names = [f"k{number}" for number in range(100)]
    with sk.open("memory:", **GEOMETRY) as first:
        for at, name in enumerate(names):
            first.timers("timers").set(name, at)
        first.checkpoint(tmp_path / "place")
    old = sk.restore(tmp_path / "place", home=f"rocksdb:{tmp_path}/home", lazy=True)
    old.commit()
    new = sk.open("memory:", owned=(), **GEOMETRY)
    new.fetch_from(old.serve().address, key_groups=range(4), strategy="on_demand")
    theirs = {name for name in names if new.owner_of(name) is new}
    assert 0 < len(theirs) < len(names)
    old.rollback()
    assert {one.key for one in old.timers("timers").pop_due(1000)} == {*names} - theirs
    assert {one.key for one in new.timers("timers").pop_due(1000)} == theirs
    new.close()
    old.close()
