"""The adapter interface: where a trainer's policy forward is, and how to read its calls as rows.

An adapter is a class with four attributes; here is a complete one, for a trainer whose function returns log-probs of completions:

    class MyTrainer:
        name = "mine"                                  # for `run --adapter`
        package = "my_trainer"                         # its distribution, for versions
        tried = ("1.2.0",)
        seams = (
            Seam(
                where="my_trainer.loop:Loop.score",    # module:function, or module:Class.method
                needs=("model", "ids", "mask", "keep"),
                rows=lambda call: Rows(
                    model=call["model"], sequences=call["ids"], attention_mask=call["mask"],
                    action_mask=call["mask"][:, -call["keep"]:], temperature=call["self"].temperature,
                ),
                result=lambda output: Scores(output[0], output[1]),
            ),
        )

`rows` gets the arguments by name, with defaults, including `self` and `**kwargs`. It runs in the training thread before the
function: it returns views of tensors, not copies, and never waits for a GPU. It returns None for a call that is not a policy's
forward, and raises Unreadable, with the reason, for a call whose rows it cannot read. Then, as after any other exception, the
function runs unrecorded.

Loaded in training processes and by the desk: the standard library only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

Arguments: TypeAlias = Mapping[str, Any]
"""The arguments of a call by name."""


class Unreadable(Exception):
    """A call whose rows this adapter cannot read; the message says why."""


class NoPolicy(Exception):
    """A call of a model that is not a policy, such as a reward model. The message names it; the call does not count as lost."""


@dataclass
class Rows:
    """A call as rows of tokens.

    model: the module that computes; it is never stored. sequences: token ids [B, S]. attention_mask: [B, S], the real tokens;
    None if all are real. action_mask: [B, A], which of the last A next tokens count; None for all real ones. entropy: the call
    also computes entropies. more: other inputs of the model (images), by name. context: other facts to store, by name; a replay
    does not need them. Both may hold dicts, lists, dataclasses and the like (`actordbg.formats.nested_values`). Padding may be on
    either side.

    Packed rows are one long row [1, T] or [T]: give offsets ([rows + 1]), or positions, which restart at 0 with each row;
    several such rows [B, S] have positions of their shape, and may have a mask.
    Jagged tensors have their own offsets. Then `action_mask` is [1, T-1], or [1, T] with a value for each token; for several rows
    it is [B, A] or [B, S]. The writer separates the rows: nothing here reads a device.
    """

    model: torch.nn.Module
    sequences: torch.Tensor
    attention_mask: torch.Tensor | None = None
    action_mask: torch.Tensor | None = None
    temperature: float = 1.0
    entropy: bool = False
    step: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    offsets: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    @property
    def packed(self) -> bool:
        """Check whether several rows are packed into one."""
        return self.offsets is not None or self.positions is not None or self.sequences.is_nested


@dataclass(frozen=True)
class Scores:
    """The function's result: log-probs and entropies, [B, A] like `action_mask`, [B, S-1] without a mask; None if not returned.

    For packed rows [1, T-1], for several [B, S-1]; or a value for each token, [1, T] or jagged, of which the last is ignored.
    Or a list of the values of each row's counted tokens.

    logits: [B, S, V] if it returned only those; log-probs are computed from them when outputs are recorded.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@dataclass(frozen=True)
class LossCall:
    """A loss, by the names of PolicyLoss. log_probs and other tensors: [B, A] like `action_mask`. loss: what backward gets.

    facts: its plain attributes, where they mean what those of PolicyLoss mean; another `policy_loss_type` is not recomputed.
    `loss_agg_mode`, by verl's names, says what the losses of a step add up to. weights: factors of the terms, [B, A] or [B, 1].
    settings: of the run, by the names that they have in records (`rollout.temperature`, `multi_turn`, `eos_token_id`).
    own: numbers and tensors of this call, by the names that they have in records (`lr`, `base_action_log_probs`).
    sequences, attention_mask: the rows of the log-probs, [B, S], where they are not those of the forward.
    """

    log_probs: torch.Tensor
    action_mask: torch.Tensor
    advantages: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    dp_size: Any = None
    batch_num_tokens: Any = None
    global_batch_size: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    weights: torch.Tensor | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    sequences: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments behind `log_probs`, by name."""
        others = ("log_probs", "loss", "facts", "weights", "settings", "own", "sequences", "attention_mask")
        return {name: value for name, value in vars(self).items() if name not in others}


def padded(jagged: torch.Tensor, size: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pad jagged rows (nested, with offsets) on the right with 0, to [B, S]. Without `size`, it synchronizes with the GPU."""
    import torch

    size = size or (jagged.shape[0], int(jagged.offsets().diff().max()))  # type: ignore[attr-defined]
    made: torch.Tensor = torch.nested.to_padded_tensor(jagged, 0, size)  # type: ignore[no-untyped-call]
    return made


