"""A store that records the calls of this process, for tests of adapters."""

import json

import torch

from actordbg.capture import hook
from actordbg.store import payload

IDS = torch.tensor([[0, 0, 5, 9, 11, 2], [7, 3, 8, 4, 1, 6]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])


def record_here(store, **control):
    """Switch recording on in this store; its folder."""
    switch = {"format": 2, "enabled": True, "generation": 1, "run": "r", "since": "2026-11-20T12:00:00.000000Z"}
    (store.root / "control.json").write_text(json.dumps(switch | {"with_outputs": True, "free_floor_bytes": 0} | control))
    return str(store.root)


def dumps_of(store):
    """What was recorded into this store by this process."""
    slot = hook._slots.pop(str(store.root.resolve()), None) or hook._slots.pop(str(store.root))
    assert slot.recorder.close()
    return [payload.load(path) for path in sorted(store.iter_dumps())]


def truth_of(model, dump):
    """The log-probs of a dump by the truth of this model."""
    from actordbg.actor.truth_session import TruthSession
    from actordbg.config.replay_config import ReplayConfig

    session = TruthSession(ReplayConfig(model=str(model), truth="fp64"), dump.record, model.parent / "cache")
    truth = session.run(dump, backward=False).log_probs
    session.close()
    return truth


def small_model(folder):
    """A Llama of 16 tokens, saved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, initializer_range=0.4, **sizes))
    model.save_pretrained(folder)
    return model
