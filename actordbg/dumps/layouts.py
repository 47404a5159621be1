"""The layouts of files that runs leave behind: which field of a file is which part of a row. `LAYOUTS` is the table.

A layout says by which fields a file of it is known, where its rows are, and what their fields are called. `row_of` makes a
`FileRow` of any of them: its real tokens, and values beside them. Every list of values ends with the row: the last value is
that of the last token, whether a list covers all tokens, all but the first, or the response only. So one rule places all.

A layout is data, and a function only where a writer did something that a name cannot say. `docs/reference/layouts.md` is written
from the table; CONTRIBUTING.md has the recipe for another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from actordbg.base.errors import NewerFormat, Unsupported, UsageError
from actordbg.dumps.containers import ARCHIVE, DATA_PROTO, JSON_LINES
from actordbg.dumps.pickle_machine import corrupt

IDS, MASK, RESPONSE, LENGTH, ATTENTION, SAMPLE = (
    "ids",
    "action_mask",
    "response_length",
    "length",
    "attention_mask",
    "sample_mask",
)
OF_TOKENS = (
    MASK, "log_probs", "old_log_probs", "rollout_log_probs", "base_action_log_probs", "advantages", "returns", "values",
    "entropy",
)  # fmt: skip
"""Parts of a row that have a value for each token, or for each token of its response."""
OF_ROWS = ("rewards", "step", "rank")
PARTS = (IDS, ATTENTION, *OF_TOKENS, *OF_ROWS, RESPONSE, LENGTH, SAMPLE)
ALIGN, NEXT, OWN = "align", "next", "own"
Values: TypeAlias = Any
"""A numpy array."""
Fields: TypeAlias = Mapping[str, Any]


@dataclass
class FileRow:
    """A row of a file. ids: its real tokens [T]. values: by part, [L] with L <= T, of its last L tokens. odd: parts whose values
    do not fit it. number: its place in the file.
    """

    ids: Values
    values: dict[str, Values]
    number: int = 0
    step: int | None = None
    rank: int = 0
    reward: float | None = None
    odd: dict[str, Values] = field(default_factory=dict)


@dataclass(frozen=True)
class FileLayout:
    """How a writer lays out rows. marks: fields by which a file is known: of the whole value, or of a row, if that is its unit.

    source: where the fields were read, and in which version. container: None for any. fields: the writer's name of each part.
    rows: yields the rows of a content, each with the writer's names. step: the number of a step by its content or path.
    incomplete: why a file may lack rows, "" if it does not. folder: how many folders above a file its run's is. notes: what a
    reader would not expect.
    """

    name: str
    writer: str
    source: str
    marks: frozenset[str]
    fields: Mapping[str, str]
    container: str | None = None
    rows: Callable[[Fields], Iterator[Fields]] = lambda content: iter((content,))
    step: Callable[[Fields, Path], int | None] = lambda content, path: None
    incomplete: Callable[[Path], str] = lambda path: ""
    folder: int = 1
    notes: str = ""
    aligned: str = OWN

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that rows of this layout have."""
        return tuple(part for part in PARTS if part in self.fields)


def _samples(content: Fields) -> Iterator[Fields]:
    yield from content["samples"]


def _transposed(content: Fields, ids: str = "tokens") -> Iterator[Fields]:
    """Yield the rows of columns; a column that is not as long as that of the ids belongs to no row."""
    count = len(content[ids])
    columns = {
        name: values for name, values in content.items() if hasattr(values, "__len__") and not isinstance(values, (str, dict))
    }
    for row in range(count):
        yield {name: values[row] for name, values in columns.items() if len(values) == count}


def _of_miles(content: Fields) -> Iterator[Fields]:
    if content.get("cp_size", 1) != 1:
        raise Unsupported(
            f"its rows are divided over {content['cp_size']} ranks of context parallelism: this file has a part of each",
            hint="train the step without context parallelism, or save it with slime, which gathers the parts",
        )
    for row in _transposed(content["rollout_data"]):
        yield {**row, "rank": content["rank"]}


