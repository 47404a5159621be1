"""The layouts of files that runs leave behind: which field of a file is which part of a row. `LAYOUTS` is the table.

A layout says by which fields a file of it is known, where its rows are, and what their fields are called.

A layout is data, and a function only where a writer did something that a name cannot say. `docs/reference/layouts.md` is written
from the table; CONTRIBUTING.md has the recipe for another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from actordbg.base.errors import EnvironmentProblem, NewerFormat, Unsupported, UsageError
from actordbg.dumps.archives import LISTS
from actordbg.dumps.containers import ARCHIVE, JSON_LINES, RECORD_PICKLE
from actordbg.dumps.file_rows import (
    ALIGN,
    ATTENTION,
    IDS,
    LENGTH,
    MASK,
    NEXT,
    OWN,
    RESPONSE,
    SAMPLE,
    Fields,
    FileLayout,
    numbers_in,
)
from actordbg.dumps.pickle_tree import MOLT, OPENRLHF, SKYRL, VERL


def _of_slime(content: Fields) -> Iterator[Fields]:
    """Add whether a sample was cut off, where it has a status; and how many ranks a training divided the samples among."""
    ranks = {each["data_parallel_rank"] for each in content.get("dp_shards", ())}
    for row in content["samples"]:
        ends = {"truncated": row["status"] != "completed"} if "status" in row else {}
        yield {**row, **ends, "ranks": len(ranks) or None}


def _transposed(content: Fields, ids: str = "tokens") -> Iterator[Fields]:
    """Yield the rows of columns; a column that is not as long as that of the ids belongs to no row."""
    count = len(content[ids])
    listed = {
        name: values for name, values in content.items() if hasattr(values, "__len__") and not isinstance(values, (str, dict))
    }
    columns = {name: values for name, values in listed.items() if not isinstance(values, np.ndarray) or values.ndim}
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
    weights = np.sum(
        [np.abs(numbers_in("weights", values)) for values in sampled if values is not None and None not in values], 0
    )
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
        yield {**row, "rewards": None if rewards is None else float(np.sum(rewards)), "step": content[VERL].get("global_steps")}


def _of_skyrl(content: Fields) -> Iterator[Fields]:
    """Leave out the rows behind the others that fill up the last mini-batch: copies of the first, without an action."""
    rows = list(_transposed(content, "sequences"))
    yield from rows[: len(rows) - content[SKYRL].get("pad_size", 0)]


def _of_table(ids: str, content: Any) -> Iterator[Fields]:
    """Yield the rows of a table: columns of lists or of arrays, one row, or a list of these."""
    if isinstance(content, LISTS):
        for part in content:
            yield from _of_table(ids, part)
    elif isinstance(content[ids], dict | int | float):
        raise Unsupported(f"its {ids} are of a type that is not read", hint="save lists, numpy arrays or tensors")
    elif len(content[ids]) and not np.ndim(content[ids][0]):
        yield content
    else:
        yield from _transposed(content, ids)


def _joined(prompt: str, response: str, content: Any) -> Iterator[Fields]:
    """Yield the rows of a table that has prompts and responses apart: padding in front of the one and behind the other goes."""
    for row in _of_table(response, content):
        before, after = (np.asarray(row[name]) for name in (prompt, response))
        if "prompt_mask" in row:
            before = before[np.asarray(row["prompt_mask"]) != 0]
        mask = next((np.asarray(row[name]) for name in USUAL[MASK] if row.get(name) is not None), np.ones(len(after)))
        acts = np.flatnonzero(mask[-len(after) :])
        kept = np.arange(len(after)) <= (acts[-1] if acts.size else -1)
        ids = np.concatenate((before, after))
        yield {**row, JOINED: ids, RESPONSE: len(after), ATTENTION: np.concatenate((np.ones(len(before)), kept))}


def load_tokenizer(model: str) -> Any:
    """Load a model's tokenizer from this machine. Raises EnvironmentProblem."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  # tokenizers raises plain Exceptions about a damaged file
        hint = "pass a folder with tokenizer.json and tokenizer_config.json"
        why = str(error)[:200] if Path(model).exists() else "no such folder, and the hub's local cache does not have it"
        raise EnvironmentProblem(f"there is no tokenizer in {model}: {why}", hint=hint) from None


