"""Makes the golden checkpoints of the present format version, once: python tests/golden/make.py

    v1/plain, v1/zstd, v1/lz4    a directory each: checkpoint 1 is full, 2 is a delta on top
    v1/owned                     as plain, later: manifests say who published them
    v1/expected.json             what a restore of each must give

They are restored by test_golden.py for as long as statekit reads version 1. So they are never made
again; a new version of the format gets a folder of its own.
"""

import json
import sys
from pathlib import Path

import golden_states

import statekit as sk
from statekit.format.manifest import FORMAT_LATEST

HERE = Path(__file__).resolve().parent
COMPRESSIONS = {"plain": None, "zstd": "zstd", "lz4": "lz4"}


def make(folder: Path) -> None:
    expected = {}
    for name, compression in COMPRESSIONS.items():
        kv = sk.open("memory:", key_groups=2, subgroups=2)
        golden_states.first(kv)
        kv.checkpoint(folder / name, compression=compression, metadata={"note": "golden"})
        expected["1"] = golden_states.read(kv)
        golden_states.second(kv)
        kv.checkpoint(folder / name, compression=compression)
        expected["2"] = golden_states.read(kv)
        (folder / name / ".lock").unlink(missing_ok=True)
        kv.close()
    text = json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False)
    (folder / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / f"v{FORMAT_LATEST}"
    if target.exists():
        sys.exit(f"{target} is there already, and golden checkpoints are never made again.")
    target.mkdir(parents=True)
    make(target)
