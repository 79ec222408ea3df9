"""Damage to checkpoints: every bit, every truncation, blocks in wrong places. Never wrong data."""

import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import format_oracle
import pytest
from small_checkpoint import LEAVES, Files, Line, dump, new_store, restore

import statekit as sk
from statekit.checkpoint.reader import Checkpoint, open_checkpoint
from statekit.errors import CheckpointError, DamagedError, StorageError
from statekit.format.manifest import Manifest

SEED = 4
COMPRESSIONS = [None, "zstd", "lz4"]


def small(compression: str | None = None) -> tuple[Files, list[bytes]]:
    """A checkpoint of about 4 KB: a full one and a delta on top, in two packs."""
    files = Files()
    with tempfile.TemporaryDirectory() as folder:
        write_small(folder, compression)
        for path in Path(folder).iterdir():
            files[path.name] = path.read_bytes()
    del files["000000000001.manifest"], files[".lock"]
    return files, read_all(files)


def write_small(folder: str, compression: str | None) -> dict[str, Any]:
    """Writes a checkpoint through the public API. Returns what the state was."""
    with sk.open("memory:", key_groups=2, subgroups=2) as kv:
        visits = kv.value("visits", int)
        tags = kv.list("tags", str, key=int, ttl=sk.TTL(60, time="event"))
        timers = kv.timers("timers")
        kv.advance_watermark(1000)
        for i in range(24):
            visits[f"key-{i}"] = i
            tags[i] = ["tag"] * (i % 3)
            timers.set(f"key-{i}", 5000 + i)
        kv.checkpoint(folder, compression=compression)
        visits["key-0"] = -1
        del visits["key-1"]
        tags[7].append("more")
        kv.checkpoint(folder, compression=compression, metadata={"note": "small"})
        return contents(kv)


def contents(kv: sk.KVProvider) -> dict[str, Any]:
    states = (
        kv.value("visits", int),
        kv.list("tags", str, key=int, ttl=sk.TTL(60, time="event")),
        kv.timers("timers"),
    )
    return {state.name: dict(state.items()) for state in states}


def read_all(files: Files, manifest: Manifest | None = None) -> list[bytes]:
    """All state of the newest checkpoint, as a restore reads it. manifest: if it is known."""
    if manifest is None:
        return dump(restore(open_checkpoint(files.storage())))
    return dump(restore(Checkpoint(files.storage(), manifest)))


def expect_refusal(folder: Path) -> None:
    """A whole restore fails, and says why."""
    with pytest.raises((DamagedError, StorageError)):
        sk.restore(folder, lazy=False).close()


def expect_damage(files: Files, name: str, data: bytes, manifest: Manifest | None = None) -> None:
    """With these contents of a file nothing can be read, and the error says which file it is."""
    try:
        read_all(Files({**files, name: data}), manifest)
    except DamagedError as error:
        if error.file != files.file(name):
            raise
        return
    except StorageError:
        return
    pytest.fail(f"{name} was changed, and nobody noticed")


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_small_checkpoint_is_good_and_small(compression: str | None) -> None:
    files, expected = small(compression)
    assert read_all(files) == expected
    assert any(expected)
    assert len(files) == 3
    assert 3_000 < sum(map(len, files.values())) < 8_000


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_flipped_bit_is_noticed(compression: str | None) -> None:
    files, _ = small(compression)
    flips = 0
    known = open_checkpoint(files.storage()).manifest  # read once, to save half of the time
    names = [name for name in files if compression is None or name.endswith(".pack")]
    for name in names:
        data = files[name]
        changed = bytearray(data)
        manifest = known if name.endswith(".pack") else None
        for bit in range(8 * len(data)):
            changed[bit >> 3] ^= 1 << (bit & 7)
            expect_damage(files, name, bytes(changed), manifest)
            changed[bit >> 3] ^= 1 << (bit & 7)
            flips += 1
    assert flips == 8 * sum(len(files[name]) for name in names)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_truncation_is_noticed(compression: str | None) -> None:
    files, _ = small(compression)
    for name, data in files.items():
        for end in range(len(data)):
            expect_damage(files, name, data[:end])


def test_restoring_notices_flips_and_truncations_too(tmp_path: Path) -> None:
    """The same through restore(): at every third byte of every file, a flipped bit or the end."""
    good = write_small(str(tmp_path), None)
    with sk.restore(tmp_path, lazy=False) as kv:
        assert contents(kv) == good
    (tmp_path / "000000000001.manifest").unlink()
    rng = random.Random(SEED)
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        for at in range(rng.randrange(3), len(data), 3):
            changed = bytearray(data)
            changed[at] ^= 1 << rng.randrange(8)
            path.write_bytes(bytes(changed) if at % 4 else data[:at])
            expect_refusal(tmp_path)
        path.write_bytes(data)
    with sk.restore(tmp_path, lazy=False) as kv:
        assert contents(kv) == good


