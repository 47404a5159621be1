"""`report`: replays side by side, or the list of all, in every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actordbg.actor.hub_model import cached_file
from actordbg.base.errors import UsageError
from actordbg.catalog.query import open_fresh
from actordbg.document.command_result import CommandResult
from actordbg.judge.exports import render_csv
from actordbg.judge.load_replays import ALL, load, report_blocks
from actordbg.judge.replay_document import document
from actordbg.judge.replay_list import index_document, listed
from actordbg.replay.replay_data import ReplayData
from actordbg.store.layout import Store

if TYPE_CHECKING:
    from actordbg.judge.token_charts import Texts

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, eq=False, repr=False)
class Report(CommandResult):
    """A report. It says what the results are, so that it is always ok; `verdict` has their worst."""

    store: Store | None = None
    names: Sequence[str] = ()
    where: str | None = None

    @cached_property
    def replays(self) -> tuple[ReplayData, ...]:
        """The replays, with their results."""
        assert self.store is not None
        return load(self.store, self.names, self.where).replays

    def to_csv(self) -> str:
        """Return a header row, and a row for each result."""
        return render_csv(self.replays)


def report(store: Store, names: Sequence[str], where: str | None, *, tokenizer: str | Path | None, charts: bool) -> Report:
    """Report replays, side by side if there are several; ["all"] lists them with their verdicts. charts: draw them."""
    texts = texts_of(tokenizer)
    about: dict[str, Any] = {"store": store, "names": tuple(names), "where": where}
    if list(names) == [ALL] and where is None:
        catalog = open_fresh(store)
        blocks, page = (index_document(catalog, commands=commands) for commands in (False, True))
        return Report(True, {"replays": listed(catalog)}, blocks, page, **about)
    material = load(store, names, where)
    summary = material.summary()
    return Report(True, asdict(summary), report_blocks(store, material, texts) if charts else document(summary), **about)


def texts_of(path: str | Path | None) -> Texts | None:
    """Return a function that decodes token ids with a local tokenizer; None if `path` is None.

    Downloads nothing and runs no model code.
    """
    if path is None:
        return None
    path = Path(path)
    from tokenizers import Tokenizer

    file = path / _TOKENIZER if path.is_dir() else path if path.is_file() else cached_file(str(path), _TOKENIZER)
    if file is None or not file.is_file():
        hint = f"pass a folder with a {_TOKENIZER}, or that file; for a hub model, first run `hf download NAME {_TOKENIZER}`"
        raise UsageError(f"--tokenizer {path}: no such folder or file, and nothing is downloaded", hint=hint)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  the library raises Exception itself
        raise UsageError(f"--tokenizer {path}: {error}", hint="pass a tokenizer.json of the tokenizers library") from None

    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
