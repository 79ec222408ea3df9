"""All the states in which a power loss may leave a disk, from a log of what a program did to it.

The model is what POSIX promises and no more. (Journalling file systems give more; a program that
relies on that is wrong on other file systems.)

  - A write, a truncation or an allocation is safe when a later fsync or fdatasync of that file has
    returned 0. Until then any subset of them may have reached the disk, in any order, each whole,
    not at all, or in part: cut at a multiple of 512 bytes (sector) or 4096 (page), only its tail,
    or only as a longer file full of zeros.
  - A creation, link, rename, unlink or mkdir is safe when a later fsync of the directory (of both,
    for a rename between two) has returned 0. Until then any subset may have happened, in any order.
    One rename is whole or not at all. fsync of a file does not make its name safe.
  - If an fsync fails, what it should have made safe is never safe: the kernel may drop the pages
    and report success the next time. Those writes stay optional for ever.
  - What was there when the log began is safe.

States of a moment: if at most 12 operations are not yet safe, all subsets; else all prefixes, all
but one, each one alone, and seeded random subsets. Besides, each operation that can be done in part
is done in part in turn: with all others whole, with only those before it, and with random ones.
Moments are before the first call and after each one. Equal states with equal promises come once.

    for state in crash_states(entries, initial, root):
        disk.materialise(state, directory)
        ... open it; state.marks is what the program had promised by then
"""

import hashlib
import itertools
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shim import Entry, Flag

SECTOR = 512
PAGE = 4096
EXHAUSTIVE_MAX = 12
CUTS_MAX = 16  # places where one write is cut, of each unit
DIGESTS_MAX = 256  # contents kept alive for their digests
MAP_SHARED, PROT_WRITE = 1, 2


class UnmodelledError(Exception):
    """The log has something whose crash states this module does not know."""


class State(NamedTuple):
    """A disk after power loss. Paths are relative to the root; a directory's ends with "/"."""

    files: dict[str, bytes]
    marks: tuple[str, ...]  # of the program, before the power went
    moment: int  # index of the last call that was made
    lost: tuple[str, ...]  # what did not reach the disk, or only in part

    def __str__(self) -> str:
        lost = "; ".join(self.lost) or "nothing"
        return f"power lost after call {self.moment}, marks {list(self.marks)}, lost: {lost}"


# How much of one operation reached the disk.
@dataclass(frozen=True)
class Part:
    """Bytes [start, stop) of a write; is_zeros: only the length of the file."""

    start: int
    stop: int
    is_zeros: bool = False

    def __str__(self) -> str:
        return "as zeros" if self.is_zeros else f"only [{self.start}, {self.stop})"


@dataclass(eq=False)
class _File:
    base: bytes  # what is safe
    pending: list["_Data"] = field(default_factory=list)
    doomed: list["_Data"] = field(default_factory=list)  # an fsync failed: never safe
    settled: list["_Data"] = field(default_factory=list)  # safe, and later than a doomed one


@dataclass(eq=False)
class _Directory:
    live: dict[str, "_File | _Directory"] = field(default_factory=dict)
    safe: dict[str, "_File | _Directory"] = field(default_factory=dict)


_Node = _File | _Directory


