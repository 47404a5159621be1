"""Keeps the environment's secrets out of every text that is written: an exception's message may quote one.

A value counts as secret if its variable's name says so (TOKEN, KEY, SECRET, PASS, CRED, AUTH) and it has at least 8
characters. Texts are rare here (an error, a string argument), so the environment is looked at each time.
"""

from __future__ import annotations

import os
import re

_NAMES = re.compile(r"TOKEN|KEY|SECRET|PASS|CRED|AUTH", re.IGNORECASE)
_SHORTEST = 8
HIDDEN = "[hidden]"


def scrub(text: str) -> str:
    """`text` with every secret of the environment replaced."""
    if len(text) < _SHORTEST:
        return text
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and value in text and _NAMES.search(name):
            text = text.replace(value, HIDDEN)
    return text
