"""Replays accesses on stores: what bench_operators.py and bench_ycsb.py have in common.

An access is (operation, key, value). A store has one statement for each operation, in its best
ordinary form; in it k is the key, v the value, and x takes what is read. The statements become one
loop, compiled as timeit does, so that no store pays for a function call that another one does not
make. What the loop itself costs is measured beside them: "no store".

`checked` loops keep what they read. Before anything is timed, each store has to read exactly what a
dict of plain objects reads.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
import slatedb.uniffi as slatedb
from compare import Contender
from contenders import STATE_TYPES, Keeper

import statekit as sk

Statements = Mapping[int, str]
NAMES = {"packb": msgpack.packb, "unpackb": msgpack.unpackb}


def compile_replay(statements: Statements, names: Iterable[str], checked: bool = False) -> Any:
    """A function of (accesses, names...). checked: it returns what each access read."""
    tests = "".join(
        f"  {'el' if at else ''}if op == {op}:\n   {statement}\n"
        for at, (op, statement) in enumerate(statements.items())
    )
    keeps = "  seen.append(x); x = None\n" if checked else ""
    begin = "async def" if any("await" in text for text in statements.values()) else "def"
    source = (
        f"{begin} run(accesses, {', '.join(names)}):\n seen = []; x = None\n"
        f" for op, k, v in accesses:\n{tests}{keeps} return seen\n"
    )
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope["run"]


class Parts:
    """A trace, part by part. Each part is given to several stores, which take turns."""

    def __init__(self, trace: Iterator[Any], count: int) -> None:
        self._trace, self._count = trace, count
        self._made: list[list[Any]] = []

    def first(self, count: int) -> list[Any]:
        return list(islice(self._trace, count))

    def give(self) -> Callable[[], list[Any]]:
        """What gives one store its parts, one a call."""
        at = -1

        def following() -> list[Any]:
            nonlocal at
            at += 1
            if at == len(self._made):
                self._made.append(list(islice(self._trace, self._count)))
                if at > 0:
                    self._made[at - 1] = []  # all stores have had it
            return self._made[at]

        return following


class Store:
    """A store, and what it does for each operation. `begin` gives the names in its statements, and
    is called before each round, untimed; `end` after each round, timed."""

    share = 1  # it replays one access of so many

    def __init__(
        self,
        name: str,
        statements: Statements,
        begin: Callable[[], dict[str, Any]],
        close: Callable[[], Any],
        end: Callable[[], Any] | None = None,
    ) -> None:
        self.name, self.statements = name, statements
        self.begin, self.close, self.end = begin, close, end
        self._loops: dict[bool, Any] = {}

    def replay(self, accesses: Any, names: dict[str, Any], checked: bool = False) -> list[Any]:
        if checked not in self._loops:
            self._loops[checked] = compile_replay(self.statements, [*NAMES, *names], checked)
        seen: list[Any] = self._run(self._loops[checked](accesses, **NAMES, **names))
        if self.end is not None:
            self.end()
        return seen

    def _run(self, done: Any) -> Any:
        return done

    def contender(self, accesses: Callable[[], list[Any]], count: int) -> Contender:
        """accesses: those of the next round, `count` of them."""
        return Contender(
            self.name,
            lambda given: self.replay(*given),
            lambda: (accesses(), self.begin()),
            count,
        )


def of_keeper(cls: type[Keeper], statements: Statements, folder: str) -> Store:
    """A contender of contenders.py with other statements."""
    keeper = cls(STATE_TYPES[0], folder)
    return Store(cls.name, statements, lambda: keeper.begin(True), keeper.close)


def of_rocksdict(db: Any, statements: Statements) -> Store:
    return Store("rocksdict", statements, lambda: {"d": db}, db.close)


def nothing(operations: Iterable[int]) -> Store:
    """The loop alone."""
    return Store("no store", dict.fromkeys(operations, "pass"), dict, lambda: None)


def of_provider(
    name: str,
    kv: sk.KVProvider,
    statements: Statements,
    states: dict[str, Any],
    commits: bool = False,
) -> Store:
    """statekit; commits: each round ends with a commit."""
    return Store(name, statements, lambda: states, kv.close, kv.commit if commits else None)


class Slate(Store):
    """SlateDB on files of its own. Its calls are coroutines on another thread, and take tens of
    microseconds each, so it replays fewer accesses. Writes are not awaited until they are durable.
    """

    share = 50
    find = "await d.get(k.encode())"
    write = "await d.put(k.encode(), {})"
    remove = "await d.delete(k.encode())"

    def __init__(self, folder: str, statements: Statements, cache_bytes: int | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._folder = TemporaryDirectory(dir=folder)
        self._db = self._loop.run_until_complete(self._open(Path(self._folder.name), cache_bytes))
        super().__init__("slatedb", statements, lambda: {"d": self._db}, self._close)

    async def _open(self, folder: Path, cache_bytes: int | None) -> Any:
        builder = slatedb.DbBuilder(str(folder)[1:], slatedb.ObjectStore.resolve("file:///"))
        if cache_bytes is not None:
            settings = slatedb.Settings.default()
            settings.set("l0_sst_size_bytes", str(cache_bytes // 8))
            settings.set("max_unflushed_bytes", str(cache_bytes // 4))
            builder.with_settings(settings)
            options = slatedb.MokaCacheOptions(
                max_capacity=cache_bytes // 4 * 3, time_to_live=None, time_to_idle=None
            )
            builder.with_db_cache(slatedb.DbCache.new_moka_cache(options), 0)
        return await builder.build()

    def put_many(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Writes rows in one batch."""
        batch = slatedb.WriteBatch()
        for key, value in rows:
            batch.put(key, value)
        self._run(self._db.write(batch))

    def _run(self, done: Any) -> Any:
        return self._loop.run_until_complete(done)

    def _close(self) -> None:
        self._run(self._db.shutdown())
        self._loop.close()
        self._folder.cleanup()
