"""Judge each module of a loaded model on its own, in one forward in which no error can travel.

In one forward of the suspect on a recorded input, the output of every module without children, of every decoder layer, and the
input of each, is replaced by the truth's, at the same tokens. So what a module adds is its own. Two things are held against
the truth before they are replaced:

    out    a module's output:        error(out)  = |suspect's output, given the truth's input - the truth's output|
    into   what came into a module:  error(into) = |what operations made of the truth's values - the truth's input|

`into` judges what lies *between* modules: attention, a gated product, a residual. Both are divided by the same error of the
clean model (`clean_models`) at the same place, forced in the same way, row by row:

    ratio = sqrt(sum over tokens of error^2 of the suspect / sum over tokens of error^2 of the clean model)

A healthy configuration has 1.00 everywhere, in any dtype: the floor is not an estimate. The truth is fp32 for bf16 and fp16
weights, fp64 for fp32. It runs each row alone, so its tensors are [1, n, ...] or [n, ...]; the suspect's are [B, S, ...], packed
[1, T, ...], or flattened [N, ...]. `index` says which of the truth's T tokens lies at each of its N positions (-1: padding).

Token ids and positions are compared exactly. A router's choice of experts, and its weights in any order, are judged at the router
and replaced: the experts get the truth's. Rounding changes a choice where two experts are equally good, so a tenth is free.

Example:
    with Recording(tape, 24).on(places_of(truth)): ...                # a forward of one row of 24 tokens
    with Forcing(tape, index, sums).on(places_of(suspect)): ...       # sums: error of each token, by place
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.backends.fsdp2 import decoder_layers
from actordbg.actor.forward_outcome import plain_name
from actordbg.records.locate_record import INTO, OUT

Key = tuple[str, str, int, int]
"""A place: module, INTO or OUT, which call of the module in one forward, which of the call's tensors."""


