"""Settings: the knobs of a job. A TOML file may set them (loading.py).

[settings]
grace_ms = 2_000
batch_rows = 1_000
batch_timeout_ms = 5
"""

import msgspec

#: Names and what they are, for errors: every other knob is a whole number that is not negative.
_TEXTS = ("state", "strategy")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    watermark_interval_ms: int = 200  # between two watermarks of a source; 0: after each batch
    grace_ms: int = 0  # how much earlier than the latest a record may be
    buffer_bytes: int = 4 << 20  # of a channel: how far a sender may be ahead of its receiver
    batch_rows: int = 0  # a sender collects so many records for a receiver; 0: it collects none
    batch_timeout_ms: float = 5.0  # but for no longer than this
    state: str = "memory:"  # where state lives: "memory:", or "rocksdb:/folder?memory=64MiB"
    strategy: str = "prioritised"  # of a rescale that names none
    checkpoint_every_s: float = 10.0  # of `statekit run`; 0: none is taken

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name not in _TEXTS and value < 0:
                raise ValueError(f"{name} = {value}: pass 0 or more")
        if self.buffer_bytes < 1 << 10:
            raise ValueError(f"buffer_bytes = {self.buffer_bytes}: pass at least 1024")
