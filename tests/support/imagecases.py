"""Tiny random models with images, a call of OpenRLHF's Actor with them that was recorded, and six faults in its path.

python imagecases.py judged MODEL_CACHE       in a process of its own; the asserts are here
"""

import os

import pytest
import torch
from actorcases import apart, main, opened
from adaptercases import dumps_of, record_here
from amounts import first_or_all
from lawcases import at_the_rerun, laws_of_a_call

from actordbg.actor.family_models import SMALL
from actordbg.actor.models import once
from actordbg.base.errors import Unsupported
from actordbg.records.finding import BROKEN
from actordbg.store.layout import Store
from actordbg.store.payload import Dump

IMAGE = 99
_IDS = {"image_token_id": IMAGE, "video_token_id": 98, "vision_start_token_id": 97, "vision_end_token_id": 96}
_GRIDS = torch.tensor([[1, 4, 2], [1, 4, 4], [1, 2, 4]])
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
_WINDOWS = {"sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}
_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
CONFIGS = {
    "qwen2_vl": _IDS | {"text_config": SMALL | _ROPE, "vision_config": _TOWER | {"embed_dim": 32, "mlp_ratio": 2}},
    "qwen3_vl": _IDS
    | {
        "text_config": SMALL | _ROPE,
        "vision_config": _TOWER
        | {"intermediate_size": 64, "out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    },
    "gemma3": {
        "text_config": SMALL | _WINDOWS,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
            "patch_size": 4,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
    },
}  # fmt: skip


def model_of(cache, kind):
    def build(folder):
        from transformers import AutoConfig, AutoModelForImageTextToText

        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]))
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, 0, 0.2)
        model.save_pretrained(folder)

    return str(once(cache / kind, build))


def call_of(kind):
    """Three rows, padded on both sides: one image in the first, none in the second, two in the last."""
    chance = torch.Generator().manual_seed(0)
    ids, real = torch.randint(3, 90, (3, 24), generator=chance), torch.ones(3, 24, dtype=torch.int64)
    real[0, :5] = real[1, -3:] = 0
    sizes = [4, 4, 4] if kind == "gemma3" else [2, 4, 2]
    for (row, column), size in zip(((0, 8), (2, 3), (2, 10)), sizes, strict=True):
        ids[row, column : column + size] = IMAGE
    if kind == "gemma3":
        shown = {"pixel_values": torch.randn(3, 3, 16, 16, generator=chance)}
    else:
        shown = {"pixel_values": torch.randn(32, 96, generator=chance), "image_grid_thw": _GRIDS}
    return {"sequences": ids, "action_mask": real[:, -8:].bool(), "attention_mask": real, **shown}


def _given(change):
    """A fault of the trainer's own path: its Actor changes what it is called with."""

    def plant(session):
        def before(_actor, args, kwargs):
            return args, kwargs | change(kwargs)

        return session.actor.register_forward_pre_hook(before, with_kwargs=True).remove

    return plant


def _turned(given):
    return {"image_grid_thw": given["image_grid_thw"][:, [0, 2, 1]]}


def _swapped(given):
    """Exchange the first row's image with the last row's of its size."""
    pixels = given["pixel_values"]
    return {"pixel_values": pixels.flip(0) if len(pixels) == 3 else torch.cat((pixels[24:], pixels[8:24], pixels[:8]))}


def _flat(session):
    session.actor.is_vlm = False
    return lambda: setattr(session.actor, "is_vlm", True)


def _tower(session):
    tower = next(module for name, module in session.model.named_modules() if name.endswith(("visual", "vision_tower")))
    dtype = next(tower.parameters()).dtype
    tower.to(torch.bfloat16 if dtype is torch.float32 else torch.float16)

    def cast(_module, _args, output):
        for name, value in output.items():
            output[name] = value.to(dtype) if isinstance(value, torch.Tensor) else value
        return output

    handle = tower.register_forward_hook(cast)
    return lambda: (handle.remove(), tower.to(dtype))  # type: ignore[return-value]


