"""Judge each module of a loaded model on its own, in one forward and one backward in which no error can travel.

In one forward of the suspect on a recorded input, the output of every module without children, of every decoder layer, and the
input of each, is replaced by the truth's, at the same tokens. So what a module adds is its own. Two things are held against
the truth before they are replaced:

    out    a module's output:        error(out)  = |suspect's output, given the truth's input - the truth's output|
    into   what came into a module:  error(into) = |what operations made of the truth's values - the truth's input|

`into` judges what lies *between* modules: attention, a gated product, a residual. The backward of that forward meets the same
places (`GradientTap`), and there the gradient is compared, and replaced by the truth's:

    back into   what a module gives back to its input, given the truth's output gradient
    back out    what comes back to a module's output: what the operations behind it made of the truth's gradients

Each error is divided by the same error of the clean model (`clean_models`) at the same place, forced in the same way:

    ratio = sqrt(sum over tokens of error^2 of the suspect / sum over tokens of error^2 of the clean model)

A healthy configuration has 1.00 everywhere, in any dtype: the floor is not an estimate. The truth is fp32 for bf16 and fp16
weights, fp64 for fp32. It runs each row alone, so its tensors are [1, n, ...] or [n, ...]; the suspect's are [B, S, ...], packed
[1, T, ...], or flattened [N, ...]. `index` says which of the truth's T tokens lies at each of its N positions (-1: padding).
Gradient checkpointing runs modules again in the backward: they get the same values, and nothing is judged twice.

Token ids and positions are compared exactly. A router's choice of experts, and its weights in any order, are judged at the router
and replaced: the experts get the truth's. Rounding changes a choice where two experts are equally good, so a tenth is free.

Example:
    with Recording(tape, 24).on(places_of(truth)): ...                # a forward of one row of 24 tokens
    with Forcing(tape, index, sums).on(places_of(suspect)): ...       # sums: error of each token, by place
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actordbg.locate.places import Key, Places, Sums, Tape, in_tokens
from actordbg.records.locate_record import BACK, INTO, OUT


class GradientTap(torch.autograd.Function):
    """Gives a tensor another value in the forward, and its gradient to `give` in the backward, which may replace it.

    own: the tensor that the gradient goes back to. before: the previous tap, whose backward then runs in any case, with
    zeros where no gradient reaches it. new: a tuple of the other value, or of None to leave it.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, before: Tensor | None, new: tuple[Tensor | None], give: Handler) -> Tensor:
        ctx.give = give
        return (own if new[0] is None else new[0]).clone()  # no view: the model may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        new = ctx.give(gradient)
        return gradient if new is None else new, None, None, None


Handler = Callable[[Tensor], Tensor | None]


