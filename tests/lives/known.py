"""Findings that are not fixed yet. Lives avoid what they are about.

Take a name out when its finding is fixed; `python -m tests.lives --fixed NAME` tries that.
"""

KNOWN: dict[str, str] = {}
