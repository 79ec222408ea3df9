"""Converts between the calls (calls.py) and their bytes (peer.proto).

put_*() write, read_*() read. Whatever is read comes from a stranger. So all of it is checked here
before it is used, and read_*() raise nothing but WireError. What they return is within these bounds
and those of Limits:

- columns that belong together have the same length, and the number of everything is limited
- names are printable and short; keys, states and leaves are such that a store may have them
- numbers fit into 63 bits

The contents of blocks are not checked here: the store does that when they are installed. Blocks are
most of what is sent, so Pieces are written with one copy and read with none.

What is said once in a hand-over goes through protobuf, the rest through fields.py, which says why.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from statekit import errors, remote
from statekit._native import lib
from statekit.errors import ArgumentError, PeerError, StateKitError, UnknownEntryError, shorten
from statekit.format.description import Description, DescriptionError
from statekit.protocol.calls import (
    PROTOCOL,
    RANGES_MAX,
    BeginCall,
    BeginReply,
    CopyCall,
    FetchCall,
    GiveBackCall,
    InstalledCall,
    PeerHello,
    PickCall,
    PickReply,
    Piece,
    PieceKind,
    ProposeCall,
    QueryCall,
    QueryReply,
    ScanCall,
    ShadeCall,
    ShadeReply,
    StreamCall,
)
from statekit.protocol.messages import Grant, Offer
from statekit.remote import fields
from statekit.remote.fields import Fields
from statekit.schema import StateSchema

try:
    from google.protobuf.message import DecodeError, Message

    from statekit.remote import peer_pb2 as pb
except ImportError as error:
    raise remote.missing_package(error) from error

LEAVES_MAX: int = lib.SK_LEAVES_MAX
KEY_GROUPS_MAX: int = lib.SK_LEAVES_MAX
KEY_BYTES_MAX: int = lib.SK_KEY_BYTES_MAX
STATE_BYTES_MAX: int = lib.SK_NAME_BYTES_MAX
NUMBER_MAX = 2**63 - 1
NAME_CHARS_MAX = 256  # of migrations, processes, strategies
DIGEST_BYTES = 32  # SHA-256
# Leases, keys or pieces in one message. As Python objects they take some 100 bytes each, so all of
# a message never take much more than 8 MB. PeerChannel cuts longer calls into several.
ITEMS_MAX = 65536
DESCRIPTION_BYTES_MAX = 4 << 20

_KINDS = (None, *PieceKind, None)  # by the lowest three bits of a head
_FLAGS = tuple((bool(i & 1), bool(i & 2), bool(i & 4)) for i in range(8))  # by the next three
_new_piece: Callable[[Iterable[Any]], Piece] = partial(tuple.__new__, Piece)  # twice as fast
_BLOCKS = 5  # the field of Pieces
_PIECE_HEAD_BYTES_MAX = 64 + 4 * NAME_CHARS_MAX  # of a piece, without its blocks

M = TypeVar("M", bound=Message)
C = TypeVar("C", InstalledCall, GiveBackCall)
Leases = tuple[tuple[int, int], ...]
Field = tuple[Callable[[int, Any], bytes], int, Any]

WireError = fields.WireError


def _bad(what: str) -> NoReturn:
    raise WireError(what)


def _parse(message: type[M], data: bytes) -> M:
    try:
        found: M = message.FromString(data)
    except DecodeError:
        _bad(f"no {message.__name__}")
    return found


# ---- Parts of messages


def _name(text: str, what: str, most: int = NAME_CHARS_MAX, least: int = 1) -> str:
    # Names are logged and shown: unprintable characters could be used to forge lines there.
    if not (least <= len(text) <= most and text.isprintable()):
        _bad(f"{shorten(text)} for {what}")
    return text


def _number(value: int, what: str, most: int = NUMBER_MAX) -> int:
    if value > most:
        _bad(f"{value} for {what}")
    return value


def _digest(value: bytes) -> bytes:
    if len(value) not in (0, DIGEST_BYTES):
        _bad(f"a checkpoint's digest of {len(value)} bytes")
    return value


def _geometry(key_groups: int, subgroups: int) -> int:
    """How many leaves there are."""
    leaves = key_groups * subgroups
    if not 0 < leaves <= LEAVES_MAX or leaves & (leaves - 1):
        _bad(f"{key_groups} key-groups of {subgroups} sub-groups")
    return leaves


def _put_ranges(ranges: Iterable[range]) -> list[int]:
    return [end for part in ranges for end in (part.start, part.stop)]


def _read_ranges(ends: Sequence[int], most: int, what: str) -> tuple[range, ...]:
    if len(ends) % 2 or len(ends) > 2 * RANGES_MAX:
        _bad(f"{len(ends)} ends of ranges of {what}")
    found = []
    before = -1
    for start, stop in zip(ends[::2], ends[1::2], strict=True):
        if not before < start < stop <= most:
            _bad(f"the {what} {start} to {stop} out of order")
        found.append(range(start, stop))
        before = stop - 1
    return tuple(found)


def _read_leases(found: Fields, field: int, leaves: int) -> Leases:
    """The leaves in one field, with their epochs in the next field."""
    return _leases_of(found.column32(field), found.column64(field + 1), leaves)


def _leases_of(leaf: Sequence[int], epoch: Sequence[int], leaves: int) -> Leases:
    n = len(leaf)
    if len(epoch) != n or n > ITEMS_MAX:
        _bad(f"{n} leaves with {len(epoch)} epochs")
    if n:
        if max(leaf) >= leaves:
            _bad(f"leaf {max(leaf)} of {leaves}")
        _number(max(epoch), "an epoch")
        if n > 1 and len(set(leaf)) != n:
            _bad("a leaf twice")
    return tuple(zip(leaf, epoch, strict=True))


def _state_name(name: str) -> str:
    if not name or "\0" in name or len(name.encode()) > STATE_BYTES_MAX:
        _bad(f"a state named {shorten(name)}")
    return name


def _check_keys(sizes: Sequence[int]) -> None:
    if len(sizes) > ITEMS_MAX:
        _bad(f"{len(sizes)} keys")
    if sizes and max(sizes) > KEY_BYTES_MAX:
        _bad(f"a key of {max(sizes)} bytes")


def _put_description(
    schemas: Sequence[StateSchema],
    owned: tuple[range, ...] = (),
    watermark: int | None = None,
) -> bytes:
    return Description(None, None, owned, {}, tuple(schemas), watermark).encode()


def _read_description(text: bytes, key_groups: int) -> Description:
    if len(text) > DESCRIPTION_BYTES_MAX:
        _bad(f"a description of {len(text)} bytes")
    try:
        return Description.read(text, 1, key_groups)
    except DescriptionError as error:
        _bad(str(error))


# ---- Hello


def put_hello_request() -> bytes:
    return _put(pb.HelloRequest, protocol=PROTOCOL)


def read_hello_request(data: bytes) -> int:
    """The protocol that the peer speaks."""
    return _parse(pb.HelloRequest, data).protocol


def put_hello(hello: PeerHello) -> bytes:
    return _put(
        pb.HelloReply,
        protocol=hello.protocol,
        name=hello.name,
        incarnation=hello.incarnation,
        version=hello.version,
        generation=hello.generation,
        key_groups=hello.key_groups,
        subgroups=hello.subgroups,
        description=_put_description(hello.schemas, hello.owned, hello.watermark),
    )


def read_hello(data: bytes) -> PeerHello:
    found = _parse(pb.HelloReply, data)
    _geometry(found.key_groups, found.subgroups)
    description = _read_description(found.description, found.key_groups)
    return PeerHello(
        _name(found.name, "a process"),
        _name(found.incarnation, "an incarnation"),
        _number(found.generation, "a generation"),
        found.key_groups,
        found.subgroups,
        description.owned,
        description.schemas,
        _name(found.version, "a version"),
        found.protocol,
        description.watermark,
    )


# ---- Begin


def put_begin(call: BeginCall) -> bytes:
    return _put(
        pb.BeginRequest,
        migration=call.migration,
        generation=call.generation,
        target=call.target,
        key_groups=_put_ranges(call.key_groups),
        barrier=call.barrier,
        base=call.base,
        above=call.above,
        inline_bytes=call.inline_bytes,
        shadow=call.shadow,
        held_leaf=[leaf for leaf, _ in call.held],
        held_epoch=[epoch for _, epoch in call.held],
    )


def read_begin(
    data: bytes, key_groups: int = KEY_GROUPS_MAX, leaves: int = LEAVES_MAX
) -> BeginCall:
    found = _parse(pb.BeginRequest, data)
    return BeginCall(
        _name(found.migration, "a migration"),
        _number(found.generation, "a generation"),
        _name(found.target, "a target"),
        _read_ranges(found.key_groups, key_groups, "key-groups"),
        _number(found.barrier, "a checkpoint"),
        _digest(found.base),
        _number(found.above, "an epoch"),
        _number(found.inline_bytes, "bytes of a reply"),
        _name(found.shadow, "a shadow", least=0),
        _leases_of(found.held_leaf, found.held_epoch, leaves),
    )


def put_begin_reply(reply: BeginReply) -> bytes:
    offer = reply.offer
    return _put(
        pb.BeginReply,
        migration=offer.migration,
        generation=offer.generation,
        sequence=offer.sequence,
        source=offer.source,
        first_leaf=[grant.leaves.start for grant in offer.grants],
        leaves=[len(grant.leaves) for grant in offer.grants],
        epoch=[grant.epoch for grant in offer.grants],
        covered=[grant.covered for grant in offer.grants],
        sizes=reply.sizes,
        barrier=reply.barrier,
        key_groups=reply.key_groups,
        subgroups=reply.subgroups,
        description=_put_description(reply.schemas, watermark=reply.watermark),
        timer_leaves=_put_ranges(reply.timer_leaves),
        based=reply.based,
        pieces=put_pieces(reply.pieces) if reply.pieces else b"",
        timer_dues=reply.timer_dues,
    )


def read_begin_reply(data: bytes, leaf_bytes: int = NUMBER_MAX) -> BeginReply:
    found = _parse(pb.BeginReply, data)
    leaves = _geometry(found.key_groups, found.subgroups)
    grants = _read_grants(found, leaves)
    if len(found.sizes) != sum(found.leaves):
        _bad(f"{len(found.sizes)} sizes of {sum(found.leaves)} leaves")
    description = _read_description(found.description, found.key_groups)
    timer_leaves = _read_ranges(found.timer_leaves, leaves, "leaves")
    if len(found.timer_dues) not in (0, sum(map(len, timer_leaves))):
        _bad(f"{len(found.timer_dues)} due times of {sum(map(len, timer_leaves))} leaves")
    return BeginReply(
        Offer(
            _name(found.migration, "a migration"),
            _number(found.generation, "a generation"),
            _number(found.sequence, "a sequence"),
            _name(found.source, "a source"),
            grants,
        ),
        _number(found.barrier, "a checkpoint"),
        description.schemas,
        found.key_groups,
        found.subgroups,
        description.watermark,
        timer_leaves,
        array("Q", found.sizes),
        found.based,
        tuple(read_pieces(found.pieces, leaves, leaf_bytes)[0]),
        array("q", found.timer_dues),
    )


def _read_grants(found: pb.BeginReply, leaves: int) -> tuple[Grant, ...]:
    n = len(found.first_leaf)
    if not n == len(found.leaves) == len(found.epoch) == len(found.covered):
        _bad("runs of leaves whose columns differ in length")
    if n > leaves or sum(found.leaves) > leaves:
        _bad(f"{sum(found.leaves)} leaves of {leaves}")
    if n:
        _number(max(found.epoch), "an epoch")
        _number(max(found.covered), "a checkpoint")
    end = 0
    for first, length in sorted(zip(found.first_leaf, found.leaves, strict=True)):
        if not (end <= first and 0 < length <= leaves - first):
            _bad(f"the leaves {first} to {first + length} twice, or out of {leaves}")
        end = first + length
    runs = zip(found.first_leaf, found.leaves, found.epoch, found.covered, strict=True)
    return tuple(
        Grant(range(first, first + length), epoch, covered)
        for first, length, epoch, covered in runs
    )


# ---- Fetch and Stream


def put_fetch(call: FetchCall) -> bytes:
    return _put_leases("FetchRequest", call)


def read_fetch(data: bytes, leaves: int = LEAVES_MAX) -> FetchCall:
    found = fields.read(data, "FetchRequest")
    return FetchCall(*_read_opening(found), _read_leases(found, 3, leaves))


def _put_leases(what: str, call: Any, *more: Field) -> bytes:
    """A message that is about leases of a migration."""
    return _message(
        what,
        (fields.text, 1, call.migration),
        (fields.number, 2, call.generation),
        (fields.column32, 3, [leaf for leaf, _ in call.leases]),
        (fields.column64, 4, [epoch for _, epoch in call.leases]),
        *more,
    )


def _read_opening(found: Fields) -> tuple[str, int]:
    return _name(found.text(1), "a migration"), _number(found.number(2), "a generation")


def put_pick(call: PickCall) -> bytes:
    keys = [key for _, keys in call.keys for key in keys]
    return _put_leases(
        "PickRequest",
        call,
        (fields.texts, 5, [state for state, _ in call.keys]),
        (fields.column32, 6, [len(keys) for _, keys in call.keys]),
        (fields.column32, 7, map(len, keys)),
        (fields.content, 8, b"".join(keys)),
    )


def read_pick(data: bytes, leaves: int = LEAVES_MAX) -> PickCall:
    found = fields.read(data, "PickRequest")
    states, counts, sizes = found.texts(5), found.column32(6), found.column32(7)
    if len(states) > int(lib.SK_STATES_MAX):
        _bad(f"{len(states)} states")
    if len(states) != len(counts) or sum(counts) != len(sizes):
        _bad(f"{len(sizes)} keys of {len(states)} states, which are to have others")
    if len(set(states)) != len(states):
        _bad("a state twice")
    _check_keys(sizes)
    keys = fields.cut(found.content(8), sizes, "PickRequest")
    wanted, at = [], 0
    for state, count in zip(states, counts, strict=True):
        wanted.append((_state_name(state), tuple(keys[at : at + count])))
        at += count
    return PickCall(*_read_opening(found), _read_leases(found, 3, leaves), tuple(wanted))


def put_pick_reply(reply: PickReply) -> bytes:
    return _message(
        "PickReply", (fields.content, 1, reply.blocks), (fields.column32, 2, reply.refused)
    )


def read_pick_reply(data: bytes, leaves: int = LEAVES_MAX) -> PickReply:
    found = fields.read(data, "PickReply")
    refused = found.column32(2)
    if len(refused) > leaves or (refused and max(refused) >= leaves):
        _bad(f"{len(refused)} leaves that are refused, of {leaves}")
    return PickReply(found.content(1), tuple(refused))


def put_pieces(pieces: Sequence[Piece], more: bool = False) -> bytes:
    """One message. The blocks are appended at its end: fields may come in any order."""
    heads = []
    moved: list[str] = []
    fenced: list[int] = []
    parts: list[bytes] = [b""]
    for kind, _, _, blocks, is_last, is_whole, is_delta, _, moved_to, fenced_by in pieces:
        heads.append(kind | is_last << 3 | is_whole << 4 | is_delta << 5)
        parts.append(fields.head(_BLOCKS, len(blocks)))
        parts.append(bytes(blocks))
        if kind is PieceKind.MOVED:
            moved.append(moved_to)
        elif kind is PieceKind.FENCED:
            fenced.append(fenced_by)
    parts[0] = _message(
        "Pieces",
        (fields.column32, 1, heads),
        (fields.column32, 2, [piece.leaf for piece in pieces]),
        (fields.column64, 3, [piece.epoch for piece in pieces]),
        (fields.column64, 4, [piece.bytes_total for piece in pieces]),
        (fields.texts, 6, moved),
        (fields.column64, 7, fenced),
        (fields.number, 8, int(more)),
    )
    return b"".join(parts)


def read_pieces(
    data: bytes, leaves: int = LEAVES_MAX, leaf_bytes: int = NUMBER_MAX
) -> tuple[list[Piece], bool]:
    """The pieces of a message, and whether more leaves were asked for than it holds."""
    found = fields.read(data, "Pieces", parts=_BLOCKS)
    heads, at, epochs, totals = (
        found.column32(1), found.column32(2), found.column64(3), found.column64(4)
    )  # fmt: skip
    blocks, more = found.items(_BLOCKS), bool(found.number(8))
    n = len(heads)
    if not n == len(at) == len(epochs) == len(totals) == len(blocks) or n > ITEMS_MAX:
        _bad("pieces whose columns differ in length")
    if n:
        if max(at) >= leaves:
            _bad(f"leaf {max(at)} of {leaves}")
        _number(max(epochs), "an epoch")
        _number(max(totals), "the bytes of a leaf", leaf_bytes)
    # Blocks keep their message in memory, but only the bytes of blocks are counted. So a message
    # must not have padding.
    if len(data) > sum(map(len, blocks)) + (n + 1) * _PIECE_HEAD_BYTES_MAX:
        _bad(f"{len(data)} bytes for {n} pieces")
    to, generations = iter(found.texts(6)), iter(found.column64(7))
    pieces = []
    for head, leaf, epoch, total, content in zip(heads, at, epochs, totals, blocks, strict=True):
        kind = _KINDS[head & 7] if head < 64 else None
        if kind is None or (content and kind is not PieceKind.HERE):
            _bad(f"a piece of kind {head} with {len(content)} bytes")
        moved_to, fenced_by = "", 0
        if kind is PieceKind.MOVED:
            moved_to = _name(next(to, ""), "a process")
        elif kind is PieceKind.FENCED:
            fenced_by = _number(next(generations, NUMBER_MAX + 1), "a generation")
        flags = _FLAGS[head >> 3]
        pieces.append(_new_piece((kind, leaf, epoch, content, *flags, total, moved_to, fenced_by)))
    if next(to, None) is not None or next(generations, None) is not None:
        _bad("columns of moved or fenced leaves that are too long")
    return pieces, more


def put_stream(call: StreamCall) -> bytes:
    # `first` is only a wish: leaves beyond the limit come in the order that the source chooses.
    return _message(
        "StreamRequest",
        (fields.text, 1, call.migration),
        (fields.number, 2, call.generation),
        (fields.column32, 3, call.first[:ITEMS_MAX]),
    )


def read_stream(data: bytes, leaves: int = LEAVES_MAX) -> StreamCall:
    found = fields.read(data, "StreamRequest")
    first = found.column32(3)
    if len(first) > ITEMS_MAX:
        _bad("too many leaves")
    if first and max(first) >= leaves:
        _bad(f"leaf {max(first)} of {leaves}")
    return StreamCall(*_read_opening(found), tuple(first))


def put_credit(bytes_total: int) -> bytes:
    return _message("StreamRequest", (fields.number, 4, bytes_total))


def read_credit(data: bytes) -> int:
    return _number(fields.read(data, "StreamRequest").number(4), "a credit")


# ---- Shadows


def put_shade(call: ShadeCall) -> bytes:
    return _put(
        pb.ShadeRequest,
        shadow=call.shadow,
        generation=call.generation,
        target=call.target,
        key_groups=_put_ranges(call.key_groups),
        dropped=call.is_dropped,
    )


def read_shade(data: bytes, key_groups: int = KEY_GROUPS_MAX) -> ShadeCall:
    found = _parse(pb.ShadeRequest, data)
    return ShadeCall(
        _name(found.shadow, "a shadow"),
        _number(found.generation, "a generation"),
        _name(found.target, "a target"),
        _read_ranges(found.key_groups, key_groups, "key-groups"),
        found.dropped,
    )


def put_shade_reply(reply: ShadeReply) -> bytes:
    return _put(
        pb.ShadeReply,
        source=reply.source,
        generation=reply.generation,
        key_groups=reply.key_groups,
        subgroups=reply.subgroups,
        description=_put_description(reply.schemas),
        size=reply.bytes,
    )


def read_shade_reply(data: bytes) -> ShadeReply:
    found = _parse(pb.ShadeReply, data)
    _geometry(found.key_groups, found.subgroups)
    description = _read_description(found.description, found.key_groups)
    return ShadeReply(
        _name(found.source, "a source"),
        _number(found.generation, "a generation"),
        found.key_groups,
        found.subgroups,
        description.schemas,
        _number(found.size, "the bytes of leaves"),
    )


def put_copy(call: CopyCall) -> bytes:
    return _message(
        "CopyRequest",
        (fields.text, 1, call.shadow),
        (fields.number, 2, call.generation),
        (fields.column32, 3, [leaf for leaf, _ in call.leases]),
        (fields.column64, 4, [epoch for _, epoch in call.leases]),
        (fields.number, 5, call.round),
        (fields.number, 6, call.pace),
    )


def read_copy(data: bytes, leaves: int = LEAVES_MAX) -> CopyCall:
    found = fields.read(data, "CopyRequest")
    return CopyCall(
        _name(found.text(1), "a shadow"),
        _number(found.number(2), "a generation"),
        _read_leases(found, 3, leaves),
        _number(found.number(5), "a round"),
        _number(found.number(6), "a pace"),
    )


# ---- Leases


def put_leases(call: InstalledCall | GiveBackCall) -> bytes:
    return _put_leases("LeasesRequest", call)


def read_leases(data: bytes, kind: type[C], leaves: int = LEAVES_MAX) -> C:
    found = fields.read(data, "LeasesRequest")
    return kind(*_read_opening(found), _read_leases(found, 3, leaves))


def put_released(leases: Leases) -> bytes:
    return _message(
        "LeasesReply",
        (fields.column32, 1, [leaf for leaf, _ in leases]),
        (fields.column64, 2, [epoch for _, epoch in leases]),
    )


def read_released(data: bytes, leaves: int = LEAVES_MAX) -> Leases:
    return _read_leases(fields.read(data, "LeasesReply"), 1, leaves)


# ---- Propose, Query, Scan, Figures


def put_propose(call: ProposeCall) -> bytes:
    return _put(
        pb.ProposeRequest,
        migration=call.migration,
        generation=call.generation,
        address=call.address,
        key_groups=_put_ranges(call.key_groups),
        strategy=call.strategy,
    )


def read_propose(data: bytes, key_groups: int = KEY_GROUPS_MAX) -> ProposeCall:
    found = _parse(pb.ProposeRequest, data)
    return ProposeCall(
        _name(found.migration, "a migration"),
        _number(found.generation, "a generation"),
        _name(found.address, "an address", 2 * NAME_CHARS_MAX),
        _read_ranges(found.key_groups, key_groups, "key-groups"),
        _name(found.strategy, "a strategy"),
    )


def put_query(call: QueryCall) -> bytes:
    return _message("QueryRequest", (fields.text, 1, call.state), (fields.items, 2, call.keys))


def read_query(data: bytes) -> QueryCall:
    found = fields.read(data, "QueryRequest")
    keys = found.items(2)
    _check_keys([*map(len, keys)])
    return QueryCall(_state_name(found.text(1)), tuple(keys))


def put_query_reply(reply: QueryReply) -> bytes:
    return _message(
        "QueryReply",
        (fields.content, 1, _put_description([reply.schema])),
        (fields.content, 2, bytes(value is not None for value in reply.values)),
        (fields.items, 3, [value for value in reply.values if value is not None]),
    )


def read_query_reply(data: bytes, keys: int) -> QueryReply:
    """The answer to a question about this number of keys."""
    found = fields.read(data, "QueryReply")
    marks, values = found.content(2), found.items(3)
    if len(marks) != keys or marks.count(1) + marks.count(0) != keys:
        _bad(f"answers for {len(marks)} of {keys} keys")
    if marks.count(1) != len(values):
        _bad(f"{len(values)} values for {marks.count(1)} keys")
    schemas = _read_description(found.content(1), 0).schemas
    if len(schemas) != 1:
        _bad(f"{len(schemas)} states where one was asked for")
    rest = iter(values)
    return QueryReply(schemas[0], tuple(next(rest) if is_there else None for is_there in marks))


def put_scan(call: ScanCall) -> bytes:
    return _put(pb.ScanRequest, key_groups=_put_ranges(call.key_groups))


def read_scan(data: bytes, key_groups: int = KEY_GROUPS_MAX) -> ScanCall:
    found = _parse(pb.ScanRequest, data)
    return ScanCall(_read_ranges(found.key_groups, key_groups, "key-groups"))


def put_figures(figures: dict[str, Any]) -> bytes:
    text = json.dumps(figures, allow_nan=False, separators=(",", ":"))
    return _put(pb.FiguresReply, figures=text.encode())


def read_figures(data: bytes) -> dict[str, Any]:
    try:
        figures = json.loads(_parse(pb.FiguresReply, data).figures.decode())
    except (ValueError, RecursionError):
        _bad("figures that are no JSON")
    if not isinstance(figures, dict):
        _bad("figures that are no JSON object")
    return figures


DONE: bytes = pb.Done().SerializeToString()


def _put(message: type[Message], **values: Any) -> bytes:
    """A message that this process sends: if a value does not fit, that is the caller's mistake."""
    try:
        data: bytes = message(**values).SerializeToString()
    except (TypeError, ValueError) as error:
        raise _unfit(message.__name__, error) from None
    return data


