"""A driver that is killed: python killed_driver.py PLACE MASTER. Fail points come from outside."""

import sys
from pathlib import Path
from typing import Any

from session import spark_session
from streams import Files, count, run_all

import statekit.spark as sks

SCHEMA = "user string"


def make_op(place: Path) -> sks.StatefulOp:
    return sks.StatefulOp(
        count,
        key="user",
        output="user string, n long",
        state={"count": int},
        path=place / "state",
        output_path=place / "out",
        key_groups=16,
    )


def write_sink(place: Path) -> Any:
    """A sink that outlives its process: a file for each batch, replaced if it comes again."""

    def sink(df: Any, batch: int) -> None:
        rows = sorted(f"{row.user} {row.n}" for row in df.collect())
        draft = place / f"draft-{batch}"
        draft.write_text("\n".join(rows))
        draft.rename(place / f"batch-{batch}")
        with (place / "calls").open("a") as calls:
            calls.write(f"{batch}\n")

    return sink


def run(spark: Any, place: Path, parallelism: int) -> None:
    function = make_op(place).foreach_batch(
        write_sink(place), checkpoint=place / "cp", parallelism=parallelism
    )
    run_all(Files(place / "in", SCHEMA).stream(spark), function, place / "cp")


if __name__ == "__main__":
    run(spark_session(sys.argv[2]), Path(sys.argv[1]), 2)
