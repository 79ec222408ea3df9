"""The description in a manifest: everything but packs and segments, as a JSON object.

    attachments   [name, file, size] of each file that it keeps beside its packs; or left out
    base          number of the checkpoint it was made on top of, or null
    base_digest   SHA-256 of that one's manifest, 64 hexadecimal digits; or left out
    compression   null, "zstd" or "lz4"
    generation    of the provider that published it (ownership.py); left out if there is no owner
    key_groups    the owned ones, as [start, stop] pairs
    metadata      the user's object
    owner         that provider: 16 hexadecimal digits, drawn at random; or left out
    parts         the files of the parts that it was published from (parts.py); or left out
    states        one object per state: the fields of StateSchema
    watermark     event time in ms, or null
    writers       the owners of all parts, the first of which is the owner above; or left out

They come in this order, in UTF-8, without spaces. Objects inside keep the order that they were
given in: the order of a NamedTuple's fields says where they are stored. Unknown keys are ignored,
so that later versions may add some. Everything else is checked, so that every state that is decoded
can be shown and declared.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from statekit._native import lib
from statekit.errors import ArgumentError, KeyTypeError, shorten
from statekit.keys import key_codec
from statekit.native.kinds import CLOCKS
from statekit.schema import StateSchema

COMPRESSIONS = ("zstd", "lz4")

_FORMS = frozenset(("value", "list", "map", "set", "timers"))
_SCALARS = frozenset((
    "int", "float", "bool", "str", "bytes", "none", "any", "datetime", "date", "time", "timedelta",
    "uuid", "decimal",
))  # fmt: skip
_TYPE_DEPTH_MAX = 64  # types inside each other


#: Files that a checkpoint keeps beside its packs: number of the checkpoint, and contents.
ATTACHMENT_NAME = re.compile(r"([0-9]{12})-([0-9a-f]{64})\.attachment", re.ASCII)


class Attachment(NamedTuple):
    """A file of yours that a checkpoint keeps. write_attachment() writes it."""

    name: str  # what you call it; each once in a checkpoint
    file: str  # in the place; its name has the SHA-256 of its contents
    size: int  # bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the contents, in hexadecimal digits."""
        return self.file[13:77]


class DescriptionError(Exception):
    """A description that is not valid, and what is wrong. It never leaves this package."""


class Description(NamedTuple):
    """What a description says. read() checks conditions 5 and 6 of a manifest."""

    base: int | None
    compression: str | None
    owned: tuple[range, ...]
    metadata: dict[str, Any]
    schemas: tuple[StateSchema, ...]
    watermark: int | None
    generation: int = 0  # 0: there is no owner
    owner: str = ""
    base_digest: str = ""
    parts: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    attachments: tuple[Attachment, ...] = ()

    def encode(self) -> bytes:
        found = {
            "attachments": self.attachments,
            "base": self.base,
            "base_digest": self.base_digest,
            "compression": self.compression,
            "generation": self.generation,
            "key_groups": [[groups.start, groups.stop] for groups in self.owned],
            "metadata": self.metadata,
            "owner": self.owner,
            "parts": self.parts,
            "states": [schema._asdict() for schema in self.schemas],
            "watermark": self.watermark,
            "writers": self.writers,
        }
        for name in _OPTIONAL:
            if not found[name]:
                del found[name]
        return json.dumps(found, allow_nan=False, separators=(",", ":")).encode()

    @classmethod
    def read(cls, text: bytes, number: int, key_groups: int) -> "Description":
        try:
            found = json.loads(
                text.decode(), object_pairs_hook=_distinct, parse_constant=_refuse_constant
            )
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
            _bad(f"no JSON ({shorten(str(error))})")
        if not isinstance(found, dict):
            _bad("no JSON object")
        missing = [name for name in _KEYS if name not in found]
        if missing:
            _bad(f"without {missing[0]!r}")
        base = found["base"]
        if not (base is None or (_is_int(base) and 1 <= base < number)):
            _bad(f"with {shorten(base)} for a base")
        compression = found["compression"]
        if not (compression is None or compression in COMPRESSIONS):
            _bad(f"with the compression {shorten(compression)}")
        watermark = found["watermark"]
        if not (watermark is None or (_is_int(watermark) and -(2**63) < watermark < 2**63)):
            _bad(f"with {shorten(watermark)} for a watermark")
        if not isinstance(found["metadata"], dict):
            _bad("with metadata that are no object")
        return cls(
            base,
            compression,
            _read_owned(found["key_groups"], key_groups),
            found["metadata"],
            _read_schemas(found["states"]),
            watermark,
            *_read_owner(found, number),
            _read_digest(found.get("base_digest", ""), base),
            _read_names(found.get("parts", []), "parts"),
            _read_writers(found),
            _read_attachments(found.get("attachments", [])),
        )


