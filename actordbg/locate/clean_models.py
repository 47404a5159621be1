"""The models that a suspect is compared with, loaded by transformers alone, in the process of the suspect.

Two come from the same checkpoint: the *clean* model in the suspect's dtype and attention kernel, whose distance from the truth at
a place is what a healthy model costs there; and the *truth*, the same rounded weights computed in a wider dtype: fp32 for half
precision, fp64 for fp32 weights.

The suspect's process may be set up in ways that would change them: under ZeRO-3 transformers partitions whatever it loads, and
a truth turns TF32 off. Both are undone here when the block ends, so that the inputs that follow run as before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from actordbg.actor import truth_model
from actordbg.actor.models import locate
from actordbg.actor.session import ActorSession
from actordbg.config import consent
from actordbg.config.replay_config import DTYPES
from actordbg.trainers.rows_actor import model_class


def dtype_of(session: ActorSession) -> torch.dtype:
    """Return the dtype of the suspect's weights, which the checkpoint is rounded to."""
    dtype: torch.dtype = getattr(torch, DTYPES[session.choices.dtype])
    return dtype


@contextlib.contextmanager
def clean_model(session: ActorSession, device: torch.device) -> Iterator[Any]:
    """Load transformers' own model of the suspect's checkpoint in its dtype and attention kernel, in evaluation mode."""
    path, trust = _path_of(session), consent.is_given(session.config.model)
    with _unpartitioned():
        loads = model_class(path, trust).from_pretrained
        model = loads(path, trust_remote_code=trust, attn_implementation=session.choices.attn, torch_dtype=dtype_of(session))
    model.config.use_cache = False
    yield model.to(device).eval()


def bare_model(session: ActorSession) -> Any:
    """Build transformers' own model of the suspect's checkpoint from its configuration, on the meta device, without weights."""
    from transformers import AutoConfig

    path, trust = _path_of(session), consent.is_given(session.config.model)
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    with _unpartitioned(), torch.device("meta"):
        build = model_class(path, trust).from_config
        model = build(config, trust_remote_code=trust, attn_implementation=session.choices.attn, torch_dtype=dtype_of(session))
    return model.eval()


@contextlib.contextmanager
def truth(session: ActorSession, device: torch.device) -> Iterator[Any]:
    """Load the truth's model, and compute exact products while the block lasts. Unsupported for a model with images."""
    narrow, trust = dtype_of(session), consent.is_given(session.config.model)
    wide = torch.float64 if narrow is torch.float32 else torch.float32
    with flags_restored(), _unpartitioned():
        model = truth_model.load(_path_of(session), weights=DTYPES[session.choices.dtype], dtype=wide, device=device, trust=trust)
        if hasattr(model, "set_experts_implementation"):  # grouped products have no fp64
            model.set_experts_implementation("eager")
        with truth_model.in_double(wide):
            yield model


def one_line(error: Exception) -> str:
    """Return an exception in a line: its class, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _path_of(session: ActorSession) -> str:
    return locate(session.choices.model, session.model_cache, num_layers=session.choices.num_layers)


@contextlib.contextmanager
def _unpartitioned() -> Iterator[None]:
    """Hide a ZeRO-3 configuration from transformers, which would partition the model while it is loaded."""
    module = sys.modules.get("transformers.integrations.deepspeed")
    held = getattr(module, "_hf_deepspeed_config_weak_ref", None)
    if module is not None:
        module._hf_deepspeed_config_weak_ref = None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if module is not None:
            module._hf_deepspeed_config_weak_ref = held  # type: ignore[attr-defined]


@contextlib.contextmanager
def flags_restored() -> Iterator[None]:
    """Restore what `truth_model.exact_products` changes in the process."""
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    cudnn = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = cudnn
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
