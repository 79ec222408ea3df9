"""Faults that a review of hand-overs has proved, each with the sequence that showed it.

There are two key-groups of one leaf each, so that leaves are large and races are easy to hit.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from remote_util import TOKEN, wait_until

import statekit as sk
from statekit.errors import (
    ArgumentError,
    ClosedError,
    FencedError,
    LeaseError,
    NotOwnedError,
    PeerLostError,
    StateKitError,
)
from statekit.migration import fetch as fetch_module
from statekit.migration.fetch import Fetching
from statekit.migration.new_owner import NewOwnerShell
from statekit.migration.report import Reports
from statekit.migration.stream import Streaming
from statekit.residence.residence import Residence

SECONDS_MAX = 120.0
KEYS = [f"k{i}" for i in range(3000)]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, url: str = "memory:", **options: Any) -> sk.KVProvider:
    return stack.enter_context(sk.open(url, key_groups=2, subgroups=1, **options))


def of_group(kv: sk.KVProvider, group: int) -> list[str]:
    return [key for key in KEYS if kv.key_group_of(key) == group]


def busy(kv: sk.KVProvider, is_busy: bool) -> None:
    """As if a stream were open: memory of what was handed over is freed later."""
    peer = kv._as_peer()
    with peer._idle:
        peer._streams += 1 if is_busy else -1
        peer._idle.notify_all()


def test_a_leaf_that_came_back_is_not_freed_when_it_goes_again(stack: ExitStack) -> None:
    a, b = opened(stack), opened(stack, owned=())
    numbers = a.value("n", int)
    numbers.put_many(KEYS, range(len(KEYS)))
    there, here = b.serve().address, a.serve().address
    busy(a, True)
    b.fetch_from(here).wait(SECONDS_MAX)
    a.fetch_from(there).wait(SECONDS_MAX)  # a still had the leaf's memory from the first time
    migration = b.fetch_from(here, strategy="on_demand")
    busy(a, False)
    janitor = a._as_peer()._janitor
    if janitor is not None:
        janitor.join(SECONDS_MAX)
    migration.wait(SECONDS_MAX)
    assert list(b.value("n", int).get_many(KEYS)) == list(range(len(KEYS)))


@pytest.mark.parametrize("with_home", [False, True])
def test_a_leaf_that_is_merged_back_is_not_freed_afterwards(
    stack: ExitStack, tmp_path: Path, with_home: bool
) -> None:
    """The old owner frees a leaf a little later than it hands it over: it may be back by then."""
    if with_home:
        pytest.importorskip("rocksdict")
    url = f"rocksdb:{tmp_path}/db?memory=4MiB" if with_home else "memory:"
    with ExitStack() as inner:
        a = opened(inner, url)
        b = opened(stack, owned=())
        numbers = a.value("n", int)
        numbers.put_many(KEYS, range(len(KEYS)))
        busy(a, True)
        b.fetch_from(a.serve().address).wait(SECONDS_MAX)
        a.merge(b)
        busy(a, False)
        janitor = a._as_peer()._janitor
        if janitor is not None:
            janitor.join(SECONDS_MAX)
        assert list(numbers.get_many(KEYS)) == list(range(len(KEYS)))
        a.flush()
        assert list(numbers.get_many(KEYS)) == list(range(len(KEYS)))
    if with_home:
        with sk.open(url) as again:
            assert list(again.value("n", int).get_many(KEYS)) == list(range(len(KEYS)))


def test_a_wrong_word_of_a_death_ends_hand_overs_both_ways(stack: ExitStack) -> None:
    """Leaves that were to come from the dead are not this provider's any more: nobody has them."""
    a, b = opened(stack, owned=[0]), opened(stack, owned=[1])
    a.value("n", int).put_many(of_group(a, 0), [1] * len(of_group(a, 0)))
    b.value("n", int).put_many(of_group(b, 1), [1] * len(of_group(b, 1)))
    here, there = a.serve().address, b.serve().address
    a.fetch_from(there, strategy="on_demand")
    b.fetch_from(here, key_groups=[0], strategy="on_demand")
    (departure,) = (one for one in a.migrations if isinstance(one, sk.Departure))
    departure.abort(target_is_dead=True)
    assert a.key_groups == (range(1),)
    assert set(a.value("n", int).get_many(of_group(a, 0))) == {1}
    with pytest.raises(NotOwnedError):
        a.value("n", int)[of_group(a, 1)[0]]
    assert a.migrations == ()


