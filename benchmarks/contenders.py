"""What typed state is compared with, and on which types of state.

Every contender keeps the same entries under the same str keys, in its best ordinary form: stores of
bytes get msgpack and `key.encode()`, the files of stores lie in memory (/dev/shm) and are never
synced, databases with transactions do a whole round in one. For a single key, one statement in a
loop is timed. It is written out here for each contender and compiled as timeit does, so no
contender pays for a function call that another one does not make:

    contender            stored under k                          encoded
    statekit             typed state of a memory: provider       by statekit
    dict                 d[k]                                    no: the object itself
    dict + msgpack       d[k]                                    msgpack
    rocksdict raw        d[k.encode()]                           msgpack
    rocksdict pickled    d[k]                                    by rocksdict: pickle, own for int
    lmdb                 txn.get(k.encode()), txn.put(...)       msgpack
    sqlite3              execute(SELECT, (k,)), execute(PUT...)  msgpack
"""

import dataclasses
import pickle
import shutil
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import lmdb
import msgpack
from msgpack import packb, unpackb
from rocksdict import Options, Rdict, WriteBatch

import statekit as sk

_numbers = count()  # numbers for the paths that are given out
_BATCH = 10_000  # entries that are written at a time when many are moved


@dataclass
class Profile:
    """Five fields; some 90 bytes as a msgpack map, 60 as a msgpack array."""

    name: str
    email: str
    visits: int
    score: float
    active: bool


def make_profile(i: int) -> Profile:
    return Profile(
        f"User No {i:07d}", f"user{i:07d}@example.org", 100_000 + i, i * 0.37, i % 2 == 0
    )


@dataclass(frozen=True)
class StateType:
    """A type of state: its values, and each operation as Python text.

    In the text, k is the key, v a whole value, x a value as a Python object, s statekit's typed
    state.
    """

    name: str
    make: Callable[[int], Any]
    declare: Callable[[sk.KVProvider], Any]
    pack: str = "packb({})"
    unpack: str = "unpackb({})"
    change: str = ""  # changes x in place
    element: str = ""  # reads one part of x; "" if the value has no parts
    native_get: str = "s[k]"
    native_change: str = ""
    native_element: str = ""


def _nested_value(i: int) -> dict[str, list[Profile]]:
    return {
        "open": [make_profile(i), make_profile(i + 1)],
        "done": [make_profile(i + 2), make_profile(i + 3)],
    }


STATE_TYPES = [
    StateType(
        "value int",
        lambda i: 100_000 + i,
        lambda kv: kv.value("state", int),
        change="x += 1",
        native_change="s.add(k)",
    ),
    StateType(
        "value dataclass",
        make_profile,
        lambda kv: kv.value("state", Profile),
        pack="packb(vars({}))",
        unpack="Profile(**unpackb({}))",
        change="x.visits += 1",
        native_change="x = s[k]; x.visits += 1; s[k] = x",
    ),
    StateType(
        "list",
        lambda i: list(range(i, i + 10)),
        lambda kv: kv.list("state", int),
        change="x.append(7)",
        element="x[-1]",
        native_get="s[k].copy()",
        native_change="s[k].append(7)",
        native_element="s[k][-1]",
    ),
    StateType(
        "map",
        lambda i: {f"field-{j}": i + j for j in range(10)},
        lambda kv: kv.map("state", str, int),
        change='x["new"] = 7',
        element='x["field-5"]',
        native_get="s[k].copy()",
        native_change='s[k]["new"] = 7',
        native_element='s[k]["field-5"]',
    ),
    StateType(
        "nested",
        _nested_value,
        lambda kv: kv.state("state", dict[str, list[Profile]]),
        pack="packb({}, default=vars)",  # a fifth faster than a comprehension of vars()
        unpack="{{n: [Profile(**c) for c in cs] for n, cs in unpackb({}).items()}}",
        change='x["open"].append(profile)',
        element='x["done"][1]',
        native_get="s[k].copy()",
        native_change='s[k]["open"].append(profile)',
        native_element='s[k]["done"][1]',
    ),
]

