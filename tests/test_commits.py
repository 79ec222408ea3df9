"""commit(), committed, positions, rollback(): what they promise, one property at a time.

Random operations are in test_commit_model.py, failing homes in test_commit_faults.py.
"""

import random
import tarfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from commit_model import Faults, FaultyHome, groups_of, pending_rows, spill

import statekit as sk
from statekit.checkpoint.writer import Attempt
from statekit.errors import ArgumentError, CommitError, HomeError, NotOwnedError
from statekit.homes.ledger import PENDING, Ledger
from statekit.residence import commits

SECONDS_MAX = 30.0
TOKEN = "a-token-of-this-test"
GOLDEN = Path(__file__).parent / "golden"
KEYS = [f"key-{at}" for at in range(60)]
LEFT, RIGHT = range(2), range(2, 4)


@pytest.fixture(params=["rocksdb", "disk-phases", "disk-atomic"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "rocksdb":
        return f"rocksdb:{tmp_path}/home?sync=0&memory=256KiB"
    return f"disk:{uuid.uuid4().hex}?atomic={int(request.param == 'disk-atomic')}&memory=256KiB"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(url: str, **options: Any) -> sk.KVProvider:
    options = {"key_groups": 4, "subgroups": 2} | options
    kv = sk.open(url, **options)
    kv.value("counts", int, default=0)
    kv.value("texts", str)
    kv.timers("timers")
    return kv


def fill(kv: sk.KVProvider, value: int, keys: Sequence[str] = KEYS) -> None:
    mine = set(groups_of(kv))
    for key in keys:
        if kv.key_group_of(key) in mine:
            kv["counts"][key] = value
            kv["texts"][key] = str(value)
            kv["timers"].move(key, value + 1)


def values(kv: sk.KVProvider) -> dict[str, set[Any]]:
    """For each state, the values that fill() has put, and the number of entries."""
    return {
        "counts": {*kv["counts"].values(), len(kv["counts"])},
        "texts": {*kv["texts"].values(), str(len(kv["texts"]))},
        "timers": {*(due for dues in kv["timers"].values() for due in dues)},
    }


def filled(value: int, count: int = len(KEYS)) -> dict[str, set[Any]]:
    if not count:
        return {"counts": {0}, "texts": {"0"}, "timers": set()}
    return {
        "counts": {value, count},
        "texts": {str(value), str(count)},
        "timers": {value + 1},
    }


def owned_keys(kv: sk.KVProvider, groups: Sequence[int]) -> list[str]:
    return [key for key in KEYS if kv.key_group_of(key) in groups]


# ---- What commit() takes


def test_memory_has_nothing_to_commit_to(stack: ExitStack) -> None:
    kv = stack.enter_context(sk.open("memory:"))
    for call in (kv.commit, kv.rollback, lambda: kv.commit({"offset": 1})):
        with pytest.raises(CommitError, match=r"rocksdb:.*redis://.*checkpoint"):
            call()
    assert kv.committed is None
    assert kv.positions == []
    kv.flush()  # has nothing to do


BAD: list[Any] = [
    {1: "a key that is no str"},
    {"a": (1, 2)},
    {"a": {1, 2}},
    {"a": b"bytes"},
    {"a": float("nan")},
    {"a": float("inf")},
    {"a": object()},
    ["no dict"],
    "text",
    0,
]


@pytest.mark.parametrize("metadata", BAD, ids=range(len(BAD)))
def test_metadata_that_is_no_json_is_refused_and_nothing_is_committed(
    url: str, metadata: Any
) -> None:
    kv = opened(url)
    fill(kv, 1)
    kv.commit({"at": 1})
    fill(kv, 2)
    with pytest.raises(ArgumentError, match="JSON"):
        kv.commit(metadata)
    assert kv.committed == {"at": 1}
    assert values(kv) == filled(2)
    kv._let_go()
    kv = opened(url)
    assert (values(kv), kv.committed) == (filled(1), {"at": 1})
    kv.close()


ODD: list[Any] = [
    {},
    {"a": 2**70, "b": -(2**70)},
    {"a": "\ud800"},
    {"\ud800": 1},
    {"a": "\0"},
    {"a": 1e308, "b": -0.0, "c": 5e-324},
    {"a": [[[{"b": None}]]], "": True},
    {"offsets": {str(at): at for at in range(1000)}},
]


@pytest.mark.parametrize("metadata", ODD, ids=range(len(ODD)))
def test_metadata_comes_back_as_it_was_given_or_is_refused(url: str, metadata: Any) -> None:
    kv = opened(url)
    fill(kv, 1)
    try:
        kv.commit(metadata)
    except ArgumentError:
        assert kv.committed is None
        kv._let_go()
        kv = opened(url)
        assert (values(kv), kv.committed) == (filled(0, 0), None)
    else:
        assert kv.committed == metadata
        kv._let_go()
        kv = opened(url)
        assert (values(kv), kv.committed) == (filled(1), metadata)
    kv.close()


def test_what_was_given_and_what_is_returned_are_copies(url: str) -> None:
    kv = opened(url)
    given = {"offsets": [1, 2]}
    kv.commit(given)
    given["offsets"].append(3)
    found = kv.committed
    assert found == {"offsets": [1, 2]}
    found["offsets"].append(4)
    assert kv.committed == {"offsets": [1, 2]}
    kv.close()
    kv = opened(url)
    assert kv.committed == {"offsets": [1, 2]}
    kv.close()


def test_flush_and_close_keep_the_metadata_and_commit_without_forgets_it(url: str) -> None:
    kv = opened(url)
    assert kv.committed is None
    fill(kv, 1)
    kv.commit({"at": 1})
    fill(kv, 2)
    kv.flush()
    assert kv.committed == {"at": 1}
    fill(kv, 3)
    kv.close()
    kv = opened(url)
    assert (values(kv), kv.committed) == (filled(3), {"at": 1})
    kv.commit()
    assert kv.committed is None
    kv._let_go()
    kv = opened(url)
    assert (values(kv), kv.committed) == (filled(3), None)
    kv.close()


@pytest.mark.parametrize("has_position", [False, True])
@pytest.mark.parametrize("is_raised", [False, True])
def test_a_with_statement_that_an_exception_leaves_commits_no_half_batch(
    url: str, has_position: bool, is_raised: bool
) -> None:
    with suppress(KeyError), opened(url) as kv:
        fill(kv, 1)
        kv.commit({"at": 1} if has_position else None)
        fill(kv, 2)
        spill(kv)
        fill(kv, 3, KEYS[:30])
        if is_raised:
            raise KeyError
    with opened(url) as kv:
        if is_raised and has_position:
            assert values(kv) == filled(1)
        else:
            assert {*kv["counts"].values()} == {2, 3}
        assert kv.committed == ({"at": 1} if has_position else None)


def test_a_position_of_an_earlier_process_counts_as_use_of_positions(url: str) -> None:
    with opened(url) as kv:
        fill(kv, 1)
        kv.commit({"at": 1})
    with suppress(KeyError), opened(url) as kv:
        fill(kv, 2)
        raise KeyError
    with opened(url) as kv:
        assert (values(kv), kv.committed) == (filled(1), {"at": 1})


# ---- Siblings


def test_siblings_have_positions_of_their_own_until_they_commit_as_one(url: str) -> None:
    kv = opened(url)
    fill(kv, 1)
    kv.commit({"at": 1})
    (other,) = kv.split([RIGHT])
    fill(kv, 2)
    fill(other, 3)
    other.commit({"at": "right"})
    assert kv.committed == {"at": 1}
    assert other.committed == {"at": "right"}
    kv.commit({"at": "left"})
    fill(kv, 4)
    fill(other, 4)
    spill(other)
    kv.merge(other)
    for _ in range(2):
        with pytest.raises(CommitError, match=r"0-1 at .*left.*; 2-3 at .*right|2-3.*; 0-1"):
            _ = kv.committed
        assert sorted(kv.positions, key=str) == [
            ((LEFT,), {"at": "left"}),
            ((RIGHT,), {"at": "right"}),
        ]
        kv.rollback()
        texts = {key: kv["texts"][key] for key in KEYS}
        assert {texts[key] for key in owned_keys(kv, LEFT)} == {"2"}
        assert {texts[key] for key in owned_keys(kv, RIGHT)} == {"3"}
        kv.flush()  # keeps the position of each
        for part in {kv, other}:
            part._let_go()
        kv = other = opened(url)
    kv.commit({"at": 5})
    assert kv.committed == {"at": 5}
    kv.close()


def test_key_groups_at_the_same_position_are_at_one(url: str) -> None:
    kv = opened(url)
    (other,) = kv.split([RIGHT])
    kv.commit({"a": 1, "b": 2})
    other.commit({"b": 2, "a": 1})
    kv.merge(other)
    assert kv.committed == {"a": 1, "b": 2}
    assert kv.positions == [((range(4),), {"a": 1, "b": 2})]
    kv.close()


def test_records_that_others_have_made_obsolete_are_deleted(url: str) -> None:
    """However often key-groups are shared out anew, a home has only a few records."""
    kv = opened(url)
    rng = random.Random(5)
    ledger = kv._residence.ledger
    assert ledger is not None
    for turn in range(30):
        fill(kv, turn, KEYS[:5] if turn % 3 else [])
        part = rng.sample(range(4), rng.randrange(1, 4))
        (other,) = kv.split([part])
        kv.commit({"at": turn})
        other.commit({"at": -turn})
        kv.merge(other)
        other.close()
        kv.flush()
    kv.commit({"at": "end"})
    assert len([*ledger.home.load(PENDING - 1, 0)]) == 1
    kv.close()


def test_two_siblings_that_commit_at_once_do_not_undo_each_other(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One finds the other's commit half done. It waits for it, and must not do it again."""
    monkeypatch.setattr(commits, "_COMMIT_BYTES_MAX", 100)
    monkeypatch.setattr(commits, "_COMMIT_BYTES_MIN", 100)
    kv = opened(url)
    fill(kv, 1)
    kv.commit({"at": 1})
    (other,) = kv.split([RIGHT])
    for part in (kv, other):
        part["texts"].clear()
        fill(part, 2)
        spill(part)
    is_rolling, may_go = threading.Event(), threading.Event()
    move = Ledger._move

    def wait_and_move(self: Ledger, roll: Any) -> None:
        if not is_rolling.is_set():
            is_rolling.set()
            assert may_go.wait(SECONDS_MAX)
        move(self, roll)

    waits = threading.Event()
    settle = Ledger.settle

    def say_and_settle(self: Ledger) -> None:
        if is_rolling.is_set():
            waits.set()
        settle(self)

    monkeypatch.setattr(Ledger, "_move", wait_and_move)
    monkeypatch.setattr(Ledger, "settle", say_and_settle)
    first = threading.Thread(target=kv.commit, args=[{"at": "left"}])
    second = threading.Thread(target=other.commit, args=[{"at": "right"}])
    first.start()
    assert is_rolling.wait(SECONDS_MAX)
    second.start()
    assert waits.wait(SECONDS_MAX)
    may_go.set()
    first.join(SECONDS_MAX)
    second.join(SECONDS_MAX)
    kv.merge(other)
    spill(kv)
    assert values(kv) == filled(2)
    kv._let_go()
    other._let_go()
    kv = opened(url)
    assert values(kv) == filled(2)
    kv.close()


# ---- Rollback


def test_rollback_brings_back_entries_timers_and_what_was_cleared(url: str) -> None:
    kv = opened(url)
    fill(kv, 1)
    kv.commit({"at": 1})
    for is_spilled in (False, True):
        fill(kv, 2)
        for key in KEYS[::3]:
            kv["counts"].discard(key)
            kv["timers"].cancel(key)
        kv["texts"].clear()
        if is_spilled:
            spill(kv)
            assert pending_rows(kv)
            kv["texts"]["new"] = "x"
        kv.rollback()
        assert values(kv) == filled(1)
        assert kv["timers"].next_due == 2
        assert [kv["counts"][key] for key in KEYS] == [1] * len(KEYS)
        assert kv.committed == {"at": 1}
    assert kv["timers"].pop_due(100)
    kv.rollback()
    assert len(kv["timers"].pop_due(100)) == len(KEYS)
    kv._let_go()
    kv = opened(url)
    assert values(kv) == filled(1)
    kv.close()


def test_rollback_without_a_commit_leaves_nothing_but_the_states(url: str) -> None:
    kv = opened(url)
    fill(kv, 1)
    spill(kv)
    kv.rollback()
    assert values(kv) == filled(0, 0)
    fill(kv, 2)
    kv.commit({"at": 2})
    kv.rollback()
    assert values(kv) == filled(2)
    kv.close()


def test_key_groups_that_came_after_the_commit_are_as_they_came(url: str) -> None:
    memory = opened("memory:", owned=RIGHT)
    kv = opened(url, owned=LEFT)
    fill(kv, 1)
    fill(memory, 2)
    kv.commit({"at": 1})
    kv.merge(memory)
    fill(kv, 3)
    spill(kv)
    kv.rollback()
    assert {kv["counts"][key] for key in owned_keys(kv, LEFT)} == {1}
    assert {kv["counts"][key] for key in owned_keys(kv, RIGHT)} == {2}
    assert kv.positions == [((LEFT,), {"at": 1})]
    kv.close()
    memory.close()


def test_key_groups_that_went_after_the_commit_do_not_come_back(url: str) -> None:
    memory = opened("memory:", owned=())
    kv = opened(url)
    fill(kv, 1)
    kv.commit({"at": 1})
    fill(kv, 2)
    spill(kv)
    (part,) = kv.split([RIGHT])
    memory.merge(part)
    part.close()
    kv.rollback()
    assert {*kv["counts"].values()} == {1}
    assert len(kv["counts"]) == len(owned_keys(kv, LEFT))
    with pytest.raises(NotOwnedError):
        kv["counts"][owned_keys(kv, RIGHT)[0]]
    kv._let_go()
    kv = opened(url)
    assert {*kv["counts"]} == {*owned_keys(kv, LEFT)}
    assert kv.positions == [((LEFT,), {"at": 1})]
    assert {*memory["counts"].values()} == {2}
    kv.close()
    memory.close()


# ---- During a hand-over to another process (here: to a provider that knows only the address)


@pytest.fixture
def handing_over(url: str, stack: ExitStack) -> tuple[sk.KVProvider, sk.KVProvider, Any]:
    """Left and right were committed at 1 and are at 2; right is being handed over."""
    kv, target = opened(url), opened("memory:", owned=())
    stack.callback(target.close)
    fill(kv, 1)
    kv.commit({"at": 1})
    fill(kv, 2)
    spill(kv)
    fill(kv, 2, KEYS[::2])  # in part here, in part there
    address = kv.serve("127.0.0.1:0", token=TOKEN).address
    arrival = target.fetch_from(address, key_groups=RIGHT, strategy="on_demand", token=TOKEN)
    return kv, target, arrival


def test_rollback_during_a_hand_over_leaves_alone_what_is_on_its_way(
    handing_over: tuple[sk.KVProvider, sk.KVProvider, Any], url: str
) -> None:
    kv, target, arrival = handing_over
    first, *_ = owned_keys(kv, RIGHT)
    assert target["counts"][first] == 2
    kv.rollback()
    for _ in range(2):
        assert {*kv["counts"].values()} == {1}
        assert {*kv["counts"]} == {*owned_keys(kv, LEFT)}
        with pytest.raises(NotOwnedError):
            kv["counts"][first]
        arrival.wait(SECONDS_MAX)
        assert {*target["texts"].values()} == {"2"}
        assert {*target["texts"]} == {*owned_keys(kv, RIGHT)}
        assert len(target["timers"]) == len(owned_keys(kv, RIGHT))
        kv.rollback()
    kv.close()


def test_commit_during_a_hand_over_takes_along_what_may_come_back(
    handing_over: tuple[sk.KVProvider, sk.KVProvider, Any], url: str
) -> None:
    kv, _, arrival = handing_over
    fill(kv, 3)
    kv.commit({"at": 3})
    arrival.give_back()
    assert kv.key_groups == (range(4),)
    for _ in range(2):
        assert {kv["counts"][key] for key in owned_keys(kv, LEFT)} == {3}
        assert {kv["counts"][key] for key in owned_keys(kv, RIGHT)} == {2}
        assert len(kv["timers"]) == len(KEYS)
        kv.rollback()
    kv._close_peer()
    kv._let_go()
    kv = opened(url)
    assert {kv["counts"][key] for key in owned_keys(kv, LEFT)} == {3}
    assert {kv["counts"][key] for key in owned_keys(kv, RIGHT)} == {2}
    kv.close()


def test_what_comes_back_after_a_rollback_is_as_it_went_and_can_be_rolled_back(
    handing_over: tuple[sk.KVProvider, sk.KVProvider, Any], url: str
) -> None:
    kv, _, arrival = handing_over
    kv.rollback()
    arrival.give_back()
    assert {kv["counts"][key] for key in owned_keys(kv, LEFT)} == {1}
    assert {kv["counts"][key] for key in owned_keys(kv, RIGHT)} == {2}
    kv.rollback()
    assert values(kv) == filled(1)
    assert kv.committed == {"at": 1}
    kv.close()


# ---- Checkpoints beside commits


@pytest.fixture
def held_attempt(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Checkpoints freeze the state at once, but read it only when the event is set."""
    may_write = threading.Event()
    enter = Attempt.__enter__

    def wait_and_enter(self: Attempt) -> Attempt:
        assert may_write.wait(SECONDS_MAX)
        return enter(self)

    monkeypatch.setattr(Attempt, "__enter__", wait_and_enter)
    yield may_write
    may_write.set()


def restored(place: Path) -> dict[str, set[Any]]:
    with sk.restore(str(place), lazy=False) as kv:
        kv.value("counts", int, default=0)
        kv.value("texts", str)
        kv.timers("timers")
        return values(kv)


@pytest.mark.parametrize("way", ["rollback", "commit", "clear and commit", "phases"])
def test_a_checkpoint_has_the_moment_at_which_it_was_taken(
    url: str,
    way: str,
    tmp_path: Path,
    held_attempt: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "phases":
        monkeypatch.setattr(commits, "_COMMIT_BYTES_MAX", 100)
        monkeypatch.setattr(commits, "_COMMIT_BYTES_MIN", 100)
    kv = opened(url)
    fill(kv, 1)
    kv.commit({"at": 1})
    if way != "rollback":
        kv["texts"].clear()
        kv["counts"].clear()
    fill(kv, 2)
    spill(kv)
    assert pending_rows(kv)
    job = kv.checkpoint_async(tmp_path / "checkpoints")
    if way == "rollback":
        kv.rollback()
        assert values(kv) == filled(1)
    else:
        if way == "clear and commit":
            kv["texts"].clear()
        kv.commit({"at": 2})
        fill(kv, 3)
        spill(kv)
        kv.commit({"at": 3})
    held_attempt.set()
    job.wait(SECONDS_MAX)
    assert restored(tmp_path / "checkpoints") == filled(2)
    kv.close()


def test_the_next_checkpoint_after_a_rollback_has_what_was_rolled_back_to(
    url: str, tmp_path: Path
) -> None:
    """It is based on a checkpoint whose state was undone."""
    kv = opened(url)
    place = tmp_path / "checkpoints"
    fill(kv, 1)
    kv.commit({"at": 1})
    fill(kv, 2)
    kv["texts"]["extra"] = "x"
    taken = kv.checkpoint(place)
    kv.rollback()
    following = kv.checkpoint(place)
    assert following.manifest.base == taken.number
    assert restored(place) == filled(1)
    fill(kv, 3)
    spill(kv)
    kv.checkpoint(place)
    kv.rollback()
    fill(kv, 4, KEYS[:10])
    spill(kv)
    kv.checkpoint(place)
    with sk.restore(str(place), lazy=False) as found:
        counts = found.value("counts", int, default=0)
        assert dict(counts.items()) == {key: 4 if key in KEYS[:10] else 1 for key in KEYS}
    kv.close()


# ---- Reading while a commit moves rows


def test_a_scan_misses_nothing_that_a_commit_moves_meanwhile(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a state that was cleared: rows in place count again once the commit is made."""
    monkeypatch.setattr("statekit.homes.rocksdb._PAGE_ROWS", 2)
    for bytes_max in (1 << 20, 100):
        monkeypatch.setattr(commits, "_COMMIT_BYTES_MAX", bytes_max)
        monkeypatch.setattr(commits, "_COMMIT_BYTES_MIN", bytes_max)
        kv = opened(url)
        fill(kv, 1)
        kv.commit({"at": 1})
        kv["counts"].clear()
        fill(kv, 2)
        spill(kv)
        for turn in range(0, len(KEYS), 7):
            kv["counts"].clear()
            fill(kv, turn)
            spill(kv)
            scan = iter(kv["counts"].items())
            found = dict([next(scan) for _ in range(turn)])
            kv.commit({"at": turn})
            found |= dict(scan)
            assert found == dict.fromkeys(KEYS, turn)
        kv.close()


def test_a_scan_that_begins_before_a_commit_sees_all(url: str) -> None:
    """The commit comes between the look at what is pending and the look at the home."""
    kv = opened(url)
    ledger = kv._residence.ledger
    assert ledger is not None
    fill(kv, 1)
    kv.commit()
    kv["counts"].clear()
    fill(kv, 2)
    spill(kv)
    home, load = ledger.home, ledger.home.load
    is_done = False

    def commit_first(leaf: int, state: int) -> Any:
        nonlocal is_done
        if not is_done:
            is_done = True
            kv.commit()
        return load(leaf, state)

    home.load = commit_first  # type: ignore[method-assign]
    assert dict(kv["counts"].items()) == dict.fromkeys(KEYS, 2)
    del home.load  # type: ignore[method-assign]
    kv.close()


# ---- Homes that fail


def test_rollback_works_on_a_home_that_can_only_be_read(tmp_path: Path) -> None:
    """On a full disk, pending rows cannot be deleted, but do no harm."""
    inner, place, faults = f"disk:{uuid.uuid4().hex}", uuid.uuid4().hex, Faults()
    FaultyHome.places[place] = (inner, faults)
    kv = opened(f"faulty:{place}?memory=256KiB")
    fill(kv, 1)
    kv.commit({"at": 1})
    fill(kv, 2)
    spill(kv)
    clear_leaves = FaultyHome.clear_leaves

    def full(self: FaultyHome, leaves: range, states: int) -> None:
        raise HomeError("the disk is full, as the test wants.")

    FaultyHome.clear_leaves = full  # type: ignore[method-assign]
    try:
        kv.rollback()
    finally:
        FaultyHome.clear_leaves = clear_leaves  # type: ignore[method-assign]
    assert values(kv) == filled(1)
    fill(kv, 3, KEYS[:5])
    spill(kv)
    kv.commit({"at": 3})
    kv._let_go()
    kv = opened(f"faulty:{place}?memory=256KiB")
    assert {*kv["counts"].values()} == {1, 3}
    kv.close()


def test_an_arrival_whose_record_may_be_there_does_not_void_a_later_one(url: str) -> None:
    """The write of the record fails after it was done; then some of the key-groups come."""
    place, faults = uuid.uuid4().hex, Faults()
    FaultyHome.places[place] = (url.replace("&memory=256KiB", ""), faults)
    faulty = f"faulty:{place}?memory=256KiB"
    kv, memory = opened(faulty, owned=[0]), opened("memory:", owned=[1, 2, 3])
    fill(kv, 1)
    fill(memory, 2)
    kv.commit({"at": 1})
    faults.arm(1, "late")
    with pytest.raises(HomeError):
        kv.merge(memory)
    assert len(faults.calls) == 1 or faults.calls[:1] == ["write"]
    faults.is_on = False
    (part,) = memory.split([[1]])
    kv.merge(part)
    kv._let_go()
    kv = opened(faulty)
    assert {*kv["counts"]} == {*owned_keys(kv, [0, 1])}
    kv.close()
    memory.close()
    part.close()


def test_a_home_lasts_for_more_generations_than_four_bytes_count(url: str) -> None:
    """Clearing a state uses up one per leaf, so 2^32 would last for a few days only."""
    kv = opened(url)
    fill(kv, 1)
    kv.commit({"at": 1})
    ledger = kv._residence.ledger
    assert ledger is not None
    ledger._generation = 2**32 - 3
    kv["texts"].clear()
    fill(kv, 2)
    spill(kv)
    assert values(kv) == filled(2)
    kv.commit({"at": 2})
    kv["texts"].clear()
    fill(kv, 3)
    spill(kv)
    kv._let_go()
    kv = opened(url)
    assert (values(kv), kv.committed) == (filled(2), {"at": 2})
    kv.close()


# ---- Homes of version 1


@pytest.fixture
def old_home(tmp_path: Path) -> str:
    """A home that was written and closed by the code before commits (80a36bf).

    40 keys: counts, texts (by int), lists, fresh (with a time to live of 100 s) and timers, each
    the number of its key, but for counts["key-0"], which was 100 when it was closed.
    """
    with tarfile.open(GOLDEN / "home-v1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return f"rocksdb:{tmp_path}/home-v1?sync=0&memory=256KiB"


def open_old(url: str) -> tuple[sk.KVProvider, dict[str, dict[Any, Any]]]:
    kv = sk.open(url)
    kv.advance_watermark(1000)
    kv.value("counts", int, default=0)
    kv.value("texts", str, key=int)
    kv.list("lists", int)
    kv.value("fresh", int, ttl=sk.TTL(100.0, time="event"))
    kv.timers("timers")
    found: dict[str, dict[Any, Any]] = {name: dict(kv[name].items()) for name in kv.schemas}
    found["lists"] = {key: list(items) for key, items in found["lists"].items()}
    return kv, found


def test_a_home_of_version_1_is_at_its_rows_and_can_be_committed_from_there(old_home: str) -> None:
    keys = [f"key-{at}" for at in range(40)]
    numbers = {key: at for at, key in enumerate(keys)}
    expected: dict[str, dict[Any, Any]] = {
        "counts": numbers | {"key-0": 100},
        "texts": {at: f"text {at}" for at in range(40)},
        "lists": {key: [at] for key, at in numbers.items()},
        "fresh": numbers,
        "timers": {key: (at + 1,) for key, at in numbers.items()},
    }
    kv, found = open_old(old_home)
    assert (kv.key_group_count, kv.subgroups) == (4, 2)
    assert (found, kv.committed) == (expected, None)
    kv["counts"]["key-1"] = 7
    kv["texts"].clear()
    spill(kv)
    kv.rollback()
    kv._let_go()
    kv, found = open_old(old_home)
    assert (found, kv.committed) == (expected, None)
    kv["counts"]["key-1"] = expected["counts"]["key-1"] = 7
    kv["texts"].clear()
    expected["texts"].clear()
    kv.commit({"at": 1})
    kv._let_go()
    kv, found = open_old(old_home)
    assert (found, kv.committed) == (expected, {"at": 1})
    kv.close()
