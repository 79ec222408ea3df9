"""The part of the build that pyproject.toml cannot say: the C extension and its wheel's tag."""

from setuptools import setup

setup(
    cffi_modules=["csrc/build_native.py:ffibuilder"],
    # The extension keeps to the limited API, so one wheel serves every CPython from 3.11 on.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
