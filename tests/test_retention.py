"""Retention: what must stay stays, through crashes, readers, writers and damage."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import S3Server, child, s3  # noqa: F401 - s3 is a fixture

from statekit import failpoints
from statekit.checkpoint.retention import Collected, collect
from statekit.errors import ArgumentError, DamagedError, StorageError
from statekit.format.manifest import Manifest, PackRef, manifest_name, number_of
from statekit.format.pack import pack_header
from statekit.storage import Storage, is_temporary, open_storage

PACK_BYTES = 96
NOW = 0.0  # as min_age_seconds: everything is old enough


@pytest.fixture(params=["local", "memory", "s3"])
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Storage:
    if request.param == "local":
        return open_storage(tmp_path / "x")
    if request.param == "memory":
        return open_storage(f"memory://{tmp_path.name}-{id(tmp_path)}")
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{time.time_ns()}"
    server.make_bucket(bucket)
    return open_storage(f"s3://{bucket}/x")


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "x")


@pytest.fixture
def points() -> Iterator[Callable[[str | None], None]]:
    yield failpoints.configure
    failpoints.configure(os.environ.get(failpoints.VARIABLE))


def pack_of(number: int, at: int = 0) -> PackRef:
    return PackRef(number.to_bytes(8, "big") + at.to_bytes(8, "big"), PACK_BYTES, number)


def write_pack(storage: Storage, pack: PackRef) -> str:
    storage.write(pack.name, [pack_header(pack.id, pack.number).ljust(PACK_BYTES, b"\0")])
    return pack.name


def publish(storage: Storage, number: int, *older: PackRef) -> None:
    """A checkpoint with two packs of its own, on top of older ones."""
    packs = (*older, pack_of(number), pack_of(number, 1))
    with storage.writing():
        for pack in packs[-2:]:
            write_pack(storage, pack)
        storage.sync()
        manifest = Manifest(
            number=number, key_groups=1, subgroups=1, owned=(range(1),), packs=packs
        )
        assert storage.create(manifest.name, manifest.encode())


def names(storage: Storage) -> set[str]:
    return {entry.name for entry in storage.list()}


def files_of(*numbers: int) -> set[str]:
    """The files of checkpoints that publish() made without older packs."""
    return {
        name
        for number in numbers
        for name in (manifest_name(number), pack_of(number).name, pack_of(number, 1).name)
    }


def check_complete(storage: Storage) -> set[int]:
    """Checks that each manifest has all its packs. Returns their numbers."""
    found = names(storage)
    numbers = {number for name in found if (number := number_of(name))}
    for number in numbers:
        name = manifest_name(number)
        manifest = Manifest.decode(storage.read(name), name)
        assert {pack.name for pack in manifest.packs} <= found, f"{name} lacks packs"
    return numbers


# ---- What goes and what stays


def test_the_newest_stay_and_the_rest_goes(storage: Storage) -> None:
    for number in (1, 2, 3, 5):
        publish(storage, number)
    size = sum(entry.size for entry in storage.list() if entry.name in files_of(1, 2))
    done = collect(storage, keep=2)
    assert names(storage) == files_of(3, 5)
    assert done == Collected(
        kept=(3, 5),
        in_use=(),
        removed=(1, 2),
        packs=tuple(sorted(files_of(1, 2) - {manifest_name(1), manifest_name(2)})),
        temporaries=(),
        bytes_freed=size,
        is_busy=False,
    )


def test_packs_that_a_newer_checkpoint_names_stay(storage: Storage) -> None:
    publish(storage, 1)
    publish(storage, 2, pack_of(1, 1))
    publish(storage, 3, pack_of(1, 1), pack_of(2))
    done = collect(storage)
    assert done.removed == (1, 2)
    assert names(storage) == files_of(3) | {pack_of(1, 1).name, pack_of(2).name}
    assert check_complete(storage) == {3}


def test_nothing_to_do_does_nothing(storage: Storage) -> None:
    assert collect(storage) == Collected((), (), (), (), (), 0, False)
    publish(storage, 1)
    assert collect(storage, keep=1 << 62) == Collected((1,), (), (), (), (), 0, False)
    assert names(storage) == files_of(1)


@pytest.mark.parametrize("keep", [0, -1])
def test_the_newest_cannot_be_removed(storage: Storage, keep: int) -> None:
    publish(storage, 1)
    with pytest.raises(ArgumentError, match="Keep 1 or more"):
        collect(storage, keep=keep)
    assert names(storage) == files_of(1)


def test_dry_run_tells_the_same_and_deletes_nothing(storage: Storage) -> None:
    for number in (1, 2, 3):
        publish(storage, number)
    write_pack(storage, pack_of(2, 9))
    before = storage.list()
    would = collect(storage, dry_run=True, min_age_seconds=NOW)
    assert storage.list() == before
    assert would.removed == (1, 2)
    assert pack_of(2, 9).name in would.packs
    assert collect(storage, min_age_seconds=NOW) == would


def test_other_files_are_left_alone(storage: Storage) -> None:
    publish(storage, 1)
    publish(storage, 2)
    others = {"README", "7.manifest", "x.pack", "000000000000.manifest", "notes.manifest"}
    for name in others:
        storage.write(name, [b"mine"])
    collect(storage, min_age_seconds=NOW)
    assert names(storage) == files_of(2) | others


def test_other_directories_are_left_alone(storage: Storage) -> None:
    publish(storage.sub("w1"), 1)
    publish(storage, 1)
    publish(storage, 2)
    collect(storage, min_age_seconds=NOW)
    assert names(storage.sub("w1")) == files_of(1)


# ---- Readers


def test_a_pinned_checkpoint_stays_with_its_packs(storage: Storage) -> None:
    publish(storage, 1)
    publish(storage, 2, pack_of(1))
    publish(storage, 3)
    with storage.pin(manifest_name(2)):
        done = collect(storage)
        assert (done.kept, done.in_use, done.removed) == ((3,), (2,), (1,))
        assert check_complete(storage) == {2, 3}
        assert pack_of(1).name in names(storage)
        assert pack_of(1, 1).name not in names(storage)
    assert collect(storage, min_age_seconds=NOW).removed == (2,)
    assert names(storage) == files_of(3)


def test_a_checkpoint_pinned_at_the_last_moment_stays(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        publish(storage, number)
    pins = []
    real = storage.retire

    def retire(name: str) -> bool:  # a reader comes after the plan was made
        if name == manifest_name(2):
            pins.append(storage.pin(name))
        return real(name)

    monkeypatch.setattr(storage, "retire", retire)
    done = collect(storage)
    assert (done.in_use, done.removed) == ((2,), (1,))
    assert names(storage) == files_of(2, 3)
    pins.pop().release()


def test_a_checkpoint_pinned_by_another_process_stays(local: Storage) -> None:
    for number in (1, 2):
        publish(local, number)
    pinning = CHILD.format(code=f"pin = storage.pin('{manifest_name(1)}')")
    with child(pinning, local.url):
        done = collect(local)
        assert done.in_use == (1,)
        assert names(local) == files_of(1, 2)
    assert collect(local).removed == (1,)


# ---- Writers, and what they left

CHILD = """
import sys
from statekit.storage import open_storage
storage = open_storage(sys.argv[1])
{code}
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("storage", ["local", "memory"], indirect=True)
def test_packs_of_failed_attempts_go_at_once_where_there_are_locks(storage: Storage) -> None:
    publish(storage, 1)
    failed = {write_pack(storage, pack_of(number, 7)) for number in (1, 2)}
    storage.write(f"{manifest_name(2)}.tmp-0123", [b"half"])
    done = collect(storage)
    assert set(done.packs) == failed
    assert done.temporaries == (f"{manifest_name(2)}.tmp-0123",)
    assert done.bytes_freed == 2 * PACK_BYTES + 4
    assert names(storage) == files_of(1)


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_packs_of_failed_attempts_go_by_age_where_there_are_no_locks(storage: Storage) -> None:
    publish(storage, 1)
    publish(storage, 3)
    failed = {number: write_pack(storage, pack_of(number, 7)) for number in (2, 3, 4)}
    done = collect(storage)
    # Packs of a removed checkpoint are deleted at once.
    assert set(done.packs) == {pack_of(1).name, pack_of(1, 1).name}
    assert names(storage) == files_of(3) | set(failed.values())
    done = collect(storage, min_age_seconds=NOW)
    # failed[4] stays: the next attempt has number 4, and may write that very name again.
    assert set(done.packs) == {failed[2], failed[3]}
    publish(storage, 5)
    collect(storage, min_age_seconds=NOW)
    assert names(storage) == files_of(5)


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_a_pack_that_was_only_begun_goes_by_age_too(storage: Storage) -> None:
    publish(storage, 1)
    begun = pack_of(9)
    storage.write(begun.name, [pack_header(begun.id, 9)[:20]])
    assert collect(storage).packs == ()
    assert collect(storage, min_age_seconds=NOW).packs == (begun.name,)


