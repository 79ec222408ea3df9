"""Coordinator by itself: nothing is sent before it is stored; each message once, twice or late."""

from typing import Any

import pytest

from statekit.errors import ArgumentError
from statekit.protocol.coordinator import Coordinator
from statekit.protocol.messages import (
    OUTSIDE,
    Completed,
    Fenced,
    Hello,
    PartFailed,
    PartWritten,
    Persist,
    Record,
    Recover,
    Recovered,
    Send,
    Settled,
    Table,
    Take,
)

OWNERS = ("w.1", "w.1", "x.1", "x.1")


def sent(orders: list[Any], kind: type) -> dict[str, Any]:
    return {
        order.to: order.message
        for order in orders
        if isinstance(order, Send) and isinstance(order.message, kind)
    }


def store(coordinator: Coordinator, orders: list[Any]) -> list[Any]:
    """Lets every write succeed. Returns what is ordered in the end."""
    done: list[Any] = []
    while orders:
        order = orders.pop(0)
        if isinstance(order, Persist):
            orders += coordinator.persisted(order.record.revision)
        else:
            done.append(order)
    return done


def leading(stored: Record | None = None, name: str = "c") -> Coordinator:
    coordinator = Coordinator(name, 4)
    store(coordinator, coordinator.take_over(stored))
    return coordinator


def running() -> Coordinator:
    """w and x have two leaves each, and have recovered and settled."""
    coordinator = leading()
    for worker in ("w", "x"):
        coordinator.on(f"{worker}.1", Hello(worker, 1, OUTSIDE))
    store(coordinator, coordinator.rescale(["w", "w", "x", "x"]))
    for name in ("w.1", "x.1"):
        coordinator.on(name, Recovered(name, 1))
        coordinator.on(name, Settled(name, 1, 1))
    return coordinator


def taking(coordinator: Coordinator) -> int:
    orders = store(coordinator, coordinator.checkpoint())
    (number,) = {take.number for take in sent(orders, Take).values()}
    return int(number)


# ---- The record


def test_nothing_is_done_before_the_first_write_is_stored() -> None:
    coordinator = Coordinator("c", 4)
    (persist,) = coordinator.take_over(None)
    assert isinstance(persist, Persist)
    assert persist.expected == 0
    assert (persist.record.term, persist.record.coordinator) == (1, "c")
    assert coordinator.on("w.1", Hello("w", 1, OUTSIDE)) == []
    for call in (coordinator.checkpoint, lambda: coordinator.suspect("w")):
        with pytest.raises(ArgumentError, match="has not taken over yet"):
            call()
    assert coordinator.persisted(7) == []
    assert not coordinator.is_leading
    assert coordinator.persisted(1) == []
    assert coordinator.is_leading


def test_a_table_is_sent_when_it_is_stored() -> None:
    coordinator = running()
    (persist,) = coordinator.rescale(["w", "x", "x", "x"])
    assert isinstance(persist, Persist)
    assert sent(coordinator.resend(), Table) == {}
    orders = coordinator.persisted(persist.record.revision)
    table = Table(1, 2, ("w.1", "x.1", "x.1", "x.1"))
    assert sent(orders, Table) == {"w.1": table, "x.1": table}
    assert coordinator.persisted(persist.record.revision) == []


def test_one_write_is_under_way_at_a_time_and_expects_the_one_before() -> None:
    coordinator = running()
    (first,) = coordinator.rescale(["w", "x", "x", "x"])
    assert coordinator.rescale(["x", "x", "x", "x"]) == []
    assert coordinator.checkpoint() == []
    assert isinstance(first, Persist)
    assert [o for o in coordinator.resend() if isinstance(o, Persist)] == [first]
    (second,) = [
        order
        for order in coordinator.persisted(first.record.revision)
        if isinstance(order, Persist)
    ]
    assert second.expected == first.record.revision
    assert (second.record.version, second.record.next_number) == (3, 2)


def test_one_that_cannot_store_is_deposed() -> None:
    coordinator = running()
    coordinator.rescale(["x", "x", "x", "x"])
    assert coordinator.conflicted() == []
    assert coordinator.is_deposed
    assert coordinator.resend() == []
    assert coordinator.persisted(3) == []
    assert coordinator.on("w.1", Hello("w", 2, OUTSIDE)) == []
    with pytest.raises(ArgumentError, match=r"was deposed\. Ask the one that leads"):
        coordinator.rescale(["w"] * 4)


def test_a_later_generation_that_we_did_not_store_deposes() -> None:
    coordinator = running()
    assert coordinator.on("w.1", Fenced(1)) == []
    assert not coordinator.is_deposed
    coordinator.on("w.1", Fenced(2))
    assert coordinator.is_deposed
    other = running()
    other.on("w.1", Hello("w", 1, 2))
    assert other.is_deposed


