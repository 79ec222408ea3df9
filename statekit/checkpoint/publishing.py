"""Publisher: finds the next number of a place, and makes a checkpoint of that number exist.

Publishing is the exclusive creation of a manifest (Storage.create). ownership.py says who may do
it, and why no newer state is ever overridden: an attempt looks at the newest manifest n, tries to
become n + 1, and finds out afterwards if it was too slow.
"""

import contextlib

from statekit.assignment import show_groups, subtract
from statekit.checkpoint.ownership import Claim
from statekit.checkpoint.reader import Checkpoint, read_checkpoint
from statekit.errors import CheckpointError, DamagedError, MissingFileError, NoCheckpointError
from statekit.format.manifest import Manifest, manifest_name, number_of
from statekit.storage import Storage

_TRIES_MAX = 8  # how often the newest checkpoint may be collected between listing and reading


class Publisher:
    """Finds the number of the next checkpoint of a place, and publishes it."""

    def __init__(self, storage: Storage, claim: Claim) -> None:
        self._storage = storage
        self._claim = claim
        self._newest = 0  # the highest number that look() has seen
        self._passed_over: list[int] = []  # numbers of unfinished manifests that look() has seen

    def look(self) -> int:
        """The highest number there is. FencedError if the place belongs to another owner by now."""
        for _ in range(_TRIES_MAX):
            numbers = self.numbers()
            newest = self._newest = max(numbers, default=0)
            self._claim.see(newest)
            try:
                self._passed_over = self._claim.check(self._storage, numbers)
            except NoCheckpointError:
                continue  # collected in between: there is a newer one
            return newest
        raise CheckpointError(
            f"the checkpoints of {self._storage.shown!r} are deleted as quickly as they are found. "
            "Keep more of them (keep=), and see that nobody else publishes there."
        )

    def numbers(self) -> list[int]:
        """The numbers of all manifests that are there, finished or not."""
        numbers = (number_of(entry.name) for entry in self._storage.list())
        return [number for number in numbers if number]

    def publish(self, manifest: Manifest) -> Checkpoint | None:
        """Makes a checkpoint exist, durably. None if its number is taken.

        The packs are durable by now, and the number is one above what look() gave.
        """
        storage = self._storage
        # If the name is taken, somebody else writes here: never overwrite.
        data = manifest.encode()
        if not storage.create(manifest.name, data, self._look_again):
            return None
        newest = max(self.numbers(), default=0)
        if newest > manifest.number and not (manifest.parts and self._is_whole(manifest)):
            # We were slow: others have published this number and later ones. They may have
            # collected this number, too. Its packs have the same names as ours, so ours may be
            # gone. (If this is made of parts, somebody else may have published the same manifest,
            # byte for byte: if it is whole, it is as good as ours.)
            storage.retire(manifest.name)
            raise self.overtaken(newest)
        try:
            self.check_base(manifest)  # again: a collector may have looked before our manifest came
        except MissingFileError:
            if not self._is_whole(manifest):
                storage.retire(manifest.name)
                raise
        made = Checkpoint(storage, manifest, data)
        self._claim.published(made)
        return made

    def _is_whole(self, manifest: Manifest) -> bool:
        """Whether all files that the manifest needs are there."""
        return manifest.files <= {entry.name for entry in self._storage.list()}

    def _look_again(self) -> None:
        """Before the manifest has contents: looks again at manifests that were unfinished."""
        with contextlib.suppress(NoCheckpointError):  # one is gone: its writer has given up
            self._claim.check(self._storage, self._passed_over)

    def overtaken(self, number: int) -> CheckpointError:
        """The exception for a number that is taken. Raises FencedError if we were replaced."""
        with contextlib.suppress(CheckpointError):
            self._claim.check(self._storage, self.numbers())
        return CheckpointError(
            f"checkpoint {number} of {self._storage.shown!r} was published by another writer in "
            "the meantime; this one is given up. See whether an old process is still running. "
            "Providers that share a place write parts, which one publishes; others have a "
            "directory each."
        )

    def check_scope(self, manifest: Manifest) -> None:
        """CheckpointError if this would hide key-groups of a checkpoint that was made of parts."""
        last = self._claim.last
        if not self._newest or (last is not None and last.number == self._newest):
            return
        if manifest.owned == (range(manifest.key_groups),):
            return
        try:
            newest = read_checkpoint(self._storage, self._newest).manifest
        except (NoCheckpointError, DamagedError):
            return  # it cannot be read, so nothing is known of its parts
        if newest.parts and (hidden := subtract(newest.owned, manifest.owned)):
            raise CheckpointError(
                f"checkpoint {newest.number} of {self._storage.shown!r} was published from parts, "
                f"and one of this provider alone would hide its key-groups {show_groups(hidden)}. "
                "Use kv.write_part() and statekit.publish() here, or take it to another place."
            )

    def check_base(self, manifest: Manifest) -> None:
        """MissingFileError if the base was collected by a process that does not see our pins."""
        if manifest.base is not None and not self._storage.has_locks:
            self._storage.size(manifest_name(manifest.base))
