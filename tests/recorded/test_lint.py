"""The laws of recorded data: a healthy step breaks none, and each fault that threads report breaks the law that names it."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from casefiles import cases_of
from catalogcases import record
from commandline import in_json, invoke
from comparecases import write_replay
from readers import another_user
from recordedfields import listed, read_by_laws, unlisted
from replaylines import places
from reportcases import said_once
from stepcases import PPO_FACTS

from actordbg import trainers
from actordbg.actor.hub_model import first_letters
from actordbg.api import explaining
from actordbg.base.errors import NothingToDo
from actordbg.capture import loss_record
from actordbg.capture.facts import _CONFIG_FACTS
from actordbg.capture.loss_points import CapturePoints
from actordbg.catalog.query import open_fresh, select_dumps
from actordbg.catalog.selections import frequent_values
from actordbg.document.blocks import EITHER, TRAINER, Verdict
from actordbg.formats.dump_record import LOSS, DumpRecord
from actordbg.formats.weight_hashes import ParameterHash, WeightRecord
from actordbg.recorded import step_laws
from actordbg.recorded.advantage_laws import ESTIMATORS
from actordbg.recorded.lint import lint, with_lint
from actordbg.recorded.recorded_calls import Answer, RecordedCall
from actordbg.recorded.recorded_laws import LAWS
from actordbg.records.finding import NOT_CHECKED
from actordbg.records.replay_record import ReplayInput
from actordbg.store import payload
from actordbg.store.layout import Store
from actordbg.trainers.seam import LossCall

PROMPT, ANSWER, END, RANKS, MICRO = 5, 8, 2, 2, 2
PLACEHOLDER = "set rollout_log_probs 0,2 0"
LOSS_FACTS = PPO_FACTS | {
    "engine_accumulation": MICRO, "multi_turn": False, "n_samples_per_prompt": 2, "eos_token_id": END, "dp_size": RANKS,
    "rollout.batch_size": RANKS * MICRO, "advantage.estimator": "reinforce_baseline", "advantage.gamma": 1.0, "kl.init_coef": 0.0,
    "reward.clip_range": [-10.0, 10.0],
}  # fmt: skip


POWERS = {"unweighted": 0, "inverse-weights": -1}
BOUNDS = {"max": torch.maximum, "clipped": lambda plain, clipped: 0 * plain + clipped}


class Step:
    """A step of two ranks and two micro-batches of two rows: tensors, arguments and record fields of each loss, to be changed."""

    def __init__(self):
        made = torch.Generator().manual_seed(1)
        self.tensors = []
        self.facts = []
        self.fields = []
        self.scored_once, self.not_scored = False, 0
        self.hashes = []
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

    def estimate(self, name):
        """Make advantages, and for OpenRLHF's estimators returns, as OpenRLHF 0.11.2 and TRL 1.16 do."""
        for facts in self.facts:
            facts["advantage.estimator"] = name
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

    def actions(self):
        return sum(int(t["action_mask"].sum()) for t in self.tensors[: RANKS * MICRO])

    def finish(self, divided_by=1.0, clip=0.2, wrong=""):
        """Add the loss that the trainer returns: token-mean over the step, corrected by the importance ratio. wrong: how it is not."""
        tokens = self.actions() * divided_by
        for t in self.tensors:
            weight = t.get("context.term_weights", (t["old_log_probs"] - t["rollout_log_probs"]).exp())
            weight = weight ** POWERS.get(wrong, 1)
            ratio, advantages = (t["log_probs"] - t["old_log_probs"]).exp(), t["advantages"]
            ratio = 1 / ratio if wrong == "inverse-ratio" else ratio
            terms = -BOUNDS.get(wrong, torch.minimum)(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
            terms *= torch.where((weight >= 0.5) & (weight <= 5), weight, 0.0)
            t["output.loss"] = terms.where(t["action_mask"], 0.0).sum() / tokens * MICRO * RANKS

    def publish(self, store):
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
            actor = {"zero_stage": 2, "bos_token_id": 1, "vocab_size": 32}
            arguments = {k if k == "dp_size" else f"context.{k}": v for k, v in facts.items()}
            role = fields.get("role", "policy loss")
            loss = record(at, **(common | {"arguments": arguments, "point": LOSS, "role": role, "actor": actor}))
            inputs = {name: tensors[name] for name in ("sequences", "attention_mask", "action_mask")}
            forward = record(50 + at, **(common | {"grad_enabled": False}))
            rescored = at >= len(self.tensors) - self.not_scored or (self.scored_once and at == 1)
            scored = () if rescored else ((forward, inputs),)
            for described, held in (*scored, (loss, tensors)):
                paths.append(store.relative(store.publish_dump(*payload.encode(described, held))))
        return paths


def of_trl(step, mode="sequence_mask", factor=1.0):
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


def epochs(step, apart=0.01, at=4, scored=False, noise=0.0):
    """Another epoch over the same rows, after an update that also added noise. scored: they were scored again."""
    again = [{name: tensor.clone() for name, tensor in t.items()} for t in step.tensors[: RANKS * MICRO]]
    for t in again:
        t["log_probs"] = t["old_log_probs"] - apart + noise * torch.randn(2, ANSWER, generator=torch.Generator().manual_seed(3))
    step.tensors += again
    step.facts = step.facts + step.facts[: len(again)]
    step.fields = step.fields + [fields | {"step": at} for fields in step.fields[: len(again)]]
    step.not_scored += 0 if scored else len(again)


def whitened_alone(step, ranks):
    """Whiten the advantages of each micro-batch alone, or of each of so many ranks."""
    parts = [step.tensors[rank::ranks] for rank in range(ranks)] if ranks else [[t] for t in step.tensors]
    for part in parts:
        tokens = torch.cat([t["advantages"][t["action_mask"]] for t in part])
        for t in part:
            t["advantages"] = (t["advantages"] - tokens.mean()) / tokens.std()


def referred(step, apart=0.0):
    """The first step, with the log-probs of a reference."""
    step.fields = [fields | {"step": 0} for fields in step.fields]
    for t in step.tensors:
        t["context.base_action_log_probs"] = t["log_probs"] - apart


def preferred(step, apart, averaged=False):
    """Losses of a DPO, a pair in each, whose rows' sums are so many nats apart from the reference's, and averaged."""
    for t in step.tensors:
        moved, mask = torch.tensor([2.0, -1.0]) * apart, t["action_mask"]
        t["context.base_row_log_probs"] = (t["log_probs"] * mask).sum(1) - moved
        chosen, rejected = moved / mask.sum(1) if averaged else moved
        t["output.loss"] = torch.log1p((rejected - chosen).exp())


def hashed(step, same=True):
    """Hashes of the weights, as each rank held them."""
    step.hashes = ["a" * 64, ("a" if same else "b") * 64]


def same_row(step, scored):
    """A row that is trained on twice, and was scored so often before."""
    for name in ("sequences", "attention_mask", "action_mask"):
        step.tensors[1][name][0] = step.tensors[0][name][0]
    step.scored_once = scored == 1


def cancelling(step, divided_by):
    """Losses that are too large, in a step whose losses add up to 0."""
    step.finish()
    *others, last = (float(tensors["output.loss"]) for tensors in step.tensors)
    step.tensors[-1]["advantages"] *= -sum(others) / last
    step.finish(divided_by)


def penalized(step, settings, **done):
    """Losses with a KL and an entropy term, after an update. done: what the trainer did: `kl` and `entropy` times, `by` an estimator."""
    chance, tokens = torch.Generator().manual_seed(7), step.actions()
    for t in step.tensors:
        t["log_probs"] = t["old_log_probs"] - 0.3 * torch.rand(2, ANSWER, generator=chance)
        t["context.base_action_log_probs"] = -2 * torch.rand(2, ANSWER, generator=chance)
        t["context.entropy"] = torch.rand(2, ANSWER, generator=chance)
    step.facts = [facts | {f"loss.{name}": value for name, value in settings.items()} for facts in step.facts]
    step.not_scored = len(step.tensors)
    step.finish(clip=done.get("clip", 0.2), wrong=done.get("wrong", ""))
    for t in step.tensors:
        apart, mask, share = t["log_probs"] - t["context.base_action_log_probs"], t["action_mask"], settings.get("entropy_share")
        by = {"k1": apart, "abs": apart.abs(), "k2": apart**2 / 2, "k3": (-apart).exp() - 1 + apart}
        kl = by[str(done.get("by", settings["kl_estimator"]))] * done.get("kl", 1.0) * settings["kl_coef"]
        if settings.get("kl_by_ratio"):
            kl = kl * (t["log_probs"] - t["old_log_probs"]).exp()
        entropy = t["context.entropy"] * done.get("entropy", 1.0) * settings["entropy_coef"]
        scale = MICRO * RANKS / tokens
        apart_of_call = entropy[mask].mean() * share * MICRO if share else entropy[mask].sum() * scale
        t["output.loss"] += kl[mask].sum() * scale - apart_of_call


def critic(step, clip, bound="max"):
    """Losses of a critic whose values moved; it is set to clip them at 0.2, and clips at `clip`."""
    tokens = step.actions()
    step.fields = [fields | {"role": "critic loss"} for fields in step.fields]
    step.facts = [facts | {"loss.clip_eps": 0.2} for facts in step.facts]
    for t in step.tensors:
        old, moved, apart = t.pop("old_log_probs"), torch.linspace(-0.4, 0.4, ANSWER), 0.5
        t |= {"values": old + moved, "old_values": old, "returns": old + moved - apart}
        terms = BOUNDS.get(bound, torch.minimum)(apart**2 + 0 * old, (moved.clamp(-clip, clip) - moved + apart) ** 2) / 2
        t["output.loss"] = terms[t["action_mask"]].sum() / tokens * MICRO * RANKS
        for name in ("log_probs", "rollout_log_probs", "advantages", "context.returns"):
            del t[name]


def other_critic(step, other_row=None):
    """Losses of a critic that trains on other prompts, as it does before its policy; its trainer has no tokenizer.

    other_row: it trains on the policy's rows, with their returns, or with those of another row.
    """
    step.finish()
    names = "sequences", "attention_mask", "action_mask", "context.truncated", "context.returns", "context.values"
    step.not_scored = len(step.tensors)
    step.tensors += [{name: t[name].clone() for name in names if name in t} for t in step.tensors]
    step.facts += [{"n_samples_per_prompt": 2}] * step.not_scored
    step.fields += [fields | {"role": "critic loss"} for fields in step.fields]
    for t in step.tensors[step.not_scored :]:
        t["sequences"][:, :PROMPT] += other_row is None
        if other_row:
            t["context.returns"] = t["context.returns"].flip(0)


def swapped(step, name):
    """Swap the first rows of two losses."""
    first, second = (tensors[name] for tensors in step.tensors[:2])
    first[0], second[0] = second[0].clone(), first[0].clone()


def next_rows(step, name, by):
    """Roll a tensor by rows, over all losses."""
    for tensors, rows in zip(step.tensors, torch.cat([t[name] for t in step.tensors]).roll(by, 0).split(2), strict=True):
        tensors[name] = rows


def unlike_counts(step, at=1):
    """The second rank makes a call less in the second of three steps, or in another."""
    of_step = list(zip(step.tensors, step.facts, step.fields, strict=True))
    kept = [of_step] * 3
    kept[at] = of_step[:3]
    step.tensors = [{name: tensor.clone() for name, tensor in t.items()} for each in kept for t, _, _ in each]
    step.facts = [facts for each in kept for _, facts, _ in each]
    step.fields = [fields | {"step": at} for at, each in enumerate(kept, 2) for _, _, fields in each]
    step.not_scored = len(step.tensors)


CASES = cases_of("recorded_faults")


def plant(step, lines):
    """Plant what lines of `recorded_faults.test` say."""
    for verb, *words in map(str.split, lines):
        if verb in WHOLE_STEPS:
            WHOLE_STEPS[verb](step, *map(json.loads, words))
            continue
        name, value, where = words[0], json.loads(words[-1]), places("".join(words[1:-1]))
        for at, tensors in enumerate(step.tensors):
            if at > 0 and verb in ("set", "increase", "turn", "first"):
                break
            if verb in FIELDS:
                getattr(step, FIELDS[verb])[at][name] = value
            else:
                CHANGES[verb](tensors, name, where, value)


FIELDS = {"fact": "facts", "field": "fields", "first": "fields"}
CHANGES = {
    "set": lambda t, name, where, value: t[name].__setitem__(where, value),
    "all": lambda t, name, where, value: t[name].__setitem__(where, value),
    "increase": lambda t, name, where, value: t[name][where].add_(value),
    "turn": lambda t, name, where, value: t[name].__setitem__(where, t[name][where].roll(value)),
    "scale": lambda t, name, _, value: t[name].mul_(value),
    "add": lambda t, name, _, value: t[name].add_(value),
    "flip": lambda t, name, *_: t.update({name: t[name].flip(0)}),
    "drop": lambda t, name, *_: t.pop(name),
    "roll": lambda t, name, _, value: t.update({name: t[name].roll(value, 1)}),
    "outside": lambda t, name, _, value: t[name].masked_fill_(~t["action_mask"], value),
    "noise": lambda t, name, _, value: t[name].add_(value * torch.randn(2, ANSWER, generator=torch.Generator().manual_seed(3))),
}
WHOLE_STEPS = {
    "estimate": Step.estimate, "finish": Step.finish, "epochs": epochs, "reference": referred, "hashes": hashed,
    "weights": lambda step, given: of_trl(step, *given), "same": same_row, "penalize": lambda step, settings, done: penalized(step, settings, **done), "cancel": cancelling, "swap": swapped, "rows": next_rows,
    "follow": lambda step: [t.update({"context.base_action_log_probs": t["log_probs"].clone()}) for t in step.tensors],
    "renew": lambda step: [t.update({"old_log_probs": t["log_probs"].clone()}) for t in step.tensors],
    "calls": unlike_counts, "critic": critic, "critics": other_critic, "whiten": whitened_alone, "prefer": preferred,
}  # fmt: skip


def published(folder, *lines):
    """A store with a step of what the lines plant, and the paths of its dumps."""
    step, store = Step(), Store(folder).create()
    plant(step, lines)
    if "output.loss" not in step.tensors[0]:
        step.finish()
    return store, step.publish(store)


def linted(store, *words):
    return in_json(store, "lint", *words)


@pytest.mark.parametrize("fault", CASES)
def test_each_fault_breaks_the_law_that_names_it(tmp_path, fault):
    side, *laws = [line for line in CASES[fault].expected if not line.startswith("says ")]
    store, paths = published(tmp_path, *CASES[fault].given)
    findings = lint(store.root, paths)
    assert {law.name for law in findings.broken} == set(laws), findings.in_words()
    said = [line.removeprefix("says ") for line in CASES[fault].expected[1 + len(laws) :]]
    assert all(words in findings.verdict().sentence for words in said)
    if side == "healthy":
        return
    assert findings.verdict().wrong == (side,), findings.in_words()
    assert ("WRONG (rollout or trainer)" in findings.verdict().sentence) == (side == EITHER)
    both = with_lint(Verdict("RIGHT", "it ran"), findings)
    assert findings.verdict().word == both.word == "WRONG" and both.details[0].endswith("it ran")
    assert said_once(findings.verdict()) and said_once(both)
    assert len(findings.verdict().headline.split(", in ")[0].split()) <= 16, "what is wrong is read at a glance"


HEALTHY = (
    *(f'estimate "{name}"' for name in ESTIMATORS),
    *(f'weights ["{unit}_{how}"]' for unit in ("sequence", "token") for how in ("mask", "truncate")),
    "epochs", "reference", "hashes", 'penalize {"kl_estimator":"k1","kl_coef":0.1,"entropy_coef":0.1} {}',
    "fact mask_truncated true", *(";".join(CASES[name].given) for name in ("supervised losses", "masked tokens are never compared: tool output has placeholders, rows of several turns have holes, a row may have no action")),
)  # fmt: skip


def test_every_law_holds_on_healthy_steps_of_some_trainer(tmp_path):
    held, read = set[str](), dict[str, set[str]]()
    for number, line in enumerate(HEALTHY):
        store, paths = published(tmp_path / str(number), *line.split(";"))
        findings = lint(store.root, paths)
        assert not findings.broken, (line, findings.in_words())
        for law, names in read_by_laws(store.root, paths):
            read.setdefault(law, set()).update(names)
        held |= {law.name for law in findings.held}
    assert held == {law.name for law in LAWS} - {"own reward"}  # which reads turns: `test_turns`
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
        names += [*points.settings, *points.flags, *(name for loss in points.losses for name in loss.returns)]
    names += [name for name in LossCall.__dataclass_fields__ if name not in ("facts", "settings", "own", "weights")]
    assert not unlisted([*names, *loss_record._AFTER])


def test_a_healthy_step_keeps_every_law_and_the_command_says_so(tmp_path):
    store, paths = published(tmp_path)
    answer = linted(store)
    assert answer["verdict"] == "RIGHT" and answer["dumps"] == len(paths)
    assert dict(answer["figures"])["rows without advantage"] == "0.0%"


def test_a_rank_with_fewer_calls_is_named_unless_one_of_them_may_not_have_been_recorded(tmp_path):
    store, paths = published(tmp_path, "calls")
    assert "calls (ms-swift PR#8102): step 3: rank 1 made 1 call of the policy loss, 1 rank" in linted(store)["sentence"]
    begun_late, _ = published(tmp_path / "late", "calls 0")
    assert "calls" not in linted(begun_late)["sentence"], "ranks see the switch at other times, perhaps in the middle of a step"
    (store.root / paths[RANKS * MICRO]).unlink()  # the first call of rank 0 in that step
    assert {rule["rule"]: rule["state"] for rule in linted(store)["rules"]}["calls"] == "not-checked"


@pytest.mark.filterwarnings("error")
def test_infinite_log_probs_and_odd_facts_are_no_error(tmp_path):
    lines = (
        "all log_probs 0,0 -Infinity", "all old_log_probs 0,0 -Infinity", "all rollout_log_probs 0,0 -Infinity",
        "fact rollout.top_p -1", 'fact loss.loss_agg_mode "seq-mean-token-sum-norm"', 'fact loss.loss_scale_factor "x"',
    )  # fmt: skip
    store, paths = published(tmp_path, *lines)
    assert "finite" in {law.name for law in lint(store.root, paths).broken}


@pytest.mark.parametrize("fact, law", [("rollout.top_p", "sampling"), ("loss.clip_eps_low", "formula")])
def test_a_fact_of_another_type_leaves_a_law_unchecked_and_the_others_judge(tmp_path, fact, law):
    store, paths = published(tmp_path, f'fact {fact} "high"', "all rollout_log_probs 0,0 0.5")
    findings = lint(store.root, paths)
    assert [broken.name for broken in findings.broken] == ["log-probs"]
    assert law not in {held.name for held in findings.held}
    assert linted(store)["not_checked"][0] == "4 dumps that cannot be read whole"


def test_rows_that_are_likely_enough_to_repeat_are_no_duplicates_in_their_forwards(tmp_path, monkeypatch):
    monkeypatch.setattr(step_laws, "LONG", 4)
    step, store = Step(), Store(tmp_path).create()
    for tensors in step.tensors:
        for name in ("sequences", "attention_mask", "action_mask", "context.response_length"):
            tensors[name][1] = tensors[name][0]
    plant(step, ['estimate "reinforce_baseline"', "finish"])
    assert not lint(store.root, step.publish(store)).broken


@pytest.mark.parametrize(
    "kind, spelled, judged",
    [
        ("BPE", "It", True), ("BPE", "\u0120It", False), ("BPE", "\u0120is", False), ("WordPiece", "It", False), ("BPE", "<0x41>", False),
        ("Unigram", "It", True), (None, "It", False),
    ],
)  # fmt: skip
def test_a_mask_that_begins_late_is_told_from_a_merged_prompt_by_how_the_tokens_begin(tmp_path, kind, spelled, judged):
    """Both rows' tokens before the actions begin with the rest of the prompt, if that was merged with the answers."""
    pieces = [spelled if at == 33 else f"\u0120This{at}" for at in range(100)]
    vocab = {piece: at for at, piece in enumerate(pieces)} if kind != "Unigram" else [[piece, 0.0] for piece in pieces]
    model = {"model": {"type": kind, "vocab": vocab}, "added_tokens": [{"id": 99, "content": "\u0120This99"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(model if kind else []))
    merged = CASES["preferences whose prompts end in a space, which the tokenizer merged with each answer"].given
    store, paths = published(tmp_path / "store", *merged, "all sequences 1,4 99", f"field model_name {json.dumps(str(tmp_path))}")
    first_letters.cache_clear()
    findings = lint(store.root, paths)
    assert {law.name for law in findings.broken} == ({"first action"} if judged else set()), findings.in_words()
    assert any("where answers begin" in left.said for left in findings.left) != judged


@pytest.mark.parametrize("vocab", [{}, {"vocab": 3}, {"vocab": [["a"]]}])
def test_another_file_than_tokenizers_writes_and_one_that_no_model_names_have_no_letters(tmp_path, monkeypatch, vocab):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "BPE", **vocab}, "added_tokens": []}))
    assert first_letters.__wrapped__(str(tmp_path)) == {}
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": []}))
    assert first_letters.__wrapped__(str(tmp_path)) == {0: "a"} and first_letters.__wrapped__("") == {}


