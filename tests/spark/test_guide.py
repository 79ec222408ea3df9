"""The Python of docs/spark.md runs from top to bottom, and prints what it promises."""

import re
from pathlib import Path
from typing import Any

import pytest

pyspark = pytest.importorskip("pyspark")

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "spark.md"


@pytest.mark.skipif(
    pyspark.__version__.startswith("3."), reason="it shows what PySpark 3.5 cannot do"
)
def test_the_guide_runs(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    scope: dict[str, object] = {}
    promised = []
    capsys.readouterr()
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), scope)
        promised += re.findall(r"^ *print\(.*\)\s*#\s*(.*)$", block, re.MULTILINE)
    assert len(promised) == 6
    assert capsys.readouterr().out.splitlines() == promised
