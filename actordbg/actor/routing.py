"""Run a mixture of experts with the experts that were recorded: those of the rollout, which a trainer replays ("R3").

A router computes scores, chooses the `k` largest of each token by `torch.topk`, and makes gates of their scores. Only the choice
is replaced, inside of that call: the model's own code continues with the scores of other experts, so it renormalizes, scales and
backpropagates gates as it always does. Whether the experts then get the recorded ids is looked at in each layer; a router that
chooses in another way is refused, and never half replaced.

    with routed(model, chosen, force=True) as seen:     # chosen: int64 [T, L, K], -1 where nothing was recorded
        model(...)                                      # of T positions
    seen.overlap                                        # [0.94, 0.91]: in each layer, the share that the router chooses too

Recorded experts are `context.routed_experts`, [B, S, L, K] integers. L counts the decoder layers, or those with experts. A token
whose ids are negative or repeat has none, as the last of a row and padding, and is routed freely.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from actordbg.actor.forward_outcome import ForwardOutcome
from actordbg.base.errors import Unsupported
from actordbg.formats.nested_values import CONTEXT

EXPERTS = f"{CONTEXT}routed_experts"
FREE, RECORDED = "free", "recorded"
_FREELY = "pass --routing free"


def as_recorded(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the recorded experts of a call as they are, [B, S, L, K]; None without any, or in another shape."""
    experts = tensors.get(EXPERTS)
    fits = experts is not None and experts.dim() == 4 and experts.shape[:2] == tensors["sequences"].shape
    return experts if fits else None


