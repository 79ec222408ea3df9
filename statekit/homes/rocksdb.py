"""A RocksDB directory as a home: "rocksdb:/path" or "rocksdb:relative/path".

    what            key                                        value
    a row           leaf (4 bytes) state (2 bytes) key         the entry's value
    the meta        ff ff ff ff "meta"                         the provider's record

Numbers are big endian, so the rows of one leaf and state lie together: load() is one scan and
clear() one range. Leaf numbers are below 2^20, so no row has a key that starts with ff.

A write() is one batch of the write-ahead log, so it happens whole or not at all. It is handed
to the system at once and survives a crash of the process; flush() forces it to the disk, and
then it survives a loss of power too.

RocksDB locks its directory: one process has it open at a time. A live iterator keeps that lock
even after close(), so load() reads page by page and holds no iterator between two of them.

A file named STATEKIT says that the directory is a home, so that nobody's else is opened: RocksDB
changes what it opens, and the file formats of others would not survive it.

A fork has no threads but the one that forked, and RocksDB waits for its own when it is closed. So
a child does not close what its parent has open, not even when it ends.

After a failed write (a full disk, say) RocksDB takes no more, whatever happens to the disk, but
goes on reading. So the next write sees whether there is room now, and opens the database again;
what was written before is in its log.

RocksDB holds writes up while it has fallen behind with its work in the background. On a disk that
is nearly full it may begin nothing any more and fail nowhere: a write that it holds up then waits
for ever, with our locks held. So writes are not held up but refused (no_slowdown), and tried again
for as long as something is running that will end it (_outlast).
"""

import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from struct import Struct
from time import monotonic, sleep
from typing import Any

from statekit.errors import ArgumentError, HomeError, HomeLockedError
from statekit.homes.home import Change, Home, HomeSnapshot, HomeUrl, Named, Row
from statekit.homes.looking import PrivateCopy

_MARK = "STATEKIT"  # the file that makes a directory a home
_MARK_TEXT = "This directory is a home of statekit: sk.open('rocksdb:...').\n"
_CONFIG = "rocksdict-config.json"
_PROBE = "statekit-probe"  # tells whether there is room on the disk
_PROBE_BYTES = 1 << 20  # and as much as opening it again may write
_PREFIX = Struct(">IH")  # leaf, state
_META = b"\xff\xff\xff\xffmeta"

_CACHE_BYTES_MIN = 8 * 2**20  # RocksDB does not work well with less
_MEMTABLE_BYTES_MAX = 64 * 2**20  # larger ones make flushes long and gain little
_OPEN_FILES_MAX = 512  # half of what most systems allow a process
_BLOOM_BITS = 10  # per key: 1 % of the misses read a block
_MEMTABLE_BLOOM = 0.05  # of a memtable's bytes: a miss there costs a fifth (0.5 of 3 us)
_GET_ROWS = 1024  # of one call: it holds the blocks of all its rows, beyond the cache's capacity
_PAGE_ROWS, _PAGE_BYTES = 1024, 2**20  # what load() has in memory at most, but for one large row

_STALLED = "Write stall"  # what RocksDB calls it
_STALL_SECONDS_MAX = 10.0  # without anything that runs in the background, ...
_STALL_SECONDS_FULL = 1.0  # ... on a disk that is nearly full
_STALL_LOOK_SECONDS = 0.001, 0.05  # at first, and at most
_RUNNING = ("rocksdb.num-running-flushes", "rocksdb.num-running-compactions")

_METRICS = {
    "rocksdb_keys": "rocksdb.estimate-num-keys",
    "rocksdb_file_bytes": "rocksdb.live-sst-files-size",
    "rocksdb_cache_bytes": "rocksdb.block-cache-usage",
    "rocksdb_memtable_bytes": "rocksdb.cur-size-all-mem-tables",
    "rocksdb_compaction_pending_bytes": "rocksdb.estimate-pending-compaction-bytes",
}

