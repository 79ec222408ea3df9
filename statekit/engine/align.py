"""Align: the order of records across a rescale, at one receiver. No sockets, threads or clocks.

A receiver is a task of a keyed stage: it owns key-groups, and has a channel from each sender. A
sender that is told of a move sends a mark to the old and the new owners, and routes by the move
from then on (sender.py). What a receiver does:

    old owner    goes on processing until it has the mark of every channel, because until then
                 records of the key-groups may still come here; then it hands them over
    new owner    parks the records of the key-groups, for each channel by itself; when it has the
                 state and the marks of all channels, it processes what is parked, and goes on
    both         a channel's watermark stands still from the mark until the move is settled here
    a barrier    holds up its channel until it has come on all of them and no move is unsettled

So, of one sender and one key-group, every record is processed before the next one, once:

    1. records before the mark went to the old owner, and it has processed them when it hands over
    2. records after the mark went to the new owner, and it processes none before the hand-over
    3. what is parked of a channel is processed before what comes on that channel later

The end of a channel counts as its mark, its barrier and its last watermark.

Why watermarks stand still. A window fires when the watermark passes its end, and a record may come
until then. After the mark of one sender, that sender's records go to the new owner; so its later
watermarks must not fire windows at the old owner, which does not see these records any more, nor at
the new one, which has parked them. Both stop at the watermarks that the senders had at their marks.
The lowest of these is what the old owner has reached when it hands over, and the new owner when it
begins: no window fires early, and none that fired is opened again.

Why moves settle in their order. A key-group may go on before it has come: this task must have
processed what it parked of the first move before it hands over for the second. And at the new owner
the watermark stands where the oldest unsettled move stopped it, which may be before that at
which a later move's key-groups come.

Why barriers and moves are not in flight together (turns.py). If one sender sent the mark first, and
another the barrier, the key-groups would belong to both checkpoints or to none. This is an error
here, as is everything else that cannot happen if all do what they should: a record of a key-group
that its sender should not send here is never processed on a guess.

Nothing waits in a circle. The oldest unsettled move needs marks, and marks were sent before
everything that is parked; and it needs a hand-over, which needs marks at the old owner. A barrier
waits for moves, and no move that is told later waits for the barrier's channels.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from statekit.engine.items import (
    FIRST,
    LAST,
    Barrier,
    End,
    Item,
    Mark,
    Move,
    Records,
    Watermark,
)
from statekit.errors import EngineError

PARKED_MAX = 16 << 20  # bytes of a channel that may be parked before it is not read any more


# ---- What the task is to do, in this order


class Process(NamedTuple):
    """These records, whose key-groups are here."""

    channel: str
    records: Records


class Advance(NamedTuple):
    """Event time has come so far."""

    time: int


class HandOver(NamedTuple):
    """Let go of key-groups, at once. When this is done, they must not be this task's any more."""

    version: int
    groups: frozenset[int]
    to: str
    watermark: int  # goes with them


class Marked(NamedTuple):
    """Tell the coordinator: the marks of a move have come on all channels."""

    version: int


class Settled(NamedTuple):
    """Tell the coordinator: nothing is left to do here for a move."""

    version: int


class Pass(NamedTuple):
    """A barrier: take the part of this checkpoint, and send the barrier on."""

    number: int


class Finish(NamedTuple):
    """All channels have ended, and all that came was processed."""


Action: TypeAlias = Process | Advance | HandOver | Marked | Settled | Pass | Finish


# ---- What is known


@dataclass
class _Channel:
    view: set[int]  # key-groups whose records may come, as of the last mark read here
    version: int = 0  # of the last mark
    watermark: int = FIRST
    frozen: int = 0  # the unsettled move at whose mark the watermark stands still; 0: none
    later: deque[Watermark | int] = field(default_factory=deque)  # after that; int: another mark
    # Per key-group, the unsettled move with which it comes; and what is parked for which move.
    coming: dict[int, int] = field(default_factory=dict)
    parked: deque[tuple[int, Records]] = field(default_factory=deque)
    barrier: int = 0  # it came here, and not yet everywhere; 0: none
    held: deque[Item] = field(default_factory=deque)  # came after the barrier
    bytes: int = 0  # of the records in parked and held
    is_ended: bool = False


@dataclass
class _Move:
    gone: list[tuple[frozenset[int], str]]  # key-groups that go, and to whom
    missing: set[int]  # key-groups that come, and are not here yet
    marked: set[str] = field(default_factory=set)
    arrived: list[tuple[frozenset[int], int]] = field(default_factory=list)  # and not used yet
    is_marked: bool = False


