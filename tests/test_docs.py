"""What the documentation shows is true: its Python runs, its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
ELSEWHERE = {"docs/spark.md"}  # tests/spark/test_guide.py has a session for it


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if python_blocks(ROOT / name) and name not in ELSEWHERE]
)
def test_python_of_a_page_runs_from_top_to_bottom(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scope: dict[str, object] = {}
    shown = []
    for block in python_blocks(ROOT / name):
        exec(compile(block, name, "exec"), scope)
        # `print(...)  # text` promises what is printed; a long one ends in a line of its own
        shown += re.findall(r"^(?:print\(.*\)|\))\s*#\s*(.*)$", block, flags=re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == shown


@pytest.mark.parametrize("name", NAMES)
def test_links_within_the_project_lead_to_files(name: str) -> None:
    page = ROOT / name
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_that_a_page_names_exist(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", (ROOT / name).read_text(), re.M))
    targets = {first or second for first, second in named}
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets), targets


def test_files_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:statekit|csrc|tests|docs)/[\w./]+)`", text)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_package_is_in_the_picture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawn = re.findall(r"^ (\w+)  +\w", text, re.MULTILINE)
    packages = {path.parent.name for path in (ROOT / "statekit").glob("*/__init__.py")}
    assert {*drawn} - {"the"} == packages