# What RocksDB says, and what to do about it; the first that occurs in its message counts.
_LOCKED = ("/LOCK: ", "lock hold by current process")
_FULL = ("No space left", "File too large", "Disk quota exceeded")
_STUCK = (*_FULL, "Writer has previous error", "background error", "IO error")
_ADVICE = (
    (
        _LOCKED,
        "It is open already, here or in another process. Close that one first, "
        "or use another directory.",
    ),
    (
        _FULL,
        "The disk is full. Free some space and do it again: nothing is lost, the home can "
        "be read meanwhile, and it is at its last commit if the process ends.",
    ),
    (
        ("Permission denied", "Operation not permitted", "Read-only file system"),
        "Make the directory writable for this user, or use another one.",
    ),
    (
        ("Corruption", "checksum mismatch"),
        "Its files are damaged. Restore the directory, or start with an empty one and "
        "restore the state from a checkpoint.",
    ),
    (
        ("No such file or directory", "Not a directory"),
        "Name a directory on a disk (/proc and the like take none), and see to it that nobody "
        "removes files from it.",
    ),
    (("Writer has previous error", "earlier write failed"), "Write to it again, which opens it."),
    (("Too many open files",), "Raise the limit of open files (ulimit -n)."),
    (("Closed", "closed"), "Open it again."),
)
_NOT_REOPENED = "after an earlier write failed it could not be opened again"
_ADVICE_ELSE = "Look into the file LOG in that directory."


_opened: "weakref.WeakSet[_RocksdbHome]" = weakref.WeakSet()


def _keep_in_child() -> None:
    """In a child: what the parent has open is never freed here."""
    import ctypes

    for home in _opened:
        for kept in (home._db, *(snapshot._rows for snapshot in home._snapshots)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_keep_in_child)


def open_rocksdb(url: HomeUrl, cache_bytes: int) -> Home:
    """The RocksDB home of a URL, made if there is none.

    Options: sync=0 makes flush() leave the data to the operating system, which is quicker,
    survives a crash of the process, and does not survive a loss of power. look=1 opens a private
    copy: the home stays as it is, and what is written is gone when the copy is closed.
    """
    sync, look = url.options.pop("sync", "1"), url.options.pop("look", "0")
    url.refuse_rest()
    if sync not in ("0", "1"):
        raise ArgumentError(
            f"{url.shown!r} has sync={sync!r}. Use sync=1 (as without it) or sync=0."
        )
    if look not in ("0", "1"):
        raise ArgumentError(f"{url.shown!r} has look={look!r}. Use look=1, or leave it out.")
    path = url.place
    if not path or "\0" in path or (path.startswith("//") and not path.startswith("///")):
        raise ArgumentError(
            f"{url.shown!r} names no directory. "
            'Use "rocksdb:/path", or "rocksdb:path" below the working directory.'
        )
    path, cache_bytes = os.path.abspath(path), max(cache_bytes, _CACHE_BYTES_MIN)
    if look == "0":
        return _RocksdbHome(path, cache_bytes, sync == "1")
    copy = PrivateCopy(path)
    try:
        return _RocksdbHome(path, cache_bytes, False, copy)
    except BaseException:
        copy.close()
        raise


def _rocksdict() -> Any:
    try:
        import rocksdict
    except ImportError as error:
        raise HomeError(
            f"a home in RocksDB needs the package rocksdict, which cannot be imported ({error}). "
            "Run: pip install statekit[rocksdb]"
        ) from error
    return rocksdict