def experts_of(tensors: Mapping[str, Tensor], *, free: bool = False) -> Tensor | None:
    """Return the recorded experts of a call, int64 [B, S, L, K], -1 where a token has none; None without any.

    Raises Unsupported for another shape, unless the router is `free`.
    """
    experts = as_recorded(tensors)
    if experts is None:
        if EXPERTS in tensors and not free:
            given, rows = list(tensors[EXPERTS].shape), list(tensors["sequences"].shape)
            raise Unsupported(f"the recorded experts are {given}, not [B, S, layers, k] of sequences {rows}", hint=_FREELY)
        return None
    experts = experts.long()
    ordered = experts.sort(-1).values
    missing = (experts < 0).any(-1) | (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    return experts.masked_fill(missing[..., None], -1)


def at_places(experts: Tensor, places: Tensor, real: Tensor) -> Tensor:
    """Return the experts [T, L, K] of places (row, column) [T, 2]; -1 at fillers and where `real`, bool [B, S], is not set."""
    rows, columns = places.unbind(1)
    known = (rows >= 0) & real[rows, columns]
    return experts[rows, columns].masked_fill(~known[:, None, None], -1)


class Seen:
    """What the routers did in a block. free: the experts that each chose, [T, K], by layer. gates: the sum of each token's gates.

    same, of: in each layer, how many recorded experts it chose itself, of how many.
    """

    def __init__(self) -> None:
        self.free: dict[int, Tensor] = {}
        self.gates: dict[int, Tensor] = {}
        self.same: dict[int, int] = {}
        self.of: dict[int, int] = {}

    @property
    def overlap(self) -> list[float]:
        """The share of the recorded experts that the router chooses too, by layer."""
        return [self.same[layer] / self.of[layer] for layer in sorted(self.of) if self.of[layer]]


def blocks_of(model: Any) -> dict[str, Any]:
    """Return the modules that route tokens to their child `experts`, by name, in the order of the layers."""
    return {
        name: block for name, block in model.named_modules() if type(getattr(block, "experts", None)).__name__.endswith("Experts")
    }


def layers_of(names: Sequence[str], recorded: int) -> list[int]:
    """Return which of the `recorded` layers each block is: by the number in its name, or in their order if there are as many."""
    numbers = [int(found[-1]) if (found := re.findall(r"\.(\d+)\.", name)) else -1 for name in names]
    if len(names) == recorded or not names:
        return [*range(len(names))]
    if max(numbers) >= recorded or min(numbers) < 0:
        raise Unsupported(f"experts of {recorded} layers were recorded, the model routes in {len(names)}", hint=_FREELY)
    return numbers


@contextlib.contextmanager
def routed(model: Any, chosen: Tensor, *, force: bool) -> Iterator[Seen]:
    """Look at the routers of `model` inside the block; with `force` they choose the experts `chosen`, int64 [T, L, K].

    Raises Unsupported, from inside the model, where they cannot be forced.
    """
    seen, blocks = Seen(), blocks_of(model)
    try:
        layers = layers_of([*blocks], chosen.shape[1])
    except Unsupported:
        if force:
            raise
        layers, blocks = [], {}
    with contextlib.ExitStack() as undone:
        for layer, (name, block) in zip(layers, blocks.items(), strict=True):
            choice = _Choice(layer, chosen[:, layer], force, seen)
            undone.callback(block.register_forward_pre_hook(choice.enter).remove)
            undone.callback(block.register_forward_hook(choice.leave, always_call=True).remove)
            undone.callback(block.experts.register_forward_pre_hook(choice.checked(name)).remove)
        yield seen


def note(outcome: ForwardOutcome, seen: Seen | None, *, free: bool) -> None:
    """Note in an outcome how its experts were chosen, and how many of the recorded ones the router chooses too."""
    if seen is None or not (shares := seen.overlap):
        return
    least = min(range(len(shares)), key=shares.__getitem__)
    how = "the router chose its experts" if free else "its experts are the recorded ones"
    whole = sum(seen.same.values()) / sum(seen.of.values())
    said = f"{how}: of these it chooses {whole:.1%} itself, at least {shares[least]:.1%}, in layer {least}"
    outcome.overlap, outcome.notes = shares, (*outcome.notes, said)


class _Choice(TorchFunctionMode):
    """Replaces what `topk` chooses in one layer's router."""

    def __init__(self, layer: int, chosen: Tensor, force: bool, seen: Seen) -> None:
        super().__init__()
        self._layer, self._chosen, self._force, self._seen = layer, chosen, force, seen
        self._known = (chosen >= 0).all(-1)

    def enter(self, _module: Any, _args: Any) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, _module: Any, _args: Any, _output: Any) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or result.indices.dim() != 2 or len(result.indices) != len(self._chosen):
            return result
        scores, free = args[0], result.indices
        chosen, known = self._chosen.to(free.device), self._known.to(free.device)
        if chosen.numel() and (last := int(chosen.max())) >= scores.shape[-1]:
            raise Unsupported(f"expert {last} was recorded, and a router has {scores.shape[-1]}", hint=_FREELY)
        self._seen.free[self._layer] = free.detach().cpu()
        same = (free[:, :, None] == chosen[:, None, :]).any(1)[known]
        self._seen.same[self._layer], self._seen.of[self._layer] = int(same.sum()), same.numel()
        if not self._force or chosen.shape[-1] != free.shape[-1]:
            return result
        wanted = torch.where(known[:, None], chosen, free)
        return torch.return_types.topk((scores.gather(-1, wanted), wanted))

    def checked(self, name: str) -> Callable[[Any, Any], None]:
        """Return the hook of the experts, which raises Unsupported if they get others than the recorded ones."""

        def check(_module: Any, args: Any) -> None:
            given = [value for value in args if isinstance(value, Tensor)]
            ids = next((value for value in given if not value.is_floating_point()), None)
            gates = [value for value in given if value.is_floating_point() and ids is not None and value.shape == ids.shape]
            if gates:
                whole = gates[0].detach().float().sum(-1)
                self._seen.gates[self._layer] = whole.cpu()
            known, wanted = self._known, self._chosen
            if self._force and bool(known.any()):
                got = None if ids is None else ids.reshape(len(ids), -1).cpu()
                if got is not None and got.shape[-1] != wanted.shape[-1]:
                    few, uses = wanted.shape[-1], got.shape[-1]
                    raise Unsupported(f"{few} experts of each token were recorded, and {name} uses {uses}", hint=_FREELY)
                if got is None or got.shape != wanted.shape or not torch.equal(got[known].long(), wanted[known]):
                    raise Unsupported(f"{name} does not take the recorded experts: its router chooses otherwise", hint=_FREELY)

        return check
