"""Shell: what carries out what a participant says, whichever side of a hand-over it is on.

One participant, the lock that guards it, and what both sides need of it: ids of migrations,
generations, barriers, leases that change hands within the process. All state of hand-overs is the
participant's; what a shell has beside it is how others are reached, and jobs that it has begun.

    locks   the provider's lock is held while key-groups change hands, so that a checkpoint has
            them or has them not. The shell's own lock guards the participant only, comes last, and
            nothing is waited for under it.
"""

import os
import socket
import threading
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from statekit.assignment import group_ranges, leaf_ranges
from statekit.errors import (
    ArgumentError,
    ClosedError,
    FencedError,
    HomeError,
    shorten,
)
from statekit.homes.record import HomeArrival
from statekit.live.job import CheckpointJob, PartJob
from statekit.migration.channels import Channels
from statekit.protocol.calls import (
    Limits,
)
from statekit.protocol.machine import WINDOW_BYTES
from statekit.protocol.messages import (
    Action,
    AddToPart,
    Drop,
    Expect,
    Fence,
    Install,
    Leases,
    Lost,
    Reopen,
    Restore,
    Send,
    Serve,
    Shut,
    TakeBack,
    Unexpect,
    WritePart,
    migration_id,
    runs_of,
)
from statekit.protocol.participant import Participant
from statekit.remote.security import knows_callers, knows_servers, unbelieved
from statekit.residence.residence import Residence
from statekit.schema import StateSchema

if TYPE_CHECKING:
    from statekit.remote.channel import PeerChannel

# Begins a checkpoint of these key-groups only, as they are at that moment.
AddLate: TypeAlias = Callable[[tuple[range, ...]], CheckpointJob | PartJob]

WINDOW_BYTES_MIN = 2 << 20  # that a stream may be ahead of a home
_LIFE_DIGITS = 16  # hexadecimal: the first half of a migration's id

#: What is done when the participant says so.
EFFECTS: dict[type, str] = {
    Shut: "_shut",
    TakeBack: "_take_back",
    Reopen: "_reopen",
    Drop: "_drop",
    AddToPart: "_add_to_part",
    Unexpect: "_unexpect",
    Fence: "_fenced",
}
#: What whoever asked the participant sees to itself, because it has what is needed for it. (Restore
#: is for those who have a coordinator: no call brings its messages.)
SEEN_TO: frozenset[type] = frozenset({Serve, Expect, Install, WritePart, Lost, Restore})


class Owner(Protocol):
    """What a peer needs of its provider. All but `lock` are called with the lock held."""

    @property
    def lock(self) -> Any: ...

    def owned(self) -> tuple[range, ...]:
        """Key-groups."""

    def schemas(self) -> Sequence[StateSchema]: ...

    def take_in(self, schemas: Sequence[StateSchema]) -> None:
        """Declares states of a peer that are not known here; SchemaError if they do not fit."""

    def gave(self, key_groups: tuple[range, ...]) -> None:
        """These are another's from now on."""

    def took(self, key_groups: tuple[range, ...]) -> None:
        """These are ours from now on."""

    def record_given(self, key_groups: tuple[range, ...], leases: Leases) -> None:
        """Durably, if there is a home: these are another process's. HomeError if that fails."""

    def record_taken(self, key_groups: tuple[range, ...], leases: Leases) -> None:
        """The same: these are ours again."""

    def record_deleted(self, key_groups: tuple[range, ...]) -> None:
        """The same: what the home has of these is about to be deleted."""

    def check_stays(self) -> None:
        """HomeError if what comes here is gone when the provider is closed."""

    def check_stranger(self, name: str) -> None:
        """ArgumentError if that participant has the same home, in this process."""

    def check_vacant(self, key_groups: tuple[range, ...]) -> None:
        """OccupiedError if there is a home that has rows of these which nobody gave away."""

    # How leaves come into a home; nothing of it is done if there is none.

    def interrupted(self) -> tuple[HomeArrival, ...]:
        """Hand-overs that are not over, also those of earlier lives of the provider."""

    def record_asked(self, arrival: HomeArrival) -> None:
        """Durably: we are about to ask for these key-groups, and nothing of them is here."""

    def record_arriving(self, arrival: HomeArrival) -> None:
        """The same: they were offered to us. From now on they may move in."""

    def record_returned(self, migration: str, leases: Iterable[tuple[int, int]]) -> None:
        """The same: these are about to be given back; nothing of their key-groups has come."""

    def record_told(self, migration: str) -> None:
        """The source knows what was given back. The lock need not be held."""

    def record_ended(self, key_groups: tuple[range, ...]) -> None:
        """Their source has taken these back, and nothing of them had come."""

    def record_lost(self, key_groups: tuple[range, ...]) -> None:
        """These will never be complete. The lock need not be held."""

    def record_over(self, migration: str) -> None:
        """The hand-over is over, and its source knows it. The lock need not be held."""

    def forget_recorded(self, migration: str) -> None:
        """Nothing came of the hand-over. The lock need not be held."""

    def since(self, digest: bytes) -> "array[int] | None":
        """Per leaf: the epoch that a checkpoint has it of; None if it is not a last one of ours."""

    def figures(self) -> dict[str, Any]: ...


class Credentials:
    """What a provider shows to others, and asks of them."""

    def __init__(self, tls: Any = None, token: str | None = None) -> None:
        self.tls = tls
        self.token = token

    @property
    def knows_callers(self) -> bool:
        return knows_callers(self.tls, self.token)

    @property
    def knows_servers(self) -> bool:
        return knows_servers(self.tls, self.token)


