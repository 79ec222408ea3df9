"""Forms of state: how one is declared, what may be done to it, and the same done to a plain dict.

An operation is plain data, (name, arguments…), so that it can be sent to another process, printed
and replayed. Each form implements it twice: `real` does it to a state, `model` to the entries of
the model. What both give, result or exception, must be the same.

Lists, maps, sets and nested values are changed by one piece of code on both sides: a view has the
same methods as the plain container in the model.
"""

import operator
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import statekit as sk

MISSING: Any = type("Missing", (), {"__repr__": lambda _: "MISSING"})()
Op = tuple[Any, ...]
ERRORS = (KeyError, IndexError, ValueError)  # errors that an operation may rightly raise


class TTLSpec(NamedTuple):
    after_ms: int
    clock: str
    refresh: str


class Spec(NamedTuple):
    """A state of a life."""

    name: str
    form: str
    key: str  # one of KEYS
    ttl: TTLSpec | None


class Entries(Protocol):
    """The entries of one state that one provider owns, in the model."""

    def get(self, key: Any) -> Any:
        """The value, or MISSING; nothing is refreshed."""

    def read(self, key: Any) -> Any:
        """The same, as a call about one key reads it."""

    def put(self, key: Any, value: Any) -> None: ...

    def drop(self, key: Any) -> bool: ...

    def items(self) -> Iterator[tuple[Any, Any]]: ...


class Dice(NamedTuple):
    """What a random operation is made from."""

    rng: random.Random
    key: Callable[[], Any]  # one that the provider owns
    peek: Callable[[Any], Any]  # the model's value of a key
    version: int
    timed: bool  # True: only operations that are certain to refresh an entry, or not to

    def keys(self) -> list[Any]:
        return [self.key() for _ in range(self.rng.choice((0, 1, 2, 5, 20)))]


# ---- Keys

KEYS: dict[str, Any] = {"str": str, "int": int, "bytes": bytes, "pair": tuple[str, int]}


def random_key(rng: random.Random, kind: str) -> Any:
    if kind == "int":
        return rng.choice((rng.randrange(-5, 20), rng.randrange(-(2**63), 2**63)))
    if kind == "pair":
        return (random_key(rng, "str"), random_key(rng, "int"))
    # Up to 10 bytes, and up to 18, fit into a slot; longer ones do not.
    length = rng.choice((0, 1, 3, 7, 10, 11, 14, 18, 19, 60))
    text = "".join(rng.choice("abcdeé€") for _ in range(length))
    return text if kind == "str" else text.encode()


def encoded(key: Any) -> bytes:
    """The bytes of a key, for results that are ordered by them. (Timers have str keys here.)"""
    return key.encode() if isinstance(key, str) else key


# ---- Values as both sides can compare them


def plain(value: Any) -> Any:
    """A result as plain Python that can be sent: views and batches as copies."""
    if hasattr(value, "to_list"):
        return value.to_list()
    if type(value).__name__ in ("ListView", "MapView", "SetView"):
        return value.copy()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def canon(value: Any) -> Any:
    """A value in a form in which only the same values are equal: 1 is not 1.0, maps are ordered."""
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(canon, value))
    if isinstance(value, dict):
        return ("dict", *((canon(key), canon(item)) for key, item in value.items()))
    if isinstance(value, set | frozenset):
        return ("set", frozenset(map(canon, value)))
    if is_dataclass(value):
        return (type(value).__name__, *(canon(getattr(value, f.name)) for f in fields(value)))
    return (type(value).__name__, repr(value) if isinstance(value, float) else value)


# ---- Forms


