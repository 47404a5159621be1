"""The laws of recorded data: a healthy step breaks none, and each fault that threads report breaks the law that names it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from casefiles import cases_of
from catalogcases import record
from commandline import invoke
from readers import another_user
from recordedfields import listed, read_by_laws, unlisted
from reportcases import said_once
from torch import Tensor

from actordbg import trainers
from actordbg.base.errors import NothingToDo
from actordbg.capture import loss_record
from actordbg.capture.facts import _CONFIG_FACTS
from actordbg.capture.loss_points import CapturePoints
from actordbg.document.blocks import EITHER, ROLLOUT, TRAINER, Verdict
from actordbg.formats.dump_record import LOSS, DumpRecord
from actordbg.formats.weight_hashes import ParameterHash, WeightRecord
from actordbg.recorded import step_laws
from actordbg.recorded.advantage_laws import ESTIMATORS
from actordbg.recorded.lint import lint, with_lint
from actordbg.recorded.recorded_calls import Answer
from actordbg.recorded.recorded_laws import LAWS
from actordbg.records.finding import NOT_CHECKED
from actordbg.store import payload
from actordbg.store.layout import Store
from actordbg.trainers.seam import LossCall

PROMPT, ANSWER, END, RANKS, MICRO = 5, 8, 2, 2, 2
LOSS_FACTS = {
    "loss.policy_loss_type": "ppo", "loss.clip_eps_low": 0.2, "loss.clip_eps_high": 0.2, "loss.dual_clip": None,
    "loss.token_level_loss": True, "loss.is_correction_level": "token", "loss.is_correction_gating": "ratio",
    "loss.is_correction_mode": "mask", "loss.is_correction_threshold": [0.5, 5.0],
    "engine_accumulation": MICRO, "dynamic_batch": False, "multi_turn": False, "n_samples_per_prompt": 2,
    "rollout.temperature": 1.0, "rollout.top_p": 1.0, "eos_token_id": END, "dp_size": RANKS, "rollout.batch_size": RANKS * MICRO,
    "advantage.estimator": "reinforce_baseline", "advantage.gamma": 1.0, "kl.init_coef": 0.0, "reward.clip_range": [-10.0, 10.0],
}  # fmt: skip


class Step:
    """A step of two ranks and two micro-batches of two rows: tensors, arguments and record fields of each loss, to be changed."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(1)
        self.tensors: list[dict[str, Tensor]] = []
        self.facts: list[dict[str, Any]] = []
        self.fields: list[dict[str, Any]] = []
        self.scored_once, self.not_scored = False, 0
        self.hashes: list[str] = []
        for batch in range(RANKS * MICRO):
            lengths = torch.tensor([ANSWER, ANSWER - 3])
            prompt = torch.randint(10, 90, (1, PROMPT), generator=made).expand(2, -1)
            answer = torch.randint(10, 90, (2, ANSWER), generator=made)
            at = torch.arange(ANSWER)
            answer = answer.where(at < lengths[:, None] - 1, END).where(at < lengths[:, None], 0)
            mask = at < lengths[:, None]
            old = -torch.rand(2, ANSWER, generator=made) - 0.1
            self.tensors.append({
                "sequences": torch.cat((prompt, answer), 1),
                "attention_mask": torch.cat((torch.ones_like(prompt), mask.long()), 1),
                "action_mask": mask,
                "log_probs": old.clone(),
                "old_log_probs": old,
                "rollout_log_probs": old + 0.01,
                "context.rewards": torch.rand(2, generator=made),
                "context.lr": torch.tensor([1e-6, 1e-6], dtype=torch.float64),
                "context.truncated": torch.zeros(2).bool(),
                "output.grad_norm": torch.tensor(1.5),
                "context.response_length": lengths.float(),
            })  # fmt: skip
            self.facts.append(dict(LOSS_FACTS))
            self.fields.append({"rank": batch % RANKS, "step": 3})
        self.estimate("reinforce_baseline")

    def estimate(self, name: str) -> None:
        """Make advantages, and for OpenRLHF's estimators returns, as OpenRLHF 0.11.2 and TRL 1.16 do."""
        fact("advantage.estimator", name)(self)
        rewards = torch.stack([t["context.rewards"] for t in self.tensors])
        mean, std, every = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True), rewards.std()
        values = {
            "gae": rewards, "reinforce": rewards, "reinforce_baseline": rewards - mean, "rloo": rewards - rewards.flip(1),
            "dr_grpo": rewards - mean, "group_norm": (rewards - mean) / (std + 1e-9), "flash_reinforce": rewards - rewards.mean(),
            "grpo-group": (rewards - mean) / (std + 1e-4), "grpo-batch": (rewards - mean) / (every + 1e-4), "grpo-none": rewards - mean,
        }[name]  # fmt: skip
        for t, value in zip(self.tensors, values, strict=True):
            t["advantages"] = value[:, None].repeat(1, ANSWER)
            if name == "gae":
                t["context.values"] = torch.arange(float(ANSWER)).expand(2, -1) / 50
                t["context.returns"], t["advantages"] = t["advantages"].clone(), t["advantages"] - t["context.values"]
            else:
                t["context.returns"] = t["advantages"].clone()
            if name.startswith("grpo"):  # TRL hands over neither
                del t["context.returns"]
                t.pop("context.rewards")
        if name in ("gae", "reinforce", "reinforce_baseline"):
            tokens = torch.cat([t["advantages"][t["action_mask"]] for t in self.tensors])
            for t in self.tensors:
                t["advantages"] = (t["advantages"] - tokens.mean()) / tokens.std(correction=0)

    def finish(self, divided_by: float = 1.0) -> None:
        """Add the loss that the trainer returns: token-mean over the step, corrected by the importance ratio."""
        tokens = sum(int(t["action_mask"].sum()) for t in self.tensors[: RANKS * MICRO]) * divided_by
        for t in self.tensors:
            weight = t.get("context.term_weights", (t["old_log_probs"] - t["rollout_log_probs"]).exp())
            ratio, advantages = (t["log_probs"] - t["old_log_probs"]).exp(), t["advantages"]
            terms = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            terms = torch.where((weight >= 0.5) & (weight <= 5), weight, 0.0) * -terms
            t["output.loss"] = terms.where(t["action_mask"], 0.0).sum() / tokens * MICRO * RANKS

    def publish(self, store: Store) -> list[str]:
        """Write the forwards of the old log-probs, and the losses; return their paths."""
        paths, made = [], Counter[int]()
        for at, (tensors, facts, fields) in enumerate(zip(self.tensors, self.facts, self.fields, strict=True)):
            common = {
                "batch_size": 2, "seq_len": PROMPT + ANSWER, "tokens": int(tensors["attention_mask"].sum()), "role": "policy",
                "run": "ppo", "world_size": RANKS, "call_index": made[fields["rank"]], "pid": fields["rank"], "host": "h", "model_dtype": "float32", "versions": {"deepspeed": "0.19.6"}, "action_len": ANSWER, **fields,
            }  # fmt: skip
            if self.hashes:
                held = {"q": ParameterHash("float32", (4, 4), None, self.hashes[fields["rank"]])}
                weights = WeightRecord(
                    "ppo", fields["rank"], "h", 4711, f"i{fields['rank']}", 0, 3, "2026-01-01T00:00:00.000000Z", 0.1, 64, held
                )
                common |= {"instance": weights.instance, "pid": weights.pid}
                (store.root / "weights" / "ppo").mkdir(parents=True, exist_ok=True)
                (store.root / "weights" / "ppo" / weights.name).write_text(weights.to_json())
            made[fields["rank"]] += 1
            actor = {"zero_stage": 2, "bos_token_id": 1}
            arguments = {k if k == "dp_size" else f"context.{k}": v for k, v in facts.items()}
            loss = replace(
                record(at), **(common | {"arguments": arguments, "point": LOSS, "role": "policy loss", "actor": actor})
            )
            inputs = {name: tensors[name] for name in ("sequences", "attention_mask", "action_mask")}
            forward = replace(record(50 + at), **(common | {"grad_enabled": False}))
            rescored = at >= len(self.tensors) - self.not_scored or (self.scored_once and at == 1)
            scored = () if rescored else ((forward, inputs),)
            for described, held in (*scored, (loss, tensors)):
                paths.append(store.relative(store.publish_dump(*payload.encode(described, held))))
        return paths


