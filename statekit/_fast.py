"""The compiled bases of the typed states (csrc/py.h), from the shared object of the cffi module.

They are a second module in one file, so that both modules work on the same stores: an import would
look for a file of that name, so it is loaded by hand.
"""

from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location

import statekit._native as _native

_loader = ExtensionFileLoader(__name__, _native.__file__)
_spec = spec_from_file_location(__name__, _native.__file__, loader=_loader)
assert _spec is not None
_module = module_from_spec(_spec)
_loader.exec_module(_module)
_module.set_address_of(lambda pointer: int(_native.ffi.cast("uintptr_t", pointer)))

Codec = _module.Codec
Containers = _module.Containers
Keyed = _module.Keyed
ListPlace = _module.ListPlace
Lists = _module.Lists
MapPlace = _module.MapPlace
NO_DEFAULT = _module.NO_DEFAULT
Numbers = _module.Numbers
Place = _module.Place
Plan = _module.Plan
SetPlace = _module.SetPlace
Single = _module.Single
Values = _module.Values