_OPTIONAL = ("attachments", "base_digest", "generation", "owner", "parts", "writers")
_KEYS = ("base", "compression", "key_groups", "metadata", "states", "watermark")
_OWNER = re.compile(r"[0-9a-f]{16}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


def _bad(what: str) -> NoReturn:
    raise DescriptionError(f"its description is {what}")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _is_int(value: Any) -> bool:
    return type(value) is int  # True and False do not count as ints


def _read_owner(found: dict[str, Any], number: int) -> tuple[int, str]:
    """Generation and owner. Checkpoints from before there were owners have neither."""
    generation: Any = found.get("generation")
    owner: Any = found.get("owner")
    if generation is None and owner is None:
        return 0, ""
    if not (_is_int(generation) and 1 <= generation <= number):
        _bad(f"with {shorten(generation)} for a generation")
    if not (isinstance(owner, str) and _OWNER.fullmatch(owner)):
        _bad(f"with {shorten(owner)} for an owner")
    return generation, owner


def _read_digest(digest: Any, base: int | None) -> str:
    if digest == "":
        return ""
    if base is None or not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        _bad(f"with {shorten(digest)} for the digest of its base")
    return digest


def _read_names(names: Any, what: str) -> tuple[str, ...]:
    """Names of files or of writers, of which no two may be equal."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        _bad(f"with {what} that are no list of names")
    if len({*names}) != len(names):
        _bad(f"with {what} of which one is there twice")
    return tuple(names)


def _read_writers(found: dict[str, Any]) -> tuple[str, ...]:
    writers = _read_names(found.get("writers", []), "writers")
    if writers and (writers[0] != found.get("owner") or not all(map(_OWNER.fullmatch, writers))):
        _bad("with writers that are no owners")
    return writers


def _read_attachments(rows: Any) -> tuple[Attachment, ...]:
    if not isinstance(rows, list):
        _bad("with attachments that are no list")
    found = []
    for row in rows:
        is_good = isinstance(row, list) and len(row) == 3 and _is_int(row[2]) and row[2] >= 0
        if not is_good or not all(isinstance(part, str) for part in row[:2]):
            _bad(f"with {shorten(row)} for an attachment")
        if not ATTACHMENT_NAME.fullmatch(row[1]):
            _bad(f"with an attachment in the file {shorten(row[1])}")
        found.append(Attachment(*row))
    _read_names([one.name for one in found], "attachments")
    return tuple(found)


def _read_owned(pairs: Any, key_groups: int) -> tuple[range, ...]:
    if not isinstance(pairs, list):
        _bad("with key-groups that are no list")
    owned = []
    end = 0
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_int, pair))):
            _bad(f"with {shorten(pair)} for a range of key-groups")
        start, stop = pair
        if not end <= start < stop <= key_groups:
            _bad(f"with the key-groups {start} to {stop} out of order")
        owned.append(range(start, stop))
        end = stop
    return tuple(owned)


def _read_schemas(states: Any) -> tuple[StateSchema, ...]:
    if not isinstance(states, list) or len(states) > int(lib.SK_STATES_MAX):
        _bad("with states that are no list of states")
    schemas = tuple(map(_read_schema, states))
    if len({schema.name for schema in schemas}) != len(schemas):
        _bad("with two states of the same name")
    return schemas


def _read_schema(state: Any) -> StateSchema:
    if not isinstance(state, dict) or not {"name", "form", "key", "type"} <= state.keys():
        _bad("with a state that lacks a name, form, key or type")
    name, form, key, clock = (state.get(part, "") for part in ("name", "form", "key", "clock"))
    if not all(isinstance(part, str) for part in (name, form, key, clock)):
        _bad(f"with the state {shorten(name)}, whose parts are no text")
    try:
        is_name = 1 <= len(name.encode()) <= int(lib.SK_NAME_BYTES_MAX) and "\0" not in name
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        _bad(f"with a state named {shorten(name)}")
    if form not in _FORMS:
        _bad(f"with the state {shorten(name)} of form {shorten(form)}")
    if clock and (clock not in CLOCKS or form == "timers"):
        _bad(f"with the state {shorten(name)} of clock {shorten(clock)}")
    try:
        key_codec(key)
    except KeyTypeError:
        _bad(f"with the state {shorten(name)} of key type {shorten(key)}")
    if not _is_type(state["type"], 1):
        _bad(f"with the state {shorten(name)} of type {shorten(state['type'])}")
    return StateSchema(name, form, key, state["type"], clock)


def _is_type(found: Any, depth: int) -> bool:
    """True if it is a type as statekit/schema.py writes them."""
    if isinstance(found, str):
        return found in _SCALARS
    if not isinstance(found, list) or not found or depth > _TYPE_DEPTH_MAX:
        return False
    tag, *rest = found
    if tag in ("record", "row"):
        return len(rest) == 2 and isinstance(rest[0], str) and _are_fields(rest[1], depth)
    if tag in ("enum", "flags"):
        return len(rest) == 2 and isinstance(rest[0], str) and isinstance(rest[1], list)
    if tag == "ref":
        return len(rest) == 1 and isinstance(rest[0], str)
    least, most = _ARITIES.get(tag, (1, 0)) if isinstance(tag, str) else (1, 0)
    return least <= len(rest) <= most and all(_is_type(part, depth + 1) for part in rest)


_MANY = 1 << 16
_ARITIES = {
    "list": (1, 1), "set": (1, 1), "dict": (2, 2), "tuple": (0, _MANY), "tuple*": (1, 1),
    "union": (1, _MANY),
}  # fmt: skip


def _are_fields(fields: Any, depth: int) -> bool:
    return isinstance(fields, dict) and all(
        isinstance(part, list)
        and len(part) == 2
        and isinstance(part[1], bool)
        and _is_type(part[0], depth + 1)
        for part in fields.values()
    )


def plain_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's metadata as it will be read back. ArgumentError if JSON cannot hold it."""
    given = {} if metadata is None else metadata
    try:
        if not isinstance(given, Mapping):
            raise TypeError(f"it is no dict but a {type(given).__name__}")
        found: dict[str, Any] = json.loads(json.dumps(given, allow_nan=False))
        if found != given:  # keys that are not str, or tuples: they come back as something else
            raise ValueError("it would be read back as something else: a tuple as a list, say")
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"the metadata cannot be written as JSON ({error}). Use a dict of str, int, float, "
            "bool, None, lists and dicts, with str keys."
        ) from None
    return found