@pytest.mark.parametrize("scale, said", [(1.0, ", 4 times it"), (0.3, "")])
def test_a_factor_of_one_micro_batch_is_only_believed_if_it_is_whole(tmp_path, scale, said):
    step, store = Step(), Store(tmp_path).create()
    step.tensors, step.facts, step.fields = step.tensors[:1], step.facts[:1], step.fields[:1]
    plant(step, ["field world_size 1", "fact engine_accumulation 1", "fact dp_size 1", "finish", f"scale output.loss {scale}"])
    (found,) = lint(store.root, step.publish(store))["normalization"].found
    assert found.said.partition(" times it")[0].endswith(said[:3]) and ("times it" in found.said) == bool(said)


def test_terms_that_are_added_to_recorded_losses_are_named_as_not_checked(tmp_path):
    step, store = Step(), Store(tmp_path).create()
    plant(step, ["fact kl.use_loss true", "fact kl.init_coef 0.1", "finish"])
    (left,) = lint(store.root, step.publish(store)).left
    assert left.rule.name == "formula" and "actordbg step" in left.by


@pytest.mark.parametrize(
    "prompts, begin, scored, broken",
    [
        ((1, 2, 1, 3), PROMPT, 0, ["duplicates"]), ((1, 2, 1, 3), PROMPT, 1, []), ((1, 1, 1, 1), PROMPT, 0, []),
        ((7, 7, 7, 7), 1, 0, ["duplicates"]),
    ],
)  # fmt: skip
def test_rows_twice_in_labels_are_named_unless_they_may_be_of_preferences(tmp_path, prompts, begin, scored, broken):
    """scored: a reference had the rows, too."""
    store, answers = Store(tmp_path).create(), (1, 2, 1, 3)
    ids = torch.tensor([prompts, answers]).repeat_interleave(torch.tensor([PROMPT, 60]), 0).T.contiguous()
    inputs = {"sequences": ids, "action_mask": torch.arange(1, 65).expand(4, -1) >= begin, "context.labels": ids}
    for number in range(1 + scored):
        store.publish_dump(*payload.encode(record(number, batch_size=4, seq_len=65, grad_enabled=not number), inputs))
    assert [rule["rule"] for rule in linted(store)["rules"] if rule["state"] == "broken"] == broken


