"""Returning: leaves that do not come after all. They go back to their old owner, or are lost.

The participant says which: those of which nothing has come may go back. Nothing comes while that is
decided (Loading.standing_still), and nobody owns them until the old owner knows.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from statekit.assignment import subtract
from statekit.errors import StateKitError
from statekit.migration.arrival import CLOSE_SECONDS, Arrival
from statekit.migration.going_on import GoingOn
from statekit.migration.shell import groups_of
from statekit.protocol.calls import GiveBackCall, InstalledCall
from statekit.protocol.messages import Action, Moved, Released, Unexpect
from statekit.residence.loading import Loading

_log = logging.getLogger("statekit")

LEASES_AT_END_MAX = 65536  # that a source is told of when the provider is closed


class Returning(GoingOn):
    """The part of a NewOwnerShell (new_owner.py) that gives back what it has taken on."""

    @property
    @abstractmethod
    def loading(self) -> Loading | None: ...

    @property
    @abstractmethod
    def arrivals(self) -> tuple[Arrival, ...]: ...

    @abstractmethod
    def tell(self, sender: str, message: Any) -> None: ...

    @abstractmethod
    def unreturned(self, migration: str) -> tuple[tuple[int, int], ...]: ...

    @abstractmethod
    def unreported(self, migration: str, most: int) -> tuple[tuple[int, int], ...]: ...

    def return_leaves(self, arrival: Arrival) -> tuple[range, ...]:
        """See Arrival.give_back()."""
        loading = self.loading
        if loading is None:
            return ()
        with self._owner.lock, loading.standing_still():
            with self._lock:
                actions = self._participant.give_back(arrival.id)
            self._carry_out(actions)  # says GiveBack: which the reports say, until it is heard
        arrival.reports.send_returned()
        return groups_of(_unexpected(actions), self.subgroups)

    def return_at_end(self, arrival: Arrival) -> None:
        """The provider is being closed: what has not come is left to the source, if it answers."""
        loading = self.loading
        if loading is None or not self.has_home:
            still: AbstractContextManager[bool] = nullcontext(True)
        else:  # nothing may come into the home that is given back
            still = loading.standing_still_within(CLOSE_SECONDS)
        with still as is_still:
            if is_still:
                with self._lock:
                    actions = self._participant.give_back(arrival.id)
                self._carry_out(actions, Unexpect)  # nobody touches it any more
        leases = self.unreturned(arrival.id)
        if not leases:
            return
        try:
            self.record_returned(arrival.id, leases)
            call = GiveBackCall(arrival.id, arrival.generation, leases)
            arrival.channel.give_back(call, timeout_s=CLOSE_SECONDS)
            self.record_told(arrival.id)
        except (StateKitError, ValueError) as error:
            _log.warning(
                "%s was closed before all leaves had come, and %s could not be told: %s",
                arrival,
                arrival.source,
                error,
            )

    def report_at_end(self, arrival: Arrival) -> None:
        """The same, with a home: what has come stays there, and the source may let go of it."""
        if arrival.state.is_over:
            self._owner.record_over(arrival.id)
            return
        leases = self.unreported(arrival.id, LEASES_AT_END_MAX)
        call = InstalledCall(arrival.id, arrival.generation, leases)
        try:
            self.make_durable()
            for leaf, epoch in arrival.channel.installed(call, timeout_s=CLOSE_SECONDS):
                released = Released(arrival.id, arrival.generation, 0, leaf, epoch)
                self.tell(arrival.source_name, released)
        except (StateKitError, ValueError) as error:
            _log.info("%s does not know yet what has come from it: %s", arrival.source, error)
            return
        if arrival.state.is_over:
            self._owner.record_over(arrival.id)

    def end_leases(self, arrival: Arrival, ended: Sequence[Moved]) -> None:
        """The source has taken leaves back."""
        loading = self.loading
        if loading is None:
            return
        touched: list[int] = []
        with self._owner.lock, loading.standing_still():
            actions: list[Action] = []
            with self._lock:
                for moved in ended:
                    actions += self._participant.on(arrival.source_name, moved)
            self._carry_out(actions, Unexpect)
            if gone := _unexpected(actions):
                untouched = self._unexpect(Unexpect(tuple(gone)))  # all at once: they may be many
                touched = sorted({*gone}.difference(untouched))
                if self.has_home:
                    # What is at home of them is not theirs, or our own, any more.
                    lost = groups_of(touched, self.subgroups)
                    self._owner.record_lost(lost)
                    self._owner.record_ended(subtract(groups_of(gone, self.subgroups), lost))
        if self.has_home and touched:
            self._residence.drop_partial(touched)

    def declare_dead(self, name: str) -> tuple[range, ...]:
        loading = self.loading
        still = nullcontext() if loading is None else loading.standing_still()
        with self._owner.lock:
            with still:
                with self._lock:
                    actions, lost = self._participant.declare_dead(name)
                self._carry_out([one for one in actions if isinstance(one, Unexpect)])
            try:
                # What was offered to the dead one is ours again. Not while all leaves stand still:
                # the residence's lock is needed, and who holds it may wait for a leaf.
                self._carry_out([one for one in actions if not isinstance(one, Unexpect)])
            finally:
                for arrival in self.arrivals:
                    if arrival.source_name == name:
                        arrival.ended()
        groups = groups_of(lost, self.subgroups)
        if self.has_home and groups:
            self._owner.record_lost(groups)
            self._residence.drop_partial(lost)
        return groups

    def _unexpect(self, action: Unexpect) -> list[int]:
        """Leaves are another's after all, and their key-groups. Nothing comes meanwhile.

        Those that had not moved into a home are returned.
        """
        self._owner.gave(groups_of(action.leaves, self.subgroups))
        untouched = self._residence.unexpect(action.leaves)
        for arrival in self.arrivals:
            arrival.changed()
        return untouched


def _unexpected(actions: Iterable[Action]) -> list[int]:
    """The leaves that are not ours after all."""
    return [leaf for one in actions if isinstance(one, Unexpect) for leaf in one.leaves]
