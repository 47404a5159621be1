"""Losses of verl's, SkyRL's and Molt's own classes on the CPU, recorded and judged, healthy or with a fault on either side.

    pip install --target FOLDER --no-deps verl skyrl ...        what they import, without what needs a GPU
    PYTHONPATH=FOLDER python -m benchmarks.own_classes all STORES verl [NAME ...]    or skyrl, molt
    PYTHONPATH=FOLDER python -m benchmarks.own_classes train FOLDER verl NAME        be the training process of a case

Engine, loss and worker are the packages' own; rollouts come from `planted_grpo.Server`. Replaced are the device (a platform of
verl's, `torch.cuda.current_device` for SkyRL) and what moves metrics between processes. Two mini-batches of two micro-batches are
trained on, twice. Tried: verl 0.9.1 with FSDP2, SkyRL 0.3.0, molt-rl 0.2.1 with FSDP2 and nemo-automodel 0.7.0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.faulty_grpo import every, record
from benchmarks.planted_grpo import Fault, Server, appended_end, of_another

TEMPERATURE = 0.8
Rollout = tuple[list[list[int]], list[list[int]], list[list[float]], Any]
"""Of 8 rows: prompts, responses, their log-probs, and an advantage for each row."""
Plant = Callable[[Any], None]
"""Plants a fault: gets the module of the loss."""


def _rollout(model: Path, attributes: dict[str, Any]) -> Rollout:
    """Sample 2 completions for each of 4 prompts from `Server`, with other attributes if it is to be faulty."""
    import torch

    torch.manual_seed(0)
    Server.model_path = str(model)
    own = {name: staticmethod(value) if callable(value) else value for name, value in attributes.items()}
    prompts = [[5, 9, 11, 42, 7], [33, 8, 64], [70, 20, 31, 90, 91, 92, 12], [15, 16]]
    done = type("Faulty", (Server,), own)().generate(prompts, n=2, temperature=TEMPERATURE, max_tokens=14)
    values = [[value for (value,) in row] for row in done["logprobs"]]
    advantages = torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
    return [prompt for prompt in prompts for _ in range(2)], done["completion_ids"], values, advantages


def _verl(model: Path, rollout: Rollout, plant: Plant) -> None:
    """Train with verl's FSDP2 engine and its `ppo_loss`, as its TrainingWorker does."""
    import torch
    import trl
    from verl.plugin.platform import platform_manager

    class Cpu(platform_manager.PlatformCUDA):  # type: ignore[misc]
        device_name, device_module = "cpu", torch.cpu

        def current_device(self) -> str:
            return "cpu"

        def communication_backend_name(self) -> str:
            return "gloo"

    platform_manager.set_platform(Cpu())
    trl.AutoModelForCausalLMWithValueHead = trl.GRPOTrainer  # verl patches it, and newer releases of TRL lack it
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers import config
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.utils import losses
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    engine = transformer_impl.FSDPEngineWithLMHead(
        config.HFModelConfig(
            path=str(model), override_config={"attn_implementation": "sdpa"}, use_remove_padding=False,
            enable_gradient_checkpointing=False,
        ),
        config.FSDPEngineConfig(
            strategy="fsdp2", use_torch_compile=False, dtype="float32", mixed_precision={"param_dtype": "fp32"}
        ),
        config.FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    plant(losses)

    def padded(rows: list[Any], *, left: bool = False) -> Any:
        width = max(map(len, rows))
        return torch.tensor([[0] * (width - len(row)) + row if left else row + [0] * (width - len(row)) for row in rows])

    prompts, responses, values, advantages = rollout
    asked, answered, mask = padded(prompts, left=True), padded(responses), padded([[1] * len(row) for row in responses])
    real = torch.cat((padded([[1] * len(row) for row in prompts], left=True), mask), 1)
    tensors = {"prompts": asked, "responses": answered, "input_ids": torch.cat((asked, answered), 1), "response_mask": mask}
    tensors |= {"attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0), "advantages": advantages * mask}
    facts = {"temperature": TEMPERATURE, "micro_batch_size_per_gpu": 2, "use_dynamic_bsz": False, "use_remove_padding": False}
    facts |= {"use_fused_kernels": False, "calculate_entropy": False, "global_batch_size": 4}
    data = left_right_2_no_padding(tu.get_tensordict({**tensors, "rollout_log_probs": padded(values)}, facts))
    with engine.eval_mode():
        scored = engine.infer_batch(data)
    data["old_log_probs"] = no_padding_2_padding(scored["model_output"]["log_probs"], data)
    actor = config.FSDPActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=2, ppo_mini_batch_size=4)
    for _ in range(2):
        for mini_batch in tu.chunk_tensordict(data, 2):
            with engine.train_mode():
                engine.train_batch(mini_batch, lambda **given: losses.ppo_loss(actor, **given))
    engine.lr_scheduler_step()


def _skyrl(model: Path, rollout: Rollout, plant: Plant) -> None:
    """Train with SkyRL's policy worker, its model wrapper and its batches."""
    import typing

    import torch
    import typing_extensions

    from actordbg.trainers.openrlhf import flash_attn_standin

    flash_attn_standin.register()
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # SkyRL is for Python 3.12
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.backends.skyrl_train.workers import model_wrapper, worker
    from skyrl.train.config.config import AlgorithmConfig
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    class Strategy(FSDPStrategy):  # type: ignore[misc]
        max_norm = 1.0

        def __init__(self) -> None:
            """Need no process group."""

        def all_reduce(self, data: Any, **_: Any) -> Any:
            return data

    policy = object.__new__(worker.PolicyWorkerBase)
    algorithm = AlgorithmConfig(temperature=TEMPERATURE, use_kl_loss=False)
    sizes = {"micro_train_batch_size_per_gpu": 2, "micro_forward_batch_size_per_gpu": 4, "max_tokens_per_microbatch": -1}
    policy.cfg, policy.mesh_rank = SimpleNamespace(algorithm=algorithm, **sizes), SimpleNamespace(dp_size=1)
    policy.device_mesh = SimpleNamespace(get_group=lambda _: None)
    policy.model = model_wrapper.HFModelWrapper(str(model), bf16=False)
    policy.optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3)
    policy.scheduler = torch.optim.lr_scheduler.ConstantLR(policy.optimizer)
    policy.strategy, policy.policy_loss_fn = Strategy(), ppo_utils.PolicyLossRegistry.get("regular")
    plant(policy)
    prompts, responses, values, advantages = rollout
    ones = [[1] * len(row) for row in responses]
    rewards = [[0.0] * len(row) for row in responses]
    made = convert_prompts_responses_to_batch_tensors(SimpleNamespace(pad_token_id=0), prompts, responses, rewards, ones, values)
    names = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask", "rollout_logprobs")
    data = TrainingInputBatch(dict(zip(names, made, strict=False)))
    data.metadata = {"response_length": data["response_mask"].shape[1]}
    scored = policy.forward(data).loss_fn_outputs
    data["action_log_probs"] = torch.tensor([row["logprobs"] for row in scored])
    data["advantages"] = advantages * data["response_mask"]
    for start in (0, 4):
        part = slice(start, start + 4)
        given = {"loss_mask": data["loss_mask"][part], "loss_reduction": "token_mean", "micro_batch_size": 2, "max_seq_len": 99}
        data["advantages"][part] = ppo_utils.apply_loss_reduction_to_advantages_minibatch(data["advantages"][part], **given)
    for _ in range(2):
        for start in (0, 4):
            policy.forward_backward(data[start : start + 4])
            policy.optim_step()