@dataclass(eq=False)
class _Data:
    """A write (data), or a new size (data is None)."""

    text: str
    index: int
    file: _File
    offset: int
    data: bytes | None
    is_growth: bool = False  # a new size that never makes the file shorter

    def apply(self, content: bytearray, part: Part | None) -> None:
        if self.data is None:
            size = max(self.offset, len(content)) if self.is_growth else self.offset
            del content[size:]
            content.extend(bytes(size - len(content)))
            return
        part = part or Part(0, len(self.data))
        end = self.offset + part.stop
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        if not part.is_zeros:
            content[self.offset + part.start : end] = self.data[part.start : part.stop]

    def parts(self) -> list[Part]:
        """Ways to be done in part: zeros, and each side of every cut, or of evenly spread cuts."""
        if self.data is None:
            return []
        size = len(self.data)
        parts = [Part(0, size, is_zeros=True)] if size else []
        for unit in (SECTOR, PAGE):
            first = unit - self.offset % unit  # units count from the start of the file
            cuts = range(first, size, unit)
            step = -(-len(cuts) // CUTS_MAX) or 1
            for cut in {*cuts[::step], *cuts[-1:]}:
                parts += [Part(0, cut), Part(cut, size)]
        return sorted(set(parts), key=lambda part: (part.is_zeros, part.start, part.stop))


@dataclass(eq=False)
class _Names:
    """Entries of directories that change together. `waiting`: directories not yet synced."""

    text: str
    index: int
    changes: list[tuple[_Directory, str, _Node | None]]
    waiting: list[_Directory]

    def apply(self, entries: dict[_Directory, dict[str, _Node]]) -> None:
        for directory, name, node in self.changes:
            if node is None:
                entries[directory].pop(name, None)
            else:
                entries[directory][name] = node


class Replay:
    """The disk while the log goes on: what is safe, and what is not yet."""

    def __init__(self, root: str, initial: dict[str, bytes], inodes: dict[str, int] | None = None):
        """`initial` is as tree_of gives it; `inodes` of its files if some are open already."""
        self._root_path = os.path.realpath(root)
        self.root = _Directory()
        self._directories = [self.root]
        self._by_inode: dict[int, _File] = {}
        self._names: list[_Names] = []
        self._data: list[_Data] = []
        for path in sorted(initial):
            parent, name = self._parent(path.rstrip("/"))
            node: _Node = _Directory() if path.endswith("/") else _File(initial[path])
            parent.live[name] = parent.safe[name] = node
            if isinstance(node, _Directory):
                self._directories.append(node)
            elif inodes and path in inodes:
                self._by_inode[inodes[path]] = node

    # ---- the log ----

    def apply(self, entry: Entry, index: int) -> None:
        """Applies one more call."""
        if entry.call in ("fsync", "fdatasync"):
            self._sync(entry)
            return
        if entry.error:
            return
        handler = getattr(self, f"_on_{entry.call}", None)
        if handler is not None:
            handler(entry, index)

    def _on_open(self, entry: Entry, index: int) -> None:
        if entry.flags & Flag.DIRECTORY:
            return
        if entry.flags & Flag.CREATED:
            file = _File(b"")
            self._by_inode[entry.inode] = file
            if not entry.flags & Flag.UNNAMED:
                directory, name = self._place(entry.path)
                self._rename(str(entry), index, [(directory, name, file)])
            return
        node = self._node(entry.path)
        if isinstance(node, _File):
            self._by_inode[entry.inode] = node
            if entry.flags & Flag.TRUNCATED and self._size(node):
                self._change(_Data(str(entry), index, node, 0, None))

    def _on_write(self, entry: Entry, index: int) -> None:
        if entry.data:
            file = self._by_inode[entry.inode]
            self._change(_Data(str(entry), index, file, entry.offset, entry.data))

    _on_pwrite = _on_writev = _on_pwritev = _on_copy = _on_write

    def _on_truncate(self, entry: Entry, index: int) -> None:
        node = self._by_inode.get(entry.inode) or self._node(entry.path)
        assert isinstance(node, _File)
        self._change(_Data(str(entry), index, node, entry.length, None))

    def _on_fallocate(self, entry: Entry, index: int) -> None:
        if entry.argument:
            raise UnmodelledError(f"fallocate with mode {entry.argument}")
        file = self._by_inode[entry.inode]
        self._change(_Data(str(entry), index, file, entry.length, None, is_growth=True))

    def _on_mmap(self, entry: Entry, index: int) -> None:
        if entry.argument >> 32 & PROT_WRITE and entry.argument & MAP_SHARED:
            raise UnmodelledError(f"stores through a shared mapping of {entry.path}")

    def _on_mkdir(self, entry: Entry, index: int) -> None:
        directory, name = self._place(entry.path)
        node = _Directory()
        self._directories.append(node)
        self._rename(str(entry), index, [(directory, name, node)])

    def _on_link(self, entry: Entry, index: int) -> None:
        directory, name = self._place(entry.path2)
        self._rename(str(entry), index, [(directory, name, self._by_path_or_inode(entry))])

    def _on_rename(self, entry: Entry, index: int) -> None:
        if entry.argument & ~1:  # RENAME_NOREPLACE makes no difference here
            raise UnmodelledError(f"renameat2 with flags {entry.argument}")
        source, old = self._place(entry.path)
        target, new = self._place(entry.path2)
        node = source.live[old]
        if target.live.get(new) is not node:  # two names of one file: rename does nothing
            self._rename(str(entry), index, [(source, old, None), (target, new, node)])

    def _on_unlink(self, entry: Entry, index: int) -> None:
        directory, name = self._place(entry.path)
        self._rename(str(entry), index, [(directory, name, None)])

    _on_rmdir = _on_unlink

    def _sync(self, entry: Entry) -> None:
        if entry.flags & Flag.DIRECTORY:
            directory = self._node(entry.path)
            if entry.error or not isinstance(directory, _Directory):
                return  # names of a directory whose fsync failed stay optional until one works
            for change in self._names:
                if directory in change.waiting:
                    change.waiting.remove(directory)
            safe = [change for change in self._names if not change.waiting]
            for change in safe:
                change.apply({each: each.safe for each, _, _ in change.changes})
            self._names = [change for change in self._names if change.waiting]
            return
        file = self._by_inode[entry.inode]
        if entry.error:
            file.doomed += file.pending
        else:
            if file.doomed:
                file.settled += file.pending
            else:
                file.base = self._content(file, file.pending, {})
            gone = set(map(id, file.pending))
            self._data = [each for each in self._data if id(each) not in gone]
        file.pending = []

    # ---- states ----

    @property
    def pending(self) -> list[_Data | _Names]:
        """What is not safe, in the order of the log."""
        return sorted([*self._names, *self._data], key=lambda each: each.index)

    def tree(
        self, chosen: Iterable[_Data | _Names], parts: dict[int, Part] | None = None
    ) -> dict[str, bytes]:
        """The disk if just these of the unsafe operations got there; `parts`: by id(), only in
        part.
        """
        ordered = sorted(chosen, key=lambda each: each.index)
        entries = {each: dict(each.safe) for each in self._directories}
        data: dict[int, list[_Data]] = {}
        for each in ordered:
            if isinstance(each, _Names):
                each.apply(entries)
            else:
                data.setdefault(id(each.file), []).append(each)
        found: dict[str, bytes] = {}
        self._walk(self.root, "", entries, data, parts or {}, found)
        return found

    def _walk(
        self,
        directory: _Directory,
        base: str,
        entries: dict[_Directory, dict[str, _Node]],
        data: dict[int, list[_Data]],
        parts: dict[int, Part],
        found: dict[str, bytes],
    ) -> None:
        for name, node in entries[directory].items():
            if isinstance(node, _Directory):
                found[f"{base}{name}/"] = b""
                self._walk(node, f"{base}{name}/", entries, data, parts, found)
            else:
                found[base + name] = self._content(node, data.get(id(node), []), parts)

    def _content(self, file: _File, changes: Sequence[_Data], parts: dict[int, Part]) -> bytes:
        if not changes and not file.settled:
            return file.base
        content = bytearray(file.base)
        for change in sorted([*file.settled, *changes], key=lambda each: each.index):
            change.apply(content, parts.get(id(change)))
        return bytes(content)

    # ---- small things ----

    def _size(self, file: _File) -> int:
        return len(self._content(file, [*file.doomed, *file.pending], {}))

    def _change(self, change: _Data) -> None:
        change.file.pending.append(change)
        self._data.append(change)

    def _rename(
        self, text: str, index: int, changes: list[tuple[_Directory, str, _Node | None]]
    ) -> None:
        names = _Names(text, index, changes, list(dict.fromkeys(each for each, _, _ in changes)))
        names.apply({each: each.live for each, _, _ in changes})
        self._names.append(names)

    def _relative(self, path: str) -> str:
        relative = os.path.relpath(path, self._root_path)
        assert not relative.startswith(".."), f"{path} is not below {self._root_path}"
        return relative

    def _parent(self, relative: str) -> tuple[_Directory, str]:
        *above, name = relative.split("/")
        directory = self.root
        for part in above:
            found = directory.live[part]
            assert isinstance(found, _Directory)
            directory = found
        return directory, name

    def _place(self, path: str) -> tuple[_Directory, str]:
        return self._parent(self._relative(path))

    def _node(self, path: str) -> _Node | None:
        relative = self._relative(path)
        if relative == ".":
            return self.root
        directory, name = self._parent(relative)
        return directory.live.get(name)

    def _by_path_or_inode(self, entry: Entry) -> _Node:
        """By inode first: a file without a name is linked from /proc/self/fd."""
        node: _Node | None = self._by_inode.get(entry.inode)
        if node is None:
            node = self._node(entry.path)
        assert node is not None, f"what is linked by {entry}?"
        return node


def crash_states(
    entries: Sequence[Entry],
    initial: dict[str, bytes],
    root: str,
    *,
    inodes: dict[str, int] | None = None,
    random_count: int = 20,
    seed: int = 0,
) -> Iterator[State]:
    """Every distinct state, moment by moment. `random_count` is for each moment."""
    rng = random.Random(seed)
    replay = Replay(root, initial, inodes)
    marks: tuple[str, ...] = ()
    seen: set[tuple[bytes, tuple[str, ...]]] = set()
    digests: dict[int, tuple[bytes, bytes]] = {}
    before: list[_Data | _Names] | None = None
    for moment in range(-1, len(entries)):
        if moment >= 0:
            entry = entries[moment]
            if entry.call == "mark":
                marks = (*marks, entry.data.decode())
                before = None  # the same states come once more, with another promise
            replay.apply(entry, moment)
        pending = replay.pending
        if pending == before:
            continue
        # One operation more and none less: states without it came at the moment before.
        is_one_more = before is not None and pending[:-1] == before
        before = pending
        for chosen, parts in _choices(pending, random_count, rng, is_one_more):
            tree = replay.tree(chosen, parts)
            key = (_digest(tree, digests), marks)
            if key not in seen:
                seen.add(key)
                yield State(tree, marks, moment, _lost(pending, chosen, parts))


_Choice = tuple[Sequence[_Data | _Names], dict[int, Part]]


def _choices(
    pending: list[_Data | _Names], random_count: int, rng: random.Random, is_last_in: bool
) -> Iterator[_Choice]:
    """Choices of what got there. is_last_in: choices without the last one may be left out."""
    count = len(pending)
    if count <= EXHAUSTIVE_MAX:
        some, rest = (pending[:-1], pending[-1:]) if is_last_in else (pending, [])
        for size in range(len(some), -1, -1):
            for chosen in itertools.combinations(some, size):
                yield [*chosen, *rest], {}
    else:
        for size in range(count, -1, -1):
            yield pending[:size], {}
        for at in range(count):
            yield [*pending[:at], *pending[at + 1 :]], {}
            yield [pending[at]], {}
        for _ in range(random_count):
            yield [each for each in pending if rng.random() < 0.5], {}
    torn = [each for each in pending if isinstance(each, _Data)]
    for each in torn:
        at = pending.index(each)
        for part in each.parts():
            yield pending, {id(each): part}
            yield pending[: at + 1], {id(each): part}
            others = [other for other in pending if other is each or rng.random() < 0.5]
            yield others, {id(each): part}
    for _ in range(random_count if len(torn) > 1 else 0):
        chosen = [each for each in pending if rng.random() < 0.7]
        parts = {}
        for each in chosen:
            ways = each.parts() if isinstance(each, _Data) else []
            if ways and rng.random() < 0.7:
                parts[id(each)] = rng.choice(ways)
        yield chosen, parts


def _lost(
    pending: Iterable[_Data | _Names], chosen: Iterable[_Data | _Names], parts: dict[int, Part]
) -> tuple[str, ...]:
    there = set(map(id, chosen))
    lost = []
    for each in pending:
        if id(each) not in there:
            lost.append(each.text)
        elif id(each) in parts:
            lost.append(f"{each.text} {parts[id(each)]}")
    return tuple(lost)


def _digest(tree: dict[str, bytes], digests: dict[int, tuple[bytes, bytes]]) -> bytes:
    """The digest of a whole tree. Safe contents are the same objects each time, hashed once."""
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(tree):
        content = tree[path]
        known = digests.get(id(content))
        if known is None or known[0] is not content:
            known = (content, hashlib.blake2b(content, digest_size=16).digest())
            if len(digests) >= DIGESTS_MAX:
                digests.clear()
            if len(content) > PAGE:
                digests[id(content)] = known
        whole.update(f"{len(path)} {path} ".encode())
        whole.update(known[1])
    return whole.digest()


class Disk:
    """Turns states into directories: each distinct content is a file once, then a hard link."""

    def __init__(self, pool: Path) -> None:
        self._pool = pool
        self._known: dict[bytes, str] = {}
        pool.mkdir(parents=True, exist_ok=True)

    def materialise(self, state: State, directory: Path) -> None:
        """`directory` is made, and holds the state."""
        os.makedirs(directory)
        for path in sorted(state.files):  # a directory comes before what is in it
            place = os.path.join(directory, path)
            if path.endswith("/"):
                os.mkdir(place)
            else:
                os.link(self._blob(state.files[path]), place)

    def _blob(self, content: bytes) -> str:
        digest = hashlib.blake2b(content, digest_size=16).digest()
        path = self._known.get(digest)
        if path is None:
            path = str(self._pool / digest.hex())
            Path(path).write_bytes(content)
            self._known[digest] = path
        return path

    def check(self) -> None:
        """Nobody changed a file in place."""
        for digest, path in self._known.items():
            content = Path(path).read_bytes()
            assert hashlib.blake2b(content, digest_size=16).digest() == digest, path
