"""Fail points: off they do nothing, on they act at the n-th visit and count all of them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from threading import Thread

import pytest

from statekit import Store, failpoints
from statekit._native import lib
from statekit.errors import ArgumentError, StoreMemoryError

A, B = "test.a", "test.b"
failpoints.register(A, B)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    failpoints.configure(os.environ.get(failpoints.VARIABLE))


def run(code: str, text: str | None) -> "subprocess.CompletedProcess[str]":
    environment = {key: value for key, value in os.environ.items() if key != failpoints.VARIABLE}
    if text is not None:
        environment[failpoints.VARIABLE] = text
    code = "from statekit.failpoints import *; register('p', 'q');" + code
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_off_they_do_nothing_and_count_nothing() -> None:
    failpoints.configure(None)
    assert failpoints.visit(A) is None
    assert failpoints.visit("nobody registered this") is None
    assert failpoints.visits() == {}


def test_names_lists_what_was_registered() -> None:
    assert {A, B} <= set(failpoints.names())
    assert failpoints.names() == sorted(failpoints.names())


def test_on_without_entries_they_only_count() -> None:
    failpoints.configure("")
    assert [failpoints.visit(A), failpoints.visit(A)] == [None, None]
    assert failpoints.visits()[A] == 2
    assert failpoints.visits()[B] == 0


def test_error_comes_at_the_nth_visit_and_only_there() -> None:
    failpoints.configure(f"{A}=error@2")
    failpoints.visit(A)
    failpoints.visit(B)
    with pytest.raises(OSError, match=f"fail point {A}, visit 2"):
        failpoints.visit(A)
    assert failpoints.visit(A) is None


def test_one_point_can_have_several_entries() -> None:
    failpoints.configure(f" {A}=short@1 ; {A}=error@2;; {B}=short ")
    assert failpoints.visit(A) == "short"
    assert failpoints.visit(B) == "short"
    with pytest.raises(OSError, match=A):
        failpoints.visit(A)


def test_delay_waits() -> None:
    failpoints.configure(f"{A}=delay:30")
    start = time.monotonic()
    assert failpoints.visit(A) is None
    assert time.monotonic() - start >= 0.03


def test_configure_starts_all_counts_again() -> None:
    failpoints.configure("")
    failpoints.visit(A)
    failpoints.configure(f"{A}=short")
    assert failpoints.visits()[A] == 0
    assert failpoints.visit(A) == "short"


def test_a_point_that_was_not_registered_is_a_bug() -> None:
    failpoints.configure("")
    with pytest.raises(AssertionError, match="not registered"):
        failpoints.visit("test.unknown")


@pytest.mark.parametrize(
    "text",
    [
        *("a", "a=", "=error", "a=explode", "a=b=c", "a=kill:1", "a=error:5"),
        *("a=error@0", "a=error@x", "a=error@-1", "a=error@1@2", "a=error@9999999999"),
        *("a=delay", "a=delay:", "a=delay:x"),
    ],
)
def test_what_is_no_entry_is_refused_and_changes_nothing(text: str) -> None:
    failpoints.configure(f"{A}=short")
    with pytest.raises(ArgumentError, match=r"is no fail point. Use name=action"):
        failpoints.configure(f"{B}=error;{text}")
    assert failpoints.visit(B) is None
    assert failpoints.visit(A) == "short"


def test_environment_switches_them_on_and_kill_kills() -> None:
    done = run("visit('p'); print('once', flush=True); visit('p'); print('never')", "p=kill@2")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "once\n"


def test_an_empty_variable_counts_and_none_is_off() -> None:
    code = "visit('q'); print(visits().get('q'), visits().get('p'))"
    assert run(code, "").stdout == "1 0\n"
    assert run(code, None).stdout == "None None\n"


def test_a_bad_variable_is_told_at_import() -> None:
    done = run("print('never')", "p=explode")
    assert done.returncode == 1
    assert "'p=explode' is no fail point" in done.stderr


def test_counts_are_exact_with_threads() -> None:
    failpoints.configure(f"{A}=short@150")
    answers: list[str | None] = []
    threads = [
        Thread(target=lambda: answers.extend(failpoints.visit(A) for _ in range(100)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failpoints.visits()[A] == 400
    assert answers.count("short") == 1


@pytest.mark.skipif(not lib.sk_is_testing_build(), reason="the library has none in this build")
def test_the_points_of_the_library_follow_the_same_rules() -> None:
    name = "native.snapshot.open"
    store = Store()
    store.snapshot().close()
    failpoints.configure(f"{name}=error@2")
    assert name in failpoints.names()
    store.snapshot().close()
    with pytest.raises(StoreMemoryError, match=name):
        store.snapshot()
    store.snapshot().close()
    assert failpoints.visits()[name] == 3
    failpoints.configure(f"{name}=error")
    failpoints.configure("")
    store.snapshot().close()
    assert failpoints.visits()[name] == 1