def of_trl(step: Step, mode: str = "sequence_mask", factor: float = 1.0) -> None:
    """GRPO of TRL: its estimator, and importance weights of its own."""
    step.estimate("grpo-group")
    trl = {
        "loss.is_correction_level": "off",
        "loss.is_corrected": True,
        "loss.weights_mode": mode,
        "loss.weights_high": 3.0,
        "reward.clip_range": None,
    }
    step.facts = [facts | trl for facts in step.facts]
    for t in step.tensors:
        t["rollout_log_probs"] = t["old_log_probs"] + torch.linspace(-0.2, 0.1, ANSWER) * t["action_mask"]
        apart = (t["old_log_probs"] - t["rollout_log_probs"]) * t["action_mask"]
        if mode.startswith("sequence"):
            apart = apart.sum(1, keepdim=True)
        t["context.term_weights"] = (apart if factor else -apart).exp() * (factor or 1.0)


def epochs(step: Step, apart: float = 0.01) -> None:
    """A second epoch over the same rows, after an update."""
    again = [{name: tensor.clone() for name, tensor in t.items()} for t in step.tensors]
    for t in again:
        t["log_probs"] = t["old_log_probs"] - apart
    step.tensors += again
    step.facts, step.fields = 2 * step.facts, step.fields + [fields | {"step": 4} for fields in step.fields]
    step.not_scored = len(again)


