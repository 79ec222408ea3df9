"""The typed states and views that a provider makes: those of this package, with C in front.

A method of these classes that C has is done there if the call is simple; else C calls the method of
the same name in the next class, which is the one in Python (csrc/py.h). So the classes have the
names of those they speed up, and nothing else of their own.
"""

from typing import Any

from statekit import _fast
from statekit.codecs import ListShape
from statekit.kinds import KINDS
from statekit.state import containers, value, views
from statekit.state.value import NO_DEFAULT


class ValueState(_fast.Values, value.ValueState[Any]):
    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _bind(self)
        missing = () if self._default is NO_DEFAULT else (self._default,)
        self._bind_values(self._codec.native, *missing)


class NumberValueState(_fast.Numbers, value.NumberValueState[Any]):
    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _bind(self)
        missing = () if self._default is NO_DEFAULT else (self._default,)
        self._bind_numbers(self._zero, *missing)


class ListView(_fast.ListPlace, views.ListView[Any]):
    __slots__ = ()


class MapView(_fast.MapPlace, views.MapView[Any, Any]):
    __slots__ = ()


class SetView(_fast.SetPlace, views.SetView[Any]):
    __slots__ = ()


class ListState(_fast.Lists, containers.ListState[Any]):
    __slots__ = ()
    _viewed = ListView

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _bind_container(self)


class MapState(_fast.Containers, containers.MapState[Any, Any]):
    __slots__ = ()
    _viewed = MapView

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _bind_container(self)


class SetState(_fast.Containers, containers.SetState[Any]):
    __slots__ = ()
    _viewed = SetView

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _bind_container(self)


def _bind(state: Any) -> None:
    raw = state._raw
    state._bind_native(raw.codec.text, KINDS[raw.kind].number, raw.kind == "f64")


def _bind_container(state: Any) -> None:
    shape = state._shape
    _bind(state)
    _give_views(shape)
    state._bind_containers(shape.codec.native, state._viewed, shape, state._root, shape.plan)


def _give_views(shape: Any) -> None:
    """Tells C what the containers in a container are given as, at every depth."""
    below = shape.item if isinstance(shape, ListShape) else getattr(shape, "value", None)
    if below is not None and below.letter:
        shape.plan._give_views(views.class_of(below), below, below.plan, below.letter)
        _give_views(below)


views.use((ListView, MapView, SetView))