_tokenizer = lru_cache(load_tokenizer)
"""Loads it once for all files of an import."""


def _of_texts(tokenizer: Any, prompt: str, response: str, content: Fields) -> Iterator[Fields]:
    """Encode a row's texts. Rewards and advantages are left out: TRL's and verl's are not always those that were trained on."""
    for row in (content,) if isinstance(content[prompt], str) else _transposed(content, prompt):
        before, after = (tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in (prompt, response))
        yield {response: [*before, *after], RESPONSE: len(after), "step": row.get("step")}


def _of_openai(content: Fields) -> Iterator[Fields]:
    """Yield a row for each answer: vLLM has its ids, and those of the prompt once, or at each answer of a completion."""
    for choice in content["choices"]:
        own = {"prompt_token_ids": content.get("prompt_token_ids"), **choice}
        if own["prompt_token_ids"] is None or own.get("token_ids") is None:
            raise Unsupported("it has answers of a server without token ids", hint="ask vLLM for them: return_token_ids=true")
        told = choice.get("logprobs") or {}
        values = told.get("token_logprobs") or [each["logprob"] for each in told.get("content") or ()]
        yield _answer(own["prompt_token_ids"], own["token_ids"], values, choice["finish_reason"])


def _of_sglang(content: Fields) -> Iterator[Fields]:
    about = content["meta_info"]
    prompt = content.get("prompt_token_ids") or [each[1] for each in about.get("input_token_logprobs") or ()]
    if len(prompt) != about["prompt_tokens"]:
        raise Unsupported("it lacks the prompt's token ids", hint="ask SGLang: return_prompt_token_ids=true")
    values = [each[0] for each in about.get("output_token_logprobs") or ()]
    yield _answer(prompt, content["output_ids"], values, (about.get("finish_reason") or {}).get("type"))


def _answer(prompt: list[int], response: list[int], values: list[float], ended: str | None) -> Fields:
    """Return a row of an engine: its parts are called as ours."""
    log_probs = {"rollout_log_probs": values} if values else {}
    return {IDS: [*prompt, *response], RESPONSE: len(response), "truncated": ended == "length", **log_probs}


def _rollout(content: Fields, path: Path) -> int | None:
    return content["rollout_id"] if type(content["rollout_id"]) is int else None


def _step_in_name(before: str, first: int, content: Any, path: Path) -> int:
    """Return the step by the number behind some words of a file's name, which counts from `first`: its rows do not have it."""
    named = re.search(before + r"(\d{1,9})[._]", path.name)
    return max(0, int(named[1]) - first) if named else 0


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
    "advantages": ("advantages", "advantage"), "returns": ("returns",), "values": ("values",), "entropy": ("entropy", "entropys"),
    "labels": ("labels",), "rewards": ("rewards", "reward", "score"), "step": ("step", "global_step"), "rank": ("rank",),
    "truncated": ("truncated", "is_truncated"),
    RESPONSE: ("response_length", "response_lengths"), LENGTH: ("length", "input_lengths", "total_length"),
}  # fmt: skip
"""The field's usual names of each part, by which a plain table is read."""
PROMPTS = ("prompt_ids", "prompt_token_ids", "prompts")
RESPONSES = ("completion_ids", "response_ids", "response_token_ids", "completion_token_ids", "output_token_ids", "responses")
PARTS = (("input_ids", "output_ids"), ("prompt_token_ids", "token_ids"))
"""Names of the parts of rows whose ids lie apart. Of `PARTS`, one without the other has the ids of whole rows."""
TOKENIZER = "tokenizer"
TEXT_PARTS = (("input", "output"), ("prompt", "completion"), ("prompt", "response"))
"""Names of a row's texts: verl's, TRL's, other tables'."""
JOINED = "ids of prompt and response"
_OF_ENGINE = {IDS: IDS, RESPONSE: RESPONSE, "rollout_log_probs": "rollout_log_probs", "truncated": "truncated"}

