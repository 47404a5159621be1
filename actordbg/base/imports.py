"""Import large packages without the garbage collector looking on.

torch, transformers and DeepSpeed make half a million objects that stay, and no garbage. Collecting while they are imported costs
a sixth of that time, and each full collection afterwards a third of a second: so they are put out of its sight.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_collecting(module: str) -> Iterator[None]:
    """Around the first import of this module: what is there then stays for ever. Later it does nothing: there may be garbage."""
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