def _message(what: str, *parts: Field) -> bytes:
    """The same without protobuf. Each part is a field: how it is written, its number, its value."""
    try:
        return b"".join([write(field, value) for write, field, value in parts])
    except (TypeError, ValueError, OverflowError) as error:
        raise _unfit(what, error) from None


def _unfit(what: str, error: Exception) -> ArgumentError:
    return ArgumentError(
        f"{what} cannot be sent: {error}. "
        f"Numbers must be 0 to {NUMBER_MAX}, leaves below {LEAVES_MAX}, and texts UTF-8."
    )


# ---- Errors

ERROR_KEY = "statekit-error-bin"  # the key of an error in the metadata that ends an answer
_ERROR_CHARS_MAX = 2000  # gRPC refuses metadata above 8 KB
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "state": str, "record": int, "status": int, "peer": str, "leaf": int, "seconds": (float, int),
    "file": str, "offset": int,
}  # fmt: skip
_CLASSES: dict[str, type[StateKitError]] = {
    name: found
    for name in errors.__all__
    if isinstance(found := getattr(errors, name), type) and issubclass(found, StateKitError)
}


def put_error(error: StateKitError) -> bytes:
    """An error as JSON: its class, message and plain fields. Its key, user data, is not sent."""
    known = next(cls for cls in type(error).__mro__ if cls.__name__ in _CLASSES)
    fields = {
        name: value
        for name, kind in _FIELDS.items()
        if isinstance(value := getattr(error, name, None), kind) and value
    }
    message = str(error)
    if len(message) > _ERROR_CHARS_MAX:
        message = f"{message[:_ERROR_CHARS_MAX]}..."
    return json.dumps({"class": known.__name__, "message": message, **fields}).encode()


def read_error(data: bytes) -> StateKitError:
    """The same error, of a class that errors.py has. PeerError if it cannot be read."""
    try:
        found = json.loads(data.decode())
        cls, message = _CLASSES[found["class"]], found["message"]
        if not isinstance(message, str):
            raise TypeError("no text")
        message = message[: 2 * _ERROR_CHARS_MAX]
    except (ValueError, KeyError, TypeError, RecursionError):
        return PeerError("the peer told of an error that cannot be read. Look into its log.")
    error: StateKitError
    if cls is UnknownEntryError:
        error = UnknownEntryError(message, state=str(found.get("state", "")), keys=tuple)
    else:
        error = cls(message)
    for name, kind in _FIELDS.items():
        value = found.get(name)
        if isinstance(value, kind) and not isinstance(value, bool):
            setattr(error, name, value)
    return error
