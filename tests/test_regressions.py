"""Bugs that an independent review found, one test each: what must hold is in the test's name.

The homes are dicts (`HookHome`) with a hook at every call, which may fail, or do something that
another thread might do just then.
"""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field, make_dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NotRequired, TypedDict

import msgspec
import pytest

import statekit as sk
from statekit.errors import (
    ArgumentError,
    BadValueError,
    ClosedError,
    CorruptBlockError,
    HomeError,
    MemoryLimitError,
    SchemaError,
    StateKitError,
)
from statekit.homes import Home, HomeUrl, register_home
from statekit.homes.home import Change, Row
from statekit.homes.ledger import Ledger
from statekit.native import Store
from statekit.residence.residence import Residence
from statekit.schema import refusal

SECONDS_MAX = 120.0
KEYS = [f"k{at}" for at in range(40)]


def nothing(call: str) -> None:
    """The hook of a home that just works."""


class HookHome(Home):
    """Rows in a dict that outlives the provider. `hook(call)` comes first at every call.

    get() also calls hook("got") between having its answer and giving it.
    """

    places: ClassVar[dict[str, "HookHome"]] = {}

    def __init__(self) -> None:
        self.rows: dict[Row, bytes] = {}
        self.meta: bytes | None = None
        self.hook: Callable[[str], None] = nothing
        self.closes = 0

    @property
    def entries(self) -> dict[Row, bytes]:
        """Rows of the last commit, without the records of commits."""
        return {row: data for row, data in self.rows.items() if row[0] < 2**20}

    @classmethod
    def open(cls, url: HomeUrl, cache_bytes: int) -> Home:
        url.refuse_rest()
        return cls.places.setdefault(url.place, cls())

    def get(self, rows: Sequence[Row]) -> list[bytes | None]:
        self.hook("get")
        found = [self.rows.get(row) for row in rows]
        self.hook("got")
        return found

    def load(self, leaf: int, state: int) -> list[tuple[bytes, bytes]]:
        self.hook("load")
        rows = list(self.rows.items())
        return [(row[2], data) for row, data in rows if row[:2] == (leaf, state)]

    def write(self, changes: Sequence[Change]) -> None:
        self.hook("write")
        for row, data in changes:
            if data is None:
                self.rows.pop(row, None)
            else:
                self.rows[row] = data

    def clear(self, leaf: int, state: int) -> None:
        self.hook("clear")
        for row in [row for row in self.rows if row[:2] == (leaf, state)]:
            del self.rows[row]

    def read_meta(self) -> bytes | None:
        self.hook("read_meta")
        return self.meta

    def write_meta(self, meta: bytes, expected: bytes | None) -> bool:
        self.hook("write_meta")
        if self.meta != expected:
            return False
        self.meta = meta
        return True

    def flush(self) -> None:
        self.hook("flush")

    def close(self) -> None:
        self.closes += 1

    def once(self, call: str, act: Callable[[], Any]) -> None:
        """Does something at the next call of that name, and nothing at later ones."""

        def hook(name: str) -> None:
            if name == call:
                self.hook = nothing
                act()

        self.hook = hook


register_home("hook", HookHome.open)


@pytest.fixture(autouse=True)
def _no_homes() -> Iterator[None]:
    HookHome.places.clear()
    yield
    HookHome.places.clear()


def open_hook(place: str = "a", memory: str = "1MiB", **settings: Any) -> sk.KVProvider:
    settings = {"key_groups": 4, "subgroups": 2} | settings
    return sk.open(f"hook:{place}?memory={memory}", **settings)


def home_at(place: str = "a") -> HookHome:
    return HookHome.places[place]


def reopened(kv: sk.KVProvider) -> sk.KVProvider:
    kv.close()
    return sk.open(kv.url)


def empty_memory() -> sk.KVProvider:
    """A provider in memory that owns nothing yet."""
    return sk.open("memory:", key_groups=4, subgroups=2, owned=[])