@dataclass
class Tape:
    """What the truth's modules took and gave, by place: a tensor [n, features...] for each row, on the host.

    lengths: the tokens n of each row. strange: modules with tensors whose tokens cannot be told apart.
    """

    values: dict[Key, list[Tensor]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    strange: set[str] = field(default_factory=set)

    def at(self, key: Key, row: int | None) -> Tensor | None:
        """Return a place's values [n, features...] of one row, or [T, features...] of all; None unless each row has them."""
        parts = self.values.get(key, [])
        if len(parts) != len(self.lengths) or len({part.shape[1:] for part in parts}) != 1:
            return None
        return torch.cat(parts) if row is None else parts[row]

    @property
    def nbytes(self) -> int:
        """Size on the host; a tensor that several places share counts once."""
        return sum({id(part): part.nbytes for parts in self.values.values() for part in parts}.values())


@dataclass
class Sums:
    """What one place adds up over `tokens` tokens of `width` elements. errors: squared error of each of the truth's T tokens,
    float64. own: sum of the values times the truth's; truths: sum of the truth's squares.
    """

    errors: Tensor
    width: int
    tokens: int = 0
    own: float = 0.0
    truths: float = 0.0


def places_of(model: Any) -> dict[str, tuple[Any, bool]]:
    """Return the modules that are places, by plain name: (module, whether its inputs are judged too).

    Those without children, those with parameters of their own (experts), and, for their outputs, the decoder layers.
    """
    layers = {id(layer) for layer in decoder_layers(model)}
    found = {}
    for name, module in model.named_modules():
        whole = next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None
        if name and (whole or id(module) in layers):
            found[plain_name(name)] = module, whole
    return found


class Hooks(ABC):
    """Hooks on the places of a model for one forward of `count` positions. Subclasses record, or compare and replace."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._calls: Counter[str] = Counter()

    @abstractmethod
    def take(self, key: Key, flat: Tensor, module: Any) -> Tensor | None:
        """Handle the values [count, features...] at a place; return what replaces them, None to leave them."""

    def odd(self, key: Key) -> None:  # noqa: B027 - a hook that only records has nothing to do here
        """Handle a tensor whose tokens cannot be told."""

    @contextlib.contextmanager
    def on(self, places: dict[str, tuple[Any, bool]]) -> Iterator[None]:
        """Hook the places while the block lasts. Inputs are seen before any other hook, outputs after all others."""
        with contextlib.ExitStack() as undone:
            for name, (module, whole) in places.items():
                if whole:
                    pre = module.register_forward_pre_hook(self._before(name), with_kwargs=True, prepend=True)
                    undone.callback(pre.remove)
                undone.callback(module.register_forward_hook(self._after(name)).remove)
            yield

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            return self._each((args, kwargs), (name, INTO, self._calls[name]), module)

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: Any, _args: Any, output: Any) -> Any:
            call = self._calls[name]
            self._calls[name] += 1
            return self._each(output, (name, OUT, call), module)

        return hook

    def _each(self, value: Any, of: tuple[str, str, int], module: Any) -> Any:
        seen = 0

        def visit(each: Any) -> Any:
            nonlocal seen
            if isinstance(each, Tensor):
                key, seen = (*of, seen), seen + 1
                placed, turned = in_tokens(each, self.count, module)
                if placed is None:
                    self.odd(key) if each.is_floating_point() else None
                    return each
                new = self.take(key, placed.reshape(self.count, *placed.shape[2:]), module)
                if new is None:
                    return each
                new = new.reshape(placed.shape)
                return (new.transpose(1, 2) if turned else new).reshape(each.shape)
            if type(each) in (tuple, list):
                return type(each)(map(visit, each))
            return {name: visit(item) for name, item in each.items()} if type(each) is dict else each

        with torch.no_grad():
            return visit(value)


def in_tokens(values: Tensor, count: int, module: Any) -> tuple[Tensor | None, bool]:
    """View a tensor of `count` tokens as [b, s, ...] with b * s = `count`, and say whether two axes were turned for that.

    Known: [b, s, ...], [count, ...], heads before tokens [b, h, s, d], and, in norms of heads, [count * h, d]. None for others.
    """
    shape = values.shape
    if values.dim() >= 2 and shape[0] * shape[1] == count:
        return values, False
    if values.dim() == 4 and shape[0] * shape[2] == count:
        return values.transpose(1, 2), True
    if values.dim() and shape[0] == count:
        return values[None], False
    if values.dim() == 2 and shape[0] % count == 0 and "Norm" in type(module).__name__:
        return values.reshape(1, count, -1, shape[1]), False
    return None, False


_FREE_CHOICE = 0.1


class Recording(Hooks):
    """Records a row of the truth on a tape."""

    def __init__(self, tape: Tape, length: int) -> None:
        super().__init__(length)
        self.tape = tape
        self._last: deque[tuple[Any, Tensor, Tensor]] = deque(maxlen=6)  # an output is often the input of the next modules
        tape.lengths.append(length)

    def take(self, key: Key, flat: Tensor, module: Any) -> None:
        memory = flat.data_ptr(), flat.shape, flat.stride(), flat.dtype, flat._version
        copy = next((copy for seen, _, copy in self._last if seen == memory), None)
        if copy is None:
            copy = flat.detach().to("cpu", copy=True)
            self._last.append((memory, flat, copy))
        self.tape.values.setdefault(key, []).append(copy)

    def odd(self, key: Key) -> None:
        self.tape.strange.add(key[0])


class Forcing(Hooks):
    """Compares a model with a tape, and replaces its values by the tape's.

    index: int [count], the truth's token at each position, -1 for none. sums: added to, by place. row: the only row of the tape
    that the model runs, None for all. part: this rank's place among the ranks that split features, and their number. wrong: the
    tokens whose integers differ, by place. unchecked: by module, why a place could not be judged.
    """

    def __init__(
        self, tape: Tape, index: Tensor, sums: dict[Key, Sums], row: int | None = None, part: tuple[int, int] = (0, 1)
    ) -> None:
        super().__init__(len(index))
        self.tape, self.row, self.part = tape, row, part
        self.valid = (index >= 0).nonzero().flatten()
        self.tokens = index[self.valid]
        start = 0 if row is None else sum(tape.lengths[:row])
        self._of_row, self._total = self.tokens - start, sum(tape.lengths)
        self.sums = sums
        self.wrong: dict[Key, Tensor] = {}
        self.unchecked: dict[str, str] = {}
        self._shifted: set[str] = set()
        self._routers = {key[0] for key, rows in tape.values.items() if key[1] == OUT and not rows[0].is_floating_point()}

    def odd(self, key: Key) -> None:
        if key in self.tape.values:
            self.unchecked.setdefault(key[0], "its tensors have another layout than the truth's")

    def take(self, key: Key, flat: Tensor, module: Any) -> Tensor | None:
        want = self.tape.at(key, self.row)
        if want is None:
            return None
        want = want[self._of_row]
        have = flat[self.valid.to(flat.device)]
        if have.shape != want.shape:
            want = self._part_of(want, have.shape)
        if want is None:
            self.unchecked.setdefault(key[0], f"its tensors are {list(have.shape[1:])} for a token, not as in the truth")
            return None
        want = want.to(flat.device)
        if not flat.is_floating_point():
            if flat.dim() == 1:
                self._compare_exactly(key, have, want, module)
                return None
            if key[1] == OUT:
                chosen = (have[:, :, None] == want[:, None]).any(-1).double()
                self._sums_at(key, want).errors[self.tokens] = (_FREE_CHOICE + 1 - chosen).sum(1).cpu()
        elif key[3] == 0 or key[1] == INTO:
            self._add(key, have, want)
        elif key[0] in self._routers:
            self._add(key, have.sort(-1).values, want.sort(-1).values)
        return flat.clone().index_copy_(0, self.valid.to(flat.device), want.to(flat.dtype))

    def _part_of(self, want: Tensor, shape: torch.Size) -> Tensor | None:
        """Return the part of the features [n, ...] that this rank holds; None if the shapes do not differ by such a part."""
        rank, size = self.part
        cut = [axis for axis in range(1, want.dim()) if want.dim() == len(shape) and want.shape[axis] != shape[axis]]
        if len(cut) != 1 or want.shape[cut[0]] != size * shape[cut[0]]:
            return None
        return want.chunk(size, cut[0])[rank]

    def _add(self, key: Key, have: Tensor, want: Tensor) -> None:
        if key[0] in self._shifted:
            return
        wide, truth = have.to(want.dtype).flatten(1), want.flatten(1)
        sums = self._sums_at(key, truth)
        sums.errors[self.tokens] = (wide - truth).square().sum(1).double().cpu().nan_to_num(torch.inf, torch.inf)
        sums.own += float((wide * truth).sum(dtype=torch.float64))
        sums.truths += float(truth.square().sum(dtype=torch.float64))

    def _sums_at(self, key: Key, truth: Tensor) -> Sums:
        """Return what a place adds up, with this row's tokens counted."""
        sums = self.sums.setdefault(key, Sums(torch.zeros(self._total, dtype=torch.float64), truth.shape[1]))
        sums.tokens += len(self.tokens)
        return sums

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
