"""A driver of its own: python killed_driver.py PLACE MASTER [URL]. Fail points come from outside.

URL: where state and output are; in PLACE unless given. Prints the output as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

from session import spark_session
from streams import Files, count, run_all

import statekit.spark as sks

SCHEMA = "user string"


def make_op(url: str) -> sks.StatefulOp:
    return sks.StatefulOp(
        count,
        key="user",
        output="user string, n long",
        state={"count": int},
        path=f"{url}/state",
        output_path=f"{url}/out",
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


def run(spark: Any, place: Path, parallelism: int, url: str | None = None) -> None:
    function = make_op(url or str(place)).foreach_batch(
        write_sink(place), checkpoint=place / "cp", parallelism=parallelism
    )
    run_all(Files(place / "in", SCHEMA).stream(spark), function, place / "cp")


def main(place: Path, master: str, url: str) -> None:
    spark = spark_session(master)
    run(spark, place, 2, url)
    output = sks.read_output(f"{url}/out").collect()
    print(json.dumps(sorted(map(tuple, output))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if sys.argv[3:] else sys.argv[1])
