"""Reports: a thread tells the old owner what it must know, and hears what changes who owns a leaf.

What is to be said is the participant's to know: that leaves are here (unreported), that others were
given back (unreturned). It is said again until it was answered. And of leaves of which entries are
in use, the rest is fetched (uncompleted).

What comes about leases, that leaves were taken back or a later generation has begun, waits here for
this thread: whoever hears it may hold locks that come after the provider's. Until then it has not
come, as far as the participant is concerned.
"""

import threading
from typing import TYPE_CHECKING

from statekit.errors import PeerError, StateKitError
from statekit.migration.stream import RETRY_SECONDS
from statekit.protocol.calls import FetchCall, GiveBackCall, InstalledCall, PieceKind
from statekit.protocol.messages import Fenced, GivenBack, Moved, Never, Released
from statekit.remote.security import unbelieved

if TYPE_CHECKING:
    from statekit.migration.arrival import Arrival

REPORTS_MAX = 1024  # leaves in one report
REPORT_SECONDS = 0.02  # that a report waits for others to come along


class Reports:
    """What an arrival tells its source."""

    def __init__(self, arrival: "Arrival") -> None:
        self._arrival = arrival
        self._heard: list[Moved | Fenced] = []  # and not delivered
        self._thread: threading.Thread | None = None
        self.is_idle = False  # the thread waits to be woken
        self._returning = threading.Lock()  # held by who tells what was given back
        self.is_done = False  # everything is here, the source knows, and so does the provider

    def start(self) -> None:
        arrival = self._arrival
        if self._thread is not None:
            return
        with arrival.lock:
            if self._thread is None and not arrival.is_closed:
                self._thread = threading.Thread(
                    target=self._run, name="statekit-reports", daemon=True
                )
                self._thread.start()

    def hear(self, message: Moved | Fenced) -> None:
        """Something that the participant is to know, when its locks can be had."""
        with self._arrival.lock:
            self._heard.append(message)
            self._arrival.changed()
        self.start()

    def forget_heard(self) -> None:
        """There is nobody any more who could have said something."""
        with self._arrival.lock:
            self._heard = []

    def deliver(self) -> None:
        """The participant learns what was heard."""
        arrival = self._arrival
        with arrival.lock:
            heard, self._heard = self._heard, []
        for message in heard:
            if isinstance(message, Fenced):
                arrival.shell.fence(message.generation)
        if moved := [message for message in heard if isinstance(message, Moved)]:
            arrival.shell.end_leases(arrival, moved)

    # ---- The thread

    def _run(self) -> None:
        """Until all is said and done."""
        arrival = self._arrival
        try:
            while self._wait():
                self._work()
            if not arrival.is_closed:
                arrival.shell.finish(arrival)
        finally:
            with arrival.lock:
                self._thread = None
                self.is_done = True
                arrival.changed()

    def _wait(self) -> bool:
        arrival = self._arrival
        with arrival.lock:
            self.is_idle = True  # first: who has something to say after this look wakes it
            arrival.lock.wait_for(self._has_work)
            self.is_idle = False
            if arrival.is_closed or (arrival.state.is_over and not self._heard):
                return False
            if arrival.state.missing:
                arrival.lock.wait(REPORT_SECONDS)  # others come along
            return True

    def _has_work(self) -> bool:
        arrival, state = self._arrival, self._arrival.state
        return bool(
            arrival.is_closed
            or state.is_over
            or state.installed
            or state.returned
            or self._heard
            or (state.partial and not arrival.streaming.is_running)
        )

    def _work(self) -> None:
        arrival = self._arrival
        try:
            self.deliver()
            self.report()
            self.send_returned()
            if not arrival.streaming.is_running:
                self._bring_rest()
        except Exception as error:  # also what nobody foresaw: it is tried again
            known = error if isinstance(error, StateKitError) else PeerError(repr(error))
            with arrival.lock:
                if arrival.error is None and not arrival.streaming.is_running:
                    arrival.set_error(known)
                arrival.lock.wait_for(lambda: arrival.is_closed, RETRY_SECONDS)

    # ---- What is said

    def report(self) -> None:
        """Tells the source which leaves are here, until it has let go of them."""
        arrival = self._arrival
        while not arrival.is_closed:
            leases = arrival.shell.unreported(arrival.id, REPORTS_MAX)
            if not leases:
                return
            arrival.shell.make_durable()  # what the source lets go of must be safe here
            call = InstalledCall(arrival.id, arrival.generation, leases)
            released = set(arrival.channel.installed(call))
            for leaf, epoch in leases:
                if (leaf, epoch) in released:
                    answer = Released(arrival.id, arrival.generation, 0, leaf, epoch)
                    arrival.shell.tell(arrival.source_name, answer)
            arrival.changed()
            if kept := [lease for lease in leases if lease not in released]:
                self._ask_why(kept)
                return  # other work comes first; these are said again

    def _ask_why(self, leases: list[tuple[int, int]]) -> None:
        """The source does not let go of leaves: it was told that we are dead, and took them back.

        Then they are not ours any more, whatever we have done with them. Or it has been started
        anew: then there is nothing that it could let go of. Or it is of a later generation.
        """
        arrival = self._arrival
        place, epochs = (arrival.id, arrival.generation, 0), dict(leases)
        for piece in arrival.channel.fetch(FetchCall(*place[:2], tuple(leases))):
            if piece.kind is PieceKind.MOVED and piece.epoch > epochs.get(piece.leaf, piece.epoch):
                with arrival.lock:
                    self._heard.append(Moved(*place, piece.leaf, piece.epoch, piece.to))
            elif piece.kind is PieceKind.NEVER:
                arrival.shell.tell(arrival.source_name, Never(*place, piece.leaf, piece.epoch))
            elif piece.kind is PieceKind.FENCED:
                if not arrival.is_known:
                    raise unbelieved(piece.generation, arrival.generation, arrival.source)
                with arrival.lock:
                    self._heard.append(Fenced(piece.generation))
        self.deliver()
        open_ones = arrival.state.installed
        with arrival.lock:
            arrival.changed()
            if any(leaf in open_ones for leaf, _ in leases):  # it does not know yet: ask it later
                arrival.lock.wait_for(lambda: arrival.is_closed, RETRY_SECONDS)

    def send_returned(self, timeout_s: float | None = None) -> None:
        """Tells the source what was given back. If it does not answer, it is told again later.

        Until it knows nobody has these leaves: we let nothing in any more, and it waits for us.
        """
        arrival = self._arrival
        try:
            with self._returning:
                leases = arrival.shell.unreturned(arrival.id)
                if leases:
                    arrival.shell.record_returned(arrival.id, leases)
                    call = GiveBackCall(arrival.id, arrival.generation, leases)
                    arrival.channel.give_back(call, timeout_s=timeout_s)
                    answer = GivenBack(arrival.id, arrival.generation, 0, leases)
                    arrival.shell.tell(arrival.source_name, answer)
                    arrival.shell.record_told(arrival.id)
                    arrival.changed()
        finally:
            self.start()  # which also ends an arrival of which nothing is left

    def _bring_rest(self) -> None:
        """Of leaves of which entries are here, the rest follows."""
        arrival = self._arrival
        loading = arrival.shell.loading
        if loading is not None:
            with arrival.waited.by_itself():
                for leaf in arrival.shell.uncompleted(arrival.id):
                    loading.load(leaf)
