"""Scenarios of calls that draw random numbers: OpenRLHF's Actor on tiny models with dropout, recorded with their generators' states.

    python goldencases.py SCENARIO CACHE        prints what the scenario found, as JSON, on the last line

The hook records the inputs and outputs; the states are read around each call here, as the hook's `with_rng` does, and put into copies
of the dumps (`with_states`).
"""

import json
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from actorcases import VOCAB, main, make_dump, opened
from capturekit import Recording

from actordbg.actor.models import ensure_tiny
from actordbg.capture.facts import digests, states
from actordbg.formats.dump_record import RNG_PREFIX
from actordbg.replay.output_figures import against_golden
from actordbg.store import payload
from actordbg.store.layout import Store
from actordbg.store.payload import Dump


@dataclass
class Calls:
    """An Actor whose calls are recorded, and the generators' states around each of them."""

    actor: Any
    recording: Any
    names: list[str] = field(default_factory=list)
    before: list[dict[str, Any]] = field(default_factory=list)
    after: list[dict[str, str]] = field(default_factory=list)

    def call(self, name, *, training, grad, checkpointing=False, masked=True):
        """One call as a trainer makes it; with gradients also its backward, which draws from the generators, too."""
        self.actor.train(training)
        if checkpointing:
            self.actor.gradient_checkpointing_enable()
        device = next(self.actor.parameters()).device
        tensors = {key: tensor.to(device) for key, tensor in make_dump(len(self.names), vocab=1000).tensors.items()}
        self.names.append(name)
        self.before.append(states(device))
        with torch.set_grad_enabled(grad):
            result = self.recording.forward(
                self.actor, tensors["sequences"], tensors["action_mask"] if masked else None,
                attention_mask=tensors["attention_mask"], return_output=True, return_logprobs=True, return_entropy=True,
            )  # fmt: skip
        self.after.append(digests(states(device)))
        if grad:
            result[0].sum().backward()
            self.actor.zero_grad(set_to_none=True)
        if checkpointing:
            self.actor.gradient_checkpointing_disable()

    def with_states(self):
        """Everything that was recorded, by name, with the states."""
        found = {}
        for name, dump, before, after in zip(self.names, self.recording.dumps(), self.before, self.after, strict=True):
            restorable = {RNG_PREFIX + device: state for device, state in before.items()}
            found[name] = Dump(replace(dump.record, rng=after), dump.tensors | restorable)
        return found


def dropout(cache):
    """A store under `cache` with calls on a GPT-2 that drops activations: in training, checkpointed, without gradients, evaluated.

    Of the first there are copies: without the states; with the states of another moment; with entropies 0.25 too high; with
    states that are none.
    """
    calls = _open(cache, _gpt2(cache / "gpt2"))
    calls.call("training", training=True, grad=True)
    calls.call("checkpointed", training=True, grad=True, checkpointing=True)
    calls.call("no gradients", training=True, grad=False, masked=False)
    calls.call("evaluated", training=False, grad=False)
    dumps = calls.with_states()
    first, cpu = dumps["training"], RNG_PREFIX + "cpu"
    tensors = first.tensors
    copies = {
        "without states": {name: tensor for name, tensor in tensors.items() if name != cpu},
        "other states": tensors | {cpu: dumps["checkpointed"].tensors[cpu]},
        "other entropies": tensors | {"output.entropy": tensors["output.entropy"] + 0.25},
        "no states": tensors | {cpu: torch.zeros(7, dtype=torch.uint8)},
    }
    store = Store(cache / "store").create()
    ids = {name: _publish(store, dump.record, dump.tensors) for name, dump in dumps.items()}
    for number, (name, changed) in enumerate(copies.items()):
        record = replace(first.record, dump_id=f"{first.record.dump_id[:-8]}{number:08x}")
        ids[name] = _publish(store, record, changed)
    drawn = [after != digests(before) for before, after in zip(calls.before, calls.after, strict=True)]
    return {"model": str(cache / "gpt2"), "ids": ids, "drawn": drawn}


def sessions(cache):
    """Replay a Llama that drops attention weights, padded and packed, in this process: as recorded, and with a seed."""
    model, kinds = _llama(cache), ("cpu", "cuda:0") if torch.cuda.is_available() else ("cpu",)
    for packed in (False, True):
        calls = _open(cache / f"packed {packed}", model, packing_samples=packed)
        calls.call("training", training=True, grad=True)
        calls.call("checkpointed", training=True, grad=True, checkpointing=True)
        for dump in calls.with_states().values():
            restored, (fields, not_compared) = _replayed(model, cache, dump)
            assert restored == kinds and not_compared == {}
            assert (fields["golden_max_abs"], fields["golden_entropy_max_abs"], fields["rng_match"]) == (0.0, 0.0, True)
            restored, (fields, _) = _replayed(model, cache, dump, seed=0)
            assert restored == () and fields["golden_max_abs"] > 0.1


def _replayed(model, cache, dump, **config):
    with opened(cache, model, attn="sdpa", **config, defaults=dump.record) as session:
        outcome = session.run(dump, backward=session.backward_for(dump.record))
        return outcome.randomness.restored, against_golden(dump, outcome, own_model=True)


def _open(cache, model, **arguments):
    from actordbg.trainers.openrlhf.cpu import allow_fp32_actor, install_cpu_support, stand_in_for_flash_attn

    if not install_cpu_support():
        allow_fp32_actor()
        stand_in_for_flash_attn()
    from openrlhf.models import Actor

    actor = Actor(str(model), attn_implementation="sdpa", param_dtype="fp32", **arguments)
    actor.to("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(4711)
    return Calls(actor, Recording(Store(cache / "recorded").create(), with_outputs=True))


def _gpt2(path):
    """A random GPT-2 with dropout after its embeddings, in its attention and in its residual stream."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
    GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)).save_pretrained(path)
    return path


def _llama(cache):
    """The embedded tiny model with dropout in its attention."""
    path = cache / "llama"
    path.mkdir(parents=True)
    tiny = ensure_tiny(cache)
    (path / "model.safetensors").symlink_to(tiny / "model.safetensors")
    config = json.loads((tiny / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.3}))
    return path


def _publish(store, record, tensors):
    store.publish_dump(*payload.encode(record, tensors))
    return str(record.dump_id)


if __name__ == "__main__":
    main(sys.argv[1:], globals())
