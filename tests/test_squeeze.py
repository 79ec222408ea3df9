"""Squeezed blocks (csrc/squeeze.c): restored, they are the same bytes; anything else is refused."""

import random
import sys
from pathlib import Path

import format_oracle
import pytest

import statekit as sk
from statekit.native.block import Block
from statekit.native.frames import restore, squeeze
from statekit.native.store import Store

sys.path.insert(0, str(Path(__file__).resolve().parent / "golden"))
import golden_states

SEED = 20_261_119


def blocks(tmp_path: Path) -> list[bytes]:
    """Of all kinds and key types, full ones and deltas, timed and not; without checksums."""
    with sk.open("memory:", key_groups=4, subgroups=1) as kv:
        golden_states.first(kv)
        first = kv.checkpoint(tmp_path)
        golden_states.second(kv)
        second = kv.checkpoint(tmp_path)
    steps = [
        step for one in (first, second) for leaf in one.leaves() for step in one.read_leaf(leaf)
    ]
    found = []
    for step in steps:
        at = 0
        for block in Block.each(step):
            data = bytearray(step[at : at + block.size])
            at += block.size
            data[4:8] = bytes(4)
            found.append(bytes(data))
    return found


def test_restored_blocks_are_the_same_bytes(tmp_path: Path) -> None:
    for block in blocks(tmp_path):
        squeezed = squeeze(block)
        assert squeezed is not None
        assert len(squeezed) < len(block)
        assert restore(squeezed, len(block)) == block
        assert format_oracle._restored(squeezed) == block


def test_a_block_that_could_not_be_restored_is_not_squeezed(tmp_path: Path) -> None:
    """Whatever is changed in a block: it is restored as it is, or not squeezed."""
    rng = random.Random(SEED)
    refused = 0
    for block in blocks(tmp_path):
        for _ in range(20):
            changed = bytearray(block)
            changed[rng.randrange(8, len(block))] ^= 1 << rng.randrange(8)
            squeezed = squeeze(bytes(changed))
            if squeezed is None:
                refused += 1
            else:
                assert restore(squeezed, len(changed)) == changed
    assert refused


def test_what_is_no_squeezed_block_is_refused_or_is_a_block_to_be_checked(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    restored = 0
    for block in blocks(tmp_path):
        good = squeeze(block)
        assert good is not None
        for wrong in (good[:-1], good + b"x", b"", good[:40], good * 2):
            assert restore(wrong, len(block)) is None
        for size in (0, len(block) - 8, len(block) + 8, 1 << 50):
            assert restore(good, size) is None
        for _ in range(20):
            changed = bytearray(good)
            for _ in range(rng.choice((1, 1, 5))):
                changed[rng.randrange(len(good))] = rng.randrange(256)
            found = restore(bytes(changed), len(block))
            if found is None:
                continue
            restored += 1
            store = Store(4, 1)
            store.mark(0, 4, "absent")
            try:
                store.decode_leaf(int.from_bytes(found[40:44], "little"), bytes(found), "under")
            except sk.StateKitError:
                continue
    assert restored


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_checkpoints_of_small_entries_are_a_third(
    tmp_path: Path, compression: str
) -> None:
    """Most of an entry with a short key and a number is what can be computed again."""
    pytest.importorskip({"zstd": "zstandard", "lz4": "lz4.block"}[compression])
    kv = sk.open("memory:", key_groups=16, subgroups=1)
    kv.value("n", int).put_many([f"user-{n:08d}" for n in range(5000)], list(range(5000)))
    plain = kv.checkpoint(tmp_path / "plain")
    packed = kv.checkpoint(tmp_path / "packed", compression=compression)
    assert packed.bytes * (3 if compression == "zstd" else 2) < plain.bytes
    with sk.restore(packed) as again:
        assert dict(again.value("n", int).items()) == dict(kv["n"].items())
