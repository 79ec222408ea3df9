"""Jobs end to end, in real processes: every count of every word must come out once, in order."""

import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import pytest
import wordcount

from statekit.engine import deployment
from statekit.engine.running import Running, start
from statekit.engine.sink import read_results
from statekit.errors import EngineError

JOB = str(Path(wordcount.__file__))
TIMEOUT_S = 300


def finish(job: Running, folder: Path) -> None:
    (folder / "enough").write_text("")
    job.wait(TIMEOUT_S)
    check(folder)


def check(folder: Path) -> None:
    """The oracle: the words of all batches that the sources gave, counted by a Counter.

    A lost record leaves a gap in the counts of its word; one that was taken twice repeats a count.
    """
    found = defaultdict(list)
    for batch in read_results(folder / "results"):
        for word, count in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            found[word].append(count)
    for word, counts in found.items():
        if sorted(counts) != [*range(1, len(counts) + 1)]:
            pytest.fail(f"{word}: {counts[:50]}")
    assert {word: len(counts) for word, counts in found.items()} == counted(folder)


def counted(folder: Path) -> Counter[str]:
    words: Counter[str] = Counter()
    for task in range(2):
        for number in range(int((folder / f"read-{task}").read_text())):
            for line in wordcount.lines(task, number)["line"].to_pylist():
                words.update(line.split())
    return words


def test_a_job_runs_to_its_end(run: Callable[[], Running], tmp_path: Path) -> None:
    finish(run(), tmp_path)