def _options(rocksdict: Any, cache_bytes: int, compacts: bool = True) -> Any:
    """Settings under which all of RocksDB's memory is about cache_bytes."""
    # One budget: memtables, index and filter blocks are all charged to the block cache.
    # (RocksDB's HyperClockCache is 15 % quicker, but stays above its capacity after a large get.)
    cache = rocksdict.Cache(cache_bytes)
    memtables = rocksdict.WriteBufferManager.new_write_buffer_manager_with_cache(
        cache_bytes // 2, False, cache
    )
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    # A key seen for the first time is asked for too, so misses are as common as hits.
    table.set_bloom_filter(_BLOOM_BITS, False)
    # Filters and indexes in small blocks. In one piece, those of a 64 MiB file do not fit into a
    # small cache (nor into one shard of a larger one), and each get() read a megabyte: 125 us.
    table.set_partition_filters(True)
    table.set_index_type(rocksdict.BlockBasedIndexType.two_level_index_search())
    table.set_pin_top_level_index_and_filter(True)
    table.set_format_version(5)

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_manager(memtables)
    options.set_write_buffer_size(min(cache_bytes // 4, _MEMTABLE_BYTES_MAX))
    options.set_max_write_buffer_number(3)
    options.set_memtable_whole_key_filtering(True)
    options.set_memtable_prefix_bloom_ratio(_MEMTABLE_BLOOM)
    # Measured on small JSON-like values: half the disk of none, at the same speed.
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_max_open_files(_OPEN_FILES_MAX)
    options.set_max_background_jobs(2)
    options.set_disable_auto_compactions(not compacts)
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(2**20)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


class _RocksdbHome(Home):
    def __init__(
        self, path: str, cache_bytes: int, sync: bool, copy: PrivateCopy | None = None
    ) -> None:
        rocksdict = _rocksdict()
        self._path = path
        self._copy = copy  # of that directory, in which the rows are then
        self.is_private_copy = copy is not None
        self._sync = sync
        self._new_batch = rocksdict.WriteBatch
        self._unsynced, self._synced = rocksdict.WriteOptions(), rocksdict.WriteOptions()
        self._synced.sync = True
        self._unsynced.no_slowdown = self._synced.no_slowdown = True
        self._prefixes = _Prefixes()
        self._meta_lock = threading.Lock()
        self._snapshots: weakref.WeakSet[_RocksdbSnapshot] = weakref.WeakSet()
        self._is_open = False
        self._db: Any = ()  # not opened yet; None: it could not be opened again
        self._is_stuck = False  # RocksDB takes no more writes until it is opened again
        self._reopening = threading.Lock()
        self._cache_bytes = cache_bytes
        try:
            if copy is None:
                _claim(path, rocksdict)
                _mend_config(path)
            self._db = self._open_db(rocksdict)
        except HomeError:
            raise
        except BaseException as error:
            raise self._failed("opened", error) from error
        self._is_open = True
        _opened.add(self)

    def __repr__(self) -> str:
        return f"<RocksDB home at {self._path!r}{'' if self._is_open else ', closed'}>"

    def _open_db(self, rocksdict: Any) -> Any:
        path = self._path if self._copy is None else self._copy.path
        # Compacting a copy would write out tables that are somewhere else, and may be large.
        options = _options(rocksdict, self._cache_bytes, compacts=self._copy is None)
        return rocksdict.Rdict(path, options)

    def get(self, rows: Sequence[Row]) -> Sequence[bytes | None]:
        prefixes, db = self._prefixes, self._db
        try:
            keys = [prefixes[leaf << 16 | state] + key for leaf, state, key in rows]
            values: list[bytes | None] = []
            for at in range(0, len(keys), _GET_ROWS):
                values += db.get(keys[at : at + _GET_ROWS])
            return values
        except BaseException as error:
            if self._is_other(db):
                return self.get(rows)
            raise self._failed("read", error) from error

    def get_one(self, leaf: int, state: int, key: bytes) -> bytes | None:
        db = self._db
        try:
            found: bytes | None = db.get(self._prefixes[leaf << 16 | state] + key)
            return found
        except BaseException as error:
            if self._is_other(db):
                return self.get_one(leaf, state, key)
            raise self._failed("read", error) from error

    def _is_other(self, db: Any) -> bool:
        """Whether the database was opened again since it was asked; it is, if it must be."""
        if self._db is None:
            self._reopen()
        return self._db is not db

    def load(self, leaf: int, state: int) -> Iterator[tuple[bytes, bytes]]:
        start = self._prefixes[leaf << 16 | state]
        end = self._prefixes[(leaf << 16 | state) + 1]
        while start:
            page, start = self._page(start, end)
            yield from page

    def _page(self, start: bytes, end: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Some rows from a key on, and the key to go on from; empty at the end."""
        page: list[tuple[bytes, bytes]] = []
        size = 0
        key = b""
        db = self._db
        try:
            # No upper bound in the read options: rocksdict keeps a pointer to it, not the bytes.
            for key, value in db.items(from_key=start):
                if key >= end:
                    return page, b""
                page.append((key[_PREFIX.size :], value))
                size += len(key) + len(value)
                if size >= _PAGE_BYTES or len(page) == _PAGE_ROWS:
                    return page, key + b"\0"  # the least key after this one
            self._check_end(key or start, is_read=bool(page))
        except BaseException as error:
            if self._is_other(db):
                return self._page(start, end)
            raise self._failed("read", error) from error
        return page, b""

    def _check_end(self, key: bytes, is_read: bool) -> None:
        """Raises if the database does not end at a key. items() ends at a damaged block too."""
        rows = self._db.iter()
        try:
            rows.seek(key)
            if is_read:
                rows.next()
            rows.status()
            if rows.valid():
                raise RuntimeError("a scan ended before the last row")
        finally:
            del rows  # or it lives, with the lock, as long as somebody keeps the traceback

    def _reopen(self) -> None:
        """Opens the database again after a write has failed, if the disk has room now."""
        with self._reopening:
            if not self._is_stuck or not self._is_open:
                return
            probe = os.path.join(self._path, _PROBE)
            try:
                try:
                    with open(probe, "wb") as file:
                        os.posix_fallocate(file.fileno(), 0, self._reopening_bytes())
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(probe)
                # Its iterators hold the lock of the directory.
                for snapshot in tuple(self._snapshots):
                    snapshot.close()
                # It says once more that a write failed. It is closed, and the lock free, when
                # nobody has it any more.
                if self._db is not None:
                    with suppress(Exception):
                        self._db.close()
                    self._db = None
                self._db = self._open_db(_rocksdict())
            except BaseException as error:
                raise self._failed("written", error, str(error)) from error
            self._is_stuck = False

    def _reopening_bytes(self) -> int:
        """How much room opening again needs: what is in logs is written to tables then.

        If it fails half-way, the home cannot be read any more until there is room.
        """
        logs = sum(
            file.stat().st_size for file in os.scandir(self._path) if file.name.endswith(".log")
        )
        return logs + logs // 8 + _PROBE_BYTES

    def write(self, changes: Sequence[Change]) -> None:
        prefixes = self._prefixes

        def fill(batch: Any) -> None:
            put, delete = batch.put, batch.delete
            for (leaf, state, key), value in changes:
                if value is None:
                    delete(prefixes[leaf << 16 | state] + key)
                else:
                    put(prefixes[leaf << 16 | state] + key, value)

        self._write_batch(fill, self._unsynced)

    is_atomic = True
    is_locked = True  # its directory is

    def write_rows(
        self, rows: Named, cleared: Iterable[tuple[int, int]] = (), durable: bool = False
    ) -> None:
        places = [*cleared]

        def fill(batch: Any) -> None:
            put, delete = batch.put, batch.delete
            for leaf, state in places:
                at = leaf << 16 | state
                batch.delete_range(self._prefixes[at], self._prefixes[at + 1])
            pairs: Any = iter(rows)
            for name, value in zip(pairs, pairs, strict=True):
                if value is None:
                    delete(name)
                else:
                    put(name, value)

        self._write_batch(fill, self._synced if durable and self._sync else self._unsynced)

    def _write_batch(self, fill: Callable[[Any], None], options: Any) -> None:
        if self._is_stuck:
            self._reopen()

        def write() -> None:
            batch = self._new_batch(raw_mode=True)  # a new one each time: writing uses it up
            fill(batch)
            self._db.write(batch, options)

        self._write(write)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            try:
                write()
            except Exception as error:
                if _STALLED not in str(error):
                    raise
            else:
                return
            self._outlast(write)
        except BaseException as error:
            raise self._failed("written", error) from error

    def _outlast(self, write: Callable[[], None]) -> None:
        """Does a write that RocksDB refuses for now, because its work in the background is late."""
        pause, pause_max = _STALL_LOOK_SECONDS
        idle_since = monotonic()
        while True:
            sleep(pause)  # RocksDB tells nobody when it is done
            pause = min(2 * pause, pause_max)
            try:
                write()
                return
            except Exception as error:
                if _STALLED not in str(error):
                    raise
            if any(self._db.property_int_value(name) for name in _RUNNING):
                idle_since = monotonic()
                continue
            room = os.statvfs(self._path)
            is_full = room.f_bavail * room.f_frsize < self._reopening_bytes()
            if monotonic() - idle_since > (_STALL_SECONDS_FULL if is_full else _STALL_SECONDS_MAX):
                self._is_stuck = True
                raise RuntimeError(
                    f"{_FULL[0]} on device to write tables to"
                    if is_full
                    else "RocksDB takes no writes, and does nothing that would change that"
                )

    def clear(self, leaf: int, state: int) -> None:
        self._clear_from(leaf << 16 | state, (leaf << 16 | state) + 1)

    def clear_leaves(self, leaves: range, states: int) -> None:
        self._clear_from(leaves.start << 16, leaves.stop << 16)

    def _clear_from(self, at: int, end: int) -> None:
        """Deletes all rows between two leaves and states."""
        if self._is_stuck:
            self._reopen()
        start, stop = self._prefixes.make(at), self._prefixes.make(end)
        try:
            # A range that is empty leaves no tombstone: they make reading slow.
            rows = self._db.iter()
            try:
                rows.seek(start)
                rows.status()
                is_any = rows.valid() and rows.key() < stop
            finally:
                del rows  # or it lives, with the lock, as long as somebody keeps the traceback
        except BaseException as error:
            raise self._failed("written", error) from error
        if is_any:
            self._write(lambda: self._db.delete_range(start, stop, self._unsynced))

    def snapshot(self) -> HomeSnapshot:
        try:
            rows = self._db.iter()
        except BaseException as error:
            raise self._failed("read", error) from error
        found = _RocksdbSnapshot(rows, self._prefixes, self._failed)
        self._snapshots.add(found)
        return found

    def read_meta(self) -> bytes | None:
        meta: bytes | None
        try:
            meta = self._db.get(_META)
        except BaseException as error:
            raise self._failed("read", error) from error
        return meta

    def write_meta(self, meta: bytes, expected: bytes | None) -> bool:
        # The directory is locked against other processes, so a lock of ours is enough.
        with self._meta_lock:
            if self.read_meta() != expected:
                return False
            if self._is_stuck:
                self._reopen()
            self._write(lambda: self._db.put(_META, meta, self._unsynced))
            self.flush()
            return True

    def flush(self) -> None:
        if self._is_stuck:
            self._reopen()
        try:
            self._db.flush_wal(self._sync)
        except BaseException as error:
            raise self._failed("flushed", error) from error

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        for snapshot in tuple(self._snapshots):
            snapshot.close()
        try:
            try:
                if not self._is_stuck:
                    self._db.flush_wal(self._sync)
            finally:
                if self._db is not None:
                    self._db.close()
                if self._copy is not None:
                    self._copy.close()
        except BaseException as error:
            raise self._failed("flushed", error) from error

    def metrics(self) -> Mapping[str, float]:
        try:
            figures = {name: self._db.property_int_value(of) for name, of in _METRICS.items()}
        except BaseException as error:
            raise self._failed("read", error) from error
        return {name: float(figure) for name, figure in figures.items() if figure is not None}

    def _failed(self, done: str, error: BaseException, reason: str = "") -> HomeError:
        """The exception for one of rocksdict's, which are plain Exceptions with RocksDB's words."""
        # A panic of its Rust is no Exception, so that nobody takes it for one; we do.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise error
        if not reason:
            reason = str(error) if self._db is not None else _NOT_REOPENED
        if done in ("written", "flushed") and any(word in reason for word in _STUCK):
            self._is_stuck = True
        advice = next(
            (advice for words, advice in _ADVICE if any(word in reason for word in words)),
            _ADVICE_ELSE,
        )
        is_locked = any(word in reason for word in _LOCKED)
        cls = HomeLockedError if is_locked else HomeError
        if is_locked and "current process" in reason:
            reason = "this process has it open"
        return cls(
            f"the RocksDB home at {self._path!r} cannot be {done}: {reason.rstrip('. ')}. {advice}"
        )


def _claim(path: str, rocksdict: Any) -> None:
    """Makes sure that a directory is a home, or can become one; HomeError with it untouched."""

    def refused(why: str) -> HomeError:
        return HomeError(
            f"the RocksDB home at {path!r} cannot be opened: {why}. Nothing was changed. "
            "Name a home, an empty directory, or a path where one can be made."
        )

    if os.path.lexists(path) and not os.path.isdir(path):
        raise refused("it is no directory")
    above = os.path.dirname(os.path.realpath(path))  # a link may lead into one
    while True:
        if os.path.exists(os.path.join(above, _MARK)):
            raise refused(f"it lies inside the home at {above!r}")
        if _has_checkpoints(above):
            raise refused(f"it lies inside the checkpoints at {above!r}")
        if above == os.path.dirname(above):
            break
        above = os.path.dirname(above)
    mark = os.path.join(path, _MARK)
    there = set(os.listdir(path)) if os.path.isdir(path) else set()
    if there and _MARK not in there:
        if "CURRENT" not in there:
            raise refused("the directory has other files and is no home")
        try:
            is_ours = _has_meta(path, rocksdict)
        except HomeLockedError as error:
            raise HomeLockedError(
                f"the RocksDB at {path!r} cannot be opened: it is no home by its files, and "
                "another program has it open. Close that one first, or name another directory."
            ) from error
        if not is_ours:
            raise refused("it is a RocksDB of another program")
    if _MARK not in there:
        os.makedirs(path, exist_ok=True)
        with open(mark, "w") as file:
            file.write(_MARK_TEXT)
            file.flush()
            os.fsync(file.fileno())


def _mend_config(path: str) -> None:
    """Removes rocksdict's own file if a loss of power has torn it: it is made anew.

    rocksdict writes it whenever it opens a database, and does not sync it.
    """
    config = os.path.join(path, _CONFIG)
    try:
        with open(config, "rb") as file:
            json.loads(file.read())
    except FileNotFoundError:
        return
    except ValueError:
        os.unlink(config)


def _has_checkpoints(path: str) -> bool:
    if not os.path.exists(os.path.join(path, ".lock")):  # quicker than a look at all names
        return False
    return any(name.endswith(".manifest") for name in os.listdir(path))


def _has_meta(path: str, rocksdict: Any) -> bool:
    """Whether a RocksDB without our mark is a home of an earlier version. Changes nothing."""
    copy = PrivateCopy(path)
    try:
        access = rocksdict.AccessType.read_only()
        found = rocksdict.Rdict(copy.path, rocksdict.Options(raw_mode=True), access_type=access)
        try:
            return found.get(_META) is not None
        finally:
            found.close()
    except Exception:
        return False  # whatever it is, we cannot read it
    finally:
        copy.close()


class _RocksdbSnapshot(HomeSnapshot):
    """An iterator, which sees the database as it was when the iterator was made.

    rocksdict has a Snapshot, too, but in version 0.3.29 its iterators read what is there now.
    """

    def __init__(
        self, rows: Any, prefixes: "_Prefixes", failed: Callable[[str, BaseException], HomeError]
    ) -> None:
        self._rows = rows  # None once closed
        self._prefixes = prefixes
        self._failed = failed
        self._lock = threading.Lock()  # the iterator is at one place at a time

    def load(self, leaf: int, state: int) -> list[tuple[bytes, bytes]]:
        start = self._prefixes[leaf << 16 | state]
        end = self._prefixes[(leaf << 16 | state) + 1]
        found: list[tuple[bytes, bytes]] = []
        with self._lock:
            rows = self._rows
            try:
                if rows is None:
                    raise RuntimeError("the snapshot is closed")
                rows.seek(start)
                while rows.valid() and (key := rows.key()) < end:
                    found.append((key[_PREFIX.size :], rows.value()))
                    rows.next()
                rows.status()  # it ends at a damaged block too
            except BaseException as error:
                raise self._failed("read", error) from error
            finally:
                del rows  # or it lives, with the lock, as long as somebody keeps the traceback
        return found

    def close(self) -> None:
        with self._lock:
            self._rows = None


class _Prefixes(dict[int, bytes]):
    """The first bytes of a row's key, by leaf << 16 | state: made once."""

    def __missing__(self, number: int) -> bytes:
        prefix = self[number] = self.make(number)
        return prefix

    @staticmethod
    def make(number: int) -> bytes:
        return _PREFIX.pack(number >> 16, number & 0xFFFF)
