# The compiled binding. Its names are those of csrc/statekit.h, which is not repeated here.
from typing import Any

ffi: Any
lib: Any
