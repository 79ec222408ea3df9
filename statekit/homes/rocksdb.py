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
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Any

from statekit.errors import ArgumentError, HomeError, HomeLockedError
from statekit.homes.home import Change, Home, HomeSnapshot, HomeUrl, Row
from statekit.homes.looking import PrivateCopy

_PREFIX = Struct(">IH")  # leaf, state
_META = b"\xff\xff\xff\xffmeta"

_CACHE_BYTES_MIN = 8 * 2**20  # RocksDB does not work well with less
_MEMTABLE_BYTES_MAX = 64 * 2**20  # larger ones make flushes long and gain little
_OPEN_FILES_MAX = 512  # half of what most systems allow a process
_BLOOM_BITS = 10  # per key: 1 % of the misses read a block
_MEMTABLE_BLOOM = 0.05  # of a memtable's bytes: a miss there costs a fifth (0.5 of 3 us)
_GET_ROWS = 1024  # of one call: it holds the blocks of all its rows, beyond the cache's capacity
_PAGE_ROWS, _PAGE_BYTES = 1024, 2**20  # what load() has in memory at most, but for one large row

_METRICS = {
    "rocksdb_keys": "rocksdb.estimate-num-keys",
    "rocksdb_file_bytes": "rocksdb.live-sst-files-size",
    "rocksdb_cache_bytes": "rocksdb.block-cache-usage",
    "rocksdb_memtable_bytes": "rocksdb.cur-size-all-mem-tables",
    "rocksdb_compaction_pending_bytes": "rocksdb.estimate-pending-compaction-bytes",
}

_IS_LOCKED = ("/LOCK: ", "lock hold by current process")
# What RocksDB says, and what to do about it; the first that occurs in its message counts.
_ADVICE = (
    (
        _IS_LOCKED,
        "It is open already, here or in another process. Close that one first, "
        "or use another directory.",
    ),
    (
        ("No space left", "File too large", "Disk quota exceeded"),
        "The disk is full. Free some space, then close the home and open it again; "
        "what was flushed is safe.",
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
        "Check that a directory can be made there, and that nobody removes files from it.",
    ),
    (
        ("Writer has previous error",),
        "An earlier write failed. Close the home and open it again.",
    ),
    (("Too many open files",), "Raise the limit of open files (ulimit -n)."),
    (("Closed", "closed"), "Open it again."),
)
_ADVICE_ELSE = "Look into the file LOG in that directory."


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
        self._sync = sync
        self._new_batch = rocksdict.WriteBatch
        self._prefixes = _Prefixes()
        self._meta_lock = threading.Lock()
        self._snapshots: weakref.WeakSet[_RocksdbSnapshot] = weakref.WeakSet()
        self._is_open = False
        if os.path.lexists(path) and not os.path.isdir(path):
            raise HomeError(
                f"the RocksDB home at {path!r} cannot be opened: it is no directory. "
                "Name a directory, or a path where one can be made."
            )
        try:
            # Compacting a copy would write out tables that are somewhere else, and may be large.
            options = _options(rocksdict, cache_bytes, compacts=copy is None)
            self._db = rocksdict.Rdict(path if copy is None else copy.path, options)
        except BaseException as error:
            raise self._failed("opened", error) from error
        self._is_open = True

    def __repr__(self) -> str:
        return f"<RocksDB home at {self._path!r}{'' if self._is_open else ', closed'}>"

    def get(self, rows: Sequence[Row]) -> Sequence[bytes | None]:
        prefixes = self._prefixes
        try:
            if len(rows) == 1:
                leaf, state, key = rows[0]
                return [self._db.get(prefixes[leaf << 16 | state] + key)]
            keys = [prefixes[leaf << 16 | state] + key for leaf, state, key in rows]
            values: list[bytes | None] = []
            for at in range(0, len(keys), _GET_ROWS):
                values += self._db.get(keys[at : at + _GET_ROWS])
            return values
        except BaseException as error:
            raise self._failed("read", error) from error

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
        try:
            # No upper bound in the read options: rocksdict keeps a pointer to it, not the bytes.
            for key, value in self._db.items(from_key=start):
                if key >= end:
                    return page, b""
                page.append((key[_PREFIX.size :], value))
                size += len(key) + len(value)
                if size >= _PAGE_BYTES or len(page) == _PAGE_ROWS:
                    return page, key + b"\0"  # the least key after this one
            self._check_end(key or start, is_read=bool(page))
        except BaseException as error:
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

    def write(self, changes: Sequence[Change]) -> None:
        prefixes = self._prefixes
        batch = self._new_batch(raw_mode=True)
        put, delete = batch.put, batch.delete
        try:
            for (leaf, state, key), value in changes:
                if value is None:
                    delete(prefixes[leaf << 16 | state] + key)
                else:
                    put(prefixes[leaf << 16 | state] + key, value)
            self._db.write(batch)
        except BaseException as error:
            raise self._failed("written", error) from error

    def clear(self, leaf: int, state: int) -> None:
        start = self._prefixes[leaf << 16 | state]
        end = self._prefixes[(leaf << 16 | state) + 1]
        try:
            self._db.delete_range(start, end)
        except BaseException as error:
            raise self._failed("written", error) from error

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
            try:
                self._db.put(_META, meta)
            except BaseException as error:
                raise self._failed("written", error) from error
            self.flush()
            return True

    def flush(self) -> None:
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
                self._db.flush_wal(self._sync)
            finally:
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

    def _failed(self, done: str, error: BaseException) -> HomeError:
        """The exception for one of rocksdict's, which are plain Exceptions with RocksDB's words."""
        # A panic of its Rust is no Exception, so that nobody takes it for one; we do.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise error
        reason = str(error)
        advice = next(
            (advice for words, advice in _ADVICE if any(word in reason for word in words)),
            _ADVICE_ELSE,
        )
        kind = HomeLockedError if any(word in reason for word in _IS_LOCKED) else HomeError
        return kind(
            f"the RocksDB home at {self._path!r} cannot be {done}: {reason.rstrip('. ')}. {advice}"
        )


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
        prefix = self[number] = _PREFIX.pack(number >> 16, number & 0xFFFF)
        return prefix