@pytest.mark.parametrize("known", ["true", "false"])
def test_a_step_without_an_action_is_no_step_without_an_advantage(tmp_path, known):
    step, store = Step(), Store(tmp_path).create()
    lines = "finish", "scale output.loss 0", "all action_mask : false", "all context.response_length : 0"
    plant(step, [f"fact mask_truncated {known}", *lines])
    findings = lint(store.root, step.publish(store))
    assert [law.name for law in findings.broken] == ["actions"] and findings.verdict().wrong == ()
    assert ("truncated" in findings.verdict().sentence) == (known == "true")


def test_what_a_law_lacks_is_what_was_not_recorded(tmp_path):
    """Losses that were recorded are not asked for; a trainer that has no rewards, and an unknown estimator, are named."""
    store, paths = published(tmp_path, "weights []", "fact rollout.temperature null", 'fact loss.policy_loss_type "other"')
    lacks = {answer.rule.name: answer.lacks for answer in lint(store.root, paths).of(NOT_CHECKED)}
    assert lacks["temperature"] == "rollout.temperature", "rows that are scored once have nothing to be compared with"
    assert lacks["rewards"] == "rewards" and lacks["returns"] == "returns" and "formula" in lacks["normalization"]
    assert not any("dump enable --calls" in lack for lack in lacks.values())


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_an_advantage_that_is_not_finite_is_an_answer_in_every_format(tmp_path, value):
    store, _ = published(tmp_path / "store", f"set advantages 1,2 {value}")
    files = [tmp_path / f"lint.{suffix}" for suffix in ("json", "html", "md", "txt")]
    done = invoke(store, "lint", *(word for path in files for word in ("-o", path)))
    assert done.stdout.startswith("WRONG (trainer): step 3: advantages is not finite") and "row 1" in done.stdout
    answer = json.loads(files[0].read_text())
    assert answer["wrong"] == [TRAINER] and answer["findings"][0]["key"] == ["finite", TRAINER, ""]
    assert all("finite" in path.read_text() for path in files)
    assert "<summary>Rules not checked" in files[1].read_text()