def referred(step: Step, apart: float = 0.0) -> None:
    """The first step, with the log-probs of a reference."""
    step.fields = [fields | {"step": 0} for fields in step.fields]
    for t in step.tensors:
        t["context.base_action_log_probs"] = t["log_probs"] - apart


def hashed(step: Step, same: bool = True) -> None:
    """Hashes of the weights, as each rank held them."""
    step.hashes = ["a" * 64, ("a" if same else "b") * 64]


def change(name: str, at: Any, value: Any) -> Callable[[Step], None]:
    """Change an element of a tensor of the first loss."""
    return lambda step: step.tensors[0][name].__setitem__(at, value)


def fact(name: str, value: Any) -> Callable[[Step], None]:
    return lambda step: [facts.update({name: value}) for facts in step.facts] and None


def same_row(step: Step) -> None:
    for name in ("sequences", "attention_mask", "action_mask"):
        step.tensors[1][name][0] = step.tensors[0][name][0]
    for tensors in step.tensors[:2]:
        for name in ("old_log_probs", "log_probs", "rollout_log_probs"):
            tensors[name] -= 9.0


def other_rows(name: str) -> Callable[[Step], None]:
    """Swap the log-probs `name` of two rows, whose tokens are unlikely enough to tell rows apart."""

    def plant(step: Step) -> None:
        for tensors in step.tensors:
            for each in ("log_probs", "old_log_probs", "rollout_log_probs"):
                tensors[each] *= 4
        first, second = (tensors[name] for tensors in step.tensors[:2])
        first[0], second[0] = second[0].clone(), first[0].clone()

    return plant


def early_mask(step: Step) -> None:
    for tensors in step.tensors:
        mask = tensors["action_mask"]
        tensors["rollout_log_probs"] *= mask
        tensors["action_mask"] = torch.cat((mask[:, 1:], mask[:, :1] & False), 1)
        tensors["context.response_length"] -= 1
    step.estimate("reinforce_baseline")


def scored(times: int) -> Callable[[Step], None]:
    """A row that is trained on twice, and was scored so often before."""

    def plant(step: Step) -> None:
        same_row(step)
        step.scored_once = times == 1

    return plant


def cancelling(step: Step) -> None:
    """Losses that are twice too large, in a step whose losses add up to 0."""
    step.finish()
    *others, last = (float(tensors["output.loss"]) for tensors in step.tensors)
    step.tensors[-1]["advantages"] *= -sum(others) / last
    step.finish(divided_by=0.5)


