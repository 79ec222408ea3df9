from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "name", "incarnation", "version", "generation", "key_groups", "subgroups", "description")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SUBGROUPS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    incarnation: str
    version: str
    generation: int
    key_groups: int
    subgroups: int
    description: bytes
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., incarnation: _Optional[str] = ..., version: _Optional[str] = ..., generation: _Optional[int] = ..., key_groups: _Optional[int] = ..., subgroups: _Optional[int] = ..., description: _Optional[bytes] = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("migration", "generation", "target", "key_groups", "barrier", "base", "above", "inline_bytes", "shadow", "held_leaf", "held_epoch")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    KEY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    HELD_LEAF_FIELD_NUMBER: _ClassVar[int]
    HELD_EPOCH_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    target: str
    key_groups: _containers.RepeatedScalarFieldContainer[int]
    barrier: int
    base: bytes
    above: int
    inline_bytes: int
    shadow: str
    held_leaf: _containers.RepeatedScalarFieldContainer[int]
    held_epoch: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, migration: _Optional[str] = ..., generation: _Optional[int] = ..., target: _Optional[str] = ..., key_groups: _Optional[_Iterable[int]] = ..., barrier: _Optional[int] = ..., base: _Optional[bytes] = ..., above: _Optional[int] = ..., inline_bytes: _Optional[int] = ..., shadow: _Optional[str] = ..., held_leaf: _Optional[_Iterable[int]] = ..., held_epoch: _Optional[_Iterable[int]] = ...) -> None: ...

class BeginReply(_message.Message):
    __slots__ = ("migration", "generation", "sequence", "source", "first_leaf", "leaves", "epoch", "covered", "sizes", "barrier", "key_groups", "subgroups", "description", "timer_leaves", "based", "pieces", "timer_dues")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_LEAF_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COVERED_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    KEY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SUBGROUPS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TIMER_LEAVES_FIELD_NUMBER: _ClassVar[int]
    BASED_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    TIMER_DUES_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    sequence: int
    source: str
    first_leaf: _containers.RepeatedScalarFieldContainer[int]
    leaves: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    covered: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    barrier: int
    key_groups: int
    subgroups: int
    description: bytes
    timer_leaves: _containers.RepeatedScalarFieldContainer[int]
    based: bool
    pieces: bytes
    timer_dues: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, migration: _Optional[str] = ..., generation: _Optional[int] = ..., sequence: _Optional[int] = ..., source: _Optional[str] = ..., first_leaf: _Optional[_Iterable[int]] = ..., leaves: _Optional[_Iterable[int]] = ..., epoch: _Optional[_Iterable[int]] = ..., covered: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., barrier: _Optional[int] = ..., key_groups: _Optional[int] = ..., subgroups: _Optional[int] = ..., description: _Optional[bytes] = ..., timer_leaves: _Optional[_Iterable[int]] = ..., based: _Optional[bool] = ..., pieces: _Optional[bytes] = ..., timer_dues: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("migration", "generation", "leaf", "epoch")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    leaf: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, migration: _Optional[str] = ..., generation: _Optional[int] = ..., leaf: _Optional[_Iterable[int]] = ..., epoch: _Optional[_Iterable[int]] = ...) -> None: ...

class PickRequest(_message.Message):
    __slots__ = ("migration", "generation", "leaf", "epoch", "state", "keys", "key_bytes", "key_data")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    leaf: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    state: _containers.RepeatedScalarFieldContainer[str]
    keys: _containers.RepeatedScalarFieldContainer[int]
    key_bytes: _containers.RepeatedScalarFieldContainer[int]
    key_data: bytes
    def __init__(self, migration: _Optional[str] = ..., generation: _Optional[int] = ..., leaf: _Optional[_Iterable[int]] = ..., epoch: _Optional[_Iterable[int]] = ..., state: _Optional[_Iterable[str]] = ..., keys: _Optional[_Iterable[int]] = ..., key_bytes: _Optional[_Iterable[int]] = ..., key_data: _Optional[bytes] = ...) -> None: ...

class PickReply(_message.Message):
    __slots__ = ("blocks", "refused")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    refused: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks: _Optional[bytes] = ..., refused: _Optional[_Iterable[int]] = ...) -> None: ...

