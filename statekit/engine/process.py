"""Process: what a process of a job does. It is a task, and may be another one later.

    python -m statekit.engine.process CONTROL NAME GENERATION JOB

It connects to the coordinator, says where it can be reached, is told who the others are (start),
and works as a task until that has finished. When the job goes back to a checkpoint, this process
stays, and is a task once more (again): it has imported everything. Without a name it is a spare
process, which waits until it is needed.
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa

from statekit.engine.channel import connect
from statekit.engine.control import LOST, SAID_WHY, Again, Control, fail, heard, lost
from statekit.engine.job import Job
from statekit.engine.loading import load_job
from statekit.engine.task import KeyedTask, SinkTask, SourceTask, Task, stage_of


def live(address: str, job: Job, name: str, generation: int) -> tuple[str, int] | None:
    """One life: as this task. The name and generation of the next one; None if there is none."""
    with Control(connect(address)) as control, ExitStack() as stack:
        about = {"task": name, "generation": generation, "pid": os.getpid()}
        try:
            if not name:
                control.send("hello", **about, address="")
                _wait(control)
            task = _make(control, job, name, generation, str(Path(address).parent))
            stack.callback(task.closing.close)
            control.send("hello", **about, address=task.address)
            try:
                task.run(heard(control))
            except LOST:
                lost(control)
                _wait(control)
            control.send("finished")
        except Again as again:
            return again.life
        except LOST:  # the coordinator itself has gone
            os._exit(SAID_WHY)
        except Exception:
            fail(control)
    return None


def _wait(control: Control) -> None:
    """Until this process is to be another task."""
    while True:
        heard(control)


def _make(control: Control, job: Job, name: str, generation: int, folder: str) -> Task:
    stage = job.stage(stage_of(name))
    if stage.kind == "source":
        return SourceTask(control, name, job, stage)
    kind = KeyedTask if stage.kind == "keyed" else SinkTask
    return kind(control, name, job, stage, f"{folder}/{name}.{os.getpid()}.{generation}")


def main(arguments: list[str]) -> None:
    address, name, generation, reference = arguments
    pa.array([{}])  # now pyarrow imports pandas, and not when the first record is here
    job = load_job(reference)
    life: tuple[str, int] | None = (name, int(generation))
    while life is not None:
        life = live(address, job, *life)


if __name__ == "__main__":
    main(sys.argv[1:])