def late(name: str) -> Callable[[Step], None]:
    """Log-probs `name` one token late, where tokens are unlikely enough to tell them apart."""

    def plant(step: Step) -> None:
        for tensors in step.tensors:
            for each in ("log_probs", "old_log_probs", "rollout_log_probs"):
                tensors[each] *= 4
            tensors[name] = tensors[name].roll(1, 1)

    return plant


def rolled(name: str, estimator: str) -> Callable[[Step], None]:
    """Roll a tensor of rows by one row, over all micro-batches."""

    def plant(step: Step) -> None:
        step.estimate(estimator)
        rows = torch.cat([t[name] for t in step.tensors]).roll(1, 0)
        for t, own in zip(step.tensors, rows.split(2), strict=True):
            t[name] = own

    return plant


def hole(step: Step) -> None:
    step.tensors[0]["action_mask"][0, 3] = False
    step.tensors[0]["context.response_length"][0] -= 1
    step.estimate("reinforce_baseline")


def shifted(step: Step) -> None:
    mask = step.tensors[0]["action_mask"]
    mask[1] = mask[1].roll(1)
    mask[1, 0] = True
    step.tensors[0]["context.response_length"][1] += 1
    step.fields[0]["step"] = 4


def other_bases(step: Step) -> None:
    """Roll base log-probs by two rows, of a policy that moved by a quarter of a nat."""
    other_rows("old_log_probs")(step)  # which makes tokens unlikely
    step.fields = [fields | {"step": 4} for fields in step.fields]
    for tensors in step.tensors:
        noise = torch.randn(2, ANSWER, generator=torch.Generator().manual_seed(3)) / 3
        tensors["old_log_probs"] = tensors["log_probs"].clone()
        tensors["context.base_action_log_probs"] = tensors["log_probs"] + noise
    rows = torch.cat([t["context.base_action_log_probs"] for t in step.tensors]).roll(2, 0)
    for t, own in zip(step.tensors, rows.split(2), strict=True):
        t["context.base_action_log_probs"] = own


def skewed(step: Step) -> None:
    """Masks of one row one token further, with a token of the prompt's end, and its padding, in the place of another."""
    mask = step.tensors[0]["action_mask"]
    mask[1] = mask[1].roll(1)
    step.tensors[0]["attention_mask"][1, PROMPT:] = mask[1]
    step.tensors[0]["rollout_log_probs"] *= 1 - (torch.arange(ANSWER) > ANSWER - 4) * torch.tensor([[0], [1]])


def unlike_counts(step: Step) -> None:
    """The second rank makes a call less in the second of three steps."""
    of_step = list(zip(step.tensors, step.facts, step.fields, strict=True))
    kept = [[*of_step], of_step[:3], [*of_step]]
    step.tensors = [{name: tensor.clone() for name, tensor in t.items()} for each in kept for t, _, _ in each]
    step.facts = [facts for each in kept for _, facts, _ in each]
    step.fields = [fields | {"step": at} for at, each in enumerate(kept, 2) for _, _, fields in each]
    step.not_scored = len(step.tensors)


FAULTS: dict[str, tuple[Callable[[Step], Any], set[str], str]] = {
    "a mask one column further (eval-protocol PR#457)": (shifted, {"lengths", "mask", "truncation"}, TRAINER),
    "a mask with a hole in a single turn": (hole, {"mask"}, EITHER),
    "the length as a span (OpenRLHF#1243)": (
        lambda step: (fact("multi_turn", True)(step), hole(step), change("context.response_length", 0, ANSWER)(step)),
        {"response length"},
        TRAINER,
    ),
    "losses twice too large that cancel": (cancelling, {"normalization"}, TRAINER),
    "a row of the rollout twice in a step": (scored(2), {"duplicates", "groups"}, ROLLOUT),
    "groups shifted by a row (AReaL#1419)": (rolled("advantages", "grpo-none"), {"group mean"}, TRAINER),
    "rewards of another row (tt-metal PR#46548)": (rolled("context.rewards", "rloo"), {"rewards"}, TRAINER),
    "advantages of another row (tt-metal PR#46548)": (
        rolled("advantages", "reinforce_baseline"),
        {"returns", "whitening"},
        TRAINER,
    ),
    "a row twice in a step that was scored once": (scored(1), {"duplicates", "groups"}, TRAINER),
    "a mask one column early": (early_mask, {"mask", "truncation"}, TRAINER),
    "log-probs of another row (open-instruct#1473)": (other_rows("rollout_log_probs"), {"rows"}, ROLLOUT),
    "the rollout's log-probs one token late": (late("rollout_log_probs"), {"alignment"}, ROLLOUT),
    "old log-probs one token late": (late("old_log_probs"), {"alignment", "ratio"}, TRAINER),
    "base log-probs of another row, of a policy that moved": (other_bases, {"rows"}, TRAINER),
    "masks of a row one token further": (skewed, {"lengths", "mask", "placeholder", "truncation"}, TRAINER),
    "a rank that makes a call less (ms-swift PR#8102)": (unlike_counts, {"calls"}, TRAINER),
    "old log-probs of another row": (other_rows("old_log_probs"), {"rows", "ratio"}, TRAINER),
}


