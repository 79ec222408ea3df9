"""Checkpoints of every format version ever released are restored, for ever."""

import json
import shutil
from pathlib import Path

import golden_states
import make
import pytest

import statekit as sk
from statekit.errors import CheckpointError, DamagedError
from statekit.format.manifest import FORMAT_LATEST, FORMAT_READABLE
from statekit.native.digest import crc32c

HERE = Path(__file__).resolve().parent
CASES = [
    f"v{version}/{name}"
    for version in range(FORMAT_READABLE, FORMAT_LATEST + 1)
    for name in ("plain", "zstd", "lz4", "owned")
]


def expected(case: str, number: int) -> dict[str, list[list[str]]]:
    text = (HERE / case).parent.joinpath("expected.json").read_text()
    found: dict[str, list[list[str]]] = json.loads(text)[str(number)]
    return found


@pytest.fixture(params=CASES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A copy: reading a directory takes locks in it."""
    shutil.copytree(HERE / request.param, tmp_path / "copy")
    return request.param, tmp_path / "copy"


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_a_golden_checkpoint_is_restored(golden: tuple[str, Path], number: int, lazy: bool) -> None:
    case, folder = golden
    with sk.restore(folder, at=number, lazy=lazy) as kv:
        assert golden_states.read(kv) == expected(case, number)


def test_all_kinds_of_blocks_are_in_it(golden: tuple[str, Path]) -> None:
    _, folder = golden
    first, second = sk.checkpoints(folder)
    assert second.manifest.base == 1
    assert any(len(chain) > 1 for _, chain in second.manifest.chains())
    blocks = [block for leaf in second.leaves() for block in second._steps(leaf)]
    assert {block.kind for block in blocks} >= {"i64", "f64", "bytes", "list", "map", "timers"}
    assert {block.is_delta for block in blocks} == {block.is_timed for block in blocks}
    assert {True, False} == {block.is_delta for block in blocks}
    assert any(1 in (block.marks or ()) for block in blocks)
    assert first.metadata == {"note": "golden"}
    assert [second.watermark, first.watermark] == [1_050_000, 1_000_000]
    assert list(first.verify()) == list(second.verify()) == []


def test_only_later_ones_have_an_owner(golden: tuple[str, Path]) -> None:
    """These keys came later, within version 1. With or without them, the place is taken over."""
    case, folder = golden
    for one in sk.checkpoints(folder):
        assert bool(one.manifest.owner) == (case == "v1/owned")
        assert one.manifest.generation == (case == "v1/owned")
    with sk.restore(folder) as kv:
        assert kv.checkpoint(folder).manifest.generation == 3


def test_what_makes_them_still_works(tmp_path: Path) -> None:
    """States that expire by the system's clock have other stamps; everything else is the same."""
    make.make(tmp_path)
    again = json.loads((tmp_path / "expected.json").read_text())
    assert again == json.loads((HERE / f"v{FORMAT_LATEST}" / "expected.json").read_text())


def test_a_checkpoint_of_a_newer_version_is_refused_clearly(golden: tuple[str, Path]) -> None:
    case, folder = golden
    path = folder / "000000000002.manifest"
    data = bytearray(path.read_bytes())
    data[12] = FORMAT_LATEST + 1
    data[8:12] = crc32c(bytes(data[12:])).to_bytes(4, "little")
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="Update statekit") as caught:
        sk.restore(folder)
    assert not isinstance(caught.value, DamagedError)
    with sk.restore(folder, at=1) as kv:  # older ones are as good as before
        assert golden_states.read(kv) == expected(case, 1)
