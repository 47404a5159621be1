"""Causes planted in small random models, and what the bank names from log-probs alone. Run in a process of its own.

python causecases.py SCENARIO MODEL_CACHE
"""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from actorcases import main, opened
from amounts import amount, first_or_all
from lawcases import dump_of, model_of
from locatecases import attribute, model_with
from planted_table import rounded
from replaycases import publish

from actordbg.causes.fit import fit, refined
from actordbg.causes.gather import PREFIX, Piece, sample_of
from actordbg.causes.in_worker import CausesInWorker
from actordbg.config.replay_config import WIDER
from actordbg.formats.dump_record import LOSS, OUTPUT_PREFIX
from actordbg.formats.nested_values import CONTEXT
from actordbg.replay.instruments import Examined
from actordbg.store.layout import Store
from actordbg.store.payload import encode, load


def sampled(model, seed, rows):
    """A call padded on both sides, whose answers the model sampled with top-p 0.9."""
    dump = dump_of(rows=rows, length=128, actions=110, seed=seed)
    torch.manual_seed(seed)
    sequences, masks = dump.tensors["sequences"], dump.tensors["attention_mask"].bool()
    prompts = torch.stack([ids[real][:16] for ids, real in zip(sequences, masks, strict=True)])
    settings = {"do_sample": True, "top_p": 0.9, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    made = model.generate(prompts, max_new_tokens=int(masks.sum(-1).max()) - 16, **settings)
    for ids, real, row in zip(sequences, masks, made, strict=True):
        ids[real] = row[: int(real.sum())]
    return dump


@dataclass
class Bench:
    """A model's dumps, their truth under all causes, and healthy log-probs: each row alone, and a replay's."""

    model: str
    dtype: str
    cache: Path
    seed: int = 0
    count: int = amount(1, 2)
    attn: str = "sdpa"
    rows: int = amount(2, 4)

    def __post_init__(self):
        from transformers import AutoModelForCausalLM

        self.plain = AutoModelForCausalLM.from_pretrained(self.model, attn_implementation="eager").eval()
        self.dumps = [sampled(self.plain, self.seed + index, self.rows) for index in range(self.count)]
        self.opened = contextlib.ExitStack()
        self.session = self.open(attn=self.attn)
        self.wide = self.open(through=None, truth=WIDER[self.dtype], causes="all")
        self.examiner = CausesInWorker(self.wide, together=False)
        self.truth = self.examined()
        self.own = self.wide.resolved["causes"]
        self.healthy = [self.values(self.ran(through=None, truth=self.dtype)), self.values(self.run(self.session))]
        self.weights = {}

    def open(self, **settings):
        given = {"model": self.model, "dtype": self.dtype, "through": "rows"} | settings
        return self.opened.enter_context(opened(self.cache, **given))

    def run(self, session):
        return [session.run(dump, backward=False, keep=True) for dump in self.dumps]

    def examined(self):
        """The truth's outcomes, with its log-probs under the causes that its configuration asks for."""
        outcomes = self.run(self.wide)
        for dump, outcome in zip(self.dumps, outcomes, strict=True):
            self.examiner.examine(Examined(dump, outcome, backward=False, tell=lambda step: None, asked=True))
        return outcomes

    def ran(self, plant=None, **settings):
        """What a replay gives, in which something may be planted. With settings, it is another one."""
        session = self.open(**settings) if settings else self.session
        with plant(session.model) if plant else contextlib.nullcontext():
            return self.run(session)

    @staticmethod
    def values(outcomes):
        return [outcome.log_probs.double().numpy() for outcome in outcomes]

    def explain(self, recorded):
        """What is fitted to log-probs [B, A] of each dump, with the sizes that a fit asks for."""
        causes = [{name: each.double().numpy() for name, each in ran.tensors.items() if PREFIX in name} for ran in self.truth]
        for _ in range(3):
            pieces = [
                Piece(
                    recorded[index],
                    self.truth[index].mask.numpy(),
                    self.truth[index].log_probs.double().numpy(),
                    causes[index],
                    [each[index] for each in self.healthy],
                    {name: each[index] for name, each in self.weights.items()},
                )
                for index in range(len(self.dumps))
            ]
            fitted = fit(sample := sample_of(pieces, self.own))
            near = ",".join(f"{name}={size!r}" for name, size in refined(sample, fitted))
            if not near:
                break
            self.wide.config = replace(self.wide.config, causes=near)
            for known, ran in zip(causes, self.examined(), strict=True):
                known |= {name: each.double().numpy() for name, each in ran.tensors.items() if PREFIX in name}
        return fitted

    def logits(self):
        """The plain model's logits [B, A, V] that predict the actions."""
        with torch.no_grad():
            return [self._logits(dump) for dump in self.dumps]

    def _logits(self, dump):
        real = dump.tensors["attention_mask"]
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        logits = self.plain(dump.tensors["sequences"], attention_mask=real, position_ids=positions).logits
        return logits[:, -1 - dump.tensors["action_mask"].shape[1] : -1]

    def warped(self, warper):
        """Healthy log-probs, and what one of transformers' samplers makes of a distribution."""
        return self.moved(
            lambda dump, logits: torch.stack(
                [warper(dump.tensors["sequences"][:, -logits.shape[1] :], row) for row in logits]
            ).log_softmax(-1)
        )

    def moved(self, change):
        """Healthy log-probs, and what `change` makes of them: from a dump and its logits, other log-probs of the vocabulary."""
        moved = []
        for dump, logits, healthy in zip(self.dumps, self.logits(), self.healthy[1], strict=True):
            labels = dump.tensors["sequences"][:, -logits.shape[1] :]
            with torch.no_grad():
                apart = (change(dump, logits) - logits.log_softmax(-1)).gather(-1, labels[..., None])[..., 0]
            moved.append(healthy + apart.double().numpy() * dump.tensors["action_mask"].numpy())
        return moved

    def called(self, seen, places, together=False):
        """Healthy log-probs, and what another call makes of them: another mask, other positions, all rows in one."""

        def change(dump, logits):
            real, ids = dump.tensors["attention_mask"].bool(), dump.tensors["sequences"]
            given = ids, seen(real, dump.tensors["action_mask"]).long(), places(real)
            if together:
                given = tuple(each[real][None] for each in given)
            after = self.plain(given[0], attention_mask=given[1], position_ids=given[2], use_cache=False).logits
            if together:
                after = torch.zeros(*ids.shape, after.shape[-1]).index_put((real,), after[0])
            return after[:, -1 - logits.shape[1] : -1].log_softmax(-1)

        return self.moved(change)


def theta(size):
    return attribute("model.rotary_emb", "inv_freq", lambda inv_freq: inv_freq ** (np.log(size) / np.log(1e4)))


def every(kind, name, change):
    """Change an attribute of all modules of a kind."""

    @contextlib.contextmanager
    def plant(model):
        with contextlib.ExitStack() as undo:
            for module in model.modules():
                if kind in type(module).__name__:
                    undo.enter_context(patch.object(module, name, change(getattr(module, name))))
            yield

    return plant


@contextlib.contextmanager
def head_in_bf16(model):
    def narrow(module, inputs, output):
        return torch.nn.functional.linear(inputs[0].bfloat16(), module.weight.bfloat16()).to(output.dtype)

    head = getattr(model.lm_head, "base_layer", model.lm_head)  # a head's adapter is added to what it returns
    hook = head.register_forward_hook(narrow)
    yield
    hook.remove()


@contextlib.contextmanager
def logits_in_bf16(model):
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: output.bfloat16().to(output.dtype))
    yield
    hook.remove()