CASES = cases_of("recorded_faults")


def places(text: str) -> tuple[Any, ...]:
    """An index as it is written: `0,-1`, `:,:3`, or nothing for the only element."""
    parts = [part.split(":") for part in text.split(",") if part]
    return tuple(slice(*(int(end) if end else None for end in ends)) if len(ends) > 1 else int(ends[0]) for ends in parts)


def plant_case(step: Step, line: str) -> None:
    """Plant what a line of `recorded_faults.test` says."""
    verb, *words = line.split()
    value = json.loads(words[-1])
    if verb in ("set", "all"):
        for tensors in step.tensors[: 1 if verb == "set" else None]:
            tensors[words[0]][places(words[1] if len(words) > 2 else "")] = value
    elif verb in ("scale", "add"):
        for tensors in step.tensors:
            tensors[words[0]].mul_(value) if verb == "scale" else tensors[words[0]].add_(value)
    elif verb == "fact":
        fact(words[0], value)(step)
    else:
        WHOLE_STEPS[verb](step, value)


WHOLE_STEPS: dict[str, Callable[[Step, Any], Any]] = {
    "estimate": Step.estimate,
    "finish": Step.finish,
    "epochs": epochs,
    "reference": referred,
    "hashes": hashed,
    "weights": lambda step, given: of_trl(step, *given),
}


@pytest.mark.parametrize("fault", [*FAULTS, *CASES])
def test_each_fault_breaks_the_law_that_names_it(tmp_path: Path, fault: str):
    step, store = Step(), Store(tmp_path).create()
    if fault in FAULTS:
        plant, laws, side = FAULTS[fault]
        plant(step)
    else:
        side, *broken = CASES[fault].expected
        laws = set(broken)
        for line in CASES[fault].given:
            plant_case(step, line)
    if "output.loss" not in step.tensors[0]:
        step.finish()
    findings = lint(store.root, step.publish(store))
    assert {law.name for law in findings.broken} == laws, findings.in_words()
    assert ("WRONG (rollout or trainer): " in findings.verdict().sentence) == (side == EITHER) and findings.verdict().wrong[
        :1
    ] == ((side,) if side else ())
    both = with_lint(Verdict("RIGHT", "it ran"), findings)
    assert findings.verdict().word == both.word == "WRONG" and both.details[0].endswith("it ran")
    assert said_once(findings.verdict()) and said_once(both)
    assert len(findings.verdict().headline.split(", in ")[0].split()) <= 16, "what is wrong is read at a glance"


