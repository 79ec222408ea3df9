"""The package as a whole: what it needs, what it imports, and that its layers point one way."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import statekit
from statekit import _native

ROOT = Path(__file__).resolve().parent.parent
HEADER = (ROOT / "csrc" / "statekit.h").read_text()
PACKAGE = ROOT / "statekit"

# From the lowest layer up. Below all of them is the floor: the modules that are in no package.
# A package imports the floor and the packages before it, and the floor only itself.
PACKAGES = [
    "native",  # the C store
    "format",
    "storage",
    "render",
    "protocol",
    "homes",
    "checkpoint",
    "remote",
    "residence",
    "offline",
    "live",
    "state",
    "migration",
    "provider",
    "testing",
    "statekit",  # what users import: its __init__.py
    "spark",
    "engine",
    "cli",
    "__main__",
]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_native", ROOT / "csrc/build_native.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def header_functions() -> set[str]:
    code = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    return set(re.findall(r"\b(sk_\w+)\s*\(", code))


def test_core_dependencies_are_the_binding_and_the_codecs_only() -> None:
    needed = importlib.metadata.requires("statekit") or []
    core = [line for line in needed if "extra ==" not in line]
    assert sorted(re.split(r"[<>=!~ ]", line)[0] for line in core) == [
        "cffi",
        "msgpack",
        "msgspec",
    ]


def test_version_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert statekit.__version__ == project["version"]


def test_extras_are_those_of_the_design() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {"rocksdb", "redis", "remote", "arrow", "spark", "cli", "engine", "all"} <= set(extras)


def test_import_loads_no_optional_package() -> None:
    loaded = run_python(
        "import sys, statekit; kv = statekit.open('memory:'); v = kv.value('v', int);"
        "v.add_many(['a', 'b']); v.get_many(['a']); print(' '.join(sys.modules))"
    ).split()
    optional = {"numpy", "pyarrow", "pandas", "grpc", "rocksdict", "redis", "click", "pyspark"}
    optional |= {"fsspec", "s3fs", "lz4", "zstandard", "rich"}
    assert not optional & set(loaded)


def test_import_alone_imports_next_to_nothing() -> None:
    """A tool that might need state starts as quickly as without."""
    loaded = set(run_python("import sys, statekit; print(' '.join(sys.modules))").split())
    ours = {name for name in loaded if name.split(".")[0] == "statekit"}
    assert ours == {"statekit", "statekit.version"}
    heavy = {
        "msgspec",
        "msgpack",
        "cffi",
        "_cffi_backend",
        "importlib.metadata",
        "email",
        "zipfile",
    }
    heavy |= {"dataclasses", "inspect", "json", "logging", "socket", "tempfile", "threading"}
    assert not heavy & loaded


def test_a_state_in_memory_needs_neither_migration_nor_its_protocol() -> None:
    loaded = run_python(
        "import sys, statekit; kv = statekit.open('memory:'); kv.value('v', int).add('a');"
        "kv.close(); print(' '.join(sys.modules))"
    ).split()
    unused = {
        "statekit.migration.peer",
        "statekit.protocol.participant",
        "statekit.remote.security",
    }
    unused |= {"statekit.migration.shadow", "statekit.remote.channel", "concurrent.futures"}
    unused |= {"importlib.metadata", "email", "zipfile", "html", "socket", "selectors"}
    assert not unused & set(loaded)


def test_names_are_imported_when_they_are_asked_for() -> None:
    out = run_python(
        "import statekit\n"
        "assert set(statekit.__all__) <= set(dir(statekit))\n"
        "for name in statekit.__all__: getattr(statekit, name)\n"
        "from statekit import *\n"
        "assert open is statekit.open and errors.StateKitError is StateKitError\n"
        "print(sorted(set(statekit._MODULE_OF) ^ set(statekit.__all__)))"
    )
    assert out.strip() == "['__version__', 'errors']"
    with pytest.raises(AttributeError, match="module 'statekit' has no attribute 'opne'"):
        statekit.opne  # type: ignore[attr-defined]  # noqa: B018


def test_columns_of_lists_work_where_numpy_and_pyarrow_cannot_be_imported() -> None:
    out = run_python(
        "import sys; sys.modules['numpy'] = sys.modules['pyarrow'] = None\n"
        "import statekit; v = statekit.Store().state('v', 'i64', int)\n"
        "v.put_many([1, 2], [3, 4]); print(v.get_many([2, 1, 9]).to_list())"
    )
    assert out.strip() == "[4, 3, None]"


def test_every_function_of_the_header_is_bound() -> None:
    functions = header_functions()
    assert len(functions) > 50
    assert functions == {name for name in dir(_native.lib) if name.startswith("sk_")}


def test_every_integer_of_the_header_has_the_same_value_in_python() -> None:
    constants = re.findall(r"^#define (SK_\w+) (\d+)", HEADER, re.MULTILINE)
    enumerators = re.findall(r"\b(SK_\w+) = (\d+)", HEADER)
    assert len(constants) >= 8
    assert len(enumerators) >= 50
    for name, value in constants + enumerators:
        assert getattr(_native.lib, name) == int(value), name


def test_every_function_of_the_header_is_reachable_through_the_package() -> None:
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    used = set(re.findall(r"\bsk_\w+", source))
    testing_only = {"sk_fail_alloc", "sk_alloc_count", "sk_is_testing_build"}
    # C and other bindings call these instead of sk_i64_folded.
    testing_only |= {f"sk_{kind}_{op}" for kind in ("i64", "f64") for op in ("fold",)}
    assert header_functions() - used - testing_only == set()


def test_cdef_keeps_no_preprocessor_line_but_integers() -> None:
    header = """
        #ifndef X
        #define X
        #include <a.h>
        #define A 7 /* x */
        int f(void); // y
        #endif
    """
    cdef = build_script().cdef_of(header)
    assert cdef.split() == ["#define", "A", "7", "int", "f(void);"]


def test_extension_is_built_for_the_stable_abi() -> None:
    assert _native.__file__.endswith(".abi3.so")


def test_extension_is_stripped() -> None:
    """The names of a file's sections are in it as text. (Skipped if built with other flags.)"""
    if os.environ.get("STATEKIT_CFLAGS"):
        pytest.skip("built with STATEKIT_CFLAGS")
    data = Path(_native.__file__).read_bytes()
    assert b".dynsym" in data
    assert b".debug_info" not in data
    assert b".symtab" not in data


