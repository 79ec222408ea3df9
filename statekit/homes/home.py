"""Homes: where the entries are that memory does not hold, and how one is found by its URL.

A home keeps rows. A row is named by its leaf, the number of its state and its encoded key, and
holds the entry's value as bytes, which mean nothing to the home. Providers of one process write
one at a time, but may read meanwhile, from several threads; a row that is being written may be
seen as it was before or as it is after, and nothing else.

Commits are made of these calls (ledger.py), so that every home has them: a home only has to keep
rows. One that can write many rows in one step says so (`is_atomic`) and commits cost half.

To add one, subclass Home and register a factory under the URL scheme, either with
register_home() or as an entry point of the group "statekit.homes"; docs/homes.md shows one
that takes thirty lines. statekit.testing.HomeConformance tells whether it is right.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qsl, unquote

from statekit.errors import ArgumentError, shorten

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Row: TypeAlias = tuple[int, int, bytes]  # leaf, number of the state, encoded key
Change: TypeAlias = tuple[Row, bytes | None]  # None: the row is deleted
#: Rows as one flat list: name, value, name, value, ... A name is the leaf (4 bytes), the number of
#: the state (2 bytes), both big endian, and the encoded key; the value None deletes the row. The
#: same row may occur more than once: the last one counts.
Named: TypeAlias = Sequence[bytes | None]

ENTRY_POINTS = "statekit.homes"
_PREFIX = Struct(">IH")
_SIZES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZES |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def row_name(leaf: int, state: int, key: bytes) -> bytes:
    """The name of a row, as Named has it."""
    return _PREFIX.pack(leaf, state) + key


def rows_of(named: Named) -> dict[Row, bytes | None]:
    """What a flat list of rows comes to: each row once."""
    pairs: Any = iter(named)
    return {
        (*_PREFIX.unpack_from(name), name[_PREFIX.size :]): value
        for name, value in zip(pairs, pairs, strict=True)
    }


class HomeSnapshot(ABC):
    """The rows of a home as they were at one moment. Any thread may read them."""

    @abstractmethod
    def load(self, leaf: int, state: int) -> Iterable[tuple[bytes, bytes]]:
        """All (key, value) that a leaf and state had, in any order."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of it. Closing twice does no harm."""


class Home(ABC):
    """A place for rows. Failures are raised as HomeError, with nothing half done where it can."""

    @abstractmethod
    def get(self, rows: Sequence[Row]) -> Sequence[bytes | None]:
        """The values of rows, in their order; None for one that is not there."""

    def get_one(self, leaf: int, state: int, key: bytes) -> bytes | None:
        """The value of one row: get() of it."""
        return self.get([(leaf, state, key)])[0]

    @abstractmethod
    def load(self, leaf: int, state: int) -> Iterable[tuple[bytes, bytes]]:
        """All (key, value) of a leaf and state, in any order."""

    @abstractmethod
    def write(self, changes: Sequence[Change]) -> None:
        """Puts and deletes rows: all of them, or (if it raises) perhaps only some.

        A row occurs once. After a failure the provider writes the same rows again.
        """

    @abstractmethod
    def read_meta(self) -> bytes | None:
        """The provider's own record (geometry and schemas); None in a new home."""

    @abstractmethod
    def write_meta(self, meta: bytes, expected: bytes | None) -> bool:
        """Replaces the record if it still is what is expected; False if another was quicker."""

    def clear(self, leaf: int, state: int) -> None:
        """Deletes all rows of a leaf and state."""
        self.write([((leaf, state, key), None) for key, _ in self.load(leaf, state)])

    def clear_leaves(self, leaves: range, states: int) -> None:
        """Deletes all rows of leaves, of states with numbers below `states`."""
        for leaf in leaves:
            for state in range(states):
                self.clear(leaf, state)

    #: Whether it is a copy that is gone when it is closed.
    is_private_copy = False

    #: Whether nobody else can open it while it is open, in any process.
    is_locked = False

    #: Whether write_rows() is one step: after a crash all of it is there, or nothing.
    is_atomic = False

    def write_rows(
        self, rows: Named, cleared: Iterable[tuple[int, int]] = (), durable: bool = False
    ) -> None:
        """Clears leaves and states, then puts and deletes rows in their order.

        durable: when it returns, all that was written so far survives a crash.
        """
        for leaf, state in cleared:
            self.clear(leaf, state)
        self.write([*rows_of(rows).items()])
        if durable:
            self.flush()

    def snapshot(self) -> HomeSnapshot | None:
        """The rows as they are now, to be read while they change; None if it has no such thing.

        Then a checkpoint copies rows before they are changed. It must be taken in no time, for
        the provider stands still meanwhile; and closing the home closes it.
        """
        return None

    def flush(self) -> None:  # noqa: B027  (not abstract: a home may have nothing to do)
        """Makes everything written so far survive a crash."""

    def close(self) -> None:  # noqa: B027
        """Lets go of files and connections. What was written stays."""

    def metrics(self) -> Mapping[str, float]:
        """Figures of the home's own, by name."""
        return {}


