"""A driver whose executors are processes of their own: python cluster_job.py PLACE WHAT.

WHAT is what happens to its second batch:

    executor    the JVM of an executor is killed while a task of it runs: its shuffle files are
                gone, so the stage before is run again, too
    idle        nothing comes for so long that Spark has ended the idle Python workers

Prints the output of all batches as JSON.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from session import spark_session
from streams import Files, run_all

import statekit.spark as sks

MASTER = "local-cluster[2,1,1024]"
IDLE_S = 70  # Spark ends Python workers that were idle for a minute
CONF = {
    "executor": {"spark__task__maxFailures": 8, "spark__stage__maxConsecutiveAttempts": 8},
    "idle": {},
}


def once(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


class Count:
    """Counts, and has its accident at the second record of `a`."""

    def __init__(self, place: Path, what: str) -> None:
        self.place = place
        self.what = what

    def on_key(self, key: str, rows: Any, st: Any) -> Any:
        n = st.count.add(len(rows))
        if self.what == "executor" and (key, n) == ("a", 2) and once(self.place / "killed"):
            # This worker's parent is a daemon of Python, and that one's the JVM.
            os.kill(parent_of(os.getppid()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        yield key, n, os.getpid()


def main(place: Path, what: str) -> None:
    spark = spark_session(MASTER, **CONF[what])
    op = sks.StatefulOp(
        Count(place, what),
        key="user",
        output="user string, n long, worker long",
        state={"count": int},
        path=place / "state",
        key_groups=16,
    )
    found: list[list[list[Any]]] = []

    def sink(df: Any, batch: int) -> None:
        found.append(sorted([row.user, row.n, row.worker] for row in df.collect()))

    source = Files(place / "in", "user string")
    for users in ("ab", "abc", "ad"):
        if what == "idle" and found:
            threading.Event().wait(IDLE_S)  # this is what is tested: that time passes
        source.add(user=list(users))
        function = op.foreach_batch(sink, checkpoint=place / "cp", parallelism=4)
        run_all(source.stream(spark), function, place / "cp")
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