def _of_prime(content: Fields) -> Iterator[Fields]:
    """Leave out tokens that the engine did not sample: those of a cross-entropy alone have no log-prob of a rollout."""
    if content["schema_version"] != 1:
        raise NewerFormat(f"its schema_version is {content['schema_version']}, this actordbg reads 1", hint="upgrade actordbg")
    sampled = [content.get(name) for name in ("rl_weights", "ref_kl_weights")]
    if sampled[0] is None or None in sampled[0]:
        yield content
        return
    weights = np.sum([np.abs(_numbers("weights", values)) for values in sampled if values is not None and None not in values], 0)
    yield {**content, "loss_mask": np.asarray(content["loss_mask"]) & (weights != 0)}


def _of_nemo(content: Fields) -> Iterator[Fields]:
    """Take each field out of its list of one. Under dynamic sampling `rewards` are those of other rows, before the filter."""
    row = {name: values[0] if isinstance(values, list) and len(values) == 1 else values for name, values in content.items()}
    row["rewards"] = row.get("filtered_rewards", row.get("rewards"))
    if not np.any(row["prev_logprobs"]):  # on-policy, the trainer writes zeros instead of computing them
        del row["prev_logprobs"]
    yield row


def _of_verl(content: Fields) -> Iterator[Fields]:
    """Add up each row's rewards, which verl has at tokens: those that it trains on are less the KL penalty."""
    for row in _transposed(content, "input_ids"):
        rewards = row.get("token_level_rewards", row.get("token_level_scores"))
        yield {**row, "rewards": None if rewards is None else float(np.sum(rewards)), "step": content["global_steps"]}


def _rollout(content: Fields, path: Path) -> int | None:
    return content["rollout_id"] if type(content["rollout_id"]) is int else None


def _step_in_name(content: Fields, path: Path) -> int | None:
    """Return the step by NeMo-RL's file name, which counts from 1: its rows do not have it."""
    named = re.search(r"train_data_step(\d{1,9})\.", path.name)
    return int(named[1]) - 1 if named else 0


def _unstable(path: Path) -> str:
    return "" if (path.parent / "STABLE").exists() else "its folder has no STABLE: prime-rl had not finished this step"


_SLIME, _MILES = "slime 624b824", "miles 31f1ca9"
USUAL: Mapping[str, tuple[str, ...]] = {
    IDS: ("input_ids", "token_ids", "tokens", "sequences", "ids"),
    ATTENTION: ("attention_mask",),
    MASK: ("action_mask", "loss_mask", "response_mask", "completion_mask", "token_loss_mask", "loss_masks"),
    "log_probs": ("log_probs", "logprobs", "trainer_logprobs", "per_token_logps", "action_log_probs"),
    "old_log_probs": ("old_log_probs", "old_logprobs", "old_per_token_logps", "prev_logprobs"),
    "rollout_log_probs": (
        "rollout_log_probs", "rollout_logprobs", "inference_logprobs", "generation_logprobs", "sampling_per_token_logps",
    ),
    "base_action_log_probs": ("base_action_log_probs", "ref_log_probs", "ref_logprobs", "ref_log_prob", "ref_per_token_logps"),
    "advantages": ("advantages",), "returns": ("returns",), "values": ("values",), "entropy": ("entropy", "entropys"),
    "rewards": ("rewards", "reward", "score"), "step": ("step", "global_step"), "rank": ("rank",),
    RESPONSE: ("response_length", "response_lengths"), LENGTH: ("length", "input_lengths", "total_length"),
}  # fmt: skip
"""The field's usual names of each part, by which a plain table is read."""

