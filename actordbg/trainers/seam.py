"""What an adapter says about a trainer: where its policy's forward is, and how a call of it is read as rows.

An adapter is a class with four attributes; this is all of one, for a trainer whose function returns log-probs of completions:

    class MyTrainer:
        name = "mine"                                  # what `run --adapter` is given
        package = "my_trainer"                         # the distribution whose versions count
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

`rows` gets the arguments by name, defaults filled in, `self` and `**kwargs` among them. It runs in the training thread before
the function: views of tensors, no copies, and nothing that waits for a GPU. It returns None for a call that is not a policy's
forward, and raises Unreadable, with the reason, for one whose rows it cannot tell. Then, as after any other exception, the
function runs unrecorded.

Loaded in training processes and by the desk: the standard library only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch


class Unreadable(Exception):
    """A call whose rows this adapter cannot tell; the message says why."""


class NoPolicy(Exception):
    """A call of a model that is not a policy, such as a reward model: the message, said once, names it. It is not a lost call."""


@dataclass
class Rows:
    """One call as rows of tokens. model: the module that computes; it is never stored.

    sequences: token ids [B, S]. attention_mask: [B, S], which are real; None for all. action_mask: [B, A], which of the last A
    next tokens count; None for all that are real. entropy: the call computes entropies, too. more: what the model gets beside
    them (images), by name. context: what else to keep of the call, by name; a replay does without. Both may hold dicts, lists,
    dataclasses and the like (`actordbg.formats.nested_values`). Columns that are not real may be on either side.

    Packed rows are one long row [1, T] or [T]: give offsets ([rows + 1]), or positions, which begin anew at 0 with each row;
    several such rows [B, S] have positions of their shape, and may have a mask.
    Jagged tensors bring their own offsets. Then `action_mask` is [1, T-1], or says of each token [1, T] whether it counts; of
    several rows it is [B, A] or [B, S]. The writer takes the rows apart: nothing of a device is asked for here.
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
        """Whether the rows lie one behind the other in one."""
        return self.offsets is not None or self.positions is not None or self.sequences.is_nested


@dataclass(frozen=True)
class Scores:
    """What the function returned, None for nothing: log-probs and entropies, [B, A] as `action_mask`, [B, S-1] without one.

    Of packed rows [1, T-1], of several [B, S-1], or with one for each token, [1, T] or jagged, of which the last means nothing.

    logits: [B, S, V] where it returned those alone; log-probs are computed from them, when outputs are recorded.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    logits: torch.Tensor | None = None


def padded(jagged: torch.Tensor, size: tuple[int, ...] | None = None) -> torch.Tensor:
    """Rows one behind the other (nested, with offsets) as [B, S], 0 behind each. On a GPU it waits, if no size is given."""
    import torch

    size = size or (jagged.shape[0], int(jagged.offsets().diff().max()))  # type: ignore[attr-defined]
    made: torch.Tensor = torch.nested.to_padded_tensor(jagged, 0, size)  # type: ignore[no-untyped-call]
    return made


IMAGES = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
"""What transformers calls the inputs that come with images."""


def images(call: Mapping[str, Any]) -> dict[str, Any]:
    """What a call has of images."""
    return {name: call[name] for name in IMAGES if call.get(name) is not None}


@dataclass(frozen=True)
class Seam:
    """One function of a trainer. needs: names of arguments that `rows` reads; without one of them nothing is recorded.

    makes_model: the function does not compute, but prepares a model, its argument of this name. That model's `forward` is then
    what is recorded, if it has the arguments `takes`; `rows` gets those of both.

    silent: calls inside of the function are not recorded, nor is it; `rows` returns None.

    again: calls the function once more in a replay, with a model and rows that were recorded, and returns what it returns
    (`actordbg.trainers.captured_call` helps). None: that cannot be done, and a replay is on the rows.
    """

    where: str
    rows: Callable[[Mapping[str, Any]], Rows | None]
    result: Callable[[Any], Scores] = lambda output: Scores()  # for a function that returns no log-probs
    needs: tuple[str, ...] = ()
    makes_model: str = ""
    takes: tuple[str, ...] = ()
    silent: bool = False
    again: Callable[[Any, Rows], Any] | None = None

    def differs(self, takes: Iterable[str]) -> str:
        """What the adapter reads and a function with these parameters does not take, in words; "" if it takes all."""
        given = [name for name in takes if name != "self"]
        lacks = [need for need in self.needs if need not in given]
        return f"it takes no {', '.join(lacks)}; it takes {', '.join(given) or 'nothing'}" if lacks else ""

    @property
    def module(self) -> str:
        """The module that holds the function."""
        return self.where.partition(":")[0]

    @property
    def function(self) -> str:
        """Its name in the module: `function` or `Class.method`."""
        return self.where.partition(":")[2]


class Adapter(Protocol):
    """What an adapter has. tried: versions of `package` that were recorded and replayed."""

    name: ClassVar[str]
    package: ClassVar[str]
    tried: ClassVar[tuple[str, ...]]
    seams: ClassVar[tuple[Seam, ...]]


_trainers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _note_trainer(call: Mapping[str, Any]) -> None:
    from actordbg.capture.facts import unwrap  # the desk loads this module, too

    trainer = call["self"]
    for model in map(unwrap, (call["model"], getattr(trainer, "ref_model", None) or call["model"])):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft's model
        _trainers[model] = _trainers[inner] = weakref.ref(trainer)


TRAINER_STEP = Seam(where="transformers.trainer:Trainer.training_step", needs=("model",), rows=_note_trainer)


def step_of(model: Any) -> int | None:
    """The step of the Trainer that trains this model, or has it as its reference; None outside of any."""
    trainer = _trainers.get(model, lambda: None)()
    return None if trainer is None else trainer.state.global_step


def own_positions(ids: Any, positions: Any) -> Any:
    """Return the positions [B, S], which may tell packed rows apart: those [1, S] are every row's. None for others."""
    return positions.expand(ids.shape) if positions is not None and positions.shape in (ids.shape, (1, *ids.shape[1:])) else None
