"""Faults of an RLHF step, each planted in OpenRLHF or in its rollout engine before a process imports OpenRLHF.

A row of `FAULTS` says how a fault is planted, on which side it is, which command has to name it, and by which words. "dynamic
batch" and "cut by top-p" are OpenRLHF's own behavior under its options: nothing is planted.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from actordbg.trainers.importhook import after_import
from actordbg.trainers.openrlhf import turn_recording, vllm_standin, weight_syncs

Plant = Callable[[], None]
_ENGINE: Any = vllm_standin.AsyncLLMEngine
_COLUMNS = ("sequences", "attention_mask", "action_mask", "rollout_log_probs")
TRAINER, ROLLOUT = "trainer", "rollout"


def _around(where: str, change: Callable[..., Any], recording: Callable[[Any], Any] | None = None) -> Plant:
    """Plant `change(original, *args, **kwargs)` in the place of "module:function" or "module:Class.method".

    recording: what records the method, and has wrapped it already: the fault is planted within.
    """
    module, _, path = where.partition(":")

    def patch(imported: Any) -> None:
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, imported)
        attached = getattr(owner, name)
        original = getattr(attached, "__wrapped__", attached) if recording else attached

        @functools.wraps(original)
        def changed(*args: Any, **kwargs: Any) -> Any:
            return change(original, *args, **kwargs)

        setattr(owner, name, recording(changed) if recording and original is not attached else changed)

    return lambda: after_import(module, patch)


def _nothing() -> None:
    """Plant nothing: this is OpenRLHF's own fault."""


# -- in the trainer


def _normalizers(change: Callable[[dict[str, Any], int], dict[str, Any]]) -> Plant:
    """Change what OpenRLHF divides a step's losses by: `change` gets dp_size, tokens, rows, and the accumulation."""
    return _around(
        "openrlhf.utils.loss_utils:_optimizer_step_loss_norm",
        lambda original, masks, group, dp_size, gas: change(original(masks, group, dp_size, gas), gas),
    )


