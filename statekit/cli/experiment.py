"""Commands to measure the demo engine with: experiment workgen. See docs/engine.md."""

import tempfile
from pathlib import Path

import click

from statekit.cli.options import json_option
from statekit.cli.output import print_json, print_line
from statekit.errors import ArgumentError, EngineError

_SET = click.option(
    "--set",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of the workload, such as keys=1000000; may be given often.",
)


@click.command()
@click.argument("what", type=click.Choice(["rescale"]))
@click.option(
    "--strategies",
    default="all",
    show_default=True,
    metavar="NAMES",
    help="With commas between them; with parameters: batched:step=4.",
)
@click.option("--workload", default="key_count", show_default=True, metavar="NAME")
@_SET
@click.option("--to", "workers", default=3, show_default=True, metavar="N", help="Workers after.")
@click.option("--before", default=5.0, show_default=True, metavar="SECONDS")
@click.option("--after", default=5.0, show_default=True, metavar="SECONDS")
@click.option("--rounds", default=1, show_default=True, metavar="N", help="Strategies take turns.")
@click.option("--sweep", is_flag=True, help="First find the best step of each strategy.")
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
    sweep: bool,
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
    from statekit.engine.experiment.report import middle, plot, plot_times, table, write_json
    from statekit.engine.experiment.run import (
        Plan,
        best_of,
        chosen,
        parse_strategies,
        parse_value,
        run_all,
    )

    hows = parse_strategies(strategies)
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
        swept = best_of(plan, hows, Path(folder), say) if sweep else []
        found = list(run_all(plan, chosen(hows, swept), rounds, Path(folder), say))
    shown = middle(found)
    place = Path(out)
    write_json(plan, found, swept, place / "rescale.json")
    title = f"{workload}, {work.rate:,.0f} records/s, {work.workers} to {workers} workers"
    has_plot = plot(title, shown, place / "rescale.png") and plot_times(shown, place / "times.png")
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
    if wrong := [one for one in [*swept, *found] if one.fault]:
        raise EngineError(f"{wrong[0].strategy}: {wrong[0].fault}")
    if not as_json:
        print_line(f"All results of {len(found)} runs are exact.")


@click.command()
@click.argument("workload")
@click.option("--records", default=100_000, show_default=True, metavar="N")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["arrow", "csv", "jsonl"]),
    default="arrow",
    show_default=True,
)
@click.option("--files", default=1, show_default=True, metavar="N", help="To share them out to.")
@click.option("--out", required=True, metavar="DIR", help="It must not have such files yet.")
@_SET
@json_option
def workgen(
    workload: str,
    records: int,
    kind: str,
    files: int,
    out: str,
    parameters: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the events of a workload to files, which a job can read.

    The same events come from the same parameters, in whatever format and number of files. A job
    reads them instead of its generator if its parameter `input` names the folder.

    \b
    Example:
      statekit workgen key_count --records 1000000 --set zipf=1.0 --format csv --out /data/keys
    """
    from statekit.engine.experiment.run import parse_value
    from statekit.engine.workloads import workload as find
    from statekit.engine.workloads.files import write_files

    if files < 1:
        raise ArgumentError(f"--files {files}: pass 1 or more.")
    work = find(workload, **dict(map(parse_value, parameters)), records=records)
    paths = write_files(work, Path(out), kind, files)
    if as_json:
        print_json({"records": records, "files": [str(path) for path in paths]})
    else:
        print_line(f"{records:,} records of {workload} in {len(paths)} file(s) in {out}")
