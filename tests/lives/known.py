"""Findings that are not fixed yet, or are refused now. Lives keep away from what they are about.

Take a name out when its finding is fixed; `python -m tests.lives --fixed NAME` tries that.
"""

KNOWN: dict[str, str] = {
    "same home": "merging providers that were opened apart on one home is refused",
    "late parts": "a provider made after a barrier hands over to one before it: its part grows",
}
