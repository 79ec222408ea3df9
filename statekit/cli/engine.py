"""Commands of the demo engine: run plan scale. See docs/engine.md."""

import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from statekit.cli.options import json_option
from statekit.cli.output import print_json, print_line
from statekit.errors import ArgumentError, EngineError

_API = "api.json"  # in the folder of a job that runs: where it can be reached, and the token


@click.command()
@click.argument("job")
@click.option(
    "--folder", required=True, metavar="DIR", help="Where its checkpoints are, or will be."
)
@click.option(
    "--port", default=0, metavar="PORT", help="Of the API, on this machine; 0 is any that is free."
)
@click.option(
    "--checkpoint-every",
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between checkpoints; 0: none is taken.",
)
@json_option
def run(job: str, folder: str, port: int, checkpoint_every: float, as_json: bool) -> None:
    """Run a job of the demo engine until it ends.

    JOB is package.module:name or path/file.py:name; the name is `job` unless told. If the folder
    has a checkpoint of the job, it goes on from there. Ctrl-C stops it at once; started again, it
    goes on from its last checkpoint.

    \b
    Example:
      statekit run jobs/wordcount.py --folder /data/wordcount
    """
    from statekit.engine.http import Api
    from statekit.engine.running import start

    if not 0 <= port < 1 << 16:
        raise ArgumentError(f"--port {port}: there is no such port. Pass 0 to 65535.")
    with start(job, folder) as running, Api(running, port) as api:
        path = Path(folder) / _API
        with suppress(FileNotFoundError):
            path.unlink()
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"url": api.url, "token": api.token}, file)
        try:
            _show(job, folder, api, as_json)
            _wait(running, checkpoint_every)
        finally:
            path.unlink()
    if not as_json:
        print_line("the job has ended")


def _show(job: str, folder: str, api: Any, as_json: bool) -> None:
    if as_json:
        print_line(json.dumps({"job": job, "url": api.url, "token": api.token}))
        return
    print_line(f"{job} runs, its checkpoints are in {folder}. To scale a stage:")
    print_line(
        f"  curl -X POST '{api.url}/scale?stage=STAGE&workers=4' "
        f"-H 'Authorization: Bearer {api.token}'"
    )
    print_line(f"  statekit scale STAGE --workers 4 --folder {folder}")


def _wait(running: Any, seconds: float) -> None:
    while True:
        try:
            running.wait(seconds or None)
            return
        except TimeoutError:
            with suppress(EngineError):  # a checkpoint that was cut off; what is wrong, wait() says
                running.checkpoint()


@click.command()
@click.argument("job")
@json_option
def plan(job: str, as_json: bool) -> None:
    """Show the stages of a job of the demo engine, and the processes that they become.

    JOB is package.module:name or path/file.py:name; the name is `job` unless told.

    \b
    Example:
      statekit plan jobs/wordcount.py
    """
    from statekit.engine.loading import load_job

    found = load_job(job)
    if as_json:
        stages = [{"name": s.name, "kind": s.kind, "tasks": s.tasks()} for s in found.stages]
        print_json({"job": found.name, "stages": stages})
    else:
        print_line(found.plan())


@click.command()
@click.argument("stage")
@click.option(
    "--workers", type=int, metavar="N", help="How many it is to have; one more unless told."
)
@click.option(
    "--strategy",
    default="prioritised",
    show_default=True,
    metavar="NAME",
    help="How state goes over; docs/engine.md has a table.",
)
@click.option("--folder", required=True, metavar="DIR", help="That `statekit run` was told.")
@json_option
def scale(stage: str, workers: int | None, strategy: str, folder: str, as_json: bool) -> None:
    """Give a stage of a running job another number of workers, while records flow.

    \b
    Example:
      statekit scale count --workers 4 --folder /data/wordcount
    """
    path = Path(folder) / _API
    try:
        api = json.loads(path.read_text())
    except FileNotFoundError:
        raise EngineError(
            f"no job runs in {folder!r}. Start it with: statekit run JOB --folder {folder}"
        ) from None
    query: dict[str, Any] = {"stage": stage, "strategy": strategy}
    if workers is not None:
        query["workers"] = workers
    request = urllib.request.Request(
        f"{api['url']}/scale?{urlencode(query)}",
        method="POST",
        headers={"Authorization": f"Bearer {api['token']}"},
    )
    try:
        with urllib.request.urlopen(request) as reply:
            done = json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            raise EngineError(json.load(error)["error"]) from None
    except urllib.error.URLError as error:
        raise EngineError(f"the job in {folder!r} does not answer: {error.reason}.") from None
    if as_json:
        print_json(done)
    else:
        print_line(
            f"{done['stage']}: {done['before']} -> {done['after']} workers, {done['moved']} "
            f"key-groups moved ({done['strategy']})"
        )