PLANTED = {
    "norm epsilon": (every("Norm", "variance_epsilon", lambda _: 1e-3), 1e-3),
    "attention scale": (every("Attention", "scaling", lambda scale: scale * 1.3), 1.3),
    "rope theta": (theta(10_500.0), 10_500.0),
    "rope scaling": (attribute("model.rotary_emb", "inv_freq", lambda inv_freq: inv_freq / 4), 4.0),
    "activation": (every("MLP", "act_fn", lambda _: torch.nn.GELU()), 2.0),
    "inv_freq in bf16": (attribute("model.rotary_emb", "inv_freq", rounded), 1.0),
    "head in bf16": (head_in_bf16, 1.0),
    "logits in bf16": (logits_in_bf16, 1.0),
}
"""Causes that change the model, by name: how they are planted, without the bank's own code, and their size."""
HIDDEN = {"inv_freq in bf16", "head in bf16", "logits in bf16"}
"""Too small to be seen in bf16 on so few tokens, or healthy there."""


def named(fitted, name, amount, case, beside=0):
    """The cause is the first that is named, within its error, with at most so many others of its kin."""
    names = [each.name for each in fitted.named]
    assert names[:1] == [name] and len(names) <= 1 + beside, (case, name, fitted)
    best = fitted.named[0]
    if amount is not None and best.amount is not None:
        # a truth in fp64 is stored as fp32, so no amount is nearer than some 1e-5 of itself
        assert abs(best.amount - amount) <= 5 * (best.error or 0.0) + 2e-5 * abs(amount), (case, name, best.amount, best.error)


