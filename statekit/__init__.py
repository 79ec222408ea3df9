"""statekit: elastic keyed state for Python stream processing.

>>> import statekit as sk
>>> kv = sk.open("memory:")
>>> visits = kv.value("visits", int, default=0)
>>> visits["alice"] += 1
>>> visits.add_many(["bob", "alice", "bob"])
>>> visits["alice"], visits["bob"], visits["carol"]
(2, 2, 0)

Nothing is imported before it is used, so that a tool that only might need state starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from statekit.version import __version__

if TYPE_CHECKING:
    from statekit import errors
    from statekit.assignment import assign
    from statekit.checkpoint import (
        Attachment,
        Checkpoint,
        Part,
        checkpoints,
        collect,
        publish,
        write_attachment,
    )
    from statekit.errors import HomeLockedError, StateKitError
    from statekit.homes import Home, register_home
    from statekit.keys import key_hash, leaf_of
    from statekit.live.job import CheckpointJob, PartJob
    from statekit.live.periodic import PeriodicCheckpoints
    from statekit.migration.arrival import Arrival
    from statekit.migration.departure import Departure
    from statekit.native import Store
    from statekit.native.ttl import TTL
    from statekit.protocol.calls import Limits
    from statekit.provider.open import open  # noqa: A004
    from statekit.provider.provider import KVProvider
    from statekit.provider.restore import restore
    from statekit.remote.query import Remote, connect
    from statekit.remote.security import TLS
    from statekit.state import (
        AggregateState,
        ListState,
        ListView,
        MapState,
        MapView,
        ReduceState,
        SetState,
        SetView,
        Timer,
        TimersState,
        Values,
        ValueState,
    )

__all__ = [
    "TLS",
    "TTL",
    "AggregateState",
    "Arrival",
    "Attachment",
    "Checkpoint",
    "CheckpointJob",
    "Departure",
    "Home",
    "HomeLockedError",
    "KVProvider",
    "Limits",
    "ListState",
    "ListView",
    "MapState",
    "MapView",
    "Part",
    "PartJob",
    "PeriodicCheckpoints",
    "ReduceState",
    "Remote",
    "SetState",
    "SetView",
    "StateKitError",
    "Store",
    "Timer",
    "TimersState",
    "ValueState",
    "Values",
    "__version__",
    "assign",
    "checkpoints",
    "collect",
    "connect",
    "errors",
    "key_hash",
    "leaf_of",
    "open",
    "publish",
    "register_home",
    "restore",
    "write_attachment",
]

_MODULES = {  # where the names above are
    "assignment": "assign",
    "checkpoint": "Attachment Checkpoint Part checkpoints collect publish write_attachment",
    "errors": "HomeLockedError StateKitError",
    "homes": "Home register_home",
    "keys": "key_hash leaf_of",
    "live.job": "CheckpointJob PartJob",
    "live.periodic": "PeriodicCheckpoints",
    "migration.arrival": "Arrival",
    "migration.departure": "Departure",
    "native": "Store",
    "native.ttl": "TTL",
    "protocol.calls": "Limits",
    "provider.open": "open",
    "provider.provider": "KVProvider",
    "provider.restore": "restore",
    "remote.query": "Remote connect",
    "remote.security": "TLS",
    "state": "AggregateState ListState ListView MapState MapView ReduceState SetState SetView "
    "Timer TimersState ValueState Values",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

if not TYPE_CHECKING:  # or every misspelt name would be one

    def __getattr__(name: str) -> Any:
        """Imports what is asked for, the first time."""
        if name == "errors":
            return import_module("statekit.errors")
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module 'statekit' has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"statekit.{module}"), name)
        return found


def __dir__() -> list[str]:
    return [*globals().keys() | {*__all__}]
