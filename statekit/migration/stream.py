"""Streaming: leaves that the old owner sends by itself, taken in by a thread.

The participant numbers streams and says how much one may bring (open_stream, received); one that
broke off is opened again as long as something is missing (stream_ended). The stream gives way to
those who wait for single leaves.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter, sleep
from typing import TYPE_CHECKING

from statekit.errors import (
    DamagedError,
    HomeError,
    NotOwnedError,
    PeerError,
    PeerLostError,
    StateKitError,
)
from statekit.migration.fetch import Pieces, Steps
from statekit.protocol.calls import PieceKind, StreamCall
from statekit.protocol.messages import Accept
from statekit.turns import short_turns

if TYPE_CHECKING:
    from statekit.migration.arrival import Arrival
    from statekit.remote.channel import PeerStream

TARGET_SECONDS = 0.004  # that an answer may take; the stream gives way so that it does
PACED_SECONDS = 0.1  # after an answer was last asked for
PAUSE_SECONDS_MIN = 0.0005  # of the stream, after each leaf
PAUSE_SHARE = 3  # times as long as the leaf took, at most
RETRY_SECONDS = 1.0  # before a peer that was lost is asked again, or a home that failed
BATCH_BYTES_MAX = 4 << 20  # of leaves that wait for the others of their batch, with a home


class Streaming:
    """What an arrival brings by itself."""

    def __init__(self, arrival: "Arrival") -> None:
        self._arrival = arrival
        self._thread: threading.Thread | None = None
        self._pause_s = 0.0  # that it stands still at each leaf, so that others are answered

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Has a thread take in what the source sends; one that waits to try again does so now."""
        arrival = self._arrival
        with arrival.lock:
            if arrival.is_cut_off or not arrival.state.missing:
                return
            arrival.forget_error()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="statekit-arrival", daemon=True
                )
                self._thread.start()

    @short_turns()
    def _run(self) -> None:
        arrival, shell = self._arrival, self._arrival.shell
        first = arrival.due_soon() if arrival.strategy == "prioritised" else []
        accept = shell.open_stream(arrival.id)
        while accept is not None and not arrival.is_cut_off:
            before = arrival.state.done
            is_tried_again = True
            try:
                self._take(accept, tuple(leaf for leaf in first if leaf in arrival.state.missing))
                if arrival.state.missing and arrival.state.done == before:
                    self._ask_rest()
            except StateKitError as error:
                is_tried_again = self._may_retry(error)
            except Exception as error:  # nobody foresaw it, and nobody must wait for ever
                self._may_retry(
                    PeerError(
                        f"leaves from {arrival.source} cannot be taken in: {error!r}. Report this."
                    )
                )
                is_tried_again = False
            first = sorted(arrival.state.missing)
            accept = shell.stream_ended(arrival.id, accept.stream, is_tried_again)
        with arrival.lock:
            self._thread = None
            arrival.changed()
            is_asked = arrival.error is None  # again, while this thread was about to end
        if is_asked:
            self.start()

    def _may_retry(self, error: StateKitError) -> bool:
        """Tells who waits what the matter is; True after a while if the peer may come back.

        Or the home: what has come and could not be written there is sent again.
        """
        arrival = self._arrival
        if arrival.is_cut_off:
            return False
        with arrival.lock:
            arrival.set_error(error)
            if not isinstance(error, PeerLostError | HomeError):
                return False
            arrival.lock.wait_for(
                lambda: arrival.is_cut_off or arrival.error is None, RETRY_SECONDS
            )
        return True

    def _ask_rest(self) -> None:
        """The stream brought nothing, and something is missing: the source says why."""
        arrival = self._arrival
        loading = arrival.shell.loading
        if loading is not None:
            arrival.fetching.bring_each(sorted(arrival.state.missing), loading)
        arrival.reports.deliver()

    def _take(self, accept: Accept, first: tuple[int, ...]) -> None:
        arrival = self._arrival
        if not first and arrival.strategy != "prioritised":
            first = tuple(sorted(arrival.state.missing))
        batch: list[tuple[int, Steps]] = []
        batch_size = arrival.subgroups if arrival.strategy == "order_unaware_batched" else 1
        # What waits counts as taken in. With a home it must not be more than memory is to hold.
        batch_bytes_max = BATCH_BYTES_MAX if arrival.shell.has_home else None
        batch_bytes = 0
        call = StreamCall(arrival.id, arrival.generation, first)
        stream = arrival.channel.stream(call, credit=accept.credit)
        try:
            began = perf_counter()
            for leaf, steps, size in self._read_ahead(stream):
                if arrival.is_cut_off:
                    return
                arrival.forget_error()
                batch_bytes += size
                if steps is not None:
                    batch.append((leaf, steps))
                    is_full = batch_bytes_max is not None and batch_bytes >= batch_bytes_max
                    if is_full or len(batch) >= batch_size:
                        self._fill(batch)
                        batch_bytes = 0
                self._give_way(perf_counter() - began)
                began = perf_counter()
                credit = arrival.shell.received(arrival.id, accept.stream, size)
                if credit is not None:
                    stream.grant(credit.bytes_total)
            self._fill(batch)
        finally:
            stream.close()

    def _read_ahead(self, stream: "PeerStream") -> Iterator[tuple[int, Steps | None, int]]:
        """Leaves of a stream, received and checked by a thread while others are being decoded.

        Leaf, what to decode if that is complete, bytes. Both threads have about as much to do; how
        far this one is ahead is bounded by the credit that the stream has.
        """
        inbox: SimpleQueue[tuple[int, Steps | None, int] | StateKitError | None] = SimpleQueue()
        source = self._arrival.source

        def receive() -> None:
            try:
                for item in self._receive(stream):
                    inbox.put(item)
                inbox.put(None)
            except StateKitError as error:
                inbox.put(error)
            except BaseException as error:
                inbox.put(PeerError(f"a stream from {source} cannot be read: {error!r}."))
                raise

        threading.Thread(target=receive, name="statekit-receive", daemon=True).start()
        while (item := inbox.get()) is not None:
            if isinstance(item, StateKitError):
                raise item
            yield item

    def _receive(self, stream: "PeerStream") -> Iterator[tuple[int, Steps | None, int]]:
        arrival = self._arrival
        pieces = Pieces()
        for piece in stream:
            if piece.kind is not PieceKind.HERE:
                with suppress(NotOwnedError):
                    arrival.fetching.refused(piece)
                continue
            steps: Steps | None = None
            if pieces.add(piece, arrival.epoch_of(piece.leaf)):
                arrival.bytes_received += pieces.size
                with suppress(DamagedError):  # it is asked for again
                    steps = arrival.fetching.steps(piece, pieces.take())
            yield piece.leaf, steps, len(piece.blocks)

    def _fill(self, batch: list[tuple[int, Steps]]) -> None:
        loading = self._arrival.shell.loading
        for leaf, steps in batch:
            if loading is not None:
                loading.fill(leaf, steps, self._arrival)
        batch.clear()

    def _give_way(self, worked_s: float) -> None:
        """Lets those go first who wait: the slower they are answered, the longer it stands still.

        At most so many times as long as it has worked: the stream is what ends the waiting.
        """
        fetching = self._arrival.fetching
        is_paced = perf_counter() - fetching.asked_at <= PACED_SECONDS
        if self._arrival.strategy != "prioritised" or not is_paced:
            self._pause_s = 0.0
            return
        if fetching.answer_s > TARGET_SECONDS:
            self._pause_s = min(1.5 * self._pause_s + PAUSE_SECONDS_MIN, PAUSE_SHARE * worked_s)
        else:
            self._pause_s *= 0.8
        if self._pause_s > PAUSE_SECONDS_MIN:
            sleep(self._pause_s)
