"""The text of token ids, for charts of tokens: from a local tokenizer, without any code of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from actordbg.actor.hub_model import cached_file
from actordbg.base.errors import UsageError

if TYPE_CHECKING:
    from actordbg.judge.token_charts import Texts

_TOKENIZER = "tokenizer.json"


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
