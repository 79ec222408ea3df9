"""Settings: the knobs of a job. A TOML file may set them (loading.py).

[settings]
grace_ms = 2_000
batch_rows = 1_000
batch_timeout_ms = 5
"""

from typing import Literal

import msgspec

from statekit.engine.channel import WINDOW
from statekit.engine.strategies import DEFAULT, How
from statekit.errors import EngineError


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    watermark_interval_ms: int = 200  # between two watermarks of a source; 0: after each batch
    grace_ms: int = 0  # how much earlier than the latest a record may be
    buffer_bytes: int = WINDOW  # of a channel: how far a sender may be ahead of its receiver
    batch_rows: int = 0  # a sender collects so many records for a receiver; 0: it collects none
    batch_timeout_ms: float = 5.0  # but for no longer than this
    state: Literal["memory", "rocksdb"] = "memory"  # where state lives
    state_memory: str = "64MiB"  # of a task whose state is in RocksDB
    strategy: str = DEFAULT  # of a rescale that names none
    is_fixed: bool = False  # no stage is ever rescaled: tasks do not serve their state
    checkpoint_every_s: float = 10.0  # of `statekit run`, unless it is told; 0: none is taken

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{name} = {value}: pass 0 or more")
        if self.buffer_bytes < 1 << 10:
            raise ValueError(f"buffer_bytes = {self.buffer_bytes}: pass at least 1024")
        try:
            How(self.strategy).check()
        except EngineError as error:
            raise ValueError(str(error).rstrip(".")) from None
