"""The calls between processes as plain data, and PeerService: what answers them.

Leaves travel as the blocks that checkpoints hold, byte for byte, in Pieces. A leaf above
CHUNK_BYTES is cut into several Pieces, in order; joined, their `blocks` are the leaf. Every call
may be repeated: the same call said twice has its effect once.
"""

from array import array
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from statekit.errors import ArgumentError
from statekit.native.buffers import BufferSlice
from statekit.protocol.messages import Offer
from statekit.schema import StateSchema

PROTOCOL = 1  # the version of the wire; peers of different versions refuse each other

# Bytes of one Piece. Larger ones do not make a stream faster, and each is copied several times.
CHUNK_BYTES = 1024 * 1024
RANGES_MAX = 65536  # of leaves or key-groups, in one message


class Limits(NamedTuple):
    """What a peer may make this process hold, and for how long.

    A server needs `threads + 2 * streams` threads at most, and `calls * message_bytes` of memory
    for what it is sent. A peer that has not shown its token may not send anything.
    """

    message_bytes: int = 8 << 20  # one message, either way
    leaf_bytes: int = 1 << 30  # one leaf, in all its pieces
    streams: int = 64  # calls at once that send many messages: background streams, large leaves
    calls: int = 256  # calls at once in all; further ones are told to come again
    connections: int = 256  # at once; more are closed
    threads: int = 8  # for all calls that send one message: streams cannot use these threads
    call_s: float = 30.0  # a peer that neither sends nor takes anything for this long is cut off
    idle_s: float = 5.0  # a connection without calls is closed after this; the next call opens one

    def check(self) -> "Limits":
        """Returns itself. ArgumentError if no server could work with these limits."""
        least = Limits(2 * CHUNK_BYTES, 1, 1, 1, 1, 1, 0.001, 0.001)
        for name, value, bound in zip(self._fields, self, least, strict=True):
            if not value >= bound:
                raise ArgumentError(f"Limits.{name} is {value}; it must be {bound} at least.")
        return self


class PeerHello(NamedTuple):
    """Who answers, and what it has."""

    name: str
    incarnation: str  # another one after each start
    generation: int
    key_groups: int
    subgroups: int
    owned: tuple[range, ...]  # key-groups
    schemas: tuple[StateSchema, ...]
    version: str  # of statekit there
    protocol: int = PROTOCOL
    watermark: int | None = None  # event time there


class BeginCall(NamedTuple):
    """Target: hand these key-groups over to me."""

    migration: str
    generation: int
    target: str
    key_groups: tuple[range, ...]
    barrier: int  # the last checkpoint the target has taken
    base: bytes = b""  # the digest of a checkpoint that the target can read; b"" if none
    above: int = 0  # the highest epoch at which the target has ever had one of these leaves
    inline_bytes: int = 0  # so many bytes of blocks may come with the offer
    shadow: str = ""  # a shadow of these leaves; "" if there is none
    held: tuple[tuple[int, int], ...] = ()  # leaf, epoch of the source's store: what it has


class BeginReply(NamedTuple):
    offer: Offer
    barrier: int  # the last checkpoint the source has taken
    schemas: tuple[StateSchema, ...]
    key_groups: int
    subgroups: int
    watermark: int | None
    timer_leaves: tuple[range, ...]  # leaves with timers: to be fetched early, or timers are late
    sizes: "array[int]"  # 'Q': about how many bytes each leaf has, in the order of the grants
    based: bool  # True: only what changed since the base comes
    pieces: "tuple[Piece, ...]" = ()  # leaves that come with the offer
    #: 'q', by leaf of timer_leaves: no timer of it is due earlier. Empty: that is not known.
    timer_dues: "array[int]" = array("q")


class FetchCall(NamedTuple):
    """Target: these leaves, now."""

    migration: str
    generation: int
    leases: tuple[tuple[int, int], ...]  # leaf, epoch


class PickCall(NamedTuple):
    """Target: single entries of leaves, before the rest of these leaves."""

    migration: str
    generation: int
    leases: tuple[tuple[int, int], ...]  # leaf, epoch
    keys: tuple[tuple[str, tuple[bytes, ...]], ...]  # state, encoded keys


class PickReply(NamedTuple):
    """The entries as blocks, each over all leaves at once (csrc/pick.c), bound to ENTRIES_PLACE."""

    blocks: bytes
    refused: tuple[int, ...]  # leaves of which nothing is in the blocks: fetch() tells why


