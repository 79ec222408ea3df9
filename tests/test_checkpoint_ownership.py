"""A process that was replaced publishes nothing more; one that starts anew is never locked out.

The oracle: a restore gives what the newest generation has acknowledged.
"""

import errno
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from servers import S3Server, s3  # noqa: F401 - s3 is a fixture

import statekit as sk
from statekit.checkpoint import publishing, writer
from statekit.checkpoint.ownership import Claim
from statekit.checkpoint.reader import open_checkpoint
from statekit.errors import CheckpointError, DamagedError, FencedError
from statekit.format.manifest import Manifest, manifest_name
from statekit.offline.compact import compact
from statekit.offline.edit import edit
from statekit.storage import open_storage

SECONDS_MAX = 60.0


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "local":
        return str(tmp_path / "place")
    if request.param == "memory":
        return f"memory://ownership-{secrets.token_hex(4)}"
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"ownership-{secrets.token_hex(4)}"
    server.make_bucket(bucket)
    return f"s3://{bucket}/place"


@pytest.fixture(params=["local", "memory"])
def near(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place that answers quickly."""
    return str(tmp_path / "near") if request.param == "local" else f"memory://{tmp_path.name}"


class Held:
    """A checkpoint that is held up after it has looked at the place and before it writes."""

    def __init__(self, kv: sk.KVProvider, place: str, **options: Any) -> None:
        enter = writer.Attempt.__enter__
        began, self._may_go_on = threading.Event(), threading.Event()

        def wait_after(attempt: writer.Attempt) -> writer.Attempt:
            found = enter(attempt)
            began.set()
            assert self._may_go_on.wait(SECONDS_MAX)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer.Attempt, "__enter__", wait_after)
            self._job = kv.checkpoint_async(place, **options)
            assert began.wait(SECONDS_MAX)

    def go_on(self) -> sk.Checkpoint:
        self._may_go_on.set()
        return self._job.wait(SECONDS_MAX)


def small(**values: int) -> sk.KVProvider:
    kv = sk.open("memory:", key_groups=2, subgroups=2)
    counts(kv).update(values)
    return kv


def counts(kv: sk.KVProvider) -> Any:
    return kv.value("counts", int, default=0)


def restored(place: Any, **options: Any) -> dict[str, int]:
    with sk.restore(place, **options) as kv:
        return dict(counts(kv).items())


def numbers(place: str) -> list[int]:
    return [one.number for one in sk.checkpoints(place)]


# ---- A process that was replaced is refused


def test_a_replaced_process_cannot_publish(place: str) -> None:
    old = small(a=1)
    old.checkpoint(place)
    new = sk.restore(place)
    counts(new)["a"] = 2
    new.checkpoint(place)
    counts(old)["b"] = 99
    for options in ({}, {"base": None}):
        with pytest.raises(FencedError, match="replaced"):
            old.checkpoint(place, **options)
    assert numbers(place) == [1, 2]
    assert restored(place) == {"a": 2}
    counts(new)["a"] = 3
    assert new.checkpoint(place).number == 3
    assert restored(place) == {"a": 3}


def test_a_replaced_process_leaves_no_packs_behind(tmp_path: Path) -> None:
    old = small(a=1)
    old.checkpoint(tmp_path)
    with sk.restore(tmp_path) as new:
        new.checkpoint(tmp_path, base=None)
    before = sorted(os.listdir(tmp_path))
    counts(old)["b"] = 1
    with pytest.raises(FencedError):
        old.checkpoint(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before


def test_it_is_refused_also_if_it_had_begun_before_it_was_replaced(
    place: str,
) -> None:
    """It looked before it was replaced; then the exclusive creation of its number decides."""
    old = small(a=1)
    old.checkpoint(place)
    counts(old)["a"] = 50
    held = Held(old, place)
    new = sk.restore(place)
    counts(new)["a"] = 2
    assert new.checkpoint(place).number == 2
    with pytest.raises(FencedError):
        held.go_on()
    assert restored(place) == {"a": 2}


def test_it_is_refused_also_if_its_number_was_published_and_collected_meanwhile(near: str) -> None:
    old = small(a=1)
    old.checkpoint(near)
    counts(old)["a"] = 50
    held = Held(old, near, base=None)
    with sk.restore(near, lazy=False) as new:
        for value in (2, 3):
            counts(new)["a"] = value
            new.checkpoint(near)
    for number in (1, 2):  # as a collection does if it does not see the lock
        open_storage(near).delete([manifest_name(number)])
    with pytest.raises(FencedError):
        held.go_on()
    assert numbers(near) == [3]
    assert restored(near) == {"a": 3}


def test_of_two_that_restore_the_same_checkpoint_one_goes_on(place: str) -> None:
    small(a=1).checkpoint(place)
    first, second = sk.restore(place), sk.restore(place)
    counts(first)["a"] = 2
    first.checkpoint(place)
    counts(second)["a"] = 3
    with pytest.raises(FencedError):
        second.checkpoint(place)
    assert restored(place) == {"a": 2}


def test_whoever_restored_last_wins_whatever_the_old_one_published_meanwhile(near: str) -> None:
    old = small(a=1)
    old.checkpoint(near)
    new = sk.restore(near)
    counts(old)["a"] = 10
    assert old.checkpoint(near).number == 2  # nobody has taken its place yet
    counts(new)["a"] = 2
    assert new.checkpoint(near).number == 3
    with pytest.raises(FencedError):
        old.checkpoint(near)
    assert restored(near) == {"a": 2}


def test_going_back_to_an_older_checkpoint_is_a_new_generation_too(near: str) -> None:
    old = small(a=1)
    old.checkpoint(near)
    with sk.restore(near) as middle:
        counts(middle)["a"] = 2
        middle.checkpoint(near)
        back = sk.restore(near, at=1)
        counts(back)["a"] = 7
        assert back.checkpoint(near).number == 3
        for other in (old, middle):
            with pytest.raises(FencedError):
                other.checkpoint(near)
    assert restored(near) == {"a": 7}


def test_one_that_only_looks_replaces_nobody(near: str) -> None:
    kv = small(a=1)
    kv.checkpoint(near)
    assert restored(near) == {"a": 1}
    counts(kv)["a"] = 2
    assert kv.checkpoint(near).number == 2


def test_other_places_of_a_replaced_process_are_its_own(near: str, tmp_path: Path) -> None:
    old = small(a=1)
    old.checkpoint(near)
    old.checkpoint(tmp_path / "other")
    with sk.restore(near) as new:
        new.checkpoint(near)
    with pytest.raises(FencedError):
        old.checkpoint(near)
    counts(old)["a"] = 2
    assert old.checkpoint(tmp_path / "other").number == 2
    assert restored(tmp_path / "other") == {"a": 2}


def test_racing_processes_never_publish_an_older_generation_above_a_newer_one(near: str) -> None:
    """Six at once restore and publish what they can: with the numbers, generations never fall."""
    small(a=1).checkpoint(near)
    start = threading.Barrier(6)
    failures: list[BaseException] = []

    def live(worker: int) -> None:
        start.wait(SECONDS_MAX)
        for round_ in range(4):
            with sk.restore(near) as kv:
                for step in range(3):
                    counts(kv)["a"] = 1000 * worker + 10 * round_ + step
                    try:
                        kv.checkpoint(near, metadata={"by": worker, "round": round_})
                    except FencedError:
                        break
                    except CheckpointError as error:
                        if "another writer" not in str(error):
                            failures.append(error)
                            raise

    threads = [threading.Thread(target=live, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    found = [one.manifest for one in sk.checkpoints(near)]
    assert len(found) > 6
    generations = [one.generation for one in found]
    assert generations == sorted(generations)
    lives = {}
    for one in found[1:]:
        by = (one.metadata["by"], one.metadata["round"])
        assert lives.setdefault(one.generation, by) == by, "one generation, two publishers"


# ---- Where contents follow the name


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: str) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "link", none)
    monkeypatch.setattr(os, "rename", none)


class Reserved:
    """A checkpoint that is held up when its manifest has a name but no contents yet."""

    def __init__(self, kv: sk.KVProvider, place: Path) -> None:
        look = publishing.Publisher._look_again
        reserved, self._may_go_on = threading.Event(), threading.Event()
        is_first = [True]
        before = {*place.glob("*.manifest")}

        def wait_after(publisher: publishing.Publisher) -> None:
            look(publisher)
            if {*place.glob("*.manifest")} > before and is_first.pop():
                reserved.set()
                assert self._may_go_on.wait(SECONDS_MAX)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(publishing.Publisher, "_look_again", wait_after)
            self._job = kv.checkpoint_async(place)
            assert reserved.wait(SECONDS_MAX)

    def go_on(self) -> sk.Checkpoint:
        self._may_go_on.set()
        return self._job.wait(SECONDS_MAX)


@pytest.mark.usefixtures("in_place")
def test_a_successor_that_finishes_first_wins_over_who_passed_it_over(tmp_path: Path) -> None:
    old = small(a=1)
    old.checkpoint(tmp_path)
    new = sk.restore(tmp_path)
    counts(new)["a"] = 2
    counts(old)["a"] = 50
    successor = Reserved(new, tmp_path)  # 2 has a name
    stale = Held(old, str(tmp_path), base=None)  # it has passed over 2, and tries to become 3
    assert successor.go_on().number == 2
    with pytest.raises(FencedError):
        stale.go_on()
    assert numbers(str(tmp_path)) == [1, 2]
    assert restored(tmp_path) == {"a": 2}
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.usefixtures("in_place")
def test_a_successor_that_finishes_later_withdraws_and_wins_the_next_time(tmp_path: Path) -> None:
    old = small(a=1)
    old.checkpoint(tmp_path)
    new = sk.restore(tmp_path)
    counts(new)["a"] = 2
    counts(old)["a"] = 50
    successor = Reserved(new, tmp_path)
    assert old.checkpoint(tmp_path, base=None).number == 3  # nobody was told of 2
    with pytest.raises(CheckpointError, match="another writer"):
        successor.go_on()
    assert numbers(str(tmp_path)) == [1, 3]
    assert new.checkpoint(tmp_path).number == 4
    with pytest.raises(FencedError):
        old.checkpoint(tmp_path)
    assert restored(tmp_path) == {"a": 2}


# ---- Nobody is locked out


def _killed_worker(place: Path) -> None:
    code = f"""
import os, signal, statekit as sk
kv = sk.open("memory:") if not os.path.exists({str(place)!r}) else sk.restore({str(place)!r})
counts = kv.value("counts", int, default=0)
counts["a"] += 1
kv.checkpoint({str(place)!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL


def test_after_kill_9_a_restarted_process_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "place"
    for _ in range(3):
        _killed_worker(place)
    assert restored(place) == {"a": 3}
    assert numbers(str(place)) == [1, 2, 3]


def test_a_provider_with_a_home_goes_on_without_restoring(tmp_path: Path) -> None:
    home, place = f"rocksdb:{tmp_path / 'home'}", tmp_path / "place"
    for value in (1, 2, 3):
        with sk.open(home) as kv:
            counts(kv)["a"] = value
            assert kv.checkpoint(place).number == value
    assert restored(place) == {"a": 3}


def test_a_damaged_newest_manifest_locks_nobody_out_who_goes_back(tmp_path: Path) -> None:
    kv = small(a=1)
    for value in (1, 2, 3):
        counts(kv)["a"] = value
        kv.checkpoint(tmp_path)
    newest = tmp_path / manifest_name(3)
    newest.write_bytes(newest.read_bytes()[:40])
    with pytest.raises(DamagedError):
        sk.restore(tmp_path)
    with sk.restore(tmp_path, at=2) as back:
        counts(back)["a"] = 20
        assert back.checkpoint(tmp_path).number == 4
    with pytest.raises(FencedError):
        kv.checkpoint(tmp_path)
    assert restored(tmp_path) == {"a": 20}


def test_damage_to_its_own_newest_manifest_locks_no_running_process_out(tmp_path: Path) -> None:
    kv = small(a=1)
    kv.checkpoint(tmp_path)
    (tmp_path / manifest_name(1)).write_bytes(b"rot")
    counts(kv)["a"] = 2
    assert kv.checkpoint(tmp_path).number == 2
    assert restored(tmp_path) == {"a": 2}


def test_an_unreadable_manifest_of_another_process_is_not_published_over(tmp_path: Path) -> None:
    """It may be that of a successor: nobody knows."""
    kv = small(a=1)
    kv.checkpoint(tmp_path)
    with sk.restore(tmp_path) as other:
        other.checkpoint(tmp_path)
    newest = tmp_path / manifest_name(2)
    newest.write_bytes(newest.read_bytes()[:-8])
    with pytest.raises(DamagedError) as caught:
        kv.checkpoint(tmp_path)
    assert "Move that file away" in caught.value.__notes__[0]
    newest.unlink()
    assert kv.checkpoint(tmp_path).number == 2


def test_an_emptied_place_is_taken_again_and_ownership_counts_from_there(tmp_path: Path) -> None:
    place = tmp_path / "place"
    small(a=1).checkpoint(place)
    with sk.restore(place) as kv:
        kv.checkpoint(place)
        kv.checkpoint(place)
        shutil.rmtree(place)
        assert kv.checkpoint(place).number == 1
        with sk.restore(place) as next_one:
            counts(next_one)["a"] = 5
            next_one.checkpoint(place)
        with pytest.raises(FencedError):
            kv.checkpoint(place)
    assert restored(place) == {"a": 5}


def test_checkpoints_from_before_there_were_owners_are_gone_on_from(tmp_path: Path) -> None:
    kv = small(a=1)
    made = kv.checkpoint(tmp_path)
    old = Manifest(**{**made.manifest.__dict__, "generation": 0, "owner": ""})
    assert b"owner" not in old.encode()
    (tmp_path / manifest_name(1)).write_bytes(old.encode())
    with sk.restore(tmp_path) as new:
        counts(new)["a"] = 2
        assert new.checkpoint(tmp_path).manifest.generation == 2
    with pytest.raises(FencedError):
        kv.checkpoint(tmp_path)


# ---- Tools


def test_compacting_leaves_the_place_to_its_owner(near: str) -> None:
    kv = small(**{f"k{i}": i for i in range(20)})
    kv.checkpoint(near)
    counts(kv)["k1"] = 100
    owner = kv.checkpoint(near).manifest.owner
    made = compact(open_checkpoint(near))
    assert made is not None
    assert made.manifest.owner == owner
    counts(kv)["k2"] = 200
    assert kv.checkpoint(near).number == 4
    found = restored(near)
    assert (found["k1"], found["k2"]) == (100, 200)


def test_an_edit_is_not_overridden_by_a_running_process(near: str) -> None:
    kv = small(a=1)
    kv.checkpoint(near)
    edit(open_checkpoint(near), "counts", "a", (7).to_bytes(8, "little"))
    counts(kv)["b"] = 2
    with pytest.raises(FencedError):
        kv.checkpoint(near)
    assert restored(near) == {"a": 7}


def test_compacting_an_older_checkpoint_goes_back_to_it(near: str) -> None:
    kv = small(**{f"k{i}": i for i in range(20)})
    for value in (1, 2, 3):
        counts(kv)["k1"] = value
        kv.checkpoint(near)
    assert compact(open_checkpoint(near, 2)) is not None
    with pytest.raises(FencedError):
        kv.checkpoint(near)
    assert restored(near)["k1"] == 2


# ---- What is in the files


def test_generation_and_owner_are_in_the_manifest(tmp_path: Path) -> None:
    kv = small(a=1)
    first = kv.checkpoint(tmp_path).manifest
    second = kv.checkpoint(tmp_path).manifest
    assert (first.generation, second.generation) == (1, 1)
    assert first.owner == second.owner
    with sk.restore(tmp_path) as new:
        third = new.checkpoint(tmp_path).manifest
    assert third.generation == 3
    assert third.owner != first.owner


def test_a_claim_knows_its_generation_from_the_first_look(tmp_path: Path) -> None:
    claim = Claim()
    assert claim.generation == 0
    claim.see(4)
    claim.see(9)
    assert claim.generation == 5
    assert Claim(seen=0).generation == 1
    assert len({Claim().owner for _ in range(100)}) == 100