_TRAINED = {
    IDS: "tokens", RESPONSE: "response_lengths", MASK: "loss_masks", "log_probs": "log_probs",
    "rollout_log_probs": "rollout_log_probs", "base_action_log_probs": "ref_log_probs", "advantages": "advantages",
    "returns": "returns", "values": "values", "entropy": "entropy", "rewards": "rewards", "truncated": "truncated",
}  # fmt: skip
"""Fields of the rows that slime and miles train on."""
_EXPERIENCE = {
    IDS: "sequences", ATTENTION: "attention_mask", MASK: "action_mask", "log_probs": "action_log_probs",
    **{name: name for name in ("base_action_log_probs", "advantages", "returns", "values")},
}  # fmt: skip
"""Fields of OpenRLHF's experiences, and of trainers that began as it."""
LAYOUTS = (
    FileLayout(
        "slime-rollout", "slime and miles: --save-debug-rollout-data",
        f"{_SLIME} slime/observability/rollout_data_utils.py, slime/utils/types.py; {_MILES} miles/ray/rollout/debug_data.py",
        frozenset(("rollout_id", "samples")),
        {IDS: "tokens", RESPONSE: "response_length", MASK: "loss_mask", "rollout_log_probs": "rollout_log_probs",
         "rewards": "reward", "truncated": "truncated"},
        container=ARCHIVE, rows=_of_slime, step=_rollout,
        notes="Masks and log-probs cover the response. Both may be None: a mask that is None counts all of it. Aborted samples "
        "are in it. Rows of an evaluation look the same: only the file's name says `eval_`. So no row is judged as trained on.",
    ),
    FileLayout(
        "slime-train", "slime: --save-debug-train-data",
        f"{_SLIME} slime/observability/train_data_utils.py, slime/backends/megatron_utils/actor.py",
        frozenset(("format_version", "samples", "dp_shards")), {**_TRAINED, "rank": "data_parallel_rank", "ranks": "ranks"},
        container=ARCHIVE, rows=_of_slime, step=_rollout,
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
        "verl", "verl: DataProto.save_to_disk, torch.save(data)",
        "verl 0.9.1 verl/protocol.py, with tensordict 0.10.0 tensordict/_reductions.py",
        frozenset((VERL, "input_ids", "responses")),
        {IDS: "input_ids", ATTENTION: "attention_mask", MASK: "response_mask", "log_probs": "old_log_probs",
         "rollout_log_probs": "rollout_log_probs", "base_action_log_probs": "ref_log_prob", "advantages": "advantages",
         "returns": "returns", "values": "values", "entropy": "entropys", "rewards": "rewards", "step": "step"},
        rows=_of_verl,
        notes="Values cover the response, padded on the right. `old_log_probs` are the trainer's, before the update. A row's "
        "reward is the sum of `token_level_rewards`, or of `token_level_scores` before them. `non_tensor_batch` is left out. "
        "With VERL_DATAPROTO_SERIALIZATION_METHOD=numpy nested tensors are not read.",
    ),
    FileLayout(
        "skyrl", "SkyRL: trainer.dump_data_batch (dumped_data/global_step_N_training_input.pkl)",
        "skyrl 0.3.0 skyrl/backends/skyrl_train/training_batch.py, skyrl/train/trainer.py",
        frozenset((SKYRL, "sequences", "loss_mask")), {**_EXPERIENCE, MASK: "loss_mask", "rollout_log_probs": "rollout_logprobs"},
        container=RECORD_PICKLE, rows=_of_skyrl, step=partial(_step_in_name, "global_step_", 1), folder=2,
        notes="Values cover the response, padded on the left. `action_log_probs` are the policy's before the update. Rewards are "
        "not in it. Rows that fill up the last mini-batch are left out.",
    ),
    FileLayout(
        "openrlhf", "OpenRLHF: torch.save(experiences, PATH) of your own",
        "openrlhf 0.9.10 to 0.11.2 openrlhf/trainer/ppo_utils/experience.py", frozenset((OPENRLHF, "sequences")),
        {**_EXPERIENCE, "rollout_log_probs": "rollout_log_probs", "rewards": "rewards", "truncated": "truncated"},
        container=ARCHIVE, rows=partial(_of_table, "sequences"),
        notes="OpenRLHF has no option that writes them. `action_log_probs` are the policy's before the update.",
    ),
    FileLayout(
        "molt", "Molt: --train.rollout_dump_dir (rollout_stepN.pt)",
        "molt-rl 0.2.1 molt/trainer/algorithm/experience.py, molt/trainer/rl_trainer.py", frozenset((MOLT, "sequences")),
        {IDS: "sequences", ATTENTION: "attention_mask", MASK: "action_mask", "rollout_log_probs": "rollout_log_probs",
         "rewards": "rewards", "truncated": "truncated"},
        container=ARCHIVE, rows=partial(_of_table, "sequences"), step=partial(_step_in_name, "rollout_step", 0),
        notes="As sampled: before the trainer scores rows, so without its log-probs and advantages.",
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
        container=JSON_LINES, rows=_of_nemo, step=partial(_step_in_name, "train_data_step", 1),
        notes="Each field is a list of one, padded to the longest row of the batch. Under dynamic sampling `rewards` are of rows "
        "before the filter, so `filtered_rewards` are read. `prev_logprobs` that are all 0 were not computed. Only the file's "
        "name has the step.",
    ),
    FileLayout(
        "openai", "vLLM's server: answers to /v1/completions and /v1/chat/completions, one a line",
        "vllm 002032e vllm/entrypoints/openai/chat_completion/protocol.py", frozenset(("choices", "object", "model")), _OF_ENGINE,
        container=JSON_LINES, rows=_of_openai,
        notes="Ids are there with `return_token_ids`, log-probs with `logprobs`. A row for each of `choices`.",
    ),
    FileLayout(
        "sglang", "SGLang: answers to /generate, one a line", "sglang 001067f srt/managers/tokenizer_manager.py",
        frozenset(("output_ids", "meta_info")), _OF_ENGINE, container=JSON_LINES, rows=_of_sglang,
        notes="The prompt's ids are there with `return_prompt_token_ids`, or `return_logprob` and `logprob_start_len=0`.",
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
    if isinstance(content, LISTS) and content and isinstance(content[0], dict):
        content = content[0]
    if not isinstance(content, dict):
        return None
    if TOKENIZER in columns:
        prompt, response = next((pair for pair in TEXT_PARTS if content.keys() >= set(pair)), ("", ""))
        rows = partial(_of_texts, _tokenizer(columns[TOKENIZER]), prompt, response)
        fields = {IDS: response, RESPONSE: RESPONSE, "step": "step"}
        note = "its texts were encoded anew: perhaps not to the ids of the run, and special tokens may be lacking"
        return replace(TABLE, fields=fields, rows=rows, incomplete=lambda path: note) if response else None
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
    rows = partial(_of_table, fields.get(IDS, ""))
    parts = next((pair for pair in PARTS if content.keys() >= set(pair) and IDS not in named), None)
    if IDS not in fields or parts:
        found = (next((name for name in names if name in content), "") for names in (PROMPTS, RESPONSES))
        prompt, response = parts or found
        if not prompt or not response:
            return None
        fields |= {IDS: JOINED, RESPONSE: RESPONSE, ATTENTION: ATTENTION}
        if not {"advantages", "rollout_log_probs"} & fields.keys() and fields.get("log_probs") == "logprobs":  # an engine's
            fields["rollout_log_probs"] = fields.pop("log_probs")
        rows = partial(_joined, prompt, response)
    if "log_probs" not in fields and "old_log_probs" in fields:  # the trainer's only ones, as slime and NeMo-RL have them
        fields["log_probs"] = fields.pop("old_log_probs")
    return replace(TABLE, fields=fields, rows=rows, aligned=columns.get(ALIGN, OWN))


def columns_of(texts: Sequence[str]) -> dict[str, str]:
    """Parse `--column PART=NAME`. Raises UsageError."""
    columns = dict(text.partition("=")[::2] for text in texts)
    for part, name in columns.items():
        if part not in (*USUAL, ALIGN, TOKENIZER) or not name or (part == ALIGN and name not in (OWN, NEXT)):
            raise UsageError(
                f"--column {part:.60}={name:.60} is not PART=NAME",
                hint=f"parts: {', '.join(USUAL)}; {ALIGN}=own, next; {TOKENIZER}=MODEL",
            )
    return columns
