"""Many lives: one after the other from a seed on, in several processes at once."""

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import redis

from .life import Life, Options

PROGRESS_SECONDS = 30.0
FAILURES_MAX = 20


class Limits(NamedTuple):
    """When to stop: the first limit that is reached counts. None: no limit."""

    lives: int | None = None
    steps: int | None = None
    seconds: float | None = None
    failures: int = 1


class Result(NamedTuple):
    lives: int
    steps: int
    failed: int


def import_all() -> None:
    """Imports what hosts need before they are forked, so that it costs nothing there."""
    import grpc._channel
    import grpc._server  # noqa: F401
    import lz4.frame  # noqa: F401
    import rocksdict  # noqa: F401
    import zstandard  # noqa: F401

    import statekit.homes.redis
    import statekit.homes.rocksdb
    import statekit.remote.channel
    import statekit.remote.server  # noqa: F401


def run(
    seed: int, jobs: int, limits: Limits, known: Iterable[str], is_told: bool = False
) -> Result:
    """Plays lives from a seed on. Prints what is wrong, and every step if that is asked for."""
    import_all()
    known = [*known]
    began = time.monotonic()
    with _redis() as port:
        if not port:
            print("there is no redis-server: lives do without homes in Redis", flush=True)
        pids = []
        ends = []
        for job in range(jobs):
            here, there = os.pipe()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    os.close(here)
                    address = f"redis://127.0.0.1:{port}/{job}" if port else ""
                    share = limits._replace(
                        steps=limits.steps and -(-limits.steps // jobs),
                        lives=limits.lives and -(-limits.lives // jobs),
                    )
                    result = _job(seed + job, jobs, share, Options(known, address, is_told), began)
                    os.write(there, repr(tuple(result)).encode())
                    code = 0
                finally:
                    os._exit(code)
            os.close(there)
            pids.append(pid)
            ends.append(here)
        try:
            results = []
            for pid, end in zip(pids, ends, strict=True):
                data = b"".join(iter(lambda end=end: os.read(end, 4096), b""))
                os.waitpid(pid, 0)
                if not data:
                    raise RuntimeError(f"job {pid} ended without a result")
                results.append(Result(*map(int, data.decode().strip("()").split(","))))
        except BaseException:
            for pid in pids:
                _end(pid)
            raise
    total = Result(*map(sum, zip(*results, strict=True)))
    seconds = time.monotonic() - began
    print(
        f"seeds {seed} to {seed + total.lives - 1}: {total.lives} lives, {total.steps} steps, "
        f"{total.failed} failed, {total.steps / seconds:.0f} steps a second",
        flush=True,
    )
    return total


def _job(first: int, stride: int, limits: Limits, options: Options, began: float) -> Result:
    lives = steps = failed = 0
    told = time.monotonic()
    seed = first
    while not _is_over(limits, lives, steps, began) and failed < limits.failures:
        life = Life(seed, options)
        left = None if limits.steps is None or limits.lives == 1 else limits.steps - steps
        try:
            life.play(limits.steps if limits.lives == 1 else None, left)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed += 1
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            print(
                f"\n==== seed {seed} failed at step {life.steps_done}\n"
                f"{life.report(error)}\n{where}"
                f"again: python -m tests.lives --seed {seed} --lives 1",
                flush=True,
            )
        lives += 1
        steps += life.steps_done
        seed += stride
        if options.redis:
            with redis.Redis.from_url(options.redis) as client:
                client.flushdb()
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            print(f"from seed {first}: {lives} lives, {steps} steps, {failed} failed", flush=True)
    return Result(lives, steps, failed)


def _is_over(limits: Limits, lives: int, steps: int, began: float) -> bool:
    return (
        (limits.lives is not None and lives >= limits.lives)
        or (limits.steps is not None and steps >= limits.steps)
        or (limits.seconds is not None and time.monotonic() - began >= limits.seconds)
    )


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


@contextmanager
def _redis() -> Iterator[int]:
    """The port of a Redis server for all jobs; 0 if none can be had."""
    from ..servers import redis_binary, redis_server  # not where pytest looks for doctests: no ".."

    if redis_binary() is None:
        yield 0
        return

    with (
        tempfile.TemporaryDirectory() as place,
        redis_server(Path(place), "--databases", "64") as server,
    ):
        yield server.port