def _molt(model: Path, rollout: Rollout, plant: Plant) -> None:
    """Train with Molt's training step, its Actor around a model under FSDP2, its loss and its strategy."""
    import torch
    import transformers
    from molt.models import actor, loss
    from molt.trainer.algorithm.experience import Experience
    from molt.trainer.fsdp.strategy import FsdpStrategy
    from molt.trainer.workers import policy_actor
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    kl = SimpleNamespace(use_loss=True, init_coef=0.1, estimator="k3", ref="model")
    args = SimpleNamespace(
        fsdp=SimpleNamespace(param_dtype="fp32"),
        rollout=SimpleNamespace(temperature=TEMPERATURE, top_p=1.0, top_k=-1),
        algo=SimpleNamespace(kl=kl),
        actor=SimpleNamespace(entropy_coef=0.01, aux_loss_coef=0.0),
        train=SimpleNamespace(dynamic_batch_enable=False, agent_path=None),
    )
    trainer = object.__new__(policy_actor.PolicyTrainer)  # its constructor asks for a GPU's name
    trainer.strategy, trainer.args, trainer.tokenizer, trainer.aux_loss = FsdpStrategy(args=args), args, None, False
    trainer._defer_grad_sync = True
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    trainer.actor = actor.Actor(fully_shard(loaded, mesh=mesh), temperature=TEMPERATURE)
    trainer.actor_optim = torch.optim.AdamW(trainer.actor.parameters(), lr=1e-3)
    trainer.actor_scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.actor_optim)
    trainer.actor_loss_fn = loss.PolicyLoss()
    plant(trainer)

    prompts, responses, values, advantages = rollout
    rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    shape = len(rows), max(map(len, rows))
    sequences, real = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    mask, sampled = torch.zeros(shape[0], shape[1] - 1), torch.zeros(shape[0], shape[1] - 1)
    for place, row in enumerate(rows):
        sequences[place, : len(row)], real[place, : len(row)] = torch.tensor(row), 1
        actions = slice(len(prompts[place]) - 1, len(row) - 1)  # a log-prob stands one place before its token
        mask[place, actions], sampled[place, actions] = 1.0, torch.tensor(values[place])
    mask = mask.bool()
    with torch.no_grad():
        old = trainer.actor(sequences, mask, attention_mask=real)["action_log_probs"].detach().clone()
    for _ in range(2):
        for start in (0, 4):
            window = mask[start : start + 4].sum().float()
            for first in (start, start + 2):
                part = slice(first, first + 2)
                experience = Experience(
                    sequences=sequences[part], attention_mask=real[part], action_mask=mask[part], info={},
                    action_log_probs=old[part], base_action_log_probs=old[part] - 0.5 * mask[part],
                    rollout_log_probs=sampled[part], advantages=advantages[part] * mask[part],
                )  # fmt: skip
                trainer.training_step(experience, 0.1, window, num_microbatches=2, is_optimizer_step=first > start)