FAULTS = {
    "scaled": (_given(lambda given: {"pixel_values": given["pixel_values"] * 0.5}), "pixel_values reach the model times 0.5"),
    "turned": (_given(_turned), "height and width exchanged"),
    "swapped": (_given(_swapped), "image 0, of row 0, reaches the model as image 2, of row 2"),
    "flat": (_flat, "positions are one-dimensional"),
    "tower": (_tower, "the vision tower is in "),
}
"""The plant, and what the law says."""


def recorded(cache, kind, dtype):
    """The call through OpenRLHF's own Actor, recorded with its outputs by the hook."""
    from actordbg.capture import hook
    from actordbg.trainers.trainer import TRAINER

    TRAINER.prepare_process()
    os.environ["ACTORDBG_DISABLE"] = ""  # sessions set it
    store = Store(cache / f"store-{kind}-{dtype}").create()
    record_here(store)
    from openrlhf.models.actor import Actor

    forward = Actor.forward
    hook.install(Actor, store=str(store.root))
    try:
        actor, call = Actor(model_of(cache, kind), attn_implementation="sdpa", param_dtype=dtype), call_of(kind)
        with torch.no_grad():
            actor(call.pop("sequences"), call.pop("action_mask"), **call)
    finally:
        Actor.forward = forward
    return dumps_of(store)[0]


CELLS = (
    ("qwen2_vl", "bf16"), ("qwen3_vl", "fp32"), ("gemma3", "bf16"), ("qwen2_vl", "fp32"), ("qwen3_vl", "bf16"), ("gemma3", "fp32"),
)  # fmt: skip
LIMITS = {"fp32": 2e-5, "bf16": 0.1}


def judged(cache):
    """Healthy calls are recorded whole, replayed bit for bit, right and lawful; each fault is named."""
    for kind, dtype in first_or_all(CELLS, 3):
        limit = LIMITS[dtype]
        dump = recorded(cache, kind, dtype)
        assert dump.record.replayable and {*call_of(kind)} == {*dump.inputs}
        settings = {"model": model_of(cache, kind), "dtype": dtype, "backend": "plain"}
        with opened(cache, **settings, truth="fp32", defaults=dump.record) as truths:
            truth = truths.run(dump, backward=False)
        for through in ("rows", "trainer"):
            with opened(cache, **settings, attn="sdpa", through=through, defaults=dump.record) as session:
                outcome = session.run(dump, backward=False)
                assert torch.equal(outcome.log_probs, dump.outputs["action_log_probs"]), (kind, dtype, through)
                assert 0 < apart(outcome, truth) < limit, (kind, dtype, through)
                laws = laws_of_a_call(session, dump, outcome)
                assert laws["images"].verdict == "kept" and laws["neighbour"].verdict == "kept", laws
                assert not any(answer.raised or answer.verdict == BROKEN for answer in laws.values()), laws
                if through == "trainer":
                    _faulted(session, kind, dump, truth)
    return "done"


def _faulted(session, kind, dump, truth):
    for fault, (plant, said) in FAULTS.items():
        if fault == "turned" and kind == "gemma3":  # it has no grids
            continue
        undo = plant(session)
        outcome = session.run(dump, backward=False)
        answer = at_the_rerun(session, dump, outcome)["images"]
        undo()
        if (kind, fault) == ("gemma3", "flat"):  # its positions have one dimension anyway
            said = "called without token_type_ids"
        assert answer.verdict == BROKEN and said in answer.words, (kind, fault, answer)
        assert apart(outcome, truth) > 1e-3, (kind, fault)
    ids = dump.tensors["sequences"].clone()  # a token of an image too few in one row, one too many in another
    ids[0, 8], ids[1, 4] = 5, IMAGE
    moved = Dump(dump.record, dump.tensors | {"sequences": ids})
    if kind == "gemma3":  # runs: every image has its number of features, whichever rows they are in
        assert "row 0 has 3 image tokens" in laws_of_a_call(session, moved, session.run(moved, backward=False))["images"].words
    else:
        with pytest.raises(Unsupported, match="row 0 has 1 image tokens, and its images make 2"):
            session.run(moved, backward=False)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:], globals())