@dataclass(frozen=True, slots=True)
class HomeUrl:
    """A URL taken apart: "rocksdb:/var/state?memory=2GiB"."""

    text: str = field(repr=False)  # may have a password: messages use `shown`
    scheme: str
    place: str = field(repr=False)  # what follows "scheme:", without the query
    options: dict[str, str] = field(default_factory=dict)  # the query

    @classmethod
    def parse(cls, text: str) -> "HomeUrl":
        scheme, colon, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not colon or not scheme:
            raise ArgumentError(
                f"{shorten(text)} is no URL of a home. "
                'Use "memory:", "rocksdb:/path" or "redis://host:port/db".'
            )
        place, _, query = rest.partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        return cls(text, scheme.lower(), unquote(place), dict(pairs))

    @property
    def shown(self) -> str:
        """The text without user and password.

        >>> HomeUrl.parse("redis://me:secret@host/0").shown
        'redis://...@host/0'
        """
        return re.sub("//.*@", "//...@", self.text)

    def take_bytes(self, option: str, default: int) -> int:
        """A size among the options, removed from them: "2GiB" or a number of bytes."""
        text = self.options.pop(option, None)
        return default if text is None else parse_bytes(text, f"{option} in {self.shown!r}")

    def refuse_rest(self) -> None:
        """ArgumentError if options are left that nobody took."""
        if self.options:
            raise ArgumentError(
                f"{self.shown!r} has options that home {self.scheme!r} does not know: "
                f"{', '.join(sorted(self.options))}. Remove them."
            )


def parse_bytes(text: str | int, what: str = "a size") -> int:
    """A number of bytes: an int, or a text with a unit.

    >>> parse_bytes("1.5GiB"), parse_bytes("64 MB"), parse_bytes(4096)
    (1610612736, 64000000, 4096)
    """
    number = str(text).strip()
    unit = number.lstrip("0123456789.").strip()
    try:
        size = int(float(number[: len(number) - len(unit)]) * _SIZES[unit.lower()])
    except (KeyError, ValueError, OverflowError):
        raise ArgumentError(
            f"{shorten(text)} is no size ({what}). Write a number of bytes, or 512MiB, 2GiB."
        ) from None
    return size


HomeFactory: TypeAlias = Callable[[HomeUrl, int], Home]
_registered: dict[str, HomeFactory] = {}


def register_home(scheme: str, factory: HomeFactory) -> None:
    """Makes `statekit.open("scheme:...")` use a factory.

    It is called with the URL (whose options it takes out, refusing those it does not know) and
    the number of bytes that the home may use for caches of its own.
    """
    _registered[scheme.lower()] = factory


def is_home_scheme(scheme: str) -> bool:
    """Whether a URL that begins so is the URL of a home."""
    name = scheme.lower()
    return name == "memory" or name in _registered or bool(_installed(name))


def open_home(url: HomeUrl, cache_bytes: int) -> Home:
    """The home that a URL names."""
    factory = _registered.get(url.scheme)
    if factory is None:
        for point in _installed(url.scheme):
            factory = point.load()
            break
    if factory is None:
        known = {"memory", *_registered, *(point.name for point in _installed())}
        raise ArgumentError(
            f"{url.shown!r} names the home {url.scheme!r}, which is not installed. "
            f"There are: {', '.join(sorted(known))}."
        )
    return factory(url, cache_bytes)


def _installed(name: str | None = None) -> "list[EntryPoint]":
    """The homes that installed packages bring: all, or those of a name."""
    from importlib.metadata import entry_points  # it takes ten milliseconds

    return [point for point in entry_points(group=ENTRY_POINTS) if name in (None, point.name)]
