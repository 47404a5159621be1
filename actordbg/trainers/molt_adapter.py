"""Molt: its Actor's forward, whose result is one dict, and its losses, which get their log-probs from it.

Under context parallelism each rank has whole rows, and gets whole log-probs. The trainer passes an empty `cp_context_stack`,
which the forward may fill: it holds no input. Not recorded: critics. The rollout's experts (`routed_experts`) are kept with the
call; a replay forces them, unless `--routing free`.
"""

from __future__ import annotations

from typing import Any

from actordbg.trainers.seam import Arguments, LossCall, Rows, Scores, Seam, images, no_rows, updates_of

_ACTOR = "molt.models.actor:Actor"
_SETTINGS = {
    "rollout.temperature": "rollout.temperature", "rollout.top_p": "rollout.top_p", "rollout.top_k": "rollout.top_k",
    "multi_turn": "train.agent_path", "kl.use_loss": "algo.kl.use_loss", "kl.init_coef": "algo.kl.init_coef",
    "kl.estimator": "algo.kl.estimator", "kl.ref": "algo.kl.ref", "entropy_coef": "actor.entropy_coef",
    "aux_loss_coef": "actor.aux_loss_coef", "max_norm": "actor.max_norm",
}  # fmt: skip
"""Paths in the arguments of its trainer, by the names that settings have in records."""
_OF_EXPERIENCE = ("base_action_log_probs", "rewards", "returns", "response_length", "truncated")


def _rows(call: Arguments) -> Rows:
    actor, places = call["self"], call.get("position_ids")
    return Rows(
        model=actor.model,
        sequences=call["sequences"],
        attention_mask=call["attention_mask"],
        action_mask=call["action_mask"],
        temperature=actor.temperature,
        entropy=bool(call.get("return_entropy")),
        step=updates_of(actor),
        more=images(call) | ({} if places is None else {"position_ids": places}),
        context=_beside(call),
    )


def _beside(call: Arguments) -> dict[str, Any]:
    """Return what it has beside its inputs: the rollout's experts [B, S, layers, k], which are there [B, layers, k, S]."""
    beside = {name: call[name] for name in ("routed_experts", "top_ids") if call.get(name) is not None}
    if "routed_experts" in beside:
        beside["routed_experts"] = beside["routed_experts"].permute(0, 3, 1, 2)
    return beside


def _scores(output: Any) -> Scores:
    """Read the log-probs of actions, or of all tokens; entropies cover all positions, and are cut to the log-probs."""
    log_probs = output.get("action_log_probs", output["log_probs"])
    entropy = output.get("entropy")
    if entropy is not None:
        entropy = entropy[:, -log_probs.shape[1] :]
    return Scores(log_probs, entropy)


def _policy_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall:
    """Read PolicyLoss. `geo` is what other trainers call `seq`: one weight for a row, the mean of its tokens in logarithms."""
    loss, trainer, experience = call["self"], call["around"].get("self"), call["around"].get("experience")
    level, gate = loss.is_correction_level, getattr(loss, "is_correction_gating", "ratio")
    known = level in ("off", "token", "geo") or gate != "ratio"
    known = known and loss.is_correction_mode != "trunc" and not getattr(loss, "score_centering", False)
    known = known and call.get("prompt_token_counts") is None and (loss.loss_mode == "ppo" or level == "off")
    facts = {name: value for name, value in vars(loss).items() if isinstance(value, str | float | int | list | bool | None)}
    facts |= {"policy_loss_type": loss.loss_mode if known else "molt", "dual_clip": loss.dual_clip}
    facts["is_correction_level"] = "seq" if level == "geo" else level
    if not loss.token_level_loss:
        facts["loss_agg_mode"] = "seq-mean-token-mean"
    settings = _settings(trainer)
    if known and level == "off" and facts["loss_agg_mode"] == "token-mean" and settings["kl.ref"] != "rollout":  # its k3 differs
        facts["formula_of"] = "PolicyLoss"
    names = ("old_log_probs", "advantages", "rollout_log_probs", "dp_size", "batch_num_tokens", "global_batch_size")
    own = {name: value for name in _OF_EXPERIENCE if (value := getattr(experience, name, None)) is not None}
    if trainer is not None:
        own |= {"lr": float(trainer.actor_scheduler.get_last_lr()[0]), "kl_ctl": call["around"].get("kl_ctl")}
    return LossCall(
        call["log_probs"], call["action_mask"], **{name: call[name] for name in names}, loss=output[0], facts=facts, own=own,
        settings=settings,
    )  # fmt: skip


def _settings(trainer: Any) -> dict[str, Any]:
    """Return the settings of a run, without those that its trainer does not have."""
    read: dict[str, Any] = {"eos_token_id": getattr(getattr(trainer, "tokenizer", None), "eos_token_id", None)}
    for name, path in _SETTINGS.items():
        value = getattr(trainer, "args", None)
        for part in path.split("."):
            value = getattr(value, part, None)
        read[name] = value
    return read | {"multi_turn": bool(read["multi_turn"])}


def _sft_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall:
    loss = call["self"]
    facts = {"token_level_loss": loss.token_level_loss}
    if loss.token_level_loss:
        facts["loss_agg_mode"] = loss.loss_agg_mode
    given = {name: call[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    return LossCall(call["per_token_logps"], call["loss_mask"], loss=output, **given, facts=facts)


def _stepped(call: Arguments) -> Any:
    """Return the Actor whose optimizer stepped; None while its SFT, which asks for the norm each time, accumulates."""
    strategy = call["self"]
    return None if strategy.time_steps["step_model"] % strategy.accumulated_gradient else call["model"]


def _again(model: Any, rows: Rows) -> Any:
    from actordbg.trainers.captured_call import function

    actor = function(_ACTOR)(model, temperature=rows.temperature)
    given = rows.more if rows.positions is None else {**rows.more, "position_ids": rows.positions}
    return actor(rows.sequences, rows.action_mask, rows.attention_mask, return_entropy=rows.entropy, **given)


class Molt:
    """Molt 0.2 (`molt-rl`). Tried with its Actor, losses and training step on a CPU, without its Ray job and engine."""

    name = "molt"
    package = "molt-rl"
    tried = ("0.2.1",)
    seams = (
        Seam(f"{_ACTOR}.forward", _rows, _scores, ("sequences", "action_mask", "attention_mask"), again=_again, shards=True),
        Seam("molt.models.loss:PolicyLoss.forward", no_rows, needs=("log_probs", "action_mask"), loss=_policy_loss),
        Seam("molt.models.loss:SFTLoss.forward", no_rows, needs=("per_token_logps", "loss_mask"), loss=_sft_loss),
        Seam("molt.trainer.workers.policy_actor:PolicyTrainer.training_step", no_rows, needs=("experience",), around=True),
        Seam("molt.trainer.sft_trainer:SFTTrainer._run_microbatch", no_rows, around=True),
        Seam("molt.trainer.fsdp.strategy:FsdpStrategy.backward", no_rows, needs=("loss",), backward=True),
        Seam("molt.trainer.fsdp.strategy:FsdpStrategy.get_grad_norm", no_rows, needs=("model",), steps=_stepped),
    )
