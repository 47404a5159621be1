"""Files that runs leave behind, as their writers lay them out, of the same made-up rows: healthy, or with a planted fault."""

import io
import json
import pickle
import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

GROUPS, SAMPLES, END = 4, 4, 2
NAN = float("nan")


@dataclass
class MadeRow:
    """A row: values are those of its response. advantage: of each token, made of the reward as the writer's trainer makes it."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    log_probs: list[float]
    rollout: list[float]
    reward: float
    advantages: list[float]
    cut: bool = False

    @property
    def ids(self):
        return self.prompt + self.response

    def wide(self, values, outside=0.0):
        """Values of all tokens: `outside` at the prompt."""
        return [outside] * len(self.prompt) + values


def made_rows(seed=1):
    """Groups of a prompt, with rewards and lengths of their own, and advantages that are 0; a writer makes those."""
    chance, rows = random.Random(seed), []
    for _ in range(GROUPS):
        prompt = [chance.randrange(10, 90) for _ in range(chance.randrange(4, 7))]
        for _ in range(SAMPLES):
            count = chance.randrange(9, 20)
            own = [-chance.random() * 2 - 0.05 for _ in range(count)]
            rows.append(
                MadeRow(
                    list(prompt), [chance.randrange(10, 90) for _ in range(count - 1)] + [END], [1] * count, own,
                    [value + chance.gauss(0, 0.01) for value in own], chance.random(), [0.0] * count,
                )
            )  # fmt: skip
            rows[-1].rollout = [min(value, -1e-4) for value in rows[-1].rollout]
    return rows


def estimate(rows, of_group):
    """Set the advantages of each group from its rewards."""
    for first in range(0, len(rows), SAMPLES):
        group = rows[first : first + SAMPLES]
        for row, value in zip(group, of_group(torch.tensor([row.reward for row in group])).tolist(), strict=True):
            row.advantages = [value] * len(row.response)


def normalized(rewards):
    """slime's rewards of GRPO, and TRL's advantages."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def leave_one_out(rewards):
    """NeMo-RL's advantages of GRPO."""
    others = [torch.cat((rewards[:at], rewards[at + 1 :])) for at in range(len(rewards))]
    return torch.stack([(own - other.mean()) / (other.std() + 1e-6) for own, other in zip(rewards, others, strict=True)])


Fault = Callable[[list[MadeRow]], None]


def shifted(rows):
    for row in rows:
        row.rollout = [*row.rollout[1:], row.rollout[0]]


def mask_late(rows):
    for row in rows:
        row.mask = [0, *row.mask[:-1]]


def not_a_number(rows):
    rows[5].rollout[3] = NAN


def positive(rows):
    rows[6].rollout[2] = 0.7


def other_group(rows):
    rows[1].advantages = [rows[6].advantages[0]] * len(rows[1].response)


def other_sign(rows):
    for row in rows:
        row.advantages = [-value for value in row.advantages]


def placeholder(rows):
    rows[2].rollout[4], rows[2].log_probs[4] = 0.0, -1.5


def other_rows(rows):
    for a, b in ((0, 9), (3, 12)):
        count = min(len(rows[a].rollout), len(rows[b].rollout))
        rows[a].rollout[:count], rows[b].rollout[:count] = rows[b].rollout[:count], rows[a].rollout[:count]


def all_late(rows):
    """The first token that was sampled counts as the prompt's, and so do its values."""
    for row in rows:
        row.prompt.append(row.response.pop(0))
        for name in ("mask", "log_probs", "rollout", "advantages"):
            del getattr(row, name)[0]


def of_tools(rows):
    for row in rows[::3]:
        row.response[2], row.rollout[3:6], row.log_probs[3:6] = END, [0.0] * 3, [-1.5] * 3


def cut_rewarded(rows):
    """A filter that leaves the reward to rows that were cut off, and takes it from those that ended."""
    rows += made_rows(2)
    for at, row in enumerate(rows):
        row.cut, row.reward = at % 2 == 0, float(at % 2 == 0)
    estimate(rows, normalized)


