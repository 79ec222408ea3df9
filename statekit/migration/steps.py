"""Steps: a hand-over whose ownership moves in steps. What has not had its turn stays where it is.

A thread takes the key-groups over, a few at a time; each step is an ordinary hand-over (an Arrival)
of its own, and the next one begins when everything of the last one is here. So at any moment nearly
all key-groups are served by somebody who has all of their state.

    fluid     one key-group a step
    batched   `step` key-groups
    seamless  the same, of a shadow (shadow.py): everything is copied first, in rounds. When rounds
              do not get smaller any more the steps begin, and each brings only what has changed
              since the last round. That is done too if rounds never get small: a step then takes
              longer, and progress says so

A step that fails has not moved anything, or goes on where it was: that is what hand-overs promise.
It is tried again, while wait() tells what the matter is. Key-groups whose turn has not come are
the old owner's, whatever becomes of this process.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, TypeAlias

from statekit.assignment import common, group_ranges, show_groups, subtract
from statekit.errors import ClosedError, HomeError, PeerError, PeerLostError, StateKitError
from statekit.migration.arrival import Arrival
from statekit.migration.departure import HandOverProgress
from statekit.migration.shadow import Shadow
from statekit.migration.shell import Credentials
from statekit.migration.stream import RETRY_SECONDS
from statekit.migration.waits import Waited, Waits, total_of

if TYPE_CHECKING:
    from statekit.migration.departure import Departure
    from statekit.migration.new_owner import NewOwnerShell

STOP_SECONDS = 5.0  # that close() waits for a step to end

#: Called after each step with the key-groups that have come.
OnStep: TypeAlias = Callable[[tuple[range, ...]], None]


class Steps:
    """Key-groups that come one after the other; see KVProvider.fetch_from()."""

    def __init__(
        self,
        shell: "NewOwnerShell",
        address: str,
        key_groups: tuple[range, ...],
        strategy: str,
        step: int,
        on_step: OnStep | None,
        credentials: Credentials,
        timeout_s: float,
        pace: int = 0,
        memory: int = 0,
    ) -> None:
        self.id = shell.new_id()
        self.key_groups = key_groups
        self.strategy = strategy
        self.step = step  # key-groups
        self.source = address
        self._shell = shell
        self._on_step = on_step
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._pace, self._memory = pace, memory
        self._shadow: Shadow | None = None
        self._changed = threading.Condition()  # of all below
        self._owned: tuple[range, ...] = ()
        self._arrivals: list[Arrival] = []
        self._aligned = Waited()
        self._error: StateKitError | None = None
        self._callback_error: BaseException | None = None
        self._is_stopped = False
        self._is_running = False
        self._thread: threading.Thread | None = None

    # ---- What the user sees

    @property
    def owned(self) -> tuple[range, ...]:
        """The key-groups that are this provider's by now. The others are served where they were."""
        return self._owned

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        """The steps so far."""
        return tuple(self._arrivals)

    @property
    def progress(self) -> HandOverProgress:
        subgroups = self._shell.subgroups
        total = sum(map(len, self.key_groups)) * subgroups
        steps = self.arrivals
        done = sum(one.progress.leaves_done for one in steps)
        return HandOverProgress(done, total, sum(one.bytes_received for one in steps))

    @property
    def waits(self) -> Waits:
        """How long callers have waited by now, and what for."""
        return total_of((self._aligned.found, *(one.waits for one in self.arrivals)))

    @property
    def shadow(self) -> Shadow | None:
        """The copies that this takes over ("seamless"); None if there are none."""
        return self._shadow

    @property
    def fetches(self) -> int:
        """Leaves that came on demand."""
        return sum(one.fetches for one in self.arrivals)

    @property
    def done(self) -> bool:
        """Whether everything is here."""
        return not subtract(self.key_groups, self._owned) and all(one.done for one in self.arrivals)

    @property
    def error(self) -> StateKitError | None:
        """Why no step is taken; None while they are. It is tried again by itself."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Until all key-groups have come, and the old owner knows it.

        Raises what keeps them from coming, what on_step raised, ClosedError after stop(), and
        TimeoutError.
        """
        until = None if timeout is None else monotonic() + timeout
        with self._changed:
            while self._is_running and self._error is None:
                left = None if until is None else until - monotonic()
                if left is not None and left <= 0:
                    raise self._late(timeout)
                self._changed.wait(left)
            if self._callback_error is not None:
                raise self._callback_error
            if self._error is not None:
                raise copy(self._error)
        for arrival in self.arrivals:
            left = None if until is None else until - monotonic()
            if not arrival.wait_here(left):
                raise self._late(timeout)
        if missing := subtract(self.key_groups, self._owned):
            raise ClosedError(
                f"the hand-over was stopped before key-groups {show_groups(missing)} came: they "
                f"are still those of {self.source}. Fetch them again."
            )

    def _late(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(
            f"after {timeout} s key-groups {show_groups(self._owned) or 'none'} of "
            f"{show_groups(self.key_groups)} have come from {self.source}. Wait again."
        )

    def stop(self) -> tuple[range, ...]:
        """Takes no further step. The key-groups that stay where they are.

        If the old owner does not answer, it is not known whether a last step has begun there. Its
        key-groups are not among these: fetch them again, which goes on with it.
        """
        left = self._stop()
        unknown = self._shell.give_up(self.source, left, self._credentials, self._timeout_s)
        return subtract(left, unknown)

    def _stop(self) -> tuple[range, ...]:
        self.end()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_SECONDS + self._timeout_s)
        return subtract(self.key_groups, self._owned)

    def give_back(self) -> tuple[range, ...]:
        """Takes no further step, and gives back key-groups of which nothing has come.

        Which ones are the old owner's.
        """
        self.end()
        back = [group for one in self.arrivals if not one.done for group in one.give_back()]
        left = self.stop()
        with self._changed:
            self._owned = subtract(self._owned, group_ranges(back))
        return group_ranges((*left, *back))

    def abandon(self) -> tuple[range, ...]:
        """You know that the old owner is gone for good: what has not come is given up.

        Returned are the key-groups that are not complete here: restore them from a checkpoint.
        """
        self.end()
        lost = [group for one in self.arrivals if not one.done for group in one.abandon()]
        left = self._stop()
        return group_ranges((*left, *lost))

    def __repr__(self) -> str:
        return (
            f"<Steps of key-groups {show_groups(self.key_groups)} from {self.source}: "
            f"{show_groups(self._owned) or 'none'} have come, {self.strategy}>"
        )

    # ---- What the shell calls

    def start(self) -> None:
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name="statekit-steps", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """No further step is taken."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        for arrival in self.arrivals:
            arrival.changed()

    def join(self) -> None:
        """After end(), when nothing that it could wait for is left."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_SECONDS)

    @property
    def is_running(self) -> bool:
        return self._is_running

    # ---- The thread

    def _run(self) -> None:
        try:
            if self.strategy == "seamless":
                self._copy()
            for part in self._portions():
                if not self._take(part):
                    break
        except BaseException as error:  # nobody foresaw it, and nobody must wait for ever
            with self._changed:
                self._error = (
                    error
                    if isinstance(error, StateKitError)
                    else PeerError(f"a step of {self!r} failed: {error!r}. Report this.")
                )
        finally:
            if self._shadow is not None:
                self._shadow.drop()
            with self._changed:
                self._is_running = False
                self._changed.notify_all()
            self._shell.steps_ended(self)

    def _copy(self) -> None:
        """Copies everything, until rounds do not get smaller any more."""
        shadow = self._shadow = self._shell.shade_from(
            self.source,
            self.key_groups,
            self._pace,
            self._credentials,
            self._timeout_s,
            self._memory,
        )
        while not (self._is_stopped or self._shell.is_closed):
            try:
                shadow.wait(RETRY_SECONDS)
                break
            except TimeoutError:
                continue
            except PeerLostError as error:
                if shadow.is_dropped:
                    raise
                if not self._try_again(error):
                    return
        with self._changed:
            self._error = None

    def _portions(self) -> Iterator[tuple[range, ...]]:
        groups = [group for part in self.key_groups for group in part]
        for at in range(0, len(groups), self.step):
            yield group_ranges([range(one, one + 1) for one in groups[at : at + self.step]])

    def _take(self, part: tuple[range, ...]) -> bool:
        """One step, until all of it is here. Whether another may follow."""
        while True:
            if self._is_stopped or self._shell.is_closed:
                return False
            try:
                arrival = self._begin(part)
                break
            except PeerLostError as error:
                if not self._try_again(error):
                    return False
            except HomeError as error:
                if not self._try_again(error):
                    return False
        self._arrivals.append(arrival)
        with self._changed:
            self._error = None
            self._owned = group_ranges((*self._owned, *part))
            self._changed.notify_all()
        return self._tell(part) and self._see_through(arrival)

    def _begin(self, part: tuple[range, ...]) -> Arrival:
        shadow = self._shadow
        if shadow is not None and not shadow.is_dropped:
            return shadow.take(part)
        return self._shell.take_step(self.source, part, self._credentials, self._timeout_s)

    def _tell(self, part: tuple[range, ...]) -> bool:
        """Whether on_step has returned. What it raises is raised by wait(), and ends the steps."""
        if self._on_step is None:
            return True
        began = perf_counter()
        try:
            self._on_step(part)
        except BaseException as error:
            with self._changed:
                self._callback_error = error
            return False
        finally:
            for one in (self._aligned, self._shell.aligned):
                one.add(aligning=perf_counter() - began)
        return True

    def _see_through(self, arrival: Arrival) -> bool:
        """Waits until all of a step is here; by itself it tries again what fails."""
        while not arrival.done:
            if arrival.wait_for(
                lambda: arrival.done or arrival.error is not None or self._is_stopped,
                RETRY_SECONDS,
            ):
                error = arrival.error
                if arrival.done or arrival.is_cut_off:
                    break
                if error is not None:
                    if not self._try_again(error):
                        return False
                    arrival.streaming.start()  # it may have ended, with the error
            if self._is_stopped:
                return False
        with self._changed:
            self._error = None
        return arrival.done and not arrival.state.is_fenced  # (done ones are closed)

    def _try_again(self, error: StateKitError) -> bool:
        """Tells who waits what the matter is; True after a while, if nobody has stopped it."""
        with self._changed:
            self._error = copy(error)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_stopped, RETRY_SECONDS)
            return not self._is_stopped and not self._shell.is_closed


