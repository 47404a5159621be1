"""Functions of AReaL, miles, NeMo-RL, prime-rl, slime, and transformers' Trainer (`plain`), on the CPU, recorded and judged.

    python -m benchmarks.own_functions all STORES slime SOURCE [NAME ...]      SOURCE: a checkout of the trainer
    python -m benchmarks.own_functions train FOLDER slime SOURCE NAME          be the training process of a case

What scores, computes the loss and steps is the trainers' own. What is not installed is an empty stand-in. Replaced are a GPU and
Megatron's schedule: micro-batches run one after another, and packed rows one by one. A step has two micro-batches of two rows.
Tried: AReaL 4aef98d, miles 31f1ca9, NeMo-RL 7ea279a, prime-rl 559b447, slime 624b824.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.faulty_grpo import every, record
from benchmarks.own_classes import TEMPERATURE, _cool, _none, _rollout
from benchmarks.planted_grpo import Fault

OWN = {
    "areal": ("areal", "."), "miles": ("miles", "."), "nemo-rl": ("nemo_rl", "."), "plain": ("", "."),
    "prime-rl": ("prime_rl", "src"), "slime": ("slime", "."),
}  # fmt: skip
"""Of each trainer: its package, and where that is in its checkout."""


class _Nothing(type):
    """A class that stands for anything that a trainer imports: its attributes, items and results are itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())  # else items would never end

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __call__(cls, *args: Any, **more: Any) -> Any:
        decorated = len(args) == 1 and not more and callable(args[0])
        return args[0] if decorated else cls


class Nothing(metaclass=_Nothing):
    """See `_Nothing`."""


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that are not installed, where the trainer imports them. A test for a package's presence still says no."""

    def __init__(self, package: str) -> None:
        self.package, self.roots = package, set[str]()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec of an empty module for an import of the trainer, or below one that it got."""
        root = name.partition(".")[0]
        frame = sys._getframe(1)
        while frame.f_back and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        by = str(frame.f_globals.get("__name__")).partition(".")[0]
        own = root == self.package  # a part of it that lies elsewhere in the checkout
        if root not in self.roots and (by != self.package or (importlib.machinery.PathFinder.find_spec(root) and not own)):
            return None
        self.roots |= {root} - {self.package}
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        """Return a module whose attributes are `Nothing`."""
        module = types.ModuleType(spec.name)
        module.__getattr__ = functools.partial(getattr, Nothing)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill in what clips NeMo-RL's gradients, which is another package's."""
        if module.__name__ == "nemo_automodel.components.training.utils":
            vars(module)["scale_grads_and_clip_grad_norm"] = _clipped


def _clipped(max_grad_norm: float, model_parts: list[Any], **_: Any) -> float:
    import torch

    return float(torch.nn.utils.clip_grad_norm_(model_parts[0].parameters(), max_grad_norm))


