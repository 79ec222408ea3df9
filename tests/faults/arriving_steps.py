"""A provider with a RocksDB home takes key-groups over, for test_arriving_kill.py.

After the n-th commit all keys have the number n; before the first one they have 1, as they came.
"""

from functools import cache
from pathlib import Path
from typing import Any

from harness import Kit

import statekit as sk
from statekit.migration import report
from statekit.remote import channel, server  # noqa: F401  (imported once, not in every child)

GROUPS, SUBGROUPS = 4, 2
LOW, HIGH = range(2), range(2, 4)
LAST = 4
SECONDS_MAX = 120.0


def url_of(directory: str | Path) -> str:
    return f"rocksdb:{directory}/home?memory=64KiB"


@cache
def keys() -> dict[str, int]:
    """Keys, and their key-groups."""
    with sk.open("memory:", key_groups=GROUPS, subgroups=SUBGROUPS) as kv:
        return {f"key-{i}": kv.key_group_of(f"key-{i}") for i in range(60)}


def keys_of(groups: range) -> list[str]:
    return [key for key, group in keys().items() if group in groups]


def take_over(kit: Kit, prepared: Any, directory: str, address: str, strategy: Any) -> None:
    """Numbers are raised leaf after leaf, so that they come in the middle of it."""
    report.REPORT_SECONDS = 0.0  # one leaf at a time is told, if that can be
    kv = sk.open(url_of(directory), key_groups=GROUPS, subgroups=SUBGROUPS, owned=())
    arrival = kv.fetch_from(address, key_groups=HIGH, strategy=strategy)
    numbers = kv.value("n", int)
    for number in range(2, LAST + 1):
        for key in keys_of(HIGH):
            numbers[key] = number
        kit.intent(number)
        kv.commit({"number": number})
        kit.done(number)
        numbers.put_many(keys_of(HIGH), [77] * len(keys_of(HIGH)))
        kv.rollback()
    arrival.wait(SECONDS_MAX)
    kv._let_go()


def keys_first(kit: Kit) -> None:
    """Done once before the forks: what they share."""
    keys()
