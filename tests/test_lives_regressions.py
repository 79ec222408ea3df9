"""What random lives (tests/lives) have found, each as a small test."""

from pathlib import Path

from servers import HOST, redis_server

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


def test_rows_that_came_back_by_another_process_of_the_home_are_not_deleted(
    tmp_path: Path,
) -> None:
    """Key-groups went from one provider of a Redis home to memory, and from there to another.

    The first one still meant to delete what it had of them.
    """
    with redis_server(tmp_path) as server:
        url = f"redis://{HOST}:{server.port}/0?prefix=home"
        first = sk.open(url, owned=range(4), **GEOMETRY)
        second = sk.open(url, owned=range(4, 8), **GEOMETRY)
        away = sk.open("memory:", owned=(), **GEOMETRY)
        expected = {}
        for number in range(200):
            key = f"k{number}"
            kv = first if first.owner_of(key) is first else second
            kv.value("counts", int)[key] = number
            if kv is second:
                expected[key] = number
        first.commit()
        second.commit()
        away.fetch_from(second.serve().address).wait(60)
        address = away.serve().address
        first.fetch_from(address, key_groups=range(4, 6)).wait(60)
        second.fetch_from(address, key_groups=range(6, 8)).wait(60)
        second.close()
        first.commit()
        first.close()
        with sk.open(url, owned=range(4, 8), **GEOMETRY) as again:
            assert dict(again.value("counts", int).items()) == expected
        away.close()


def test_sibling_that_fetches_from_the_same_process_leaves_a_hand_over_alone(
    tmp_path: Path,
) -> None:
    """Key-groups were coming back to one sibling when another one asked the same process for some.

    It took its sibling's hand-over for one of an earlier life, and the home's record forgot it: the
    key-groups were another's for good once the home was opened again.
    """
    url = f"rocksdb:{tmp_path}/home"
    home = sk.open(url, **GEOMETRY)
    home.value("counts", int).update((f"k{number}", number) for number in range(100))
    first, second = home.split([range(4), range(4, 8)])
    away = sk.open("memory:", owned=(), **GEOMETRY)
    away.fetch_from(second.serve().address).wait(60)
    address = away.serve().address
    coming = second.fetch_from(address, key_groups=range(4, 6), strategy="on_demand")
    first.fetch_from(address, key_groups=range(6, 7)).wait(60)  # now it knows what is recorded
    first.fetch_from(address, key_groups=range(7, 8)).wait(60)
    coming.wait(60)
    for kv in (second, first, home, away):
        kv.close()
    with sk.open(url, owned=range(8)) as back:
        assert dict(back.value("counts", int).items()) == {f"k{n}": n for n in range(100)}