class Job:
    """What the trainers get: a model, its optimizer, and eight rows, with what an engine and the trainer know of them."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
        self.model.config.use_cache = False  # else transformers does not see where packed rows begin
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        prompts, answers, values, gains = _rollout(folder / "model", {})
        self.tokens = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
        self.answers = [len(answer) for answer in answers]
        self.engine = [torch.tensor(row) for row in values]
        self.gains = [gain.expand(count) for gain, count in zip(gains, self.answers, strict=True)]

    def long(self, rows: list[Any]) -> list[Any]:
        """Return values of answers as values of all tokens, 0 in prompts."""
        import torch

        return [torch.nn.functional.pad(row, (len(ids) - len(row), 0)) for row, ids in zip(rows, self.tokens, strict=True)]

    def listed(self) -> dict[str, list[Any]]:
        """Return the rows as miles and slime have them."""
        import torch

        ones = [torch.ones(count, dtype=torch.int) for count in self.answers]
        return {
            "tokens": self.tokens, "total_lengths": [len(ids) for ids in self.tokens], "response_lengths": self.answers,
            "loss_masks": ones, "rollout_log_probs": self.engine, "advantages": self.gains,
            "rollout_mask_sums": [mask.sum() for mask in ones],
        }  # fmt: skip


_ARGUMENTS: dict[str, Any] = {
    "rollout_temperature": TEMPERATURE, "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None,
    "use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.0, "get_mismatch_metrics": False, "use_kl_loss": True,
    "kl_loss_coef": 1.0, "kl_loss_type": "low_var_kl", "use_unbiased_kl": False, "entropy_coef": 0.01, "use_opsm": False,
    "loss_type": "policy_loss",
    "use_rollout_logprobs": False, "calculate_per_token_loss": False, "recompute_loss_function": False, "allgather_cp": False,
    "log_probs_chunk_size": -1, "custom_tis_function_path": None, "custom_pg_loss_reducer_function_path": None,
    "qkv_format": "thd", "true_on_policy_mode": False, "skip_actor_forward_only": False, "observe_training_entropy": False,
    "global_batch_size": 4, "use_dynamic_global_batch_size": False, "use_dynamic_batch_size": False, "use_rollout_entropy": False,
    "data_pad_size_multiplier": 16, "custom_megatron_before_log_prob_hook_path": None, "rollout_top_p": 1.0, "seq_length": 64,
    "custom_megatron_before_train_step_hook_path": None, "save_debug_train_data": None, "enable_mtp_training": False,
    "ci_test": False, "micro_batch_size": 2, "decoder_seq_length": 64, "check_for_nan_in_loss_and_grad": True,
}  # fmt: skip
"""Options of miles and slime."""


def _slime(job: Job, plant: Callable[[Any], None]) -> None:
    """Score and train with slime's functions; Megatron's schedule is a loop."""
    import torch
    from slime.backends.megatron_utils import cp_utils, data, loss, model
    from slime.observability import train_metric_utils

    class Parallel:
        def __getattr__(self, name: str) -> Any:
            known = {"group": torch.distributed.group.WORLD, "is_pipeline": True, "virtual": None, "world_size": 1}
            return lambda *_, **__: next((value for part, value in known.items() if part in name), 0)

    class Packed(torch.nn.Module):
        role = "actor"

        def __init__(self) -> None:
            super().__init__()
            self.inner = job.model

        def forward(self, input_ids: Any, packed_seq_params: Any, **_: Any) -> Any:
            parts = input_ids.split(packed_seq_params.cu_seqlens_q.diff().tolist(), 1)
            return torch.cat([self.inner(input_ids=part).logits for part in parts], 1).float()

        def zero_grad_buffer(self) -> None:
            """Keep no buffer."""

    class Optimizer:
        zero_grad = staticmethod(job.optimizer.zero_grad)

        def step(self) -> tuple[bool, float, int]:
            norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
            job.optimizer.step()
            return True, norm.item(), 0

    def schedule(
        *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, forward_only: bool, **_: Any
    ) -> Any:
        results = []
        for _number in range(num_microbatches):
            logits, compute = forward_step_func(data_iterator[0], model[0])
            value, *_, results_of = compute(logits)
            results.append(results_of)
            if not forward_only:
                (value / num_microbatches).backward()
        return results

    for module in (cp_utils, data, loss, model):
        module.mpu = Parallel()
    arguments, net = SimpleNamespace(**_ARGUMENTS), [Packed()]
    data.PackedSeqParams, data.accelerator = SimpleNamespace, SimpleNamespace(device=lambda: "cpu")
    model.get_args, model.get_model_config = (lambda: arguments), lambda _: SimpleNamespace()
    model.get_forward_backward_func = lambda: schedule
    train_metric_utils.reduce_train_step_metrics = lambda *_, **__: {}
    batch, pairs = job.listed(), [[row, row + 1] for row in range(0, 8, 2)]
    score = functools.partial(model.forward_only, loss.get_log_probs_and_entropy, arguments, net)
    batch |= score([data.DataIterator(batch, pairs)], [4], store_prefix="ref_")
    batch |= score([data.DataIterator(batch, pairs)], [4])
    plant(loss)
    net[0].train()
    rest = SimpleNamespace(step=lambda increment: None)
    for step in range(2):
        part = [data.DataIterator({name: rows[4 * step : 4 * step + 4] for name, rows in batch.items()}, pairs[:2])]
        model.train_one_step(arguments, 0, step, part, net, Optimizer(), rest, 2, 4)


def _miles(job: Job, plant: Callable[[Any], None]) -> None:
    """Score and train with miles' FSDP actor, and a reference of its own."""
    import copy

    import torch
    from miles.backends.fsdp_utils import actor
    from miles.backends.training_utils import data, loss as normalized, parallel
    from miles.backends.training_utils.loss_hub import losses
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    def cross_entropy(logits: Any, tokens: Any, _group: Any) -> Any:
        return -logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)

    fused = types.ModuleType("megatron.core.fusions.fused_cross_entropy")
    fused.fused_vocab_parallel_cross_entropy = cross_entropy  # type: ignore[attr-defined]
    sys.modules |= {name: types.ModuleType(name) for name in ("megatron", "megatron.core", "megatron.core.fusions")}
    sys.modules[fused.__name__] = fused
    world = torch.distributed.group.WORLD
    groups = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp")
    parallel.set_parallel_state(parallel.ParallelState(**{name: GroupInfo(rank=0, size=1, group=world) for name in groups}))
    actor.precision_forward_context, actor.get_gloo_group = (lambda _: contextlib.nullcontext()), lambda: world
    trainer = object.__new__(actor.FSDPTrainRayActor)
    trainer.args, trainer.model, trainer.ref_model = SimpleNamespace(**_ARGUMENTS), job.model, copy.deepcopy(job.model)
    trainer.fsdp_cpu_offload, trainer.precision_policy = True, None
    trainer.prof = SimpleNamespace(iterate_train_log_probs=lambda numbers: numbers)
    batch = job.listed()
    batch |= trainer._compute_log_prob("ref", data.DataIterator(batch, 2), [4], store_prefix="ref_")
    batch |= trainer._compute_log_prob("actor", data.DataIterator(batch, 2), [4])
    plant(losses)
    normalized.get_sum_of_sample_mean = losses.get_sum_of_sample_mean
    names = [*batch, "multimodal_train_inputs", "max_seq_lens"]
    names.remove("rollout_mask_sums")
    for step in range(2):
        part = data.DataIterator({name: rows[4 * step : 4 * step + 4] for name, rows in batch.items()}, 2)
        job.optimizer.zero_grad()
        for _ in range(2):
            micro_batch = data.get_batch(part, names, 16, "thd", get_position_ids=True)
            trainer._train_step(batch=micro_batch, step_id=step, num_microbatches=2)
        norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()
        actor.log_train_step(trainer.args, {}, norm.item(), 0, step, 2, should_log=False)