HEALTHY: dict[str, Callable[[Step], Any]] = {
    **{name: (lambda step, name=name: step.estimate(name)) for name in ESTIMATORS},
    **{mode: (lambda step, mode=mode: of_trl(step, mode)) for mode in ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")},
    "two epochs": epochs, "first step": referred, "hashed": hashed,
}  # fmt: skip


def test_every_law_holds_on_healthy_steps_of_some_trainer(tmp_path: Path):
    held, read = set[str](), dict[str, set[str]]()
    for name, plant in HEALTHY.items():
        step, store = Step(), Store(tmp_path / name).create()
        plant(step)
        step.finish()
        paths = step.publish(store)
        findings = lint(store.root, paths)
        assert not findings.broken, (name, findings.in_words())
        for law, names in read_by_laws(store.root, paths):
            read.setdefault(law, set()).update(names)
        held |= {law.name for law in findings.held}
    assert held == {law.name for law in LAWS}
    files = {"weights.parameters", "weights.step", "weights.rank", "weights.run"}
    for field, (laws, _) in listed().items():
        assert field in files or all(field in read[law] for law in laws), f"{field} is not read by all of {laws}"
    losing = {"temperatures", "temperature"}
    assert not unlisted(set().union(*read.values()) - losing)


def test_every_field_that_a_process_of_a_training_may_record_has_a_law_or_a_reason():
    """The fields of a dump's head, facts of an actor, and what a trainer's `losses.json` declares."""
    names = [f"record.{name}" for name in DumpRecord.__dataclass_fields__] + [f"actor.{name}" for name in _CONFIG_FACTS]
    for file in Path(trainers.__file__).parent.glob("*/losses.json"):
        points = CapturePoints.of(file.parent.name)
        assert points is not None
        names += [*points.settings, *points.flags, *(name for loss in points.losses for name in loss.returns)]
    names += [name for name in LossCall.__dataclass_fields__ if name not in ("facts", "settings", "own", "weights")]
    assert not unlisted([*names, *loss_record._AFTER])


def test_a_healthy_step_keeps_every_law_and_the_command_says_so(tmp_path: Path):
    step, store = Step(), Store(tmp_path).create()
    step.finish()
    paths = step.publish(store)
    answer = json.loads(invoke(store, "lint", "--json").stdout)
    assert answer["verdict"] == "RIGHT" and answer["dumps"] == len(paths)
    assert dict(answer["figures"])["rows without advantage"] == "0.0%"


def test_a_rank_with_fewer_calls_is_named_unless_one_of_them_may_not_have_been_recorded(tmp_path: Path):
    step, store = Step(), Store(tmp_path).create()
    unlike_counts(step)
    step.finish()
    paths = step.publish(store)
    said = "calls (ms-swift PR#8102): step 3: rank 1 made 1 call of the policy loss, 1 rank made 2"
    assert said in json.loads(invoke(store, "lint", "--json").stdout)["sentence"]
    (store.root / paths[RANKS * MICRO]).unlink()  # the first call of rank 0 in that step
    answer = json.loads(invoke(store, "lint", "--json").stdout)
    assert {rule["rule"]: rule["state"] for rule in answer["rules"]}["calls"] == "not-checked"


def test_masked_tokens_are_never_compared(tmp_path: Path):
    """Tool output has placeholders, rows of several turns have holes, and a row may have no action."""
    step, store = Step(), Store(tmp_path).create()
    fact("multi_turn", True)(step)
    step.tensors[1]["action_mask"][0], step.tensors[1]["context.response_length"][0] = False, 0
    hole(step)
    for name in ("rollout_log_probs", "old_log_probs", "advantages"):
        step.tensors[0][name][0, 3] = 0.0 if name == "rollout_log_probs" else torch.nan
    step.finish()
    assert not lint(store.root, step.publish(store)).broken


@pytest.mark.filterwarnings("error")
def test_infinite_log_probs_and_odd_facts_are_no_error(tmp_path: Path):
    step, store = Step(), Store(tmp_path).create()
    for tensors in step.tensors:
        for name in ("log_probs", "old_log_probs", "rollout_log_probs"):
            tensors[name][0, 0] = -torch.inf
    odd = {"rollout.top_p": -1.0, "loss.loss_agg_mode": "seq-mean-token-sum-norm", "loss.loss_scale_factor": "x"}
    step.facts = [facts | odd for facts in step.facts]
    step.finish()
    assert "finite" in {law.name for law in lint(store.root, step.publish(store)).broken}


def test_a_fact_of_another_type_leaves_a_law_or_a_dump_unchecked(tmp_path: Path):
    step, store = Step(), Store(tmp_path).create()
    fact("rollout.top_p", "high")(step)
    findings = lint(store.root, step.publish(store))
    assert not findings.broken and "sampling" not in {law.name for law in findings.held}
    assert json.loads(invoke(store, "lint", "--json").stdout)["not_checked"]


def test_a_critic_of_another_rollout_that_does_not_know_the_end_token_changes_no_answer(tmp_path: Path):
    """A critic trains before its policy does, so that its step is of other prompts; its trainer has no tokenizer."""
    step, store = Step(), Store(tmp_path).create()
    for tensors in step.tensors:
        tensors["context.truncated"][0], tensors["sequences"][0, -1] = True, 33  # most rows end with another token
    step.tensors[0]["context.truncated"][1], step.tensors[0]["sequences"][1, -4] = True, 33
    step.finish()
    paths = step.publish(store)
    critic = {"batch_size": 2, "seq_len": PROMPT + ANSWER, "run": "ppo", "role": "critic loss", "point": LOSS, "step": 3}
    for at, tensors in enumerate(step.tensors):
        names = ("sequences", "attention_mask", "action_mask", "context.truncated")
        held = {name: tensors[name].clone() for name in names}
        held["sequences"][:, :PROMPT] += 1
        described = replace(record(90 + at), **critic, arguments={"context.n_samples_per_prompt": 2})
        paths.append(store.relative(store.publish_dump(*payload.encode(described, held))))
    findings = lint(store.root, paths)
    assert not findings.broken, findings.in_words()


def test_rows_that_are_likely_enough_to_repeat_are_no_duplicates_in_their_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step_laws, "LONG", 4)
    step, store = Step(), Store(tmp_path).create()
    for tensors in step.tensors:
        for name in ("sequences", "attention_mask", "action_mask", "context.response_length"):
            tensors[name][1] = tensors[name][0]
    step.estimate("reinforce_baseline")
    step.finish()
    assert not lint(store.root, step.publish(store)).broken