def in_thread(act: Callable[[], Any]) -> None:
    """Does something in another thread, and waits for its end."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()


def fail(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


# ---- Timers


@pytest.mark.parametrize("dues", [(0xADD7,), (0x1A2_0000_ADD7, 0x1A3_0000_0000)])
def test_due_times_that_begin_like_a_stamp_survive_reopening(dues: tuple[int, ...]) -> None:
    kv = open_hook()
    timers = kv.timers("t")
    for due in dues:
        timers.set("alice", due)
    timers = reopened(kv).timers("t")
    assert timers["alice"] == dues
    assert timers.pop_due(1 << 62) == [(due, "alice") for due in dues]


def test_timers_that_fired_do_not_fill_the_memory() -> None:
    kv = open_hook(memory="64KiB")
    kv.timers("t")
    kv = reopened(kv)  # its leaves are not whole: it must be remembered that there is no timer
    timers = kv.timers("t")
    for turn in range(40):
        for at in range(100):
            timers.set(f"session-{turn}-{at}", turn)
        assert len(timers.pop_due(turn)) == 100
        kv.flush()
    assert timers.next_due is None
    assert not home_at().entries


def test_timers_of_a_state_not_declared_by_the_other_fire_after_a_merge() -> None:
    kv = open_hook()
    timers = kv.timers("t")
    for at, key in enumerate(KEYS):
        timers.set(key, at)
    left, right = reopened(kv).split([range(2), range(2, 4)])
    timers = left.timers("t")
    left.merge(right)
    assert timers.pop_due(1000) == list(enumerate(KEYS))
    assert len(timers) == 0


def test_pop_due_with_a_limit_delivers_what_it_took_when_keys_move_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv = sk.open("memory:")
    timers = kv.timers("t")
    for at in range(20):
        timers.set(f"k{at}", at)
    group = kv.key_group_of("k10")
    cls = type(timers._raw)
    due = cls.due
    others: list[sk.KVProvider] = []

    def due_then_split(self: Any, *args: Any, **options: Any) -> Any:
        found = due(self, *args, **options)
        if not others:
            others.extend(kv.split([range(group, group + 1)]))
        return found

    monkeypatch.setattr(cls, "due", due_then_split)
    taken = timers.pop_due(100, limit=20)
    assert taken == [(at, f"k{at}") for at in range(10)]
    rest = [*timers.all(), *others[0]["t"].all()]
    assert sorted([*taken, *rest]) == [(at, f"k{at}") for at in range(20)]


# ---- Time to live


@pytest.mark.parametrize("ttl", [3600, sk.TTL(3600, time="event")])
def test_a_ttl_added_later_neither_undoes_changes_nor_revives_deletions_in_a_merge(
    ttl: Any,
) -> None:
    kv = open_hook()
    kv.value("v", str).update({"changed": "old", "deleted": "old", "kept": "old"})
    kv = reopened(kv)
    values = kv.value("v", str, ttl=ttl)
    values["changed"] = "new"
    values.discard("deleted")
    memory = empty_memory()
    memory.merge(kv)
    assert dict(memory["v"].items()) == {"changed": "new", "kept": "old"}


@pytest.mark.parametrize("change", ["put", "discard"])
def test_a_ttl_added_later_does_not_undo_a_change_during_a_fetch(change: str) -> None:
    kv = open_hook()
    kv.value("v", str)["k"] = "old"
    values = reopened(kv).value("v", str, ttl=3600)

    def act() -> None:
        if change == "put":
            values["k"] = "new"
        else:
            values.discard("k")

    home_at().once("got", lambda: in_thread(act))
    after = "new" if change == "put" else None
    assert values.get("k") == after
    assert values.get("k") == after


def test_an_entry_without_a_stamp_expires_in_event_time_after_a_merge_to_memory() -> None:
    kv = open_hook()
    kv.value("v", str)["k"] = "1"
    kv = reopened(kv)
    kv.value("v", str, ttl=sk.TTL(10, time="event"))
    kv.advance_watermark(1000)
    memory = empty_memory()
    memory.advance_watermark(1000)
    memory.merge(kv)
    assert memory["v"].get("k") == "1"
    memory.advance_watermark(1_000_000)
    assert memory["v"].get("k") is None


def test_time_to_live_in_event_time_starts_at_the_first_watermark_and_not_again() -> None:
    ttl = sk.TTL(10, time="event")
    kv = open_hook()
    kv.value("v", str, ttl=ttl)["k"] = "1"  # before any watermark
    kv = reopened(kv)
    kv.advance_watermark(1)
    assert kv.value("v", str, ttl=ttl)["k"] == "1"
    kv.advance_watermark(5000)
    kv = reopened(kv)
    values = kv.value("v", str, ttl=ttl)
    kv.advance_watermark(10_000)
    assert values.get("k") == "1"
    kv.advance_watermark(10_001)
    assert values.get("k") is None


def test_the_clock_of_a_time_to_live_cannot_change() -> None:
    kv = open_hook()
    kv.value("v", str, ttl=sk.TTL(10, time="event"))["k"] = "1"
    kv = reopened(kv)
    with pytest.raises(SchemaError, match="event time"):
        kv.value("v", str, ttl=sk.TTL(10))
    assert kv.value("v", str, ttl=sk.TTL(20, time="event"))["k"] == "1"


# ---- Fetches


def test_clear_during_a_fetch_wins() -> None:
    kv = open_hook()
    kv.value("v", str)["k"] = "old"
    kv = reopened(kv)
    values = kv.value("v", str)
    home_at().once("got", lambda: in_thread(values.clear))
    assert values.get("k") is None
    assert "k" not in values
    kv.flush()
    assert not home_at().entries


def test_a_fetch_during_clear_brings_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = open_hook()
    kv.value("v", str)["k"] = "old"
    kv = reopened(kv)
    values = kv.value("v", str)
    reader = threading.Thread(target=values.get, args=("k",))
    got = threading.Event()
    clear = Ledger.clear

    def read_first(ledger: Ledger, leaf: int, state: int) -> None:
        if not reader.ident:
            reader.start()
            assert got.wait(SECONDS_MAX)
        clear(ledger, leaf, state)

    monkeypatch.setattr(Ledger, "clear", read_first)
    home_at().hook = lambda call: got.set() if call == "got" else None
    values.clear()
    reader.join(SECONDS_MAX)
    assert "k" not in values
    kv.flush()
    assert not home_at().entries


def test_an_append_to_a_list_of_most_of_the_budget_ends() -> None:
    kv = open_hook()
    budget = kv._residence.budget
    assert budget is not None
    lists, others = kv.list("l", bytes), kv.value("other", str)
    others.update(dict.fromkeys(KEYS, "other"))
    lists["k"].append(b"x" * (budget * 6 // 10))
    kv.flush()
    calls = count()

    def hook(call: str) -> None:
        assert next(calls) < 1000, "it fetches for ever"

    home_at().hook = hook
    with suppress(MemoryLimitError):
        lists["k"].append(b"y" * (budget // 2))
    home_at().hook = nothing
    lists["k"] = [b"z"]
    kv = reopened(kv)
    assert kv.list("l", bytes)["k"] == [b"z"]
    assert dict(kv.value("other", str).items()) == dict.fromkeys(KEYS, "other")


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_provider_closed_around_a_fetch_is_a_closed_error(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = open_hook()
    kv.value("v", int)["k"] = 1
    kv = reopened(kv)
    values = kv.value("v", int)
    fetch_one = Residence.fetch_one

    def close_and_fetch(*args: Any) -> None:
        in_thread(kv.close)
        fetch_one(*args)

    if when == "before":  # the store has said that it does not know the entry
        monkeypatch.setattr(Residence, "fetch_one", close_and_fetch)
    else:
        home_at().once("got", lambda: in_thread(kv.close))
    with pytest.raises(ClosedError):
        values["k"]


# ---- Merges between homes


def fill(kv: sk.KVProvider) -> dict[str, Any]:
    """Puts entries under KEYS that the provider owns. Returns what contents() gives then."""
    values, lists, timers = kv.value("v", str), kv.list("l", int), kv.timers("t")
    mine = [key for key in KEYS if kv.owner_of(key) is kv]
    for at, key in enumerate(mine):
        values[key] = f"value {key}"
        lists[key] = [at, at + 1]
        timers.set(key, at)
    return contents(kv)


def contents(kv: sk.KVProvider) -> dict[str, Any]:
    # Reading key by key and a scan must agree.
    values, lists, timers = kv.value("v", str), kv.list("l", int), kv.timers("t")
    mine = [key for key in KEYS if kv.owner_of(key) is kv]
    found = {key: (values.get(key), lists[key].copy(), timers[key]) for key in mine}
    assert dict(values.items()) == {key: v for key, (v, _, _) in found.items() if v is not None}
    assert dict(lists.items()) == {key: items for key, (_, items, _) in found.items() if items}
    assert dict(timers.items()) == {key: t for key, (_, _, t) in found.items() if t}
    return found


FEW: Any = {"key_groups": 4, "subgroups": 1}  # few leaves, so that there are few calls


def giver_and_taker(taker: str) -> tuple[sk.KVProvider, sk.KVProvider, dict[str, Any]]:
    """Both, and what they hold. The giver has entries only at home, changed ones and a deletion."""
    HookHome.places.clear()
    giver = open_hook("a", owned=range(1, 3), **FEW)
    model = fill(giver)
    giver.close()
    giver = open_hook("a", owned=range(1, 3), **FEW)
    changed, *_, deleted = model
    giver.value("v", str)[changed] = "changed"
    giver.value("v", str).discard(deleted)
    giver.list("l", int)[changed].append(99)
    giver.timers("t")
    model[changed] = ("changed", [*model[changed][1], 99], model[changed][2])
    model[deleted] = (None, *model[deleted][1:])
    if taker == "memory":
        other = sk.open("memory:", owned=[0, 3], **FEW)
    else:
        other = open_hook("b", owned=[0, 3], **FEW)
    return giver, other, model | fill(other)


@pytest.mark.parametrize(
    ("failing", "taker", "error"),
    [
        ("giver", "hook", HomeError("down")),
        ("taker", "hook", HomeError("down")),
        ("giver", "memory", HomeError("down")),
    ],
)
def test_a_merge_between_homes_that_fails_at_any_call_changes_nothing_and_can_be_repeated(
    failing: str, taker: str, error: BaseException
) -> None:
    for failing_call in count():
        giver, other, model = giver_and_taker(taker)
        theirs, ours = giver.key_groups, other.key_groups
        calls = count()
        failed = False

        def hook(call: str) -> None:
            nonlocal failed
            if next(calls) == failing_call:  # noqa: B023
                failed = True
                raise error

        home_at("a" if failing == "giver" else "b").hook = hook
        try:
            other.merge(giver)
        except (HomeError, KeyboardInterrupt):
            for home in HookHome.places.values():
                home.hook = nothing
        if giver.key_groups:
            assert (giver.key_groups, other.key_groups) == (theirs, ours)
            assert contents(other) | contents(giver) == model
            key = next(key for key in KEYS if giver.owner_of(key) is giver)
            giver["l"][key].append(7)
            del giver["v"][key]
            model |= contents(giver)
            other.merge(giver)
        for home in HookHome.places.values():
            home.hook = nothing
        assert (giver.key_groups, other.key_groups) == ((), (range(4),))
        assert contents(other) == model
        giver.close()
        assert not home_at("a").entries
        if taker == "hook":
            other.close()
            other = sk.open(other.url)
            assert contents(other) == model
        other.close()
        if not failed:
            break
    assert failing_call > 10


def test_a_provider_that_gave_everything_away_can_take_from_another_home() -> None:
    giver, taker = open_hook("a"), open_hook("b")
    taker.split([range(4)])[0].close()
    giver.timers("t").set("k", 5)
    taker.timers("t")
    taker.merge(giver)
    assert taker["t"].pop_due(10) == [(5, "k")]


def test_states_not_declared_may_evolve_after_a_merge() -> None:
    kv = open_hook()
    kv.value("x", int)["k"] = 1
    kv.value("y", str)["k"] = "a"
    left, right = reopened(kv).split([range(2), range(2, 4)])
    left.merge(right)
    assert left.value("x", float)["k"] == 1.0
    assert left.value("y", str, ttl=60)["k"] == "a"


# ---- Interrupts


@pytest.mark.parametrize("interrupted", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_in_a_split_loses_nothing(
    interrupted: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = sk.open("memory:")
    values = kv.value("v", int)
    model = {f"k{at}": at for at in range(200)}
    values.update(model)
    move = Store.move
    calls = count(1)

    def interrupted_move(self: Store, *args: Any) -> None:
        is_interrupted = next(calls) == interrupted
        if when == "after" or not is_interrupted:
            move(self, *args)
        if is_interrupted:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "move", interrupted_move)
        with pytest.raises(KeyboardInterrupt):
            kv.split([range(32), range(64, 96)])
    assert kv.key_groups == (range(128),)
    assert dict(values.items()) == model
    (part,) = kv.split([range(32)])
    assert dict(values.items()) | dict(part["v"].items()) == model


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_in_a_merge_of_one_home_loses_nothing(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = open_hook()
    model = fill(kv)
    left, right = kv.split([range(2), range(2, 4)])
    move = Store.move

    def interrupted_move(self: Store, *args: Any) -> None:
        patch.undo()
        if when == "after":
            move(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "move", interrupted_move)
        with pytest.raises(KeyboardInterrupt):
            left.merge(right)
    assert contents(left) | contents(right) == model
    left.merge(right)
    assert contents(left) == model


@pytest.mark.parametrize("error", [HomeError("down"), KeyboardInterrupt()])
def test_a_merge_of_one_home_that_cannot_load_timers_changes_nothing(error: BaseException) -> None:
    kv = open_hook()
    model = fill(kv)
    left, right = reopened(kv).split([range(2), range(2, 4)])
    left.timers("t")
    home_at().once("load", fail(error))
    with pytest.raises(type(error)):
        left.merge(right)
    assert (left.key_groups, right.key_groups) == ((range(2),), (range(2, 4),))
    assert contents(left) | contents(right) == model
    left.merge(right)
    assert contents(left) == model


@pytest.mark.parametrize("place", ["between", "write", "flush"])
def test_an_interrupt_in_a_write_back_loses_nothing_and_later_ones_work(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = open_hook()
    model = fill(kv)
    with monkeypatch.context() as patch:
        if place == "between":  # changes were taken, and are not yet rows
            patch.setattr(Ledger, "commit", lambda *_: fail(KeyboardInterrupt())())
        else:
            home_at().once(place, fail(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            kv.flush()
    assert contents(kv) == model
    kv.flush()
    assert contents(reopened(kv)) == model


# ---- Closing


@pytest.mark.parametrize(
    ("declare", "write"),
    [
        (lambda kv: kv.value("v", str), lambda state: state.__setitem__("k", "x")),
        (lambda kv: kv.value("v", int), lambda state: state.__setitem__("k", 1)),
        (lambda kv: kv.value("v", str), lambda state: state.setdefault("k", "x")),
        (lambda kv: kv.list("v", int), lambda state: state["k"].append(1)),
        (lambda kv: kv.map("v", str, int), lambda state: state["k"].update(a=1)),
        (lambda kv: kv.state("v", set[str]), lambda state: state["k"].add("a")),
        (lambda kv: kv.timers("v"), lambda state: state.set("k", 1)),
        (lambda kv: kv.reduce("v", str, max), lambda state: state.add("k", "x")),
    ],
    ids=["str", "int", "setdefault", "list", "map", "set", "timers", "reduce"],
)
def test_a_write_during_close_is_refused_or_kept(
    declare: Callable[[sk.KVProvider], Any], write: Callable[[Any], Any]
) -> None:
    kv = open_hook()
    state = declare(kv)
    refused = []

    def act() -> None:
        try:
            write(state)
            refused.append(False)
        except StateKitError:
            refused.append(True)

    home_at().once("flush", lambda: in_thread(act))  # all rows are written
    kv = reopened(kv)
    assert len(refused) == 1
    assert ("k" in declare(kv)) is not refused[0]


def test_a_close_that_fails_can_be_repeated_and_the_provider_used_meanwhile() -> None:
    kv = open_hook()
    values = kv.value("v", str)
    values["a"] = "1"
    home_at().once("write", fail(HomeError("down")))
    with pytest.raises(HomeError):
        kv.close()
    values["b"] = "2"
    assert dict(reopened(kv).value("v", str).items()) == {"a": "1", "b": "2"}


@pytest.mark.parametrize("url", ["memory:", "hook:a"])
def test_use_after_close_is_a_closed_error(url: str) -> None:
    kv = sk.open(url)
    values, counts, lists = kv.value("v", str), kv.value("n", int, default=0), kv.list("l", int)
    maps, timers, folds = kv.map("m", str, int), kv.timers("t"), kv.reduce("r", str, max)
    view = lists["k"]
    kv.close()
    kv.close()
    uses: list[Callable[[], Any]] = [
        kv.flush,
        kv.metrics,
        lambda: kv.value("v", str),
        lambda: kv.split([range(1)]),
        lambda: values["k"],
        lambda: values.get("k"),
        lambda: values.__setitem__("k", "x"),
        lambda: values.discard("k"),
        lambda: "k" in values,
        lambda: values.get_many(["k"]),
        lambda: values.put_many(["k"], ["x"]),
        lambda: list(values.items()),
        lambda: len(values),
        values.clear,
        lambda: counts["k"],
        lambda: counts.add("k", 1),
        lambda: view.append(1),
        view.copy,
        lambda: lists.__setitem__("k", [1]),
        lambda: maps["k"].update(a=1),
        lambda: timers.set("k", 1),
        lambda: timers.pop_due(1),
        lambda: folds.add("k", "x"),
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()


# ---- Schemas


def test_a_field_that_was_added_with_a_default_stays_optional() -> None:
    first = make_dataclass("R", [("a", int)])
    second = make_dataclass("R", [("a", int), ("x", int, field(default=0))])
    third = make_dataclass("R", [("a", int), ("x", int)])
    kv = open_hook()
    kv.value("v", first)["k"] = first(1)
    kv = reopened(kv)
    kv.value("v", second)
    kv = reopened(kv)
    with pytest.raises(SchemaError, match="field 'x' of R may be missing"):
        kv.value("v", third)
    assert kv.value("v", second)["k"] == second(1, 0)


class Optional(TypedDict):
    a: NotRequired[int]


class Required(TypedDict):
    a: int


def test_a_key_that_may_be_missing_cannot_become_required() -> None:
    kv = open_hook()
    kv.value("v", Optional)["k"] = {}
    kv = reopened(kv)
    with pytest.raises(SchemaError, match="field 'a' of Required may be missing"):
        kv.value("v", Required)
    assert kv.value("v", Optional)["k"] == {}


def test_a_reference_to_another_record_is_another_type() -> None:
    def tree(of: str) -> Any:
        inner = ["record", "B", {"x": [["union", ["ref", of], "none"], True]}]
        return ["record", "A", {"b": [inner, True]}]

    assert refusal(tree("A"), tree("A")) is None
    assert "A cannot become B" in str(refusal(tree("A"), tree("B")))


def test_of_two_who_open_a_new_home_with_other_numbers_the_second_is_refused() -> None:
    first = open_hook(key_groups=4, owned=range(2))
    with pytest.raises(ArgumentError, match="made with key_groups=4; asked for was key_groups=8"):
        open_hook(key_groups=8, owned=range(4, 8))
    first.close()
    assert open_hook(key_groups=None).key_group_count == 4


def test_of_two_who_find_a_home_new_at_once_the_second_is_refused() -> None:
    opened: list[sk.KVProvider] = []
    home = HookHome.places["a"] = HookHome()
    home.once("write_meta", lambda: opened.append(open_hook(key_groups=4, owned=range(2))))
    with pytest.raises(ArgumentError, match="4 key-groups x 2 sub-groups; asked for was 8 x 2"):
        open_hook(key_groups=8, owned=range(4, 8))
    opened[0].close()


def test_an_extension_type_that_looks_like_a_stamp_is_refused() -> None:
    values = open_hook().value("v", object)
    with pytest.raises(BadValueError):
        values["k"] = msgspec.msgpack.Ext(-83, b"12345678")
    assert "k" not in values


# ---- Folds


@pytest.mark.parametrize("removal", ["discard", "clear", "delete_many", "del"])
def test_a_removal_during_a_fold_is_not_undone_by_it(removal: str) -> None:
    kv = sk.open("memory:")
    threads: list[threading.Thread] = []
    removals: dict[str, Callable[[], Any]] = {
        "discard": lambda: folds.discard("k"),
        "clear": lambda: folds.clear(),
        "delete_many": lambda: folds.delete_many(["k"]),
        "del": lambda: folds.__delitem__("k"),
    }

    def fold(a: int, b: int) -> int:
        threads.append(threading.Thread(target=removals[removal]))
        threads[0].start()
        threads[0].join(0.05)  # it must wait for us; if it did not, it would have ended by then
        return a + b

    folds = kv.reduce("r", int, fold)
    folds.add("k", 5)
    assert folds.add("k", 1) == 6
    threads[0].join(SECONDS_MAX)
    assert "k" not in folds


# ---- Homes that are shared


def test_providers_that_share_a_home_write_to_it_one_at_a_time() -> None:
    kv = open_hook()
    model = fill(kv)
    left, right = kv.split([range(2), range(2, 4)])
    second = threading.Thread(target=right.flush)
    first_is_at_it: list[bool] = []  # whether the first one is at it when the second one writes

    def hook(call: str) -> None:
        nonlocal is_writing
        if call == "write" and threading.current_thread() is second:
            first_is_at_it.append(is_writing)
        elif call == "write" and not second.ident:
            is_writing = True
            second.start()
            second.join(0.05)  # it must wait for us; if it did not, it would have ended by then
            is_writing = False

    is_writing = False
    home_at().hook = hook
    left.flush()
    second.join(SECONDS_MAX)
    assert first_is_at_it
    assert not any(first_is_at_it)
    assert contents(left) | contents(right) == model


@pytest.mark.parametrize("error", [HomeError("down"), KeyboardInterrupt()])
def test_a_split_that_fails_midway_gives_everything_back_and_releases_the_home(
    error: BaseException,
) -> None:
    kv = open_hook()
    model = fill(kv)
    budget = kv._residence.budget
    metas = count(1)

    def hook(call: str) -> None:
        # Each part asks three times, once per state.
        if call == "read_meta" and next(metas) == 5:
            raise error

    home_at().hook = hook
    with pytest.raises(type(error)):
        kv.split([range(1), range(1, 3)])
    home_at().hook = nothing
    assert kv.key_groups == (range(4),)
    assert kv._residence.budget == budget
    assert all(kv.owner_of(key) is kv for key in KEYS)
    assert contents(kv) == model
    kv.close()
    assert home_at().closes == 1
    assert contents(open_hook()) == model


def test_no_message_shows_a_password() -> None:
    url = "hook://me:secret@host/0"
    kv = sk.open(url, key_groups=4)
    kv.value("v", str)["k"] = "x"
    shown = [repr(kv), kv._repr_html_(), repr(HomeUrl.parse(url))]
    kv.close()
    for wrong in (
        kv.flush,
        lambda: sk.open(url, key_groups=8),
        lambda: sk.open(url + "?memory=much"),
        lambda: sk.open(url + "?colour=red"),
    ):
        with pytest.raises(StateKitError) as raised:
            wrong()
        shown.append(str(raised.value))
    home_at("//me:secret@host/0").meta = b"{}"
    with pytest.raises(SchemaError) as unreadable:
        sk.open(url)
    shown.append(str(unreadable.value))
    assert not [text for text in shown if "secret" in text]


def test_handles_that_nobody_has_do_not_pile_up() -> None:
    kv = sk.open("memory:")
    for _ in range(50):
        maps = kv.map("m", str, int)
        maps["a"]["x"] = 1
    gc.collect()
    assert len(kv._handles) <= 2
    assert dict(maps.items()) == {"a": {"x": 1}}


# ---- Rows that another program damaged


def damaged(hint: Any, value: Any, row: bytes) -> Any:
    """A state whose one entry is a row that is not of its type."""
    kv = open_hook()
    kv.state("v", hint)["k"] = value
    kv.close()
    home_at().rows |= dict.fromkeys(home_at().entries, row)
    return sk.open(kv.url).state("v", hint)


DAMAGED = [
    pytest.param(str, "a", b"\xc1", id="no-msgpack"),
    pytest.param(str, "a", b"", id="empty"),
    pytest.param(str, "a", b"\x05", id="int-for-str"),
    pytest.param(object, "a", b"\x05\x05", id="trailing"),
    pytest.param(list[int], [1], b"\x91\xa1a", id="list-of-str"),
    pytest.param(set[str], {"a"}, b"\x81\xa1a\x05", id="set-with-values"),
]


@pytest.mark.parametrize(("hint", "value", "row"), DAMAGED)
def test_a_damaged_row_is_a_corrupt_block_error_that_names_state_and_key(
    hint: Any, value: Any, row: bytes
) -> None:
    state = damaged(hint, value, row)
    with pytest.raises(CorruptBlockError, match="state 'v', key 'k'") as raised:
        state["k"] if hint in (str, object) else state["k"].copy()
    assert (raised.value.state, raised.value.key) == ("v", "k")


@pytest.mark.parametrize(
    ("hint", "value", "row"), [*DAMAGED, pytest.param(list[int], [1], b"\xc1", id="list")]
)
def test_a_damaged_row_in_a_scan_is_a_corrupt_block_error_that_names_the_state(
    hint: Any, value: Any, row: bytes
) -> None:
    state = damaged(hint, value, row)
    for read in (state.items, state.values):
        with pytest.raises(CorruptBlockError, match="state 'v'"):
            list(read())


@pytest.mark.parametrize("hint", [int, float])
def test_a_damaged_number_is_a_corrupt_block_error(hint: Any) -> None:
    state = damaged(hint, hint(1), b"\x05")
    for read in (lambda: state["k"], lambda: list(state.items()), lambda: state.get_many(["k"])):
        with pytest.raises(CorruptBlockError):
            read()


def test_an_entry_that_grew_beyond_the_memory_can_be_read_after_reopening(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/db"
    with sk.open(f"{url}?memory=64MiB") as kv:
        kv.list("lists", bytes)["a"] = [bytes(1000)] * 300
        kv.value("counts", int)["b"] = 7
    with sk.open(f"{url}?memory=256KiB") as kv:
        lists, counts = kv.list("lists", bytes), kv.value("counts", int)
        assert len(lists["a"]) == 300
        assert counts["b"] == 7
        assert lists["a"][-1] == bytes(1000)
        lists["a"].append(b"more")
        assert lists["a"][-1] == b"more"
    with sk.open(url) as kv:
        assert len(kv.list("lists", bytes)["a"]) == 301


def test_a_batch_that_meets_a_damaged_row_names_the_state(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/db"
    with sk.open(url) as kv:
        kv.value("texts", str)["a"] = "fine"
        kv.flush()
        home = kv._residence.home
        assert home is not None
        leaf = kv["texts"]._raw.leaf_of_encoded(b"a")
        home.write([((leaf, 0, b"a"), b"\x01")])  # an int
    with sk.open(url) as kv:
        texts = kv.value("texts", str)
        with pytest.raises(CorruptBlockError, match="'texts'"):
            texts.get_many(["a"]).to_list()