def _prime(job: Job, plant: Callable[[Any], None]) -> None:
    """Train with prime-rl's forward, fused head and loss, as its loop does."""
    import torch
    from prime_rl.trainer import model, utils
    from prime_rl.trainer.models.layers.lm_head import inject_prime_lm_head
    from prime_rl.trainer.rl import loss

    loss.CustomLossConfig = loss.IPOLossConfig = model.PreTrainedModelPrimeRL = type("Other", (), {})
    utils.torch_clip_grad_norm_ = lambda parameters, max_norm, ep_enabled: torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    inject_prime_lm_head(job.model, chunk_size=16)
    of_config = SimpleNamespace(dppo_mask_high=0.2, dppo_mask_low=0.2, adv_tau=1.0, kl_tau=1e-3)
    by = loss.setup_rl_loss_fn(of_config)
    plant(loss)
    job.model.train()
    masks = job.long([torch.ones(count) for count in job.answers])
    columns = (job.tokens, job.long(job.engine), job.long(job.gains), masks)
    for step in range(2):
        scale = sum(job.answers[4 * step : 4 * step + 4]) * getattr(loss, "times", 1)
        for start in (4 * step, 4 * step + 2):
            ids, engine, gains, mask = (torch.cat(column[start : start + 2]) for column in columns)
            lengths = [len(row) for row in job.tokens[start : start + 2]]
            positions = torch.cat([torch.arange(length) for length in lengths])
            given = {"seq_lens": torch.tensor(lengths), "temperature": torch.full((1, len(ids)), TEMPERATURE)}
            labels = loss.shift_tensor_left(ids[None])
            new = loss.shift_tensor_right(
                model.forward(job.model, ids[None], positions[None], labels=labels, **given)["logprobs"]
            )
            parts = (values.squeeze().split(lengths) for values in (new, engine, gains, mask.bool()))
            new, engine, gains, mask = parts
            rest = {"rl_weights": None, "ce_weights": None, "ref_kl_weights": None, "ce_scale": 1, "ref_kl_scale": 1}
            loss.compute_loss(new, engine, None, gains, mask, rl_loss_fn=by, rl_scale=scale, **rest)[0].backward()
        utils.clip_grad_norm_(None, job.model, 1.0, False)
        job.optimizer.step()
        job.optimizer.zero_grad()