def real_tokens(lengths: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mask [B, S] of right-padded rows of these lengths, [B]; it waits for no device."""
    import torch

    return torch.arange(ids.shape[1], device=lengths.device) < lengths[:, None]


IMAGES = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
"""Names in transformers of the inputs that come with images."""


def images(call: Arguments) -> dict[str, Any]:
    """Return the image inputs of a call."""
    return {name: call[name] for name in IMAGES if call.get(name) is not None}


@dataclass(frozen=True)
class Seam:
    """A function of a trainer. needs: names of arguments that `rows` reads; if any is missing, nothing is recorded.

    makes_model: the function does not compute, but prepares a model, its argument of this name. Then that model's `forward` is
    recorded, if it has the arguments `takes`; `rows` gets the arguments of both.

    silent: neither the function nor calls inside it are recorded; `rows` returns None.

    loss: the function computes a loss, and its calls are recorded as such with `dump enable --calls forward,loss`: gets the
    arguments and, as `rows`, those of the recorded forward by an Actor's names; that forward's log-probs (None if the function is
    inside it); and the result. The seam's own `rows` is unused.

    around: the function runs a forward and then its loss, whose seams also get its arguments, as `around`; `rows` is unused.

    kept: the loss is neither inside of the function nor in one around it, but the next that is computed.

    steps: the function is the optimizer step; gets the arguments, and returns what steps, for `updates_of`, or None if it did not
    step. Its argument `grad_norm` is the norm of the gradient; or its result, if it is a number, or has it: as `grad_norm`, or
    last in a tuple.

    backward: the function, a method, gets the loss with all its terms, `loss`, as its first argument.

    again: repeats the function in a replay, with a model and recorded rows, and returns its result
    (`actordbg.trainers.captured_call` helps). None: not supported, and calls are replayed through rows. shards: so it does with a
    model that FSDP2 shards.
    """

    where: str
    rows: Callable[[Arguments], Rows | None]
    result: Callable[[Any], Scores] = lambda output: Scores()  # for a function that returns no log-probs
    needs: tuple[str, ...] = ()
    makes_model: str = ""
    takes: tuple[str, ...] = ()
    silent: bool = False
    again: Callable[[Any, Rows], Any] | None = None
    loss: Callable[[Arguments, torch.Tensor | None, Any], LossCall | None] | None = None
    steps: Callable[[Arguments], Any] | None = None
    around: bool = False
    backward: bool = False
    kept: bool = False
    shards: bool = False

    def differs(self, takes: Iterable[str]) -> str:
        """Return which arguments the adapter needs that a function with these parameters lacks, in words; "" if none."""
        given = [name for name in takes if name != "self"]
        lacks = [need for need in self.needs if need not in given]
        takes = given or ["nothing"]
        return f"it takes no {', '.join(lacks)}; it takes {', '.join(takes)}" if lacks else ""

    @property
    def module(self) -> str:
        """Return the module that holds the function."""
        return self.where.partition(":")[0]

    @property
    def function(self) -> str:
        """Return the function's name in its module: `function` or `Class.method`."""
        return self.where.partition(":")[2]


def no_rows(call: Arguments) -> None:
    """Return None: the function is not a forward."""


class Adapter(Protocol):
    """The members of an adapter. tried: versions of `package` that were recorded and replayed."""

    name: ClassVar[str]
    package: ClassVar[str]
    tried: ClassVar[tuple[str, ...]]
    seams: ClassVar[tuple[Seam, ...]]


_trainers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _note_trainer(call: Arguments) -> None:
    from actordbg.capture.facts import unwrap  # the desk also loads this module

    trainer = call["self"]
    for model in map(unwrap, (call["model"], getattr(trainer, "ref_model", None) or call["model"])):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft's model
        _trainers[model] = _trainers[inner] = weakref.ref(trainer)


_updates: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def updates_of(holder: Any) -> int:
    """Return how many optimizer steps this process has run of an object that a seam's `steps` returned."""
    return _updates.get(holder, 0)


def note_update(holder: Any) -> None:
    """Count an optimizer step."""
    _updates[holder] = updates_of(holder) + 1


TRAINER_STEP = Seam(where="transformers.trainer:Trainer.training_step", needs=("model",), rows=_note_trainer)


def trainer_of(model: Any) -> Any:
    """Return the Trainer that trains this model, or uses it as its reference; None without one."""
    return _trainers.get(model, lambda: None)()


def step_of(model: Any) -> int | None:
    """Return the step of the Trainer of this model; None without one."""
    trainer = trainer_of(model)
    return None if trainer is None else trainer.state.global_step


def own_positions(ids: Any, positions: Any) -> Any:
    """Return positions as [B, S], expanding [1, S]; they may separate packed rows. None for other shapes."""
    return positions.expand(ids.shape) if positions is not None and positions.shape in (ids.shape, (1, *ids.shape[1:])) else None