def test_young_garbage_stays_if_asked(storage: Storage) -> None:
    publish(storage, 1)
    name = write_pack(storage, pack_of(1, 7))
    assert collect(storage, min_age_seconds=3600).packs == ()
    assert name in names(storage)


def test_an_attempt_in_progress_keeps_its_packs(storage: Storage) -> None:
    for number in (1, 2):
        publish(storage, number)
    with storage.writing():
        new = {write_pack(storage, pack_of(3)), write_pack(storage, pack_of(2, 8))}
        done = collect(storage, min_age_seconds=NOW)
        assert done.is_busy
        assert done.removed == (1,)  # this needs no lock
        assert names(storage) == files_of(2) | new


def test_an_attempt_in_another_process_keeps_its_packs(local: Storage) -> None:
    for number in (1, 2):
        publish(local, number)
    new = pack_of(3).name
    temporary = f"{pack_of(3, 1).name}.tmp-99"
    code = f"""
lock = storage.writing()
lock.__enter__()
storage.write("{new}", [{pack_header(pack_of(3).id, 3)!r}])
open(storage.url + "/{temporary}", "w").close()
"""
    with child(CHILD.format(code=code), local.url):
        done = collect(local)
        assert done.is_busy
        assert done.removed == (1,)
        assert names(local) == files_of(2) | {new, temporary}
    done = collect(local)
    assert not done.is_busy
    assert names(local) == files_of(2)