@pytest.mark.parametrize("known", [True, False])
def test_a_step_without_an_action_is_no_step_without_an_advantage(tmp_path: Path, known: bool):
    step, store = Step(), Store(tmp_path).create()
    fact("mask_truncated", known)(step)
    for tensors in step.tensors:
        tensors["action_mask"][:], tensors["context.response_length"][:] = False, 0
        tensors["output.loss"] = torch.tensor(0.0)
    findings = lint(store.root, step.publish(store))
    assert [law.name for law in findings.broken] == ["actions"] and findings.verdict().wrong == ()
    assert ("truncated" in findings.verdict().sentence) == known


def test_what_a_law_lacks_is_what_was_not_recorded(tmp_path: Path):
    """Losses that were recorded are not asked for; a trainer that has no rewards, and an unknown estimator, are named."""
    step, store = Step(), Store(tmp_path).create()
    of_trl(step)
    fact("loss.policy_loss_type", "other")(step)
    step.finish()
    findings = lint(store.root, step.publish(store))
    lacks = {answer.rule.name: answer.lacks for answer in findings.of(NOT_CHECKED)}
    assert lacks["rewards"] == "rewards" and lacks["returns"] == "returns" and "formula" in lacks["normalization"]
    assert not any("dump enable --calls" in lack for lack in lacks.values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_advantage_that_is_not_finite_is_an_answer_in_every_format(tmp_path: Path, value: float):
    step, store = Step(), Store(tmp_path / "store").create()
    change("advantages", (1, 2), value)(step)
    step.finish()
    step.publish(store)
    files = [tmp_path / f"lint.{suffix}" for suffix in ("json", "html", "md", "txt")]
    done = invoke(store, "lint", *(word for path in files for word in ("-o", path)))
    assert done.stdout.startswith("WRONG (trainer): step 3: advantages is not finite") and "row 1" in done.stdout
    answer = json.loads(files[0].read_text())
    assert answer["wrong"] == [TRAINER] and answer["findings"][0]["key"] == ["finite", TRAINER, ""]
    assert all("finite" in path.read_text() for path in files)


def test_a_loss_that_breaks_a_law_is_selected_by_its_verdict_though_lists_are_of_forwards(tmp_path: Path):
    step, store = Step(), Store(tmp_path).create()
    change("rollout_log_probs", (0, 2), 0.0)(step)
    step.finish()
    step.publish(store)
    assert invoke(store, "lint").exit_code == 1
    for where in ("verdict='WRONG'", "broken='placeholder'"):
        (row,) = json.loads(invoke(store, "dump", "ls", "--where", where, "--json").stdout)
        assert (row["point"], row["verdict"], row["broken"]) == (LOSS, "WRONG", "placeholder")
    assert len(json.loads(invoke(store, "dump", "ls", "--json").stdout)) == len(step.tensors)
    assert json.loads(invoke(store, "status", "--json").stdout)["holds"]["bad"] == 1


def test_forwards_alone_are_checked_and_the_rest_is_named(tmp_path: Path):
    """Losses are not selected unless somebody asks for them, and what they alone can show is not checked."""
    step, store = Step(), Store(tmp_path).create()
    step.finish()
    step.publish(store)
    assert len(json.loads(invoke(store, "dump", "ls", "--json").stdout)) == len(step.tensors)
    assert len(json.loads(invoke(store, "dump", "ls", "--json", "--where", "point='loss'").stdout)) == len(step.tensors)
    answer = json.loads(invoke(store, "lint", "--json", "--where", "point='forward'").stdout)
    left = [rule["rule"] for rule in answer["rules"] if rule["state"] == "not-checked"]
    assert answer["good"] and "placeholder" in left
    most, others = answer["not_checked"]
    assert most.endswith("for lack of policy losses (dump enable --calls forward,loss)") and others.endswith(
        "for lack of other data"
    )
    assert sum(int(each.split()[0]) for each in (most, others)) == len(left)
    with pytest.raises(NothingToDo, match="nothing to lint: no dump matches"):
        invoke(store, "lint", "--where", "seq_len>99")


@pytest.mark.parametrize(("theirs", "judged"), [("sft", True), ("another", False), (None, True)])
def test_a_reference_that_is_another_model_by_design_is_no_fault(theirs: str | None, judged: bool) -> None:
    def call(role: str, model: str | None, **heads: Any) -> Any:
        record = SimpleNamespace(run="r", role=role, model_name=model, step=0, dump_id="d", actor={}, source="capture")
        return SimpleNamespace(record=record, is_loss="loss" in role, heads=heads, row_keys=(b"k",), fp32=True)

    own = np.full((1, 4), -1.0)
    calls = [call("policy", "sft"), call("reference", theirs), call("policy loss", None)]
    calls[-1].heads = {"log_probs": own, "base_action_log_probs": own - 0.5}
    answer = Answer(next(law for law in LAWS if law.name == "reference"))
    step_laws.reference(calls, answer)
    assert bool(answer.found) is judged and bool(answer.lacks) is not judged


def test_ids_that_change_places_where_nothing_else_was_recorded_are_named_as_not_checked(tmp_path: Path):
    """The log-probs are those of the ids as trained on: only the engine's, or old ones, could tell."""
    step, store = Step(), Store(tmp_path).create()
    step.finish()
    for tensors in step.tensors:
        del tensors["rollout_log_probs"]
        tensors["sequences"][:, PROMPT:] = tensors["sequences"][:, PROMPT:].flip(0)
    step.publish(store)
    answer = json.loads(invoke(store, "lint", "--json").stdout)
    lacking = {each["rule"]: each["by"] for each in answer["unchecked"]}
    assert lacking["rows"] == lacking["alignment"] == "log-probs beside those of the loss itself"
    assert "rows" not in [each["rule"] for each in answer["findings"]]


@pytest.mark.slow
def test_somebody_who_may_not_write_the_store_gets_the_answer_and_hears_that_it_is_not_kept(store: Store):
    step = Step()
    change("rollout_log_probs", (0, 2), 0.0)(step)
    step.finish()
    step.publish(store)
    with another_user(store.root) as other:
        (said,) = other.run(["lint"])
    assert said.code == 1 and said.out.startswith("WRONG"), said
    assert "not kept for the dumps' last verdicts: cannot write" in said.err and not store.lints.exists()
