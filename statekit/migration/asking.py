"""Asking: what a new owner has asked for, and nobody has answered.

A hand-over may have begun at the old owner although its answer was lost. So whoever asks remembers
what for, until it is answered: the next fetch_from() goes on with it, or it is given back. If not
even that is answered, the old owner keeps the leaves, shut, until it is told.
"""

import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from statekit.assignment import common, group_ranges, show_groups
from statekit.errors import PeerError, StateKitError
from statekit.migration.arrival import CLOSE_SECONDS, Arrival
from statekit.migration.shell import Credentials, Owner, Shell
from statekit.protocol.calls import BeginCall, GiveBackCall
from statekit.protocol.messages import Action, GivenBack, Leases, Offer
from statekit.residence.residence import Residence

if TYPE_CHECKING:
    from statekit.remote.channel import PeerChannel

_log = logging.getLogger("statekit")


class Asked(NamedTuple):
    """How to ask once more for what the participant has asked for, and nobody answered."""

    address: str
    call: BeginCall
    credentials: Credentials


class Asking(Shell):
    """The part of a NewOwnerShell (new_owner.py) that remembers what was asked for."""

    def __init__(self, owner: Owner, residence: Residence, leases: Leases) -> None:
        super().__init__(owner, residence, leases)
        self._asked: dict[str, Asked] = {}  # by migration, while the participant waits

    @property
    @abstractmethod
    def arrivals(self) -> tuple[Arrival, ...]: ...

    @abstractmethod
    def tell(self, sender: str, message: Any) -> None: ...

    @abstractmethod
    def unreturned(self, migration: str) -> tuple[tuple[int, int], ...]: ...

    @abstractmethod
    def _hear_offer(self, offer: Offer) -> list[Action]: ...

    def _unanswered(self, address: str, source: str) -> list[Asked]:
        """What was asked for there, and not answered."""
        with self._lock:
            there = [one for one in self._asked.values() if one.address == address]
            open_ones = self._participant.asks(source)
            gone = [one for one in there if one.call.migration not in open_ones]
            self._forget_asked(*(one.call.migration for one in gone))  # with that process
            return [one for one in there if one not in gone]

    def give_up(
        self,
        address: str,
        groups: tuple[range, ...],
        credentials: Credentials,
        timeout_s: float,
    ) -> tuple[range, ...]:
        """Nobody goes on with what was asked for of these, and not answered.

        Key-groups that may have been offered to us still, since nobody answers.
        """
        asked = [one for one in [*self._asked.values()] if common(one.call.key_groups, groups)]
        if not asked or self.is_closed:
            return ()
        channel = self.channels.borrow(address, credentials, timeout_s)
        is_broken = True
        try:
            there = self._unanswered(channel.address, channel.hello().name)
            for one in asked:
                if one in there:
                    self._return_unanswered(channel, one)
            is_broken = False
        except PeerError as error:
            left = [one for one in asked if one.call.migration in self._asked]
            unknown = group_ranges([part for one in left for part in one.call.key_groups])
            _log.warning(
                "%s may be handing key-groups %s over to this provider: %s",
                address,
                show_groups(unknown),
                error,
            )
            return unknown
        finally:
            self.channels.give_back(channel, is_broken)
        return ()

    def _forget_asked(self, *migrations: str) -> None:
        """The source is gone, or says that it has not begun: nobody waits for it any more."""
        with self._lock:
            self._participant.forget_asks(migrations)
            for migration in migrations:
                self._asked.pop(migration, None)
        for arrival in self.arrivals:
            arrival.changed()

    def _return_unanswered(
        self, channel: "PeerChannel", asked: Asked, timeout_s: float | None = None
    ) -> None:
        """What may have been begun is not wanted any more, as it was asked for."""
        call = asked.call
        source = self._participant.source_of(call.migration)
        try:
            with self._lock:
                is_unknown = bool(self._participant.unask(call.migration))  # whether it has begun
            if is_unknown:
                offer = channel.begin(call, timeout_s=timeout_s).offer
                self._hear_offer(offer)
            self._send_returned(channel, source, call, timeout_s)
        except PeerError:
            raise
        except StateKitError:
            pass  # it has not begun, or it is over
        self._forget_asked(call.migration)
        self._owner.forget_recorded(call.migration)

    def _send_returned(
        self, channel: "PeerChannel", source: str, call: BeginCall, timeout_s: float | None
    ) -> None:
        """Tells the source of what was offered, and not taken on, that it may go on with it."""
        leases = self.unreturned(call.migration)
        if leases:
            self._owner.record_returned(call.migration, leases)
            back = GiveBackCall(call.migration, call.generation, leases)
            channel.give_back(back, timeout_s=timeout_s)
            self.tell(source, GivenBack(call.migration, call.generation, 0, leases))
            self._owner.record_told(call.migration)

    def return_unanswered(self) -> None:
        """The provider is being closed: nobody goes on with what was begun and not answered."""
        for asked in [*self._asked.values()]:
            try:
                with self.connect(asked.address, asked.credentials, CLOSE_SECONDS) as channel:
                    if asked in self._unanswered(asked.address, channel.hello().name):
                        self._return_unanswered(channel, asked)
            except StateKitError as error:
                _log.warning(
                    "closed while %s may be handing key-groups %s over to this provider: %s",
                    asked.address,
                    show_groups(asked.call.key_groups),
                    error,
                )