_TRAINED = {
    IDS: "tokens", RESPONSE: "response_lengths", MASK: "loss_masks", "log_probs": "log_probs",
    "rollout_log_probs": "rollout_log_probs", "base_action_log_probs": "ref_log_probs", "advantages": "advantages",
    "returns": "returns", "values": "values", "entropy": "entropy", "rewards": "rewards",
}  # fmt: skip
"""Fields of the rows that slime and miles train on."""
LAYOUTS = (
    FileLayout(
        "slime-rollout", "slime and miles: --save-debug-rollout-data",
        f"{_SLIME} slime/observability/rollout_data_utils.py, slime/utils/types.py; {_MILES} miles/ray/rollout/debug_data.py",
        frozenset(("rollout_id", "samples")),
        {IDS: "tokens", RESPONSE: "response_length", MASK: "loss_mask", "rollout_log_probs": "rollout_log_probs",
         "rewards": "reward"},
        container=ARCHIVE, rows=_samples, step=_rollout,
        notes="Masks and log-probs cover the response. Both may be None: a mask that is None counts all of it. Aborted samples "
        "are in it. Rows of an evaluation look the same: only the file's name says `eval_`. So no row is judged as trained on.",
    ),
    FileLayout(
        "slime-train", "slime: --save-debug-train-data",
        f"{_SLIME} slime/observability/train_data_utils.py, slime/backends/megatron_utils/actor.py",
        frozenset(("format_version", "samples", "dp_shards")), {**_TRAINED, "rank": "data_parallel_rank"},
        container=ARCHIVE, rows=_samples, step=_rollout,
        notes="`log_probs` are the policy's before the first update of the rollout, or of the training's own forward. `rewards` "
        "are those that were trained on: after the normalization of groups.",
    ),
    FileLayout(
        "miles-train", "miles: --save-debug-train-data", f"{_MILES} miles/utils/train_dump_utils.py",
        frozenset(("rollout_id", "rank", "rollout_data")), {**_TRAINED, "rank": "rank"},
        container=ARCHIVE, rows=_of_miles, step=_rollout,
        notes="A file for each rank. Ranks of tensor parallelism have the same rows. Files of context parallelism are refused: "
        "each has a part of every row.",
    ),
    FileLayout(
        "verl", "verl: DataProto.save_to_disk", "verl 0.9.1 verl/protocol.py, with tensordict 0.10.0 tensordict/_reductions.py",
        frozenset(("input_ids", "responses", "global_steps")),
        {IDS: "input_ids", ATTENTION: "attention_mask", MASK: "response_mask", "log_probs": "old_log_probs",
         "rollout_log_probs": "rollout_log_probs", "base_action_log_probs": "ref_log_prob", "advantages": "advantages",
         "returns": "returns", "values": "values", "entropy": "entropys", "rewards": "rewards", "step": "step"},
        container=DATA_PROTO, rows=_of_verl,
        notes="Values cover the response, padded on the right. `old_log_probs` are the trainer's, before the update. A row's "
        "reward is the sum of `token_level_rewards`, or of `token_level_scores` before them. `non_tensor_batch` is left out. "
        "Not read: torch.save(data), and files of VERL_DATAPROTO_SERIALIZATION_METHOD=numpy.",
    ),
    FileLayout(
        "prime-rl", "prime-rl: --enable-token-export (token_exports/step_N/rank_R.jsonl)",
        "prime-rl 559b447 src/prime_rl/trainer/rl/token_export.py, train.py",
        frozenset(("schema_version", "token_ids", "inference_logprobs", "trainer_logprobs", "loss_mask")),
        {IDS: "token_ids", MASK: "loss_mask", "log_probs": "trainer_logprobs", "rollout_log_probs": "inference_logprobs",
         "advantages": "advantages", "entropy": "entropy", "step": "step", "rank": "rank"},
        container=JSON_LINES, rows=_of_prime, incomplete=_unstable, folder=3,
        notes="null is a value that is not finite. A step is complete only beside STABLE. The writer leaves out sequences "
        "without a trained token. Tokens of a cross-entropy alone do not count as actions here: no engine sampled them.",
    ),
    FileLayout(
        "nemo-rl", "NeMo-RL: train_data_stepN.jsonl of GRPO and PPO",
        "NeMo-RL 7ea279a nemo_rl/algorithms/grpo.py, nemo_rl/utils/logger.py",
        frozenset(("token_ids", "token_loss_mask", "generation_logprobs", "input_lengths")),
        {IDS: "token_ids", LENGTH: "input_lengths", MASK: "token_loss_mask", SAMPLE: "sample_loss_mask",
         "log_probs": "prev_logprobs", "rollout_log_probs": "generation_logprobs", "advantages": "advantages",
         "rewards": "rewards"},
        container=JSON_LINES, rows=_of_nemo, step=_step_in_name,
        notes="Each field is a list of one, padded to the longest row of the batch. Under dynamic sampling `rewards` are of rows "
        "before the filter, so `filtered_rewards` are read. `prev_logprobs` that are all 0 were not computed. Only the file's "
        "name has the step.",
    ),
)  # fmt: skip
"""The layouts of writers."""
TABLE = FileLayout(
    "table", "plain tables: npz, safetensors, a dict or a list of dicts by torch.save, JSON lines, parquet", "their columns",
    frozenset(), {part: names[0] for part, names in USUAL.items()},
    notes="Columns are known by their usual names, or by `--column PART=NAME`. The value at a token is that of the token itself; "
    "`--column align=next` says that it is that of the token behind it. A file without steps is taken as one step.",
)  # fmt: skip


