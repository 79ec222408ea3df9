"""A provider with a RocksDB home that commits, as steps for the fork server; and their model.

Version v of the state is what the v-th commit makes durable. The budget is small, so that many
changes leave memory before their commit. After the last commit come changes that are never
committed, and a rollback.
"""

from pathlib import Path
from typing import Any

from harness import Kit

import statekit as sk
from statekit.errors import HomeError
from statekit.residence import residence

KEYS = 300
GEOMETRY = {"key_groups": 4, "subgroups": 2}
LAST = 3  # the version that the step ends with
Contents = dict[str, dict[Any, Any]]


def model(version: int) -> Contents:
    """All states as the commit of this version leaves them."""
    counts: dict[Any, Any] = {}
    texts: dict[Any, Any] = {}
    lists: dict[Any, Any] = {}
    for now in range(1, version + 1):
        if now == 2:
            texts.clear()
        for key in range(KEYS):
            counts[f"c{key}"] = counts.get(f"c{key}", 0) + now
            if key % now == 0:
                texts[f"t{key}"] = f"{now}:{key}" * 8
            if key % 3 == 0:
                lists.setdefault(f"l{key}", []).append(now)
            if key % 5 == now:
                counts.pop(f"c{key}")
    return {"counts": counts, "texts": texts, "lists": lists}


def change(kv: sk.KVProvider, now: int) -> None:
    """Makes the changes from one version to the next."""
    counts = kv.value("counts", int, default=0)
    texts = kv.value("texts", str)
    lists = kv.list("lists", int)
    if now == 2:
        texts.clear()
    for key in range(KEYS):
        counts.add(f"c{key}", now)
        if key % now == 0:
            texts[f"t{key}"] = f"{now}:{key}" * 8
        if key % 3 == 0:
            lists[f"l{key}"].append(now)
        if key % 5 == now:
            counts.discard(f"c{key}")


def contents(kv: sk.KVProvider) -> Contents:
    found: Contents = {
        "counts": dict(kv.value("counts", int, default=0).items()),
        "texts": dict(kv.value("texts", str).items()),
        "lists": {key: list(items) for key, items in kv.list("lists", int).items()},
    }
    return found


def opened(path: Path | str, sync: int = 1) -> sk.KVProvider:
    return sk.open(f"rocksdb:{path}?memory=64KiB&sync={sync}", **GEOMETRY)  # type: ignore[arg-type]


def prepare(kit: Kit, *, path: str) -> None:
    """Makes the home, at version 1."""
    with opened(path) as kv:
        change(kv, 1)
        kv.commit({"version": 1})


def commits(kit: Kit, prepared: None, *, path: str, in_phases: bool) -> None:
    """Versions 2 and 3, then changes that are rolled back, and others that are just left."""
    if in_phases:  # as if all of it were larger than a batch
        residence._COMMIT_BYTES_MIN = residence._COMMIT_BYTES_MAX = 1000
    kv = opened(path)
    for version in range(2, LAST + 1):
        change(kv, version)
        kit.intent(version)
        kv.commit({"version": version})
        kit.done(version)
    change(kv, 7)
    kv.rollback()
    assert contents(kv) == model(LAST)
    change(kv, 8)
    kv._let_go()  # as if killed


def check(path: Path | str, at_least: int, at_most: int) -> int:
    """Checks that the home is at one possible version, and takes the next ones. Returns it."""
    with opened(path, sync=0) as kv:
        committed = kv.committed
        assert committed is not None
        version: int = committed["version"]
        assert at_least <= version <= at_most, f"{at_least} <= {version} <= {at_most}"
        assert contents(kv) == model(version), f"not version {version}"
        for now in range(version + 1, LAST + 1):
            change(kv, now)
        kv.commit({"version": LAST})
    with opened(path, sync=0) as kv:
        assert contents(kv) == model(LAST)
    return version


# ---- The same home, filled from a checkpoint while it is committed to


def prepare_place(kit: Kit, *, place: str) -> None:
    """A checkpoint of version 1."""
    with sk.open("memory:", **GEOMETRY) as kv:  # type: ignore[arg-type]
        change(kv, 1)
        kv.checkpoint(place, metadata={"version": 1})


def filled(kit: Kit, prepared: None, *, path: str, place: str, background: bool) -> None:
    """Restored lazily, committed while leaves move in, left; and opened once more."""
    kit.intent(1)
    url = f"rocksdb:{path}?memory=64KiB"
    kv = sk.restore(place, home=url, lazy=True, background=background)
    kit.done(1)
    for version in range(2, LAST + 1):
        change(kv, version)
        kit.intent(version)
        kv.commit({"version": version})
        kit.done(version)
        if version == 2:
            change(kv, 8)
            kv._let_go()  # as if killed, with leaves that are still coming
            kv = opened(path)
    kv.wait_loaded(120.0)
    kv._let_go()


def check_filled(path: Path, place: Path, at_least: int, at_most: int) -> int:
    """The home is at one version; or nothing was promised yet, and the restore can be repeated."""
    if at_least == 0:
        try:
            opened(path, sync=0).close()
        except HomeError:  # in part: it says so
            sk.restore(str(place), home=f"rocksdb:{path}?memory=64KiB", lazy=True).close()
        else:
            with opened(path, sync=0) as kv:
                if kv.committed is None:  # killed before anything of the restore was there
                    return 0
    return check(path, at_least, at_most)