class Receiver:
    """The channels of one task, and its key-groups. Events are methods; they return actions."""

    def __init__(
        self,
        name: str,
        channels: Iterable[str],
        owned: Iterable[int] = (),
        parked_max: int = PARKED_MAX,
        watermark: int = FIRST,
    ) -> None:
        self.name = name
        self.owned = set(owned)
        self.watermark = watermark
        self.parked_max = parked_max
        self._channels = {channel: _Channel({*self.owned}) for channel in channels}
        self._moves: dict[int, _Move] = {}  # that are not settled here
        self._early: dict[
            int, list[tuple[frozenset[int], int]]
        ] = {}  # handed over, and no mark yet
        self._settled = 0  # the last move that was
        self._passed = 0  # the last barrier that did
        self._barrier = 0  # the one that has come on some channels
        self._is_finished = False

    # ---- Events

    def on(self, channel: str, item: Item) -> list[Action]:
        """An item came on a channel."""
        here = self._channels[channel]
        if here.is_ended:
            raise self._wrong(channel, f"{_name(item)} came after its end")
        if here.barrier:
            here.held.append(item)
            here.bytes += _bytes(item)
            return []
        if isinstance(item, Watermark):
            actions = self._on_watermark(here, item)
        elif isinstance(item, Mark):
            actions = self._on_mark(channel, here, item.move)
        elif isinstance(item, Barrier):
            actions = self._on_barrier(channel, here, item.number)
        elif isinstance(item, End):
            here.is_ended = True
            actions = self._on_watermark(here, Watermark(LAST))
        else:
            return self._on_records(channel, here, item)
        return actions + self._go_on()

    def handed_over(
        self, version: int, groups: Collection[int], watermark: int = FIRST
    ) -> list[Action]:
        """The old owner has let go of key-groups, and their state may be used here."""
        some = frozenset(groups)
        move = self._moves.get(version)
        if move is None:
            # It has the marks of all its channels, and we of none: we are behind. A hand-over that
            # is here already must not be taken for one that is early.
            if version <= self._settled:
                raise EngineError(f"{self.name}: move {version} is settled, and came once more.")
            self._early.setdefault(version, []).append((some, watermark))
            return []
        self._arrive(version, move, some, watermark)
        return self._go_on()

    def open(self, channel: str) -> None:
        """A sender has come. It has sent nothing yet, and holds the watermark until it does."""
        if channel in self._channels:
            raise EngineError(f"{self.name}: channel {channel!r} is open already. Open it once.")
        if self._moves or self._barrier:
            raise EngineError(
                f"{self.name}: channel {channel!r} was opened while a move or a barrier is under "
                "way: nobody could tell what it will bring. Open channels between them."
            )
        self._channels[channel] = _Channel({*self.owned}, version=self._settled)

    def reads(self, channel: str) -> bool:
        """Whether more of a channel should be read now. (More is taken, and kept in memory.)"""
        here = self._channels[channel]
        return not here.is_ended and not here.barrier and here.bytes <= self.parked_max

    def is_ended(self, channel: str) -> bool:
        """Whether the end of a channel was taken. (It may have come, and be held by a barrier.)"""
        here = self._channels[channel]
        return here.is_ended or any(isinstance(item, End) for item in here.held)

    @property
    def is_moving(self) -> bool:
        """Whether a move is unsettled here."""
        return bool(self._moves)

    @property
    def parked_bytes(self) -> int:
        return sum(channel.bytes for channel in self._channels.values())

    # ---- Records

    def _on_records(self, channel: str, here: _Channel, records: Records) -> list[Action]:
        if not self._moves:  # nothing is looked at: what is not ours, the provider refuses
            return [Process(channel, records)]
        groups = {*records.groups()}
        if strays := groups - here.view:
            raise self._wrong(
                channel, f"a record of key-group {min(strays)} came, which is not its"
            )
        coming = here.coming
        rest: Records | None = records
        for version in sorted({coming[group] for group in groups if group in coming}):
            assert rest is not None
            waiting = [group for group in groups if coming.get(group) == version]
            some, rest = rest.split(waiting)
            assert some is not None
            here.parked.append((version, some))
            here.bytes += some.bytes
        return [] if rest is None else [Process(channel, rest)]

    # ---- Time

    def _on_watermark(self, here: _Channel, watermark: Watermark) -> list[Action]:
        if here.frozen:
            here.later.append(watermark)
            return []
        here.watermark = max(here.watermark, watermark.time)
        return self._advance()

    def _advance(self) -> list[Action]:
        lowest = min((one.watermark for one in self._channels.values()), default=FIRST)
        if lowest <= self.watermark:  # it never goes back, though a new channel may begin lower
            return []
        self.watermark = lowest
        return [Advance(lowest)]

    def _thaw(self, version: int) -> None:
        """Watermarks that were held by this move go on, to where the next move stops them."""
        for here in self._channels.values():
            if here.frozen != version:
                continue
            here.frozen = 0
            while here.later and not here.frozen:
                item = here.later.popleft()
                if isinstance(item, Watermark):
                    here.watermark = max(here.watermark, item.time)
                else:
                    here.frozen = item

    # ---- Moves

    def _on_mark(self, channel: str, here: _Channel, move: Move) -> list[Action]:
        version = move.version
        if self._barrier:
            raise self._wrong(channel, f"mark {version} came between two barriers {self._barrier}")
        if version <= here.version:
            raise self._wrong(channel, f"mark {version} came after mark {here.version}")
        found = self._moves.get(version) or self._begin(channel, move)
        for earlier, other in self._moves.items():
            if earlier < version and channel not in other.marked:
                raise self._wrong(channel, f"mark {version} came, and {earlier} did not")
        found.marked.add(channel)
        here.version = version
        for groups, _ in found.gone:
            here.view -= groups
            for group in groups:
                here.coming.pop(group, None)
        for change in move.changes:
            if change.new == self.name:
                here.view |= change.groups
                here.coming.update(dict.fromkeys(change.groups, version))
        if here.frozen:
            here.later.append(version)
        else:
            here.frozen = version
        return []

    def _begin(self, channel: str, move: Move) -> _Move:
        """The first mark of a move has come."""
        version, name = move.version, self.name
        if version <= self._settled or any(
            one.version > version for one in self._channels.values()
        ):
            raise self._wrong(channel, f"mark {version} came, which other channels have left out")
        if name not in move.involved:
            raise self._wrong(channel, f"mark {version} came, which is not about this task")
        gone = [(change.groups, change.new) for change in move.changes if change.old == name]
        come = [change.groups for change in move.changes if change.new == name]
        found = self._moves[version] = _Move(gone, set().union(*come))
        for groups, watermark in self._early.pop(version, ()):
            self._arrive(version, found, groups, watermark)
        return found

    def _arrive(self, version: int, move: _Move, groups: frozenset[int], watermark: int) -> None:
        if not groups <= move.missing:
            raise EngineError(
                f"{self.name}: key-group {min(groups - move.missing)} was handed over for move "
                f"{version}, with which it does not come, or not again."
            )
        move.missing -= groups
        move.arrived.append((groups, watermark))

    def _has_all_marks(self, move: _Move) -> bool:
        return all(
            one.is_ended or channel in move.marked for channel, one in self._channels.items()
        )

    def _settle(self) -> list[Action]:
        """What can be done for moves, in their order."""
        actions: list[Action] = []
        for version, move in sorted(self._moves.items()):
            if not move.is_marked and self._has_all_marks(move):
                move.is_marked = True
                actions.append(Marked(version))
        for version, move in sorted(self._moves.items()):
            if not move.is_marked:
                break
            for groups, to in move.gone:
                self.owned -= groups
                actions.append(HandOver(version, groups, to, self.watermark))
            move.gone = []
            for groups, watermark in move.arrived:
                actions += self._activate(version, groups, watermark)
            move.arrived = []
            if move.missing:
                break
            del self._moves[version]
            self._settled = version
            self._thaw(version)
            actions += [Settled(version), *self._advance()]
        return actions

    def _activate(self, version: int, groups: frozenset[int], watermark: int) -> list[Action]:
        """Key-groups are here: processes what is parked of them."""
        actions: list[Action] = []
        self.owned |= groups
        if watermark > self.watermark:  # the old owner has fired until there
            self.watermark = watermark
            actions.append(Advance(watermark))
        for channel, here in self._channels.items():
            kept: deque[tuple[int, Records]] = deque()
            for parked_for, records in here.parked:
                if parked_for != version:
                    kept.append((parked_for, records))
                    continue
                some, rest = records.split(groups)
                if some is not None:
                    actions.append(Process(channel, some))
                if rest is not None:
                    kept.append((version, rest))
            here.parked = kept
            here.bytes = sum(records.bytes for _, records in kept) + sum(map(_bytes, here.held))
            for group in groups:
                if here.coming.get(group) == version:
                    del here.coming[group]
        return actions

    # ---- Barriers

    def _on_barrier(self, channel: str, here: _Channel, number: int) -> list[Action]:
        if number <= self._passed or self._barrier not in (0, number):
            before = self._barrier or self._passed
            raise self._wrong(channel, f"barrier {number} came after barrier {before}")
        for version, move in self._moves.items():
            if not move.is_marked:
                raise self._wrong(
                    channel, f"barrier {number} came between two marks of move {version}"
                )
        self._barrier = here.barrier = number
        return []

    def _pass(self) -> list[Action]:
        """The barrier, if it has come on all channels and nothing from before it is parked."""
        if not self._barrier or self._moves:
            return []
        if not all(one.barrier or one.is_ended for one in self._channels.values()):
            return []
        actions: list[Action] = [Pass(self._barrier)]
        self._passed, self._barrier = self._barrier, 0
        held = {}
        for channel, here in self._channels.items():
            held[channel], here.held = here.held, deque()
            here.barrier = here.bytes = 0
        for channel, items in held.items():
            for item in items:
                actions += self.on(channel, item)
        return actions

    # ---- All of them

    def _go_on(self) -> list[Action]:
        actions = self._settle() + self._pass()
        if (
            not self._is_finished
            and not self._moves
            and all(one.is_ended for one in self._channels.values())
        ):
            self._is_finished = True
            actions.append(Finish())
        return actions

    def _wrong(self, channel: str, what: str) -> EngineError:
        return EngineError(
            f"{self.name}, channel {channel!r}: {what}. The order of the records is lost: recover "
            "from the last checkpoint."
        )


def _bytes(item: Item) -> int:
    control = isinstance(item, Watermark | Mark | Barrier | End)
    return 0 if control else item.bytes  # type: ignore[union-attr]


def _name(item: Item) -> str:
    return type(item).__name__.lower()