def in_bf16_numbers(folder):
    """Round a checkpoint's weights to bf16, as most checkpoints are, even those trained in fp32."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().save_pretrained(folder)


def planted(cache):
    """Every cause is named with its amount, in fp32 and bf16, and nothing is named that is hidden."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for family, dtype in first_or_all((("llama", "fp32"), ("qwen3", "bf16"))):
        if dtype == "fp32":
            in_bf16_numbers(model_of(cache, family))
        bench, case = Bench(str(model_of(cache, family)), dtype, cache, count=2, rows=4), (family, dtype)
        for name, (plant, size) in PLANTED.items():
            found = bench.explain(bench.values(bench.ran(plant)))
            if dtype == "bf16" and name in HIDDEN:
                assert not found.named and not found.unknown, (case, name, found)
            else:
                named(found, name, size, case)
        for temperature in (0.7, 0.97, 1.4):
            named(bench.explain(bench.values(bench.ran(temperature=temperature))), "temperature", temperature, case)
        for name, size, warper in (
            ("top-p", 0.9, TopPLogitsWarper(0.9)), ("top-k", 20, TopKLogitsWarper(20)), ("min-p", 0.05, MinPLogitsWarper(0.05)),
        ):  # fmt: skip
            named(bench.explain(bench.warped(warper)), name, size, case)
        arranged(bench, case)


def arranged(bench, case):
    """What moves log-probs without a model: a shift, rows that are others', placeholders; and what is nobody's is unknown."""
    healthy, masks = bench.healthy[1], [ran.mask.numpy() for ran in bench.truth]
    named(bench.explain([np.roll(each, -1, axis=1) for each in healthy]), "shift", 1, case)
    named(bench.explain([each[[1, 0, 2, 3]] for each in healthy]), "other rows", 4, case)
    if "fp32" in case:
        named(
            bench.explain([torch.from_numpy(each).bfloat16().float().numpy() for each in healthy]), "log-probs in bf16", 1, case
        )
        in_bf16 = bench.moved(lambda _, logits: logits.bfloat16().log_softmax(-1).float())
        named(bench.explain(in_bf16), "log-softmax in bf16", 1, case)
    ones, counted = (lambda real, _: real | True), lambda real: (real.cumsum(-1) - 1).clamp(min=0)
    running = lambda real: real.flatten().cumsum(0).view(real.shape) - 1  # noqa: E731
    sampled = lambda real, actions: torch.nn.functional.pad(actions, (real.shape[1] - actions.shape[1], 0))  # noqa: E731
    for name, recorded in {
        "no normalization": bench.moved(lambda _, logits: logits),
        "packed rows": bench.called(ones, counted, together=True),
        "positions run on": bench.called(ones, running, together=True),
        "padding": bench.called(ones, counted),
        "loss mask": bench.called(sampled, counted),
        "mask of another row": bench.called(lambda real, _: real.roll(1, 0), lambda real: counted(real) * real + ~real),
    }.items():
        named(bench.explain(recorded), name, None, case)
    zeros = [each.copy() for each in healthy]
    zeros[0][:, 50] = 0.0
    found = bench.explain(zeros)
    assert (found.placeholders, found.named, found.unknown) == (4, (), False), (case, found)
    noisy = [each + np.random.default_rng(0).normal(0, 0.3, each.shape) * mask for each, mask in zip(healthy, masks, strict=True)]
    found = bench.explain(noisy)
    assert found.unknown and not found.named, (case, found)


