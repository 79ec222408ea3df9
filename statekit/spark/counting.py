"""How much of a state a task reads from its storage."""

from typing import Any


class CountingStorage:
    """A storage that counts the bytes that are read from it. All else is the storage's own.

    Only the one thread of a task reads, since nothing is loaded in the background.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.bytes_read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        data: bytes = self._storage.read(name, offset, length)
        self.bytes_read += len(data)
        return data

    def read_parts(self, name: str, parts: Any) -> Any:
        pieces = self._storage.read_parts(name, parts)
        self.bytes_read += sum(map(len, pieces))
        return pieces
