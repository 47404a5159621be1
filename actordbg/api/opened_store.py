"""A store as an object: its dumps, adding to it, and the commands that replay, each of which returns a `CommandResult`.

    store = actordbg.open("store")
    store.check(where="seq_len>4096", model="/models/llama-3.1-8b", packing=True).raise_if_wrong()

Settings are those of the command line, by their names with underscores ([list](replay-settings.md)). As there, the environment
and `actordbg.toml` give the defaults.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from actordbg.api.client import Advance, Client
from actordbg.api.desk import Desk, DumpSelection
from actordbg.api.dump_list import DumpList, StoredDump, typed
from actordbg.api.store_commands import SAMPLE, StoreCommands
from actordbg.base.errors import Unsupported
from actordbg.catalog.query import get_dump
from actordbg.config.sources import load_settings
from actordbg.store.layout import Store

if TYPE_CHECKING:
    from torch import Tensor

    from actordbg.api.recording import CallRecording


def _quiet(steps: int, note: str = "", total: int | None = None) -> None:
    """Report no progress."""


class OpenStore(StoreCommands):
    """A store by its folder, made when something is added. on_progress: called as `on_progress(steps, note="", total=None)`.

    accept_others: load the models that other users' replays name; without it they are refused.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        on_progress: Advance = _quiet,
        accept_others: bool = False,
    ) -> None:
        settings = load_settings(folder if folder is None else os.fspath(folder))
        if settings.url is not None:
            hint = "run `actordbg store pull`, and open the folder"
            raise Unsupported(f"{settings.url} is not a folder of this machine", hint=hint)
        super().__init__(Desk(Store(settings.store), settings, Client(on_progress, accept_others)))

    def __repr__(self) -> str:
        return f"<the store {self.folder}>"

    def dumps(self, where: str | None = None, *, order: str = "time") -> DumpList:
        """Return the dumps that a condition selects, by time, newest, length or longest. Raises WhereError."""
        return DumpList(self._store, where, order)

    def sample(self, where: str | None = None, count: int = SAMPLE) -> DumpList:
        """Return a diverse sample of the dumps that a condition selects: those that `check` replays."""
        return self.dumps(DumpSelection(where, diverse=count).narrowed(self._store).where)

    def dump(self, name: str = "last") -> StoredDump:
        """Return a dump by its id, the beginning of an id, or its handle; by default the newest."""
        return typed(self._store, get_dump(self._store.require(), name))

    def add(
        self,
        sequences: Tensor,
        attention_mask: Tensor | None = None,
        *,
        action_mask: Tensor | None = None,
        log_probs: Tensor | None = None,
        entropy: Tensor | None = None,
        temperature: float = 1.0,
        model: Any = None,
        run: str = "added",
    ) -> StoredDump:
        """Add a batch as a dump. sequences: token ids, int [B, S]. attention_mask: [B, S]; None: all tokens are real.

        action_mask: [B, A], which of the last A next tokens count. log_probs, entropy: what the run computed, [B, A], or [B, S-1]
        without an action mask; `check(recorded=True)` compares them. model: where its name and dtype are read from.
        """
        import torch

        from actordbg.api.recording import CallRecording, required
        from actordbg.trainers.plain_adapter import Plain
        from actordbg.trainers.seam import Rows, Scores

        rows = Rows(torch.nn.Module() if model is None else model, sequences, attention_mask, action_mask, temperature)
        required(rows, Scores(log_probs, entropy))
        recording = CallRecording("plain", self._store, run)
        recording.write(rows, Scores(log_probs, entropy), Plain.seams[0])
        return recording.dumps()[0]

    def record(self, target: Any, *, run: str = "recorded") -> CallRecording:
        """Record each call of a model, of an adapter's functions, or of a function of rows (`tapping.Tap`), with its log-probs.

        Use it as a context manager, or call what it returns instead of the target: `score = store.record(score)`.
        """
        from actordbg.api.recording import CallRecording

        return CallRecording(target, self._store, run)


def open(
    folder: str | os.PathLike[str] | None = None, *, on_progress: Advance = _quiet, accept_others: bool = False
) -> OpenStore:
    """Open a store: a folder, or by default that of ACTORDBG_STORE, `actordbg.toml` or ./store. See `OpenStore`."""
    return OpenStore(folder, on_progress=on_progress, accept_others=accept_others)


def record(target: Any, store: OpenStore | str | os.PathLike[str], *, run: str = "recorded") -> CallRecording:
    """Record each call of a model, of an adapter's functions, or of a function of rows into a store: see `OpenStore.record`."""
    return (store if isinstance(store, OpenStore) else OpenStore(store)).record(target, run=run)
