"""Loading: the job that a reference names. Every process of a job does this for itself.

package.module:name     a Job of a module, or a function that makes one; `job` unless told
path/file.py:name       the same of a file
path/file.toml          a job with its parameters and settings:

    job = "statekit.engine.workloads:key_count"     # a function; or a Job, without parameters

    [parameters]                                    # of the function
    keys = 100_000

    [settings]                                      # settings.py
    batch_rows = 1_000
"""

import importlib
import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from statekit.engine.job import Job
from statekit.engine.settings import Settings
from statekit.errors import EngineError, shorten


def load_job(reference: str) -> Job:
    """EngineError if there is none, or if it cannot run."""
    if reference.endswith(".toml"):
        job = _load_file(Path(reference))
    else:
        job = _load(reference, {}, Path())
    job.check()
    return job


def _load_file(path: Path) -> Job:
    try:
        written = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise EngineError(f"there is no file {str(path)!r} to take a job from.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{str(path)!r} is no TOML: {error}") from None
    reference = written.pop("job", None)
    parameters = written.pop("parameters", {})
    settings = written.pop("settings", {})
    if written:
        raise EngineError(
            f"{str(path)!r} says {next(iter(written))!r}, which is nothing of a job: there are "
            "job, [parameters] and [settings]."
        )
    if not isinstance(reference, str) or reference.endswith(".toml"):
        raise EngineError(f'{str(path)!r} names no job: job = "package.module:name".')
    if not isinstance(parameters, dict):
        raise EngineError(f"{str(path)!r}: [parameters] is a table.")
    job = _load(reference, parameters, path.parent)
    try:
        job.settings = msgspec.convert(settings, Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(Settings.__struct_fields__)
        raise EngineError(f"{str(path)!r}, [settings]: {error}. There are {known}.") from None
    return job


def _load(reference: str, parameters: Mapping[str, Any], base: Path) -> Job:
    """base: the folder that a file is looked for in."""
    where, _, name = reference.partition(":")
    name = name or "job"
    found = getattr(_module(where, base), name, None)
    if inspect.isfunction(found) and inspect.signature(found).return_annotation in (Job, "Job"):
        takes = inspect.signature(found).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in takes.values())
        if not takes_any and (unknown := [key for key in parameters if key not in takes]):
            raise EngineError(
                f"{reference!r} has no parameter {unknown[0]!r}. It has {', '.join(takes)}."
            )
        lacking = [
            key
            for key, one in takes.items()
            if one.default is one.empty
            and one.kind is not one.VAR_KEYWORD
            and key not in parameters
        ]
        if lacking:
            raise EngineError(
                f"{reference!r} needs {', '.join(lacking)}: write a TOML file that names this job "
                "and its [parameters]."
            )
        found = found(**parameters)
    elif parameters:
        raise EngineError(f"{reference!r} is a job that takes no [parameters].")
    if not isinstance(found, Job):
        raise EngineError(f"{where!r} has no Job named {name!r}.")
    return found


def _module(where: str, base: Path) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = (base / where).resolve()
        spec = importlib.util.spec_from_file_location(f"statekit_job_{path.stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise EngineError(f"there is no file {shorten(where)} to take a job from.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    except ModuleNotFoundError as error:
        if error.name != where:
            raise
        raise EngineError(
            f"there is no module {where!r} to take a job from. Name a module or a .py file, such "
            "as jobs/wordcount.py:job."
        ) from None