def test_bursts_and_zeroed_pages_are_noticed() -> None:
    files, _ = small()
    for name, data in files.items():
        for at in range(len(data) - 4):
            for burst in (b"\0\0\0\0", b"\xff\xff\xff\xff"):
                changed = data[:at] + burst + data[at + 4 :]
                if changed != data:
                    expect_damage(files, name, changed)
        for at in range(0, len(data), 64):
            changed = data[:at] + bytes(len(data[at : at + 64])) + data[at + 64 :]
            if changed != data:
                expect_damage(files, name, changed)


def test_a_missing_pack_is_a_storage_error() -> None:
    files, _ = small()
    for name in files:
        if name.endswith(".pack"):
            rest = Files({other: data for other, data in files.items() if other != name})
            with pytest.raises(StorageError):
                read_all(rest)


def test_a_manifest_under_another_number_is_refused() -> None:
    files, _ = small()
    files["000000000003.manifest"] = files["000000000002.manifest"]
    with pytest.raises(DamagedError, match="checkpoint 2, under another name"):
        open_checkpoint(files.storage())


# ---- Whole frames in wrong places


def even_line() -> Line:
    """Two checkpoints of two packs each, whose frames are all of the same size."""
    line = Line()
    for number in (1, 2):
        store = new_store()
        state = store.states()[2]
        per_leaf: dict[int, int] = dict.fromkeys(range(LEAVES), 0)
        key = 0
        while min(per_leaf.values()) < 3:
            key += 1
            leaf = format_oracle.key_hash("i", struct.pack("<q", key)) >> 62
            if per_leaf[leaf] < 3:
                per_leaf[leaf] += 1
                state.put(key, b"\x91" + bytes([number]))
        line.take(dict(enumerate(dump(store))), packs=2)
    return line


def frames_of(line: Line) -> dict[tuple[str, int], bytes]:
    """All frames by file and offset."""
    frames = {}
    for ref in line.packs:
        data = line.files[ref.name]
        for at in format_oracle.read_pack(ref.name, data, ref.number):
            size = struct.unpack_from("<Q", data, at + 8)[0]
            frames[ref.name, at] = data[at : at + size]
    return frames


def test_a_good_frame_in_a_wrong_place_is_a_bad_frame() -> None:
    """Within a pack, between packs, between leaves, and from an older checkpoint: all pairs."""
    line = even_line()
    frames = frames_of(line)
    assert len(frames) == 2 * LEAVES
    assert len({len(frame) for frame in frames.values()}) == 1
    newest = {ref.name for ref in line.packs if ref.number == 2}
    pairs = 0
    for (name, at), old in frames.items():
        if name not in newest:
            continue
        for (other, place), frame in frames.items():
            if (other, place) == (name, at):
                continue
            data = line.files[name]
            changed = Files(line.files)
            changed[name] = data[:at] + frame + data[at + len(old) :]
            with pytest.raises(DamagedError) as caught:
                read_all(changed)
            assert caught.value.file == line.files.file(name)
            assert caught.value.offset == at
            pairs += 1
    assert pairs == LEAVES * (2 * LEAVES - 1)


def test_whole_files_that_changed_places_are_noticed() -> None:
    line = even_line()
    newest = [ref for ref in line.packs if ref.number == 2]
    for ref in newest:
        for other in line.packs:
            if other is not ref:
                changed = Files({**line.files, ref.name: line.files[other.name]})
                with pytest.raises(DamagedError, match="header"):
                    read_all(changed)


def test_an_older_checkpoint_is_not_harmed_by_damage_to_a_newer_one() -> None:
    line = even_line()
    expected = dump(restore(open_checkpoint(line.files.storage(), at=1)))
    for ref in line.packs:
        if ref.number == 2:
            line.files[ref.name] = b""
    line.files["000000000002.manifest"] = b"x"
    with pytest.raises(DamagedError):
        open_checkpoint(line.files.storage())
    assert dump(restore(open_checkpoint(line.files.storage(), at=1))) == expected


def test_verify_tells_all_damage() -> None:
    line = even_line()
    frames = frames_of(line)
    newest = [place for place in frames if place[0] in {r.name for r in line.packs[2:]}]
    for name, at in newest:
        changed = bytearray(line.files[name])
        changed[at + 40] ^= 1
        line.files[name] = bytes(changed)
    checkpoint = open_checkpoint(line.files.storage())
    found = {(error.file, error.offset) for error in checkpoint.verify()}
    assert found == {(line.files.file(name), at) for name, at in newest}
    with pytest.raises(CheckpointError):
        read_all(line.files)
