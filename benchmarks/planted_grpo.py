"""Faults of a GRPO of TRL, planted in the trainer or in the server that its rollouts come from (`benchmarks.faulty_grpo`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Completion = tuple[list[int], list[Any]]
"""Ids and log-probs of a completion."""


class Server:
    """TRL's client of a vLLM server (`VLLMClient` of TRL 1.16), with the server behind it: a model that samples."""

    model_path, dtype = "", "float32"
    returned: Callable[[list[int], list[Any]], Completion] = staticmethod(lambda ids, values: (ids, values))
    cooler, top_p, is_raw, is_stale = 1.0, 1.0, False, False

    def __init__(self, **_: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=self.dtype)

    def init_communicator(self, **_: Any) -> None:
        """Need no communicator: weights arrive as tensors."""

    reset_prefix_cache = init_communicator

    def get_server_info(self) -> dict[str, Any]:
        """Return what TRL checks."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, _metadata: Any, tensors: Iterator[tuple[str, Any]]) -> None:
        """Load what TRL sends."""
        own = self.model.state_dict()
        for name, tensor in tensors:
            if not self.is_stale:
                own[name].copy_(tensor)

    def generate(self, prompts: list[list[int]], *, n: int, temperature: float, max_tokens: int, **_: Any) -> dict[str, Any]:
        """Sample `n` completions for each prompt, and return their ids and log-probs."""
        import torch

        end, all_ids, all_values = self.model.config.eos_token_id, [], []
        given = {"do_sample": True, "temperature": temperature * self.cooler, "top_p": self.top_p, "top_k": 0}
        for prompt in prompts:
            ids = torch.tensor([prompt] * n)
            asked: Any = {**given, "max_new_tokens": max_tokens, "output_scores": True, "output_logits": True}
            done = self.model.generate(ids, return_dict_in_generate=True, attention_mask=ids * 0 + 1, **asked)
            scores = torch.stack(done.logits if self.is_raw else done.scores, 1).float().log_softmax(-1)
            sampled = done.sequences[:, len(prompt) :]
            values = scores.gather(-1, sampled[..., None])[..., 0]
            for row, own in zip(sampled.tolist(), values.tolist(), strict=True):
                kept = row.index(end) + 1 if end in row else len(row)
                row, own = type(self).returned(row[:kept], own[:kept])
                all_ids.append(row)
                all_values.append([[value] for value in own])
        return {"prompt_ids": prompts, "completion_ids": all_ids, "logprobs": all_values}


def _server(**attributes: Any) -> Callable[[Any], None]:
    """Plant a fault in the server: other attributes."""
    return lambda trl: [setattr(Server, name, staticmethod(v) if callable(v) else v) for name, v in attributes.items()] and None


_before: list[float] = []


def of_another(ids: list[int], values: list[float]) -> Completion:
    """Return the log-probs of the completion before."""
    other = (_before + values[len(_before) :])[: len(ids)]
    _before[:] = values
    return ids, other


def appended_end(ids: list[int], values: list[float]) -> Completion:
    """Append an end token that was not sampled."""
    return (ids, values) if ids[-1] == 2 else ([*ids, 2], [*values, 0.0])


def _trainer(name: str, change: Callable[..., Any]) -> Callable[[Any], None]:
    """Plant a fault in a method of GRPOTrainer: `change` gets the method, the trainer, and the arguments."""

    def plant(trl: Any) -> None:
        original = getattr(trl.GRPOTrainer, name)
        setattr(trl.GRPOTrainer, name, lambda self, *args, **more: change(original, self, *args, **more))

    return plant


def _inputs(**changes: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
    """Plant a fault in the inputs of the loss, by name: each function gets the trainer and the tensor."""

    def changed(original: Any, self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        return original(self, model, inputs | {name: change(self, inputs[name]) for name, change in changes.items()})

    return _trainer("_compute_loss", changed)


def _late(changes: dict[int, Callable[[dict[str, Any]], dict[str, Any]]]) -> Callable[[Any], None]:
    """Plant faults in the inputs of the loss, each at its step of the run."""

    def changed(original: Any, self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        change = changes.get(self.state.global_step, lambda given: {})
        return original(self, model, inputs | change(inputs))

    return _trainer("_compute_loss", changed)


def _rolled(name: str, dim: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Roll a tensor [rows, tokens] by one along a dimension."""
    return lambda given: {name: given[name].roll(1, dim)}


def _row_twice(given: dict[str, Any]) -> dict[str, Any]:
    """Let the second row of a micro-batch be the first."""
    mine = {name: each.clone() for name, each in given.items() if getattr(each, "ndim", 0)}
    for each in mine.values():
        each[1] = each[0]
    return mine


def _of_head(change: Callable[..., Any] = lambda forward, **given: forward(**given), **arguments: Any) -> Callable[[Any], None]:
    """Plant a fault in the head that TRL gives its models: other arguments; `change` gets the forward, and its arguments."""

    def plant(trl: Any) -> None:
        from trl.trainer import grpo_trainer

        original = grpo_trainer.add_fused_lm_head

        def add(model: Any, **more: Any) -> Any:
            made = original(model, **more | arguments)
            forward = model.forward
            model.forward = functools.wraps(forward)(lambda *args, **given: change(functools.partial(forward, *args), **given))
            return made

        grpo_trainer.add_fused_lm_head = add

    return plant


def _shifted(forward: Any, **given: Any) -> Any:
    output = forward(**given)
    output.log_probs = output.log_probs.roll(1, 1)
    return output


def _unmasked(forward: Any, attention_mask: Any, **given: Any) -> Any:
    return forward(attention_mask=attention_mask * 0 + 1, **given)


def _undivided(original: Any, self: Any, *given: Any) -> Any:
    self.current_gradient_accumulation_steps = 1
    return original(self, *given)


