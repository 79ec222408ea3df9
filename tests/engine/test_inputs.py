"""Sources: files of any kind, Kafka, sockets: what they gave they give again, from anywhere."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_workloads import TIMEOUT_S, write_job

from statekit.cli.app import app
from statekit.engine.job import Placed
from statekit.engine.lines import lines
from statekit.engine.running import start
from statekit.engine.sink import read_results
from statekit.engine.sources import files
from statekit.engine.workloads import workload
from statekit.errors import EngineError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def placed(items: Any) -> list[Placed]:
    return [item for item in items if isinstance(item, Placed)]


def rows_of(items: list[Placed]) -> list[dict[str, Any]]:
    return [row for item in items for row in item.batch.to_pylist()]


# ---- Files


@pytest.mark.parametrize("kind", ["arrow", "csv", "jsonl"])
def test_a_workload_in_files_is_the_workload(kind: str, tmp_path: Path) -> None:
    done = call(
        "workgen", "key_count", "--records", 2500, "--set", "zipf=1", "--format", kind,
        "--files", 3, "--out", tmp_path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "2,500 records of key_count in 3 file(s)" in done.output
    read = files(tmp_path, rows=100)
    rows: list[dict[str, Any]] = []
    for task in range(2):
        whole = placed(read(task, 2, 0))
        rows += rows_of(whole)
        for at in (0, len(whole) // 2, len(whole) - 1):  # from each position, the rest
            again = placed(read(task, 2, [*whole[at].position]))
            assert rows_of(again) == rows_of(whole[at + 1 :])
    work = workload("key_count", records=2500, zipf=1)
    events = work.events(range(2500))
    assert [row["key"] for row in sorted(rows, key=lambda row: row["seq"])] == [*events["key"]]


def test_a_job_reads_files(tmp_path: Path) -> None:
    parameters = {"records": 3000, "keys": 100, "rows": 100, "sources": 2}
    inputs = tmp_path / "inputs"
    done = call(
        "workgen", "key_count", "--records", 3000, "--set", "keys=100", "--files", 2,
        "--format", "jsonl", "--out", inputs, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    path = write_job(tmp_path, "key_count", {**parameters, "input": str(inputs)})
    with start(str(path), tmp_path / "job") as job:
        job.wait(TIMEOUT_S)
    assert workload("key_count", **parameters).check(tmp_path / "results") == 3000


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.csv", "x\n1\n2,3\n", "cannot be read"),
        ("a.jsonl", "{", "cannot be read"),
        ("a.arrow", "no", "cannot be read"),
        ("a.txt", "x", "its name ends in none of"),
        (None, "", "no file is named"),
    ],
)
def test_files_that_cannot_be_read_say_why(
    name: str | None, text: str, match: str, tmp_path: Path
) -> None:
    if name:
        (tmp_path / name).write_text(text)
    with pytest.raises(EngineError, match=match):
        list(files(tmp_path)(0, 1, 0))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("none",), "There are key_count"),
        (("key_count", "--files", "0"), "pass 1 or more"),
        (("key_count", "--set", "x=1"), "unknown field `x`"),
        (("key_count", "--records", "-1"), "pass 0 or more"),
    ],
)
def test_what_cannot_be_written_is_one_message(
    arguments: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    done = call("workgen", *arguments, "--out", tmp_path)
    assert (done.exit_code, text in done.output) == (1, True), done.output


def test_files_that_are_there_are_not_written_over(tmp_path: Path) -> None:
    for expected in (0, 1):
        done = call("workgen", "key_count", "--records", 10, "--out", tmp_path)
        assert done.exit_code == expected
    assert "is there already" in done.output


# ---- A socket


def test_lines_of_a_socket_come_once_though_the_source_begins_again(tmp_path: Path) -> None:
    sent = [f"line {at} é" for at in range(2000)]
    first, second = sent[:1000], sent[1000:]
    served: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for part, end in ((first, b"\nhalf a li"), (second, b"")):
                made, _ = server.accept()
                served.append(made)
                with made:
                    made.sendall("\n".join(part).encode() + end)
                    made.shutdown(socket.SHUT_WR)
                    made.recv(1)  # until the other end closes

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        read = lines(f"127.0.0.1:{server.getsockname()[1]}", tmp_path)
        position: int = 0
        before: list[str] = []
        source = read(0, 1, 0)
        for item in source:  # it is killed when it has given most of the first part
            if isinstance(item, Placed) and len(before) < 500:
                before += item.batch["line"].to_pylist()
                position = item.position
            if (tmp_path / "lines").stat().st_size >= len("\n".join(first).encode()) + 10:
                break
        source.close()  # type: ignore[attr-defined]
        after = [row["line"] for row in rows_of(placed(read(0, 1, position)))]
        thread.join()
    assert before + after == sent
    with pytest.raises(EngineError, match="parallelism=1"):
        list(read(0, 2, 0))


# ---- Kafka


KAFKA_JOB = """
import os
from pathlib import Path
import pyarrow as pa
import pyarrow.compute as pc
from statekit.engine.job import Job, KeyedOperator
from statekit.engine.kafka import topic

class Count(KeyedOperator):
    def open(self, kv):
        self.counts = kv.value("counts", int, default=0)

    def process(self, batch):
        counts = self.counts.add_many(batch["key"], returning=True)
        return pa.record_batch({"key": batch["key"], "count": counts.to_arrow()})

def text(batch):
    return pa.record_batch({"key": batch["key"].cast(pa.string())})

def job(brokers: str, folder: str) -> Job:
    made = Job("kafka").source(topic(brokers, "clicks", rows=50), parallelism=2)
    return made.map(text).key_by("key").process(Count, name="count").sink(folder)
"""


def counts(results: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for batch in read_results(results):
        for key, count in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            found.setdefault(key, []).append(count)
    return found


def test_records_of_kafka_count_once_though_a_source_is_killed(tmp_path: Path) -> None:
    kafka = pytest.importorskip("confluent_kafka", reason="pip install confluent-kafka")
    mock = [sys.executable, str(EXAMPLES / "kafka_demo.py")]
    pipe = subprocess.PIPE
    rng = random.Random(5)
    expected: Counter[str] = Counter()
    with subprocess.Popen(mock, stdin=pipe, stdout=pipe, text=True) as served:
        assert served.stdout is not None
        brokers = served.stdout.readline().strip()
        producer = kafka.Producer({"bootstrap.servers": brokers})
        for _ in range(5000):
            key = f"user-{rng.randrange(300)}"
            producer.produce("clicks", key=key, value="1")
            expected[key] += 1
        assert producer.flush(60) == 0
        (tmp_path / "kafka_job.py").write_text(KAFKA_JOB)
        (tmp_path / "job.toml").write_text(
            f'job = "kafka_job.py"\n[parameters]\nbrokers = "{brokers}"\n'
            f"folder = '{tmp_path / 'results'}'\n"
        )
        with start(str(tmp_path / "job.toml"), tmp_path / "job") as job:
            job.checkpoint()
            os.kill(job.pids["source-1"], signal.SIGKILL)
            found: dict[str, list[int]] = {}
            while sum(map(len, found.values())) < 5000:  # a topic has no end
                job.checkpoint()
                found = counts(tmp_path / "results")
    assert {key: sorted(some) for key, some in found.items()} == {
        key: [*range(1, n + 1)] for key, n in expected.items()
    }