class Shell(ABC):
    """See Peer."""

    def __init__(self, owner: Owner, residence: Residence, leases: Leases) -> None:
        self._owner = owner
        self._residence = residence
        self.has_home = residence.ledger is not None
        self.subgroups = residence.store.subgroups
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.credentials = Credentials()
        self.limits = Limits()
        self.channels = Channels(self.connect)
        self.is_closed = False
        self._lock = threading.RLock()
        self._participant = self._new_participant()
        # Ids of migrations are their maker's life and a growing number: late ones are told by it.
        self._life = uuid.uuid4().hex[:_LIFE_DIGITS]
        self._numbers = count(1)
        with owner.lock:
            self._participant.own(leaves_of(owner.owned(), self.subgroups), leases=leases)

    def _new_participant(self, generation: int = 0) -> Participant:
        window = WINDOW_BYTES
        if self.has_home:  # what has come and is not written home is beside the budget
            window = max(WINDOW_BYTES_MIN, min(window, (self._residence.budget or 0) // 8))
        return Participant(self.name, generation, self.subgroups, window)

    @abstractmethod
    def connect(self, address: str, credentials: Credentials, timeout_s: float) -> "PeerChannel":
        """A channel to another process."""

    @property
    def generation(self) -> int:
        return self._participant.generation

    def new_id(self) -> str:
        return migration_id(self._life, next(self._numbers))

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("the provider is closed.")

    def _check_generation(self, generation: int, is_known: bool) -> None:
        """FencedError unless this is our generation, and it is not over; see _learn_generation."""
        self._learn_generation(generation, is_known)
        if generation != self.generation or self._participant.is_fenced:
            raise FencedError(
                f"generation {max(generation, self.generation)} has begun, from a checkpoint; "
                f"this is about generation {min(generation, self.generation)}, which is over. "
                "Restore from that checkpoint, or end the process."
            )

    def _learn_generation(self, generation: int, is_known: bool) -> None:
        """Somebody is of a later generation: ours is over. If that is one whom we know."""
        if generation > self.generation:
            if not is_known:
                raise unbelieved(generation, self.generation)
            self.fence(generation)

    def _hear(self, generation: int) -> None:
        """A call has come."""
        self._learn_generation(generation, self.credentials.knows_callers)

    def fence(self, generation: int) -> None:
        """A later generation has begun: we own nothing any more."""
        with self._owner.lock:
            with self._lock:
                is_later = generation > self._participant.generation
                actions = self._participant.fence(generation) if is_later else []
            self._carry_out(actions)

    def check_free(self, groups: Iterable[range]) -> None:
        """LeaseError if other processes may still have a claim to some of these key-groups."""
        with self._lock:
            self._participant.check_free(leaves_of(groups, self.subgroups))

    def leases(self, groups: Iterable[range]) -> Leases:
        """The epochs of key-groups' leases."""
        with self._lock:
            return self._participant.leases(leaves_of(groups, self.subgroups))

    def disown(self, went: Iterable[range]) -> Leases:
        """Key-groups went to another provider of this process; the epochs of their leases."""
        with self._lock:
            return self._participant.disown(leaves_of(went, self.subgroups))

    def own(self, came: Iterable[range], leases: Leases) -> None:
        """Key-groups came from another provider of this process."""
        with self._lock:
            leaves = leaves_of(came, self.subgroups)
            self._participant.own(leaves, self._participant.barrier, leases=leases)

    def _carry_out(self, actions: Iterable[Action], *seen_to: type) -> list[Any]:
        """Does what the participant says, in order. What is to be said to others is returned.

        seen_to: actions that the caller does itself, or has done. One that nobody sees to must
        not pass for one that was done: that is a bug, and an error.
        Where key-groups change hands, the owner's lock is held.
        """
        said = []
        failed: HomeError | None = None
        for action in actions:
            kind = type(action)
            if isinstance(action, Send):
                said.append(action.message)
            elif kind in EFFECTS and kind not in seen_to:
                try:
                    getattr(self, EFFECTS[kind])(action)
                except HomeError as error:
                    if kind is not TakeBack:
                        raise
                    failed = error  # those leaves stay shut; the others must not wait for them
            elif kind not in seen_to:
                raise AssertionError(f"nobody carries out what the participant asks for: {action}")
        if failed is not None:
            raise failed
        return said

    @abstractmethod
    def declare_dead(self, name: str) -> tuple[range, ...]:
        """An authority says that a peer is dead: ends all hand-overs with it. What is lost."""

    @abstractmethod
    def add_late(self, number: int, groups: tuple[range, ...]) -> CheckpointJob | PartJob | None:
        """Adds key-groups to our part of a checkpoint, as they are now. None: it failed."""

    @abstractmethod
    def finish_coming(self, groups: Sequence[range]) -> None:
        """Leaves that are still on their way here are completed before they go on."""


def leaves_of(groups: Iterable[range], subgroups: int) -> list[int]:
    """The leaves of key-groups."""
    return [*chain.from_iterable(leaf_ranges(groups, subgroups))]


def groups_of(leaves: Iterable[int], subgroups: int) -> tuple[range, ...]:
    """The key-groups of leaves."""
    found: list[range] = []
    for run in runs_of(sorted(leaves)):
        first, last = run[0] // subgroups, run[-1] // subgroups
        if found and found[-1][-1] == first:
            first += 1
        if first <= last:
            found.append(range(first, last + 1))
    return group_ranges(found)


def check_id(migration: str) -> None:
    """Before anything is shut for it: checksums are bound to these 16 bytes."""
    if len(migration) != 32 or not set(migration) <= set("0123456789abcdef"):
        raise ArgumentError(f"{shorten(migration)} is no migration: 32 hexadecimal digits are.")