@pytest.mark.parametrize("victim", ["count-0", "source-1", "sink-0"])
def test_a_process_is_killed_and_the_others_stay(
    run: Callable[[], Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    monkeypatch.setattr(deployment, "REJOIN_SECONDS", 60.0)
    job = run()
    first = job.checkpoint()
    before = job.pids
    os.kill(before[victim], signal.SIGKILL)
    assert job.checkpoint() > first  # the one that is cut off by the kill is taken afterwards
    assert len({*before.values()} - {*job.pids.values()}) == 1
    finish(job, tmp_path)


def test_a_spare_process_takes_the_place_of_one_that_was_killed_and_of_a_new_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "REJOIN_SECONDS", 60.0)
    monkeypatch.setenv("WORDCOUNT_FOLDER", str(tmp_path))
    with start(JOB, tmp_path / "job", spares=1) as job:
        job.checkpoint()
        (spare,) = wait_for_spares(job)
        job.scale("count", 3)
        assert job.pids["count-2"] == spare
        (spare,) = wait_for_spares(job)
        os.kill(job.pids["count-0"], signal.SIGKILL)
        job.checkpoint()
        assert spare in job.pids.values()
        finish(job, tmp_path)


def test_a_process_that_was_started_by_hand_becomes_a_worker_and_is_killed(
    run: Callable[[], Running], tmp_path: Path
) -> None:
    job = run()
    job.checkpoint()
    command = [sys.executable, "-m", "statekit.engine.process", job.address, "", "0", JOB]
    with subprocess.Popen(command) as process:
        assert wait_for_spares(job) == [process.pid]
        job.scale("count", 3)
        assert job.pids["count-2"] == process.pid
        first = job.checkpoint()
        process.kill()
        process.wait()
        assert job.checkpoint() > first
        assert process.pid not in job.pids.values()
        finish(job, tmp_path)


def wait_for_spares(job: Running) -> list[int]:
    while not job.spares:
        select.select([], [], [], 0.05)
    return job.spares


def test_processes_are_killed_again_and_again(run: Callable[[], Running], tmp_path: Path) -> None:
    rng = random.Random(7)
    job = run()
    for _ in range(4):
        checkpoint = ThreadPoolExecutor(1).submit(job.checkpoint)  # a kill may come before its end
        wait([checkpoint], rng.random() * 3)
        pids = job.pids
        with suppress(ProcessLookupError):  # it belongs to a generation that has just ended
            os.kill(pids[rng.choice(sorted(pids))], signal.SIGKILL)
        assert checkpoint.result(TIMEOUT_S) > 0
    finish(job, tmp_path)


def test_a_job_that_was_stopped_goes_on_from_its_checkpoint(
    run: Callable[[], Running], tmp_path: Path
) -> None:
    job = run()
    job.scale("count", 3)
    number = job.checkpoint()
    job.stop()
    again = run()
    assert again.checkpoint() == number + 1
    finish(again, tmp_path)


def test_an_error_in_an_operator_ends_the_job_and_says_what_it_was(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "import pyarrow as pa\n"
        "from statekit.engine.job import Job, KeyedOperator\n"
        "class Wrong(KeyedOperator):\n"
        "    def process(self, batch):\n"
        "        return 1 // 0\n"
        "def read(task, tasks, start):\n"
        "    yield pa.record_batch({'k': ['a']})\n"
        f"job = Job('j').source(read).key_by('k').process(Wrong).sink({str(tmp_path / 'out')!r})\n"
    )
    job = start(str(file), tmp_path / "job")
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        job.wait(TIMEOUT_S)


def test_two_stages_are_scaled_and_a_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORDCOUNT_FOLDER", str(tmp_path))
    with start(f"{JOB}:two", tmp_path / "job") as job:
        job.scale("count", 3)
        job.scale("total", 3)
        first = job.checkpoint()
        job.scale("count", 1)
        os.kill(job.pids["total-0"], signal.SIGKILL)
        assert job.checkpoint() > first
        (tmp_path / "enough").write_text("")
        job.wait(TIMEOUT_S)
    expected: Counter[int] = Counter()
    for word, count in counted(tmp_path).items():
        expected[len(word)] += count
    found = defaultdict(list)
    for batch in read_results(tmp_path / "results"):
        for length, total in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            found[length].append(total)
    assert {length: sorted(totals) for length, totals in found.items()} == {
        length: [*range(1, total + 1)] for length, total in expected.items()
    }


def test_windows_fire_once_and_complete_while_a_stage_is_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that fires early lacks records, and a record that comes after it fires it again."""
    monkeypatch.setenv("WORDCOUNT_FOLDER", str(tmp_path))
    with start(f"{JOB}:windows", tmp_path / "job") as job:
        for workers in (3, 1, 2):
            job.scale("count", workers)
        (tmp_path / "enough").write_text("")
        job.wait(TIMEOUT_S)
    expected: Counter[tuple[str, int]] = Counter()
    size = wordcount.WINDOW_MS
    for task in range(2):
        for number in range(int((tmp_path / f"clicked-{task}").read_text())):
            batch = wordcount.clicks(task, number)
            for word, at in zip(batch["word"].to_pylist(), batch["at"].to_pylist(), strict=True):
                expected[word, at // size * size + size] += 1
    found = [
        tuple(row.values()) for b in read_results(tmp_path / "results") for row in b.to_pylist()
    ]
    assert sorted(found) == sorted((word, end, n) for (word, end), n in expected.items())


def test_an_operator_with_two_inputs_is_scaled_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORDCOUNT_FOLDER", str(tmp_path))
    with start(f"{JOB}:joined", tmp_path / "job") as job:
        job.scale("count", 3)
        job.checkpoint()
        os.kill(job.pids["clicks-1"], signal.SIGKILL)
        job.checkpoint()
        job.scale("count", 1)
        (tmp_path / "enough").write_text("")
        job.wait(TIMEOUT_S)
    expected = Counter({("texts", word): n for word, n in counted(tmp_path).items()})
    for task in range(2):
        for number in range(int((tmp_path / f"clicked-{task}").read_text())):
            batch = wordcount.clicks(task, number)
            expected.update(("clicks", word) for word in batch["word"].to_pylist())
    found = defaultdict(list)
    for batch in read_results(tmp_path / "results"):
        for row in batch.to_pylist():
            found[row["from"], row["word"]].append(row["count"])
    assert {at: sorted(some) for at, some in found.items()} == {
        at: [*range(1, n + 1)] for at, n in expected.items()
    }
