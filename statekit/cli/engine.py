"""Commands of the demo engine: run plan scale experiment. See docs/engine.md."""

import json
import os
import tempfile
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


@click.command()
@click.argument("what", type=click.Choice(["rescale"]))
@click.option(
    "--strategies",
    default="all",
    show_default=True,
    metavar="NAMES",
    help="With commas between them.",
)
@click.option("--workload", default="key_count", show_default=True, metavar="NAME")
@click.option(
    "--set",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of the workload, such as keys=1000000; may be given often.",
)
@click.option("--to", "workers", default=3, show_default=True, metavar="N", help="Workers after.")
@click.option("--before", default=5.0, show_default=True, metavar="SECONDS")
@click.option("--after", default=5.0, show_default=True, metavar="SECONDS")
@click.option("--rounds", default=1, show_default=True, metavar="N", help="Strategies take turns.")
@click.option("--out", default="experiment", show_default=True, metavar="DIR")
@json_option
def experiment(
    what: str,
    strategies: str,
    workload: str,
    parameters: tuple[str, ...],
    workers: int,
    before: float,
    after: float,
    rounds: int,
    out: str,
    as_json: bool,
) -> None:
    """Rescale the same load with each strategy, and compare latencies.

    Each strategy has a job of its own, whose stage is scaled in the middle of a load that waits for
    nobody. Results are compared with an oracle. DIR gets a picture and all figures as JSON. The
    exit code is 1 if a result is wrong.

    \b
    Example:
      statekit experiment rescale --strategies seamless,restart --set keys=1000000 --set rate=20000
    """
    from statekit.engine.experiment.report import middle, plot, table, write_json
    from statekit.engine.experiment.run import Plan, check_strategies, parse_value, run_all

    names = check_strategies(strategies)
    if rounds < 1:
        raise ArgumentError(f"--rounds {rounds}: pass 1 or more.")
    given = dict(map(parse_value, parameters))
    try:
        plan = Plan(
            workload=workload,
            parameters=given,
            after_workers=workers,
            before_s=before,
            after_s=after,
        )
    except ValueError as error:
        raise ArgumentError(f"{error}.") from None
    work = plan.work
    with tempfile.TemporaryDirectory(prefix="statekit-") as folder:
        say = (lambda _: None) if as_json else print_line
        found = list(run_all(plan, names, rounds, Path(folder), say))
    shown = middle(found)
    place = Path(out)
    write_json(plan, found, place / "rescale.json")
    title = f"{workload}, {work.rate:,.0f} records/s, {work.workers} to {workers} workers"
    has_plot = plot(title, shown, place / "rescale.png")
    if as_json:
        print_json([one.as_dict() for one in found])
    else:
        print_line(f"\n{title}\n\n{table(shown)}\n")
        if has_plot:
            print_line(
                f"The picture is {place / 'rescale.png'}, all figures {place / 'rescale.json'}."
            )
        else:
            print_line(f"All figures: {place / 'rescale.json'}. A picture needs matplotlib.")
    if wrong := [one for one in found if one.fault]:
        raise EngineError(f"{wrong[0].strategy}: {wrong[0].fault}")
    if not as_json:
        print_line(f"All results of {len(found)} runs are exact.")
