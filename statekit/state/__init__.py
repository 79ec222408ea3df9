"""Typed state: what `kv.value`, `kv.list`, `kv.map` and their like return.

keyed.py        what states of every type can do
value.py        one value under each key
containers.py   lists, maps and sets under each key
views.py        live lists, maps and sets, nested as you like
reduce.py       values that new ones are folded into
timers.py       timers in event time
results.py      what get_many() returns
export.py       whole states as Arrow tables
"""

from statekit.state.containers import ListState, MapState, SetState
from statekit.state.keyed import KeyedState
from statekit.state.reduce import AggregateState, ReduceState
from statekit.state.results import Values
from statekit.state.timers import Timer, TimersState
from statekit.state.value import ValueState
from statekit.state.views import ListView, MapView, SetView

__all__ = [
    "AggregateState",
    "KeyedState",
    "ListState",
    "ListView",
    "MapState",
    "MapView",
    "ReduceState",
    "SetState",
    "SetView",
    "Timer",
    "TimersState",
    "ValueState",
    "Values",
]