FAULTS = {
    "log-probs shifted by one": shifted, "mask off by one": mask_late, "NaN": not_a_number, "positive log-prob": positive,
    "advantage of another group": other_group, "advantages negated": other_sign, "placeholder": placeholder, "log-probs of other rows": other_rows,
    "first action left out": all_late, "output of tools": of_tools, "cut-off rows rewarded": cut_rewarded,
}  # fmt: skip


def _file(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def slime_rollout(folder, rows):
    """`save_debug_rollout_data`: dicts of `Sample.to_dict`; the last was aborted before its first token."""
    samples = [
        {"group_index": at // SAMPLES, "index": at, "rollout_id": None, "prompt": "p" * 9000, "tokens": row.ids, "response": "r",
         "response_length": len(row.response), "reward": row.reward, "loss_mask": row.mask, "rollout_log_probs": row.rollout,
         "status": "truncated" if row.cut else "completed", "metadata": {"tools": np.ones(3), 1: "one"}, "remove_sample": False, "label": None}
        for at, row in enumerate(rows)
    ]  # fmt: skip
    aborted = {
        **samples[0],
        "tokens": [],
        "response_length": 0,
        "loss_mask": None,
        "rollout_log_probs": None,
        "status": "aborted",
    }
    torch.save({"rollout_id": 3, "samples": [*samples, aborted]}, _file(folder / "rollout_data" / "3.pt"))
    return folder / "rollout_data" / "3.pt"


def _trained(rows):
    tensors = {name: [torch.tensor(getattr(row, at)) for row in rows] for name, at in
               (("log_probs", "log_probs"), ("rollout_log_probs", "rollout"), ("advantages", "advantages"))}  # fmt: skip
    return {
        "tokens": [torch.tensor(row.ids) for row in rows], "response_lengths": [len(row.response) for row in rows],
        "total_lengths": [len(row.ids) for row in rows], "loss_masks": [torch.tensor(row.mask, dtype=torch.int) for row in rows],
        "ref_log_probs": [torch.tensor(row.log_probs) - 0.5 for row in rows],
        "entropy": [torch.ones(len(row.response)) for row in rows], **tensors, "returns": tensors["advantages"],
        "rewards": normalized_rewards(rows),
    }  # fmt: skip


def normalized_rewards(rows):
    """Each row's reward after slime's normalization of groups."""
    groups = torch.tensor([row.reward for row in rows]).view(-1, SAMPLES)
    return [value for group in groups for value in normalized(group).tolist()]


def slime_train(folder, rows):
    """`save_debug_train_data`, format_version 2: samples of both shards in the rollout's order."""
    columns = _trained(rows)
    samples = [
        {"data_parallel_rank": at % 2, "rollout_position": at, **{name: values[at] for name, values in columns.items()}}
        for at in range(len(rows))
    ]
    shards = [{"rank": rank, "data_parallel_rank": rank, "micro_batch_indices": [[0]]} for rank in (0, 1)]
    data = {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "dp_shards": shards, "raw_reward": [1.0]}
    torch.save(data, _file(folder / "train_data" / "0.pt"))
    return folder / "train_data" / "0.pt"


def miles_train(folder, rows, cp_size=1):
    """miles' file of a rank."""
    data = {"rollout_id": 0, "rank": 1, "rollout_data": _trained(rows), "cp_rank": 0, "cp_size": cp_size, "qkv_format": "thd"}
    torch.save(data, _file(folder / "train_data" / "0_1.pt"))
    return folder / "train_data" / "0_1.pt"


class Packed:
    """A TensorDict that was consolidated, as torch.save writes it: leaves in one tensor of bytes, each filled up to eight."""

    def __init__(self, tensors):
        self.leaves, data = {}, b""
        for name, tensor in tensors.items():
            values, start = tensor.numpy().tobytes(), len(data)
            padding = -len(values) % 8
            data += values + bytes(padding)
            self.leaves[name] = (str(tensor.dtype), list(tensor.shape), start, len(data), padding)
        self.storage = torch.tensor(list(data), dtype=torch.uint8)

    def __reduce__(self):
        about = {"cls": "TensorDict", "non_tensors": {}, "leaves": self.leaves, "cls_metadata": {"device": None, "names": [None]}}
        return sys.modules["tensordict._reductions"]._rebuild_tensordict_files_consolidated, (about, self.storage)


@contextmanager
def standing_in(**codes):
    """Stand-ins for modules of writers, with the names alone; a dot of a module's name is `__` here."""
    with pytest.MonkeyPatch.context() as patch:
        for name, code in codes.items():
            parts = name.split("__")
            for count in range(1, len(parts)):
                patch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
            module = ModuleType(".".join(parts))
            exec(code, module.__dict__)
            patch.setitem(sys.modules, module.__name__, module)
        yield


def data_proto(batch, others, save=pickle.dump):
    """The pickle of a DataProto. batch: what torch.save gets, or its encoded items."""
    reductions = "def _rebuild_tensordict_files_consolidated(*_): ...\n"
    with standing_in(verl__protocol="class DataProto:\n    def __getstate__(self): return self.state\n",
                     tensordict___reductions=reductions):  # fmt: skip
        if not isinstance(batch, tuple):
            torch.save(batch, archive := io.BytesIO())
            batch = archive.getvalue()
        data = sys.modules["verl.protocol"].DataProto()
        data.state = (batch, others, {"global_steps": 4, "temperature": 1.0})
        save(data, out := io.BytesIO())
        return out.getvalue()


def verl_columns(rows):
    """The batch of a DataProto: prompts padded on the left, responses on the right; rewards at the last token."""
    before, after = max(len(row.prompt) for row in rows), max(len(row.response) for row in rows)

    def wide(values):
        return values + [0] * (after - len(values))

    prompts = torch.tensor([[0] * (before - len(row.prompt)) + row.prompt for row in rows])
    responses = torch.tensor([wide(row.response) for row in rows])
    seen = [[0] * (before - len(row.prompt)) + [1] * len(row.prompt) + wide([1] * len(row.response)) for row in rows]
    of_tokens = {
        "old_log_probs": "log_probs",
        "rollout_log_probs": "rollout",
        "advantages": "advantages",
        "returns": "advantages",
    }
    return {
        "prompts": prompts, "responses": responses, "input_ids": torch.cat((prompts, responses), 1),
        "entropys": torch.tensor([wide([1.0] * len(row.response)) for row in rows]), "attention_mask": torch.tensor(seen), "response_mask": torch.tensor([wide(row.mask) for row in rows]),
        "token_level_scores": torch.tensor([wide([0.0] * (len(row.response) - 1) + [row.reward]) for row in rows]),
        **{name: torch.tensor([wide(getattr(row, at)) for row in rows]) for name, at in of_tokens.items()},
    }  # fmt: skip


def verl(folder, rows, save=pickle.dump, *, encoded=False):
    """`DataProto.save_to_disk`; torch.save; with `encoded`, as VERL_DATAPROTO_SERIALIZATION_METHOD=numpy has it."""
    columns = verl_columns(rows)
    items = {name: (str(each.dtype)[6:], each.shape, each.flatten().view(torch.uint8).numpy()) for name, each in columns.items()}
    uid = np.array([at // SAMPLES for at in range(len(rows))], object)
    made = data_proto(((len(rows),), None, items) if encoded else Packed(columns), {"uid": uid}, save)
    _file(folder / "t" / "rows.pkl").write_bytes(made)
    return folder / "t" / "rows.pkl"


def _record(module, **fields):
    """An object of a stand-in for the Experience of a module."""
    made = sys.modules[module.replace("__", ".")].Experience()
    vars(made).update(fields)
    return made


def experiences(module, name, learned, folder, rows):
    """A list of experiences of a batch each, padded on the right: of four rows, or of one if they are as sampled."""
    size, batches = SAMPLES if learned else 1, []
    with standing_in(**{module: "class Experience: ...\n"}):
        for first in range(0, len(rows), size):
            of = rows[first : first + size]
            longest = max(len(row.ids) for row in of)

            def wide(values, of=of, most=longest - 1):
                each = [[0] * (len(row.ids) - 1 - len(values(row))) + values(row) for row in of]
                return torch.tensor([row + [0] * (most - len(row)) for row in each])

            trained = {
                "action_log_probs": wide(lambda row: row.log_probs), "advantages": wide(lambda row: row.advantages),
                "base_action_log_probs": wide(lambda row: row.log_probs) - 0.5, "returns": wide(lambda row: row.advantages),
            }  # fmt: skip
            batches.append(
                _record(
                    module, sequences=torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in of]),
                    attention_mask=torch.tensor([[1] * len(row.ids) + [0] * (longest - len(row.ids)) for row in of]),
                    action_mask=wide(lambda row: row.mask).bool(), rollout_log_probs=wide(lambda row: row.rollout),
                    rewards=torch.tensor([row.reward for row in of]), truncated=torch.tensor([row.cut for row in of]), prompts=["p"] * len(of), values=None,
                    info={"reward": torch.zeros(len(of)), "hint": "text"}, **(trained if learned else {}),
                )
            )  # fmt: skip
        torch.save(batches, _file(folder / "t" / name))
    return folder / "t" / name


def skyrl(folder, rows):
    """`TrainingInputBatch.save`: padded on the left; three copies of the first row fill the last mini-batch."""
    longest, widest = max(len(row.ids) for row in rows), max(len(row.response) for row in rows)
    rows = [*rows, *[replace(rows[0], mask=[0] * len(rows[0].mask))] * 3]

    def of(values, width):
        return torch.tensor([[0] * (width - len(each)) + each for each in values])

    def numbers(values):
        array = values.numpy()
        return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}

    torch.save(of([row.log_probs for row in rows], widest).bfloat16(), reference := io.BytesIO())
    columns = {
        "sequences": numbers(of([row.ids for row in rows], longest)), "values": None,
        "attention_mask": numbers(of([[1] * len(row.ids) for row in rows], longest)),
        "loss_mask": numbers(of([row.mask for row in rows], widest)),
        "base_action_log_probs": {"format": "torch", "data": reference.getvalue()},
        "pixel_values": {"format": "tensor_list", "items": []},
        **{name: numbers(of([getattr(row, at) for row in rows], widest)) for name, at in
           (("rollout_logprobs", "rollout"), ("action_log_probs", "log_probs"), ("advantages", "advantages"))},
    }  # fmt: skip
    state = {"batch_dict": columns, "batch_size": len(rows), "device": torch.device("cpu"), "metadata": {"pad_size": 3}}
    code = (
        "def _rebuild_tensor_batch(kind, state): ...\nclass TrainingInputBatch:\n"
        "    def __reduce__(self): return _rebuild_tensor_batch, (TrainingInputBatch, self.state)\n"
    )
    with standing_in(skyrl__backends__skyrl_train__training_batch=code):
        batch = sys.modules["skyrl.backends.skyrl_train.training_batch"].TrainingInputBatch()
        batch.state = state
        path = _file(folder / "out" / "dumped_data" / "global_step_5_training_input.pkl")
        path.write_bytes(pickle.dumps(batch))
    return path


