"""Findings that are not fixed yet. Lives keep away from what they are about.

Take a name out when its finding is fixed; `python -m tests.lives --fixed NAME` tries that.
"""

KNOWN: dict[str, str] = {
    "1.3": "leaves that are merged back are freed afterwards",
    "1.4": "a finished hand-over is not durable at an old owner with a home",
    "1.5": "key-groups that are given back after a barrier are in no part of it",
    "1.12": "epochs are forgotten with a home that is reopened",
    "same home": "merging providers that were opened apart on one home deletes what was merged",
    "late parts": "a provider made after a barrier hands over to one before it: its part grows",
}