def _nemo(job: Job, plant: Callable[[Any], None]) -> None:
    """Train with NeMo-RL's loop over micro-batches, its post-processor and its loss."""
    import importlib

    import torch

    sys.modules["nemo_rl.models.policy"] = Nothing  # type: ignore[assignment]  # it refuses newer releases of transformers
    from nemo_rl.algorithms.loss import loss_functions
    from nemo_rl.models.automodel import data, train

    clipping = importlib.import_module("nemo_automodel.components.training.utils")
    train.to_local_if_dtensor = lambda logits: logits
    plant(loss_functions)
    sampling = SimpleNamespace(temperature=TEMPERATURE, top_k=None, top_p=1.0)
    settings = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"}
    settings |= {"truncated_importance_sampling_ratio": 2.0, "reference_policy_kl_penalty": 1.0}
    loss = loss_functions.ClippedPGLossFn(loss_functions.ClippedPGLossConfig(**settings))
    process = train.LossPostProcessor(loss, {}, None, None, None, 1, 1, sampling_params=sampling)
    padded = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    engine, mask = padded(job.long(job.engine)), padded(job.long([torch.ones(count) for count in job.answers]))
    rows = {
        "input_ids": padded(job.tokens), "input_lengths": torch.tensor([len(ids) for ids in job.tokens]), "token_mask": mask,
        "sample_mask": torch.ones(8), "advantages": padded(job.long(job.gains)), "generation_logprobs": engine,
        "prev_logprobs": engine + 0.01 * mask, "reference_policy_logprobs": engine,
    }  # fmt: skip
    job.model.train()
    for step in range(2):
        counted = sum(job.answers[4 * step : 4 * step + 4]) * getattr(loss_functions, "times", 1)
        batches = []
        for start in (4 * step, 4 * step + 2):
            part = {name: values[start : start + 2] for name, values in rows.items()}
            ids = part["input_ids"]
            places = torch.arange(ids.shape[1]).expand(ids.shape)
            inputs = data.ProcessedInputs(ids, ids.shape[1], torch.ones_like(ids), places)
            batches.append(data.ProcessedMicrobatch(part, inputs, 2, ids.shape[1]))
        known = {"global_valid_seqs": torch.tensor(4), "global_valid_toks": torch.tensor(counted), "sampling_params": sampling}
        train.automodel_forward_backward(job.model, iter(batches), process, **known)
        clipping.scale_grads_and_clip_grad_norm(1.0, [job.model])
        job.optimizer.step()
        job.optimizer.zero_grad()