def test_a_loss_that_breaks_a_law_is_selected_by_its_verdict_though_lists_are_of_forwards(tmp_path):
    store, paths = published(tmp_path, PLACEHOLDER)
    assert invoke(store, "lint").exit_code == 1
    for where in ("verdict='WRONG'", "broken='placeholder'"):
        (row,) = in_json(store, "dump ls --where", where)
        assert (row["point"], row["verdict"], row["broken"]) == (LOSS, "WRONG", "placeholder")
    assert len(in_json(store, "dump ls")) == len(paths) // 2
    assert in_json(store, "status")["holds"]["bad"] == 1


def test_forwards_alone_are_checked_and_the_rest_is_named(tmp_path, monkeypatch):
    """Losses are not selected unless somebody asks for them, and what they alone can show is not checked."""
    store, paths = published(tmp_path)
    half = len(paths) // 2
    for words in ((), ("--where", "point='loss'")):
        assert len(in_json(store, "dump ls", *words)) == half
    answer = linted(store, "--where", "point='forward'")
    left = [rule["rule"] for rule in answer["rules"] if rule["state"] == "not-checked"]
    assert answer["good"] and "placeholder" in left
    most, others = answer["not_checked"]
    assert "for lack of policy losses (dump enable --calls forward,loss, where" in most and others.endswith(
        "for lack of other data"
    )
    assert sum(int(each.split()[0]) for each in (most, others)) == len(left)
    with pytest.raises(NothingToDo, match="nothing to lint: no dump matches"):
        invoke(store, "lint --where seq_len>99")
    reason = f"role = 'policy loss' selects none of {half} forwards, and {half} losses: add point='loss'"
    assert reason in invoke(store, "dump ls --where", "role='policy loss'").stderr
    assert frequent_values(open_fresh(store), "role") == [("policy", half)]

    def nothing(*_):
        raise NothingToDo("")

    monkeypatch.setattr(explaining, "run_located", nothing)
    inputs = [ReplayInput(row.dump_id, row.path, 0, row.batch_size, row.seq_len, row.tokens) for row in select_dumps(store)]
    write_replay(store, "r-01", inputs, change=lambda *_: None, keep_tensors=False)
    left = in_json(store, "explain r-01")["not_checked"]
    assert any(each.endswith("for lack of policy losses, which `actordbg lint` reads") for each in left), left