def _engine_config(change: Callable[[Any], dict[str, Any]]) -> Plant:
    """Change DeepSpeed's configuration by what `change` returns for the strategy."""

    def configured(original: Any, strategy: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        config: dict[str, Any] = original(strategy, *args, **kwargs)
        del config["train_batch_size"]  # which follows from the others
        return config | {"gradient_accumulation_steps": strategy.accumulated_gradient} | change(strategy)

    return _around("openrlhf.utils.deepspeed.deepspeed:DeepspeedStrategy.get_ds_train_config", configured)


def _scored_warmer(original: Any, actor: Any, *args: Any, **kwargs: Any) -> Any:
    actor.temperature = 1.25
    return original(actor, *args, **kwargs)


def _optimizer(change: Callable[[Any], None]) -> Plant:
    """Change torch's optimizer before each of its steps; a scheduler sets the learning rate anew after it."""

    def stepped(original: Any, strategy: Any, optimizer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        engine = getattr(model, "model", model)
        if engine.is_gradient_accumulation_boundary():
            change(engine.optimizer.optimizer)
        return original(strategy, optimizer, model, *args, **kwargs)

    return _around("openrlhf.utils.deepspeed.deepspeed:DeepspeedStrategy.optimizer_step", stepped)


def _no_moments(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for name in state.keys() & {"exp_avg", "exp_avg_sq"}:
            state[name].zero_()


def _groups(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Any], None]:
    return lambda optimizer: [group.update(change(group)) for group in optimizer.param_groups] and None


def _last_repeated(original: Any, actor: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the second last log-prob in the place of the last."""
    import torch

    result = original(actor, *args, **kwargs)
    log_probs, *rest = result if isinstance(result, tuple) else (result,)
    log_probs = torch.cat((log_probs[:, :-1], log_probs[:, -2:-1]), 1)
    return (log_probs, *rest) if isinstance(result, tuple) else log_probs


def _loss(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    """Change the arguments that the loss is computed of, behind those that are recorded."""
    names = ("log_probs", "old_log_probs", "advantages", "action_mask", "rollout_log_probs")

    def forward(original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        return original(loss, **given | change(given))

    return _around("openrlhf.models.loss:PolicyLoss.forward", forward)


def _unclipped(original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    own = loss.clip_eps_low, loss.clip_eps_high
    loss.clip_eps_low = loss.clip_eps_high = 1e9
    try:
        return original(loss, *args, **kwargs)
    finally:
        loss.clip_eps_low, loss.clip_eps_high = own


def _own(name: str, value: Any) -> Callable[..., Any]:
    """Let a loss compute with another attribute than the recorded one."""

    def forward(original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(loss, name)
        setattr(loss, name, value)
        try:
            return original(loss, *args, **kwargs)
        finally:
            setattr(loss, name, own)

    return forward


def _rewarded(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    """Change the arguments of which the rewards of tokens are made."""
    names = ("r", "kl_coef", "kl")

    def reward(original: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        return original(**given | change(given))

    return _around("openrlhf.trainer.ppo_utils.experience_maker:compute_reward", reward)


def _without_kl(original: Any, trainer: Any, experience: Any, kl_ctl: float, *args: Any, **kwargs: Any) -> Any:
    return original(trainer, experience, 0.0, *args, **kwargs)


def _buffered(change: Callable[[Any], Any]) -> Plant:
    """Change an experience on its way into the replay buffer."""

    def append(original: Any, buffer: Any, experience: Any) -> None:
        change(experience)
        original(buffer, experience)

    return _around("openrlhf.trainer.ppo_utils.replay_buffer:NaiveReplayBuffer.append", append)


def _of_row_before(name: str) -> Plant:
    """Give each row of an experience the log-probs of the row before."""
    return _buffered(lambda experience: setattr(experience, name, getattr(experience, name).roll(1, 0)))


def _repeated(original: Any, buffer: Any, experience: Any) -> None:
    original(buffer, experience)
    buffer.items[-1] = buffer.items[0]


def _taken(change: Callable[[Any, Any], None]) -> Plant:
    """Change the experience that the trainer makes of a response: `change` gets the tokenizer and the experience."""

    def take(original: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
        experience = original(generator, *args, **kwargs)
        change(generator.tokenizer, experience)
        return experience

    where = "openrlhf.trainer.ppo_utils.samples_generator:SamplesGenerator._process_response_into_experience"
    return _around(where, take)


def _early_mask(_: Any, experience: Any) -> None:
    experience.action_mask = experience.action_mask.roll(-1, 1)


def _prompt_in_mask(_: Any, experience: Any) -> None:
    """Let the action mask begin with the last three tokens of the prompt."""
    mask = experience.action_mask
    experience.action_mask = mask | mask.roll(-1, 1) | mask.roll(-2, 1) | mask.roll(-3, 1)


def _second_bos(tokenizer: Any, experience: Any) -> None:
    for name, value in zip(_COLUMNS, (tokenizer.bos_token_id, 1, 0, 0.0), strict=True):
        given = getattr(experience, name)
        setattr(experience, name, given.new_tensor([[value, *given[0].tolist()]]))


def _without_head(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Send all parameters but the head."""
    model = trainer.actor.model.module
    every = model.named_parameters
    model.named_parameters = lambda *args, **kwargs: (pair for pair in every(*args, **kwargs) if pair[0] != "lm_head.weight")
    try:
        return original(trainer, *args, **kwargs)
    finally:
        del model.named_parameters


# -- in the rollout


def _engine(change: Callable[..., Any], *, temperature: float = 1.0, **asked: Any) -> Plant:
    """Change what the engine returns: `change` gets the engine, the completion, the prompt's ids, and the sampling parameters.

    temperature: a factor of the asked one. asked: other sampling parameters.
    """

    def plant() -> None:
        original = _ENGINE.generate

        async def generate(self: Any, prompt: Any, params: Any, request_id: str) -> Any:
            given = dataclasses.replace(params, temperature=params.temperature * temperature, **asked)
            async for output in original(self, prompt, given, request_id):
                change(self, output.outputs[0], prompt["prompt_token_ids"], given)
                yield output

        _ENGINE.generate = generate

    return plant


def _as_sampled(*_: Any) -> None:
    """Change nothing of a completion."""


def _say(done: Any, values: list[float]) -> None:
    done.logprobs = [{token: SimpleNamespace(logprob=value)} for token, value in zip(done.token_ids, values, strict=True)]


def _said(done: Any) -> list[float]:
    return [each[token].logprob for token, each in zip(done.token_ids, done.logprobs, strict=True)]


def _shifted(_: Any, done: Any, *__: Any) -> None:
    values = _said(done)
    _say(done, [*values[1:], values[-1]])


def _of_another(engine: Any, done: Any, *_: Any) -> None:
    """Return the log-probs of the request before."""
    own = _said(done)
    before, engine.before = getattr(engine, "before", own), own
    _say(done, (before + own[len(before) :])[: len(own)])


def _appended_end(engine: Any, done: Any, *_: Any) -> None:
    """Append an end token that the engine did not sample, with the log-prob 0.0."""
    end = engine._tokenizer.eos_token_id
    if done.token_ids[-1] != end:
        _, done.finish_reason = done.token_ids.append(end), "stop"
        done.logprobs.append({end: SimpleNamespace(logprob=0.0)})


def _never_truncated(_: Any, done: Any, *__: Any) -> None:
    done.finish_reason = "stop"


def _one_nan(_: Any, done: Any, *__: Any) -> None:
    _say(done, [float("nan"), *_said(done)[1:]])


def _scored(logits_of: Callable[[Any, Any, float], Any]) -> Callable[..., None]:
    """Return log-probs of other logits: `logits_of` gets the model, ids [1, S] and the temperature, and returns [1, S, V]."""

    def change(engine: Any, done: Any, prompt: list[int], params: Any) -> None:
        import torch

        with torch.no_grad():
            logits = logits_of(engine._model, torch.tensor([[*prompt, *done.token_ids]]), params.temperature)
        rows = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        _say(done, [float(row[token]) for token, row in zip(done.token_ids, rows, strict=True)])

    return change


def _nucleus(model: Any, ids: Any, temperature: float) -> Any:
    logits = model(ids).logits / temperature
    ordered, at = logits.softmax(-1).sort(-1, descending=True)
    kept = (ordered.cumsum(-1) - ordered < 0.9).gather(-1, at.argsort(-1))
    return logits.masked_fill(~kept, float("-inf"))


def _narrow_head(model: Any, ids: Any, temperature: float) -> Any:
    hidden = model.model(ids).last_hidden_state
    return (hidden.bfloat16() @ model.lm_head.weight.bfloat16().T).float() / temperature


def _asleep() -> None:
    """Let the engine keep its first weights, although its loader gets the others."""
    _ENGINE.load_weights = lambda self, weights: {name for name, _ in weights}


def _losing(lost: Callable[[str], bool]) -> Plant:
    """Let the engine receive parameters without loading them."""

    def plant() -> None:
        original = _ENGINE.update_weight

        def update_weight(self: Any, name: str, dtype: Any, shape: Any, *more: Any) -> Any:
            import torch

            if not lost(name):
                return original(self, name, dtype, shape, *more)
            self._policy.broadcast(torch.empty(shape, dtype=dtype), 0)
            return {"sha256": None, "loaded": None}

        _ENGINE.update_weight = update_weight

    return plant


def _rounded_on_arrival() -> None:
    """Round what arrives to bf16."""
    original = vllm_standin.PyNcclCommunicator.broadcast

    def broadcast(self: Any, tensor: Any, src: int, stream: object = None) -> None:
        original(self, tensor, src, stream)
        if self._group.rank() != src:
            tensor.copy_(tensor.bfloat16())

    vllm_standin.PyNcclCommunicator.broadcast = broadcast  # type: ignore[method-assign]


def _handed(change: Callable[[Any, list[int]], list[int]]) -> Plant:
    """Change the ids of a response that the agent hands to the trainer: `change` gets the tokenizer and the sampled ids."""

    async def execute(original: Any, agent: Any, *args: Any, **kwargs: Any) -> Any:
        result = await original(agent, *args, **kwargs)
        ((start, end),), known = result["action_ranges"], result["rollout_log_probs"]
        given = inspect.signature(original).bind(agent, *args, **kwargs).arguments
        answer = change(given["hf_tokenizer"], result["observation_tokens"][start:end])
        result["observation_tokens"] = result["observation_tokens"][:start] + answer
        result["action_ranges"] = [(start, start + len(answer))]
        result["rollout_log_probs"] = (known + [-1.0] * len(answer))[: start + len(answer)]
        return result

    return _around("openrlhf.utils.agent:SingleTurnAgentExecutor.execute", execute, turn_recording._recording)


def _encoded_again(tokenizer: Any, ids: list[int]) -> list[int]:
    """Encode the longest start of the ids as other ids of the same text: a token as its characters."""
    at = next((at for at, each in enumerate(ids) if len(tokenizer.decode([each])) > 1 and tokenizer.decode([each]).isascii()
               and each not in tokenizer.all_special_ids), None)  # fmt: skip
    if at is None:
        return ids
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in tokenizer.decode([ids[at]])]
    return [*ids[:at], *letters, *ids[at + 1 :]]


class Fault(NamedTuple):
    """A fault: how it is planted, on which side it is, the command that names it, and words of that command's sentence.

    more: options of OpenRLHF. step: the optimizer step that is judged; OpenRLHF takes the first with a learning rate of 0. ranks,
    steps: of the run.
    """

    plant: Plant
    side: str
    command: str
    words: str
    more: str = ""
    step: int = 0
    ranks: int = 1
    steps: int = 2


_DYNAMIC = "--train.dynamic_batch_enable --train.max_tokens_per_gpu 260 --rollout.max_tokens_per_gpu 4096"
_KL = "--algo.kl.init_coef 0.5 --algo.kl.use_loss --algo.kl.estimator k3"
_INNER = "--train.batch_size 4 --actor.eps_clip 0.01"
_CRITIC = "--algo.advantage.estimator gae --critic.num_nodes 1 --critic.num_gpus_per_node 1"
_SAVED = "--ckpt.save_steps 1 --ckpt.save_hf --ckpt.disable_ds"
FAULTS: dict[str, Fault] = {
    "accumulation": Fault(
        _normalizers(lambda by, n: by | {"batch_num_tokens": by["batch_num_tokens"] * n}), TRAINER, "step", "accumulation twice"
    ),
    "dp_size": Fault(_normalizers(lambda by, n: by | {"dp_size": 1}), TRAINER, "step", "dp_size is 1", ranks=2),
    "tokens": Fault(
        _normalizers(lambda by, n: by | {"batch_num_tokens": by["batch_num_tokens"] * 1.25}),
        TRAINER, "step", "batch_num_tokens is",
    ),
    "engine accumulation": Fault(
        _engine_config(lambda strategy: {"gradient_accumulation_steps": 4 * strategy.accumulated_gradient}),
        TRAINER, "step", "DeepSpeed accumulates 16", steps=4,
    ),
    "gradient clipping": Fault(
        _engine_config(lambda _: {"gradient_clipping": 0.0}), TRAINER, "step", "DeepSpeed clips at 0"
    ),
    "gradient twice": Fault(
        _around("openrlhf.utils.deepspeed.deepspeed:DeepspeedStrategy.backward",
                lambda original, strategy, loss, *args, **kwargs: original(strategy, loss + loss, *args, **kwargs)),
        TRAINER, "step", "applied twice",
    ),
    "Adam's state zeroed": Fault(_optimizer(_no_moments), TRAINER, "step", "second moment", _SAVED, step=2, steps=4),
    "learning rate x3": Fault(
        _optimizer(_groups(lambda group: {"lr": 3 * group["lr"]})), TRAINER, "step", "3 times it", _SAVED, step=2, steps=4
    ),
    "learning rate x10, from the start": Fault(
        _engine_config(lambda strategy: {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95]}}}),
        TRAINER, "step", "10 times it", _SAVED, step=2, steps=4,
    ),
    "weight decay 5 on all": Fault(
        _optimizer(_groups(lambda _: {"weight_decay": 5.0})), TRAINER, "step", "weight decay", _SAVED, step=2, steps=4
    ),
    "last log-prob repeated": Fault(
        _around("openrlhf.models.actor:Actor.forward", _last_repeated),
        TRAINER, "step", "own weights give", _SAVED, step=2, steps=4,
    ),
    "dynamic batch": Fault(_nothing, TRAINER, "step", "only the gradient of the last", _DYNAMIC, ranks=2),
    "wrong sign": Fault(_loss(lambda given: {"advantages": -given["advantages"]}), TRAINER, "step", "sign"),
    "loss without its mask": Fault(
        _loss(lambda given: {"action_mask": given["action_mask"] | True}), TRAINER, "step", "without its mask"
    ),
    "not clipped": Fault(
        _around("openrlhf.models.loss:PolicyLoss.forward", _unclipped), TRAINER, "step", "without clipping", _INNER, step=3
    ),
    "no KL term": Fault(
        _around("openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.training_step", _without_kl),
        TRAINER, "step", "without the KL term", _KL, step=2, steps=3,
    ),
    "a ratio of 1": Fault(
        _loss(lambda given: {"old_log_probs": given["log_probs"].detach()}), TRAINER, "lint", "a loss without clipping", _INNER
    ),
    "KL left out of the reward": Fault(
        _rewarded(lambda _: {"kl_coef": 0.0}), TRAINER, "lint", "reward has a KL penalty", "--algo.kl.init_coef 0.05", steps=3
    ),
    "KL added to the reward": Fault(
        _rewarded(lambda given: {"kl": -given["kl"]}), TRAINER, "lint", "a KL penalty only takes away",
        "--algo.kl.init_coef 0.05 --algo.kl.estimator k3", steps=3,
    ),
    "tokens of a dynamic batch": Fault(
        _around("openrlhf.trainer.ray.ppo_actor:get_loss_batch_info",
                lambda original, strategy, mask, **_: original(strategy, mask)),
        TRAINER, "step", "batch_num_tokens", _DYNAMIC + " --ds.zero_stage 3 --train.max_tokens_per_gpu 130", step=0,
    ),
    "values clipped at 0.5": Fault(
        _around("openrlhf.models.loss:ValueLoss.forward", _own("clip_eps", 0.5)), TRAINER, "lint", "a loss without clipping",
        _CRITIC + " --critic.value_clip 0.1 --critic.adam.lr 0.02 --train.batch_size 4", steps=3,
    ),
    "gamma and lambda swapped": Fault(
        _around("openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.get_advantages_and_returns",
                lambda original, maker, values, rewards, mask, *by: original(maker, values, rewards, mask, *reversed(by))),
        TRAINER, "lint", "by its returns", _CRITIC + " --algo.advantage.lambd 0.9",
    ),
    "trainer's temperature": Fault(
        _around("openrlhf.models.actor:Actor.forward", _scored_warmer),
        TRAINER, "lint", "sampled at temperature 1, scored at 1.25",
    ),
    "mask one early": Fault(_taken(_early_mask), TRAINER, "lint", "the action mask is shifted by -1"),
    "prompt in the mask": Fault(_taken(_prompt_in_mask), TRAINER, "lint", "tokens before the rollout's first"),
    "prompt in the mask, by turns": Fault(_taken(_prompt_in_mask), TRAINER, "turns", "count as actions"),
    "old log-probs rolled by one": Fault(
        _buffered(lambda experience: setattr(experience, "action_log_probs", experience.action_log_probs.roll(1, 1))),
        TRAINER, "lint", "old_log_probs are shifted by",
    ),
    "no advantages": Fault(
        _buffered(lambda experience: experience.advantages.zero_()), TRAINER, "lint", "every advantage is 0"
    ),
    "a row twice": Fault(
        _around("openrlhf.trainer.ppo_utils.replay_buffer:NaiveReplayBuffer.append", _repeated),
        TRAINER, "lint", "trained on twice",
    ),
    "old log-probs of another row": Fault(
        _of_row_before("action_log_probs"), TRAINER, "lint", "old_log_probs are those of another row"
    ),
    "base log-probs of another row": Fault(
        _of_row_before("base_action_log_probs"), TRAINER, "lint", "base_action_log_probs are those of another row", _KL
    ),
    "a second BOS": Fault(_taken(_second_bos), TRAINER, "turns", "extra BOS"),
    "the head is never sent": Fault(
        _around("openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.broadcast_to_vllm", _without_head, weight_syncs._sending),
        TRAINER, "weights", "never sent: lm_head.weight",
    ),
    "a parameter is not loaded": Fault(
        _losing(lambda name: "layers.1.self_attn.q_proj" in name),
        ROLLOUT, "weights", "never arrived: model.layers.1.self_attn.q_proj",
    ),
    "nothing is loaded": Fault(_losing(lambda name: True), ROLLOUT, "weights", "has not changed"),
    "weights rounded on arrival": Fault(_rounded_on_arrival, ROLLOUT, "weights", "arrived other than sent"),
    "a token re-encoded": Fault(_handed(_encoded_again), ROLLOUT, "turns", "retokenized"),
    "a token dropped": Fault(_handed(lambda _, ids: [*ids[:3], *ids[4:]]), ROLLOUT, "turns", "is gone"),
    "appended end": Fault(_engine(_appended_end), ROLLOUT, "lint", "placeholder"),
    "never truncated": Fault(_engine(_never_truncated), ROLLOUT, "lint", "truncat"),
    "not a number": Fault(_engine(_one_nan), ROLLOUT, "lint", "rollout_log_probs is not finite"),
    "cut by top-p": Fault(_nothing, ROLLOUT, "lint", "sampling was changed by top_p 0.9", "--rollout.top_p 0.9"),
    "another row": Fault(_engine(_of_another), ROLLOUT, "explain", "have the log-probs of other rows"),
    "engine's temperature": Fault(_engine(_as_sampled, temperature=0.7), ROLLOUT, "explain", "the temperature was 0.7"),
    "raw log-probs": Fault(
        _engine(_scored(lambda model, ids, _: model(ids).logits)), ROLLOUT, "explain", "temperature 0.7 was not applied",
        "--rollout.temperature 0.7",
    ),
    "top-p, renormalized": Fault(_engine(_scored(_nucleus), top_p=0.9), ROLLOUT, "explain", "nucleus of top-p 0.9"),
    "shift": Fault(_engine(_shifted), ROLLOUT, "explain", "shifted"),
    "head in bf16": Fault(_engine(_scored(_narrow_head)), ROLLOUT, "explain", "head was computed in bf16"),
    "stale weights": Fault(_asleep, ROLLOUT, "explain", "the weights were those of", _SAVED, step=2, steps=3),
}  # fmt: skip
"""The faults, by name."""
