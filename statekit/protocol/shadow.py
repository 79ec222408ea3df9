"""Shadows: copies of leaves that their owner goes on using. Two pure state machines.

A *shadow* is what one process, the target, has copied of leaves of another, the source, before it
takes them over. It is no leaf state: there is no lease, nobody may read it or write to it, and the
source may forget it at any moment. Leases and everything about ownership are the participant's
(participant.py); what is decided here is only what of a copy may be used.

    target (Shadow)                                     source (Shades)
    Shade(shadow, leaves)                         ──>   opens it
                                                  <──   Shaded(source)
    Round(n, held: leaf -> epoch)                 ──>   acknowledges what is held; deltas since then
                                                  <──   Copied(n, leaf, base, epoch, content) ...
                                                  <──   NotCopied(n, leaf): it cannot be, now
                                                  <──   RoundDone(n, epoch, how many)
    a step: Begin(shadow, held) of a hand-over    ──>   shuts the leaves, offers them, and
                                                  <──   sends what changed since `held`

`epoch` is an epoch of the source's store, which grows while it is used. That a leaf is held as of
epoch e means: all changes up to e are in the copy, and perhaps some later ones. A change gives
whole entries, so applying one twice does no harm; leaving one out would.

 1. A delta made since `base` is applied only onto a copy that is held as of exactly `base`, of this
    life of the source (`source`), this generation, and in the round that asked for it. Else all of
    the leaf must come.
 2. What the source compares with is what the target says that it holds, and nothing that the source
    has sent: what it sent may never have come.
 3. A leaf that is in a step is not in any round: no copy that is late lands on what became state.
 4. A copy that was touched by a step that failed is not used again.
 5. A round that was interrupted confirms nothing of leaves that were not in it.

A source that was started anew, or has dropped the shadow, does not know it, and says so (Unknown):
epochs of its store mean something in one life only.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Shade(NamedTuple):
    shadow: str
    generation: int
    leaves: tuple[range, ...]


class Shaded(NamedTuple):
    shadow: str
    generation: int
    source: str


class Round(NamedTuple):
    shadow: str
    generation: int
    number: int
    held: tuple[tuple[int, int], ...]  # leaf, epoch; 0: nothing of it


class Copied(NamedTuple):
    shadow: str
    generation: int
    source: str
    number: int
    leaf: int
    base: int  # 0: all of the leaf
    epoch: int
    content: Any = None


class NotCopied(NamedTuple):
    shadow: str
    generation: int
    source: str
    number: int
    leaf: int


class RoundDone(NamedTuple):
    shadow: str
    generation: int
    source: str
    number: int
    epoch: int
    copies: int


class Unshade(NamedTuple):
    shadow: str
    generation: int


class Unknown(NamedTuple):
    shadow: str
    generation: int
    source: str


class Shadow:
    """The target's side of one shadow."""

    def __init__(self, name: str, generation: int, leaves: Iterable[int]) -> None:
        self.name = name
        self.generation = generation
        self.source = ""  # "" before it has answered
        self.number = 0  # of the last round
        self.is_over = False
        self.held: dict[int, int] = dict.fromkeys(leaves, 0)  # leaf: epoch
        self.stepping: dict[int, int] = {}  # the same, of leaves that are being taken over
        self._came: set[int] = set()  # in this round
        self._refused: set[int] = set()

    def on_shaded(self, shaded: Shaded) -> bool:
        """Whether rounds may begin. Another life of the source has nothing to do with this one."""
        if self.is_over or shaded.shadow != self.name or shaded.generation != self.generation:
            return False
        if self.source and shaded.source != self.source:
            self.end()
            return False
        self.source = shaded.source
        return True

    def round(self) -> Round:
        """The next round. What comes of an earlier one does not count any more."""
        assert self.source, "nobody has agreed to a shadow yet"
        self.number += 1
        self._came.clear()
        self._refused.clear()
        return Round(self.name, self.generation, self.number, tuple(self.held.items()))

    def _is_current(self, message: Any) -> bool:
        return (
            not self.is_over
            and message.shadow == self.name
            and message.generation == self.generation
            and message.source == self.source
            and message.number == self.number
        )

    def accepts(self, copied: Copied) -> bool:
        """Whether the copy may be applied: all of a leaf, or exactly what is missing here."""
        if not self._is_current(copied) or copied.leaf in self._came:
            return False
        base = self.held.get(copied.leaf)
        return base is not None and copied.base in (0, base)

    def applied(self, copied: Copied) -> None:
        """An outcome of accepts(): the copy is in the shadow."""
        assert self.accepts(copied), f"{copied} was not to be applied"
        self._came.add(copied.leaf)
        self.held[copied.leaf] = copied.epoch

    def spoiled(self, leaf: int) -> None:
        """The leaf's copy is of no use: all of it must come."""
        if leaf in self.held:
            self.held[leaf] = 0

    def on_not_copied(self, message: NotCopied) -> None:
        if self._is_current(message) and message.leaf in self.held:
            self._refused.add(message.leaf)
            self.held[message.leaf] = 0

    def on_done(self, done: RoundDone) -> bool:
        """Whether the round is complete. Then leaves that were not in it have not changed."""
        if not self._is_current(done) or done.copies != len(self._came):
            return False
        for leaf, epoch in self.held.items():
            if epoch and leaf not in self._came and leaf not in self._refused:
                self.held[leaf] = max(epoch, done.epoch)
        return True

    def on_unknown(self, unknown: Unknown) -> None:
        if unknown.shadow == self.name and unknown.generation == self.generation:
            self.end()

    # ---- Steps

    def step(self, leaves: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """These leaves are about to be taken over: what is held of them. They leave the rounds."""
        for leaf in leaves:
            if leaf in self.held:
                self.stepping[leaf] = self.held.pop(leaf)
        if self.is_over:
            return ()
        return tuple((leaf, at) for leaf in leaves if (at := self.stepping.get(leaf, 0)))

    def fits(self, source: str, generation: int, leaf: int, base: int) -> bool:
        """Whether the last changes of a leaf, made since `base`, complete the copy of it."""
        return (
            not self.is_over
            and (source, generation) == (self.source, self.generation)
            and base > 0
            and self.stepping.get(leaf) == base
        )

    def stepped(self, leaves: Iterable[int], is_taken: bool) -> None:
        """A step is over. If it did not take place, the leaves are copied anew."""
        for leaf in leaves:
            if self.stepping.pop(leaf, None) is not None and not is_taken:
                self.held[leaf] = 0

    def end(self) -> None:
        """It is dropped, here or there: nothing of it may be used any more."""
        self.is_over = True
        self.held.clear()
        self.stepping.clear()


class _Shade:
    __slots__ = ("_leaves", "_starts", "acknowledged", "number", "target")

    def __init__(self, target: str, leaves: tuple[range, ...]) -> None:
        self.target = target
        self._leaves = sorted(leaves, key=lambda run: run.start)
        self._starts = [run.start for run in self._leaves]
        self.number = 0  # of the last round that was asked for
        self.acknowledged = 0  # the oldest epoch that the target holds something as of; 0: nothing

    def has(self, leaf: int) -> bool:
        at = bisect_right(self._starts, leaf)
        return at > 0 and leaf in self._leaves[at - 1]


class Shades:
    """The source's side of all shadows of its leaves."""

    def __init__(self, source: str, generation: int) -> None:
        self.source = source
        self.generation = generation
        self._shades: dict[str, _Shade] = {}

    def __contains__(self, shadow: str) -> bool:
        return shadow in self._shades

    def __len__(self) -> int:
        return len(self._shades)

    def on_shade(self, sender: str, shade: Shade) -> Shaded | None:
        """None if it is of another generation, or somebody else's."""
        if shade.generation != self.generation:
            return None
        known = self._shades.setdefault(shade.shadow, _Shade(sender, shade.leaves))
        if known.target != sender:
            return None
        return Shaded(shade.shadow, self.generation, self.source)

    def on_round(self, sender: str, asked: Round, now: int) -> dict[int, int] | Unknown | None:
        """Per leaf: since when its changes are to be sent; 0: all of it.

        now: the present epoch of the store. None: a later round was asked for before.
        """
        known = self._known(sender, asked.shadow, asked.generation)
        if known is None:
            return Unknown(asked.shadow, asked.generation, self.source)
        if asked.number < known.number:
            return None
        known.number = asked.number
        held = {leaf: epoch if epoch < now else 0 for leaf, epoch in asked.held if known.has(leaf)}
        known.acknowledged = min((epoch for epoch in held.values() if epoch), default=0)
        return held

    def since(self, sender: str, shadow: str, generation: int, leaf: int, held: int) -> int:
        """In a step: since when the changes of a leaf complete the target's copy; 0: send all."""
        known = self._known(sender, shadow, generation)
        if known is None or not known.has(leaf):
            return 0
        return held

    def target_of(self, shadow: str) -> str:
        """Whose it is; "" if it is not known."""
        known = self._shades.get(shadow)
        return "" if known is None else known.target

    def needed(self, shadow: str) -> int:
        """The oldest epoch since which this shadow may ask for changes; 0: it holds nothing."""
        known = self._shades.get(shadow)
        return 0 if known is None else known.acknowledged

    def drop(self, shadow: str) -> None:
        self._shades.pop(shadow, None)

    def fence(self, generation: int) -> None:
        """A later generation has begun: nothing of before counts."""
        self.generation = generation
        self._shades.clear()

    def _known(self, sender: str, shadow: str, generation: int) -> _Shade | None:
        known = self._shades.get(shadow)
        if known is None or known.target != sender or generation != self.generation:
            return None
        return known
