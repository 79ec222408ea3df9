"""Programs to try the fault tools on: one right way to replace a file, and wrong ones.

Each publishes versions 1, 2, ... of a file and says `done` when it believes a version to be safe.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import threading

from harness import Kit


def content_of(version: int) -> bytes:
    return (b"%06d\n" % version) * 1000


def nothing(kit: Kit, prepared: object) -> None:
    """A step for measuring what a cycle costs."""


def publish(
    kit: Kit,
    prepared: object,
    *,
    directory: str,
    versions: int = 1,
    is_file_synced: bool = True,
    is_directory_synced: bool = True,
    is_name_kept: bool = False,
) -> int:
    """The textbook way, with steps that can be left out."""
    for version in range(1, versions + 1):
        kit.intent(version)
        target = os.path.join(directory, "file")
        scratch = target if is_name_kept else f"{target}.tmp"
        fd = os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        try:
            write_all(fd, content_of(version))
            if is_file_synced:
                os.fsync(fd)
        finally:
            os.close(fd)
        if not is_name_kept:
            os.rename(scratch, target)
        if is_directory_synced:
            sync_directory(directory)
        kit.done(version)
    return versions


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def retry_fsync(kit: Kit, prepared: object, *, directory: str) -> None:
    """The mistake of fsyncgate: fsync fails, is tried again, and succeeds without the data."""
    kit.intent(1)
    fd = os.open(os.path.join(directory, "file"), os.O_CREAT | os.O_WRONLY, 0o600)
    write_all(fd, content_of(1))
    with contextlib.suppress(OSError):
        os.fsync(fd)
    os.fsync(fd)
    os.close(fd)
    sync_directory(directory)
    kit.done(1)


def every_call(kit: Kit, prepared: object, *, directory: str) -> None:
    """Each call that the shim wraps, at least once, in ways that Python has."""
    path = os.path.join(directory, "a")
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.write(fd, b"0123456789")
    os.pwrite(fd, b"XY", 2)
    os.writev(fd, [b"ab", b"", b"cde"])
    os.pwritev(fd, [b"F", b"G"], 20)
    os.posix_fallocate(fd, 0, 30)
    os.ftruncate(fd, 25)
    os.pread(fd, 4, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    os.read(fd, 3)
    os.fsync(fd)
    os.fdatasync(fd)
    copy = os.dup(fd)
    os.write(copy, b"dup")
    os.close(copy)
    os.mkdir(os.path.join(directory, "sub"))
    here = os.open(directory, os.O_RDONLY)
    os.link("a", "b", src_dir_fd=here, dst_dir_fd=here)
    os.rename("b", "sub/c", src_dir_fd=here, dst_dir_fd=here)
    os.unlink("sub/c", dir_fd=here)
    os.rmdir("sub", dir_fd=here)
    with open(os.path.join(directory, ".//../data/d"), "wb") as file:
        file.write(b"buffered")
    with contextlib.suppress(OSError):
        target = os.open(os.path.join(directory, "e"), os.O_CREAT | os.O_WRONLY)
        os.sendfile(target, fd, 0, 10)
        os.close(target)
    append = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(append, b"end")
    os.close(append)
    unnamed = os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o600)
    os.write(unnamed, b"no name yet")
    os.link(f"/proc/self/fd/{unnamed}", "f", dst_dir_fd=here)  # linkat, which can follow the link
    os.close(unnamed)
    os.truncate(os.path.join(directory, "f"), 2)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapping:
        mapping.flush()
    os.fsync(here)
    os.close(here)
    os.close(fd)
    # Calls about files elsewhere do not count.
    with open(os.devnull, "wb") as file:
        file.write(b"x")


def count_in_threads(
    kit: Kit, prepared: object, *, directory: str, threads: int, writes: int
) -> int:
    """Writes from several threads at once, each its own place of one file."""
    fd = os.open(os.path.join(directory, "shared"), os.O_CREAT | os.O_WRONLY, 0o600)

    def work(at: int) -> None:
        for turn in range(writes):
            os.pwrite(fd, b"%08d" % (at * writes + turn), 8 * (at * writes + turn))

    workers = [threading.Thread(target=work, args=[at]) for at in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(fd)
    return kit.shim.count(["pwrite"])


def counts_after_fork(kit: Kit, prepared: object, *, directory: str) -> tuple[int, int]:
    """Calls counted here and in a child."""
    publish(kit, None, directory=directory)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.mkdir(os.path.join(directory, "child"))
        os.write(writing, b"%d" % kit.shim.count())
        os._exit(0)
    os.wait()
    return kit.shim.count(["mkdir"]), int(os.read(reading, 100))


def survive(kit: Kit, prepared: object, *, directory: str) -> list[str]:
    """What a program sees of a failing write: errno by errno."""
    fd = os.open(os.path.join(directory, "file"), os.O_CREAT | os.O_WRONLY, 0o600)
    seen = []
    for _ in range(4):
        try:
            seen.append(str(os.write(fd, b"x" * 1000)))
        except OSError as error:
            seen.append(errno.errorcode[error.errno or 0])
    os.close(fd)
    return seen


def hold(kit: Kit, prepared: object, *, directory: str) -> None:
    """Leaks a file and a thread."""
    os.open(os.path.join(directory, "file"), os.O_CREAT | os.O_WRONLY, 0o600)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