_VALUE = STATE_TYPES[1]
# Other ways to keep a dataclass with msgpack. Only the map of fields, as above, can be read after a
# field was added, removed or moved; so can statekit's form.
DATACLASS_FORMS = {
    "array": dataclasses.replace(
        _VALUE,
        pack="packb(({0}.name, {0}.email, {0}.visits, {0}.score, {0}.active))",
        unpack="Profile(*unpackb({}))",
    ),
    "asdict": dataclasses.replace(_VALUE, pack="packb(asdict({}))"),
    "astuple": dataclasses.replace(
        _VALUE, pack="packb(astuple({}))", unpack="Profile(*unpackb({}))"
    ),
    "map, one Packer": dataclasses.replace(_VALUE, pack="pack(vars({}))"),
}
NAMES = {
    "packb": packb,
    "unpackb": unpackb,
    "pack": msgpack.Packer().pack,
    "Profile": Profile,
    "profile": make_profile(0),
    "asdict": dataclasses.asdict,
    "astuple": dataclasses.astuple,
}
OPERATIONS = ("get", "set", "update", "element")


def compile_loop(statement: str, names: Iterable[str]) -> Callable[..., None]:
    """A function of (pairs, names...) that does the statement for each (k, v)."""
    source = f"def run(pairs, {', '.join(names)}):\n for k, v in pairs:\n  {statement}\n"
    scope: dict[str, Any] = {}
    exec(source, scope)
    loop: Callable[..., None] = scope["run"]
    return loop


class Keeper(ABC):
    """One contender that keeps the entries of one type of state."""

    name: ClassVar[str]
    encodes = True  # values are packed with msgpack before they are stored
    keeps_objects = False  # True: it stores the caller's object itself
    read = "d[k]"
    write = "d[k] = {}"
    find = "d.get(k)"  # None if nothing is there
    remove = "d.pop(k, None)"  # whether something is there or not

    def __init__(self, of: StateType, folder: str) -> None:
        self.of = of
        self.keys = 0  # how many were loaded
        self.folder = folder
        self._loops: dict[str, Callable[..., None]] = {}

    # ---- Single keys

    def statement(self, operation: str) -> str | None:
        """The statement that is timed; None if this type of state has no such operation."""
        of = self.of
        pack, unpack = (of.pack, of.unpack) if self.encodes else ("{}", "{}")
        get = unpack.format(self.read)
        if operation == "get":
            return get
        if operation == "set":
            return self.write.format(pack.format("v"))
        if operation == "element":
            return f"x = {get}; {of.element}" if of.element else None
        return f"x = {get}; {of.change}; {self.write.format(pack.format('x'))}"

    @abstractmethod
    def begin(self, writes: bool) -> dict[str, Any]:
        """Names that the statements need, besides NAMES. Ends what the last round left open."""

    def run(self, operation: str, pairs: list[tuple[str, Any]], names: dict[str, Any]) -> None:
        """Does the operation for each pair; names are from begin()."""
        loop = self._loops.get(operation)
        if loop is None:
            text = self.statement(operation)
            assert text is not None
            loop = self._loops[operation] = compile_loop(text, [*NAMES, *names])
        loop(pairs, **NAMES, **names)

    def load(self, entries: Iterable[tuple[str, Any]]) -> None:
        pairs = list(entries)
        self.keys += len(pairs)
        self.run("set", pairs, self.begin(True))
        names = self.begin(False)
        check = compile_loop(f"assert ({self.statement('get')}) == v, k", [*NAMES, *names])
        check(pairs[::100], **NAMES, **names)

    # ---- All entries

    @abstractmethod
    def split_and_merge(self) -> None:
        """Parts the entries into two halves and makes one whole of them again."""

    @abstractmethod
    def encode(self) -> Any:
        """All entries as bytes, in the contender's own form."""

    def path(self) -> str:
        return f"{self.folder}/{type(self).__name__}-{next(_numbers)}"

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """Lets go of files."""