def test_what_is_away_is_never_read_out_as_empty(stack: ExitStack) -> None:
    kv = opened(stack, owned=[0])
    with pytest.raises(LeaseError, match="leaf 1"):
        kv._residence.encode_shut(1, None, 0, bytes(16), 0)


def test_an_earlier_arrival_does_not_fill_what_was_given_back_and_fetched_again(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = opened(stack), opened(stack, owned=())
    numbers = a.value("n", int)
    numbers.put_many(KEYS, [1] * len(KEYS))
    address = a.serve().address
    come, go = threading.Event(), threading.Event()
    fill = Streaming._fill

    def slowly(self: Streaming, batch: Any) -> None:
        if not go.is_set():
            come.set()
            go.wait(SECONDS_MAX)
        fill(self, batch)

    monkeypatch.setattr(Streaming, "_fill", slowly)
    migration = b.fetch_from(address)
    assert come.wait(SECONDS_MAX)
    back = migration.give_back()
    numbers.put_many(KEYS, [2] * len(KEYS))
    again = b.fetch_from(address, key_groups=back, strategy="on_demand")
    go.set()
    again.wait(SECONDS_MAX)
    assert set(b.value("n", int).get_many(KEYS)) == {2}


def test_single_entries_come_from_the_process_that_has_the_leaf(stack: ExitStack) -> None:
    """The first owner still has the memory of a leaf that has moved on and been changed."""
    a, b, c = opened(stack), opened(stack, owned=()), opened(stack, owned=())
    a.value("v", str).put_many(KEYS, ["old" + "x" * 200] * len(KEYS))
    busy(a, True)
    b.fetch_from(a.serve().address, key_groups=[1]).wait(SECONDS_MAX)
    ones = of_group(a, 1)
    b.value("v", str).put_many(ones, ["new" + "y" * 200] * len(ones))
    c.fetch_from(a._as_peer().address, key_groups=[0], strategy="on_demand")
    c.fetch_from(b.serve().address, key_groups=[1], strategy="on_demand")
    c.prefetch([of_group(a, 0)[0], *ones[:5]]).result(SECONDS_MAX)
    values = c.value("v", str)
    assert {values[key][:3] for key in ones[:5]} == {"new"}
    c.wait_loaded(SECONDS_MAX)
    assert {values[key][:3] for key in ones} == {"new"}
    busy(a, False)


def test_a_memory_limit_between_two_leaves_leaves_no_write_behind(stack: ExitStack) -> None:
    a = opened(stack)
    c = opened(stack, "memory:?memory=1MiB", owned=())
    values = a.value("v", bytes)
    values.put_many(KEYS, [b"x" * 300] * len(KEYS))
    first, second = of_group(a, 0)[0], of_group(a, 1)[0]
    values[second] = b"y" * 3_000_000
    migration = c.fetch_from(a.serve().address, strategy="on_demand")
    with pytest.raises(StateKitError):
        c.prefetch([first, second]).result(SECONDS_MAX)
    there = c.value("v", bytes)
    try:
        there[first] = b"written at c"
    except StateKitError:
        return  # the write was refused, which is right, too
    migration.give_back()
    owner = there if 0 in c.key_groups[0] else values
    assert owner[first] == b"written at c"


def test_a_target_that_was_wrongly_declared_dead_gives_way(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, c = opened(stack), opened(stack, owned=())
    numbers = a.value("n", int)
    numbers.put_many(KEYS, [1] * len(KEYS))
    report, is_cut = Reports.report, threading.Event()
    is_cut.set()

    def cut(self: Reports) -> None:
        if is_cut.is_set():
            raise PeerLostError("a partition", peer="", seconds=0.1)
        report(self)

    monkeypatch.setattr(Reports, "report", cut)
    migration = c.fetch_from(a.serve().address)
    there = c.value("n", int)
    there[KEYS[0]] = 2
    c.prefetch(KEYS).result(SECONDS_MAX)
    a.migrations[0].abort(target_is_dead=True)
    assert numbers[KEYS[0]] == 1  # as it was at the hand-over
    is_cut.clear()
    with migration.lock:
        assert migration.lock.wait_for(lambda: migration.reports.is_done, SECONDS_MAX)
    assert c.key_groups == ()
    with pytest.raises(NotOwnedError):
        there[KEYS[0]]
    assert a.key_groups == (range(2),)


def test_fencing_ends_arrivals(stack: ExitStack) -> None:
    a, b = opened(stack), opened(stack, owned=())
    a.value("n", int).put_many(KEYS, range(len(KEYS)))
    migration = b.fetch_from(a.serve().address, strategy="on_demand")
    b.fence(7)
    with pytest.raises(FencedError, match="later generation"):
        migration.wait(SECONDS_MAX)
    assert b.key_groups == ()
    wait_until(lambda: b.migrations == ())


def test_fencing_ends_an_arrival_that_has_nothing_to_report(stack: ExitStack) -> None:
    """Its thread waits for something to report, and must be woken."""
    a, b = opened(stack), opened(stack, owned=())
    a.value("n", int).put_many(KEYS, range(len(KEYS)))
    migration = b.fetch_from(a.serve().address, strategy="on_demand")
    assert b.value("n", int)[KEYS[0]] == 0
    wait_until(lambda: migration.reports.is_idle and not migration.state.installed)
    b.fence(7)
    wait_until(lambda: b.migrations == ())
    assert b.loading is None


def test_who_reports_to_one_of_a_later_generation_is_fenced(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = opened(stack), opened(stack, owned=())
    a.value("n", int).put_many(KEYS, range(len(KEYS)))
    report, may_report = Reports.report, threading.Event()

    def waiting(self: Reports) -> None:
        may_report.wait(SECONDS_MAX)
        report(self)

    monkeypatch.setattr(Reports, "report", waiting)
    migration = b.fetch_from(a.serve(token=TOKEN).address, token=TOKEN)
    wait_until(lambda: not migration.state.missing)
    a.fence(3)
    may_report.set()
    with pytest.raises(FencedError):
        migration.wait(SECONDS_MAX)
    assert b.key_groups == ()


def test_who_meets_a_later_generation_owns_nothing_any_more(stack: ExitStack) -> None:
    a, b = opened(stack, owned=[0]), opened(stack, owned=[1])
    address = a.serve(generation=1, token=TOKEN).address
    with pytest.raises(FencedError):
        b.fetch_from(address, token=TOKEN)
    assert b.key_groups == ()
    assert a.key_groups == (range(1),)


def test_what_nobody_fetched_is_at_home_when_its_provider_closes(
    stack: ExitStack, tmp_path: Path
) -> None:
    pytest.importorskip("rocksdict")
    url = f"rocksdb:{tmp_path}/db?memory=4MiB"
    c = opened(stack, owned=())
    with sk.open(url, key_groups=2, subgroups=1) as a:
        numbers = a.value("n", int)
        numbers["k"] = 1
        a.flush()
        numbers["k"] = 2
        c.fetch_from(a.serve().address, strategy="on_demand")
        a.flush()
    with sk.open(url) as again:
        assert again.value("n", int)["k"] == 2


def test_entries_of_a_leaf_that_is_partly_at_home_come_with_the_leaf(
    stack: ExitStack, tmp_path: Path
) -> None:
    pytest.importorskip("rocksdict")
    a = opened(stack, f"rocksdb:{tmp_path}/db?memory=2MiB")
    values = a.value("v", bytes)
    for key in KEYS:
        values[key] = key.encode() * 100
    c = opened(stack, owned=())
    c.fetch_from(a.serve().address, strategy="on_demand")
    there = c.value("v", bytes)
    assert [there[key] for key in KEYS[:20]] == [key.encode() * 100 for key in KEYS[:20]]


def test_a_state_that_only_the_new_owner_has_can_be_used_at_once(stack: ExitStack) -> None:
    a, c = opened(stack), opened(stack, owned=())
    a.value("v", bytes).put_many(KEYS, [b"x" * 500] * len(KEYS))
    c.fetch_from(a.serve().address, strategy="on_demand")
    extra = c.value("extra", int, default=0)
    c.prefetch(KEYS[:3]).result(SECONDS_MAX)
    assert extra[KEYS[0]] == 0
    extra[KEYS[0]] = 5
    assert extra[KEYS[0]] == 5


def test_entries_too_large_for_one_reply_come_with_their_leaves(stack: ExitStack) -> None:
    a, c = opened(stack), opened(stack, owned=())
    a.value("v", bytes)["large"] = b"x" * (12 << 20)
    c.fetch_from(a.serve().address, strategy="on_demand")
    assert len(c.value("v", bytes)["large"]) == 12 << 20


def test_waiting_for_leaves_of_a_provider_that_is_closed_says_so(stack: ExitStack) -> None:
    a, c = opened(stack), opened(stack, owned=())
    a.value("n", int).put_many(KEYS, range(len(KEYS)))
    migration = c.fetch_from(a.serve().address, strategy="on_demand")
    c.close()
    with pytest.raises(ClosedError):
        migration.wait(SECONDS_MAX)


def test_a_strategy_that_there_is_not_is_refused_by_the_old_owner(stack: ExitStack) -> None:
    a, c = opened(stack), opened(stack, owned=())
    a.serve()
    with pytest.raises(ArgumentError, match="priorised"):
        a.migrate(to=c.serve().address, key_groups=[0], strategy="priorised")  # type: ignore[arg-type]


def test_a_generation_may_begin_when_all_migrations_are_done(stack: ExitStack) -> None:
    a, c = opened(stack), opened(stack, owned=())
    a.value("n", int)["k"] = 1
    server = a.serve()
    c.fetch_from(server.address, key_groups=[0]).wait(SECONDS_MAX)
    server.close()
    assert a.serve(generation=1).address


def test_hand_overs_that_are_done_are_let_go_of_while_another_stays_open(stack: ExitStack) -> None:
    """Key-group 1 goes to and fro, while nobody has touched key-group 0 yet."""
    a, b = opened(stack), opened(stack, owned=())
    a.value("n", int).put_many(KEYS, [0] * len(KEYS))
    here, there = a.serve().address, b.serve().address
    lasting = b.fetch_from(here, key_groups=[0], strategy="on_demand")
    ones = of_group(a, 1)
    for turn in range(30):
        b.fetch_from(here, key_groups=[1]).wait(SECONDS_MAX)
        b.value("n", int).add_many(ones, [1] * len(ones))
        a.fetch_from(there, key_groups=[1]).wait(SECONDS_MAX)
        assert set(a.value("n", int).get_many(ones)) == {turn + 1}
        source = repr(b._residence.sources)
        assert source.count("<Arrival") <= 2, source
    assert not lasting.done
    lasting.wait(SECONDS_MAX)
    assert set(b.value("n", int).get_many(of_group(b, 0))) == {0}
    assert b.loading is None


def test_fencing_and_the_end_of_an_arrival_do_not_wait_for_each_other(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = opened(stack), opened(stack, owned=())
    a.value("n", int).put_many(KEYS, range(len(KEYS)))
    ending, fencing = threading.Event(), threading.Event()
    forget, forget_shut = NewOwnerShell.forget, Residence.forget_shut

    def forget_slowly(self: NewOwnerShell, arrival: sk.Arrival) -> None:
        ending.set()
        fencing.wait(1)
        forget(self, arrival)

    def forget_shut_late(self: Residence) -> None:
        fencing.set()
        forget_shut(self)

    monkeypatch.setattr(NewOwnerShell, "forget", forget_slowly)
    monkeypatch.setattr(Residence, "forget_shut", forget_shut_late)
    b.fetch_from(a.serve().address)
    assert ending.wait(SECONDS_MAX)  # its thread has the residence's lock, and waits for the peer's
    thread = threading.Thread(target=b.fence, args=(7,), daemon=True)
    thread.start()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()
    assert b.key_groups == ()


def test_leaves_that_are_given_back_while_a_batch_fetches_them_are_not_owned(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = stack.enter_context(sk.open("memory:", key_groups=4, subgroups=1))
    b = stack.enter_context(sk.open("memory:", key_groups=4, subgroups=1, owned=()))
    a.value("v", str).put_many(KEYS, ["x" * 100] * len(KEYS))
    migration = b.fetch_from(a.serve().address, strategy="on_demand")
    monkeypatch.setattr(fetch_module, "REQUEST_BYTES", 1)  # a request for each leaf
    pieces = Fetching._pieces
    back: list[Any] = []

    def give_back_in_between(self: Fetching, leaves: Any) -> Any:
        yield from pieces(self, leaves)
        if not back:
            back.extend(migration.give_back())

    monkeypatch.setattr(Fetching, "_pieces", give_back_in_between)
    b._residence.load_leaves(range(4))
    monkeypatch.undo()
    gone = {group for part in back for group in part}
    assert gone
    values = b.value("v", str)
    for key in KEYS:
        if b.key_group_of(key) in gone:
            with pytest.raises(NotOwnedError):
                values.get(key)
        else:
            assert values.get(key) == "x" * 100


@pytest.mark.parametrize("url", ["memory:", "rocksdb"])
def test_what_was_handed_over_before_it_had_come_is_not_cut_off_from_its_checkpoint(
    stack: ExitStack, tmp_path: Path, url: str
) -> None:
    """Random lives found it: the last leaf that was not shut came, and the source was let go of."""
    place = str(tmp_path / "place")
    with sk.open("memory:", key_groups=2, subgroups=1) as first:
        first.value("n", int).put_many(KEYS, range(len(KEYS)))
        first.checkpoint(place)
    home = f"rocksdb:{tmp_path}/home" if url == "rocksdb" else url
    a = stack.enter_context(sk.restore(place, home=home, lazy=True, background=False))
    b = opened(stack, owned=())
    arrival = b.fetch_from(a.serve().address, key_groups=[0], strategy="on_demand")
    numbers = a.value("n", int)
    assert dict(numbers.items()) == {key: KEYS.index(key) for key in of_group(a, 1)}
    there = b.value("n", int)
    assert dict(there.items()) == {key: KEYS.index(key) for key in of_group(a, 0)}
    arrival.wait(SECONDS_MAX)
    wait_until(lambda: a.loading is None)


def test_a_batch_is_before_a_hand_over_that_begins_in_it(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had looked whether anything was on its way; then key-groups were taken over."""
    a, b = opened(stack, owned=[1]), opened(stack, owned=[0])
    for kv, group in ((a, 1), (b, 0)):
        kv.value("n", int).put_many(of_group(kv, group), [5] * len(of_group(kv, group)))
    address, numbers = a.serve().address, b.value("n", int)
    as_it_was = type(numbers._raw).add_many

    def slow(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        b.fetch_from(address, strategy="on_demand")
        return as_it_was(*args, **options)

    monkeypatch.setattr(type(numbers._raw), "add_many", slow)
    with pytest.raises(NotOwnedError, match="just been taken over") as caught:
        numbers.add_many(KEYS)
    assert caught.value.statuses is not None
    assert caught.value.record is not None
    left = [key for key, status in zip(KEYS, caught.value.statuses, strict=True) if status]
    assert left == of_group(a, 1)
    assert left[0] == KEYS[caught.value.record]
    numbers.add_many(left)
    assert dict(numbers.items()) == dict.fromkeys(KEYS, 6)
