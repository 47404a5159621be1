"""torch's history of CUDA allocations, kept as files beside a replay's results (`--memory-snapshot`), one for each rank.

torch writes the file, a pickle in its own form, and https://pytorch.org/memory_viz or `torch/cuda/_memory_viz.py` show it;
nothing here reads one. It is written after every input, in place of the one before, so a worker that dies leaves the history up
to its last input. What an input that failed left (out of memory, above all) has a file of its own.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

MOST_ENTRIES = 100_000
"""Allocations and frees that torch remembers; the oldest are forgotten."""


class MemoryHistory:
    """Records from now on until `stop`. folder: the replay's."""

    def __init__(self, folder: Path, rank: int) -> None:
        import torch

        self._folder, self._rank = folder, rank
        torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES)

    def keep(self, failed: str = "") -> None:
        """Write the history as it is now, whole or not at all. failed: the dump that just failed."""
        import torch

        name = f"memory-rank{self._rank}{f'-{failed}' if failed else ''}.pickle"
        part = self._folder / f".{name}.part"
        try:
            torch.cuda.memory._dump_snapshot(os.fspath(part))  # type: ignore[no-untyped-call]
            part.chmod(0o600)
            part.replace(self._folder / name)
        except (OSError, RuntimeError) as error:  # the input's result counts, and its log says what is missing
            logging.getLogger(__name__).warning("the history of allocations could not be kept: %s", error)

    def stop(self) -> None:
        """Record no more."""
        import torch

        torch.cuda.memory._record_memory_history(enabled=None)


def reserved() -> dict[str, int]:
    """What torch's allocator holds of this process's GPU, for the journal; {} where no CUDA is in use."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {"cuda_reserved_bytes": int(torch.cuda.memory_reserved())}
