"""Who owns a place of checkpoints: a process that was replaced can publish nothing more there.

Without this rule, acknowledged work could be lost:

    process a takes checkpoint 1; it stalls, and is believed to be dead
    process b restores 1, goes on, and takes checkpoint 2
    process a wakes up and takes its next checkpoint: 3, of state that b has replaced
    whoever restores next gets a's state, and what b had acknowledged is lost

So a manifest says who published it:

    owner        16 hexadecimal digits that a provider draws when it is made
    generation   1 + the highest number in the place when its publisher first saw it: when it was
                 restored from there, or else at its first checkpoint there

A publisher is refused with FencedError if the newest manifest is of a later generation, or of its
own generation and another owner. A process that starts anew, after kill -9 for example, is never
locked out: it sees a higher number than all before it, so its generation is higher. Seeing numbers
does not need reading manifests, so a damaged manifest does not lock it out either: a generation is
never above the number of its checkpoint.

There is no moment between looking and publishing in which the answer could change:

    1. an attempt takes the highest number n that it sees, looks at manifest n, and tries to become
       number n + 1
    2. publishing is the exclusive creation of n + 1 (Storage.create). If anybody has published
       since step 1, they published n + 1 first, since everybody counts by one. So the creation
       fails: a later generation was not overridden, but has won
    3. others may have published n + 1 and more, and a collection may have removed n + 1 again. Then
       the creation succeeds, but there is a higher number, since no collection removes the highest.
       A restore never takes the lower number. Its publisher sees the higher number afterwards,
       withdraws its own, and fails (publishing.py)

All this relies on one property: creation is exclusive, and creates the whole file or nothing:

    local directory    link() fails if the name exists, on all machines that see the file system
    without link()     open() with O_EXCL reserves the name, and the contents follow. See below
    S3 and the like    a put on condition that there is no such object; the server decides
    memory://          a lock of this process
    others of fsspec   nothing: they look, and then put. A process that was replaced is refused from
                       the moment on at which it can see the newer checkpoint. Two processes that
                       publish the same number at the same moment can both succeed there

Where the contents follow the name, an attempt may find n + 1 reserved but unfinished: its writer
has died, or is still writing. The attempt passes over n + 1, looks at manifest n, and tries to
become n + 2. If n + 1 is finished meanwhile, one of the two writers must notice:

    the writer of n + 1    finishes it, and then looks for higher names: if there is one, it
                           withdraws
    the writer of n + 2    reserves the name, and then looks at n + 1 again: if that is finished
                           now, it decides; the contents of n + 2 are written only after this look

Each makes its own step visible before it looks for the other's, so they cannot both miss it.

A checkpoint that was published from parts (parts.py) has several writers, and all of them are its
owners. Its generation is the highest of theirs, and each of them has this generation from then on.
A process that replaces one of them has restored a checkpoint, so its generation is higher than all
of these. So generations never fall from one checkpoint to the next. Parts are published in the name
of all their writers: each of them must be allowed to publish. A writer that was not among the
writers of the last checkpoint is treated as one that was replaced. So even a writer that owns
nothing writes a part.

Compacting a checkpoint publishes in the name of its owner, who goes on as before. An edit or a
regroup in place makes a state that no running process has, so it is a generation of its own.
"""

import secrets
from collections.abc import Iterable, Sequence

from statekit.checkpoint.reader import Checkpoint, UnfinishedError, read_checkpoint
from statekit.errors import DamagedError, FencedError
from statekit.storage import Storage


def draw_owner() -> str:
    """A name for a publisher, which no other publisher has."""
    return secrets.token_hex(8)


class Claim:
    """A publisher's claim to a place: its name, and its generation there."""

    def __init__(self, owner: str | None = None, seen: int | None = None) -> None:
        """seen: the highest number in the place; None if nobody has looked yet."""
        self.owner = draw_owner() if owner is None else owner
        self.generation = 0 if seen is None else seen + 1
        self.writers: tuple[str, ...] = ()  # the owners, if there are several
        self.last: Checkpoint | None = None  # the last one published with this claim

    def see(self, newest: int) -> None:
        """Fixes the generation, if this is the first look at the place."""
        if not self.generation:
            self.generation = newest + 1

    def published(self, checkpoint: Checkpoint) -> None:
        """Takes note of a checkpoint that this publisher has made."""
        self.last = checkpoint
        # It is lower than claimed if the place was emptied meanwhile: then the lower one counts.
        self.generation = checkpoint.manifest.generation

    def check(self, storage: Storage, numbers: Iterable[int]) -> list[int]:
        """FencedError if the newest checkpoint was published by a successor of this publisher.

        numbers: those of all manifests. Returns the numbers of unfinished manifests above the one
        that decided. NoCheckpointError if a manifest is gone by now: then there are others.
        """
        passed_over: list[int] = []
        for number in sorted(numbers, reverse=True):
            if self._is_above(number) or self._is_last(number):
                break
            try:
                self._compare(read_checkpoint(storage, number))
                break
            except UnfinishedError:
                passed_over.append(number)
            except DamagedError as error:
                if self.last is not None and self.last.number == number:
                    break  # it was our own, and can say nothing any more
                error.add_note(
                    "Nothing is published over a checkpoint of another process that cannot be "
                    "read. Move that file away, or take checkpoints to another place."
                )
                raise
        return passed_over

    def _is_above(self, number: int) -> bool:
        """Whether no checkpoint of that number can be published by a successor."""
        return self.generation > number

    def _is_last(self, number: int) -> bool:
        last = self.last
        return last is not None and last.number == number and last.exists()

    def _compare(self, newest: Checkpoint) -> None:
        theirs = newest.manifest
        if theirs.generation < self.generation:
            return
        if theirs.generation == self.generation and theirs.owner == self.owner:
            return
        if self.owner in theirs.writers:
            # As if this publisher had published that checkpoint alone. Otherwise its next one would
            # have a lower generation, and let in again a process that was shut out.
            self.generation = theirs.generation
            return
        raise FencedError(
            f"this process was replaced: checkpoint {newest.number} of {newest.url!r} is of "
            f"generation {theirs.generation}, owner {theirs.owner}, and this one is of generation "
            f"{self.generation}, owner {self.owner}. Nothing was published. End this process; if "
            "it is to go on nevertheless, restore the newest checkpoint, or take checkpoints to "
            "another place."
        )


class Caretaker(Claim):
    """Publishes the same state in another shape, in the name of whoever published last.

    In an empty place that is nobody: the first provider that goes on from there becomes the owner.
    """

    def __init__(self) -> None:
        super().__init__(owner="")

    def see(self, newest: int) -> None:
        """Does nothing: a caretaker has no generation of its own."""

    def _compare(self, newest: Checkpoint) -> None:
        theirs = newest.manifest
        self.owner, self.generation, self.writers = theirs.owner, theirs.generation, theirs.writers


class Together(Claim):
    """Publishes in the name of several writers, each of which must be allowed to."""

    def __init__(self, claims: Sequence[tuple[str, int]]) -> None:
        """claims: owner and generation of each writer."""
        self._claims = []
        for owner, generation in claims:
            one = Claim(owner)
            one.generation = generation
            self._claims.append(one)
        owners = tuple(sorted({owner for owner, _ in claims}))
        super().__init__(owners[0])
        self.generation = max(generation for _, generation in claims)
        self.writers = owners if len(owners) > 1 else ()

    def _is_above(self, number: int) -> bool:
        return all(one._is_above(number) for one in self._claims)

    def _compare(self, newest: Checkpoint) -> None:
        for one in self._claims:
            one._compare(newest)
        self.generation = max(one.generation for one in self._claims)