# ---- Damage


@pytest.mark.parametrize("number", [2, 3])
def test_a_damaged_checkpoint_that_stays_stops_it(storage: Storage, number: int) -> None:
    for n in (1, 2, 3):
        publish(storage, n)
    name = manifest_name(number)
    data = bytearray(storage.read(name))
    data[70] ^= 1
    storage.write(name, [data])
    write_pack(storage, pack_of(3, 7))
    before = storage.list()
    with pytest.raises(
        DamagedError, match=rf"nothing was removed .* checkpoint {number}"
    ) as raised:
        collect(storage, keep=2, min_age_seconds=NOW)
    assert raised.value.file == storage.file(name)
    assert storage.list() == before


def test_a_damaged_checkpoint_that_is_in_use_stops_it(storage: Storage) -> None:
    publish(storage, 1)
    publish(storage, 2)
    storage.write(manifest_name(1), [b"junk"])
    before = storage.list()
    with storage.pin(manifest_name(1)), pytest.raises(DamagedError, match="nothing was removed"):
        collect(storage)
    assert storage.list() == before


@pytest.mark.parametrize("storage", ["local", "memory"], indirect=True)
def test_a_damaged_checkpoint_that_goes_does_not(storage: Storage) -> None:
    publish(storage, 1)
    publish(storage, 2)
    storage.write(manifest_name(1), [b"junk"])
    assert collect(storage).removed == (1,)
    assert names(storage) == files_of(2)


