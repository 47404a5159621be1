"""The models that a suspect is compared with, loaded by transformers alone, in the process of the suspect.

Two come from the same checkpoint: the *clean* model in the suspect's dtype and attention kernel, whose distance from the truth at
a place is what a healthy model costs there; and the *truth*, the same rounded weights computed in a wider dtype: fp32 for half
precision, fp64 for fp32 weights.

The suspect's process may be set up in ways that would change them: under ZeRO-3 transformers partitions whatever it loads, and
a truth turns TF32 off. Both are undone here when the block ends, so that the inputs that follow run as before.

A model of more than WHOLE_BYTES is streamed: one decoder layer of it is in memory (`streaming`). What cannot be streamed, such
as a checkpoint without safetensors or with an adapter, is loaded whole, and says why.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actordbg.actor import truth_model
from actordbg.actor.forward_outcome import sample
from actordbg.actor.models import locate
from actordbg.actor.session import ActorSession
from actordbg.base.errors import EnvironmentProblem, Unsupported
from actordbg.base.units import first_line, human_bytes, listed, plural
from actordbg.config import consent
from actordbg.config.replay_config import DTYPES
from actordbg.locate.forced_forward import Hooks
from actordbg.locate.places import places_of
from actordbg.locate.streaming import Checkpoint, Streamed
from actordbg.trainers.rows_actor import model_class

WHOLE_BYTES = 64 * 2**20
"""A model of at most so many bytes is loaded whole: reading it again for each row would save no memory worth the time."""


def dtype_of(session: ActorSession) -> torch.dtype:
    """Return the dtype of the suspect's weights, which the checkpoint is rounded to."""
    dtype: torch.dtype = getattr(torch, DTYPES[session.choices.dtype])
    return dtype


@dataclass
class Loaded:
    """A model that is held against the suspect. streamed: it has one decoder layer in memory at a time; None: all of them.

    resident: bytes of its weights that are in memory at once. note: both in words, "" for a small model.
    """

    model: Any
    streamed: Streamed | None
    resident: int
    note: str

    def bring(self, name: str) -> None:
        """Make the tensors of a module's decoder layer real."""
        if self.streamed is not None:
            self.streamed.bring(name)

    def under(self, hooks: Hooks) -> AbstractContextManager[None]:
        """Hook the model's places."""
        return hooks.on(places_of(self.model)) if self.streamed is None else self.streamed.under(hooks)


@contextlib.contextmanager
def clean_model(session: ActorSession, device: torch.device) -> Iterator[Loaded]:
    """Load transformers' own model of the suspect's checkpoint in its dtype and attention kernel, in evaluation mode."""
    path, trust, dtype = _checkpoint_of(session)

    def whole() -> Any:
        attn = clean_attention(session)
        model = model_class(path, trust).from_pretrained(
            path, trust_remote_code=trust, attn_implementation=attn, torch_dtype=dtype
        )
        return model.to(device).eval()

    with _unpartitioned(), _loaded(session, device, None, whole) as loaded:
        loaded.model.config.use_cache = False
        yield loaded


def bare_model(session: ActorSession) -> Any:
    """Build transformers' own model of the suspect's checkpoint from its configuration, on the meta device, without weights."""
    path, trust, dtype = _checkpoint_of(session)
    with _unpartitioned():
        return truth_model.skeleton(model_class(path, trust), path, dtype, trust, session.choices.attn)


@contextlib.contextmanager
def truth(session: ActorSession, device: torch.device) -> Iterator[Loaded]:
    """Load the truth's model, and compute exact products while the block lasts."""
    path, trust, narrow = _checkpoint_of(session)
    wide = torch.float64 if narrow is torch.float32 else torch.float32

    def whole() -> Any:
        return truth_model.load(path, weights=DTYPES[session.choices.dtype], dtype=wide, device=device, trust=trust)

    with flags_restored(), _unpartitioned(), _loaded(session, device, wide, whole) as loaded:
        truth_model.exact_products()
        if hasattr(loaded.model, "set_experts_implementation"):  # grouped products have no fp64
            loaded.model.set_experts_implementation("eager")
        with truth_model.in_double(wide):
            yield loaded


