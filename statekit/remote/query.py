"""statekit.connect(): looking at the state of a running process, from outside and read only.

A Remote has the methods by which a provider declares states. The states that they give have only
methods for reading, and everything read is a plain copy. For a key that the process does not own,
reading raises the error that the process itself would raise (NotOwnedError), not "no such key".
"""

from collections.abc import Iterable
from struct import Struct
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from statekit.codecs import Codec, make_codec, make_shape
from statekit.errors import KindError, PeerError, SchemaError, where
from statekit.exact import VALUE_FAULTS
from statekit.keys import KEY_FAULTS, KeyType, key_codec, key_error
from statekit.protocol.calls import PeerHello, QueryCall
from statekit.remote.security import TLS
from statekit.schema import StateSchema, check_evolution, show

if TYPE_CHECKING:
    from statekit.remote.channel import PeerChannel

T = TypeVar("T")
D = TypeVar("D")

_list = list  # Remote.list hides the built-in
_NO_DEFAULT: Any = object()
_MISSING: Any = object()
_KEYS = 1024  # how many are asked for at once: their values should fit into a message
_NUMBERS = {"i64": Struct("<q"), "f64": Struct("<d")}
_FORMS = {"list": "list", "dict": "map", "set": "set"}


def connect(
    address: str,
    *,
    tls: TLS | None = None,
    token: str | None = None,
    timeout_s: float = 10.0,
    insecure: bool = False,
) -> "Remote":
    """The state of the process that serves at an address: see Remote.

    PeerRefusedError if the process wants another token or certificate, PeerLostError if nobody
    answers there within timeout_s.
    """
    from statekit.remote.channel import PeerChannel  # needs gRPC

    channel = PeerChannel(address, tls=tls, token=token, timeout_s=timeout_s, insecure=insecure)
    try:
        return Remote(channel)
    except BaseException:
        channel.close()
        raise


class Remote:
    """Another process' state, to look at.

        with sk.connect("127.0.0.1:7000") as remote:
            remote.value("visits", int, default=0).get("alice")

    Close it, or use it in a with statement: it holds a connection.
    """

    def __init__(self, channel: "PeerChannel") -> None:
        self._channel = channel
        self._hello = channel.hello()

    @property
    def address(self) -> str:
        return self._channel.address

    @property
    def name(self) -> str:
        """What the process calls itself."""
        return self._hello.name

    @property
    def key_groups(self) -> tuple[range, ...]:
        """The key-groups that the process owns now."""
        return self._ask_hello().owned

    @property
    def schemas(self) -> tuple[StateSchema, ...]:
        """The states that the process has now."""
        return self._ask_hello().schemas

    def metrics(self) -> dict[str, Any]:
        """The metrics of the process, as it tells them."""
        return self._channel.figures()

    def _ask_hello(self) -> PeerHello:
        self._hello = self._channel.hello()
        return self._hello

    # ---- States

    def value(
        self,
        name: str,
        type: type[T],  # noqa: A002
        *,
        default: Any = _NO_DEFAULT,
        key: KeyType = str,
    ) -> "RemoteState[T]":
        """One value of a type under each key. default: what reading a missing key gives."""
        codec = make_codec(type)
        if default is not _NO_DEFAULT:
            try:
                codec.encode(default)
            except VALUE_FAULTS:
                raise SchemaError(
                    f"the default of state {name!r} is no {show(codec.type)}. "
                    "Give one of the state's type."
                ) from None
        found: RemoteState[T] = self._state(name, "value", codec, key, default)
        return found

    def list(self, name: str, item: type[T], *, key: KeyType = str) -> "RemoteState[_list[T]]":
        """A list of items of a type under each key."""
        return self.state(name, _list[item], key=key)  # type: ignore[valid-type]

    def map(
        self, name: str, map_key: Any, value: Any, *, key: KeyType = str
    ) -> "RemoteState[dict[Any, Any]]":
        """A map under each key."""
        return self.state(name, dict[map_key, value], key=key)

    def state(self, name: str, hint: type[T], *, key: KeyType = str) -> "RemoteState[T]":
        """A state of any type hint: lists, dicts and sets, nested as you like, or else a value."""
        codec = make_shape(hint).codec
        tag = codec.type[0] if isinstance(codec.type, _list) else ""
        form = _FORMS.get(tag, "value")
        found: RemoteState[T] = self._state(name, form, codec, key, _NO_DEFAULT)
        return found

    def _state(self, name: str, form: str, codec: Codec, key: KeyType, default: Any) -> Any:
        asked = StateSchema(name, form, key_codec(key).text, codec.type)
        stored = _find(self._hello, name) or _find(self._ask_hello(), name)
        if stored is None:
            names = ", ".join(repr(schema.name) for schema in self._hello.schemas) or "none"
            error = SchemaError(
                f"there is no state {name!r} at {self.address}. There are: {names}."
            )
            error.state = name
            raise error
        check_evolution(stored, asked)
        return RemoteState(self._channel, asked, stored, codec, default)

    # ---- Ending it

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "Remote":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        hello = self._hello
        owned = sum(map(len, hello.owned))
        states = f"{len(hello.schemas)} states, {owned} of {hello.key_groups} key-groups"
        return f"<Remote {hello.name!r} at {self.address}: {states}>"


