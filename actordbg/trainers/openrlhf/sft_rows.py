"""Rows of a local data set as OpenRLHF's SFT makes them: by its own data set class, with its chat template and its loss mask.

Files are read as data: JSON lines, JSON, CSV, parquet, Arrow, a folder of these, or a data set that was saved. No script of a
data set runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.trainers.openrlhf import cannot_import

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_CHATS = ("messages", "conversations", "conversation")
_PAIRS = (("input", "output"), ("prompt", "response"), ("prompt", "completion"), ("question", "response"),
          ("question", "answer"), ("instruction", "output"))  # fmt: skip
"""Names of columns with chats, and of pairs of columns with a prompt and its response."""
_TEXT = "text"
"""The name of a column of plain text, all of whose tokens count: what OpenRLHF calls pretraining."""


def sft_rows(source: Path, model: str, max_len: int, most: int) -> Iterator[dict[str, Tensor]]:
    """Yield sequences [1, S], attention_mask [1, S] and action_mask [1, S-1], the tokens of responses, of up to `most` samples.

    model: a folder with a tokenizer. max_len: most tokens of a sample. Raises UsageError for a source that cannot be read so, and
    EnvironmentProblem without OpenRLHF, `datasets` or a tokenizer.
    """
    try:
        from openrlhf.datasets.sft_dataset import SFTDataset
        from transformers import AutoTokenizer
    except ImportError as error:
        raise cannot_import(str(error)) from error
    data = _loaded(source)
    given = _columns(source, data.column_names)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(
            f"{model} has no tokenizer: {error}", hint="pass --model PATH of a folder with a tokenizer"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    strategy = SimpleNamespace(args=SimpleNamespace(data=SimpleNamespace(**given)))
    chats = given["apply_chat_template"]
    if chats and not tokenizer.chat_template:
        raise UsageError(f"{source} has chats, and {model} has no chat template", hint="use a prompt and a response as columns")
    texts = not chats and given["output_key"] is None
    made = SFTDataset(data, tokenizer, max_len, strategy, pretrain_mode=texts, multiturn=chats, num_processors=None)
    for at in islice(range(len(made)), most):
        ids, mask, loss_mask = (part.squeeze(1) for part in made.collate_fn([made[at]]))
        if loss_mask.any():
            actions = loss_mask[:, :-1].bool()
            yield {"sequences": ids, "attention_mask": mask.long(), "action_mask": actions}


def _loaded(source: Path) -> Any:
    try:
        from datasets import Dataset, load_dataset, load_from_disk
    except ImportError as error:
        raise EnvironmentProblem("--dataset needs `datasets`", hint="pip install datasets") from error
    files = sorted(each for each in source.rglob("*") if each.suffix in _READERS) if source.is_dir() else [source]
    kinds = {_READERS.get(each.suffix) for each in files}
    saved = any((source / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if not saved and (len(kinds) != 1 or None in kinds or not source.exists()):
        known = ", ".join(_READERS)
        raise UsageError(
            f"{source} is not a data set", hint=f"name a file ({known}), a folder of one kind of them, or a saved data set"
        )
    try:
        if saved:
            data = load_from_disk(str(source))
        else:
            data = load_dataset(str(kinds.pop()), data_files=[str(each) for each in files], split="train")
    except Exception as error:  # a reader of any format may raise anything
        raise UsageError(f"{source} cannot be read: {error}", hint="open it with `datasets` for details") from error
    return data if isinstance(data, Dataset) else data.get("train", next(iter(data.values())))


def _columns(source: Path, names: list[str]) -> dict[str, Any]:
    chat = next((name for name in _CHATS if name in names), None)
    if chat is not None:
        return {"input_key": chat, "output_key": None, "apply_chat_template": True}
    pair = next((pair for pair in _PAIRS if {*pair} <= {*names}), None)
    if pair is None and _TEXT in names:
        return {"input_key": _TEXT, "output_key": None, "apply_chat_template": False}
    if pair is None:
        known = ", ".join((_TEXT, *_CHATS, *("/".join(pair) for pair in _PAIRS)))
        raise UsageError(f"{source} has the columns {', '.join(names)}", hint=f"rename them, to any of: {known}")
    return {"input_key": pair[0], "output_key": pair[1], "apply_chat_template": False}
