"""What participants of a migration say to each other, and what they ask of the process around them.

Everything here is plain data. docs/protocol.md explains each message; participant.py and
coordinator.py are the only ones that decide what is said.

Every message carries the migration it belongs to, the generation of its sender (see Fenced) and
the sender's running number. An epoch belongs to a leaf: whoever has the lease with the highest
epoch owns the leaf. An epoch is `generation << 32 | hand-overs`. So every epoch of a later
generation is greater than all epochs of earlier ones, and nobody has to know those.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

Leases: TypeAlias = Sequence[tuple[range, int]]  # leaves, and the epoch of their last lease

LEAVES_END = 1 << 32  # greater than any leaf
HOPS_BITS = 32
OUTSIDE = -1  # the generation of a process that was not let into any generation yet


def first_epoch(generation: int) -> int:
    """The epoch of leaves that were not handed over yet in a generation."""
    return generation << HOPS_BITS


def instance(worker: str, incarnation: int) -> str:
    """The name of a participant. A process that lost its memory comes back as another one."""
    return f"{worker}.{incarnation}"


def life_of(name: str) -> tuple[str, int]:
    """Worker and incarnation, from the name of a participant."""
    worker, _, incarnation = name.rpartition(".")
    return worker, int(incarnation)


_NUMBER_DIGITS = 16  # hexadecimal: the end of a migration's id


def migration_id(life: str, number: int) -> str:
    """The id of a migration: which life of a process made it, and its number in that life."""
    return f"{life}{number:0{_NUMBER_DIGITS}x}"


def maker_of(migration: str) -> tuple[str, int]:
    """Life and number, from the id of a migration."""
    return migration[:-_NUMBER_DIGITS], int(migration[-_NUMBER_DIGITS:], 16)


def runs_of(leaves: Sequence[int]) -> list[range]:
    """Ascending leaves as ranges. Looks at few of them: there may be a million leaves in few runs.

    >>> runs_of([3, 4, 5, 9])
    [range(3, 6), range(9, 10)]
    """
    runs: list[range] = []
    start = 0
    while start < len(leaves):
        # leaf - place is the same for all leaves of a run, and greater for all leaves after it.
        ahead = leaves[start] - start
        places = range(start, len(leaves))
        count = bisect_right(places, ahead, key=lambda place: leaves[place] - place)
        runs.append(range(leaves[start], leaves[start] + count))
        start += count
    return runs


def cut_leases(leases: Leases, ranges: Iterable[range]) -> list[tuple[range, int]]:
    """The leases, cut down to these leaves. Both ascend.

    >>> cut_leases([(range(0, 8), 5)], [range(2, 4), range(6, 20)])
    [(range(2, 4), 5), (range(6, 8), 5)]
    """
    found: list[tuple[range, int]] = []
    parts = [*ranges]
    at = 0
    for run, epoch in leases:
        while at < len(parts) and parts[at].stop <= run.start:
            at += 1
        for part in islice(parts, at, None):
            if part.start >= run.stop:
                break
            found.append((range(max(run.start, part.start), min(run.stop, part.stop)), epoch))
    return found


def renew_leases(leases: Leases, later: Leases) -> list[tuple[range, int]]:
    """The leases, where later ones replace those of the same leaves. All three ascend.

    >>> renew_leases([(range(0, 8), 5)], [(range(2, 4), 6), (range(8, 9), 5)])
    [(range(0, 2), 5), (range(2, 4), 6), (range(4, 9), 5)]
    """
    gaps = []
    start = 0
    for run, _ in later:
        gaps.append(range(start, run.start))
        start = run.stop
    gaps.append(range(start, LEAVES_END))
    found = sorted([*cut_leases(leases, gaps), *later], key=lambda lease: lease[0].start)
    joined: list[tuple[range, int]] = []
    for run, epoch in found:
        if joined and joined[-1][1] == epoch and joined[-1][0].stop == run.start:
            joined[-1] = (range(joined[-1][0].start, run.stop), epoch)
        elif run:
            joined.append((run, epoch))
    return joined


class Grant(NamedTuple):
    """Leaves that are offered: the epoch of their new lease, and which checkpoint they are in."""

    leaves: range
    epoch: int
    covered: int  # the last checkpoint that they are in, as part of their old owner's


# ---- Between old owner (source) and new owner (target)


class Begin(NamedTuple):
    """Target: hand these leaves over to me. Said again as long as nobody answers."""

    migration: str
    generation: int
    sequence: int
    leaves: tuple[range, ...]
    above: int = 0  # the greatest epoch the target knows of these leaves; it takes greater ones


class Declined(NamedTuple):
    """Source: this migration has not begun, and never will under this id."""

    migration: str
    generation: int
    sequence: int
    reason: str


class Offer(NamedTuple):
    """Source: these leaves are yours. I accept no more operations on them."""

    migration: str
    generation: int
    sequence: int
    source: str
    grants: tuple[Grant, ...]
    version: int = 0  # of the table that says so; 0: none does


class Accept(NamedTuple):
    """Target: I have the offer. Nothing has come yet of these leaves: send them by this stream."""

    migration: str
    generation: int
    sequence: int
    waiting: tuple[tuple[range, int], ...]  # leaves, epoch
    stream: int = 0  # its number; a greater one ends earlier streams, and sends all that is left
    credit: int = 0  # bytes that the stream may send in all; see Credit


class Fetch(NamedTuple):
    """Target: I want this leaf now; if it is large, entries under `keys` first."""

    migration: str
    generation: int
    sequence: int
    leaf: int
    epoch: int
    keys: tuple[Any, ...] = ()


class Credit(NamedTuple):
    """Target: the stream may send `bytes_total` bytes in all."""

    migration: str
    generation: int
    sequence: int
    stream: int
    bytes_total: int


class Here(NamedTuple):
    """Source: here is the leaf, or (is_whole False) those of its entries that were wanted first."""

    migration: str
    generation: int
    sequence: int
    leaf: int
    epoch: int
    is_whole: bool
    content: Any
    stream: int = 0  # the stream that sends it; 0: it answers a Fetch


class Moved(NamedTuple):
    """The leaf is at `to`, with this epoch. If the lease you asked for is older, it has ended."""

    migration: str
    generation: int
    sequence: int
    leaf: int
    epoch: int
    to: str


class InTransit(NamedTuple):
    """I am to have the leaf, and it has not come to me yet. Ask again."""

    migration: str
    generation: int
    sequence: int
    leaf: int
    epoch: int


class Never(NamedTuple):
    """I never had this leaf at that epoch: it is lost, or you ask the wrong process."""

    migration: str
    generation: int
    sequence: int
    leaf: int
    epoch: int


class Installed(NamedTuple):
    """Target: all of the leaf is here; forget yours."""

    migration: str
    generation: int
    sequence: int
    leaf: int
    epoch: int


class Released(NamedTuple):
    """Source: forgotten. Say no more about it."""

    migration: str
    generation: int
    sequence: int
    leaf: int
    epoch: int


class GiveBack(NamedTuple):
    """Target: nothing of these leaves has come here, and I shall not let anything in any more."""

    migration: str
    generation: int
    sequence: int
    leases: tuple[tuple[int, int], ...]  # leaf, epoch


class GivenBack(NamedTuple):
    """Source: I know. They are mine again."""

    migration: str
    generation: int
    sequence: int
    leases: tuple[tuple[int, int], ...]  # as they were given back


class Fenced(NamedTuple):
    """Your generation is over: a later one has begun, from a checkpoint. You own nothing."""

    generation: int


# ---- Between coordinator and workers


class Hello(NamedTuple):
    """Worker: I have started (incarnation counts up) and have nothing; or I am still alive."""

    worker: str
    incarnation: int
    generation: int


class Table(NamedTuple):
    """Coordinator: who is to have which leaf. If you have a leaf of another, offer it to them."""

    generation: int
    version: int
    owners: tuple[str, ...]  # one per leaf


class Settled(NamedTuple):
    """Worker: I have all leaves that this version gives me, whole, and no others."""

    worker: str
    generation: int
    version: int


class Take(NamedTuple):
    """Coordinator: checkpoint number n; the barrier has passed."""

    generation: int
    number: int


class PartWritten(NamedTuple):
    """Worker: these leaves are in checkpoint n, durably. More may follow."""

    worker: str
    generation: int
    number: int
    leaves: tuple[int, ...]


class PartFailed(NamedTuple):
    """Worker: my part of checkpoint n could not be written. There will be no checkpoint n."""

    worker: str
    generation: int
    number: int


class Recover(NamedTuple):
    """Coordinator: a new generation begins from checkpoint n: forget all, restore what is yours.

    This message is the same for the whole generation, however late it comes. Leaves that a later
    table gives to a participant must reach it by migration, since somebody else has restored them.
    """

    generation: int
    version: int
    owners: tuple[str, ...]
    number: int  # 0: from nothing


class Recovered(NamedTuple):
    """Worker: I have restored what the table gives me."""

    worker: str
    generation: int


# ---- What a machine asks of the process around it


class Send(NamedTuple):
    to: str
    message: Any


class Shut(NamedTuple):
    """Accept no operations on these leaves from now on; keep what they hold as it is."""

    leaves: tuple[int, ...]


class TakeBack(NamedTuple):
    """These leaves were shut and are ours again: record that, so that it survives this process.

    Then say taken_back(), for all of them or for some, now or later. They are shut until then.
    """

    leaves: tuple[int, ...]


class Reopen(NamedTuple):
    """These leaves are ours again, and that is recorded: accept operations."""

    leaves: tuple[int, ...]


class Drop(NamedTuple):
    """Another process has all of this leaf: free what was kept of it."""

    leaf: int


class Serve(NamedTuple):
    """Read the leaf as it was when it was shut, put it into `reply.content`, and send the reply.

    keys: these entries of a large leaf may go first; then reply.is_whole must be False.
    """

    to: str
    reply: Here
    keys: tuple[Any, ...]


class Expect(NamedTuple):
    """These leaves are ours, but none may be read or written before something of it has come."""

    leaves: tuple[int, ...]
    source: str


class Unexpect(NamedTuple):
    """These leaves are not ours after all."""

    leaves: tuple[int, ...]


class Install(NamedTuple):
    """Put this content under what the leaf has here. is_whole: then all of the leaf is here."""

    leaf: int
    content: Any
    is_whole: bool


class WritePart(NamedTuple):
    """Checkpoint n: freeze these leaves now and write them; then say part_written(n).

    unfinished: those of the leaves of which only a part is here. They are completed by what is
    still to come (what is here is newer), and are written when they are whole.
    """

    number: int
    leaves: tuple[int, ...]
    unfinished: tuple[int, ...]


class AddToPart(NamedTuple):
    """Checkpoint n: these leaves belong into our part of it, too, as they are before any change.

    They have just been installed, or are just being reopened. A leaf of which only a part is here
    is treated as WritePart.unfinished says.
    """

    number: int
    leaves: tuple[int, ...]


class Fence(NamedTuple):
    """We own nothing any more: accept nothing, publish nothing."""

    generation: int


class Restore(NamedTuple):
    """Read these leaves from checkpoint n (0: they are empty); then say own(leaves, n)."""

    generation: int
    number: int
    leaves: tuple[int, ...]


class Lost(NamedTuple):
    """The source knows nothing of this leaf: without a recovery, what has not come never will."""

    leaf: int
    source: str


# ---- What the coordinator asks of the process around it


class Record(NamedTuple):
    """Everything that a coordinator must remember. Nothing is sent before it is stored here."""

    revision: int  # counts writes: a write that was delayed finds a greater one, and fails
    term: int  # counts coordinators
    coordinator: str  # who wrote it: two that take over at once must write different records
    generation: int  # 0: nobody owned anything yet
    members: tuple[str, ...]  # participants that were let into this generation
    version: int  # of the table, in this generation; 1 is the one that it began with
    owners: tuple[str, ...]  # one per leaf; (): no table yet
    start: tuple[str, ...]  # owners of version 1: who had to restore what
    restored: int  # the checkpoint that the generation began from
    complete: int  # the last complete checkpoint; 0: none
    next_number: int  # no checkpoint of this number or a later one was ever begun


class Persist(NamedTuple):
    """Store the record if the stored one has the expected revision (0: if there is none).

    Then say persisted(record.revision). If another record is stored, say conflicted(). If this very
    record is stored already, that is success: an earlier attempt was carried out after all.
    """

    expected: int
    record: Record


class Completed(NamedTuple):
    """Checkpoint n is complete, and that is recorded: sources may forget the records before it."""

    number: int


Action: TypeAlias = (
    Send
    | Shut
    | TakeBack
    | Reopen
    | Drop
    | Serve
    | Expect
    | Unexpect
    | Install
    | WritePart
    | AddToPart
    | Fence
    | Restore
    | Lost
)
Order: TypeAlias = Send | Persist | Completed