def test_a_successor_goes_on_from_the_stored_record() -> None:
    old = running()
    stored = old.record._replace(complete=3, next_number=5)
    new = Coordinator("d", 4)
    (persist,) = new.take_over(stored)
    assert isinstance(persist, Persist)
    assert persist.expected == stored.revision
    assert (persist.record.term, persist.record.coordinator) == (stored.term + 1, "d")
    orders = new.persisted(persist.record.revision)
    assert Completed(3) in orders  # perhaps nobody was told
    assert sent(orders, Recover) == dict.fromkeys(("w.1", "x.1"), Recover(1, 1, OWNERS, 0))
    for name in ("w.1", "x.1"):
        new.on(name, Recovered(name, 1))
    assert taking(new) == 5


# ---- Tables


def test_the_first_table_begins_the_first_generation_from_nothing() -> None:
    coordinator = leading()
    coordinator.on("w.1", Hello("w", 1, OUTSIDE))
    orders = store(coordinator, coordinator.rescale(["w"] * 4))
    assert orders == [Send("w.1", Recover(1, 1, ("w.1",) * 4, 0))]
    assert coordinator.on("w.1", Recovered("w.1", 1)) == [
        Send("w.1", Table(1, 1, ("w.1",) * 4)),
    ]
    assert coordinator.on("w.1", Recovered("w.1", 1)) == []
    assert coordinator.on("w.1", Recovered("w.1", 0)) == []
    assert coordinator.on("z.1", Recovered("z.1", 1)) == []
    assert not coordinator.is_settled
    coordinator.on("w.1", Settled("w.1", 0, 1))
    assert not coordinator.is_settled
    coordinator.on("w.1", Settled("w.1", 1, 1))
    assert coordinator.is_settled
    assert coordinator.resend() == []


def test_leaves_are_given_to_workers_that_live_only() -> None:
    coordinator = running()
    with pytest.raises(ArgumentError, match=r"3 owners for 4 leaves"):
        coordinator.rescale(["w"] * 3)
    with pytest.raises(ArgumentError, match=r"'z' cannot be given leaves.*These can: w, x"):
        coordinator.rescale(["w", "w", "w", "z"])
    assert coordinator.rescale(["w", "w", "x", "x"]) == []  # as it is


def test_a_latecomer_is_told_how_the_generation_began_and_gets_its_leaves_by_migration() -> None:
    coordinator = running()
    coordinator.on("y.1", Hello("y", 1, OUTSIDE))
    orders = store(coordinator, coordinator.rescale(["y", "w", "x", "x"]))
    assert sent(orders, Recover) == {"y.1": Recover(1, 1, OWNERS, 0)}
    orders = coordinator.on("y.1", Recovered("y.1", 1))
    assert sent(orders, Table)["y.1"].owners == ("y.1", "w.1", "x.1", "x.1")


# ---- Workers that die


def test_a_dead_workers_leaves_are_restored_by_the_others() -> None:
    coordinator = running()
    orders = store(coordinator, coordinator.suspect("w"))
    assert orders == [Send("x.1", Recover(2, 1, ("x.1",) * 4, 0))]
    assert coordinator.suspect("w") == []
    assert coordinator.suspect("nobody") == []
    assert coordinator.workers() == ["x"]


def test_a_worker_that_lost_its_memory_restores_its_own() -> None:
    coordinator = running()
    orders = store(coordinator, coordinator.on("w.2", Hello("w", 2, OUTSIDE)))
    owners = ("w.2", "w.2", "x.1", "x.1")
    assert sent(orders, Recover) == dict.fromkeys(("x.1", "w.2"), Recover(2, 1, owners, 0))
    assert coordinator.on("w.1", Hello("w", 1, 1)) == []  # late, from its earlier life


def test_one_that_is_behind_is_told_and_one_that_is_not_let_in_is_fenced() -> None:
    coordinator = running()
    store(coordinator, coordinator.suspect("w"))
    assert coordinator.on("w.1", Hello("w", 1, 1)) == [Send("w.1", Fenced(2))]
    assert coordinator.on("w.1", Hello("w", 1, OUTSIDE)) == []
    assert coordinator.workers() == ["w", "x"]  # it lives after all
    assert sent(coordinator.on("x.1", Hello("x", 1, 1)), Recover).keys() == {"x.1"}


def test_when_all_are_dead_the_next_that_comes_restores_everything() -> None:
    coordinator = running()
    store(coordinator, coordinator.suspect("w"))
    assert coordinator.suspect("x") == []
    assert not coordinator.is_settled
    assert not coordinator.is_recovered
    assert coordinator.checkpoint() == []
    orders = store(coordinator, coordinator.on("y.1", Hello("y", 1, OUTSIDE)))
    assert orders == [Send("y.1", Recover(3, 1, ("y.1",) * 4, 0))]


