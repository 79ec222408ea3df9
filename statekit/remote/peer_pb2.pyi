from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf.internal import containers as _containers

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: int | None = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("description", "generation", "incarnation", "key_groups", "name", "protocol", "subgroups", "version")
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
    def __init__(self, protocol: int | None = ..., name: str | None = ..., incarnation: str | None = ..., version: str | None = ..., generation: int | None = ..., key_groups: int | None = ..., subgroups: int | None = ..., description: bytes | None = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("barrier", "base_number", "base_url", "generation", "key_groups", "migration", "target")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    KEY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    BASE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    target: str
    key_groups: _containers.RepeatedScalarFieldContainer[int]
    barrier: int
    base_url: str
    base_number: int
    def __init__(self, migration: str | None = ..., generation: int | None = ..., target: str | None = ..., key_groups: _Iterable[int] | None = ..., barrier: int | None = ..., base_url: str | None = ..., base_number: int | None = ...) -> None: ...

class BeginReply(_message.Message):
    __slots__ = ("barrier", "based", "covered", "description", "epoch", "first_leaf", "generation", "key_groups", "leaves", "migration", "sequence", "sizes", "source", "subgroups", "timer_leaves")
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
    def __init__(self, migration: str | None = ..., generation: int | None = ..., sequence: int | None = ..., source: str | None = ..., first_leaf: _Iterable[int] | None = ..., leaves: _Iterable[int] | None = ..., epoch: _Iterable[int] | None = ..., covered: _Iterable[int] | None = ..., sizes: _Iterable[int] | None = ..., barrier: int | None = ..., key_groups: int | None = ..., subgroups: int | None = ..., description: bytes | None = ..., timer_leaves: _Iterable[int] | None = ..., based: bool = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("epoch", "generation", "key", "key_state", "leaf", "migration", "states")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    KEY_STATE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    leaf: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    states: _containers.RepeatedScalarFieldContainer[str]
    key_state: _containers.RepeatedScalarFieldContainer[str]
    key: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, migration: str | None = ..., generation: int | None = ..., leaf: _Iterable[int] | None = ..., epoch: _Iterable[int] | None = ..., states: _Iterable[str] | None = ..., key_state: _Iterable[str] | None = ..., key: _Iterable[bytes] | None = ...) -> None: ...

class Pieces(_message.Message):
    __slots__ = ("blocks", "bytes_total", "epoch", "generation", "head", "leaf", "more", "to")
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
    def __init__(self, head: _Iterable[int] | None = ..., leaf: _Iterable[int] | None = ..., epoch: _Iterable[int] | None = ..., bytes_total: _Iterable[int] | None = ..., blocks: _Iterable[bytes] | None = ..., to: _Iterable[str] | None = ..., generation: _Iterable[int] | None = ..., more: bool = ...) -> None: ...

class StreamRequest(_message.Message):
    __slots__ = ("bytes_total", "first", "generation", "migration")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    first: _containers.RepeatedScalarFieldContainer[int]
    bytes_total: int
    def __init__(self, migration: str | None = ..., generation: int | None = ..., first: _Iterable[int] | None = ..., bytes_total: int | None = ...) -> None: ...

class LeasesRequest(_message.Message):
    __slots__ = ("epoch", "generation", "leaf", "migration")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    leaf: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, migration: str | None = ..., generation: int | None = ..., leaf: _Iterable[int] | None = ..., epoch: _Iterable[int] | None = ...) -> None: ...

class LeasesReply(_message.Message):
    __slots__ = ("epoch", "leaf")
    LEAF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    leaf: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leaf: _Iterable[int] | None = ..., epoch: _Iterable[int] | None = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("address", "base_number", "base_url", "generation", "key_groups", "migration", "strategy")
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    BASE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    migration: str
    generation: int
    address: str
    key_groups: _containers.RepeatedScalarFieldContainer[int]
    strategy: str
    base_url: str
    base_number: int
    def __init__(self, migration: str | None = ..., generation: int | None = ..., address: str | None = ..., key_groups: _Iterable[int] | None = ..., strategy: str | None = ..., base_url: str | None = ..., base_number: int | None = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("key", "state")
    STATE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    state: str
    key: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, state: str | None = ..., key: _Iterable[bytes] | None = ...) -> None: ...

class QueryReply(_message.Message):
    __slots__ = ("description", "found", "value")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    description: bytes
    found: _containers.RepeatedScalarFieldContainer[bool]
    value: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, description: bytes | None = ..., found: _Iterable[bool] | None = ..., value: _Iterable[bytes] | None = ...) -> None: ...

class FiguresRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FiguresReply(_message.Message):
    __slots__ = ("figures",)
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    figures: bytes
    def __init__(self, figures: bytes | None = ...) -> None: ...