class Hooks(ABC):
    """Hooks on the places of a model for one forward of `count` positions. Subclasses record, or compare and replace.

    graphs: places are seen where there is a graph only: a layer of a model that is streamed also runs without one.
    """

    forces = False

    def __init__(self, count: int, graphs: bool = False) -> None:
        self.count, self._graphs = count, graphs
        self._calls: Counter[str] = Counter()
        self._tapped_before: Tensor | None = None

    @abstractmethod
    def take(self, key: Key, flat: Tensor, module: Any) -> Tensor | None:
        """Handle the values [count, features...] at a place; return what replaces them, None to leave them."""

    def odd(self, key: Key) -> None:  # noqa: B027 - a hook that only records has nothing to do here
        """Handle a tensor whose tokens cannot be told."""

    def wants(self, key: Key, values: Tensor) -> bool:
        """Check whether the gradient of a place matters. values: those at the place."""
        return values.requires_grad

    def is_known(self, key: Key) -> bool:
        """Check whether this forward had the place before: a checkpointed layer runs again in the backward."""
        return False

    def keep(self, values: Tensor) -> Tensor:
        """Copy the input of a layer that is streamed to where it stays until the backward."""
        return values

    def gradients(self, layer: str, outputs: Sequence[Any]) -> list[Tensor]:
        """Return what the gradients of a layer's first outputs are replaced by, if `forces`."""
        raise NotImplementedError

    @contextlib.contextmanager
    def own_graph(self) -> Iterator[None]:
        """Keep the taps of a layer that is streamed apart from those around it: it has a backward of its own."""
        before, self._tapped_before = self._tapped_before, None
        yield
        self._tapped_before = before

    @contextlib.contextmanager
    def on(self, places: Places) -> Iterator[None]:
        """Hook the places while the block lasts. Inputs are seen before any other hook, outputs after all others."""
        with contextlib.ExitStack() as undone:
            for name, (module, kinds) in places.items():
                if INTO in kinds:
                    before = self._before(name, only_first=OUT not in kinds)
                    undone.callback(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
                if OUT in kinds:
                    undone.callback(module.register_forward_hook(self._after(name)).remove)
            undone.callback(setattr, self, "_tapped_before", None)  # its graph holds these hooks: nothing would ever free them
            yield

    def _before(self, name: str, only_first: bool) -> Callable[..., Any]:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            if self._graphs and not torch.is_grad_enabled():
                return None
            return self._each((args, kwargs), (name, INTO, self.call_of(name)), module, 1 if only_first else None)

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: Any, _args: Any, output: Any) -> Any:
            if self._graphs and not torch.is_grad_enabled():
                return None
            call = self.call_of(name)
            self._calls[name] += 1
            return self._each(output, (name, OUT, call), module)

        return hook

    def call_of(self, name: str) -> int:
        """Return which call of a module this is."""
        return self._calls[name]

    def _each(self, value: Any, of: tuple[str, str, int], module: Any, most: int | None = None) -> Any:
        seen = 0

        def visit(each: Any) -> Any:
            nonlocal seen
            if each is None and most is None:  # a mask, say, that only one of the models gets
                seen += 1
            if isinstance(each, Tensor):
                if seen == most:
                    return each
                key, seen = (*of, seen), seen + 1
                return self._tapped(each, key, module)
            if type(each) in (tuple, list):
                return type(each)(map(visit, each))
            return {name: visit(item) for name, item in each.items()} if type(each) is dict else each

        return visit(value)

    def _tapped(self, values: Tensor, key: Key, module: Any) -> Tensor:
        """Handle the values at a place, and arrange that their gradient is handled when it comes back."""
        again = self.is_known(key)
        new = self._handled(values, key, module)
        back = key[0], BACK[key[1]], key[2], key[3]
        tracked = new is not None and values.requires_grad  # such as embeddings of a frozen model, for gradient checkpointing
        if values.is_floating_point() and torch.is_grad_enabled() and (tracked or self.wants(back, values)):
            own = values if values.requires_grad else values.detach().requires_grad_()
            before = None if again else self._tapped_before
            give = partial(self._handled, key=back, module=module)
            self._tapped_before = GradientTap.apply(own, before, (new,), give)  # type: ignore[no-untyped-call]
            return self._tapped_before
        return values if new is None else new

    @torch.no_grad()
    def _handled(self, values: Tensor, key: Key, module: Any) -> Tensor | None:
        placed, turned = in_tokens(values, self.count, module)
        if placed is None:
            self.odd(key) if values.is_floating_point() else None
            return None
        new = self.take(key, placed.reshape(self.count, *placed.shape[2:]), module)
        if new is None:
            return None
        new = new.reshape(placed.shape)
        return (new.transpose(1, 2) if turned else new).reshape(values.shape)


_FREE_CHOICE = 0.1


class Recording(Hooks):
    """Records a row of the truth on a tape."""

    def __init__(self, tape: Tape, length: int, graphs: bool = False) -> None:
        super().__init__(length, graphs)
        self.tape = tape
        self._last: deque[tuple[Any, Tensor, Tensor]] = deque(maxlen=6)  # an output is often the input of the next modules
        tape.lengths.append(length)

    def take(self, key: Key, flat: Tensor, module: Any) -> None:
        memory = flat.data_ptr(), flat.shape, flat.stride(), flat.dtype, flat._version
        copy = next((copy for seen, _, copy in self._last if seen == memory), None)
        if copy is None:
            copy = self.tape.spill.copy(flat)
            self._last.append((memory, flat, copy))
        self.tape.values.setdefault(key, []).append(copy)

    def odd(self, key: Key) -> None:
        self.tape.strange.add(key[0])

    def keep(self, values: Tensor) -> Tensor:
        return self.tape.spill.copy(values)