def test_a_damaged_checkpoint_pinned_at_the_last_moment_keeps_all_packs(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(storage, 1)
    publish(storage, 2)
    storage.write(manifest_name(1), [b"junk"])
    monkeypatch.setattr(storage, "retire", lambda _: False)
    with pytest.raises(DamagedError):
        collect(storage)
    assert names(storage) == files_of(1, 2)


# ---- Several collectors


def test_a_manifest_that_another_collector_took_makes_it_look_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        publish(storage, number)
    real = storage.list
    listings = []

    def list_before_another() -> object:
        listings.append(entries := real())
        if len(listings) == 1:  # the other publishes 4 over the packs of 3, and removes the rest
            publish(storage, 4, pack_of(3))
            for number in (1, 2, 3):
                storage.retire(manifest_name(number))
        return entries

    monkeypatch.setattr(storage, "list", list_before_another)
    # The attempt that this stands for runs elsewhere: no lock of this process knows of it.
    monkeypatch.setattr(storage, "writing", storage.collecting)
    done = collect(storage, keep=2, min_age_seconds=NOW)
    assert len(listings) == 3  # two plans, and a look for new manifests before packs go
    assert done.kept == (4,)
    monkeypatch.undo()
    assert check_complete(storage) == {4}


def test_a_directory_that_never_holds_still_is_told(
    local: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(local, 1)
    entries = local.list()
    local.retire(manifest_name(1))
    monkeypatch.setattr(local, "list", lambda: entries)
    with pytest.raises(StorageError, match="Let one process collect garbage"):
        collect(local)


# ---- Crashes and failures at each step

POINTS = [
    "retention.read",
    "retention.manifest",
    "retention.manifest@2",
    "retention.sync",
    "retention.packs",
    "storage.list",
    "storage.read",
    "storage.read@3",
    "storage.lock",
    "storage.retire",
    "storage.retire@2",
    "storage.dirsync",
    "storage.delete",
    "storage.delete@2",
    "storage.delete@5",
]


def prepare(storage: Storage) -> set[str]:
    """Three checkpoints on top of each other, and one that failed. Returns the files to remain."""
    publish(storage, 1)
    publish(storage, 2, pack_of(1))
    publish(storage, 3, pack_of(2, 1))
    write_pack(storage, pack_of(4))
    storage.write(f"{manifest_name(4)}.tmp-12", [b"half"])
    return files_of(3) | {pack_of(2, 1).name}


def entry_of(point: str, action: str) -> str:
    name, _, nth = point.partition("@")
    return f"{name}={action}@{nth or 1}"


@pytest.mark.parametrize("point", POINTS)
def test_a_failure_at_any_step_leaves_complete_checkpoints(
    local: Storage, point: str, points: Callable[[str | None], None]
) -> None:
    remaining = prepare(local)
    points(entry_of(point, "error"))
    with pytest.raises(StorageError, match=r"cannot be .*: fail point"):
        collect(local)
    assert max(check_complete(local)) == 3
    collect(local)
    assert names(local) == remaining


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_step_leaves_complete_checkpoints(local: Storage, point: str) -> None:
    remaining = prepare(local)
    code = """
import sys
from statekit.checkpoint.retention import collect
from statekit.storage import open_storage
collect(open_storage(sys.argv[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, local.url],
        env={**os.environ, failpoints.VARIABLE: entry_of(point, "kill")},
        check=False,
        timeout=60,
    )
    assert done.returncode == -9
    assert max(check_complete(local)) == 3
    collect(local)
    assert names(local) == remaining


def test_every_fail_point_of_storage_and_retention_is_visited(
    tmp_path: Path, points: Callable[[str | None], None]
) -> None:
    points("")
    for url in (str(tmp_path / "a" / "b"), f"memory://{tmp_path.name}-{id(tmp_path)}"):
        storage = open_storage(url)
        prepare(storage)
        collect(storage)
    visits = failpoints.visits()
    ours = [name for name in visits if name.startswith(("storage.", "retention."))]
    assert len(ours) >= 22
    assert [name for name in ours if not visits[name]] == []


# ---- Against a model


@pytest.mark.parametrize("seed", range(20))
def test_any_history_keeps_what_the_rules_say(local: Storage, seed: int) -> None:
    chance = random.Random(seed)
    packs: dict[int, list[PackRef]] = {}
    pins = {}
    number = 0
    for _ in range(60):
        action = chance.choice(["publish", "publish", "fail", "pin", "release", "collect"])
        if action == "publish":
            number += 1
            base = chance.choice(list(packs)[-1:] + [n for n in pins if n in packs] or [0])
            older = sorted(
                chance.sample(packs.get(base, []), chance.randint(0, len(packs.get(base, [])))),
                key=lambda pack: pack.number,
            )
            publish(local, number, *older)
            packs[number] = [*older, pack_of(number), pack_of(number, 1)]
        elif action == "fail":
            write_pack(local, pack_of(number + 1, 5))
        elif action == "pin" and packs:
            which = chance.choice(list(packs))
            if which not in pins:
                pins[which] = local.pin(manifest_name(which))
        elif action == "release" and pins:
            pins.pop(chance.choice(list(pins))).release()
        elif action == "collect":
            keep = chance.randint(1, 3)
            done = collect(local, keep=keep)
            newest = sorted(packs)[-keep:]
            packs = {n: named for n, named in packs.items() if n in newest or n in pins}
            assert set(done.kept) | set(done.in_use) == set(packs)
            files = {pack.name for named in packs.values() for pack in named}
            assert names(local) == files | {manifest_name(n) for n in packs}
        assert check_complete(local) == set(packs), f"seed {seed}"
    assert not any(is_temporary(name) for name in names(local))


# ---- What is not ours


def test_a_file_that_only_has_the_name_of_a_pack_is_left_and_named(local: Storage) -> None:
    for number in (1, 2):
        publish(local, number)
    letter = b"Dear colleague, " * 20
    theirs = {
        f"{0xF0:032x}.pack": letter,
        f"{0xF1:032x}.pack": pack_header(pack_of(9).id, 1) + letter,  # a pack of another name
        f"{0xF2:032x}.pack": b"short",
        "notes.tmp-1": letter,
        "000000000001.manifest.tmp": letter,
        "photo.pack": letter,
    }
    for name, data in theirs.items():
        Path(local.url, name).write_bytes(data)
    left = write_pack(local, pack_of(3))  # of a failed attempt
    begun = pack_of(3, 1)  # and one that died in the header, or before it
    Path(local.url, begun.name).write_bytes(pack_header(begun.id, 3)[:20])
    Path(local.url, pack_of(3, 2).name).touch()
    done = collect(local)
    assert set(done.packs) - files_of(1) == {left, begun.name, pack_of(3, 2).name}
    assert set(done.foreign) == {name for name in theirs if len(name) == 37}
    for name, data in theirs.items():
        assert Path(local.url, name).read_bytes() == data
    assert names(local) == files_of(2) | theirs.keys()


def test_a_file_of_another_is_named_also_while_somebody_writes(local: Storage) -> None:
    publish(local, 1)
    name = f"{0xF0:032x}.pack"
    Path(local.url, name).write_bytes(b"not a pack")
    with local.writing():
        assert collect(local).foreign == (name,)


def test_names_of_temporary_files_are_exactly_ours() -> None:
    ours = ("000000000007.manifest", f"{7:032x}.pack")
    for name in ours:
        assert is_temporary(f"{name}.tmp-0123456789abcdef")
        assert is_temporary(f"{name}.tmp-unfinished-0123456789abcdef")
        for other in (name, f"{name}.tmp-", f"{name}.tmp-xyz", f"x{name}.tmp-12", f"{name}.tmp"):
            assert not is_temporary(other)