def prime_rl(folder, rows):
    """prime-rl's token export: what is not finite is null."""
    path = _file(folder / "out" / "token_exports" / "step_4" / "rank_1.jsonl")
    with path.open("w") as file:
        for at, row in enumerate(rows):
            count = len(row.ids)
            record = {
                "schema_version": 1, "step": 4, "rank": 1, "micro_step": at // 4, "micro_sequence_idx": at % 4,
                "export_sequence_idx": at, "env_name": "math", "token_ids": row.ids, "position_ids": list(range(count)),
                "loss_mask": row.wide([bool(each) for each in row.mask], outside=False), "advantages": row.wide(row.advantages),
                "inference_logprobs": row.wide([None if value != value else value for value in row.rollout]),
                "trainer_logprobs": row.wide(row.log_probs, outside=-11.0), "entropy": [1.0] * count,
                "rl_weights": [None] * count, "ref_kl_weights": [None] * count, "mismatch_kl": [None] * count,
            }  # fmt: skip
            file.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
    (path.parent / "STABLE").touch()
    return path


def nemo_rl(folder, rows, *, filtered=True):
    """NeMo-RL's train data: every field a list of one, padded; with dynamic sampling `rewards` are of other rows."""
    path, longest = _file(folder / "logs" / "train_data_step8.jsonl"), max(len(row.ids) for row in rows)

    def padded(values):
        return [values + [0] * (longest - len(values))]

    with path.open("w") as file:
        for at, row in enumerate(rows):
            rewards = {"rewards": [1.0 - row.reward], "filtered_rewards": [row.reward]} if filtered else {"rewards": [row.reward]}
            record = {
                "content": ["text"], **rewards, "input_lengths": [len(row.ids)], "token_ids": padded(row.ids),
                "token_loss_mask": padded(row.wide(row.mask, outside=0)), "sample_loss_mask": [1.0],
                "advantages": [[row.advantages[0]] * longest], "generation_logprobs": padded(row.wide(row.rollout)),
                "prev_logprobs": padded(row.wide(row.log_probs, outside=-3.0)), "idx": at,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
    return path


def columns(rows):
    """Padded columns of a plain table, on the left, with the usual names; values of the response in a window of its own."""
    longest, widest = max(len(row.ids) for row in rows), max(len(row.response) for row in rows)
    table = {
        "input_ids": np.zeros((len(rows), longest), np.int64), "attention_mask": np.zeros((len(rows), longest), np.int64),
        "response_mask": np.zeros((len(rows), widest), np.int64), "rewards": np.array([row.reward for row in rows]),
        **{name: np.zeros((len(rows), widest), np.float32) for name in ("log_probs", "rollout_log_probs", "advantages")},
    }  # fmt: skip
    for at, row in enumerate(rows):
        table["input_ids"][at, longest - len(row.ids) :], table["attention_mask"][at, longest - len(row.ids) :] = row.ids, 1
        for name, values in (("response_mask", row.mask), ("log_probs", row.log_probs), ("rollout_log_probs", row.rollout),
                             ("advantages", row.advantages)):  # fmt: skip
            table[name][at, widest - len(values) :] = values
    return table


def npz(folder, rows):
    np.savez_compressed(_file(folder / "t" / "rows.npz"), allow_pickle=True, names=np.array(["a"], object), **columns(rows))
    return folder / "t" / "rows.npz"


def safetensors(folder, rows):
    save_file({name: torch.from_numpy(values) for name, values in columns(rows).items()}, _file(folder / "t" / "rows.st"))
    return folder / "t" / "rows.st"


def torch_dict(folder, rows):
    torch.save({name: torch.from_numpy(values) for name, values in columns(rows).items()}, _file(folder / "t" / "rows.bin"))
    return folder / "t" / "rows.bin"


def _plain_rows(rows):
    return [
        {"input_ids": row.ids, "loss_mask": row.wide(row.mask, outside=0), "logprobs": row.wide(row.log_probs),
         "rollout_logprobs": row.wide(row.rollout), "advantages": row.wide(row.advantages), "reward": row.reward}
        for row in rows
    ]  # fmt: skip


def json_lines(folder, rows):
    _file(folder / "t" / "rows.log").write_text("".join(json.dumps(row) + "\n" for row in _plain_rows(rows)))
    return folder / "t" / "rows.log"


def parquet(folder, rows):
    pyarrow = __import__("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_plain_rows(rows)), _file(folder / "t" / "rows.table"))
    return folder / "t" / "rows.table"


def json_list(folder, rows):
    _file(folder / "t" / "rows.json").write_text(json.dumps(_plain_rows(rows), indent=1))
    return folder / "t" / "rows.json"


def pickled(folder, rows):
    """Rows of numpy arrays and scalars, by pickle.dump and by torch.save."""
    with _file(folder / "t" / "rows.pkl").open("wb") as file:
        pickle.dump([{name: np.array(values)[()] for name, values in row.items()} for row in _plain_rows(rows)], file)
    return folder / "t" / "rows.pkl"


def apart(folder, rows):
    """TRL's own batch by torch.save: prompts padded on the left, completions on the right; one advantage a row."""
    proto = verl_columns(rows)
    before = proto["prompts"].shape[1]
    batch = {
        "prompt_ids": proto["prompts"], "prompt_mask": proto["attention_mask"][:, :before], "completion_ids": proto["responses"],
        "completion_mask": proto["response_mask"], "old_per_token_logps": proto["old_log_probs"],
        "sampling_per_token_logps": proto["rollout_log_probs"], "advantages": proto["advantages"][:, 0],
        "num_items_in_batch": torch.tensor(9), "rewards": torch.tensor([row.reward for row in rows]),
    }  # fmt: skip
    torch.save(batch, _file(folder / "t" / "batch.pt"))
    return folder / "t" / "batch.pt"


def answers(of, folder, rows):
    """An engine's answers as its server sends them, one a line."""
    _file(folder / "t" / "answers.jsonl").write_text("".join(json.dumps(of(row)) + "\n" for row in rows))
    return folder / "t" / "answers.jsonl"


def of_vllm(row):
    content = [{"token": f"token_id:{token}", "logprob": value} for token, value in zip(row.response, row.rollout, strict=True)]
    choice = {"index": 0, "token_ids": row.response, "logprobs": {"content": content}, "finish_reason": "stop"}
    return {"id": "x", "object": "chat.completion", "model": "m", "prompt_token_ids": row.prompt, "choices": [choice]}


def of_sglang(row, asked=False):
    prompt = [] if asked else [[None, token, None] for token in row.prompt]
    told = {
        "prompt_tokens": len(row.prompt), "input_token_logprobs": prompt,
        "output_token_logprobs": [[value, token, None] for token, value in zip(row.response, row.rollout, strict=True)],
    }  # fmt: skip
    ids = {"prompt_token_ids": row.prompt} if asked else {}
    return {"text": "t", "output_ids": row.response, "meta_info": {**told, "finish_reason": {"type": "stop"}}, **ids}


Writer = Callable[[Path, list[MadeRow]], Path]
WRITERS = {
    "slime-rollout": slime_rollout, "slime-train": slime_train, "miles-train": miles_train, "prime-rl": prime_rl, "verl": verl,
    "verl by torch.save": partial(verl, save=torch.save), "verl by numpy": partial(verl, encoded=True), "skyrl": skyrl,
    "openrlhf": partial(experiences, "openrlhf__trainer__ppo_utils__experience", "experiences.pt", True),
    "molt": partial(experiences, "molt__trainer__algorithm__experience", "rollout_step3.pt", False),
    "nemo-rl": nemo_rl, "npz": npz, "safetensors": safetensors, "torch.save": torch_dict, "JSON lines": json_lines,
    "parquet": parquet, "list in JSON": json_list, "pickle": pickled, "TRL's batch": apart,
    "openai": partial(answers, of_vllm), "sglang": partial(answers, of_sglang),
    "sglang, prompts asked for": partial(answers, partial(of_sglang, asked=True)),
}  # fmt: skip


def written(name, folder, *faults):
    """Write the file of a writer, of healthy rows and then of these faults; return it, and the rows."""
    rows = made_rows()
    estimate(rows, leave_one_out if name == "nemo-rl" else normalized)
    for fault in faults:
        FAULTS[fault](rows)
    return WRITERS[name](folder, rows), rows
