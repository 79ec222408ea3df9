"""Any: JSON as it comes, with markers for what JSON does not have (see the package)."""

import datetime
import math
from typing import Any

import msgpack

from statekit.render.keys import hex_text, listed, parse_hex
from statekit.render.scalars import odd_text, write_bytes, write_datetime, write_float
from statekit.render.wire import (
    MisfitError,
    PackedMap,
    Write,
    pack,
    pack_array,
    pack_map,
    step,
    write_at,
)

_DEPTH_MAX = 64  # enough: the store takes containers that are nested 32 deep


def read_any(value: Any) -> Any:
    if isinstance(value, PackedMap):
        return as_object([(one, read_any(other)) for one, other in value])
    if isinstance(value, list):
        return [read_any(one) for one in value]
    if isinstance(value, bytes):
        return {"$bytes": hex_text(value)}
    if isinstance(value, datetime.datetime):
        return {"$datetime": value.isoformat()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": odd_text(value)}
    if isinstance(value, msgpack.ExtType):
        return {"$ext": [value.code, hex_text(value.data)]}
    return value


def as_object(pairs: list[tuple[Any, Any]]) -> Any:
    keys = [key for key, _ in pairs]
    is_marker = len(keys) == 1 and isinstance(keys[0], str) and keys[0][:1] == "$"
    if all(isinstance(key, str) for key in keys) and not is_marker:
        return dict(pairs)
    return {"$map": [[read_any(listed(key)), value] for key, value in pairs]}


def pairs_of(plain: Any) -> list[tuple[Any, Any]]:
    if not isinstance(plain, dict):
        raise MisfitError(plain, "an object")
    if list(plain) != ["$map"]:
        return list(plain.items())
    pairs = plain["$map"]
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise MisfitError(pairs, "a list of [key, value]").at('["$map"]')
    return [(key, value) for key, value in pairs]


def write_any(plain: Any, depth: int = 0) -> bytes:
    if depth > _DEPTH_MAX:
        raise MisfitError(plain, "a value that is nested less deeply")
    if isinstance(plain, list):
        return pack_array(
            [write_at(at, lambda v: write_any(v, depth + 1), v) for at, v in enumerate(plain)]
        )
    if isinstance(plain, dict):
        if len(plain) == 1 and (marked := _MARKERS.get(next(iter(plain)))) is not None:
            name, value = next(iter(plain.items()))
            try:
                return marked(value)
            except MisfitError as misfit:
                raise misfit.at(step(name)) from None
        pairs: dict[bytes, bytes] = {}
        for one, other in pairs_of(plain):
            try:
                pairs[write_any(one, depth + 1)] = write_any(other, depth + 1)
            except MisfitError as misfit:
                raise misfit.at(step(one)) from None
        return pack_map(pairs)
    try:
        return pack(plain)
    except (OverflowError, UnicodeEncodeError):
        raise MisfitError(plain, "a number of 64 bits, or text that has a UTF-8 form") from None


def _write_ext(plain: Any) -> bytes:
    code, data = plain if isinstance(plain, list) and len(plain) == 2 else (None, "")
    raw = parse_hex(data) if isinstance(data, str) else None
    if raw is None or not isinstance(code, int) or not 0 <= code < 128:
        raise MisfitError(plain, '[code, "0x..."], with a code from 0 to 127')
    return bytes(msgpack.packb(msgpack.ExtType(code, raw)))


_MARKERS: dict[str, Write] = {
    "$bytes": write_bytes,
    "$datetime": write_datetime,
    "$float": write_float,
    "$ext": _write_ext,
}