def test_a_worker_that_has_nothing_may_go() -> None:
    coordinator = running()
    store(coordinator, coordinator.rescale(["x"] * 4))
    for name in ("w.1", "x.1"):
        coordinator.on(name, Settled(name, 1, 2))
    store(coordinator, coordinator.suspect("w"))
    assert coordinator.record.generation == 1
    assert coordinator.record.members == ("x.1",)


def test_a_worker_that_may_still_have_something_may_not() -> None:
    coordinator = running()
    store(coordinator, coordinator.rescale(["x"] * 4))
    coordinator.on("w.1", Settled("w.1", 1, 2))  # x has not said so
    store(coordinator, coordinator.suspect("w"))
    assert coordinator.record.generation == 2


# ---- Checkpoints


def test_a_checkpoint_is_complete_when_each_leaf_is_in_one_part() -> None:
    coordinator = running()
    number = taking(coordinator)
    assert coordinator.checkpoint() == []
    assert coordinator.on("w.1", PartWritten("w.1", 1, number, (0, 1, 2))) == []
    assert coordinator.on("w.1", PartWritten("w.1", 1, number, (0, 1))) == []
    orders = coordinator.on("x.1", PartWritten("x.1", 1, number, (3,)))
    assert [type(order) for order in orders] == [Persist]
    assert coordinator.on("x.1", PartWritten("x.1", 1, number, (3,))) == []
    assert store(coordinator, orders) == [Completed(number)]
    assert coordinator.taking == 0
    assert coordinator.on("x.1", PartWritten("x.1", 1, number, (3,))) == []
    assert taking(coordinator) == number + 1


@pytest.mark.parametrize(
    "message",
    [
        PartFailed("x.1", 1, 1),
        PartWritten("x.1", 1, 1, (0,)),  # which is in another part already
        PartWritten("x.1", 1, 1, (4,)),  # which does not exist
    ],
)
def test_a_checkpoint_that_went_wrong_is_given_up(message: Any) -> None:
    coordinator = running()
    assert taking(coordinator) == 1
    coordinator.on("w.1", PartWritten("w.1", 1, 1, (0, 1)))
    assert coordinator.on("x.1", message) == []
    assert coordinator.taking == 0
    assert coordinator.on("x.1", PartWritten("x.1", 1, 1, (2, 3))) == []
    assert taking(coordinator) == 2


def test_parts_of_other_checkpoints_and_generations_do_not_count() -> None:
    coordinator = running()
    assert taking(coordinator) == 1
    coordinator.on("w.1", PartWritten("w.1", 0, 1, (0, 1, 2, 3)))
    coordinator.on("w.1", PartWritten("w.1", 1, 9, (0, 1, 2, 3)))
    coordinator.on("w.1", PartFailed("w.1", 0, 1))
    assert coordinator.wanted.complete == 0
    assert coordinator.taking == 1


def test_once_a_generation_is_asked_for_parts_of_the_old_one_are_refused() -> None:
    coordinator = running()
    assert taking(coordinator) == 1
    coordinator.on("w.1", PartWritten("w.1", 1, 1, (0, 1)))
    orders = coordinator.suspect("w")
    assert coordinator.on("x.1", PartWritten("x.1", 1, 1, (2, 3))) == []
    store(coordinator, orders)
    assert (coordinator.record.complete, coordinator.record.restored) == (0, 0)


def test_a_generation_begins_from_a_checkpoint_that_is_just_being_recorded() -> None:
    coordinator = running()
    assert taking(coordinator) == 1
    writes = coordinator.on("w.1", PartWritten("w.1", 1, 1, (0, 1, 2, 3)))
    coordinator.cancel()
    assert coordinator.taking == 1  # too late
    assert coordinator.suspect("w") == []
    orders = store(coordinator, writes)
    assert Completed(1) in orders
    assert sent(orders, Recover)["x.1"].number == 1


def test_take_is_repeated_to_all_until_the_checkpoint_is_complete() -> None:
    coordinator = running()
    number = taking(coordinator)
    assert sent(coordinator.resend(), Take).keys() == {"w.1", "x.1"}
    coordinator.on("w.1", PartWritten("w.1", 1, number, (0, 1)))
    assert sent(coordinator.resend(), Take).keys() == {"w.1", "x.1"}
    store(coordinator, coordinator.on("x.1", PartWritten("x.1", 1, number, (2, 3))))
    assert sent(coordinator.resend(), Take) == {}


def test_there_is_nothing_to_take_before_there_is_a_table() -> None:
    assert leading().checkpoint() == []
