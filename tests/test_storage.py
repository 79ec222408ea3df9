"""Storages: the same behaviour of a directory, of memory:// and of S3, and what each adds."""

import array
import errno
import fcntl
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from servers import S3Server, child, free_port, s3, wait_until  # noqa: F401 - s3 is a fixture

import statekit as sk
from statekit import Store, failpoints
from statekit.checkpoint.retention import collect
from statekit.errors import ArgumentError, DamagedError, MissingFileError, StorageError
from statekit.offline.build import build
from statekit.storage import Storage, open_storage

PACK = f"{'ab' * 16}.pack"
MANIFEST = "000000000007.manifest"


@pytest.fixture(params=["local", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place where nothing is yet."""
    if request.param == "local":
        return str(tmp_path / "deep" / "down")
    if request.param == "memory":
        return f"memory://{tmp_path.name}-{id(tmp_path)}/deep"
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{time.time_ns()}"
    server.make_bucket(bucket)
    return f"s3://{bucket}/deep/down"


@pytest.fixture
def storage(url: str) -> Storage:
    return open_storage(url)


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "local")


@pytest.fixture
def points() -> Iterator[Callable[[str], None]]:
    yield failpoints.configure
    failpoints.configure(os.environ.get(failpoints.VARIABLE))


def names(storage: Storage) -> list[str]:
    return [entry.name for entry in storage.list()]


def run_child(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHILD + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,  # s3fs alone takes seconds to import, and machines may be busy
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CHILD = """
import os, resource, sys
from statekit.storage import open_storage
from statekit.errors import *
storage = open_storage(sys.argv[1])
"""


# ---- What all have in common


def test_nothing_is_made_before_it_is_written_to(storage: Storage) -> None:
    assert storage.list() == []
    assert storage.subdirectories() == []
    with storage.collecting() as is_alone:
        assert is_alone
    if storage.is_local:
        assert not os.path.exists(storage.url)


def test_what_is_written_is_read(storage: Storage) -> None:
    parts: list[Any] = [
        b"ab",
        bytearray(b"cd"),
        b"",
        memoryview(b"xefx")[1:3],
        array.array("B", b"g"),
    ]
    storage.write(PACK, parts)
    storage.sync()
    assert storage.read(PACK) == b"abcdefg"
    assert storage.read(PACK, 2) == b"cdefg"
    assert storage.read(PACK, 2, 3) == b"cde"
    assert storage.read(PACK, 7) == b""
    assert storage.read(PACK, 5, 0) == b""
    assert storage.size(PACK) == 7


def test_an_empty_file_is_a_file(storage: Storage) -> None:
    storage.write(PACK, [])
    assert storage.read(PACK) == b""
    assert storage.size(PACK) == 0


def test_list_is_sorted_with_sizes_and_times(storage: Storage) -> None:
    before = time.time()
    for name, size in (("b.pack", 3), ("a.pack", 5), (MANIFEST, 0)):
        storage.write(name, [bytes(size)])
    entries = storage.list()
    assert [(entry.name, entry.size) for entry in entries] == [
        (MANIFEST, 0),
        ("a.pack", 5),
        ("b.pack", 3),
    ]
    # S3 has whole seconds.
    assert all(before - 2 < entry.modified < time.time() + 2 for entry in entries)


def test_write_replaces_and_create_does_not(storage: Storage) -> None:
    storage.write(PACK, [b"old, and longer"])
    storage.write(PACK, [b"new"])
    assert storage.read(PACK) == b"new"
    assert storage.create(MANIFEST, b"first") is True
    assert storage.create(MANIFEST, b"second") is False
    assert storage.read(MANIFEST) == b"first"
    assert names(storage) == [MANIFEST, PACK]


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 8), (5, 3), (7, 1), (8, None), (8, 0), (99, 1), (0, 1 << 60)]
)
def test_a_file_that_ends_early_is_damaged(
    storage: Storage, offset: int, length: int | None
) -> None:
    storage.write(PACK, [b"abcdefg"])
    with pytest.raises(DamagedError, match=f"{PACK}' is damaged: it ends at byte 7") as raised:
        storage.read(PACK, offset, length)
    assert raised.value.file == f"{storage.shown}/{PACK}"
    assert raised.value.offset == 7


def test_a_file_that_is_not_there_is_missing(storage: Storage) -> None:
    asks: list[Callable[[], object]] = [
        lambda: storage.read(PACK),
        lambda: storage.read(PACK, 1, 2),
        lambda: storage.size(PACK),
        lambda: storage.pin(PACK),
    ]
    for ask in asks:
        with pytest.raises(MissingFileError, match=f"there is no file .*{PACK}"):
            ask()
    assert not storage.is_pinned(PACK)
    storage.write("other.pack", [b"1"])
    with pytest.raises(MissingFileError):
        storage.read(PACK)


def test_delete_takes_what_is_there(storage: Storage) -> None:
    storage.write("a.pack", [b"1"])
    storage.write("b.pack", [b"1"])
    storage.delete(["a.pack", "gone.pack"])
    storage.delete([])
    assert names(storage) == ["b.pack"]


def test_subdirectories_are_storages(storage: Storage) -> None:
    for name in ("w2", "w1"):
        storage.sub(name).write(PACK, [b"1"])
    storage.write(PACK, [b"12"])
    assert storage.subdirectories() == ["w1", "w2"]
    assert names(storage) == [PACK]
    assert storage.sub("w1").url == f"{storage.url}/w1" == open_storage(f"{storage.url}/w1").url
    assert open_storage(f"{storage.url}/w1/").read(PACK) == b"1"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\0"])
def test_a_subdirectory_has_one_plain_name(storage: Storage, name: str) -> None:
    with pytest.raises(ArgumentError, match="names no subdirectory"):
        storage.sub(name)


def test_several_parts_of_a_file_are_read_as_each_would_be(storage: Storage) -> None:
    storage.write(PACK, [b"0123456789"])
    found = storage.read_parts(PACK, [(0, 2), (7, 3), (4, 0), (1, 4)])
    assert found == [b"01", b"789", b"", b"1234"]
    with pytest.raises(DamagedError, match="it ends at byte 10, and the bytes from 8 to 12"):
        storage.read_parts(PACK, [(0, 2), (8, 4)])
    with pytest.raises(MissingFileError):
        storage.read_parts(MANIFEST, [(0, 2)])


# Not S3: moto looks and puts in two steps. See the test of conditional puts.
@pytest.mark.parametrize("url", ["local", "memory"], indirect=True)
def test_of_threads_that_create_one_name_exactly_one_wins(url: str) -> None:
    count = 8
    storages = [open_storage(url) for _ in range(count)]
    for round_ in range(20):
        barrier = threading.Barrier(count)
        won: list[int] = []

        def publish(
            at: int, barrier: threading.Barrier = barrier, won: list[int] = won, n: int = round_
        ) -> None:
            barrier.wait()
            if storages[at].create(f"{n:012}.manifest", b"%d" % at):
                won.append(at)

        threads = [threading.Thread(target=publish, args=(at,)) for at in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert storages[0].read(f"{round_:012}.manifest") == b"%d" % won[0]
    assert len(names(storages[0])) == 20


def test_other_threads_than_the_main_one_can_use_it(storage: Storage) -> None:
    failures: list[BaseException] = []

    def use(at: int) -> None:
        try:
            storage.write(f"{at}.pack", [b"%d" % at])
            assert storage.read(f"{at}.pack") == b"%d" % at
            assert f"{at}.pack" in names(storage)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(storage.list()) == 6


# ---- Locks and pins, within a process


def test_collecting_is_refused_while_somebody_writes(url: str) -> None:
    one, other = open_storage(url), open_storage(url)
    with one.writing(), other.writing():
        with other.collecting() as is_alone:
            assert not is_alone
        with one.collecting() as is_alone:
            assert not is_alone
    with other.collecting() as is_alone:
        assert is_alone
        with one.collecting() as is_second:
            assert not is_second


def test_writing_waits_for_the_collector(url: str) -> None:
    one, other = open_storage(url), open_storage(url)
    one.write(PACK, [b"1"])
    order: list[str] = []
    waits = threading.Event()

    def write() -> None:
        waits.set()
        with other.writing():
            order.append("written")

    with one.collecting() as is_alone:
        assert is_alone
        thread = threading.Thread(target=write)
        thread.start()
        waits.wait()
        order.append("collected")
    thread.join()
    assert order == ["collected", "written"]


def test_locks_are_given_back_when_the_work_fails(storage: Storage) -> None:
    with pytest.raises(ZeroDivisionError), storage.writing():
        _ = 1 / 0
    with pytest.raises(ZeroDivisionError), storage.collecting():
        _ = 1 / 0
    with storage.writing(), storage.collecting() as is_alone:
        assert not is_alone
    with storage.collecting() as is_alone:
        assert is_alone


def test_a_pinned_file_is_not_retired(url: str) -> None:
    one, other = open_storage(url), open_storage(url)
    one.create(MANIFEST, b"1")
    assert not other.is_pinned(MANIFEST)
    first, second = one.pin(MANIFEST), one.pin(MANIFEST)
    assert other.is_pinned(MANIFEST)
    assert other.retire(MANIFEST) is False
    first.release()
    first.release()
    assert other.retire(MANIFEST) is False
    with second:
        assert one.read(MANIFEST) == b"1"
    assert not one.is_pinned(MANIFEST)
    assert other.retire(MANIFEST) is True
    assert other.retire(MANIFEST) is True  # it is gone already, which is what was asked for
    assert names(one) == []


def test_a_lost_pin_ends(storage: Storage) -> None:
    storage.create(MANIFEST, b"1")
    storage.pin(MANIFEST)
    assert not storage.is_pinned(MANIFEST)


def test_has_locks_tells_where_other_processes_are_seen(storage: Storage) -> None:
    assert storage.has_locks is not storage.url.startswith("s3:")


# ---- URLs


def test_all_ways_to_name_a_directory_give_one_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    path = str(tmp_path.resolve() / "x")
    ways: Sequence[Any] = [
        path,
        Path(path),
        "x",
        "./x/",
        "y/../x",
        f"file:{path}",
        f"file://{path}",
        f"FILE://{path}/",
        "file:x",
        "link",
    ]
    assert {open_storage(way).url for way in ways} == {path}
    assert open_storage("x").is_local
    assert open_storage("~").url == str(tmp_path.resolve() / "~")
    assert not (tmp_path / "x").exists()


def test_a_scheme_can_be_a_name_if_it_is_written_as_a_path(tmp_path: Path) -> None:
    assert open_storage(tmp_path / "s3:bucket").url.endswith("/s3:bucket")
    assert open_storage("./ab:c").url.endswith("/ab:c")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "names no storage"),
        ("a\0b", "names no storage"),
        ("file:", "names no directory"),
        ("file://host/path", "another machine. Use file:///path"),
        ("s3:bucket/x", "Use s3://"),
        ("memory:", "no URL of a storage"),
        ("memory://", "names no storage"),
        ("memory:///", "names no storage"),
        ("s3://", "names no storage"),
        ("s3://bucket/x?key=secret", "without options"),
        ("simplecache::s3://bucket/x", "no URL of a storage"),
        ("s3://b/x::memory://y", "names no storage"),
        ("gopher://x/y", "no URL of a storage: Protocol not known"),
        ("s3://key:secret@bucket/x", "Credentials of an object store come from the environment"),
    ],
)
def test_what_names_no_storage_is_refused(url: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as raised:
        open_storage(url)
    assert "secret@" not in str(raised.value)
    assert "=secret" not in str(raised.value)


def test_a_path_of_bytes_is_refused_or_taken_as_a_path(tmp_path: Path) -> None:
    class Bytes(os.PathLike[bytes]):
        def __fspath__(self) -> bytes:
            return os.fsencode(tmp_path / "x")

    assert open_storage(Bytes()).url == str(tmp_path.resolve() / "x")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="names no directory"):
        open_storage(Path("a\0b"))


def test_a_file_is_no_storage(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"it is no directory. Name a directory"):
        open_storage(tmp_path / "file")
    below = open_storage(tmp_path / "file" / "x")
    with pytest.raises(StorageError, match=r"Not a directory. A part of the path is a file"):
        below.write(PACK, [b"1"])
    with pytest.raises(StorageError, match="name a directory"):
        below.list()


def test_a_password_in_a_url_is_never_shown() -> None:
    pytest.importorskip("fsspec")
    from statekit.storage import fsspec as remote

    url = f"ftp://user:geheim@127.0.0.1:{free_port()}/dir"
    with pytest.raises(StorageError, match="ftp://user@127") as raised:
        remote.open_fsspec(url).list()
    assert "geheim" not in str(raised.value)


def test_equal_remote_places_have_equal_urls() -> None:
    assert open_storage("memory:///a/b/").url == open_storage("MEMORY://a/b").url == "memory://a/b"
    assert open_storage("s3a://bucket/x/").url == open_storage("s3://bucket/x").url


@pytest.mark.parametrize(
    ("module", "url", "advice"),
    [
        ("fsspec", "memory://x", "pip install statekit[storage]"),
        ("fsspec", "s3://b/x", "pip install statekit[s3]"),
        ("s3fs", "s3://b/x", "pip install statekit[s3]"),
    ],
)
def test_a_missing_package_is_named(module: str, url: str, advice: str) -> None:
    code = f"""
sys.modules["{module}"] = None
try:
    open_storage("{url}")
except StorageError as error:
    print(error)
"""
    assert advice in run_child(code, ".")


def test_paths_need_no_fsspec(tmp_path: Path) -> None:
    code = "storage.write('a', [b'1']); print('fsspec' in sys.modules)"
    assert run_child(code, str(tmp_path / "x")) == "False\n"


# ---- A directory


def test_a_crash_leaves_only_temporary_files(local: Storage) -> None:
    for point in ("storage.pack.write", "storage.pack.fsync", "storage.pack.rename"):
        code = f"""
from statekit import failpoints
failpoints.configure("{point}=kill")
storage.write("{PACK}", [b"abc"])
"""
        done = subprocess.run(
            [sys.executable, "-c", CHILD + code, local.url], check=False, timeout=60
        )
        assert done.returncode == -9
    assert len(names(local)) == 3
    assert all(name.startswith(f"{PACK}.tmp-") for name in names(local))
    with pytest.raises(MissingFileError):
        local.read(PACK)


@pytest.mark.parametrize(
    "point",
    [
        "storage.mkdir",
        "storage.pack.open",
        "storage.pack.write",
        "storage.pack.fsync",
        "storage.pack.rename",
    ],
)
def test_a_failed_write_leaves_nothing(
    local: Storage, point: str, points: Callable[[str], None]
) -> None:
    points(f"{point}=error")
    with pytest.raises(StorageError, match=rf"{PACK}' cannot be written: fail point {point}"):
        local.write(PACK, [b"abc"])
    assert local.list() == []
    local.write(PACK, [b"abc"])
    assert local.read(PACK) == b"abc"


def test_a_failed_replacement_leaves_the_old_file(
    local: Storage, points: Callable[[str], None]
) -> None:
    local.write(PACK, [b"old"])
    for action in ("write=short", "fsync=error", "rename=error"):
        points(f"storage.pack.{action}")
        with pytest.raises(StorageError):
            local.write(PACK, [b"new"])
        assert names(local) == [PACK]
        assert local.read(PACK) == b"old"


def test_a_disk_that_fills_up_is_told(local: Storage, points: Callable[[str], None]) -> None:
    points("storage.pack.write=short;storage.manifest.write=short")
    for write in (
        lambda: local.write(PACK, [bytes(100), bytes(100)]),
        lambda: local.create(MANIFEST, b"1"),
    ):
        with pytest.raises(StorageError, match=r"No space left on device. Free some space or use"):
            write()
    assert local.list() == []


@pytest.mark.parametrize("step", ["open", "write", "fsync", "link", "unlink", "dirsync"])
def test_a_failed_create_publishes_nothing(
    local: Storage, step: str, points: Callable[[str], None]
) -> None:
    points(f"storage.manifest.{step}=error")
    with pytest.raises(StorageError, match=r"000000000007.manifest' cannot be written: fail point"):
        local.create(MANIFEST, b"1")
    assert local.list() == []
    assert local.create(MANIFEST, b"2")
    assert names(local) == [MANIFEST]


def test_create_tells_of_parents_that_cannot_be_synced(
    local: Storage, points: Callable[[str], None]
) -> None:
    points("storage.parentsync=error")
    with pytest.raises(StorageError, match=r"fail point storage.parentsync"):
        local.create(MANIFEST, b"1")
    assert local.list() == []


def test_the_order_of_system_calls_makes_it_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def spy(name: str, describe: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            calls.append(f"{name} {describe(*arguments)}")
            return real(*arguments)

        monkeypatch.setattr(os, name, call)

    def short(path: str) -> str:
        return os.path.relpath(path, tmp_path).split("tmp-")[0]

    def target(fd: int) -> str:
        return short(os.readlink(f"/proc/self/fd/{fd}"))

    spy("mkdir", short)
    spy("fsync", target)
    spy("rename", lambda a, b: f"{short(a)} {short(b)}")
    spy("link", lambda a, b: f"{short(a)} {short(b)}")
    storage = open_storage(tmp_path / "a" / "b")
    storage.write("p", [b"1"])
    storage.sync()
    storage.write("q", [b"1"])
    storage.sync()
    assert storage.create("m", b"1")
    assert calls == [
        "mkdir a",
        "mkdir a/b",
        "fsync a/b/p.",
        "rename a/b/p. a/b/p",
        "fsync a/b",
        "fsync a",
        "fsync .",
        "fsync a",
        "fsync a/b/q.",
        "rename a/b/q. a/b/q",
        "fsync a/b",
        "fsync a/b/m.",
        "link a/b/m. a/b/m",
        "fsync a/b",
    ]


def test_many_and_large_parts_are_written_in_order(local: Storage) -> None:
    small = [b"%d," % at for at in range(3000)]
    large = bytes(range(256)) * (17 << 12)  # 17 MiB: more than one piece
    local.write(PACK, [*small, large, b"", large, *small])
    assert local.read(PACK) == b"".join(small) + large + large + b"".join(small)


def test_what_the_system_does_not_take_at_once_is_written_again(
    local: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(7)
    real = os.writev

    def write_some(fd: int, parts: Sequence[memoryview]) -> int:
        size = sum(map(len, parts))
        return real(fd, [b"".join(parts)[: chance.randint(1, size)]])

    monkeypatch.setattr(os, "writev", write_some)
    parts = [chance.randbytes(chance.randint(0, 50)) for _ in range(1000)]
    local.write(PACK, parts)
    assert local.read(PACK) == b"".join(parts)


def test_words_are_written_as_their_bytes(local: Storage) -> None:
    words = array.array("Q", [1, 2, 3])
    local.write(PACK, [words, memoryview(words)[1:]])
    assert local.read(PACK) == words.tobytes() + words.tobytes()[8:]


def test_a_write_that_the_system_cuts_short_fails_clean(local: Storage) -> None:
    # RLIMIT_FSIZE: the system takes the first part of a write, and refuses the rest.
    code = f"""
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    storage.write("{PACK}", [bytes(60_000), bytes(60_000)])
except StorageError as error:
    print(error)
print(storage.list())
storage.write("{PACK}", [bytes(30_000), bytes(70_000)])
"""
    out = run_child(code, local.url)
    assert "cannot be written: File too large. Free some space" in out
    assert out.endswith("\n[]\n")
    assert local.size(PACK) == 100_000


def test_no_descriptor_left_is_told(local: Storage) -> None:
    local.create(MANIFEST, b"1")
    code = f"""
fds = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        fds.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
def lock():
    with storage.writing():
        pass
for ask in (lambda: storage.write("a", [b"1"]), storage.list, lambda: storage.read("{MANIFEST}"),
            lambda: storage.create("b", b"1"), storage.sync, lock,
            lambda: storage.pin("{MANIFEST}"), lambda: storage.retire("{MANIFEST}")):
    try:
        ask()
        print("done?")
    except StorageError as error:
        assert "Too many open files. Raise the limit of open files (ulimit -n)" in str(error), error
for fd in fds:
    os.close(fd)
before = os.listdir("/proc/self/fd")
storage.write("a", [b"1"])
with storage.writing(), storage.pin("{MANIFEST}"):
    pass
assert os.listdir("/proc/self/fd") == before
assert storage.retire("{MANIFEST}")
"""
    assert run_child(code, local.url) == ""
    assert names(local) == ["a"]


def test_what_is_forbidden_is_told() -> None:
    code = f"""
os.chmod(storage.url, 0o555)
if os.geteuid() == 0:
    os.seteuid(65534)  # nothing is forbidden to root
def lock():
    with storage.writing():
        pass
for ask in (lambda: storage.write("{PACK}", [b"1"]), lambda: storage.create("{MANIFEST}", b"1"),
            lambda: storage.sub("x").write("{PACK}", [b"1"]), lock):
    try:
        ask()
        print("done?")
    except StorageError as error:
        assert "Permission denied. Give this user the right to read and write" in str(error), error
assert storage.list() == []
storage.sync()
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:  # pytest's are closed to others
        assert run_child(code, path) == ""


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "Give this user the right to read and write there"),
        (errno.EROFS, "Mount the file system for writing"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOSPC, "Free some space"),
        (errno.ENOTDIR, "name a directory"),
        (errno.EIO, "the system's log"),
        (errno.EXDEV, "Try again or use another place"),
    ],
)
def test_each_reason_has_its_advice(local: Storage, number: int, advice: str) -> None:
    error = local.failed("written", PACK, OSError(number, os.strerror(number)))
    assert f"{PACK}' cannot be written: {os.strerror(number)}. " in str(error)
    assert advice in str(error)