class Form:
    """See the module."""

    versions = 1  # how many its type goes through

    def declare(self, kv: Any, spec: Spec, version: int) -> Any:
        raise NotImplementedError

    def ops(self, dice: Dice) -> list[Callable[[], Op]]:
        """Functions that make a random operation; each is equally likely."""
        raise NotImplementedError

    def upgrade(self, value: Any, version: int) -> Any:
        """A value of this version as one of the next."""
        return value

    def random_op(self, dice: Dice) -> Op:
        return dice.rng.choice(self.ops(dice))()

    def real(self, state: Any, op: Op) -> Any:
        name, *args = op
        return getattr(self, "real_" + name)(state, *args)

    def model(self, entries: Entries, op: Op, version: int) -> Any:
        name, *args = op
        return getattr(self, "model_" + name)(entries, *args)

    def dump(self, state: Any) -> list[tuple[Any, Any]]:
        return [(key, plain(value)) for key, value in state.items()]

    def shown(self, value: Any) -> Any:
        """A value of the model as dump() gives it."""
        return value

    # ---- What every state can do

    def common(self, dice: Dice) -> list[Callable[[], Op]]:
        key, keys = dice.key, dice.keys
        return [
            lambda: ("contains", key()),
            lambda: ("discard", key()),
            lambda: ("delete", key()),
            lambda: ("contains_many", keys()),
            lambda: ("delete_many", keys()[:5]),
            lambda: ("len",),
            lambda: ("clear",) if dice.rng.random() < 0.05 else ("len",),
        ]

    def real_contains(self, state: Any, key: Any) -> Any:
        return key in state

    def model_contains(self, entries: Entries, key: Any) -> Any:
        return entries.read(key) is not MISSING

    def real_discard(self, state: Any, key: Any) -> Any:
        return state.discard(key)

    def model_discard(self, entries: Entries, key: Any) -> Any:
        return entries.drop(key)

    def real_delete(self, state: Any, key: Any) -> Any:
        del state[key]

    def model_delete(self, entries: Entries, key: Any) -> Any:
        if not entries.drop(key):
            raise KeyError(key)

    def real_contains_many(self, state: Any, keys: list[Any]) -> Any:
        return state.contains_many(keys)

    def model_contains_many(self, entries: Entries, keys: list[Any]) -> Any:
        return [entries.read(key) is not MISSING for key in keys]

    def real_delete_many(self, state: Any, keys: list[Any]) -> Any:
        return state.delete_many(keys)

    def model_delete_many(self, entries: Entries, keys: list[Any]) -> Any:
        return sum(entries.drop(key) for key in keys)

    def real_len(self, state: Any) -> Any:
        return len(state)

    def model_len(self, entries: Entries) -> Any:
        return sum(1 for _ in entries.items())

    def real_clear(self, state: Any) -> Any:
        state.clear()

    def model_clear(self, entries: Entries) -> Any:
        for key, _ in [*entries.items()]:
            entries.drop(key)


