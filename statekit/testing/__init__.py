"""For those who write a home of their own: the tests that every home must pass."""

from statekit.testing.conformance import HomeConformance

__all__ = ["HomeConformance"]