def layout_of(content: Any, kind: str, columns: Mapping[str, str]) -> FileLayout | None:
    """Return the layout of a content, by its fields: a writer's, else that of a plain table; None if it has no token ids.

    columns: the user's names of parts, which make it a plain table. Raises Unsupported for a name that it does not have.
    """
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0]
    if not isinstance(content, dict):
        return None
    known = [each for each in LAYOUTS if each.marks <= content.keys() and each.container in (None, kind) and not columns]
    if known:
        return max(known, key=lambda each: len(each.marks))
    named = {part: name for part, name in columns.items() if part != ALIGN}
    for part, name in named.items():
        if name not in content:
            have = ", ".join(sorted(map(str, content))[:12])
            raise Unsupported(f"it has no {name!r:.60} for --column {part}", hint=f"it has {have}")
    usual = {part: next((name for name in names if name in content), "") for part, names in USUAL.items()}
    fields = {part: name for part, name in {**usual, **named}.items() if name}
    if IDS not in fields:
        return None
    if "log_probs" not in fields and "old_log_probs" in fields:  # the trainer's only ones, as slime and NeMo-RL have them
        fields["log_probs"] = fields.pop("old_log_probs")
    return replace(TABLE, fields=fields, rows=partial(_of_table, fields[IDS]), aligned=columns.get(ALIGN, OWN))


def _of_table(ids: str, content: Any) -> Iterator[Fields]:
    """Yield the rows of a table: columns of lists or of arrays, one row, or a list of these."""
    if isinstance(content, list):
        for part in content:
            yield from _of_table(ids, part)
    elif len(content[ids]) and not np.ndim(content[ids][0]):
        yield content
    else:
        yield from _transposed(content, ids)


def row_of(layout: FileLayout, record: Fields, number: int) -> FileRow | None:
    """Return a row of a file; None if it has fewer than two tokens. Raises CorruptDump if it cannot be one."""
    given = {part: record[name] for part, name in layout.fields.items() if record.get(name) is not None}
    try:
        return _row(layout, given, number)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise corrupt(f"row {number}: {error!s:.200}") from None