def _areal(job: Job, plant: Callable[[Any], None]) -> None:
    """Train with AReaL's FSDP engine and its GRPO, a row a micro-batch: its packed rows need flash attention."""
    import logging

    import torch
    from areal.api.cli_args import MicroBatchSpec
    from areal.engine import fsdp_engine
    from areal.trainer.ppo import actor

    world, cpu = torch.distributed.group.WORLD, torch.device("cpu")
    mesh = dict.fromkeys(("dp_sp", "tp"), SimpleNamespace(get_group=lambda: world))

    class Engine(fsdp_engine.FSDPEngine):  # type: ignore[misc]
        dp_group = data_parallel_group = world
        world_mesh, device, enable_tree_training, is_offload, is_vision_model = mesh, cpu, False, False, False

        def __init__(self) -> None:
            off = SimpleNamespace(offload_params=False, per_layer_optim_step=False)
            settings = {"mb_spec": MicroBatchSpec(n_mbs=4), "pad_to_maximum": False, "fsdp": off}
            self.config = SimpleNamespace(is_critic=False, temperature=TEMPERATURE, **settings)
            self.parallel_helper = SimpleNamespace(tp_size=1, sp_size=1, dp_size=1, tp_group=None)
            self.model, self.model_config, self.optimizer = job.model, job.model.config, job.optimizer
            self.optimizer_config, self.logger = SimpleNamespace(gradient_clipping=1.0), logging.getLogger()
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(job.optimizer)

    def norm(parameters: Any, max_norm: float, **_: Any) -> float:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()

    def plain(model: Any, _args: Any, given: dict[str, Any]) -> Any:
        return (), {name: given[name] for name in ("input_ids", "position_ids")}

    job.model.register_forward_pre_hook(plain, with_kwargs=True)
    fsdp_engine.fsdp2_clip_grad_norm = norm
    job.model.train()
    plant(actor)
    padded = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    mask = padded(job.long([torch.ones(count) for count in job.answers])).roll(-1, 1)
    engine, gains = (padded(job.long(rows)).roll(-1, 1) for rows in (job.engine, job.gains))
    real = padded([torch.ones(len(ids), dtype=torch.bool) for ids in job.tokens])
    data = {"input_ids": padded(job.tokens), "attention_mask": real, "loss_mask": mask, "advantages": gains}
    data |= {"logprobs": engine, "prox_logp": engine + 0.01 * mask}
    loss = functools.partial(actor.grpo_loss_fn, eps_clip=0.2, eps_clip_higher=0.28, c_clip=None, use_decoupled_loss=True)
    trainer = Engine()
    for step in range(2):
        part = {name: rows[4 * step : 4 * step + 4] for name, rows in data.items()}
        trainer.train_batch(part, loss_fn=loss, loss_weight_fn=lambda own: own["loss_mask"].count_nonzero())


def _plain(job: Job, plant: Callable[[Any], None]) -> None:
    """Train with transformers' own Trainer."""
    import torch
    from transformers import Trainer, TrainingArguments

    plant(None)
    ids, real = (
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        for rows in (job.tokens, [torch.ones_like(row) for row in job.tokens])
    )
    rows = zip(ids, real, ids.where(real > 0, -100), strict=True)
    names = ("input_ids", "attention_mask", "labels")
    settings = TrainingArguments(
        "out", per_device_train_batch_size=4, max_steps=2, use_cpu=True, report_to=[], save_strategy="no"
    )
    Trainer(job.model, settings, train_dataset=[dict(zip(names, row, strict=True)) for row in rows]).train()


def _changed(name: str, change: Callable[..., Any]) -> Callable[[Any], None]:
    """Return what replaces a function of a module: `change` gets the original and its arguments."""

    def plant(module: Any) -> None:
        setattr(module, name, functools.partial(change, getattr(module, name)))

    return plant


def _twice(original: Any, *args: Any, **more: Any) -> Any:
    """Return twice what the function returns, or what it returned returns."""
    made = original(*args, **more)
    if callable(made):
        return lambda values: 2 * made(values)
    return (made[0] * 2, *made[1:]) if isinstance(made, tuple) else made * 2