def sdist_files(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files that MANIFEST.in includes, as setuptools reads it, without the package itself."""
    egg_info = pytest.importorskip("setuptools.command.egg_info")
    monkeypatch.chdir(ROOT)
    found = egg_info.FileList()
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        if line and not line.startswith("#"):
            found.process_template_line(line)
    return set(found.files)


def test_sdist_has_docs_examples_and_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sdist_files(monkeypatch)
    assert {
        "README.md", "CHANGELOG.md", "LICENSE", "Makefile", "csrc/statekit.h", "docs/cli.md",
        "docs/states/list.md", "docs/make_cli_reference.py", "examples/demo.py",
        "benchmarks/bench_store.py", "benchmarks/results/store_growth.png", "tests/conftest.py",
    } <= found  # fmt: skip
    assert not [name for name in found if name.endswith((".so", ".pyc", ".o"))]
    assert not [name for name in found if name.startswith("benchmarks") and name.endswith(".json")]


def test_sdist_has_everything_that_is_kept_in_git(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "csrc", "docs", "examples", "benchmarks", "tests"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("this is no clone of the repository")
    missing = set(listed.stdout.splitlines()) - sdist_files(monkeypatch)
    assert {Path(name).parent for name in missing} <= {Path("benchmarks/results")}


def test_pictures_and_pages_that_the_docs_name_are_in_the_sdist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = sdist_files(monkeypatch)
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for name in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            target = (page.parent / name).resolve().relative_to(ROOT)
            is_package = target.parts[0] == "statekit"
            assert is_package or target.is_dir() or str(target) in found, f"{page.name}: {name}"


def test_every_version_that_the_limited_api_allows_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = int(project["requires-python"].removeprefix(">=3."))
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if ":: 3." in line]
    assert named == [f"3.{minor}" for minor in range(least, least + len(named))]
    assert "3.14" in named


def test_python_m_statekit_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "statekit", "--version"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"statekit {statekit.__version__}\n")


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


MODULES = {  # by name below statekit; the package itself is "statekit"
    ".".join(part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__")
    or "statekit": path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports_of(name: str, with_types: bool = True) -> set[str]:
    """The modules of statekit that a module imports, anywhere in its text.

    with_types: also those that only a type checker needs.
    """
    found = set()
    nodes: list[ast.AST] = [ast.parse(MODULES[name].read_text())]
    while nodes:
        node = nodes.pop()
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if with_types or not is_typing:
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("statekit"):
            below = (node.module or "").removeprefix("statekit").removeprefix(".")
            for alias in node.names:
                inside = f"{below}.{alias.name}".removeprefix(".")
                found.add(inside if inside in MODULES else below or "statekit")
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            found |= {one.removeprefix("statekit.") for one in names if one.startswith("statekit")}
    return found & {*MODULES}


def layer_of(name: str) -> int:
    first = name.partition(".")[0]
    return PACKAGES.index(first) + 1 if first in PACKAGES else 0


def test_every_package_has_its_layer() -> None:
    folders = {path.parent.relative_to(PACKAGE) for path in MODULES.values()} - {Path()}
    # A folder in a package has the layer of the package.
    assert {folder.parts[0] for folder in folders} == {*PACKAGES} - {"statekit", "__main__"}


@pytest.mark.parametrize("name", MODULES)
def test_no_layer_imports_a_higher_one(name: str) -> None:
    for imported in imports_of(name):
        assert layer_of(imported) <= layer_of(name), f"{name} imports {imported}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {name: imports_of(name, with_types=False) - {name} for name in MODULES}
    while ends := [name for name, needs in graph.items() if not needs & {*graph}]:
        for name in ends:
            del graph[name]
    assert not graph, f"in a circle, or above one: {sorted(graph)}"