class ValueForm(Form):
    """Values of one type."""

    def __init__(self, *types: Any, default: Any = MISSING) -> None:
        self.types = types
        self.versions = len(types)
        self.default = default

    def declare(self, kv: Any, spec: Spec, version: int) -> Any:
        more = {} if self.default is MISSING else {"default": self._default(version)}
        return kv.value(
            spec.name, self.types[version], key=KEYS[spec.key], ttl=ttl_of(spec), **more
        )

    def _default(self, version: int) -> Any:
        value = self.default
        for step in range(version):
            value = self.upgrade(value, step)
        return value

    def upgrade(self, value: Any, version: int) -> Any:
        return convert(value, self.types[version + 1])

    def sample(self, dice: Dice) -> Any:
        return sample(dice.rng, self.types[dice.version])

    def ops(self, dice: Dice) -> list[Callable[[], Op]]:
        key, keys = dice.key, dice.keys

        def columns(name: str) -> Op:
            some = keys()
            return (name, some, [self.sample(dice) for _ in some])

        return [
            *self.common(dice),
            *2 * [lambda: ("put", key(), self.sample(dice))],
            lambda: ("get", key()),
            lambda: ("item", key()),
            lambda: ("pop", key()),
            lambda: ("setdefault", key(), self.sample(dice)),
            lambda: ("get_many", keys()),
            lambda: columns("put_many"),
            lambda: columns("update"),
        ]

    def model(self, entries: Entries, op: Op, version: int) -> Any:
        self._now = MISSING if self.default is MISSING else self._default(version)
        return super().model(entries, op, version)

    def real_put(self, state: Any, key: Any, value: Any) -> Any:
        state[key] = value

    def model_put(self, entries: Entries, key: Any, value: Any) -> Any:
        entries.put(key, value)

    def real_get(self, state: Any, key: Any) -> Any:
        return state.get(key)

    def model_get(self, entries: Entries, key: Any) -> Any:
        value = entries.read(key)
        if value is MISSING:
            return None if self._now is MISSING else self._now
        return value

    def real_item(self, state: Any, key: Any) -> Any:
        return state[key]

    def model_item(self, entries: Entries, key: Any) -> Any:
        value = entries.read(key)
        if value is MISSING and self._now is MISSING:
            raise KeyError(key)
        return self._now if value is MISSING else value

    def real_pop(self, state: Any, key: Any) -> Any:
        return state.pop(key)

    def model_pop(self, entries: Entries, key: Any) -> Any:
        value = entries.get(key)
        if value is MISSING:
            raise KeyError(key)
        entries.drop(key)
        return value

    def real_setdefault(self, state: Any, key: Any, value: Any) -> Any:
        return state.setdefault(key, value)

    def model_setdefault(self, entries: Entries, key: Any, value: Any) -> Any:
        found = entries.read(key)
        if found is MISSING:
            entries.put(key, value)
            return value
        return found

    def real_get_many(self, state: Any, keys: list[Any]) -> Any:
        return state.get_many(keys).to_list()

    def model_get_many(self, entries: Entries, keys: list[Any]) -> Any:
        return [self.model_get(entries, key) for key in keys]

    def real_put_many(self, state: Any, keys: list[Any], values: list[Any]) -> Any:
        state.put_many(keys, values)

    def model_put_many(self, entries: Entries, keys: list[Any], values: list[Any]) -> Any:
        for key, value in zip(keys, values, strict=True):
            entries.put(key, value)

    def real_update(self, state: Any, keys: list[Any], values: list[Any]) -> Any:
        state.update(zip(keys, values, strict=True))

    model_update = model_put_many


class NumberForm(ValueForm):
    """ints and floats, which have arithmetic."""

    def ops(self, dice: Dice) -> list[Callable[[], Op]]:
        key, keys = dice.key, dice.keys

        def add_many(returning: bool) -> Op:
            some = keys()
            amounts: Any = [self.sample(dice) for _ in some]
            if not some or dice.rng.random() < 0.3:
                amounts = self.sample(dice)
            return ("add_many", some, amounts, returning)

        def cas() -> Op:
            some = key()
            found = dice.peek(some)
            expected = None if found is MISSING else found
            if not dice.timed and dice.rng.random() < 0.4:
                expected = self.sample(dice)
            return ("cas", some, expected, self.sample(dice))

        more = [
            *super().ops(dice),
            *2 * [lambda: ("add", key(), self.sample(dice))],
            *2 * [lambda: add_many(False)],
            lambda: add_many(True),
            cas,
        ]
        if not dice.timed:  # it is not defined whether a minimum that changes nothing is a write
            more += [lambda: ("min", key(), self.sample(dice))]
            more += [lambda: ("max", key(), self.sample(dice))]
        return more

    def real_add(self, state: Any, key: Any, amount: Any) -> Any:
        return state.add(key, amount)

    def model_add(self, entries: Entries, key: Any, amount: Any) -> Any:
        value = entries.get(key)
        zero = type(amount)(0) if self._now is MISSING else self._now
        value = (zero if value is MISSING else value) + amount
        entries.put(key, value)
        return value

    def real_add_many(self, state: Any, keys: Any, amounts: Any, returning: bool) -> Any:
        found = state.add_many(keys, amounts, returning=returning)
        return None if found is None else found.to_list()

    def model_add_many(self, entries: Entries, keys: Any, amounts: Any, returning: bool) -> Any:
        if not isinstance(amounts, list):
            amounts = [amounts] * len(keys)
        found = [self.model_add(entries, *pair) for pair in zip(keys, amounts, strict=True)]
        return found if returning else None

    def real_min(self, state: Any, key: Any, value: Any) -> Any:
        return state.min(key, value)

    def model_min(self, entries: Entries, key: Any, value: Any, least: Any = min) -> Any:
        found = entries.get(key)
        value = value if found is MISSING else least(found, value)
        entries.put(key, value)
        return value

    def real_max(self, state: Any, key: Any, value: Any) -> Any:
        return state.max(key, value)

    def model_max(self, entries: Entries, key: Any, value: Any) -> Any:
        return self.model_min(entries, key, value, max)

    def real_cas(self, state: Any, key: Any, expected: Any, desired: Any) -> Any:
        return state.compare_and_set(key, expected, desired)

    def model_cas(self, entries: Entries, key: Any, expected: Any, desired: Any) -> Any:
        found = entries.get(key)
        if (None if found is MISSING else found) != expected:
            return False
        entries.put(key, desired)
        return True