def others(cache):
    """Weights of another step, an adapter that is missing, a window and soft caps that are not applied, an end token not allowed."""
    bench = Bench(str(model_of(cache, "llama")), "fp32", cache)
    ends = [each.log_softmax(-1)[..., 2].exp().double().numpy() for each in bench.logits()]
    for scale in (1e-3, 2e-3):
        for parameter in bench.plain.parameters():
            parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * scale * parameter.std()
        bench.plain.save_pretrained(cache / f"moved {scale}")
    moved = {f"moved {scale}": str(cache / f"moved {scale}") for scale in (1e-3, 2e-3)}
    stale = bench.values(bench.ran(model=moved["moved 0.001"]))
    assert bench.explain(stale).unknown
    bench.weights = {name: bench.values(bench.ran(model=model, truth="fp64", through=None)) for name, model in moved.items()}
    named(bench.explain(stale), "weights: moved 0.001", None, "llama")
    first = [each.cumsum(-1) * each == 1 for each in (ran.mask.numpy() for ran in bench.truth)]
    sampler = [each - np.log1p(-end) * where for each, end, where in zip(bench.healthy[1], ends, first, strict=True)]
    found = bench.explain(sampler)
    assert [each.name for each in found.expected] == ["min-tokens"] and not found.named and not found.unknown, found
    without_a_mask_or_a_cap(cache)


def without_a_mask_or_a_cap(cache):
    bench = Bench(str(model_of(cache, "gemma2")), "bf16", cache, attn="eager")

    def capless(model):
        stack = contextlib.ExitStack()
        stack.enter_context(patch.object(model.config, "final_logit_softcapping", None))
        stack.enter_context(every("Attention", "attn_logit_softcapping", lambda _: None)(model))
        return stack

    # small logits are capped as a temperature would scale them
    named(bench.explain(bench.values(bench.ran(capless, attn="eager"))), "soft cap", None, "gemma2", beside=1)
    windowless = bench.ran(lambda model: patch.object(model.config, "sliding_window", 10**6), attn="eager")
    named(bench.explain(bench.values(windowless)), "sliding window", None, "gemma2")


def healthy(cache):
    """Nothing is named, nothing is unknown: families, dtypes, kernels, packed or padded, several seeds."""
    for number, (family, dtype) in enumerate(first_or_all((("llama", "bf16"), ("qwen3", "fp32"), ("mixtral", "bf16")))):
        bench = Bench(str(model_of(cache, family)), dtype, cache, seed=10 * number)
        for packing, attn in ((False, "eager"), (True, "sdpa"), (True, "eager")):
            found = bench.explain(bench.values(bench.ran(packing=packing, attn=attn)))
            assert not found.named and not found.unknown and not found.placeholders, (family, dtype, packing, attn, found)


def recorded(cache):
    """Two stores with dumps of a run at temperature 0.7: one recorded its log-probs at that temperature, the other at 1."""
    folders = {"model": model_with(cache, "llama", vocab_size=4096)}
    for name, temperature in (("healthy", 0.7), ("raw", 1.0)):
        trained = []
        store = Store(cache / name).create()
        folders[name] = str(store.root)
        inputs = publish(store, 2, length=64, model_dtype="torch.float32", temperature=0.7)
        with opened(cache, folders["model"], dtype="fp32", through="rows", temperature=temperature) as session:
            for item in inputs:
                dump = load(store.root / item.path)
                own = {f"{OUTPUT_PREFIX}action_log_probs": session.run(dump, backward=False).log_probs}
                store.publish_dump(*encode(dump.record, dump.tensors | own))
                trained += [own[f"{OUTPUT_PREFIX}action_log_probs"]]
        if name == "healthy":
            right = trained
    for item, run, rollout in zip(inputs, right, trained, strict=True):  # the losses of the second run: its engine is wrong
        dump = load(store.root / item.path)
        moment = item.dump_id
        record = replace(dump.record, dump_id=moment[:-1] + "f", point=LOSS, arguments={f"{CONTEXT}forward": moment})
        store.publish_dump(*encode(record, dump.tensors | {"log_probs": run, "rollout_log_probs": rollout}))
    return folders


