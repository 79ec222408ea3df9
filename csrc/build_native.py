"""Builds statekit._native, the cffi binding of the store (API mode, limited API).

The declarations come from statekit.h, the one public header, so they are never kept twice:
cffi reads it without its preprocessor lines, except `#define NAME integer`. Run by setup.py;
by hand, `python setup.py build_ext --inplace`.

The extension is stripped: debug information is four fifths of it, and users have no use for it.
The environment variable STATEKIT_CFLAGS adds to the compiler's and the linker's arguments, for
example `-DSK_TESTING -fsanitize=address,undefined` or `-g`, and then nothing is stripped.
"""

import os
import re
import shlex
from pathlib import Path

from cffi import FFI

CSRC = Path(__file__).resolve().parent
ROOT = CSRC.parent

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_INTEGER = re.compile(r"#define\s+(\w+)\s+(-?(?:0[xX][0-9a-fA-F]+|\d+))\s*$")


def cdef_of(header: str) -> str:
    """The part of a C header that cffi understands."""
    lines = []
    for line in _COMMENT.sub(" ", header).splitlines():
        if not line.lstrip().startswith("#"):
            lines.append(line.rstrip())
        elif constant := _INTEGER.match(line.strip()):
            lines.append(f"#define {constant[1]} {constant[2]}")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def relative(paths: list[Path]) -> list[str]:
    """setuptools wants names relative to the project's root, and the same order every time."""
    return sorted(str(path.relative_to(ROOT)) for path in paths)


_extra = shlex.split(os.environ.get("STATEKIT_CFLAGS", ""))

ffibuilder = FFI()
ffibuilder.cdef(cdef_of((CSRC / "statekit.h").read_text()))
ffibuilder.set_source(
    "statekit._native",
    '#include "statekit.h"',
    sources=relative(list(CSRC.glob("*.c"))),
    depends=relative(list(CSRC.glob("*.h"))),
    include_dirs=["csrc"],
    libraries=["pthread"],
    # -g0 undoes the -g that Python itself was compiled with, and STATEKIT_CFLAGS may undo that.
    extra_compile_args=[
        "-std=c11",
        "-O3",
        "-g0",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        *_extra,
    ],
    extra_link_args=_extra or ["-s"],
)