class ContainerForm(Form):
    """Lists, maps, sets, and any nesting of them."""

    def __init__(self, *types: Any) -> None:
        self.types = types
        self.versions = len(types)

    def declare(self, kv: Any, spec: Spec, version: int) -> Any:
        return kv.state(spec.name, self.types[version], key=KEYS[spec.key], ttl=ttl_of(spec))

    def upgrade(self, value: Any, version: int) -> Any:
        return convert(value, self.types[version + 1])

    def ops(self, dice: Dice) -> list[Callable[[], Op]]:
        rng, key, keys = dice.rng, dice.key, dice.keys
        hint = self.types[dice.version]
        made = [
            *self.common(dice),
            lambda: ("put", key(), sample(rng, hint)),
            lambda: ("get", key()),
            lambda: ("get_many", keys()),
            lambda: (
                "put_many",
                some := keys()[:5],
                [sample(rng, hint) for _ in some],
            ),
            *8 * [lambda: self._view_op(dice, hint)],
        ]
        if hint.__origin__ is list:
            item = hint.__args__[0]
            made += 2 * [lambda: ("append_many", some := keys(), [sample(rng, item) for _ in some])]
        if hint.__origin__ is dict and hint.__args__[1] in (int, float, str):
            made += 2 * [
                lambda: (
                    "update_many",
                    some := keys(),
                    *([sample(rng, one) for _ in some] for one in hint.__args__),
                )
            ]
        return made

    def _view_op(self, dice: Dice, hint: Any) -> Op:
        """A method of the view of a key, or of one inside it."""
        rng = dice.rng
        key = dice.key()
        value = dice.peek(key)
        path: list[Any] = []
        here: Any = empty(hint) if value is MISSING else value
        while hint.__origin__ in (dict, list) and hasattr(hint.__args__[-1], "__origin__"):
            inner = hint.__args__[-1]
            if rng.random() < 0.2:
                break
            if hint.__origin__ is dict:
                step = rng.choice([*here, sample(rng, hint.__args__[0])])
                here = here.get(step, empty(inner))
            else:
                if not here:
                    break
                step = rng.randrange(len(here))
                here = here[step]
            path.append(step)
            hint = inner
        method, *args = _METHODS[hint.__origin__](dice, hint, here)
        return ("view", key, path, method, args)

    def real_view(self, state: Any, key: Any, path: list[Any], method: str, args: Any) -> Any:
        view = state[key]
        for step in path:
            view = view[step]
        return plain(getattr(view, method)(*args))

    def model_view(
        self, entries: Entries, key: Any, path: list[Any], method: str, args: Any
    ) -> Any:
        found = entries.read(key) if method in READING else entries.get(key)
        root = empty(self._hint) if found is MISSING else deepcopy(found)
        chain, here, hint = [], root, self._hint
        for step in path:
            hint = hint.__args__[-1]
            below = here.setdefault(step, MISSING) if isinstance(here, dict) else here[step]
            is_new = below is MISSING
            if is_new:
                del here[step]
                below = empty(hint)
            chain.append((here, step, is_new))
            here = below
        result = plain(getattr(here, method)(*deepcopy(args)))
        if method in READING:
            return deepcopy(result)
        for above, step, is_new in reversed(chain):
            if is_new:
                if not here:
                    break  # an empty value creates nothing
                above[step] = here
            here = above
        if found is not MISSING or root:
            entries.put(key, root)
        return deepcopy(result)

    def model(self, entries: Entries, op: Op, version: int) -> Any:
        self._hint = self.types[version]
        return super().model(entries, op, version)

    def real_put(self, state: Any, key: Any, value: Any) -> Any:
        state[key] = value

    def model_put(self, entries: Entries, key: Any, value: Any) -> Any:
        entries.put(key, deepcopy(value))

    def real_get(self, state: Any, key: Any) -> Any:
        found = state.get(key)
        return None if found is None else found.copy()

    def model_get(self, entries: Entries, key: Any) -> Any:
        found = entries.read(key)
        return None if found is MISSING else found

    def real_get_many(self, state: Any, keys: list[Any]) -> Any:
        return state.get_many(keys).to_list()

    def model_get_many(self, entries: Entries, keys: list[Any]) -> Any:
        return [self.model_get(entries, key) for key in keys]

    def real_put_many(self, state: Any, keys: list[Any], values: list[Any]) -> Any:
        state.put_many(keys, values)

    def model_put_many(self, entries: Entries, keys: list[Any], values: list[Any]) -> Any:
        for key, value in zip(keys, values, strict=True):
            self.model_put(entries, key, value)

    def real_append_many(self, state: Any, keys: list[Any], items: list[Any]) -> Any:
        state.append_many(keys, items)

    def model_append_many(self, entries: Entries, keys: list[Any], items: list[Any]) -> Any:
        for key, item in zip(keys, items, strict=True):
            found = entries.get(key)
            entries.put(key, [*([] if found is MISSING else found), deepcopy(item)])

    def real_update_many(self, state: Any, keys: Any, names: Any, values: Any) -> Any:
        state.update_many(keys, names, values)

    def model_update_many(self, entries: Entries, keys: Any, names: Any, values: Any) -> Any:
        for key, name, value in zip(keys, names, values, strict=True):
            found = entries.get(key)
            entries.put(key, {**({} if found is MISSING else found), name: value})