def _of_data(change: Callable[[Any], Any]) -> Plant:
    """Plant a fault in the arguments of verl's loss: `change` gets its data, and returns what replaces parts of it."""

    def plant(losses: Any) -> None:
        original = losses.ppo_loss
        losses.ppo_loss = lambda config, model_output, data, dp_group=None: original(config, model_output, change(data), dp_group)

    return plant


def _tokens(data: Any) -> Any:
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, batch_num_tokens=data["batch_num_tokens"] // 2)
    return data


def _stale(data: Any) -> Any:
    data["old_log_probs"] = data["old_log_probs"] * 1.02
    return data


def _of_experience(**changes: Callable[[Any], Any]) -> Plant:
    """Plant a fault in what SkyRL's worker trains on."""

    def plant(policy: Any) -> None:
        original = type(policy)._forward_backward_micro

        def changed(self: Any, experience: Any, *args: Any, **more: Any) -> Any:
            for name, change in changes.items():
                setattr(experience, name, change(getattr(experience, name)))
            return original(self, experience, *args, **more)

        type(policy)._forward_backward_micro = changed

    return plant


def _doubled(policy: Any) -> None:
    original = policy.policy_loss_fn
    policy.policy_loss_fn = lambda *args, **more: (lambda loss, metrics: (loss * 2, metrics))(*original(*args, **more))


def _surrogate(trainer: Any) -> None:
    original = trainer.actor_loss_fn.policy_loss_fn
    trainer.actor_loss_fn.policy_loss_fn = lambda *args, **more: (lambda loss, clipped: (loss * 2, clipped))(
        *original(*args, **more)
    )