def with_adapter(cache, name, base, **more):
    """A folder with a random adapter of a model's queries, values and head."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    modules = ["q_proj", "v_proj", "lm_head"]
    given = {"r": 4, "lora_alpha": 4, "target_modules": modules, "init_lora_weights": False} | more
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**given)).save_pretrained(cache / name)
    return str(cache / name)


def of_layers(part, scale):
    """Change the scale of the adapters of modules whose name ends with `part`; 0 turns them off, whatever a call turns on."""

    @contextlib.contextmanager
    def plant(model):
        layers = [module for name, module in model.named_modules() if name.endswith(part) and hasattr(module, "lora_A")]
        assert layers, part
        for layer in layers:
            layer.set_scale("default", scale)
        yield
        for layer in layers:
            layer.set_scale("default", 1.0)

    return plant


def adapters(cache):
    """The adapter of one kind of module, of one module, of all, at another scale; and an adapter that was saved with alpha 0."""
    base = str(model_of(cache, "llama"))
    good = with_adapter(cache, "adapter", base)
    bench = Bench(good, "fp32", cache)
    for part, name in first_or_all((("lm_head", "adapter of: lm_head"), ("", "adapter"), ("q_proj", "adapter of: q_proj")), 2):
        named(bench.explain(bench.values(bench.ran(of_layers(part, 0.0)))), name, None, "adapter", beside=1)
    (one,) = [each.name for each in bench.explain(bench.values(bench.ran(of_layers("layers.1.self_attn.v_proj", 0.0)))).named]
    assert one.startswith("adapter of: ") and one.endswith("layers.1.self_attn.v_proj")
    for scale in first_or_all((1.3, 2.0)):
        named(bench.explain(bench.values(bench.ran(of_layers("", scale)))), "adapter scale", scale, "adapter")
    named(bench.explain(bench.values(bench.ran(head_in_bf16))), "head in bf16", 1.0, "adapter")
    silent = Bench(with_adapter(cache, "silent", base, lora_alpha=0), "fp32", cache)
    trained = silent.ran(model=with_adapter(cache, "twice", base, lora_alpha=8))
    named(silent.explain(silent.values(trained)), "adapter alpha", 2.0, "silent")
    narrow = bench.explain(bench.values(bench.ran(dtype="bf16")))
    assert narrow.unknown and narrow.nearest is None, "no single cause is bf16 as a whole"


def sides(cache):
    """Stores with losses whose rollout is healthy, or wrong, behind an update of the weights, or in bf16."""
    from transformers import AutoModelForCausalLM

    folders = {"before": model_with(cache, "llama", vocab_size=4096), "now": str(cache / "now")}
    moved = AutoModelForCausalLM.from_pretrained(folders["before"])
    for parameter in moved.parameters():
        parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.03 * parameter.std()
    moved.save_pretrained(folders["now"])
    now = {"model": folders["now"], "dtype": "fp32", "through": "rows"}
    before = now | {"model": folders["before"]}
    cases = {
        "updated-cool": (before, before | {"temperature": 0.7}),
        "updated-bf16": (before, before | {"dtype": "bf16", "attn": "sdpa"}),
        "bf16": (now | {"attn": "sdpa"}, now | {"dtype": "bf16", "attn": "sdpa"}),
        "updated": (before, before | {"attn": "sdpa"}),
        "bf16-cool": (now | {"attn": "sdpa"}, now | {"dtype": "bf16", "attn": "sdpa", "temperature": 0.7}),
    }
    ran = {}
    for name, (old, rollout) in first_or_all([*cases.items()], 3):
        store = Store(cache / name).create()
        folders[name] = str(store.root)
        inputs = publish(store, 2, length=64, model_dtype="torch.float32")
        given = {"log_probs": now, "old_log_probs": old, "rollout_log_probs": rollout}
        values = {}
        for tensor, settings in given.items():
            if str(settings) not in ran:  # the inputs of all stores are the same
                with opened(cache, **settings) as session:
                    outcomes = [session.run(load(store.root / item.path), backward=False) for item in inputs]
                ran[str(settings)] = [outcome.log_probs.float() for outcome in outcomes]
            values[tensor] = ran[str(settings)]
        for index, item in enumerate(inputs):
            dump = load(store.root / item.path)
            record = replace(
                dump.record, dump_id=item.dump_id[:-1] + "f", point=LOSS, arguments={f"{CONTEXT}forward": item.dump_id}
            )
            store.publish_dump(*encode(record, dump.tensors | {tensor: each[index] for tensor, each in values.items()}))
    return folders


if __name__ == "__main__":
    import sys

    main(sys.argv[1:], globals())
