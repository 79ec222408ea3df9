"""Publisher: a number in a place, from being looked for to being a checkpoint's.

Publishing is the exclusive creation of a manifest (Storage.create). Whoever may do it, and why no
newer state is ever overridden, is told in ownership.py: an attempt looks at the newest manifest n,
means to be n + 1, and finds out afterwards if it was too slow.
"""

import contextlib

from statekit.checkpoint.ownership import Claim
from statekit.checkpoint.reader import Checkpoint
from statekit.errors import CheckpointError, NoCheckpointError
from statekit.format.manifest import Manifest, manifest_name, number_of
from statekit.storage import Storage

_TRIES_MAX = 8  # newest checkpoints that may be collected between being seen and being read


class Publisher:
    """Finds the number of the next checkpoint of a place, and publishes it."""

    def __init__(self, storage: Storage, claim: Claim) -> None:
        self._storage = storage
        self._claim = claim
        self._passed_over: list[int] = []  # numbers of manifests that nobody has finished

    def look(self) -> int:
        """The highest number there is. FencedError if the place has gone over to another."""
        for _ in range(_TRIES_MAX):
            numbers = self.numbers()
            newest = max(numbers, default=0)
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
        """Of all manifests that are there, finished or not."""
        numbers = (number_of(entry.name) for entry in self._storage.list())
        return [number for number in numbers if number]

    def publish(self, manifest: Manifest) -> Checkpoint | None:
        """Makes a checkpoint exist, durably. None if its number is taken.

        The packs are durable by now, and the number is one above what look() gave.
        """
        storage = self._storage
        # A name that is taken means that somebody else writes here: never overwrite.
        data = manifest.encode()
        if not storage.create(manifest.name, data, self._look_again):
            return None
        if (newest := max(self.numbers(), default=0)) > manifest.number:
            # We were slow: others have published this number and later ones, and perhaps have
            # collected it, so that our packs, which have the same names, may be gone.
            storage.retire(manifest.name)
            raise self.overtaken(newest)
        made = Checkpoint(storage, manifest, data)
        self._claim.published(made)
        return made

    def _look_again(self) -> None:
        """Before the manifest has contents: at those that nobody had finished."""
        with contextlib.suppress(NoCheckpointError):  # one is gone: who wrote it has given up
            self._claim.check(self._storage, self._passed_over)

    def overtaken(self, number: int) -> CheckpointError:
        """The exception for a number that another has. Raises FencedError if that replaces us."""
        with contextlib.suppress(CheckpointError):
            self._claim.check(self._storage, self.numbers())
        return CheckpointError(
            f"checkpoint {number} of {self._storage.shown!r} was published by another writer in "
            "the meantime; this one is given up. Let each provider have a directory of its own, or "
            "see whether an old process is still running."
        )

    def check_base(self, manifest: Manifest) -> None:
        """MissingFileError if the base was collected by a process that does not see our pins."""
        if manifest.base is not None and not self._storage.has_locks:
            self._storage.size(manifest_name(manifest.base))