class Statekit(Keeper):
    name = "statekit"

    def __init__(self, of: StateType, folder: str) -> None:
        super().__init__(of, folder)
        self.kv = sk.open("memory:")
        self.state = of.declare(self.kv)

    def statement(self, operation: str) -> str | None:
        of = self.of
        texts = {
            "get": of.native_get,
            "set": "s[k] = v",
            "update": of.native_change,
            "element": of.native_element,
        }
        return texts[operation] or None

    def begin(self, writes: bool) -> dict[str, Any]:
        return {"s": self.state}

    def split_and_merge(self) -> None:
        half = self.kv.key_group_count // 2
        parts = self.kv.split([range(half), range(half, 2 * half)])
        for part in parts:
            self.kv.merge(part)
            part.close()

    def encode(self) -> Any:
        with self.kv._residence.store.snapshot() as snapshot:
            return [blocks for _, blocks in snapshot]

    def close(self) -> None:
        self.kv.close()


class PlainDict(Keeper):
    name = "dict"
    encodes = False
    keeps_objects = True

    def __init__(self, of: StateType, folder: str) -> None:
        super().__init__(of, folder)
        self.d: dict[str, Any] = {}

    def begin(self, writes: bool) -> dict[str, Any]:
        return {"d": self.d}

    def split_and_merge(self) -> None:
        even: dict[str, Any] = {}
        odd: dict[str, Any] = {}
        for key, value in self.d.items():
            if hash(key) & 1:
                odd[key] = value
            else:
                even[key] = value
        even.update(odd)

    def encode(self) -> Any:
        return pickle.dumps(self.d, pickle.HIGHEST_PROTOCOL)


class PackedDict(PlainDict):
    name = "dict + msgpack"
    encodes = True
    keeps_objects = False

    def encode(self) -> Any:
        return packb(self.d)


class RawRocks(Keeper):
    name = "rocksdict raw"
    read = "d[k.encode()]"
    write = "d[k.encode()] = {}"
    find = "d.get(k.encode())"
    remove = "d.delete(k.encode())"
    raw_mode = True

    def __init__(self, of: StateType, folder: str) -> None:
        super().__init__(of, folder)
        self.d = self._open()

    def _open(self) -> Rdict:
        return Rdict(self.path(), Options(raw_mode=self.raw_mode))

    def load(self, entries: Iterable[tuple[str, Any]]) -> None:
        super().load(entries)
        self.d.flush()

    def begin(self, writes: bool) -> dict[str, Any]:
        return {"d": self.d}

    def split_and_merge(self) -> None:
        halves = [self._open(), self._open()]
        self._move(self.d.items(), halves)
        whole = self._open()
        for half in halves:
            self._move(half.items(), [whole])
            half.close()
        whole.close()

    def _move(self, entries: Iterable[tuple[Any, Any]], targets: list[Rdict]) -> None:
        batches = [WriteBatch(raw_mode=self.raw_mode) for _ in targets]
        for key, value in entries:
            at = hash(key) % len(targets)
            batches[at].put(key, value)
            if batches[at].len() >= _BATCH:
                targets[at].write(batches[at])
                batches[at] = WriteBatch(raw_mode=self.raw_mode)
        for batch, target in zip(batches, targets, strict=True):
            target.write(batch)

    def encode(self) -> Any:
        # RocksDB's own checkpoint would only link its files, and turn nothing into bytes.
        return packb(list(self.d.items()))

    def close(self) -> None:
        self.d.close()


class PickledRocks(RawRocks):
    name = "rocksdict pickled"
    encodes = False
    read = "d[k]"
    write = "d[k] = {}"
    find = "d.get(k)"
    remove = "d.delete(k)"
    raw_mode = False

    def encode(self) -> Any:
        return pickle.dumps(list(self.d.items()), pickle.HIGHEST_PROTOCOL)