class Forcing(Hooks):
    """Compares a model with a tape, and replaces its values by the tape's.

    index: int [count], the truth's token at each position, -1 for none. part: this rank's place among the ranks that split
    features, and their number. ring: how many ranks share the tokens; each of them has the whole loss, so gradients of values
    are as many times the truth's. sums: the errors, by place. wrong: the tokens whose integers differ, by place. unchecked: by
    module, why a place could not be judged.
    """

    forces = True

    def __init__(self, tape: Tape, index: Tensor, part: tuple[int, int] = (0, 1), ring: int = 1) -> None:
        super().__init__(len(index))
        self.tape, self.part, self.ring = tape, part, ring
        self.valid = (index >= 0).nonzero().flatten()
        self.tokens = index[self.valid]
        self.sums: dict[Key, Sums] = {}
        self._all = self.tokens.equal(torch.arange(sum(tape.lengths)))
        self._forced: set[Key] = set()
        self._known = Counter({key[0]: key[2] + 1 for key in sorted(tape.values, key=lambda key: key[2])})
        self.wrong: dict[Key, Tensor] = {}
        self.unchecked: dict[str, str] = {}
        self._shifted: set[str] = set()
        self._routers = {key[0] for key, rows in tape.values.items() if key[1] == OUT and not rows[0].is_floating_point()}

    def call_of(self, name: str) -> int:
        return self._calls[name] % max(1, self._known[name])  # a checkpointed layer runs again in the backward

    def wants(self, key: Key, values: Tensor) -> bool:
        return key in self.tape.values

    def is_known(self, key: Key) -> bool:
        return key in self._forced

    def odd(self, key: Key) -> None:
        if key in self.tape.values:
            self.unchecked.setdefault(key[0], "its tensors have another layout than the truth's")

    def take(self, key: Key, flat: Tensor, module: Any) -> Tensor | None:
        want = self._truths(key)
        if want is None:
            return None
        if flat.shape[1:] != want.shape[1:]:
            want = self._part_of(want, flat.shape)
        if want is None:
            self.unchecked.setdefault(key[0], f"its tensors are {list(flat.shape[1:])} for a token, not as in the truth")
            return None
        valid, times = self.valid.to(flat.device), self.ring if key[1] in BACK.values() else 1
        if not flat.is_floating_point():
            have, want = flat[valid], want.to(flat.device)
            if flat.dim() == 1:
                self._compare_exactly(key, have, want, module)
                return None
            if key[1] == OUT and key not in self.sums:
                found = (have[:, :, None] == want[:, None]).any(-1)
                missed = 1 - found.double().cpu()
                errors = torch.zeros(sum(self.tape.lengths), dtype=torch.float64)
                errors[self.tokens] = (_FREE_CHOICE + missed).sum(1)
                kept = float(missed.numel() - missed.sum())
                self.sums[key] = Sums(errors, want.shape[1], len(self.tokens), kept, missed.numel())
        elif key[3] == 0 or key[1] == INTO:
            self._add(key, flat, want, valid, times)
        elif key[1] == OUT and key[0] in self._routers:
            self._add(key, flat[valid].sort(-1).values, want.sort(-1).values)
        self._forced.add(key)
        given = torch.zeros_like(flat) if key[1] in BACK.values() else flat.clone()
        for part in _parts(want):
            truth = want[part].to(flat.device)
            given.index_copy_(0, valid[part], (truth * times if times > 1 else truth).to(flat.dtype))
        return given

    def take_parts(self, parts: Sequence[tuple[dict[Key, Sums], dict[Key, Tensor], dict[str, str]]]) -> None:
        """Replace `sums`, `wrong` and `unchecked` by those of all ranks of a ring."""
        self.sums, self.wrong, self.unchecked = {}, {}, {}
        for sums, wrong, unchecked in parts:
            self.sums |= {key: self.sums[key] + each if key in self.sums else each for key, each in sums.items()}
            self.wrong |= {key: torch.cat((self.wrong[key], each)) if key in self.wrong else each for key, each in wrong.items()}
            self.unchecked |= unchecked

    def gradients(self, layer: str, outputs: Sequence[Any]) -> list[Tensor]:
        want = self.tape.at((layer, BACK[OUT], 0, 0))
        if want is None:
            raise RuntimeError(f"the truth has no gradient of {layer}")
        flat = torch.zeros_like(outputs[0]).view(self.count, *want.shape[1:])
        return [flat.index_copy_(0, self.valid.to(flat.device), want[self.tokens].to(flat)).view(outputs[0].shape)]

    def count_lost_gradients(self) -> None:
        """Judge as zeros, after a backward, the gradients that did not come: taps in checkpointed layers may not run at all."""
        for key in [key for key in self._forced if key[1] in BACK]:
            back = key[0], BACK[key[1]], key[2], key[3]
            want = None if back in self.sums else self._truths(back)
            if want is not None:
                self._add(back, torch.zeros_like(want), want)

    def _truths(self, key: Key) -> Tensor | None:
        """Return the truth's values at a place, of the tokens that this model computes [n, features...]."""
        want = self.tape.at(key)
        return want if want is None or self._all else want[self.tokens]

    def _part_of(self, want: Tensor, shape: torch.Size) -> Tensor | None:
        """Return the part of the features [n, ...] that this rank holds; None if the shapes do not differ by such a part."""
        rank, size = self.part
        cut = [axis for axis in range(1, want.dim()) if want.dim() == len(shape) and want.shape[axis] != shape[axis]]
        if len(cut) != 1 or want.shape[cut[0]] != size * shape[cut[0]]:
            return None
        return want.chunk(size, cut[0])[rank]

    def _add(self, key: Key, values: Tensor, want: Tensor, where: Tensor | None = None, times: int = 1) -> None:
        """Add up how far values are from the truth's [n, features...]. where: int [n], their places in `values`, if not in order.
        times: how many times the truth's they are.
        """
        if key[0] in self._shifted or key in self.sums:
            return
        errors = torch.zeros(sum(self.tape.lengths), dtype=torch.float64)
        own = power = 0.0
        for part in _parts(want):
            have = values[part if where is None else where[part]]
            have = have / times if times > 1 else have
            both = have, want[part]
            wide, truth = (
                each.to(values.device, want.dtype)[:, None].flatten(1) for each in both
            )  # a token may have one number: [n]
            apart = wide - truth
            squares = apart.square_().sum(1).double().cpu()
            errors[self.tokens[part]] = squares.nan_to_num(torch.inf, torch.inf)
            own += _total(torch.mul(truth, wide, out=apart))
            power += _total(torch.mul(truth, truth, out=apart))
        self.sums[key] = Sums(errors, math.prod(want.shape[1:]), len(self.tokens), own, power)

    def _compare_exactly(self, key: Key, have: Tensor, want: Tensor, module: Any) -> None:
        """Compare token ids, or positions. Rotary positions may be shifted: only differences between them matter."""
        apart = (have - want).cpu()
        if not bool(apart.any()):
            return
        rows = torch.repeat_interleave(torch.arange(len(self.tape.lengths)), torch.tensor(self.tape.lengths))[self.tokens]
        first = torch.zeros(len(self.tape.lengths), dtype=apart.dtype).scatter(0, rows.flip(0), apart.flip(0))
        if not isinstance(module, torch.nn.Embedding) and bool((apart == first[rows]).all()):
            self.unchecked.setdefault(key[0], "each row's positions are shifted by a constant, which changes no angle")
            self._shifted.add(key[0])
        else:
            self.wrong[key] = self.tokens[apart != 0]


_MOST_AT_ONCE = 2**22
"""Numbers of a place that are compared at once: the logits of a large vocabulary would need several times their memory."""


def _total(values: Tensor) -> float:
    return values.sum(dtype=torch.float64).item()


def _parts(values: Tensor) -> Iterator[slice]:
    """Yield slices of the tokens of `values` [n, features...], each of `_MOST_AT_ONCE` numbers."""
    step = max(1, _MOST_AT_ONCE // max(1, math.prod(values.shape[1:])))
    for start in range(0, len(values), step):
        yield slice(start, start + step)
