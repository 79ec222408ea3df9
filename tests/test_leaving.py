"""Leaving a provider without close(): what is kept, what is not, and the warning about it.

Each case is a program of its own, since most of it happens when a program ends.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import statekit as sk

SECONDS_MAX = 60.0

START = """
import gc, os, sys
import statekit as sk

def opened():
    kv = sk.open(sys.argv[1], key_groups=4, subgroups=2)
    kv.value("counts", int, default=0)
    return kv

kv = opened()
kv["counts"]["a"] = 1
kv.commit({"at": 1} if sys.argv[2] == "position" else None)
kv["counts"]["a"] = 2
kv["counts"]["b"] = 2
"""

#: Ways to leave a provider, and the exit code.
WAYS = {
    "end of the script": ("", 0),
    "end, with a reference in a function": ("def f(kept=kv): pass\ndel kv", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise RuntimeError('as the test wants')", 1),
    "keyboard interrupt": ("raise KeyboardInterrupt", -2),
    "del": ("del kv\ngc.collect()\nsk.open(sys.argv[1]).close()\nos._exit(4)", 4),
    "del of the provider, then of its state": (
        "counts = kv['counts']\ndel kv\ngc.collect()\ncounts['b'] = 2\ndel counts\ngc.collect()\n"
        "os._exit(4)",
        4,
    ),
    "a cycle": ("kv.me = kv\ndel kv\ngc.collect()\nos._exit(4)", 4),
    "siblings": ("part, = kv.split([[1, 2]])\npart['counts']\n", 0),
    "in a thread": (
        "import threading\nthread = threading.Thread(target=lambda kept=kv: None)\nthread.start()",
        0,
    ),
}


def left(url: str, code: str, positions: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", START + code, url, positions],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def found(url: str) -> tuple[dict[str, int], object]:
    with sk.open(url) as kv:
        return dict(kv.value("counts", int).items()), kv.committed


@pytest.mark.parametrize("positions", ["none", "position"])
@pytest.mark.parametrize("way", WAYS)
def test_a_provider_that_is_left_is_flushed_unless_commits_have_positions(
    way: str, positions: str, tmp_path: Path
) -> None:
    url = f"rocksdb:{tmp_path}/home?sync=0"
    code, status = WAYS[way]
    done = left(url, code, positions)
    assert done.returncode in (status, 128 - status), done.stderr
    assert "ResourceWarning" in done.stderr
    assert "was left without close()" in done.stderr
    if positions == "position":
        assert found(url) == ({"a": 1}, {"at": 1}), done.stderr
        assert "lost" in done.stderr
    else:
        assert found(url) == ({"a": 2, "b": 2}, None), done.stderr
        assert "flushed" in done.stderr


@pytest.mark.parametrize("code", ["kv.close()", "with kv:\n    pass", "kv.close()\ndel kv"])
def test_a_provider_that_was_closed_is_not_spoken_of(code: str, tmp_path: Path) -> None:
    done = left(f"rocksdb:{tmp_path}/home?sync=0", code, "none")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_provider_in_memory_is_not_spoken_of(tmp_path: Path) -> None:
    code = "kv.close()\nkv = sk.open('memory:')\nkv.value('n', int)['a'] = 1"
    done = left(f"rocksdb:{tmp_path}/home?sync=0", code, "none")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_was_not_committed_is_lost_in_a_kill(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/home?sync=0"
    done = left(url, "import signal\nos.kill(os.getpid(), signal.SIGKILL)", "none")
    assert done.returncode == -9
    assert found(url) == ({"a": 1}, None)


def test_a_home_that_fails_at_the_end_is_named_and_what_is_lost(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/home?sync=0"
    code = """
from statekit.errors import HomeError
def fail(*_, **__): raise HomeError("the disk is full, as the test wants.")
kv._residence.home.write_rows = fail
"""
    done = left(url, code, "none")
    assert done.returncode == 0
    assert "the disk is full" in done.stderr
    assert "what was not committed is lost" in done.stderr
    assert found(url) == ({"a": 1}, None)


ENDS = [
    "sys.exit(5)",
    "del kv; gc.collect(); sys.exit(5)",
    "raise OSError",
    "kv.close(); sys.exit(5)",
]


@pytest.mark.parametrize("end", ENDS)
def test_a_forked_child_that_ends_does_not_flush_the_provider_of_its_parent(
    end: str, tmp_path: Path
) -> None:
    url = f"rocksdb:{tmp_path}/home?sync=0"
    code = f"""
pid = os.fork()
if not pid:
    kv["counts"]["c"] = 3
    {end}
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) in (1, 5), status
print("before", kv["counts"]["a"], flush=True)
kv["counts"]["d"] = 4
kv.close()
assert sk.open(sys.argv[1]).value("counts", int)["d"] == 4
"""
    done = left(url, code, "none")
    assert done.returncode == 0, done.stderr
    assert "before 2" in done.stdout
    assert found(url) == ({"a": 2, "b": 2, "d": 4}, None)
    assert os.path.isdir(tmp_path / "home")


def test_a_provider_that_is_collected_in_the_middle_of_another_call_waits_for_its_end(
    tmp_path: Path,
) -> None:
    """Garbage is collected anywhere, even while this thread holds the lock of the home."""
    code = """
import threading
other = sk.open(sys.argv[1].replace("home", "other"))
other.value("n", int)["a"] = 1
lock = threading.Lock()  # of both homes, and it cannot be taken twice
write, load = other._residence.home.write_rows, kv._residence.home.load
def write_locked(*args, **options):
    with lock:
        write(*args, **options)
def load_locked(*args):
    with lock:
        left.clear()
        gc.collect()
        return [*load(*args)]
other._residence.home.write_rows, kv._residence.home.load = write_locked, load_locked
left = [other]
other.me = other
del other
[*kv._residence.ledger.load(0, 0)]
kv.close()
with sk.open(sys.argv[1].replace("home", "other")) as other:
    assert other.value("n", int)["a"] == 1
"""
    done = left(f"rocksdb:{tmp_path}/home?sync=0", code, "none")
    assert done.returncode == 0, done.stderr
    assert "was left without close(). It was flushed now." in done.stderr


def test_a_forked_child_cannot_write_to_the_home_of_its_parent(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/home?sync=0"
    code = """
from statekit.errors import HomeError
pid = os.fork()
if not pid:
    for work in (lambda: kv.commit({"at": 5}), kv.flush, kv.rollback):
        try:
            kv["counts"]["a"] = 5
            work()
        except HomeError as error:
            assert "was forked from it" in str(error), error
        else:
            os._exit(9)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
kv["counts"]["a"] = 3
kv.commit({"at": 3})
os._exit(0)
"""
    done = left(url, code, "position")
    assert done.returncode == 0, done.stderr
    assert found(url) == ({"a": 3, "b": 2}, {"at": 3})
