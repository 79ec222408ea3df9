"""Commands of the demo engine: run, plan, scale and the like. See docs/engine.md."""

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
    type=float,
    metavar="SECONDS",
    help="Time between checkpoints; 0: none is taken. As the job is set unless told: 10.",
)
@click.option(
    "--spares",
    type=click.IntRange(0, 16),
    default=0,
    metavar="N",
    help="Processes that wait: for a new worker, or until one is lost.",
)
@json_option
def run(
    job: str, folder: str, port: int, checkpoint_every: float | None, spares: int, as_json: bool
) -> None:
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
    with start(job, folder, spares=spares) as running, Api(running, port) as api:
        path = Path(folder) / _API
        with suppress(FileNotFoundError):
            path.unlink()
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file_name, colon, name = job.partition(":")
            if file_name.endswith(".py"):
                file_name = str(Path(file_name).resolve())
            where = {"url": api.url, "token": api.token, "address": running.address}
            where["job"] = f"{file_name}{colon}{name}"
            json.dump(where, file)
        try:
            _show(job, folder, api, as_json)
            usual = running.settings.checkpoint_every_s
            _wait(running, usual if checkpoint_every is None else checkpoint_every)
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


_FOLDER = click.option(
    "--folder", required=True, metavar="DIR", help="That `statekit run` was told."
)


def _how(command: Any) -> Any:
    """The options of all rescales."""
    for option in (
        click.option(
            "--pace", type=int, metavar="BYTES", help="A second, of what is copied beforehand."
        ),
        click.option("--gap", type=float, metavar="SECONDS", help="Between two moves."),
        click.option(
            "--step", type=int, metavar="N", help="Key-groups of one move; 0: all."
        ),
        click.option(
            "--strategy", metavar="NAME",
            help="How state goes over, see docs/engine.md; as the job is set unless told.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.argument("stage")
@click.option(
    "--workers", type=int, metavar="N", help="How many it is to have; one more unless told."
)
@_how
@_FOLDER
@json_option
def scale(stage: str, folder: str, as_json: bool, **query: Any) -> None:
    """Give a stage of a running job another number of workers, while records flow.

    What is asked for while another number is being brought about supersedes it.

    \b
    Example:
      statekit scale count --workers 4 --folder /data/wordcount
    """
    _show_rescale(_post(folder, "scale", stage=stage, **query), as_json)


@click.command()
@click.argument("worker")
@_how
@_FOLDER
@json_option
def drain(worker: str, folder: str, as_json: bool, **query: Any) -> None:
    """Give all key-groups of a worker to the others of its stage, and end it.

    \b
    Example:
      statekit drain count-0 --folder /data/wordcount
    """
    _show_rescale(_post(folder, "drain", worker=worker, **query), as_json)


@click.command()
@click.argument("stage")
@click.option("--key-groups", required=True, metavar="A-B", help="Such as 3, 3-9 or 3-9,12.")
@click.option("--to", required=True, metavar="WORKER", help="Who is to have them.")
@_how
@_FOLDER
@json_option
def move(stage: str, key_groups: str, to: str, folder: str, as_json: bool, **query: Any) -> None:
    """Give key-groups of a stage of a running job to a worker of your choice.

    \b
    Example:
      statekit move count --key-groups 0-9 --to count-1 --folder /data/wordcount
    """
    query |= {"stage": stage, "key-groups": key_groups, "to": to}
    _show_rescale(_post(folder, "move", **query), as_json)


@click.command("abort-rescale")
@click.option("--number", type=int, metavar="N", help="Which one; that under way unless told.")
@_FOLDER
@json_option
def abort_rescale(number: int | None, folder: str, as_json: bool) -> None:
    """Cut a rescale of a running job short: key-groups that have moved go back.

    \b
    Example:
      statekit abort-rescale --folder /data/wordcount
    """
    _show_rescale(_post(folder, "abort-rescale", number=number), as_json)


@click.command()
@click.option(
    "--join", "folder", required=True, metavar="DIR", help="That `statekit run` was told."
)
def worker(folder: str) -> None:
    """Add a process to a running job. It waits until the job needs one more, and works then.

    Workers that a stage is given, and those in the place of a lost one, are taken from such
    processes first. It ends when the job ends, or does not need it any more.

    \b
    Example:
      statekit worker --join /data/wordcount
    """
    from statekit.engine.process import main

    known = _known(folder)
    main([known["address"], "", "0", known["job"]])


@click.command()
@_FOLDER
@json_option
def rescales(folder: str, as_json: bool) -> None:
    """Show the rescales of a running job: done, failed, and under way.

    \b
    Example:
      statekit rescales --folder /data/wordcount
    """
    found = _ask(folder, "GET", "rescales", {})
    if as_json:
        print_json(found)
        return
    for one in found:
        end = one["end"] or f"{one['phase']}, {100 * one['progress']:.0f} % have moved"
        spent = ", ".join(f"{name} {value:.2f}" for name, value in one["seconds"].items() if value)
        print_line(
            f"{one['number']}  {one['stage']}: {one['before']} -> {one['after']} workers "
            f"({one['goal']}; {one['cause']}), {one['strategy']}: {end}"
        )
        print_line(
            f"   {one['moved']} of {one['groups']} key-groups in {one['moves']} moves, "
            f"{one['bytes']} bytes; seconds: {spent}"
        )
        if one["reason"]:
            print_line(f"   {one['reason']}")


def _show_rescale(done: Any, as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    print_line(
        f"{done['stage']}: {done['before']} -> {done['after']} workers, {done['moved']} key-groups "
        f"moved in {sum(done['seconds'].values()):.1f} s ({done['end']}, {done['strategy']})"
    )


def _post(folder: str, what: str, **query: Any) -> Any:
    return _ask(folder, "POST", what, query)


def _ask(folder: str, method: str, what: str, query: dict[str, Any]) -> Any:
    """What the job in this folder answers."""
    api = _known(folder)
    told = urlencode({name: value for name, value in query.items() if value is not None})
    request = urllib.request.Request(
        f"{api['url']}/{what}?{told}",
        method=method,
        headers={"Authorization": f"Bearer {api['token']}"},
    )
    try:
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            raise EngineError(json.load(error)["error"]) from None
    except urllib.error.URLError as error:
        raise EngineError(f"the job in {folder!r} does not answer: {error.reason}.") from None


def _known(folder: str) -> dict[str, str]:
    """Where the job in this folder can be reached."""
    try:
        known: dict[str, str] = json.loads((Path(folder) / _API).read_text())
    except FileNotFoundError:
        raise EngineError(
            f"no job runs in {folder!r}. Start it with: statekit run JOB --folder {folder}"
        ) from None
    return known
