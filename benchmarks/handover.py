"""One hand-over while records flow (flow.py), and how long records waited.

before    an equally long stretch, as far as there is one, in which nothing is handed over
during    from the call that begins the hand-over until all of the state is there; a record
          belongs to it if it was neither counted before nor due after
moved     records of key-groups that are handed over; the others have *stayed*
"""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import numpy as np
from flow import MOVING, STAYING, Flow, Generator, Tape, Worker
from migration_worker import COUNT_BYTES, Remote

STOP = "stop_restore"  # stop, checkpoint, restore both halves, go on
STRATEGIES = (
    "seamless",
    "fluid",
    "batched",
    "prioritised",
    "order_unaware",
    "all_at_once",
    STOP,
)
WAITS = ("stopped", "aligning", "shut", "queued", "wire", "decode")  # see migration.waits
SLOT_S = 0.05  # of the plot
SHORT_S, STEP_S = 0.1, 0.01  # a stretch whose throughput is looked at; how far it is moved on
AFTER_S = 1.0
START_S = 0.3  # from the last preparation to the first record
CHECKED = 200_000  # counts that are compared


@dataclass(frozen=True)
class Setting:
    """What is the same for all strategies of one comparison."""

    state_bytes: int
    rate: float
    before_s: float  # of seamless; the others are compared with each other
    warm_s: float = 1.0  # at the beginning, which counts for nothing
    seconds_max: float = 180.0

    @property
    def keys(self) -> int:
        return self.state_bytes // COUNT_BYTES


@dataclass
class Outcome:
    """Times in ms, throughput in records/s."""

    seconds: float  # that the hand-over took
    bytes: int  # of blocks
    waits: dict[str, float]  # seconds that callers waited, by what for
    moved_p99: float
    moved_longest: float
    stayed_p99: float
    stayed_longest: float
    p99: float  # of all records
    longest: float
    p99_before: float
    longest_before: float
    before_s: float  # how long the stretch was; shorter than the hand-over if that took longer
    worst: float  # throughput of the worst 100 ms
    worst_before: float
    slots_moved: list[float]  # the longest wait of each slot of times at which records were due
    slots_stayed: list[float]
    slots_from: float  # seconds from the beginning of the hand-over to that of the first slot

    def __str__(self) -> str:
        return (
            f"took {self.seconds:.1f} s; longest {self.longest:.1f} ms (moved "
            f"{self.moved_longest:.1f}, stayed {self.stayed_longest:.1f}, before "
            f"{self.longest_before:.1f}); p99 {self.p99:.1f} (moved {self.moved_p99:.1f}, stayed "
            f"{self.stayed_p99:.1f}, before {self.p99_before:.1f}); worst 100 ms "
            f"{self.worst:,.0f}/s (before {self.worst_before:,.0f})"
        )


def hand_over(setting: Setting, strategy: str, seed: int, place: str) -> Outcome:
    """place: a folder for checkpoints, on a real disk."""
    with ExitStack() as stack:
        shared = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        flow = Flow(shared, setting.keys, setting.rate, setting.seconds_max)
        generator, old, new = (
            stack.enter_context(Remote(kind)) for kind in (Generator, Worker, Worker)
        )
        generator.prepare(flow, seed)
        later = old.begin("prepare", flow, "old", True)
        new_address = new.prepare(flow, "new", False)
        assert new_address
        address = later()
        old.connect("new")
        new.connect("")
        began = monotonic() + START_S
        generator.start(("old", "new"), began)
        old.start(1)
        new.start(2)
        before_s = setting.before_s if strategy == "seamless" else min(3.0, setting.before_s)
        sleep(max(0.0, began + setting.warm_s + before_s - monotonic()))
        if strategy == STOP:
            told = _restart(old, new, place)
        else:
            told = new.take_over(address, strategy, {})
        sleep(AFTER_S)
        count = generator.stop()
        old.finish()
        new.finish()
        tape = Tape(flow)
        if count == flow.records_max:
            raise SystemExit(f"{strategy} took longer than {setting.seconds_max} s. Give it more.")
        _check(tape, count, old, new, seed)
        return _outcome(setting, tape, count, began, told)


def _restart(old: Remote, new: Remote, place: str) -> dict[str, Any]:
    """What engines without migration do."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        began = old.pause()
        new.pause()
        old.checkpoint(folder)
        later = [
            old.begin("restore", folder, STAYING),
            new.begin("restore", folder, MOVING),
        ]
        for done in later:
            done()
        new.resume()
        ended = old.resume()
        waits = dict.fromkeys(WAITS, 0.0) | {"stopped": ended - began}
        return {"began": began, "ended": ended, "bytes": 0, "waits": waits}


def _check(tape: Tape, count: int, old: Remote, new: Remote, seed: int) -> None:
    """Every record was counted, and those of some keys exactly once."""
    lost = int((tape.done[:count] == 0).sum())
    keys = tape.keys_of(np.arange(count))
    some = np.unique(keys)
    if len(some) > CHECKED:
        some = np.unique(np.concatenate((some[: CHECKED // 2], some[:: len(some) // CHECKED + 1])))
    expected = np.bincount(np.searchsorted(some, keys[np.isin(keys, some)]), minlength=len(some))
    wrong = int((old.counts_of(some) + new.counts_of(some) != expected).sum())
    if lost or wrong:
        raise SystemExit(f"{lost} records were not counted, {wrong} counts are wrong ({seed=})")


def _outcome(
    setting: Setting, tape: Tape, count: int, first: float, told: dict[str, Any]
) -> Outcome:
    due = first + np.arange(count) / setting.rate
    done = np.asarray(tape.done[:count])
    waits = 1000 * (done - due)
    is_moving = tape.groups_of(np.arange(count)) >= MOVING.start
    began, ended = told["began"], told["ended"]
    since = max(first + setting.warm_s, began - (ended - began))
    is_during = (done >= began) & (due <= ended)
    is_before = (due >= since) & (done < began)
    moved, stayed = waits[is_during & is_moving], waits[is_during & ~is_moving]
    during, before = waits[is_during], waits[is_before]
    done.sort()
    at = int(setting.rate * setting.warm_s)
    return Outcome(
        ended - began,
        told["bytes"],
        told["waits"],
        _p99(moved),
        float(moved.max()),
        _p99(stayed),
        float(stayed.max()),
        _p99(during),
        float(during.max()),
        _p99(before),
        float(before.max()),
        began - since,
        _worst(done, began, ended),
        _worst(done, since, began),
        _slots(waits[at:][is_moving[at:]], due[at:][is_moving[at:]]),
        _slots(waits[at:][~is_moving[at:]], due[at:][~is_moving[at:]]),
        float(due[at] - began),
    )


def _p99(waits: np.ndarray) -> float:
    return float(np.percentile(waits, 99))


def _worst(done: np.ndarray, since: float, until: float) -> float:
    """Records per second of the worst 100 ms between two times."""
    starts = np.arange(since, max(since + STEP_S, until - SHORT_S), STEP_S)
    counts = np.searchsorted(done, starts + SHORT_S) - np.searchsorted(done, starts)
    return float(counts.min()) / SHORT_S


def _slots(waits: np.ndarray, due: np.ndarray) -> list[float]:
    """The longest wait of each slot, in ms; slots begin with the first record."""
    if not len(waits):
        return []
    slots = ((due - due[0]) / SLOT_S).astype(np.int64)
    firsts = np.searchsorted(slots, np.arange(slots[-1] + 1))
    return [round(one, 2) for one in np.maximum.reduceat(waits, firsts).tolist()]