def _find(hello: PeerHello, name: str) -> StateSchema | None:
    return next((schema for schema in hello.schemas if schema.name == name), None)


class RemoteState(Generic[T]):
    """One state of another process: get(), get_many(), state[key] and `key in state`."""

    def __init__(
        self,
        channel: "PeerChannel",
        asked: StateSchema,
        stored: StateSchema,
        codec: Codec,
        default: Any,
    ) -> None:
        self._channel = channel
        self.schema = asked
        self._stored = stored
        self._codec = codec
        # Kept encoded: a caller may change the object that it gets, but not the default.
        self._default = default if default is _NO_DEFAULT else codec.encode(default)

    @property
    def name(self) -> str:
        return self.schema.name

    def get(self, key: Any, default: Any = _NO_DEFAULT) -> Any:
        """The value; else the default given here, else the state's default, else None."""
        found = self._read([key])[0]
        if found is not _MISSING:
            return found
        if default is _NO_DEFAULT:
            default = self._fresh_default()
        return None if default is _NO_DEFAULT else default

    def get_many(self, keys: Iterable[Any]) -> list[T | None]:
        """The values of many keys, in their order; None (or the state's default) if missing."""
        default = self._fresh_default()
        missing = None if default is _NO_DEFAULT else default
        asked = list(keys)
        found: list[T | None] = []
        for start in range(0, len(asked), _KEYS):
            part = self._read(asked[start : start + _KEYS])
            found += [missing if value is _MISSING else value for value in part]
        return found

    def __getitem__(self, key: Any) -> T:
        found = self.get(key, _MISSING if self._default is _NO_DEFAULT else _NO_DEFAULT)
        if found is _MISSING:
            raise KeyError(key)
        return found  # type: ignore[no-any-return]

    def __iter__(self) -> NoReturn:
        # Without this method, Python would ask for the keys 0, 1, 2, ...
        raise KindError(
            f"state {self.name!r} at {self._channel.address} cannot be gone through from outside: "
            "a connection reads the keys that it is asked for. Use get_many(keys), or restore a "
            "checkpoint of the process to see all of it."
        )

    def __contains__(self, key: Any) -> bool:
        return self._read([key])[0] is not _MISSING

    def __repr__(self) -> str:
        keys = key_codec(self.schema.key).python
        kinds = f"{keys} -> {show(self.schema.type)}"
        return f"<RemoteState {self.name!r} at {self._channel.address}: {kinds}>"

    def _fresh_default(self) -> Any:
        return _NO_DEFAULT if self._default is _NO_DEFAULT else self._codec.decode(self._default)

    def _read(self, keys: list[Any]) -> list[Any]:
        """The decoded values; _MISSING where there is none."""
        reply = self._channel.query(QueryCall(self.name, tuple(map(self._encoded, keys))))
        if reply.schema != self._stored:  # the process has changed the schema meanwhile
            check_evolution(reply.schema, self.schema)
            self._stored = reply.schema
        return [
            _MISSING if data is None else self._decoded(data, key)
            for data, key in zip(reply.values, keys, strict=True)
        ]

    def _encoded(self, key: Any) -> bytes:
        codec = key_codec(self.schema.key)
        try:
            return codec.encode(key)
        except KEY_FAULTS:
            raise key_error(codec, key, self.name) from None

    def _decoded(self, data: bytes, key: Any) -> Any:
        number = _NUMBERS.get(self._stored.kind)
        try:
            if number is None:
                return self._codec.decode(data)
            found = number.unpack(data)[0]
            return float(found) if self._codec.type == "float" else found
        except (*VALUE_FAULTS, *KEY_FAULTS) as fault:
            error = PeerError(
                f"what the peer at {self._channel.address} has is no {show(self._stored.type)} "
                f"({fault}){where(self.name, key)}. Check the versions of both sides."
            )
            error.state, error.key = self.name, key
            raise error from None