def _of_old(trainer: Any) -> None:
    original = trainer.training_step

    def changed(experience: Any, *args: Any, **more: Any) -> Any:
        experience.action_log_probs = experience.action_log_probs * 1.02
        return original(experience, *args, **more)

    trainer.training_step = changed


def _of_tokens(trainer: Any) -> None:
    original = trainer.training_step
    trainer.training_step = lambda experience, kl, count, **more: original(experience, kl, count / 2, **more)


def _turned(trainer: Any) -> None:
    module = sys.modules[type(trainer).__module__]
    original = module.compute_approx_kl
    module.compute_approx_kl = lambda *args, **more: -original(*args, **more)


def _lost(trainer: Any) -> None:
    original = trainer.strategy.backward

    def changed(loss: Any, model: Any, *args: Any, **more: Any) -> None:
        original(loss, model, *args, **more)
        if not more["sync_gradients"]:
            model.zero_grad()

    trainer.strategy.backward = changed


def _cool(package: Any) -> None:
    """Score at another temperature than the configured one."""
    import torch
    from transformers import LlamaModel

    original = LlamaModel.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **more: Any) -> Any:
        output = original(self, *args, **more)
        output.last_hidden_state = torch.mul(output.last_hidden_state, TEMPERATURE)  # its head is linear
        return output

    LlamaModel.forward = forward


def _none(_: Any) -> None:
    """Plant nothing in the trainer."""


_BOTH: dict[str, Fault] = {
    "healthy": Fault(_none, "", "lint", ""),
    "appended-end": Fault(_none, "rollout", "lint", "placeholder", {"returned": appended_end}),
    "another-row": Fault(_none, "rollout", "lint", "another row", {"returned": of_another}),
    "nan": Fault(_none, "rollout", "lint", "not finite", {"returned": lambda ids, v: (ids, [float("nan"), *v[1:]])}),
    "healthy-explained": Fault(_none, "", "explain", ""),
    "raw-log-probs": Fault(_none, "rollout", "explain", "temperature 0.8 was not applied", {"is_raw": True}),
    "trainer-temperature": Fault(_cool, "trainer", "explain", "temperature 0.8 was not applied"),
}
CASES: dict[str, tuple[Callable[[Path, Rollout, Plant], None], dict[str, Fault]]] = {
    "verl": (_verl, _BOTH | {
        "tokens": Fault(_of_data(_tokens), "trainer", "lint", "2 times it"),
        "stale": Fault(_of_data(_stale), "trainer", "lint", "ratio"),
    }),
    "skyrl": (_skyrl, _BOTH | {
        "doubled": Fault(_doubled, "trainer", "lint", "2 times it"),
        "stale": Fault(_of_experience(action_log_probs=lambda old: old * 1.02), "trainer", "lint", "ratio"),
    }),
    "molt": (_molt, _BOTH | {
        "doubled": Fault(_surrogate, "trainer", "lint", "2 times it"),
        "tokens": Fault(_of_tokens, "trainer", "lint", "2 times it"),
        "stale": Fault(_of_old, "trainer", "lint", "ratio"),
        "healthy-stepped": Fault(_none, "", "step", ""),
        "kl-sign": Fault(_turned, "trainer", "step", "with it negated: the KL term"),
        "lost-gradient": Fault(_lost, "trainer", "step", "only the gradient of the last is applied"),
    }),
}  # fmt: skip
"""For each package how it trains, and its cases. A fault's options are attributes of `Server`."""


def train(folder: Path, package: str, name: str) -> None:
    """Train a case."""
    run, faults = CASES[package]
    run(folder / "model", _rollout(folder / "model", faults[name].more), faults[name].plant)


def recorded(package: str) -> Callable[[Path, str], None]:
    """Return what records a case of a package into a folder."""

    def recording(folder: Path, name: str) -> None:
        command = ("benchmarks.own_classes", "train", str(folder), package, name)
        record(folder, package, *command)

    return recording


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    what, where, which, *rest = sys.argv[1:]
    if what == "train":
        train(Path(where), which, rest[0])
    else:
        chosen = {name: CASES[which][1][name] for name in rest or CASES[which][1]}
        raise SystemExit(not every(Path(where), chosen, recorded(which)))
