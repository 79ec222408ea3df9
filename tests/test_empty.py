"""Empty providers, and stores of many leaves, take little memory."""

import subprocess
import sys

import pytest

from statekit._native import lib

KIB_MAX = 100  # of an empty provider with 128 x 16 leaves and two states
#: For a store with 2^20 leaves, one of which is used. If it touched all leaves, they would take
#: more than 64 MiB. (Most of it, about 140 KiB, is pages of arrays that are looked at.)
KIB_MILLION_MAX = 256

_PROGRAM = """
import gc
import statekit

def resident_kib():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

def make():
    {body}

kept = [make() for _ in range(100)]  # what Python and malloc take once, and keep at hand
gc.collect()
before = resident_kib()
kept += [make() for _ in range({count})]
gc.collect()
print((resident_kib() - before) / {count})
"""

_PROVIDER = """
    kv = statekit.open("memory:")
    kv.value("visits", int)
    kv.list("clicks", str)
    return kv
"""
_OWNER = """
    kv = statekit.open("memory:", owned=range(0, 32))
    kv.value("visits", int)
    kv.list("clicks", str)
    return kv
"""
# The store of a provider with a home, and that of one that was just split.
_STORE = """
    store = statekit.Store()
    store.write_back()
    store.state("visits", "i64")
    store.state("clicks", "list")
    store.mark(0, store.leaves, "{residency}")
    store.evict(1 << 30)
    store.stats()
    store.rows_take(0, {{"visits": 0, "clicks": 1}}, 1 << 30, 1 << 30)
    return store
"""


def kib_each(body: str, count: int = 200) -> float:
    program = _PROGRAM.format(body=body.strip(), count=count)
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


@pytest.mark.skipif(
    lib.sk_is_testing_build(), reason="a testing build may lay memory out otherwise"
)
@pytest.mark.parametrize(
    "body",
    [
        _PROVIDER,
        _OWNER,
        _STORE.format(residency="absent"),
        _STORE.format(residency="away"),
        _STORE.format(residency="whole"),
    ],
    ids=["provider", "owner of a part", "store absent", "store away", "store whole"],
)
def test_what_is_empty_takes_little_memory(body: str) -> None:
    assert kib_each(body) <= KIB_MAX


@pytest.mark.skipif(
    lib.sk_is_testing_build(), reason="a testing build may lay memory out otherwise"
)
def test_a_million_leaves_take_nothing_until_they_are_used() -> None:
    body = """
    store = statekit.Store(1 << 20, 1)
    store.state("visits", "i64").put("alice", 1)
    return store
    """
    assert kib_each(body, count=50) <= KIB_MILLION_MAX
