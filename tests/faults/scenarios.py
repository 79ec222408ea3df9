"""What the fault tests do to statekit: steps for the fork server, and the checks that follow.

A checkpoint says in its metadata which version of the workload it holds. The checks (in the test's
process, without shim) compare a directory with the oracle:

    I1, I3  all keys are there and equal
    I5      the newest checkpoint is whole, and is the newest acknowledged one or a newer one
    I7      the next checkpoint and collection work and leave nothing but what one needs
"""

import os
import random
import resource
import stat
import threading
from pathlib import Path
from typing import Any, NamedTuple

import workloads
from harness import Kit
from workloads import Workload

import statekit as sk
from statekit import errors
from statekit.checkpoint import writer
from statekit.checkpoint.reader import Checkpoint, checkpoints, open_checkpoint
from statekit.checkpoint.retention import collect as collect_garbage
from statekit.checkpoint.writer import Attempt
from statekit.offline.compact import compact as compact_checkpoint
from statekit.storage import open_storage

LOCKS = {".lock"}
SECONDS_MAX = 120.0


class Prepared(NamedTuple):
    kv: Any
    url: str
    workload: Workload
    version: int  # of what the provider holds
    taken: int  # checkpoints, and the version of the newest


# ---- in the fork server ------------------------------------------------------------------------


def prepare(
    kit: Kit,
    *,
    url: str,
    workload: Workload,
    taken: int,
    is_changed: bool = True,
    pack_bytes: int | None = None,
) -> Prepared:
    """A provider that has taken some checkpoints, with changes since if is_changed.

    With small packs, a small checkpoint has several packs, as a large one has.
    """
    if pack_bytes is not None:
        writer.PACK_BYTES = pack_bytes  # type: ignore[misc]
    kv = sk.open("memory:", key_groups=workload.key_groups, subgroups=workload.subgroups)
    workloads.declare(kv, workload)
    for version in range(1, taken + 1):
        workloads.apply(kv, workload, version)
        kv.checkpoint(url, metadata={"version": version})
    version = taken
    if is_changed:
        version += 1
        workloads.apply(kv, workload, version)
    return Prepared(kv, url, workload, version, taken)


def checkpoint(kit: Kit, prepared: Prepared, *, is_full: bool = False) -> int:
    """The next checkpoint."""
    kv, url, _, version, _ = prepared
    kit.intent(version)
    taken = kv.checkpoint(url, base=None if is_full else "auto", metadata={"version": version})
    kit.done(version)
    return int(taken.number)


def collect(kit: Kit, prepared: Prepared, *, keep: int = 1) -> tuple[int, ...]:
    return collect_garbage(open_storage(prepared.url), keep=keep).removed


def checkpoint_and_collect(kit: Kit, prepared: Prepared, *, is_full: bool = False) -> None:
    checkpoint(kit, prepared, is_full=is_full)
    collect(kit, prepared)