class Pieces(_message.Message):
    __slots__ = ("head", "leaf", "epoch", "bytes_total", "blocks", "to", "generation", "more")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    head: _containers.RepeatedScalarFieldContainer[int]
    leaf: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    bytes_total: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    to: _containers.RepeatedScalarFieldContainer[str]
    generation: _containers.RepeatedScalarFieldContainer[int]
    more: bool
    def __init__(self, head: _Optional[_Iterable[int]] = ..., leaf: _Optional[_Iterable[int]] = ..., epoch: _Optional[_Iterable[int]] = ..., bytes_total: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[bytes]] = ..., to: _Optional[_Iterable[str]] = ..., generation: _Optional[_Iterable[int]] = ..., more: _Optional[bool] = ...) -> None: ...

class StreamRequest(_message.Message):
    __slots__ = ("migration", "generation", "first", "bytes_total")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    first: _containers.RepeatedScalarFieldContainer[int]
    bytes_total: int
    def __init__(self, migration: _Optional[str] = ..., generation: _Optional[int] = ..., first: _Optional[_Iterable[int]] = ..., bytes_total: _Optional[int] = ...) -> None: ...

class ShadeRequest(_message.Message):
    __slots__ = ("shadow", "generation", "target", "key_groups", "dropped")
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    KEY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    shadow: str
    generation: int
    target: str
    key_groups: _containers.RepeatedScalarFieldContainer[int]
    dropped: bool
    def __init__(self, shadow: _Optional[str] = ..., generation: _Optional[int] = ..., target: _Optional[str] = ..., key_groups: _Optional[_Iterable[int]] = ..., dropped: _Optional[bool] = ...) -> None: ...

class ShadeReply(_message.Message):
    __slots__ = ("source", "generation", "key_groups", "subgroups", "description", "size")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SUBGROUPS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    source: str
    generation: int
    key_groups: int
    subgroups: int
    description: bytes
    size: int
    def __init__(self, source: _Optional[str] = ..., generation: _Optional[int] = ..., key_groups: _Optional[int] = ..., subgroups: _Optional[int] = ..., description: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("shadow", "generation", "leaf", "epoch", "round", "pace")
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    shadow: str
    generation: int
    leaf: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    round: int
    pace: int
    def __init__(self, shadow: _Optional[str] = ..., generation: _Optional[int] = ..., leaf: _Optional[_Iterable[int]] = ..., epoch: _Optional[_Iterable[int]] = ..., round: _Optional[int] = ..., pace: _Optional[int] = ...) -> None: ...

class LeasesRequest(_message.Message):
    __slots__ = ("migration", "generation", "leaf", "epoch")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    leaf: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, migration: _Optional[str] = ..., generation: _Optional[int] = ..., leaf: _Optional[_Iterable[int]] = ..., epoch: _Optional[_Iterable[int]] = ...) -> None: ...

class LeasesReply(_message.Message):
    __slots__ = ("leaf", "epoch")
    LEAF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    leaf: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leaf: _Optional[_Iterable[int]] = ..., epoch: _Optional[_Iterable[int]] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("migration", "generation", "address", "key_groups", "strategy")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    address: str
    key_groups: _containers.RepeatedScalarFieldContainer[int]
    strategy: str
    def __init__(self, migration: _Optional[str] = ..., generation: _Optional[int] = ..., address: _Optional[str] = ..., key_groups: _Optional[_Iterable[int]] = ..., strategy: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("state", "key")
    STATE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    state: str
    key: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, state: _Optional[str] = ..., key: _Optional[_Iterable[bytes]] = ...) -> None: ...

class QueryReply(_message.Message):
    __slots__ = ("description", "found", "value")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    description: bytes
    found: _containers.RepeatedScalarFieldContainer[bool]
    value: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, description: _Optional[bytes] = ..., found: _Optional[_Iterable[bool]] = ..., value: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("key_groups",)
    KEY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    key_groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key_groups: _Optional[_Iterable[int]] = ...) -> None: ...

class FiguresRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FiguresReply(_message.Message):
    __slots__ = ("figures",)
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    figures: bytes
    def __init__(self, figures: _Optional[bytes] = ...) -> None: ...
