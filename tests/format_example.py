"""Writes the worked example of docs/format.md: a tiny checkpoint, every byte with its meaning.

    python tests/format_example.py          prints it
    python tests/format_example.py --write  puts it into docs/format.md

Two checkpoints of one state "n" (value of int under str keys) with one leaf. The first is full: a
to e are 1 to 5. Before the second, a was deleted and b became 7: it is a delta on top of the first.
"""

import struct
import sys
from pathlib import Path

from statekit import Store
from statekit.format.manifest import Manifest, PackRef, Segment
from statekit.format.pack import PackBuilder
from statekit.schema import StateSchema

PAGE = Path(__file__).resolve().parent.parent / "docs" / "format.md"
BEGIN, END = "<!-- example: begin -->\n", "<!-- example: end -->\n"

_HEX_WIDTH = 16  # bytes a line


def checkpoints() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of the first checkpoint, and those that the second adds."""
    store = Store(1, 1)
    state = store.state("n", "i64")
    state.put_many(["a", "b", "c", "d", "e"], [1, 2, 3, 4, 5])
    first = _write(1, store.encode_leaf(0), (), ())
    epoch = store.advance_epoch()
    store.track(epoch)
    state.delete("a")
    state.put("b", 7)
    old = Manifest.decode(first["000000000001.manifest"], "000000000001.manifest")
    second = _write(2, store.encode_leaf(0, since=epoch), old.packs, tuple(old.segments))
    return first, second


def _write(
    number: int, blocks: bytes, packs: tuple[PackRef, ...], chain: tuple[Segment, ...]
) -> dict[str, bytes]:
    builder = PackBuilder(number)
    builder.add(0, blocks)
    ref, parts, (segment,) = builder.finish()
    manifest = Manifest(
        number=number,
        key_groups=1,
        subgroups=1,
        owned=(range(1),),
        schemas=(StateSchema("n", "value", "s", "int"),),
        base=number - 1 or None,
        packs=(*packs, ref),
        segments=[*chain, segment._replace(pack=len(packs), is_delta=bool(chain))],  # type: ignore
    )
    return {ref.name: b"".join(parts), manifest.name: manifest.encode()}


class Listing:
    """Bytes from the first to the last, each with what it means."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.lines: list[str] = []

    def title(self, text: str) -> None:
        self.lines.append(f"        {text}")

    def show(self, length: int, meaning: str) -> None:
        piece = self.data[self.at : self.at + length]
        assert len(piece) == length
        for start in range(0, length, _HEX_WIDTH):
            row = piece[start : start + _HEX_WIDTH].hex(" ")
            note = meaning if start == 0 else ""
            self.lines.append(f"{self.at + start:5}   {row:{3 * _HEX_WIDTH}} {note}".rstrip())
        self.at += length

    def number(self, code: str, meaning: str) -> int:
        length = struct.calcsize(code)
        value: int = struct.unpack_from(f"<{code}", self.data, self.at)[0]
        self.show(length, f"{meaning}: {value}")
        return value

    def align(self) -> None:
        if self.at % 8:
            self.show(8 - self.at % 8, "padding")

    def text(self) -> str:
        assert self.at == len(self.data), "every byte is explained"
        return "\n".join(self.lines) + "\n"


def list_pack(data: bytes) -> str:
    out = Listing(data)
    out.show(8, 'magic "SKPACK1", zero')
    out.show(16, "id: the name of the file")
    out.number("I", "format version")
    out.show(4, "CRC32C of bytes 0 .. 28")
    out.number("Q", "number of the checkpoint that wrote it")
    out.show(24, "zero")
    out.title("the only frame: a block")
    list_block(out)
    return out.text()


def list_block(out: Listing) -> None:
    out.show(4, 'magic "SKB1"')
    out.show(4, "checksum, bound to this pack and to offset 64")
    out.number("Q", "size of the frame")
    entries = out.number("Q", "entries")
    key_bytes = out.number("Q", "bytes of keys")
    value_bytes = out.number("Q", "bytes of values")
    out.number("I", "leaf")
    out.number("B", "leaf_bits")
    out.number("B", "kind, i64")
    flags = out.number("B", "flags")
    out.number("B", "key width")
    out.number("B", "block version")
    name = out.number("B", "length of the name")
    key_type = out.number("B", "length of the key type")
    out.show(5, "zero")
    out.show(name, 'name: "n"')
    out.show(key_type, 'key type: "s"')
    out.align()
    hashes_at = out.at
    keys_at = hashes_at + 8 * entries + 4 * (entries + 1)
    keys_at += -keys_at % 8
    keys = list(out.data[keys_at : keys_at + key_bytes].decode())  # all have one byte
    for key in keys:
        out.show(8, f'hash of "{key}"')
    for _ in range(entries + 1):
        out.number("I", "key offset")
    out.align()
    for key in keys:
        out.show(1, f'key "{key}"')
    out.align()
    if flags & 1:
        for key in keys:
            mark = out.data[out.at]
            out.show(1, f'mark of "{key}": {mark}, {"deletion" if mark else "entry"}')
        out.align()
    assert out.at + value_bytes == len(out.data)
    for key in keys:
        out.number("q", f'value of "{key}"')


def list_manifest(data: bytes) -> str:
    out = Listing(data)
    out.show(8, 'magic "SKMANIF1"')
    out.show(4, "CRC32C of bytes 12 .. size")
    out.number("I", "format version")
    out.number("Q", "size of the file")
    out.number("Q", "number of the checkpoint")
    out.number("I", "key-groups")
    out.number("I", "sub-groups")
    packs = out.number("I", "packs")
    segments = out.number("I", "segments")
    described = out.number("Q", "bytes of the description")
    out.show(8, "zero")
    out.title("description")
    text = data[64 : 64 + described].decode()
    for start in range(0, described, _HEX_WIDTH):
        piece = text[start : start + _HEX_WIDTH]
        out.show(len(piece), piece)
    out.align()
    for pack in range(packs):
        out.title(f"pack {pack}")
        out.show(16, "id")
        out.number("Q", "size of the file")
        out.number("Q", "number of the checkpoint that wrote it")
    for segment in range(segments):
        out.title(f"segment {segment}")
        out.number("I", "leaf")
        out.number("I", "pack")
        out.number("Q", "offset")
        out.number("Q", "length")
        out.number("I", "flags")
        out.show(4, "zero")
    return out.text()


def example() -> str:
    """The section of the page, between its two marks."""
    parts = []
    for number, files in enumerate(checkpoints(), 1):
        for name, data in files.items():
            listing = list_pack(data) if name.endswith(".pack") else list_manifest(data)
            what = "a full one" if number == 1 else "a delta on top of the first"
            parts.append(f"Checkpoint {number}, {what}: `{name}`, {len(data)} bytes\n")
            parts.append(f"```\n{listing}```\n")
    return "\n".join(parts)


def split_page(page: str) -> tuple[str, str, str]:
    """The page in three parts: before the example, the example, after it."""
    head, rest = page.split(BEGIN)
    body, tail = rest.split(END)
    return head + BEGIN, body, END + tail


if __name__ == "__main__":
    if "--write" in sys.argv:
        head, _, tail = split_page(PAGE.read_text())
        PAGE.write_text(head + example() + tail)
    else:
        print(example())
