"""What hand-overs cost beside the waits of records: bytes, memory, and calls.

Each function measures one line of what is promised, and returns figures. The processes are Remotes
(migration_worker.py).
"""

import ctypes
import gc
import threading
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, perf_counter, sleep
from typing import Any

import numpy as np
from beyond_memory import memory_figure
from compare import Contender, measure, ratio
from flow import MOVING, TOKEN
from migration_worker import COUNT_BYTES, KEY_GROUPS, BareChannel, Meter, Remote, Source, fill

import statekit as sk
from statekit.errors import NotOwnedError

CHANGED_SHARE = 0.01  # of the keys, per second
CHANGES_S = 0.02  # between two batches of changes
PACE = 100_000_000  # bytes per second
SMALL_KEYS = 1000  # of a small key-group
PING_BYTES = 17  # of a frame of HTTP/2 that asks whether somebody is there, or answers
PING_TYPE = 6


# ---- Bytes and memory of a copy


class ChangingSource(Source):
    """An old owner that goes on changing its state."""

    def change_always(self, n: int) -> None:
        """1 % of n keys per second, any of them, until it is handed over."""
        self._is_over = threading.Event()
        self._changer = threading.Thread(target=self._change, args=(n,))
        self._changer.start()

    def _change(self, n: int) -> None:
        rng = np.random.default_rng(7)
        counts = self.kv.value("counts", int, key=int)
        began, done = monotonic(), 0
        while not self._is_over.wait(CHANGES_S):
            due = int((monotonic() - began) * CHANGED_SHARE * n)
            keys = rng.integers(0, n, due - done)
            owned = np.isin(
                np.asarray(self.kv.key_groups_of(keys, key=int)),
                [group for part in self.kv.key_groups for group in part],
            )
            with suppress(NotOwnedError):  # it has gone since we looked: the rest is left out
                counts.add_many(keys[owned])
            done = due

    def rest(self) -> None:
        self._is_over.set()
        self._changer.join()


class Taker:
    """A new owner that looks at its memory."""

    def take(self, address: str, strategy: str, options: dict[str, Any]) -> dict[str, float]:
        with sk.open("memory:", owned=()) as kv:
            kv.value("counts", int, key=int)
            kv.serve(token=TOKEN)  # so that gRPC is here before memory is looked at
            before = memory_figure("VmRSS")
            with open("/proc/self/clear_refs", "w") as refs:
                refs.write("5")  # the peak is measured from here on
            began = perf_counter()
            migration = kv.fetch_from(address, key_groups=MOVING, strategy=strategy, **options)
            migration.wait()
            took = perf_counter() - began
            peak = memory_figure("VmHWM") - before
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            return {
                "seconds": took,
                "bytes": migration.progress.bytes,
                "peak": peak,
                "state": kv.metrics().bytes,
                "resident": memory_figure("VmRSS") - before,
            }


def copy(state_bytes: int) -> dict[str, float]:
    """`seamless` at a pace of 100 MB/s, while keys change; beside all at once, while none does."""
    n = state_bytes // COUNT_BYTES
    found: dict[str, float] = {}
    for strategy, options in (("all_at_once", {}), ("seamless", {"pace": PACE})):
        with Remote(ChangingSource) as source, Remote(Taker) as taker:
            meter = Meter(source.fill(n, True, TOKEN))
            if strategy == "seamless":
                source.change_always(n)
            told = taker.take(meter.address, strategy, options)
            if strategy == "seamless":
                source.rest()
            meter.close()
            found |= {f"{strategy}, {name}": figure for name, figure in told.items()}
            found[f"{strategy}, wire"] = meter.bytes
    return found


# ---- One small key-group


