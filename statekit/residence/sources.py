"""Sources: where leaves come from that are neither here nor at home.

There are two kinds. They have nothing in common but that somebody must let go of them:

    pull   checkpoints. It has leaves as chains of blocks, can be read at any time, and never
           changes.
    push   a process that hands leaves over (migration/arrival.py). It cannot be read: it brings
           leaves, when asked and by itself. Of a large leaf single entries may come first. It
           forgets a leaf once it was told that the leaf is here.

A provider has one pull source at most (what it was restored from), and one push source for each
hand-over to it that is not done. `Sources` says which leaf comes from which of them.
"""

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from statekit.checkpoint.reader import Chain, Checkpoint, open_checkpoint, read_checkpoint
from statekit.errors import MissingFileError, NoCheckpointError, shorten
from statekit.format.manifest import manifest_name
from statekit.native.block import block_pieces, rewrite
from statekit.native.buffers import BufferSlice
from statekit.storage import Pin

if TYPE_CHECKING:
    from statekit.residence.loading import Loading

_OPEN_TRIES_MAX = 8  # newest checkpoints that may be retired between being found and being pinned
_SLICED_MAX = 8  # leaves of the checkpoint that are kept while they are being sliced

Wanted: TypeAlias = Mapping[str, Sequence[bytes]]  # encoded keys, by state


class PullSource(ABC):
    """What leaves are read from. Shared by providers; closed by the last one to let go."""

    is_far = False  # reading is mostly waiting, so that many threads at once pay
    advice = "Restore an older checkpoint: restore(..., at=number)."  # if a leaf is damaged

    def __init__(self) -> None:
        self._users = 1
        self._users_lock = threading.Lock()

    @abstractmethod
    def read_leaf(self, leaf: int) -> list[bytes]:
        """The leaf's blocks, newest step first; each step has one block of a state at most.

        They are of the provider's leaves, but of the types that they were stored with.
        """

    def locate(self, leaves: Sequence[int]) -> list[Chain]:
        """Of leaves, which ascend: those that single entries can be picked from, and where."""
        return []

    def checkpoint_of(self, leaf: int) -> Checkpoint | None:
        """The checkpoint that has this very leaf; None if the leaf is made of another's part."""
        return None

    def filled(self, leaves: int) -> Iterable[range]:
        """The leaves, of so many, that may have entries; all unless it knows better."""
        return (range(leaves),)

    def share(self) -> "PullSource":
        """The same source once more; release() must follow."""
        with self._users_lock:
            assert self._users > 0, "a source that was let go of"
            self._users += 1
        return self

    def release(self) -> None:
        with self._users_lock:
            self._users -= 1
            if self._users:
                return
        self._close()

    def _close(self) -> None:  # noqa: B027  (not abstract: there may be nothing to do)
        """Lets go of files. Nobody uses the source any more."""


