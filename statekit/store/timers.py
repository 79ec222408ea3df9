"""Placeholder until the native timers are merged."""

from statekit.store.states import State


class TimersState(State):
    pass