READING = {"__getitem__", "__len__", "__contains__", "index", "count", "copy", "get"}


def is_one_step(op: Op) -> bool:
    """Whether the operation is atomic: no batch, and nothing that writes several times."""
    if op[0] == "view":
        return op[3] not in ("difference_update", "intersection_update")
    return not op[0].endswith("_many") and op[0] not in ("update", "clear", "move", "pop_due")


def _list_method(dice: Dice, hint: Any, here: list[Any]) -> Op:
    rng, item = dice.rng, hint.__args__[0]
    one = lambda: sample(rng, item)  # noqa: E731
    some = lambda low: [one() for _ in range(rng.randrange(low, 4))]  # noqa: E731
    made: list[Op] = [
        ("append", one()),
        ("append", one()),
        ("extend", some(1)),
        ("__iadd__", some(1)),
        ("insert", rng.randrange(-2, len(here) + 2), one()),
        ("__len__",),
        ("copy",),
    ]
    if here:
        at = rng.randrange(-len(here), len(here))
        made += [("pop",), ("pop", 0), ("pop", at), ("__getitem__", at)]
        made += [("__setitem__", at, one()), ("__delitem__", at)]
    if not dice.timed:
        low, high = sorted((rng.randrange(-3, 9), rng.randrange(-3, 9)))
        made += [("__getitem__", slice(low, high)), ("__setitem__", slice(low, high), some(0))]
        made += [("__delitem__", slice(low, high)), ("reverse",), ("clear",), ("extend", [])]
        made += [("__contains__", one()), ("count", one()), ("pop", 9), ("__getitem__", 9)]
        if item in (int, float, str):
            value = rng.choice(here) if here and rng.random() < 0.7 else one()
            made += [("sort",), ("remove", value), ("index", value)]
    return rng.choice(made)


