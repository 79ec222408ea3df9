"""A hand-over whose old owner has a RocksDB home, and back, for test_migration_home_kill.py."""

from functools import cache
from pathlib import Path
from typing import Any

from harness import Kit

import statekit as sk
from statekit.remote import channel, server  # noqa: F401  (imported once, not in every child)

GROUPS = 4
LOW, HIGH = range(2), range(2, 4)
SECONDS_MAX = 120.0


def url_of(directory: str | Path, name: str = "home") -> str:
    return f"rocksdb:{directory}/{name}?memory=4MiB"


@cache
def keys() -> dict[str, int]:
    """Keys, and their key-groups."""
    with sk.open("memory:", key_groups=GROUPS, subgroups=1) as kv:
        return {f"key-{i}": kv.key_group_of(f"key-{i}") for i in range(60)}


def keys_of(groups: range) -> list[str]:
    return [key for key, group in keys().items() if group in groups]


def hand_over(kit: Kit, prepared: Any, directory: str, with_home: bool = False) -> None:
    """A hand-over and back. Each number is the value of some key-groups' keys from then on.

    with_home: the new owner has one, too.
    """
    a = sk.open(url_of(directory), key_groups=GROUPS, subgroups=1)
    url = url_of(directory, "other") if with_home else "memory:"
    b = sk.open(url, key_groups=GROUPS, subgroups=1, owned=())
    numbers = a.value("n", int)

    def flush(groups: range, number: int) -> None:
        numbers.put_many(keys_of(groups), [number] * len(keys_of(groups)))
        kit.intent((groups, number))
        a.flush()
        kit.done((groups, number))

    flush(range(GROUPS), 1)
    address = a.serve().address
    kit.intent("given")
    migration = b.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    kit.done("given")
    there = b.value("n", int)
    there.put_many(keys_of(HIGH), [2] * len(keys_of(HIGH)))
    kit.intent("there")
    b.flush()
    kit.done("there")
    flush(LOW, 2)
    migration.wait(SECONDS_MAX)
    flush(LOW, 3)
    kit.intent("back")
    a.merge(b)
    kit.done("back")
    flush(range(GROUPS), 4)
    b.close()
    a.close()


def keys_first(kit: Kit) -> None:
    """Done once before the forks: what they share."""
    keys()