class PieceKind(IntEnum):
    """The answers about a leaf: see the messages of these names in protocol/messages.py."""

    HERE = 1
    MOVED = 2
    IN_TRANSIT = 3
    NEVER = 4
    FENCED = 5
    ROUND = 6  # all copies of a round were sent: so many (bytes_total), as of this epoch


class Piece(NamedTuple):
    """A leaf or a part of it (HERE), or why it is not here."""

    kind: PieceKind
    leaf: int
    epoch: int
    blocks: bytes | BufferSlice = b""  # a BufferSlice is a part of the message that came
    is_last: bool = True  # of this leaf
    is_whole: bool = True  # the pieces together are all that the leaf has
    is_delta: bool = False  # they are what changed since the base
    bytes_total: int = 0  # of the blocks of all pieces of the leaf
    to: str = ""  # MOVED: where to
    generation: int = 0  # FENCED: the one that has begun


class StreamCall(NamedTuple):
    """Target: send all the rest, as far as I give credit."""

    migration: str
    generation: int
    first: tuple[int, ...] = ()  # these leaves before all others, in this order


class ShadeCall(NamedTuple):
    """Target: I shadow these key-groups. Or I do not any more."""

    shadow: str
    generation: int
    target: str
    key_groups: tuple[range, ...]
    is_dropped: bool = False


class ShadeReply(NamedTuple):
    source: str  # this life of it: epochs of its store mean something in this life only
    generation: int
    key_groups: int
    subgroups: int
    schemas: tuple[StateSchema, ...]
    bytes: int  # about how large the leaves are in memory


class CopyCall(NamedTuple):
    """Target: send what has changed in these leaves since these epochs; of 0, all of the leaf."""

    shadow: str
    generation: int
    leases: tuple[tuple[int, int], ...]  # leaf, epoch of the source's store
    round: int
    pace: int = 0  # bytes a second; 0: the source chooses


class InstalledCall(NamedTuple):
    migration: str
    generation: int
    leases: tuple[tuple[int, int], ...]  # leaf, epoch


class GiveBackCall(NamedTuple):
    migration: str
    generation: int
    leases: tuple[tuple[int, int], ...]  # leaf, epoch


class ProposeCall(NamedTuple):
    """Source: come and fetch these key-groups from me."""

    migration: str
    generation: int
    address: str  # where the source serves
    key_groups: tuple[range, ...]
    strategy: str


class QueryCall(NamedTuple):
    """Anybody: what is under these encoded keys? Reads only."""

    state: str
    keys: tuple[bytes, ...]


class QueryReply(NamedTuple):
    schema: StateSchema
    values: tuple[bytes | None, ...]  # as State.get_encoded() gives them; None: no such key


class ScanCall(NamedTuple):
    """Anybody: all that these key-groups hold, as it is at one moment. Reads only."""

    key_groups: tuple[range, ...]


class PeerService(Protocol):
    """What answers a server's calls. Called in threads of the server, several at once.

    A StateKitError is sent to the peer as it is, and raised there. Any other exception is logged,
    and the peer is told that something went wrong.
    """

    def hello(self) -> PeerHello: ...

    def begin(self, call: BeginCall) -> BeginReply: ...

    def fetch(self, call: FetchCall) -> Iterator[Piece]:
        """The pieces of each lease, in the order of the leases. May be closed before the end."""

    def pick(self, call: PickCall) -> PickReply:
        """Entries of leaves that are offered. Of all other leaves it only gives the numbers."""

    def stream(
        self,
        call: StreamCall,
        credits: Iterator[int],  # noqa: A002
        /,
    ) -> Iterator[Piece]:
        """The pieces of one leaf after the other. It runs in a thread of its own.

        credits: how many bytes of blocks may be sent in all. The number grows: next() waits for
        more, and ends (StopIteration) when the target has gone or wants no more.
        """

    def shade(self, call: ShadeCall) -> ShadeReply: ...

    def copy(self, call: CopyCall) -> Iterator[Piece]:
        """The pieces of leaves that have changed, and a ROUND. It runs in a thread of its own."""

    def installed(self, call: InstalledCall) -> tuple[tuple[int, int], ...]:
        """The leases (leaf, epoch) that are released."""

    def give_back(self, call: GiveBackCall) -> None: ...

    def propose(self, call: ProposeCall) -> None: ...

    def query(self, call: QueryCall) -> QueryReply: ...

    def scan(self, call: ScanCall) -> Iterator[Piece]:
        """The pieces of each leaf that has entries. It runs in a thread of its own."""

    def figures(self) -> dict[str, Any]:
        """Metrics, as JSON can hold them."""
