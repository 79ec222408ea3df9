"""Copies of packs on a host: whatever is wrong with them, the state is right. Without Spark."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_task import batch, counts, publish_reports, rows_of, run_tasks

import statekit as sk
from statekit.spark.task import Batch, Report, run_range
from statekit.storage import open_storage
from statekit.storage.cached import CachedStorage

FIRST, SECOND = "aabcdefgh" * 3, "bbcdwxyz"


class Far:
    """A place that is not on a file system, and a host with copies of its packs."""

    def __init__(self, tmp_path: Path) -> None:
        self.place: Any = f"memory://{tmp_path.name}-{id(self)}"  # as a Path, it would be local
        self.storage = open_storage(self.place)
        self.cache = tmp_path / "cache"

    def batch(self, base: Any, number: int, **changes: Any) -> Batch:
        return replace(batch(self.place, base, number), cache=str(self.cache), **changes)

    def run(self, base: Any, number: int, users: str, **changes: Any) -> "tuple[Any, Counter[str]]":
        """A batch; its version, and what its tasks say of the cache."""
        one = self.batch(base, number, **changes)
        reports = run_tasks(one, users)
        return publish_reports(self.place, one, reports), _figures(reports)

    def packs(self) -> dict[str, bytes]:
        names = [one.name for one in self.storage.list() if one.name.endswith(".pack")]
        return {name: self.storage.read(name) for name in names}

    def copies(self) -> list[Path]:
        return [path for path in self.cache.rglob("*") if path.is_file()]


def _figures(reports: list[Report]) -> "Counter[str]":
    found: Counter[str] = Counter()
    for report in reports:
        assert report.error is None
        found.update({name: int(report.figures[name]) for name in ("cache_hits", "cache_misses")})
    return found


@pytest.fixture
def far(tmp_path: Path) -> Far:
    return Far(tmp_path)


def test_what_this_host_wrote_is_not_read_from_the_storage(far: Far) -> None:
    base, _ = far.run(None, 1, FIRST)
    packs = far.packs()
    far.storage.delete([*packs])
    one = far.batch(base, 2)
    reports = run_tasks(one, SECOND)
    assert _figures(reports)["cache_misses"] == 0 < _figures(reports)["cache_hits"]
    for name, data in packs.items():
        far.storage.write(name, [data])
    publish_reports(far.place, one, reports)
    assert counts(far.place) == Counter(FIRST + SECOND)


def test_a_host_without_copies_reads_the_storage_once(far: Far) -> None:
    base, _ = far.run(None, 1, FIRST)
    for path in far.copies():
        path.unlink()
    one = far.batch(base, 2)
    assert _figures(run_tasks(one, SECOND))["cache_misses"] > 0
    again = run_tasks(one, SECOND)  # as if all workers had died
    assert _figures(again)["cache_misses"] == 0
    publish_reports(far.place, one, again)
    assert counts(far.place) == Counter(FIRST + SECOND)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def _make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: "list[Callable[[Path], object]]" = [
    _flip,
    _cut,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"x" * path.stat().st_size),
    lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    _make_directory,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_not_believed(far: Far, damage: "Callable[[Path], object]") -> None:
    base, _ = far.run(None, 1, FIRST)
    for path in far.copies():
        damage(path)
    base, _ = far.run(base, 2, SECOND)
    far.run(base, 3, FIRST)
    assert counts(far.place) == Counter(FIRST + SECOND + FIRST)


def test_where_the_storage_is_damaged_too_it_is_an_error(far: Far) -> None:
    base, _ = far.run(None, 1, FIRST)
    for path in far.copies():
        _flip(path)
    for name, data in far.packs().items():
        damaged = bytearray(data)
        damaged[len(data) // 2] ^= 1
        far.storage.write(name, [damaged])
    with pytest.raises(sk.errors.DamagedError):
        far.run(base, 2, SECOND)


def test_copies_of_later_versions_do_not_matter_after_a_rollback(far: Far) -> None:
    first, _ = far.run(None, 1, FIRST)
    second, _ = far.run(first, 2, SECOND)
    far.run(second, 3, SECOND)
    first.seen = 3  # as find_standing() gives it
    far.run(first, 4, "zz")
    assert counts(far.place) == Counter(FIRST + "zz")


def test_a_place_that_was_emptied_and_used_again_is_not_mixed_with_old_copies(far: Far) -> None:
    far.run(None, 1, FIRST)
    far.storage.delete([one.name for one in far.storage.list()])
    base, _ = far.run(None, 1, SECOND)
    far.run(base, 2, "b")
    assert counts(far.place) == Counter(SECOND + "b")


def test_copies_never_take_more_than_they_may(far: Far) -> None:
    base, total = None, Counter[str]()
    for number in range(1, 12):
        base, _ = far.run(base, number, FIRST, cache_bytes=4000)
        total.update(FIRST)
        assert sum(path.stat().st_size for path in far.copies()) <= 4000
    assert far.copies()
    assert counts(far.place) == total


def test_no_copies_are_kept_if_none_are_wanted(far: Far) -> None:
    one = far.batch(None, 1, cache_bytes=0)
    publish_reports(far.place, one, run_tasks(one, FIRST))
    assert not far.cache.exists()


def test_copies_and_drafts_that_nobody_used_for_hours_go(far: Far) -> None:
    base, _ = far.run(None, 1, FIRST)
    (old, *_) = far.copies()
    draft = old.with_name(f"{old.name}.tmp-0123456789abcdef")  # of a worker that was killed
    draft.write_bytes(b"half")
    for path in (old, draft):
        os.utime(path, (1_000_000, 1_000_000))
    far.run(base, 2, "x", states={"count": sk.spark.State(int)})
    assert not draft.exists()
    assert counts(far.place) == Counter(FIRST + "x")


def test_a_directory_that_others_can_write_to_is_not_used(far: Far) -> None:
    far.cache.mkdir()
    far.cache.chmod(0o777)
    base, _ = far.run(None, 1, FIRST)
    far.run(base, 2, SECOND)
    assert far.copies() == []
    assert counts(far.place) == Counter(FIRST + SECOND)


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(far: Far) -> None:
    far.cache.write_text("a file where the directory should be")
    base, _ = far.run(None, 1, FIRST)
    far.run(base, 2, SECOND)
    assert counts(far.place) == Counter(FIRST + SECOND)


def test_of_a_local_path_there_are_no_copies(tmp_path: Path) -> None:
    one = replace(batch(tmp_path / "state", None, 1), cache=str(tmp_path / "cache"))
    (groups, *_) = one.ranges
    assert "cache_hits" not in run_range(one, groups, rows_of(FIRST, groups)).figures
    assert not (tmp_path / "cache").exists()


def test_of_a_large_pack_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    inner = open_storage(f"memory://{tmp_path.name}")
    name, data = "0" * 32 + ".pack", os.urandom(6 << 20)
    inner.write(name, [data])
    storage = CachedStorage(inner, str(tmp_path / "cache"))
    assert storage.read_parts(name, [(0, 20), (5 << 20, 100)]) == [
        data[:20],
        data[5 << 20 : (5 << 20) + 100],
    ]
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert storage.read(name, 10, 1 << 20) == data[10 : (1 << 20) + 10]
    inner.delete([name])
    assert storage.read(name, 77, 5 << 20) == data[77 : (5 << 20) + 77]
    assert (storage.hits, storage.misses) == (1, 2)