def small(rounds: int) -> dict[str, list[float]]:
    """Microseconds: the median of all key-groups but the first two, in each round.

    here: until fetch_from() has returned and everything is here. told: until the old owner knows.
    """
    found: dict[str, list[float]] = {"here": [], "told": [], "bare": []}
    with Remote(Source) as source:
        bare = BareChannel(source.serve_bytes())
        for _ in range(rounds):
            address = source.fill(SMALL_KEYS * len(KEY_GROUPS), True, TOKEN)
            took: dict[str, list[float]] = {name: [] for name in found}
            with sk.open("memory:", owned=()) as kv:
                kv.value("counts", int, key=int)
                for group in KEY_GROUPS:
                    began = perf_counter()
                    arrival = kv.fetch_from(address, key_groups=[group], token=TOKEN)
                    arrival.wait_for(lambda arrival=arrival: arrival.done)
                    here = perf_counter()
                    arrival.wait()
                    told = perf_counter()
                    bare.get(arrival.progress.bytes)
                    took["bare"].append(perf_counter() - told)
                    took["here"].append(here - began)
                    took["told"].append(told - began)
            for name, times in took.items():
                found[name].append(1e6 * float(np.median(times[2:])))
        bare.close()
    return found


# ---- Peers that have nothing to say to each other


class QuietMeter(Meter):
    """Counts bytes of frames that are not pings, too. (Only where nothing else is sent with them:
    a chunk that does not begin with a ping counts as a whole.)"""

    def __init__(self, address: str) -> None:
        self.said = 0
        super().__init__(address)

    def note(self, data: bytes) -> None:
        super().note(data)
        pings = len(data) // PING_BYTES
        is_ping = all(data[at * PING_BYTES + 3 :][:1] == bytes([PING_TYPE]) for at in range(pings))
        if len(data) % PING_BYTES or not is_ping:
            self.said += len(data)


class Neighbour:
    """A process that has taken a key-group from another one, and has served one to it."""

    def open(self) -> str:
        self.kv = sk.open("memory:", owned=range(1, len(KEY_GROUPS)))
        return self.kv.serve(token=TOKEN).address

    def take(self, address: str, group: int) -> None:
        self.kv.fetch_from(address, key_groups=[group]).wait()


@dataclass
class Quiet:
    ratios: list[float]  # of throughput: serving and connected, to alone
    bytes: int  # on the wire while that was measured
    said: int  # of them, not pings
    seconds: float


def quiet(n: int, rounds: int) -> Quiet:
    """add_many() of a provider that serves another process, which serves it, beside one alone.

    Providers change roles within a round, and are made anew in each: which memory they get matters
    more than what is measured.
    """
    ratios: list[float] = []
    bytes_sent = said = 0
    seconds = 0.0
    drawn = np.random.default_rng(3).integers(0, n, n // 5)
    for _ in range(rounds):
        both: list[float] = []
        with Remote(Neighbour) as neighbour:
            for serves in (0, 1):
                pair = [sk.open("memory:"), sk.open("memory:")]
                for kv in pair:
                    fill(kv, n, is_count=True)
                meters = _acquaint(pair[serves], neighbour)
                sleep(0.5)  # what the hand-overs left to be said
                before = [(meter.bytes, meter.said) for meter in meters]
                began = monotonic()
                own = drawn[np.asarray(pair[serves].key_groups_of(drawn, key=int)) > 1]
                times = measure(
                    [
                        Contender(
                            name,
                            lambda state, own=own: state.add_many(own),
                            lambda kv=kv: kv.value("counts", int, key=int),
                            len(own),
                        )
                        for name, kv in (("alone", pair[1 - serves]), ("serves", pair[serves]))
                    ],
                    9,
                )
                seconds += monotonic() - began
                both.append(ratio(times, "alone", "serves"))
                for meter, (all_before, said_before) in zip(meters, before, strict=True):
                    bytes_sent += meter.bytes - all_before
                    said += meter.said - said_before
                for kv in pair:
                    kv.close()
                for meter in meters:
                    meter.close()
        ratios.append(float(np.sqrt(both[0] * both[1])))
    return Quiet(ratios, bytes_sent, said, seconds)


def _acquaint(kv: sk.KVProvider, neighbour: Remote) -> list[QuietMeter]:
    """Each takes a key-group from the other: both serve, and both have a connection."""
    theirs = QuietMeter(neighbour.open())
    ours = QuietMeter(kv.serve(token=TOKEN).address)
    neighbour.take(ours.address, 0)
    kv.fetch_from(theirs.address, key_groups=[0]).wait()
    return [theirs, ours]