def _row(layout: FileLayout, given: Mapping[str, Any], number: int) -> FileRow | None:
    ids = _numbers(IDS, given[IDS])
    if ids.ndim != 1 or (ids != np.floor(ids)).any() or (ids < 0).any() or (ids >= 2**31).any():
        raise ValueError(f"its {layout.fields[IDS]} are not token ids")
    kept = np.ones(len(ids), bool)
    if ATTENTION in given:
        mask = _numbers(ATTENTION, given[ATTENTION])
        if mask.shape != ids.shape:
            raise ValueError(f"its {layout.fields[ATTENTION]} has {mask.size} values, it has {len(ids)} tokens")
        kept = mask != 0
    if LENGTH in given and ATTENTION not in given:
        kept[int(given[LENGTH]) :] = False
    response = int(given[RESPONSE]) if RESPONSE in given else None
    if response is not None and not 0 <= response <= len(ids):
        raise ValueError(f"its {layout.fields[RESPONSE]} is {response}, it has {len(ids)} tokens")
    values = {part: np.atleast_1d(_numbers(part, given[part])) for part in OF_TOKENS if part in given}
    if layout.aligned == NEXT:
        values = {part: each[: len(ids) - 1] if len(each) == len(ids) else each for part, each in values.items()}
    fits = _lengths(layout, values, len(ids), response)
    odd = {part: each for part, each in values.items() if each.ndim != 1 or len(each) not in fits}
    if MASK in odd:
        raise ValueError(f"its {layout.fields[MASK]} has {odd[MASK].size} values, expected {' or '.join(map(str, sorted(fits)))}")
    cut = {part: each[kept[len(ids) - len(each) :]] for part, each in values.items() if part not in odd}
    tokens = ids[kept].astype("<i8")
    if len(tokens) < 2:
        return None
    cut[MASK] = _mask(cut, tokens, response) * (float(np.ravel(given[SAMPLE])[0]) if SAMPLE in given else 1.0)
    reward = _one(given.get("rewards"))
    step, rank = (_whole(given.get(name)) for name in ("step", "rank"))
    return FileRow(tokens, cut, number, step=step, rank=rank or 0, reward=reward, odd=odd)


def _lengths(layout: FileLayout, values: Mapping[str, Values], total: int, response: int | None) -> set[int]:
    """Return how many values a part may have: those of the response, of the mask, of all tokens, or of all but the first."""
    if response is not None and layout.container:
        return {response}
    others = (
        [response] if response is not None else [len(values[MASK])] if MASK in values else list(map(len, values.values()))[:1]
    )
    return {total, total - 1, *(count for count in others if count <= total)}


def _mask(values: Mapping[str, Values], tokens: Values, response: int | None) -> Values:
    """Return which tokens are actions, [L]: by the mask, else all of the response, else those that have values."""
    if MASK in values:
        return values[MASK]
    covered = [len(each) for each in values.values()]
    return np.ones(response if response is not None else max(covered, default=len(tokens)))


def _numbers(part: str, values: Any) -> Values:
    """Return values as an array of numbers; None in a list is NaN. Raises ValueError."""
    try:
        array = np.asarray(values)
        array = array if array.dtype.kind in "biuf" else np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"its {part} are not numbers") from None
    return array


def _one(value: Any) -> float | None:
    """Return a value that is one number; None for anything else, such as rewards by name."""
    array = np.ravel(value) if isinstance(value, (int, float, list, np.ndarray, np.generic)) else np.empty(0)
    return float(array[0]) if array.size == 1 and array.dtype.kind in "biuf" else None


def _whole(value: Any) -> int | None:
    number = _one(value)
    return int(number) if number is not None and 0 <= number < 2**40 else None


def columns_of(texts: Sequence[str]) -> dict[str, str]:
    """Parse `--column PART=NAME`. Raises UsageError."""
    columns = dict(text.partition("=")[::2] for text in texts)
    for part, name in columns.items():
        if part not in (*USUAL, ALIGN) or not name or (part == ALIGN and name not in (OWN, NEXT)):
            raise UsageError(
                f"--column {part:.60}={name:.60} is not PART=NAME", hint=f"parts: {', '.join(USUAL)}; {ALIGN}=own, next"
            )
    return columns