def _map_method(dice: Dice, hint: Any, here: dict[Any, Any]) -> Op:
    rng, (name, item) = dice.rng, hint.__args__
    key = rng.choice([*here, sample(rng, name)])
    made: list[Op] = [
        *3 * [("__setitem__", key, sample(rng, item))],
        ("update", {sample(rng, name): sample(rng, item) for _ in range(rng.randrange(1, 5))}),
        ("setdefault", key, sample(rng, item)),
        ("__len__",),
        ("copy",),
        ("__contains__", key),
        ("get", key),
    ]
    if here:
        there = rng.choice([*here])
        made += [("pop", there), ("__delitem__", there), ("popitem",)]
    if not dice.timed:
        made += [("pop", key), ("__delitem__", key), ("clear",), ("update", {})]
    else:
        made = [op for op in made if op[0] != "setdefault" or key not in here]
    return rng.choice(made)


def _set_method(dice: Dice, hint: Any, here: set[Any]) -> Op:
    rng, (item,) = dice.rng, hint.__args__
    known = sorted(here)
    one = rng.choice([*known, sample(rng, item)])
    some = {sample(rng, item) for _ in range(rng.randrange(1, 4))}
    made: list[Op] = [*3 * [("add", one)], ("update", some), ("__len__",), ("copy",)]
    made += [("__contains__", one)]
    if here:
        made += [("discard", rng.choice(known)), ("remove", rng.choice(known))]
    if not dice.timed:
        made += [("discard", one), ("remove", one), ("clear",), ("difference_update", some)]
        made += [("intersection_update", some)]
    return rng.choice(made)


_METHODS: dict[Any, Callable[[Dice, Any, Any], Op]] = {
    list: _list_method,
    dict: _map_method,
    set: _set_method,
}


class FoldForm(Form):
    """Reducing and aggregating states."""

    def __init__(
        self, hint: Any, fold: Callable[[Any, Any], Any], item: Any, initial: Any = MISSING
    ) -> None:
        self.hint, self.fold, self.item, self.initial = hint, fold, item, initial

    def declare(self, kv: Any, spec: Spec, version: int) -> Any:
        more = {"key": KEYS[spec.key], "ttl": ttl_of(spec)}
        if self.initial is MISSING:
            return kv.reduce(spec.name, self.hint, self.fold, **more)
        return kv.aggregate(
            spec.name, self.hint, initial=self.initial, add=self.fold, result=outcome, **more
        )

    def ops(self, dice: Dice) -> list[Callable[[], Op]]:
        key, keys = dice.key, dice.keys
        return [
            *self.common(dice),
            *3 * [lambda: ("add", key(), sample(dice.rng, self.item))],
            lambda: ("add_many", some := keys(), [sample(dice.rng, self.item) for _ in some]),
            lambda: ("get", key()),
            lambda: ("item", key()),
        ]

    def shown(self, value: Any) -> Any:
        return value if self.initial is MISSING else outcome(value)

    def real_add(self, state: Any, key: Any, item: Any) -> Any:
        return state.add(key, item)

    def model_add(self, entries: Entries, key: Any, item: Any) -> Any:
        found = entries.get(key)
        if found is MISSING:
            found = self.initial
        value = item if found is MISSING else self.fold(found, item)
        entries.put(key, value)
        return self.shown(value)

    def real_add_many(self, state: Any, keys: Any, items: Any) -> Any:
        state.add_many(keys, items)

    def model_add_many(self, entries: Entries, keys: Any, items: Any) -> Any:
        for key, item in zip(keys, items, strict=True):
            self.model_add(entries, key, item)

    def real_get(self, state: Any, key: Any) -> Any:
        return state.get(key)

    def model_get(self, entries: Entries, key: Any) -> Any:
        found = entries.read(key)
        return None if found is MISSING else self.shown(found)

    def real_item(self, state: Any, key: Any) -> Any:
        return state[key]

    def model_item(self, entries: Entries, key: Any) -> Any:
        found = entries.read(key)
        if found is MISSING:
            raise KeyError(key)
        return self.shown(found)


