"""Real DPO, SFT and RLOO of TRL with a tiny model on the CPU, recorded whole, healthy or with a fault planted in the trainer.

    python -m benchmarks.faulty_trl all FOLDER [NAME ...]   record and judge every case, or those named, that FOLDER lacks
    python -m benchmarks.faulty_trl train FOLDER NAME       be the training process of a case

As `benchmarks.faulty_grpo`. A case's name begins with its trainer's. It takes some 15 seconds of a core to record, 25 to check.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faulty_grpo import every, record, without_deepspeed
from benchmarks.planted_grpo import Fault

_SIZES = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3, "save_steps": 1, "learning_rate": 3e-3,
    "logging_steps": 1, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_only_model": True,
}  # fmt: skip
_SAMPLED = {"num_generations": 4, "max_completion_length": 20, "temperature": 0.8}


def train(folder: Path, name: str) -> None:
    """Train a case, with its fault."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    without_deepspeed()
    fault = CASES[name]
    kind = name.partition("-")[0].upper()
    fault.plant(trl)
    random.seed(0)
    prompts = [json.loads(line)["prompt"] for line in (folder / "tasks.jsonl").read_text().splitlines()] * 3
    words = " ".join(prompts).split()
    said = [" " + " ".join(random.choices(words, k=random.randint(3, 9))) for _ in range(2 * len(prompts))]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    more: dict[str, Any] = {"args": {**_SIZES, "output_dir": str(folder / "out"), **fault.more}}
    data = {"prompt": prompts}
    if kind == "RLOO":
        more["args"] = _SAMPLED | more["args"]
        more["reward_funcs"] = lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids]
    else:
        names = ("chosen", "rejected") if kind == "DPO" else ("completion",)
        data |= {name: said[at * len(prompts) : (at + 1) * len(prompts)] for at, name in enumerate(names)}
    more["args"] = getattr(trl, f"{kind}Config")(**more["args"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    getattr(trl, f"{kind}Trainer")(model, train_dataset=Dataset.from_dict(data), processing_class=tokenizer, **more).train()


def _method(kind: str, name: str, change: Callable[..., Any]) -> Callable[[Any], None]:
    """Plant a fault in a method of a trainer: `change` gets the method, the trainer, and the arguments."""

    def plant(trl: Any) -> None:
        trainer = getattr(trl, f"{kind}Trainer")
        original = getattr(trainer, name)

        @functools.wraps(original)
        def changed(self: Any, *args: Any, **more: Any) -> Any:
            return change(original, self, *args, **more)

        setattr(trainer, name, changed)

    return plant


def _made(kind: str, change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Plant a fault in a trainer that was made."""

    def made(original: Any, self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        change(self)

    return _method(kind, "__init__", made)


def _of_head(
    kind: str, change: Callable[..., Any] = lambda forward, **given: forward(**given), **own: Any
) -> Callable[[Any], None]:
    """Plant a fault in the head that a trainer gives its model: other arguments; `change` gets the forward, and its arguments."""

    def plant(trl: Any) -> None:
        from importlib import import_module

        module = import_module(f"trl.trainer.{kind.lower()}_trainer")
        original = module.add_fused_lm_head

        def add(model: Any, *args: Any, **more: Any) -> Any:
            made = original(model, *args, **more | own)
            forward = model.forward
            model.forward = functools.wraps(forward)(lambda *args, **given: change(functools.partial(forward, *args), **given))
            return made

        module.add_fused_lm_head = add

    return plant


def _inputs(kind: str, **changes: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Plant a fault in the inputs of a loss, by name."""

    def changed(original: Any, self: Any, model: Any, inputs: dict[str, Any], *args: Any, **more: Any) -> Any:
        given = inputs | {name: change(inputs[name]) for name, change in changes.items()}
        return original(self, model, given, *args, **more)

    return _method(kind, "compute_loss", changed)


def _unmasked(forward: Any, attention_mask: Any, **given: Any) -> Any:
    return forward(attention_mask=attention_mask * 0 + 1, **given)


def _labels_late(forward: Any, labels: Any = None, **given: Any) -> Any:
    """Shift labels that the head shifts, too."""
    return forward(labels=labels if labels is None else labels.roll(-1, 1), **given)


def _scaled(trainer: Any) -> None:
    for layer in trainer.model.model.layers:
        layer.self_attn.scaling *= 1.15


def _noise(trainer: Any) -> None:
    """Give the reference other weights than the policy begins with."""
    import torch

    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(1.1)


def _prompts_of_rejected(mask: Any) -> Any:
    """Let all tokens before the last of a rejected row count."""
    half = len(mask) // 2
    mask[half:] = mask[half:].flip(1).cummax(1).values.flip(1)
    return mask


def _of_micro_batch(
    original: Any, self: Any, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **more: Any
) -> Any:
    """Divide by the tokens of the micro-batch: the mean of means, which accumulation then adds up."""
    return original(self, model, inputs, *args, num_items_in_batch=(inputs["labels"][:, 1:] != -100).sum(), **more)


def _nothing(_: Any) -> None:
    """Plant nothing."""


def _healthy(**more: Any) -> Fault:
    return Fault(_nothing, "", "check", "", more)


_SHIFT, _HOT = "labels are shifted by -1", "temperature"
CASES: dict[str, Fault] = {
    "dpo-healthy": _healthy(),
    "dpo-healthy-hinge": _healthy(loss_type=["hinge"], beta=0.5),
    "dpo-healthy-ipo": _healthy(loss_type=["ipo"]),
    "dpo-healthy-precomputed": _healthy(precompute_ref_log_probs=True),
    "dpo-healthy-two-losses": _healthy(loss_type=["sigmoid", "sft"]),
    "dpo-beta": Fault(_made("DPO", lambda trainer: setattr(trainer, "beta", 1.0)), "trainer", "lint", "losses add up"),
    "dpo-swapped": Fault(_made("DPO", lambda trainer: setattr(trainer, "beta", -0.1)), "trainer", "lint", "swapped"),
    "dpo-reference": Fault(_made("DPO", _noise), "trainer", "lint", "the reference is"),
    "dpo-mask": Fault(_inputs("DPO", completion_mask=lambda mask: mask.roll(-1, 1)), "trainer", "lint", "mask"),
    "dpo-prompt": Fault(_inputs("DPO", completion_mask=_prompts_of_rejected), "trainer", "lint", "of a pair"),
    "dpo-stale": Fault(
        _inputs("DPO", ref_chosen_logps=lambda sums: sums.roll(1)), "trainer", "lint", "the reference is",
        {"precompute_ref_log_probs": True},
    ),
    "dpo-labels": Fault(_of_head("DPO", _labels_late), "trainer", "lint", _SHIFT),
    "dpo-temperature": Fault(_of_head("DPO", temperature=0.7), "trainer", "check", _HOT),
    "dpo-padding": Fault(_of_head("DPO", _unmasked), "trainer", "check", "padding"),
    "dpo-scale": Fault(_made("DPO", _scaled), "trainer", "check", "scale"),
    "sft-healthy": _healthy(),
    "sft-healthy-dft": _healthy(loss_type="dft"),
    "sft-healthy-packed": _healthy(padding_free=True, max_length=None),
    "sft-tokens": Fault(_method("SFT", "compute_loss", _of_micro_batch), "trainer", "lint", "losses add up"),
    "sft-means": Fault(
        _made("SFT", lambda trainer: setattr(trainer, "model_accepts_loss_kwargs", False)), "trainer", "lint", "losses add up"
    ),
    "sft-end": Fault(_inputs("SFT", labels=lambda ids: ids.masked_fill(ids == 2, -100)), "trainer", "lint", "no end token"),
    "sft-labels": Fault(_of_head("SFT", _labels_late), "trainer", "lint", _SHIFT),
    "sft-temperature": Fault(_of_head("SFT", temperature=0.7), "trainer", "check", _HOT),
    "sft-padding": Fault(_of_head("SFT", _unmasked), "trainer", "check", "padding"),
    "sft-scale": Fault(_made("SFT", _scaled), "trainer", "check", "scale"),
    "rloo-healthy": _healthy(),
    "rloo-healthy-normalized": _healthy(normalize_advantages=True, beta=0.05),
    "rloo-old": Fault(_inputs("RLOO", old_logps=lambda old: old * 1.02), "trainer", "lint", "old log-probs"),
    "rloo-advantages": Fault(_inputs("RLOO", advantages=lambda values: values + 1), "trainer", "lint", "group"),
    "rloo-mask": Fault(_inputs("RLOO", completion_mask=lambda mask: mask.roll(1, 1)), "trainer", "lint", "mask"),
    "rloo-temperature": Fault(_of_head("RLOO", temperature=1.0), "trainer", "check", _HOT),
    "rloo-labels": Fault(_of_head("RLOO", _labels_late), "trainer", "lint", _SHIFT),
    "rloo-padding": Fault(_of_head("RLOO", _unmasked), "trainer", "check", "padding"),
}  # fmt: skip
"""All runs, by name. Without a side a run is healthy."""


def recorded(folder: Path, name: str) -> None:
    """Record a case into a folder."""
    record(folder, "trl", "benchmarks.faulty_trl", "train", str(folder), name, options=["--with-outputs"])


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    what, where, *rest = sys.argv[1:]
    if what == "train":
        train(Path(where), rest[0])
    else:
        raise SystemExit(not every(Path(where), {name: CASES[name] for name in rest or CASES}, recorded))