class PushSource(ABC):
    """A process that hands leaves over. Nothing is written to one before something of it came."""

    advice: str  # if a leaf is damaged

    @abstractmethod
    def bring(self, leaves: Sequence[int], loading: "Loading") -> None:
        """Has loading.fill() take in leaves, in as few requests as possible."""

    @abstractmethod
    def bring_keys(self, leaves: Sequence[int], wanted: Wanted, loading: "Loading") -> None:
        """Has loading.spread() take in entries of leaves, or fill() these if that is better."""

    @abstractmethod
    def bring_timers(self, watermark: int, loading: "Loading") -> None:
        """Has loading take in the leaves that may have timers that are due at the watermark."""

    @property
    @abstractmethod
    def next_due(self) -> int | None:
        """No timer of a leaf that is to come is due earlier; None if there is none."""

    @abstractmethod
    def expects(self, leaf: int) -> bool:
        """Whether the leaf is still to come from here."""

    @abstractmethod
    def taken(self, leaf: int, steps: Sequence[bytes | BufferSlice] | None) -> None:
        """Told when something of a leaf is here; steps: all of it, and this is what it was."""

    @abstractmethod
    def wait_here(self, timeout: float | None) -> bool:
        """Until nothing is still to come that comes by itself; False if it has not in time."""

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Whether it can be let go of when all leaves are here: the process knows of them."""

    @property
    @abstractmethod
    def is_ended(self) -> bool:
        """Whether nothing more comes from it, and nobody waits for it, whatever others do."""

    @abstractmethod
    def to_read(self) -> PullSource:
        """For a checkpoint: the leaves that have not come, as they are when they come."""

    @abstractmethod
    def attaching(self) -> AbstractContextManager[bool]:
        """While a leaf is put in place as a whole: nobody begins to read. Whether somebody has."""

    @abstractmethod
    def release(self) -> None:
        """Lets go of it. What has not come is given back."""


class Sources:
    """Which leaf comes from where. It never changes: another one takes its place."""

    __slots__ = ("_routes", "has_push", "pull")

    def __init__(
        self,
        pull: PullSource | None,
        routes: tuple[tuple[frozenset[int], PushSource], ...] = (),
    ) -> None:
        self.pull = pull  # of all leaves that no push source has
        # The latest first: a leaf may have come, gone to another process, and come again.
        self._routes = routes
        self.has_push = bool(routes)  # whether some of them are processes that hand leaves over

    def is_one_with(self, other: "Sources") -> bool:
        """Whether what can be read here can be read there, and nothing else is to come."""
        return self.pull is other.pull and not self.has_push and not other.has_push

    @property
    def pushes(self) -> list[PushSource]:
        return [push for _, push in self._routes]

    def push_of(self, leaf: int) -> PushSource | None:
        """The process that this leaf comes from; None: it is to be read from `pull`."""
        for leaves, push in self._routes:
            if leaf in leaves:
                return push
        return None

    def by_push(self, leaves: Iterable[int]) -> dict[PushSource, list[int]]:
        """Those of the leaves that processes hand over, by process."""
        found: dict[PushSource, list[int]] = {}
        for leaf in leaves:
            if (push := self.push_of(leaf)) is not None:
                found.setdefault(push, []).append(leaf)
        return found

    def with_push(self, push: PushSource, leaves: Iterable[int]) -> "Sources":
        """These, and leaves that a process hands over from now on.

        Hand-overs that are done make room, and are let go of. Or there would be one more with
        each, for as long as there is always one that is not done.
        """
        kept = []
        for route in self._routes:
            if route[1].is_ended:
                route[1].release()
            else:
                kept.append(route)
        return Sources(self.pull, ((frozenset(leaves), push), *kept))

    def to_read(self) -> PullSource:
        """All of them as one source that can be read, for a checkpoint; release() must follow."""
        pull = None if self.pull is None else self.pull.share()
        if not self._routes:
            assert pull is not None, "leaves come from somewhere"
            return pull
        # Source by source: a process must know whether somebody still reads what it hands over.
        return RoutedPull([(leaves, push.to_read()) for leaves, push in self._routes], pull)

    def release(self) -> None:
        for push in self.pushes:
            push.release()
        if self.pull is not None:
            self.pull.release()

    def __repr__(self) -> str:
        shown = [repr(push) for push in self.pushes]
        if self.pull is not None:
            shown.append(repr(self.pull))
        return shown[0] if len(shown) == 1 else f"<{' and '.join(shown)}>"


class RoutedPull(PullSource):
    """Pull sources for some leaves, and perhaps one for all others. They are its own."""

    def __init__(
        self, routes: Sequence[tuple[frozenset[int], PullSource]], rest: PullSource | None
    ) -> None:
        super().__init__()
        self._routes = routes
        self._rest = rest
        self.is_far = any(pull.is_far for _, pull in routes)

    def _of(self, leaf: int) -> PullSource:
        for leaves, pull in self._routes:
            if leaf in leaves:
                return pull
        assert self._rest is not None, f"leaf {leaf} comes from nowhere"
        return self._rest

    def read_leaf(self, leaf: int) -> list[bytes]:
        return self._of(leaf).read_leaf(leaf)

    def checkpoint_of(self, leaf: int) -> Checkpoint | None:
        return self._of(leaf).checkpoint_of(leaf)

    def _close(self) -> None:
        for _, pull in self._routes:
            pull.release()
        if self._rest is not None:
            self._rest.release()


# ---- Checkpoints


def open_pinned(place: Any, at: Any) -> tuple[Checkpoint, Pin]:
    """A checkpoint that is not deleted from now on. place: a URL, or a Checkpoint: that one."""
    if isinstance(place, Checkpoint):
        return place, place.pin()
    for _ in range(_OPEN_TRIES_MAX):
        found = open_checkpoint(place, at)
        storage = found.storage
        try:
            pin = storage.pin(manifest_name(found.number))
        except MissingFileError:
            continue  # retired in between: then there is a newer one, or an error will say so
        try:
            # Once more: only what is read under the pin is sure to stay.
            checkpoint = read_checkpoint(storage, found.number)
            checkpoint.seen = found.seen
            return checkpoint, pin
        except BaseException:
            pin.release()
            raise
    raise NoCheckpointError(
        f"the checkpoints of {shorten(place)} are deleted as quickly as they are found. "
        "Keep more of them (keep=), or restore a copy of the directory."
    )


class CheckpointSource(PullSource):
    """Checkpoints as a source, for a store of so many leaves: as many as theirs, or more.

    Their manifests are pinned, so that nothing they refer to is deleted meanwhile; the pins are
    the source's from then on.
    """

    def __init__(self, pinned: Sequence[tuple[Checkpoint, Pin]], leaves: int) -> None:
        super().__init__()
        self._leaves = leaves
        self._spans: list[tuple[range, int, Checkpoint]] = []  # of our leaves, times finer, whose
        self._sliced: OrderedDict[tuple[int, int], list[bytes]] = OrderedDict()
        self._sliced_lock = threading.Lock()
        self._pins = [pin for _, pin in pinned]
        self.is_far = not all(one.storage.is_local for one, _ in pinned)
        for checkpoint, _ in pinned:
            width = leaves // checkpoint.key_group_count  # of a key-group, in our leaves
            finer = leaves // (checkpoint.key_group_count * checkpoint.subgroups)
            assert finer >= 1, "leaves are sliced, never joined"
            for part in checkpoint.key_groups:
                span = range(part.start * width, part.stop * width)
                self._spans.append((span, finer, checkpoint))
        if len(pinned) == 1 and pinned[0][0].leaf_count == leaves:
            # Nothing to choose from, and nothing to slice: its leaves are ours.
            self.read_leaf = pinned[0][0].read_leaf  # type: ignore[method-assign]
            self.locate = pinned[0][0].locate  # type: ignore[method-assign]

    def filled(self, leaves: int) -> Iterable[range]:
        for checkpoint in {id(one): one for _, _, one in self._spans}.values():
            finer = leaves // checkpoint.manifest.leaves
            run = range(0)
            for leaf in dict.fromkeys(checkpoint.manifest.segments.leaves.tolist()):
                start = leaf * finer
                if start == run.stop and run:
                    run = range(run.start, start + finer)
                    continue
                yield run
                run = range(start, start + finer)
            yield run

    def _find(self, leaf: int) -> tuple[int, Checkpoint] | None:
        for span, finer, checkpoint in self._spans:
            if leaf in span:
                return finer, checkpoint
        return None

    def checkpoint_of(self, leaf: int) -> Checkpoint | None:
        found = self._find(leaf)
        return found[1] if found is not None and found[0] == 1 else None

    def locate(self, leaves: Sequence[int]) -> list[Chain]:
        found: list[Chain] = []
        for checkpoint, some in groupby(leaves, self.checkpoint_of):
            if checkpoint is not None:
                found += checkpoint.locate([*some])
        return found

    def read_leaf(self, leaf: int) -> list[bytes]:
        found = self._find(leaf)
        if found is None:
            return []
        finer, checkpoint = found
        if finer == 1:
            return checkpoint.read_leaf(leaf)
        steps = []
        for blocks in self._read_coarse(checkpoint, leaf // finer):
            step = [
                rewrite(bytes(piece), leaf=leaf, leaves=self._leaves)
                for _, piece in block_pieces(blocks)
            ]
            steps.append(b"".join(step))
        return steps

    def _read_coarse(self, checkpoint: Checkpoint, leaf: int) -> list[bytes]:
        """A leaf of the checkpoint. Its slices are wanted one after the other: it is kept."""
        name = (id(checkpoint), leaf)
        with self._sliced_lock:
            if name in self._sliced:
                return self._sliced[name]
        steps = checkpoint.read_leaf(leaf)
        with self._sliced_lock:
            self._sliced[name] = steps
            while len(self._sliced) > _SLICED_MAX:
                self._sliced.popitem(last=False)
        return steps

    def _close(self) -> None:
        for pin in self._pins:
            pin.release()
        self._pins = []

    def __repr__(self) -> str:
        shown = {id(one): f"{one.url!r} number {one.number}" for _, _, one in self._spans}
        return f"<CheckpointSource: {', '.join(shown.values()) or 'nothing'}>"