def publish_parts(kit: Kit, prepared: Prepared) -> int:
    """The next checkpoint, of two providers that write a part each, and a collection."""
    kv, url, _, version, taken = prepared
    kit.intent(version)
    (other,) = kv.split([range(kv.key_group_count // 2, kv.key_group_count)])
    number = taken + 1
    parts = [one.write_part(url, number=number) for one in (kv, other)]
    sk.publish(url, parts, number=number, metadata={"version": version})
    kit.done(version)
    collect(kit, prepared)
    return number


def compact(kit: Kit, prepared: Prepared) -> int:
    taken = compact_checkpoint(open_checkpoint(prepared.url))
    assert taken is not None, "there was nothing to compact"
    return int(taken.number)


def compact_and_collect(kit: Kit, prepared: Prepared) -> None:
    compact(kit, prepared)
    collect(kit, prepared)


def read_all(kit: Kit, prepared: Prepared, *, is_lazy: bool = False) -> None:
    """Restores the newest checkpoint and reads all of it: it is right, or raises an error."""
    with sk.restore(prepared.url, lazy=is_lazy) as kv:
        workloads.declare(kv, prepared.workload)
        found = workloads.read(kv, prepared.workload)
    assert found == workloads.contents(prepared.workload, prepared.taken), "wrong bytes as data"


def life(kit: Kit, prepared: Prepared, *, count: int, seed: int) -> None:
    """Checkpoints one after the other, full or not, compacted and collected now and then."""
    rng = random.Random(seed)
    for version in range(prepared.version, prepared.version + count):
        if version > prepared.version:
            workloads.apply(prepared.kv, prepared.workload, version)
        checkpoint(kit, prepared._replace(version=version), is_full=rng.random() < 0.3)
        if rng.random() < 0.2:
            compact_checkpoint(open_checkpoint(prepared.url))
        if rng.random() < 0.5:
            collect(kit, prepared, keep=rng.randrange(1, 4))


def checkpoint_without_fsync(kit: Kit, prepared: Prepared, *, of: str) -> None:
    """A checkpoint by a broken program. The tests must find that out."""
    real = os.fsync

    def fsync(fd: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        if is_directory != (of == "directories"):
            real(fd)

    os.fsync = fsync  # type: ignore[assignment]
    checkpoint(kit, prepared)


def fill_while_changing(kit: Kit, prepared: Prepared) -> None:
    """All leaves change after the state was frozen and before it is written."""
    kv, url, workload, version, _ = prepared
    may_write = threading.Event()
    enter = Attempt.__enter__

    def wait_and_enter(self: Attempt) -> Attempt:
        assert may_write.wait(SECONDS_MAX)
        return enter(self)

    Attempt.__enter__ = wait_and_enter  # type: ignore[method-assign]
    kit.intent(version)
    job = kv.checkpoint_async(url, metadata={"version": version})
    try:
        for state, keys in workloads.contents(workload, version).items():
            for key in [*keys][::2]:
                kv[state].discard(key)  # the entry is kept for the checkpoint
        for state in workload.states:
            kv[state].clear()  # the leaf is encoded for it
    finally:
        may_write.set()
        job.wait(SECONDS_MAX)
    kit.done(version)


def restore_otherwise(kit: Kit, prepared: Prepared) -> None:
    """Restored into other key-groups, and with a state whose type has changed."""
    _, url, workload, version, _ = prepared
    counts = workloads.contents(workload, version).get("counts", {})
    count = workload.key_groups * workload.subgroups * 4
    with sk.restore(url, lazy=False, regroup=count) as kv:
        workloads.declare(kv, workload)
        assert workloads.read(kv, workload) == workloads.contents(workload, version)
    with sk.restore(url, lazy=False) as kv:
        if counts:
            assert dict(kv.value("counts", float).items()) == counts


class _Shelf:
    """A file system of fsspec that is neither local to statekit nor an object store."""

    scheme = "shelf"

    @classmethod
    def register(cls) -> None:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        class ShelfFileSystem(LocalFileSystem):  # type: ignore[misc]
            protocol = cls.scheme
            local_file = False

            @classmethod
            def _strip_protocol(cls, path: str) -> str:
                return str(path).removeprefix(f"{cls.protocol}://").rstrip("/")

        fsspec.register_implementation(cls.scheme, ShelfFileSystem, clobber=True)


def checkpoint_to_shelf(kit: Kit, prepared: Prepared) -> int:
    """The next checkpoint through fsspec, and a collection, into the same directory."""
    _Shelf.register()
    shelf = prepared._replace(url=f"{_Shelf.scheme}://{prepared.url}")
    number = checkpoint(kit, shelf)
    collect(kit, shelf)
    return number


def with_few_files(kit: Kit, prepared: Prepared, *, step: str, spare: int) -> None:
    """A step with only `spare` free descriptors."""
    used = [int(name) for name in os.listdir("/proc/self/fd")]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    top = max(used) + 1
    while (fd := os.dup(0)) < top:  # free numbers below would count as spare, too
        fillers.append(fd)
    os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + spare, hard))
    try:
        globals()[step](kit, prepared)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in fillers:
            os.close(fd)


def with_little_memory(
    kit: Kit, prepared: Prepared, *, step: str, first: int, is_for_ever: bool, **arguments: Any
) -> dict[str, int]:
    """Repeats a step while its allocations fail one by one, beginning with the first given one.

    It ends when the step succeeds: because it makes fewer allocations, or can do without one. What
    must hold after each failure is checked here.
    """
    from statekit._native import lib

    assert lib.sk_is_testing_build()
    kv, url, workload, version, _ = prepared
    before = _names(url)
    nth = first
    while True:
        lib.sk_fail_alloc(nth, is_for_ever)
        try:
            globals()[step](kit, prepared, **arguments)
        except (MemoryError, errors.StateKitError):
            made = lib.sk_alloc_count()
            lib.sk_fail_alloc(0, 0)
            if made < nth:
                raise  # this error has another reason
            assert _names(url) - LOCKS == before - LOCKS, f"allocation {nth}: other files"
            if step == "checkpoint":
                contents = workloads.contents(workload, version)
                assert workloads.read(kv, workload) == contents, f"allocation {nth}: other state"
            nth += 1
        else:
            made = lib.sk_alloc_count()
            lib.sk_fail_alloc(0, 0)
            return {"nth": nth, "made": made}


def _names(url: str) -> set[str]:
    return set(os.listdir(url)) if os.path.isdir(url) else set()


def fail_then_succeed(kit: Kit, prepared: Prepared, *, is_full: bool = False) -> dict[str, Any]:
    """A checkpoint that a rule makes fail; then, when the cause is gone, one that works (I7).

    Says what was seen in between, for the test to judge.
    """
    kv, _, workload, version, _ = prepared
    seen: dict[str, Any] = {"error": "", "bases": (), "message": ""}
    try:
        checkpoint(kit, prepared, is_full=is_full)
    except errors.StateKitError as error:
        seen["error"] = type(error).__name__
        seen["bases"] = tuple(base.__name__ for base in type(error).__mro__)
        seen["message"] = str(error)
    kit.shim.disarm()
    kit.shim.mark("disarmed")
    seen["is_state_unchanged"] = workloads.read(kv, workload) == workloads.contents(
        workload, version
    )
    seen["files"] = sorted(os.listdir(prepared.url)) if os.path.isdir(prepared.url) else []
    seen["usable"] = usable(prepared.url, workload)
    workloads.apply(kv, workload, version + 1)
    checkpoint(kit, prepared._replace(version=version + 1), is_full=is_full)
    return seen


# ---- checks ------------------------------------------------------------------------------------


def restored(checkpoint_: Checkpoint | str, workload: Workload, at: int | None = None) -> Any:
    """What a checkpoint holds."""
    with sk.restore(checkpoint_, lazy=False, at=at) as kv:
        workloads.declare(kv, workload)
        return workloads.read(kv, workload)


def usable(url: str, workload: Workload) -> list[int]:
    """Versions of all checkpoints in a directory, oldest first; each equals the oracle's."""
    versions = []
    for found in checkpoints(url):
        version = int(found.metadata["version"])
        assert restored(url, workload, found.number) == workloads.contents(workload, version), (
            f"checkpoint {found.number} is not version {version}"
        )
        versions.append(version)
    return versions


def check_newest(url: str, workload: Workload, at_least: int, at_most: int) -> int:
    """Checks I1, I3 and I5. Returns the version of the newest checkpoint, 0 if there is none."""
    try:
        newest = open_checkpoint(url)
    except errors.NoCheckpointError:
        assert at_least == 0, f"version {at_least} was acknowledged, and there is no checkpoint"
        return 0
    version = int(newest.metadata["version"])
    assert at_least <= version <= at_most, (
        f"the newest checkpoint is version {version}; {at_least} was acknowledged and {at_most} "
        "was begun"
    )
    assert restored(url, workload) == workloads.contents(workload, version)
    check_older(url, newest.number)
    return version


def check_older(url: str, newest: int) -> None:
    """Older checkpoints are there with all they need or not at all, even after a collection."""
    for found in checkpoints(url):
        if found.number < newest:
            damage = list(found.verify())
            assert not damage, f"checkpoint {found.number} is left behind broken: {damage[0]}"


def check_goes_on(url: str, workload: Workload, version: int) -> None:
    """I7: work goes on from what a crash left, and a collection removes what is not needed."""
    if version:
        kv = sk.restore(url)  # lazy: the next checkpoint refers to leaves that are not here yet
    else:
        kv = sk.open("memory:", key_groups=workload.key_groups, subgroups=workload.subgroups)
    with kv:
        workloads.declare(kv, workload)
        workloads.apply(kv, workload, version + 1)
        kv.checkpoint(url, metadata={"version": version + 1})
    collect_garbage(open_storage(url), keep=1)  # now that nobody pins the one it came from
    check_tidy(url)
    check_newest(url, workload, version + 1, version + 1)


def check_tidy(url: str, count: int = 1) -> None:
    """A directory holds `count` checkpoints, their packs, and nothing else."""
    found = checkpoints(url)
    assert len(found) == count
    needed = {pack.name for each in found for pack in each.manifest.packs}
    needed |= {f"{each.number:012}.manifest" for each in found}
    assert {path.name for path in Path(url).iterdir()} - LOCKS == needed