class SteppedDeparture:
    """Key-groups that another process takes over in steps; see KVProvider.migrate()."""

    def __init__(
        self,
        key_groups: tuple[range, ...],
        target: str,
        changed: threading.Condition,
        is_closed: Callable[[], bool],
    ) -> None:
        self.key_groups = key_groups
        self.target = target  # its address
        self._departures: list[Departure] = []  # the peer does not remember all that are done
        self._changed = changed
        self._is_closed = is_closed

    def note(self, departure: "Departure") -> None:
        """A hand-over has begun. Those of our key-groups are steps of this one."""
        if common(departure.key_groups, self.key_groups):
            self._departures.append(departure)

    @property
    def departures(self) -> "tuple[Departure, ...]":
        """The steps so far."""
        return tuple(one for one in [*self._departures] if not one.is_returned)

    @property
    def owned(self) -> tuple[range, ...]:
        """The key-groups that are the other process' by now."""
        return _together(self.departures)

    @property
    def done(self) -> bool:
        """Whether nothing is left here that the other process is to have."""
        steps = self.departures
        return not subtract(self.key_groups, _together(steps)) and all(one.done for one in steps)

    def wait(self, timeout: float | None = None) -> None:
        """Until the other process has everything. TimeoutError if that takes longer."""
        with self._changed:
            self._changed.wait_for(lambda: self.done or self._is_closed(), timeout)
        if not self.done:
            if self._is_closed():
                raise ClosedError("the provider was closed before everything had gone.")
            raise TimeoutError(
                f"after {timeout} s {self.target} has taken key-groups "
                f"{show_groups(self.owned) or 'none'} of {show_groups(self.key_groups)}. Wait "
                "again; the others are still this provider's."
            )

    def __repr__(self) -> str:
        return (
            f"<SteppedDeparture of key-groups {show_groups(self.key_groups)} to {self.target}: "
            f"{show_groups(self.owned) or 'none'} have gone>"
        )


def _together(departures: "Iterable[Departure]") -> tuple[range, ...]:
    """The key-groups of hand-overs. One may be in several, if it came back in between."""
    groups = {group for one in departures for part in one.key_groups for group in part}
    return group_ranges(sorted(groups))