def _scaled(original: Any, self: Any, *args: Any, **more: Any) -> None:
    original(self, *args, **more)
    for layer in self.model.model.layers:
        layer.self_attn.scaling *= 1.15


def _first_batch(original: Any, self: Any, batch: Any) -> Any:
    """Train on the first micro-batch of a step each time."""
    original(self, batch)
    return self._buffered_inputs[0]


class Fault(NamedTuple):
    """A fault: how it is planted, on which side, the command that names it, and words of its sentence.

    more: options of GRPOConfig. step: the optimizer step that is judged.
    """

    plant: Callable[[Any], None]
    side: str
    command: str
    words: str
    more: dict[str, Any] = {}
    step: int = 0


FAULTS: dict[str, Fault] = {
    "engine-temperature": Fault(_server(cooler=0.7), "rollout", "explain", "temperature was"),
    "raw-log-probs": Fault(_server(is_raw=True), "rollout", "explain", "temperature 0.8 was not applied"),
    "shift": Fault(_server(returned=lambda ids, v: (ids, [*v[1:], v[-1]])), "rollout", "explain", "shifted by +1"),
    "another-row": Fault(_server(returned=of_another), "rollout", "lint", "those of another row"),
    "stale-weights": Fault(_server(is_stale=True), "rollout", "explain", "weights were those of", step=2),
    "engine-temperature-later": Fault(
        _server(cooler=0.7), "rollout", "explain", "temperature was", {"num_iterations": 2}, step=1
    ),
    "shift-later": Fault(
        _server(returned=lambda ids, v: (ids, [*v[1:], v[-1]])), "rollout", "explain", "shifted", {"num_iterations": 2}, step=1
    ),
    "engine-temperature-in-bf16": Fault(_server(cooler=0.7), "rollout", "explain", "temperature was"),
    "engine-top-p": Fault(_server(top_p=0.8), "rollout", "explain", "top-p"),
    "top-p-with-correction": Fault(_server(top_p=0.8), "rollout", "lint", "sampling was changed by top_p 0.8", {"top_p": 0.8}),
    "min-p-with-correction": Fault(lambda trl: None, "rollout", "lint", "sampling was changed by min_p 0.1", {"min_p": 0.1}),
    "appended-end": Fault(_server(returned=appended_end), "rollout", "lint", "placeholder"),
    "no-log-probs": Fault(_server(returned=lambda ids, v: (ids, [0.0] * len(v))), "rollout", "lint", "placeholder"),
    "nan": Fault(_server(returned=lambda ids, v: (ids, [None, *v[1:]])), "rollout", "lint", "rollout_log_probs is not finite"),
    "trainer-temperature": Fault(_of_head(temperature=1.0), "trainer", "explain", "temperature 0.8 was not applied"),
    "trainer-shift": Fault(_of_head(_shifted), "trainer", "explain", "shifted by -1"),
    "trainer-scale": Fault(_trainer("__init__", _scaled), "trainer", "explain", "attention's scale"),
    "padding": Fault(_of_head(_unmasked), "trainer", "explain", "padding"),
    "tokens-of-micro-batch": Fault(
        _inputs(num_items_in_batch=lambda self, n: n / 2), "trainer", "lint", "normalization", {"loss_type": "dapo"}
    ),
    "not-divided": Fault(_trainer("_compute_loss", _undivided), "trainer", "lint", "2 times it", {"loss_type": "grpo"}),
    "mask-off": Fault(_inputs(completion_mask=lambda self, mask: mask * 0 + 1), "trainer", "lint", "placeholder"),
    "old-log-probs": Fault(_inputs(old_per_token_logps=lambda self, old: old * 1.02), "trainer", "lint", "ratio"),
    "same-micro-batch": Fault(_trainer("_prepare_inputs", _first_batch), "trainer", "lint", "duplicates"),
    "late": Fault(
        _late({1: _rolled("ref_per_token_logps", 1), 2: _rolled("ref_per_token_logps", 0), 3: _rolled("completion_mask", 1),
               4: _row_twice}),
        "trainer", "lint", "lengths", {"beta": 0.04, "max_steps": 6, "learning_rate": 1e-3},
    ),
    "no-advantage": Fault(_inputs(advantages=lambda self, values: values * 0), "trainer", "lint", "advantages"),
}  # fmt: skip
"""The faults, by name."""
_BF16: dict[str, Any] = {"dtype": "bfloat16"}
_AGAIN: dict[str, Any] = {"loss_type": "grpo", "seed": 7}
_TRUNCATED: dict[str, Any] = {"vllm_importance_sampling_mode": "token_truncate", "gradient_accumulation_steps": 4}
HEALTHY: dict[str, dict[str, Any]] = {
    "healthy-fp32": {},
    "healthy-fp32-grpo": _AGAIN,
    "healthy-fp32-dr_grpo": _TRUNCATED | {"loss_type": "dr_grpo"},
    "healthy-bf16": _BF16,
    "healthy-bf16-autocast": {"bf16": True},
    "healthy-bf16-grpo": _BF16 | _AGAIN,
    "healthy-fp32-two-iterations": {"num_iterations": 2, "step": 1},
    "healthy-fp32-gspo": {"num_iterations": 2, "importance_sampling_level": "sequence", "loss_type": "grpo", "step": 1},
    "healthy-bf16-two-iterations": _BF16 | {"num_iterations": 2, "step": 1},
    "healthy-fp32-later-steps": {"steps_per_generation": 4, "step": 1},
    "healthy-fp32-engine-bf16": {},
    "healthy-fp32-two-iterations-engine-bf16": {"num_iterations": 2, "step": 1},
}
"""Options of healthy runs, by name, and the step that is judged: behind an update, a rollout is of the policy before it."""