def test_an_error_in_reading_names_the_file_and_the_offset(
    local: Storage, points: Callable[[str], None]
) -> None:
    local.write(PACK, [b"abcdef"])
    points("storage.read=error")
    with pytest.raises(StorageError, match=rf"{PACK}' cannot be read at byte 3: fail point"):
        local.read(PACK, 3, 2)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_where_there_are_no_links_create_still_has_one_winner(
    local: Storage, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A real file system of this kind would need a mount.
    def no_link(*_: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    won: list[int] = []
    barrier = threading.Barrier(6)

    def publish(at: int) -> None:
        barrier.wait()
        if local.create(MANIFEST, b"%d" % at):
            won.append(at)

    threads = [threading.Thread(target=publish, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert local.read(MANIFEST) == b"%d" % won[0]
    assert names(local) == [MANIFEST]


def test_where_flock_does_not_work_the_locks_of_the_process_remain(
    local: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    local.create(MANIFEST, b"1")
    with local.writing(), local.collecting() as is_alone:
        assert not is_alone
    with local.pin(MANIFEST):
        assert not local.retire(MANIFEST)
    assert not local.has_locks
    assert local.retire(MANIFEST)


# ---- A directory and several processes


def test_of_processes_that_create_one_name_exactly_one_wins(local: Storage) -> None:
    code = """
print("ready", flush=True)
sys.stdin.read()
won = [n for n in range(50) if storage.create(f"{n:012}.manifest", sys.argv[2].encode())]
print(*won)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD + code, local.url, who],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for who in ("a", "b")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    won = [list(map(int, process.communicate(timeout=60)[0].split())) for process in processes]
    assert sorted(won[0] + won[1]) == list(range(50))
    for who, numbers in zip((b"a", b"b"), won, strict=True):
        assert all(local.read(f"{number:012}.manifest") == who for number in numbers)
    assert len(local.list()) == 50


WRITING = """
with storage.writing():
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_an_attempt_in_another_process_is_seen_until_it_ends(local: Storage) -> None:
    with child(CHILD + WRITING, local.url):
        with local.collecting() as is_alone:
            assert not is_alone
        with local.writing():
            pass
    with local.collecting() as is_alone:
        assert is_alone


def test_a_killed_attempt_holds_no_lock(local: Storage) -> None:
    with child(CHILD + WRITING, local.url) as process:
        process.kill()
        process.wait()
        with local.collecting() as is_alone:
            assert is_alone


def test_a_pin_in_another_process_protects(local: Storage) -> None:
    local.create(MANIFEST, b"1")
    code = f"""
pin = storage.pin("{MANIFEST}")
print("ready", flush=True)
sys.stdin.read()
"""
    with child(CHILD + code, local.url):
        assert local.is_pinned(MANIFEST)
        assert local.retire(MANIFEST) is False
        with local.pin(MANIFEST):
            assert local.read(MANIFEST) == b"1"
        assert local.is_pinned(MANIFEST)
    assert not local.is_pinned(MANIFEST)
    assert local.retire(MANIFEST) is True


def test_of_pin_and_retire_exactly_one_succeeds(local: Storage) -> None:
    code = """
print("ready", flush=True)
for line in sys.stdin:
    print(int(storage.retire(line.strip())), flush=True)
"""
    with child(CHILD + code, local.url) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(200):
            name = f"{number:012}.manifest"
            local.write(name, [b"1"])
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            try:
                pin = local.pin(name)
            except MissingFileError:
                assert process.stdout.readline() == "1\n"
                continue
            is_retired = process.stdout.readline() == "1\n"
            assert local.is_pinned(name)
            assert (name in names(local)) is not is_retired
            assert not is_retired
            pin.release()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_who_waits_to_pin_what_is_being_retired_finds_it_gone(
    local: Storage, is_replaced: bool
) -> None:
    local.write(MANIFEST, [b"1"])
    path = f"{local.url}/{MANIFEST}"
    answers: list[object] = []

    def pin() -> None:
        try:
            answers.append(local.pin(MANIFEST))
        except MissingFileError as error:
            answers.append(error)

    def is_opened() -> bool:
        fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum(os.path.exists(fd) and os.path.samefile(fd, path) for fd in fds) == 2

    with open(path, "rb+") as collector:
        fcntl.flock(collector, fcntl.LOCK_EX)  # as retire() does
        thread = threading.Thread(target=pin)
        thread.start()
        wait_until(is_opened, "the reader has the file open")
        os.unlink(path)
        if is_replaced:
            local.write(MANIFEST, [b"another"])
    thread.join()
    assert isinstance(answers[0], MissingFileError)
    assert not local.is_pinned(MANIFEST)


def test_a_forked_child_has_no_locks_and_ends_none(local: Storage) -> None:
    local.create(MANIFEST, b"1")
    code = f"""
pin = storage.pin("{MANIFEST}")
lock = storage.writing()
lock.__enter__()
if (pid := os.fork()) == 0:
    pin.release()
    lock.__exit__(None, None, None)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("ready", flush=True)
sys.stdin.read()
"""
    with child(CHILD + code, local.url):
        assert local.is_pinned(MANIFEST)
        with local.collecting() as is_alone:
            assert not is_alone


# ---- S3


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{time.time_ns()}"
    s3.make_bucket(bucket)
    return bucket


def test_a_put_with_a_condition_replaces_nothing(bucket: str) -> None:
    storage: Any = open_storage(f"s3://{bucket}/x")
    assert storage._has_condition
    # Skips the look that create() takes first: the server decides.
    path = storage._path(MANIFEST)
    assert storage._put_if_none(path, b"first") is True
    assert storage._put_if_none(path, b"second") is False
    assert storage.read(MANIFEST) == b"first"
    assert storage._put_if_none(path, b"first") is True  # a repeated put finds its own object


def test_what_another_client_published_is_seen_at_once(bucket: str) -> None:
    one, other = open_storage(f"s3://{bucket}/x"), open_storage(f"s3://{bucket}/x")
    assert one.list() == other.list() == []
    assert one.create(MANIFEST, b"1")
    assert names(other) == [MANIFEST]
    assert other.retire(MANIFEST)
    assert one.list() == []
    with pytest.raises(MissingFileError):
        one.size(MANIFEST)


def test_a_whole_bucket_can_be_the_directory(bucket: str) -> None:
    storage = open_storage(f"s3://{bucket}")
    storage.write(PACK, [b"1"])
    storage.sub("w1").write(PACK, [b"1"])
    assert names(storage) == [PACK]
    assert storage.subdirectories() == ["w1"]


def test_a_large_pack_is_put_whole(bucket: str) -> None:
    storage = open_storage(f"s3://{bucket}/x")
    data = os.urandom(1 << 20) * 101  # above s3fs's limit for one put
    storage.write(PACK, [data, b"end"])
    assert storage.size(PACK) == len(data) + 3
    assert storage.read(PACK, len(data) - 1, 4) == data[-1:] + b"end"


def test_a_missing_bucket_is_not_made(bucket: str) -> None:
    storage = open_storage(f"s3://{bucket}-other/x")
    for write in (lambda: storage.write(PACK, [b"1"]), lambda: storage.create(MANIFEST, b"1")):
        with pytest.raises(StorageError, match="a bucket is not made for you"):
            write()


def test_a_server_that_does_not_answer_is_told(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    storage: Any = open_storage(f"s3://{bucket}/x")
    storage._fs.retries = 1
    with pytest.raises(StorageError, match=r"cannot be listed: .*For S3: AWS_ENDPOINT_URL"):
        storage.list()


def test_missing_credentials_are_told(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(StorageError, match="Check the credentials and what they allow"):
        open_storage(f"s3://{bucket}/x").write(PACK, [b"1"])


def test_a_forked_child_opens_it_again(bucket: str) -> None:
    code = """
assert storage.list() == []
if (pid := os.fork()) == 0:
    try:
        storage.list()
    except StorageError as error:
        print(error)
    print(open_storage(sys.argv[1]).list(), flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    out = run_child(code, f"s3://{bucket}/x")
    assert "After a fork, open the storage again in the child process.\n[]\n" in out


# ---- Other file systems of fsspec, which write in steps: fsspec's own of local files, for one


def test_a_file_system_without_atomic_puts_writes_and_renames(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    from statekit.storage.fsspec import RemoteStorage

    root = str(tmp_path / "x" / "y")
    storage = RemoteStorage(
        fsspec.filesystem("file"), root, "other", f"other://{root}", "shown", ""
    )
    assert storage.list() == []
    storage.write(PACK, [b"old"])
    storage.write(PACK, [b"newer"])
    storage.write(PACK, [b"equal"])  # same name and size: so it is the same, and is never removed
    assert storage.create(MANIFEST, b"1")
    assert not storage.create(MANIFEST, b"2")
    assert names(storage) == [MANIFEST, PACK]
    assert storage.read(PACK, 1, 2) == b"ew"
    assert not storage.has_locks
    assert abs(storage.list()[0].modified - time.time()) < 60
    storage.delete([PACK, "gone"])
    (tmp_path / "x" / "y" / "dir").mkdir()
    with pytest.raises(StorageError, match="shown/dir' cannot be written"):
        storage.write("dir", [b"1"])
    assert names(storage) == [MANIFEST]


def test_every_step_has_a_fail_point_and_a_message(
    storage: Storage, points: Callable[[str], None]
) -> None:
    storage.create(MANIFEST, b"1")
    put = storage.is_local
    steps: dict[str, Callable[[], object]] = {
        "storage.list": storage.list,
        "storage.read": lambda: storage.read(MANIFEST),
        "storage.delete": lambda: storage.delete([PACK]),
        "storage.retire": lambda: storage.retire(MANIFEST),
        f"storage.pack.{'write' if put else 'put'}": lambda: storage.write(PACK, [b"1"]),
        f"storage.manifest.{'link' if put else 'put'}": lambda: storage.create("new", b"1"),
    }
    if storage.is_local:
        steps["storage.dirsync"] = storage.sync
        steps["storage.lock"] = lambda: storage.writing().__enter__()
    for point, step in steps.items():
        points(f"{point}=error")
        with pytest.raises(StorageError, match=f"cannot be .*: fail point {point}"):
            step()
    assert names(storage) == [MANIFEST]
    points("storage.pack.put=short;storage.pack.write=short")
    with pytest.raises(StorageError, match="No space left"):
        storage.write(PACK, [b"1"])
    assert names(storage) == [MANIFEST]


# ---- Directories that are somebody's


def files_below(path: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()
    }


@pytest.mark.parametrize("below", [".", "checkpoints", "deep/down"])
def test_a_checkpoint_into_a_home_is_refused_and_leaves_it_untouched(
    tmp_path: Path, below: str
) -> None:
    home = tmp_path / "home"
    with sk.open(f"rocksdb:{home}") as kv:
        kv.value("counts", int)["a"] = 1
    before = files_below(home)
    directories = sorted(home.rglob("*/"))
    with sk.open("memory:") as kv:
        for take in (kv.checkpoint, lambda url: kv.checkpoint_async(url).wait()):
            with pytest.raises(ArgumentError, match=r"RocksDB database.*beside it"):
                take(home / below)
    with pytest.raises(ArgumentError, match="RocksDB"):
        build(Store(), open_storage(home / "checkpoints"), [])
    if below == ".":
        with pytest.raises(ArgumentError, match="RocksDB"):
            collect(home)
    assert files_below(home) == before
    assert sorted(home.rglob("*/")) == directories


def test_a_home_and_checkpoints_side_by_side_are_fine(tmp_path: Path) -> None:
    with sk.open(f"rocksdb:{tmp_path / 'home'}") as kv:
        kv.value("counts", int)["a"] = 1
        assert kv.checkpoint(tmp_path / "checkpoints").number == 1


def test_a_file_called_current_makes_no_database(tmp_path: Path) -> None:
    (tmp_path / "CURRENT").write_text("affairs")
    with sk.open("memory:") as kv:
        assert kv.checkpoint(tmp_path).number == 1
