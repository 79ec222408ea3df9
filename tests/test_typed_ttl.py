"""Time to live of typed state, against a dict of values and times, with a clock that tests turn."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statekit as sk
from statekit.errors import ArgumentError, SchemaError

TTL_MS = 100
HOMES = ["memory", "rocksdb"]


def open_home(home: str, path: Path) -> sk.KVProvider:
    return sk.open("memory:" if home == "memory" else f"rocksdb:{path}/db?memory=64KiB")


class Clock:
    """Sets the clock that a state uses."""

    def __init__(self, kv: sk.KVProvider, time: str) -> None:
        self.now = 1_000_000
        self._kv = kv
        self._time = time
        self.advance(0)

    def advance(self, ms: int) -> None:
        self.now += ms
        if self._time == "event":
            self._kv.advance_watermark(self.now)
        else:
            self._kv._residence.store.set_time("processing", self.now)


class Model:
    """What a state with a time to live must hold."""

    def __init__(self, clock: Clock, refresh: str) -> None:
        self._clock = clock
        self._refresh = refresh
        self._entries: dict[str, tuple[Any, int]] = {}

    def get(self, key: str) -> Any:
        self._expire()
        if key not in self._entries:
            return None
        value, stamp = self._entries[key]
        if self._refresh == "read":
            self._entries[key] = (value, self._clock.now)
        del stamp
        return value

    def put(self, key: str, value: Any) -> None:
        self._entries[key] = (value, self._clock.now)

    def delete(self, key: str) -> bool:
        self._expire()
        return self._entries.pop(key, None) is not None

    def _expire(self) -> None:
        now = self._clock.now
        self._entries = {k: e for k, e in self._entries.items() if e[1] + TTL_MS > now}

    def items(self) -> dict[str, Any]:
        self._expire()
        return {key: value for key, (value, _) in self._entries.items()}


KEYS = st.sampled_from([f"key-{i}" for i in range(8)] + ["a key that is too long for its slot"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.integers(0, 9)),
        st.tuples(st.just("add"), KEYS, st.integers(1, 9)),
        st.tuples(st.just("get"), KEYS, st.just(0)),
        st.tuples(st.just("delete"), KEYS, st.just(0)),
        st.tuples(st.just("wait"), st.just(""), st.sampled_from([1, 50, 99, 100, 101, 300])),
        st.tuples(st.sampled_from(["sweep", "spill", "items", "batch"]), st.just(""), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("time", ["event", "processing"])
@pytest.mark.parametrize("refresh", ["write", "read"])
@settings(max_examples=40)
@given(steps=STEPS)
def test_expired_values_are_never_returned_and_others_always(
    home: str,
    time: Any,
    refresh: Any,
    steps: list[Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with open_home(home, tmp_path_factory.mktemp("ttl")) as kv:
        clock = Clock(kv, time)
        life = sk.TTL(timedelta(milliseconds=TTL_MS), time=time, refresh=refresh)
        state = kv.value("state", int, ttl=life)
        model = Model(clock, refresh)
        for op, key, number in steps:
            match op:
                case "put":
                    state[key] = number
                    model.put(key, number)
                case "add":
                    before = model.get(key)
                    assert state.add(key, number) == (before or 0) + number
                    model.put(key, (before or 0) + number)
                case "get":
                    assert state.get(key) == model.get(key)
                case "delete":
                    assert state.discard(key) == model.delete(key)
                case "wait":
                    clock.advance(number)
                case "sweep":
                    kv.sweep()
                    assert kv._residence.store.stats(state._raw).entries <= len(model.items())
                case "spill":
                    kv.flush()
                    kv._residence._evict(1 << 40)
                case "items":
                    assert dict(state.items()) == model.items()
                    assert len(state) == len(model.items())
                case "batch":
                    keys = sorted(model.items())
                    assert state.get_many(keys).to_list() == [model.get(key) for key in keys]


@pytest.mark.parametrize("home", HOMES)
@settings(max_examples=40)
@given(steps=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0, 40, 100])), max_size=20))
def test_a_list_that_expired_starts_anew(
    home: str, steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with open_home(home, tmp_path_factory.mktemp("ttl")) as kv:
        clock = Clock(kv, "event")
        lists = kv.list("lists", int, ttl=sk.TTL(TTL_MS / 1000, time="event"))
        nested = kv.state("nested", dict[str, list[int]], ttl=sk.TTL(TTL_MS / 1000, time="event"))
        model = Model(clock, "write")
        for at, (key, wait) in enumerate(steps):
            clock.advance(wait)
            expected = [*(model.get(key) or []), at]
            lists[key].append(at)
            nested[key]["x"].append(at)
            model.put(key, expected)
            assert lists[key] == expected
            assert nested[key]["x"] == expected


def test_entries_live_on_at_home_by_their_own_time(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/db"
    life = sk.TTL(1, time="event")
    with sk.open(url) as kv:
        state = kv.value("state", str, ttl=life)
        kv.advance_watermark(5_000)
        state["old"] = "o"
        kv.advance_watermark(5_500)
        state["young"] = "y"
    with sk.open(url) as kv:
        state = kv.value("state", str, ttl=life)
        kv.advance_watermark(6_000)
        assert state.get("old") is None
        assert state["young"] == "y"
        assert dict(state.items()) == {"young": "y"}
        assert kv.sweep() >= 0
        kv.flush()
        assert [key for leaf in range(2048) for key, _ in kv._residence.home.load(leaf, 0)] == [
            b"young"
        ]  # type: ignore[union-attr]


def test_expired_entries_do_not_travel_with_a_split() -> None:
    kv = sk.open("memory:")
    state = kv.value("state", int, ttl=sk.TTL(1, time="event"))
    kv.advance_watermark(1_000)
    state.put_many([f"k{i}" for i in range(100)], range(100))
    kv.advance_watermark(1_500)
    state["k7"] = 7
    (part,) = kv.split([range(128)])
    part.advance_watermark(2_000)
    assert dict(part["state"].items()) == {"k7": 7}


def test_what_was_written_before_the_first_watermark_counts_from_it() -> None:
    kv = sk.open("memory:")
    state = kv.value("state", int, ttl=sk.TTL(1, time="event"))
    state["a"] = 1
    kv.advance_watermark(1_000_000)
    assert state["a"] == 1
    kv.advance_watermark(1_000_999)
    assert state["a"] == 1
    kv.advance_watermark(1_001_000)
    assert "a" not in state


def test_watermark_takes_datetimes_and_never_goes_back() -> None:
    kv = sk.open("memory:")
    state = kv.value("state", int, ttl=sk.TTL(60, time="event"))
    kv.advance_watermark(datetime(2026, 11, 16, 12, tzinfo=UTC))
    state["a"] = 1
    kv.advance_watermark(datetime(2026, 11, 16, 12, 1, tzinfo=UTC))
    kv.advance_watermark(datetime(2026, 11, 16, 12, tzinfo=UTC))
    assert "a" not in state


@pytest.mark.parametrize("bad", [0, -1, timedelta(0), "long", float("nan"), float("inf"), 1e-9])
def test_impossible_times_to_live_are_refused(bad: Any) -> None:
    with pytest.raises(ArgumentError, match="cannot live"):
        sk.open("memory:").value("state", int, ttl=bad)


@pytest.mark.parametrize("bad", [1.5, "now", 2**63, datetime(2026, 11, 16), None])
def test_impossible_watermarks_are_refused(bad: Any) -> None:
    with pytest.raises(ArgumentError, match="watermark"):
        sk.open("memory:").advance_watermark(bad)


def test_a_second_declaration_with_another_ttl_is_refused() -> None:
    kv = sk.open("memory:")
    kv.value("state", int, ttl=60)
    kv.value("state", int, ttl=60)
    with pytest.raises(SchemaError, match="ttl"):
        kv.value("state", int, ttl=61)
    with pytest.raises(SchemaError):
        kv.value("state", int)


def test_the_sweeper_gives_memory_back_and_stops_with_the_provider() -> None:
    kv = sk.open("memory:")
    state = kv.value("state", int, ttl=3600)
    state.put_many([f"k{i}" for i in range(1000)], range(1000))
    store = kv._residence.store
    now = store.time("processing")
    assert now is not None
    store.set_time("processing", now + 3_600_000)
    assert kv.sweep() == 1000
    assert store.stats(state._raw).entries == 0
    sweeper = kv._sweeper
    assert sweeper is not None
    kv.close()
    assert not sweeper._thread.is_alive()


def test_rows_from_before_the_ttl_start_their_time_when_first_seen(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/db"
    with sk.open(url) as kv:
        kv.value("state", int).put_many(["a", "b", "c"], [1, 2, 3])
    with sk.open(url) as kv:
        state = kv.value("state", int, ttl=1)
        store = kv._residence.store
        store.set_time("processing", 10_000)
        assert state["a"] == 1
        kv.flush()
        kv._residence._evict(1 << 40)
        store.set_time("processing", 11_000)
        assert dict(state.items()) == {"b": 2, "c": 3}  # seen now, and not before
        assert state.get("a") is None
        store.set_time("processing", 12_000)
        assert dict(state.items()) == {}
        assert len(state) == 0
        assert state.get("b") is None


def test_what_went_home_before_the_first_watermark_counts_from_the_next_one(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/db"
    life = sk.TTL(10, time="event")
    with sk.open(url) as kv:
        kv.value("state", int, ttl=life)["a"] = 1
    with sk.open(url) as kv:
        state = kv.value("state", int, ttl=life)
        kv.advance_watermark(1_000)
        assert dict(state.items()) == {"a": 1}
        kv.advance_watermark(11_001)
        assert dict(state.items()) == {}
        assert state.get("a") is None
        assert dict(state.items()) == {}


def test_a_state_whose_ttl_is_gone_reads_its_stamped_rows(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/db"
    with sk.open(url) as kv:
        kv.value("state", int, ttl=3600)["a"] = 1
        kv.value("text", str, ttl=3600)["a"] = "t"
    with sk.open(url) as kv:
        assert kv.value("state", int)["a"] == 1
        assert dict(kv.value("text", str).items()) == {"a": "t"}


LOOKS: dict[str, Any] = {
    "map: in": lambda kv: "no" in kv["m"]["k"],
    "map: get": lambda kv: kv["m"]["k"].get("no"),
    "map: pop": lambda kv: kv["m"]["k"].pop("no", None),
    "map: in nothing": lambda kv: list(kv["m"]["k"].items()),
    "list: in": lambda kv: "no" in kv["l"]["k"],
    "list: slice": lambda kv: kv["l"]["k"][7:9],
    "set: in": lambda kv: "no" in kv["s"]["k"],
    "set: discard": lambda kv: kv["s"]["k"].discard("no"),
    "nested: get": lambda kv: kv["n"]["k"].get("no"),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("refresh", ["read", "write"])
def test_looking_for_what_is_not_in_a_value_reads_it(look: str, refresh: str) -> None:
    kv = sk.open("memory:")
    clock = Clock(kv, "event")
    ttl = sk.TTL(TTL_MS / 1000, time="event", refresh=refresh)  # type: ignore[arg-type]
    states: dict[str, Any] = {
        "m": kv.map("m", str, int, ttl=ttl),
        "l": kv.list("l", str, ttl=ttl),
        "s": kv.state("s", set[str], ttl=ttl),
        "n": kv.state("n", dict[str, list[int]], ttl=ttl),
    }
    name = look[0]
    states[name]["k"] = {"m": {"a": 1}, "l": ["a"], "s": {"a"}, "n": {"a": [1]}}[name]
    clock.advance(TTL_MS - 1)
    LOOKS[look](states)
    clock.advance(TTL_MS - 1)
    assert ("k" in states[name]) == (refresh == "read")
