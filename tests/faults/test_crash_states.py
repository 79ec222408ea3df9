"""The crash-state builder on logs made by hand, whose sets of states are known."""

import errno
import itertools
from pathlib import Path

import pytest
from crash_states import EXHAUSTIVE_MAX, PAGE, SECTOR, Disk, State, UnmodelledError, crash_states
from harness import tree_of
from shim import Entry, Flag

ROOT = "/root"


class Log:
    """A log, call by call. Every path has an inode number of its own from when it is made."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._inodes: dict[str, int] = {}
        self._next = itertools.count(1)

    def _add(self, call: str, name: str, **more: object) -> "Log":
        path = f"{ROOT}/{name}" if name else ROOT
        self.entries.append(Entry(call, path, **more))  # type: ignore[arg-type]
        return self

    def create(self, name: str) -> "Log":
        self._inodes[name] = next(self._next)
        return self._add("open", name, inode=self._inodes[name], flags=Flag.CREATED)

    def open(self, name: str, flags: int = 0) -> "Log":
        self._inodes.setdefault(name, next(self._next))
        return self._add("open", name, inode=self._inodes[name], flags=Flag(flags))

    def write(self, name: str, offset: int, data: bytes) -> "Log":
        return self._add("write", name, inode=self._inodes[name], offset=offset, data=data)

    def truncate(self, name: str, size: int) -> "Log":
        return self._add("truncate", name, inode=self._inodes[name], length=size)

    def sync(self, name: str, error: int = 0) -> "Log":
        return self._add("fsync", name, inode=self._inodes[name], error=error)

    def sync_directory(self, name: str = "") -> "Log":
        return self._add("fsync", name, flags=Flag.DIRECTORY)

    def rename(self, old: str, new: str) -> "Log":
        self._inodes[new] = self._inodes.pop(old)
        return self._add("rename", old, path2=f"{ROOT}/{new}", inode=self._inodes[new])

    def link(self, old: str, new: str) -> "Log":
        self._inodes[new] = self._inodes[old]
        return self._add("link", old, path2=f"{ROOT}/{new}", inode=self._inodes[new])

    def unlink(self, name: str) -> "Log":
        return self._add("unlink", name)

    def mkdir(self, name: str) -> "Log":
        return self._add("mkdir", name)

    def mark(self, text: str) -> "Log":
        return self._add("mark", "", data=text.encode())

    def states(self, initial: dict[str, bytes] | None = None, **more: int) -> list[State]:
        return list(crash_states(self.entries, initial or {}, ROOT, **more))

    def trees(self, initial: dict[str, bytes] | None = None) -> list[dict[str, bytes]]:
        """Distinct states, whatever was promised."""
        distinct = {tuple(sorted(state.files.items())) for state in self.states(initial)}
        return [dict(each) for each in sorted(distinct)]

    def trees_at_end(self, initial: dict[str, bytes] | None = None) -> list[dict[str, bytes]]:
        self.mark("end")
        ends = [state.files for state in self.states(initial) if "end" in state.marks]
        return sorted(ends, key=lambda tree: sorted(tree.items()))


def test_nothing_done_is_one_state() -> None:
    assert Log().trees({"a": b"1"}) == [{"a": b"1"}]


def test_a_file_never_synced_may_be_missing_empty_zero_or_whole() -> None:
    log = Log().create("a").write("a", 0, b"xyz")
    assert log.trees() == [{}, {"a": b""}, {"a": b"\0\0\0"}, {"a": b"xyz"}]


def test_a_synced_file_in_a_directory_not_synced_is_missing_or_whole() -> None:
    log = Log().create("a").write("a", 0, b"xyz").sync("a")
    assert log.trees_at_end() == [{}, {"a": b"xyz"}]


def test_a_synced_directory_keeps_the_name_and_not_the_data() -> None:
    log = Log().create("a").write("a", 0, b"xyz").sync_directory()
    assert log.trees_at_end() == [{"a": b""}, {"a": b"\0\0\0"}, {"a": b"xyz"}]


def test_both_synced_is_safe() -> None:
    log = Log().create("a").write("a", 0, b"xyz").sync("a").sync_directory()
    assert log.trees_at_end() == [{"a": b"xyz"}]


def test_writes_reach_the_disk_in_any_order() -> None:
    log = Log().create("a").sync_directory().write("a", 0, b"x").write("a", 1, b"y")
    contents = {tree["a"] for tree in log.trees_at_end()}
    assert contents == {b"", b"x", b"xy", b"\0y", b"x\0", b"\0", b"\0\0"}


def test_a_write_is_cut_at_sectors_and_pages_of_the_file() -> None:
    data = bytes(range(1, 251)) * 40  # 10,000 bytes, none 0
    log = Log().create("a").sync_directory().write("a", 100, data)
    lengths = {len(tree["a"]) for tree in log.trees_at_end() if tree["a"].rstrip(b"\0")}
    assert {100 + len(data), SECTOR, PAGE} <= lengths
    assert all(length % SECTOR == 0 for length in lengths - {100 + len(data)})
    tails = [tree["a"] for tree in log.trees_at_end() if tree["a"][100 : 2 * SECTOR] == bytes(924)]
    assert any(content.endswith(data[-PAGE // 2 :]) for content in tails)  # the tail came first


def test_rename_is_the_old_or_the_new_file_and_never_both_names_lost() -> None:
    initial = {"a": b"old"}
    log = Log().create("t").write("t", 0, b"new").sync("t").sync_directory().rename("t", "a")
    assert log.trees_at_end(initial) == [{"a": b"new"}, {"a": b"old", "t": b"new"}]


def test_rename_before_fsync_may_show_an_empty_file() -> None:
    initial = {"a": b"old"}
    log = Log().create("t").write("t", 0, b"new").rename("t", "a")
    assert {"a": b""} in log.trees_at_end(initial)


def test_a_rename_may_survive_the_creation_that_came_before_it() -> None:
    log = Log().create("t").sync("t").rename("t", "a")
    assert log.trees_at_end() == [{}, {"a": b""}, {"t": b""}]


def test_link_then_unlink_in_any_order() -> None:
    log = Log().create("t").sync("t").sync_directory().link("t", "m").unlink("t")
    assert log.trees_at_end() == [{}, {"m": b""}, {"m": b"", "t": b""}, {"t": b""}]


def test_unlinks_are_optional_until_the_directory_is_synced() -> None:
    initial = {"a": b"1", "b": b"2"}
    log = Log().unlink("a").unlink("b")
    assert len(log.trees_at_end(initial)) == 4
    synced = Log().unlink("a").sync_directory().unlink("b")
    assert synced.trees_at_end(initial) == [{}, {"b": b"2"}]


def test_a_new_directory_is_lost_with_all_in_it_until_its_parent_is_synced() -> None:
    log = Log().mkdir("d").create("d/a").write("d/a", 0, b"x").sync("d/a").sync_directory("d")
    assert log.trees_at_end() == [{}, {"d/": b"", "d/a": b"x"}]
    assert Log().mkdir("d").sync_directory().create("d/a").trees_at_end() == [
        {"d/": b""},
        {"d/": b"", "d/a": b""},
    ]


def test_a_rename_between_directories_needs_both_synced() -> None:
    initial = {"d/": b"", "a": b"x"}
    log = Log().open("a").rename("a", "d/a").sync_directory("d")
    both = [{"a": b"x", "d/": b""}, {"d/": b"", "d/a": b"x"}]
    assert log.trees_at_end(initial) == both
    log = Log().open("a").rename("a", "d/a").sync_directory("d").sync_directory()
    assert log.trees_at_end(initial) == both[1:]


def test_truncation_is_optional_until_synced() -> None:
    initial = {"a": b"long"}
    assert Log().open("a").truncate("a", 1).trees_at_end(initial) == [{"a": b"l"}, {"a": b"long"}]
    log = Log().open("a", Flag.TRUNCATED).sync("a")
    assert log.trees_at_end(initial) == [{"a": b""}]


def test_what_an_fsync_failed_to_write_is_never_safe() -> None:
    log = Log().create("a").sync_directory().write("a", 0, b"x").sync("a", errno.EIO).sync("a")
    assert {"a": b""} in log.trees_at_end()
    # A later write that was synced is safe, and lies over the write that was not.
    log = Log().create("a").sync_directory().write("a", 0, b"x").sync("a", errno.EIO)
    log.write("a", 0, b"y").sync("a")
    assert log.trees_at_end() == [{"a": b"y"}]


def test_a_failed_call_changes_nothing() -> None:
    log = Log()
    log.entries.append(Entry("unlink", f"{ROOT}/a", error=errno.EACCES))
    assert log.trees({"a": b"1"}) == [{"a": b"1"}]


def test_an_inode_number_may_be_used_again() -> None:
    log = Log()
    for name, data in (("a", b"1"), ("b", b"2")):
        log._inodes[name] = 7
        log.entries.append(Entry("open", f"{ROOT}/{name}", inode=7, flags=Flag.CREATED))
        log.write(name, 0, data).sync(name).sync_directory()
        if name == "a":
            log.unlink("a")
    assert log.trees_at_end() == [{"b": b"2"}]


def test_marks_are_what_was_promised_before_the_power_went() -> None:
    log = Log().create("a").sync("a").mark("done 1").sync_directory().mark("done 2")
    found = {(state.marks, tuple(state.files)) for state in log.states()}
    assert ((), ()) in found
    assert (("done 1",), ()) in found
    assert (("done 1", "done 2"), ("a",)) in found
    assert (("done 1", "done 2"), ()) not in found


def test_few_operations_are_tried_in_all_subsets() -> None:
    log = Log()
    for at in range(EXHAUSTIVE_MAX):
        log.create(f"f{at}")
    assert len(log.trees()) == 2**EXHAUSTIVE_MAX


def test_of_many_operations_all_prefixes_and_single_losses_are_there() -> None:
    log = Log()
    names = [f"f{at:02}" for at in range(EXHAUSTIVE_MAX + 8)]
    for name in names:
        log.create(name)
    trees = [set(tree) for tree in log.trees()]
    for at in range(len(names)):
        assert set(names[:at]) in trees
        assert set(names) - {names[at]} in trees
        assert {names[at]} in trees
    more = log.states(random_count=500)
    assert len(more) > len(log.states(random_count=5)) + 300


def test_a_seed_gives_the_same_states_again() -> None:
    log = Log()
    for at in range(EXHAUSTIVE_MAX + 4):
        log.create(f"f{at}")
    assert log.states(seed=5) == log.states(seed=5)
    assert log.states(seed=5) != log.states(seed=6)


def test_a_shared_mapping_is_refused() -> None:
    log = Log().create("a")
    log.entries.append(Entry("mmap", f"{ROOT}/a", inode=1, argument=3 << 32 | 1))
    with pytest.raises(UnmodelledError, match="shared mapping"):
        log.states()


def test_a_state_becomes_a_directory(tmp_path: Path) -> None:
    log = Log().mkdir("d").create("d/a").write("d/a", 0, b"x" * 3000).create("b")
    disk = Disk(tmp_path / "pool")
    for at, state in enumerate(log.states()):
        disk.materialise(state, tmp_path / str(at))
        assert tree_of(tmp_path / str(at)) == state.files
    disk.check()
    changed = next(path for path in (tmp_path / "pool").iterdir())
    changed.write_bytes(b"other")
    with pytest.raises(AssertionError):
        disk.check()