def _half(module: Any) -> None:
    module.times = 0.5


def _of_config(**changes: float) -> Callable[[Any], None]:
    """Plant another setting in prime-rl's loss."""

    def other(original: Any, inputs: Any, config: Any) -> Any:
        return original(inputs, SimpleNamespace(**vars(config) | changes))

    return _changed("default_loss_fn", other)


def _fault(plant: Callable[[Any], None], words: str) -> Fault:
    return Fault(plant, "trainer", "lint", words)


_KL = "the KL term with the opposite sign"
_WARM = Fault(_cool, "trainer", "check", "temperature 0.8 was not applied")
_LISTED = {
    "healthy": Fault(_none, "", "check", ""),
    "temperature": _WARM,
    "doubled": _fault(_changed("get_sum_of_sample_mean", _twice), "2 times it"),
    "kl-sign": _fault(_changed("compute_approx_kl", lambda original, *args, **more: -original(*args, **more)), _KL),
    "ratio": _fault(
        _changed("compute_policy_loss", lambda original, kl, *args, **more: original(kl * 1.5, *args, **more)), "add up to"
    ),
}
CASES: dict[str, tuple[Callable[[Job, Callable[[Any], None]], None], dict[str, Fault]]] = {
    "areal": (_areal, {
        "healthy": Fault(_none, "", "check", ""),
        "temperature": _WARM,
        "doubled": _fault(_changed("ppo_actor_loss_fn", _twice), "2 times it"),
        "no-clip": _fault(_changed("ppo_actor_loss_fn", lambda original, **more: original(
            **more | {"eps_clip": 0.0, "eps_clip_higher": 0.0})), "add up to"),
    }),
    "miles": (_miles, _LISTED),
    "nemo-rl": (_nemo, {
        "healthy": Fault(_none, "", "check", ""),
        "temperature": _WARM,
        "divisor": _fault(_half, "its losses are divided by"),
        "kl-sign": _fault(_changed("calculate_kl", lambda original, *args, **more: -original(*args, **more)), _KL),
    }),
    "plain": (_plain, {
        "healthy": Fault(_none, "", "check", ""),
        "temperature": Fault(_cool, "trainer", "check", "recorded log-probs"),
    }),
    "prime-rl": (_prime, {
        "healthy": Fault(_none, "", "check", ""),
        "temperature": _WARM,
        "divisor": _fault(_half, "its losses are divided by"),
        "no-trust": _fault(_of_config(dppo_mask_high=0.0, dppo_mask_low=0.0), "add up to"),
        "kl-sign": _fault(_of_config(kl_tau=-0.1), "add up to"),
    }),
    "slime": (_slime, _LISTED),
}  # fmt: skip
"""For each trainer how it trains, and its cases."""


def train(folder: Path, trainer: str, source: Path, name: str) -> None:
    """Train a case."""
    import torch
    import transformers  # noqa: F401  # before anything is replaced

    package, below = OWN[trainer]
    sys.path.insert(0, str(source / below))
    sys.meta_path.append(_StandIns(package))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[assignment, method-assign]
    run, faults = CASES[trainer]
    run(Job(folder), faults[name].plant)


def recorded(trainer: str, source: Path) -> Callable[[Path, str], None]:
    """Return what records a case of a trainer into a folder."""

    def recording(folder: Path, name: str) -> None:
        record(
            folder,
            trainer,
            "benchmarks.own_functions",
            "train",
            str(folder),
            trainer,
            str(source),
            name,
            options=["--with-outputs"],
        )

    return recording


if __name__ == "__main__":
    if len(sys.argv) < 5:
        raise SystemExit(__doc__)
    what, where, which, checkout, *rest = sys.argv[1:]
    if what == "train":
        train(Path(where), which, Path(checkout).absolute(), rest[0])
    else:
        chosen = {name: CASES[which][1][name] for name in rest or CASES[which][1]}
        raise SystemExit(not every(Path(where), chosen, recorded(which, Path(checkout).absolute())))