class Lmdb(Keeper):
    name = "lmdb"
    read = "txn.get(k.encode())"
    write = "txn.put(k.encode(), {})"
    find = "txn.get(k.encode())"
    remove = "txn.delete(k.encode())"

    def __init__(self, of: StateType, folder: str) -> None:
        super().__init__(of, folder)
        self.env = lmdb.open(self.path(), map_size=4 << 30, max_dbs=4, sync=False, metasync=False)
        self.txn: Any = None

    def begin(self, writes: bool) -> dict[str, Any]:
        if self.txn is not None:
            self.txn.commit()
        self.txn = self.env.begin(write=writes)
        return {"txn": self.txn}

    def split_and_merge(self) -> None:
        self._end()
        whole, left, right = (self.env.open_db(name) for name in (b"whole", b"left", b"right"))
        with self.env.begin(write=True) as txn:
            for key, value in txn.cursor():
                if key in (b"whole", b"left", b"right"):
                    continue  # lmdb keeps named databases as entries of the main one
                txn.put(key, value, db=left if hash(key) & 1 else right, append=True)
            for half in (left, right):
                with txn.cursor(db=half) as cursor:
                    for key, value in cursor:
                        txn.put(key, value, db=whole)
            for db in (whole, left, right):
                txn.drop(db, delete=False)

    def encode(self) -> Any:
        self._end()
        target = self.path()
        Path(target).mkdir()
        self.env.copy(target)
        shutil.rmtree(target)

    def _end(self) -> None:
        if self.txn is not None:
            self.txn.commit()
            self.txn = None

    def close(self) -> None:
        self._end()
        self.env.close()


class Sqlite(Keeper):
    name = "sqlite3"
    # The sqlite3 module keeps a prepared statement for each text.
    read = 'execute("SELECT v FROM t WHERE k=?", (k,)).fetchone()[0]'
    write = 'execute("REPLACE INTO t VALUES (?, ?)", (k, {}))'
    find = '(execute("SELECT v FROM t WHERE k=?", (k,)).fetchone() or (None,))[0]'
    remove = 'execute("DELETE FROM t WHERE k=?", (k,))'

    def __init__(self, of: StateType, folder: str) -> None:
        super().__init__(of, folder)
        self.db = sqlite3.connect(self.path(), isolation_level=None)
        self.db.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; PRAGMA cache_size=-1000000;"
            "CREATE TABLE t (k TEXT PRIMARY KEY, v BLOB) WITHOUT ROWID"
        )

    def begin(self, writes: bool) -> dict[str, Any]:
        self._end()
        self.db.execute("BEGIN")
        return {"execute": self.db.execute}

    def split_and_merge(self) -> None:
        self._end()
        (middle,) = self.db.execute(
            "SELECT k FROM t ORDER BY k LIMIT 1 OFFSET (SELECT count(*) / 2 FROM t)"
        ).fetchone()
        self.db.execute("BEGIN")
        for name in ("a", "b", "whole"):
            self.db.execute(f"CREATE TABLE {name} (k TEXT PRIMARY KEY, v BLOB) WITHOUT ROWID")
        self.db.execute("INSERT INTO a SELECT k, v FROM t WHERE k < ?", (middle,))
        self.db.execute("INSERT INTO b SELECT k, v FROM t WHERE k >= ?", (middle,))
        self.db.execute("INSERT INTO whole SELECT k, v FROM a")
        self.db.execute("INSERT INTO whole SELECT k, v FROM b")
        for name in ("a", "b", "whole"):
            self.db.execute(f"DROP TABLE {name}")
        self._end()

    def encode(self) -> Any:
        self._end()
        return self.db.serialize()

    def _end(self) -> None:
        if self.db.in_transaction:
            self.db.execute("COMMIT")

    def close(self) -> None:
        self._end()
        self.db.close()


KEEPERS: list[type[Keeper]] = [
    Statekit,
    PlainDict,
    PackedDict,
    RawRocks,
    PickledRocks,
    Lmdb,
    Sqlite,
]


def user_keys(ids: Iterable[int]) -> list[str]:
    return [f"user-{i:07d}" for i in ids]


def fresh_entries(of: StateType, ids: Iterable[int]) -> Iterator[tuple[str, Any]]:
    """(key, value), each value a new object."""
    return ((f"user-{i:07d}", of.make(i)) for i in ids)


def scratch_folder() -> "tempfile.TemporaryDirectory[str]":
    """A folder in memory where there is one, so that no contender waits for a disk."""
    memory = "/dev/shm"
    return tempfile.TemporaryDirectory(dir=memory if Path(memory).is_dir() else None)