@pytest.mark.parametrize("theirs, judged", [("sft", True), ("another", False), (None, True)])
def test_a_reference_that_is_another_model_by_design_is_no_fault(theirs, judged):
    own, calls = np.full((1, 4), -1.0), []
    for role, model in ("policy", "sft"), ("reference", theirs), ("policy loss", None):
        point = LOSS if "loss" in role else "forward"
        call = RecordedCall(record(0, role=role, model_name=model, point=point, model_dtype="float32"), {})
        vars(call).update(heads={}, row_keys=(b"k",), weightless=np.ones(1))
        calls.append(call)
    call.heads = {"log_probs": own, "base_action_log_probs": own - 0.5}
    answer = Answer(next(law for law in LAWS if law.name == "reference"))
    step_laws.reference(calls, answer)
    assert bool(answer.found) is judged and bool(answer.lacks) is not judged


def test_ids_that_change_places_where_nothing_else_was_recorded_are_named_as_not_checked(tmp_path):
    """The log-probs are those of the ids as trained on: only the engine's, or old ones, could tell."""
    step, store = Step(), Store(tmp_path).create()
    step.finish()
    for tensors in step.tensors:
        del tensors["rollout_log_probs"]
        tensors["sequences"][:, PROMPT:] = tensors["sequences"][:, PROMPT:].flip(0)
    step.publish(store)
    answer = linted(store)
    lacking = {each["rule"]: each["by"] for each in answer["unchecked"]}
    assert lacking["rows"] == lacking["alignment"] == "log-probs beside those of the loss itself"
    assert "rows" not in [each["rule"] for each in answer["findings"]]


@pytest.mark.slow
def test_somebody_who_may_not_write_the_store_gets_the_answer_and_hears_that_it_is_not_kept(tmp_path):
    store, _ = published(tmp_path / "store", PLACEHOLDER)
    with another_user(store.root) as other:
        (said,) = other.run(["lint"])
    assert said.code == 1 and said.out.startswith("WRONG"), said
    assert "not kept for the dumps' last verdicts: cannot write" in said.err and not store.lints.exists()