class TimersForm(Form):
    """Timers; the model's value is a sorted tuple of due times."""

    def declare(self, kv: Any, spec: Spec, version: int) -> Any:
        return kv.timers(spec.name, key=KEYS[spec.key])

    def ops(self, dice: Dice) -> list[Callable[[], Op]]:
        rng, key = dice.rng, dice.key
        due = lambda: rng.randrange(100)  # noqa: E731

        def cancel() -> Op:
            some = key()
            found = dice.peek(some)
            known = () if found is MISSING else found
            return ("cancel", some, rng.choice([*known, due(), None]))

        return [
            *4 * [lambda: ("set", key(), due())],
            *2 * [lambda: ("move", key(), due())],
            *2 * [cancel],
            *2 * [lambda: ("get", key())],
            lambda: ("pop_due", rng.randrange(60), rng.choice((None, None, 1, 3))),
            lambda: ("next_due",),
            lambda: ("len",),
            lambda: ("contains", key()),
        ]

    def real_set(self, state: Any, key: Any, due: int) -> Any:
        state.set(key, due)

    def model_set(self, entries: Entries, key: Any, due: int) -> Any:
        found = entries.get(key)
        entries.put(key, tuple(sorted({due, *(() if found is MISSING else found)})))

    def real_move(self, state: Any, key: Any, due: int) -> Any:
        state.move(key, due)

    def model_move(self, entries: Entries, key: Any, due: int) -> Any:
        entries.put(key, (due,))

    def real_cancel(self, state: Any, key: Any, due: int | None) -> Any:
        return state.cancel(key, due)

    def model_cancel(self, entries: Entries, key: Any, due: int | None) -> Any:
        found = entries.get(key)
        if due is None or found is MISSING:
            return entries.drop(key)
        if due not in found:
            return False
        left = tuple(one for one in found if one != due)
        if left:
            entries.put(key, left)
        else:
            entries.drop(key)
        return True

    def real_get(self, state: Any, key: Any) -> Any:
        return state[key]

    def model_get(self, entries: Entries, key: Any) -> Any:
        found = entries.get(key)
        return () if found is MISSING else found

    def real_pop_due(self, state: Any, watermark: int, limit: int | None) -> Any:
        return [tuple(timer) for timer in state.pop_due(watermark, limit)]

    def model_pop_due(self, entries: Entries, watermark: int, limit: int | None) -> Any:
        due = [(at, key) for key, dues in entries.items() for at in dues if at <= watermark]
        taken = sorted(due, key=lambda timer: (timer[0], encoded(timer[1])))[:limit]
        for at, key in taken:
            self.model_cancel(entries, key, at)
        return taken

    def real_next_due(self, state: Any) -> Any:
        return state.next_due

    def model_next_due(self, entries: Entries) -> Any:
        return min((at for _, dues in entries.items() for at in dues), default=None)


def ttl_of(spec: Spec) -> Any:
    if spec.ttl is None:
        return None
    after_ms, clock, refresh = spec.ttl
    return sk.TTL(after_ms / 1000, time=clock, refresh=refresh)  # type: ignore[arg-type]


# ---- Types


@dataclass
class Rec0:
    a: int
    b: str


# No change can be reversed, so that it is clear which version is older.
@dataclass
class Rec1:  # a new field with a default, and an int that is a float now
    a: float
    b: str
    c: int = 7


@dataclass
class Rec2:  # one field is gone, another one new
    a: float
    c: int = 7
    d: list[int] = field(default_factory=list)