@contextlib.contextmanager
def _loaded(session: ActorSession, device: torch.device, wide: torch.dtype | None, whole: Callable[[], Any]) -> Iterator[Loaded]:
    """Load a model of the suspect's checkpoint, rounded to its dtype, then in `wide`: streamed unless it is small."""
    path, trust, narrow = _checkpoint_of(session)
    auto = model_class(path, trust)
    size, note = int(session.resolved["parameters"]) * (wide or narrow).itemsize, ""
    loaded = None
    if size > WHOLE_BYTES:
        try:
            source = Checkpoint(path, truth_model.skeleton(auto, path, narrow, trust))
            resident = source.resident * (wide or narrow).itemsize
            _fits(resident, device)
            attn = "eager" if wide else clean_attention(session)
            model = truth_model.skeleton(auto, path, wide or narrow, trust, attn)
            layers = f"one of {plural(len(source.layers), 'decoder layer')} of the truth was in memory at a time"
            note = f"{layers} ({human_bytes(resident)} with embedding and head)"
            loaded = Loaded(model, Streamed(model, source, wide, device), resident, note)
        except Unsupported as problem:
            note = f"the truth lay whole in memory ({human_bytes(size)}): {problem.message}"
    if loaded is None:
        _fits(size, device)
        loaded = Loaded(whole(), None, size, note)
    try:
        yield loaded
    finally:
        if loaded.streamed is not None:
            loaded.streamed.close()


def _fits(size: int, device: torch.device) -> None:
    """Raise EnvironmentProblem if so many bytes of a model do not fit beside the suspect."""
    if (free := free_bytes(device)) is not None and size > free:
        raise EnvironmentProblem(
            f"the truth's model needs {human_bytes(size)}, {human_bytes(free)} are free",
            hint="free memory, or keep fewer layers with --num-layers",
        )


def one_line(error: Exception) -> str:
    """Return an exception in a line: its class, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def _checkpoint_of(session: ActorSession) -> tuple[str, bool, torch.dtype]:
    """Return where the suspect's checkpoint lies, whether its code may run, and the dtype of the suspect's weights."""
    path = locate(session.choices.model, session.model_cache, num_layers=session.choices.num_layers)
    return path, consent.is_given(session.config.model), dtype_of(session)


def clean_attention(session: ActorSession) -> str:
    """Return the attention kernel of the clean model: the suspect's if that is transformers' own, else eager."""
    return session.choices.attn if truth_model.is_own_attention(session.choices.attn) else "eager"


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


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that is free on the device, in bytes; None if the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    return None


def samples_of(model: Any, trained: set[str]) -> dict[str, Tensor]:
    """Train these parameters of a model and no others; return a dict that fills with samples of their gradients, float64.

    The places are those of `forward_outcome.sample`. Gradients of several backwards are added up; none is kept whole.
    """
    samples: dict[str, Tensor] = {}

    def take(parameter: Tensor, name: str) -> None:
        assert parameter.grad is not None
        samples[name] = samples.get(name, 0) + sample(parameter.grad).to("cpu", torch.float64)
        parameter.grad = None

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
        if name in trained:
            parameter.register_post_accumulate_grad_hook(partial(take, name=name))
    return samples


def without_gradient(own: Tensor, want: Tensor, shape: tuple[int, ...]) -> str:
    """Name the experts of a parameter [E, out, in] without a gradient where the truth has one; "" if there are none.

    own, want: samples of the gradient [n], of equal shares of every expert.
    """
    if len(shape) != 3:
        return ""
    expert = torch.arange(len(want)) * shape[0] // len(want)
    none = torch.zeros(shape[0], dtype=torch.float64)
    here, there = (none.index_add(0, expert, each.double().abs()) for each in (own, want))
    lost = ((here == 0) & (there > 0)).nonzero().flatten().tolist()
    if not lost or len(lost) == shape[0]:  # of all: the parameter as a whole is wrong, and no expert
        return ""
    noun = "expert" if len(lost) == 1 else "experts"
    return f"{noun} {listed(lost)}"
