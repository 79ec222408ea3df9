"""Looking into a home without changing it (rocksdb:...?look=1). Oracles: a dict, the files."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import statekit as sk
from statekit.errors import HomeError

EXPECTED = {f"user-{number}": number for number in range(2000)}
FILL = """
import os, sys, statekit as sk
kv = sk.open(f"rocksdb:{sys.argv[1]}")
visits = kv.value("visits", int)
visits.put_many([f"user-{number}" for number in range(2000)], list(range(2000)))
kv.flush()
"""
OPEN = """
import sys, statekit as sk
try:
    sk.open(sys.argv[1]).close()
except sk.HomeLockedError as error:
    sys.exit(str(error))
"""


def python(code: str, *args: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120
    )


def files(place: Path) -> dict[str, tuple[int, bytes]]:
    """Everything there, and when it was changed."""
    return {
        str(file.relative_to(place)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in sorted(place.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(params=["closed", "killed"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A home whose rows are in tables, and one whose rows are in the log."""
    ending = "kv.close()" if request.param == "closed" else "os.kill(os.getpid(), 9)"
    python(FILL + ending, tmp_path / "home")
    return tmp_path / "home"


def visits(url: str) -> dict[str, int]:
    with sk.open(url) as kv:
        return dict(kv.value("visits", int).items())


def test_a_look_finds_everything_and_changes_no_byte(home: Path, monkeypatch: Any) -> None:
    aside = home.parent / "aside"
    aside.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(aside))
    before = files(home)
    with sk.open(f"rocksdb:{home}?look=1") as kv:
        found = kv.value("visits", int)
        assert dict(found.items()) == EXPECTED
        found["user-1"] = 77  # what is written there affects nobody else
        kv.value("another", str)["a"] = "b"
        kv.flush()
        assert kv.metrics().states["another"].entries == 1
    assert files(home) == before
    assert list(aside.iterdir()) == []
    assert visits(f"rocksdb:{home}") == EXPECTED


def test_several_may_look_at_once_and_nobody_opens_it_meanwhile(home: Path) -> None:
    with sk.open(f"rocksdb:{home}?look=1") as one, sk.open(f"rocksdb:{home}?look=1") as other:
        assert one.value("visits", int)["user-7"] == other.value("visits", int)["user-7"] == 7
        done = python(OPEN, f"rocksdb:{home}")
        assert done.returncode == 1
        assert "open already" in done.stderr
        assert python(OPEN, f"rocksdb:{home}?look=1").returncode == 0
    assert python(OPEN, f"rocksdb:{home}").returncode == 0


def test_a_home_that_is_open_is_not_looked_into_and_stays_locked(tmp_path: Path) -> None:
    with sk.open(f"rocksdb:{tmp_path}/home") as kv:
        kv.value("visits", int)["a"] = 1
        with pytest.raises(sk.HomeLockedError, match="open already, in this process"):
            sk.open(f"rocksdb:{tmp_path}/home?look=1")
        done = python(OPEN, f"rocksdb:{tmp_path}/home?look=1")
        assert f"open already, in process {os.getpid()}" in done.stderr
        assert "open already" in python(OPEN, f"rocksdb:{tmp_path}/home").stderr
    assert visits(f"rocksdb:{tmp_path}/home") == {"a": 1}


@pytest.mark.parametrize("name", ["nothing", "empty", "full", "file"])
def test_what_is_no_home_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mail").write_text("dear")
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(HomeError, match=str(tmp_path / name)):
        sk.open(f"rocksdb:{tmp_path / name}?look=1")
    assert sorted(tmp_path.rglob("*")) == before


def test_damage_is_told_with_the_name_of_the_home(home: Path) -> None:
    (home / "CURRENT").write_text("nonsense\n")
    before = files(home)
    with pytest.raises(HomeError, match=f"RocksDB home at '{home}' cannot be opened"):
        sk.open(f"rocksdb:{home}?look=1")
    assert files(home) == before
    (home / "CURRENT").unlink()
    with pytest.raises(HomeError, match="no RocksDB home"):
        sk.open(f"rocksdb:{home}?look=1")


def test_look_is_yes_or_no(tmp_path: Path) -> None:
    with pytest.raises(sk.StateKitError, match="look='x'"):
        sk.open(f"rocksdb:{tmp_path}/home?look=x")