RECORDS = (Rec0, Rec1, Rec2)


def empty(hint: Any) -> Any:
    return hint.__origin__()


def sample(rng: random.Random, hint: Any) -> Any:
    """A random value of a type."""
    if hint is int:
        return rng.choice((rng.randrange(-9, 10), rng.randrange(-(2**40), 2**40)))
    if hint is float:
        return rng.randrange(-4000, 4000) / 8  # sums of these are exact
    if hint is str:
        length = rng.choice((0, 1, 3, 8, 20)) if rng.random() < 0.97 else 900
        return "".join(rng.choice("xyzü") for _ in range(length))
    if hint is bytes:
        return rng.randbytes(rng.choice((0, 1, 8, 30)) if rng.random() < 0.95 else 3000)
    if is_dataclass(hint):
        return hint(**{f.name: sample(rng, f.type) for f in fields(hint)})
    origin, args = hint.__origin__, hint.__args__
    if origin is tuple:
        return tuple(sample(rng, one) for one in args)
    count = rng.choice((0, 1, 2, 3)) if rng.random() < 0.95 else 70  # more than 64 are indexed
    if origin is dict:
        names = (rng.choice("abcdefgh") if args[0] is str else rng.randrange(8) for _ in range(4))
        if count == 70:
            names = (f"n{at}" if args[0] is str else at for at in range(count))  # type: ignore[assignment]
        return {name: sample(rng, args[1]) for name, _ in zip(names, range(count), strict=False)}
    made = [sample(rng, args[0]) for _ in range(count)]
    return made if origin is list else set(made)


def convert(value: Any, hint: Any) -> Any:
    """A value of an earlier version as one of this type."""
    if hint is float:
        return float(value)
    if is_dataclass(hint):
        known = {f.name: getattr(value, f.name) for f in fields(value)}
        types = {f.name: f.type for f in fields(hint)}
        return hint(**{name: convert(known[name], types[name]) for name in types if name in known})
    origin, args = getattr(hint, "__origin__", None), getattr(hint, "__args__", ())
    if origin is list:
        return [convert(item, args[0]) for item in value]
    if origin is dict:
        return {key: convert(item, args[1]) for key, item in value.items()}
    return value


def longest(a: str, b: str) -> str:
    return max(a, b, key=len)


def add_to_mean(accumulator: tuple[int, float], item: float) -> tuple[int, float]:
    return accumulator[0] + 1, accumulator[1] + item


def outcome(accumulator: tuple[int, float]) -> str:
    return f"{accumulator[0]} of {accumulator[1]}"


FORMS: dict[str, Form] = {
    "count": NumberForm(int, float, default=0),
    "int": NumberForm(int),
    "float": NumberForm(float),
    "str": ValueForm(str, default="none"),
    "bytes": ValueForm(bytes),
    "record": ValueForm(*RECORDS),
    "list_int": ContainerForm(list[int], list[float]),
    "list_str": ContainerForm(list[str]),
    "list_record": ContainerForm(*(list[one] for one in RECORDS)),  # type: ignore[valid-type]
    "map_float": ContainerForm(dict[str, int], dict[str, float]),
    "map_str": ContainerForm(dict[int, str]),
    "set_str": ContainerForm(set[str]),
    "set_int": ContainerForm(set[int]),
    "map_list": ContainerForm(dict[str, list[int]], dict[str, list[float]]),
    "map_map": ContainerForm(dict[str, dict[str, int]]),
    "list_list": ContainerForm(list[list[str]]),
    "map_set": ContainerForm(dict[str, set[int]]),
    "reduce_add": FoldForm(int, operator.add, int),
    "reduce_max": FoldForm(float, max, float),
    "reduce_str": FoldForm(str, longest, str),
    "aggregate": FoldForm(tuple[int, float], add_to_mean, float, initial=(0, 0.0)),
    "timers": TimersForm(),
}
UNTIMED = ("timers", "reduce_max")  # timers have no time to live; reduce_max may or may not write
