"""Find the first operation inside a layer that is not transformers' own, on the very input that the suspect's layer gets.

Where attention, a gated product or a residual is wrong, no parameter and no attribute differs: what torch computes between the
modules does. One more forward of the suspect lists the calls of torch's functions in the layer that is red: their numbers, and
what goes in and comes out, at the judged tokens. Then transformers' own layer, built from the configuration without weights, runs
on the same input, and each module with weights gives what the suspect's gave. So the two lists differ by their code alone:

    suspect         mul add scaled_dot_product_attention (0.182)
    transformers    mul neg cat mul add scaled_dot_product_attention (0.177)

They are aligned by name. The first call whose numbers, inputs or outputs differ by a bit is named, with the calls in front of it
that only one list has. Calls that lead to the same values, to rounding, are another way to compute them, and are passed over.
Masks are compared by the keys that each judged query sees: transformers' layer gets the mask that follows from rows, positions
and the window of the configuration. Views, and tensors without values, are not listed. Modules with weights that the suspect
does not call, and the module that is red itself, run with the suspect's weights, and their calls are listed.

Example:
    suspect = Listing(layer, leaves_of(clean_layer), layout)
    with suspect.on(): ...                               # a forward
    clean = rerun(clean_layer, suspect, layout.band(window=None), "sdpa")
    difference(suspect, clean)                           # of `inside`
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from actordbg.actor.forward_outcome import plain_name, sample

CORE = "scaled_dot_product_attention"
_MOST_CALLS = 4096
_LOW = -1e4
"""Scores below this are masked, whatever number stands for it."""
_UNLISTED = re.compile(
    r"view|reshape|transpose|permute|contiguous|(un)?squeeze|expand|getitem|chunk|split|narrow|(un)?flatten|swapaxes|swapdims|t|get"
    r"|detach|clone|select|unbind|movedim|view_as|reshape_as|expand_as|(new_)?empty(_like)?"
)
CAST = "a cast to "
"""How the name of a call that only changes the dtype begins."""
_CASTS = ("to", "float", "half", "bfloat16", "double", "type", "type_as")
_SAME = {"multiply": "mul", "truediv": "div", "divide": "div", "concat": "cat", "bmm": "matmul", "subtract": "sub"}


@dataclass(frozen=True)
class TokenLayout:
    """Where tokens lie in tensors [B, S, ...]. rows, positions: int [B, S], rows -1 for padding; judged: flat places, int [n]."""

    rows: Tensor
    positions: Tensor
    judged: Tensor

    def sampled(self, values: Tensor) -> Tensor:
        """Return a sample, float64 on the host, of the values at the judged tokens; of all if its tokens cannot be told."""
        batch, length = self.rows.shape
        at = self.judged.to(values.device)
        if values.dim() == 4 and values.shape[0] == batch and values.shape[2] == length != values.shape[1]:
            values = values.transpose(1, 2)
        if values.dim() >= 2 and values.shape[:2] == (batch, length):
            values = values.flatten(0, 1)[at]
        elif values.dim() and values.shape[0] == batch * length:
            values = values[at]
        drawn = sample(values.detach()).to("cpu", torch.float64)
        return drawn.nan_to_num(math.inf).clamp(_LOW, -_LOW)

    def band(self, window: int | None) -> Tensor:
        """Return which keys queries see with a causal mask and a window of so many tokens: bool [B, S, S]."""
        rows, positions = self.rows, self.positions
        distance = positions[:, :, None] - positions[:, None]
        seen = (rows[:, :, None] == rows[:, None]) & (rows >= 0)[:, :, None] & (distance >= 0)
        return seen & (distance < window) if window else seen

    def of_judged(self, seen: Tensor) -> Tensor:
        """Return the keys that each judged query sees, bool [n, S]. seen: bool [B or 1, S, S]."""
        batch, length = self.rows.shape
        return seen.expand(batch, length, length).flatten(0, 1)[self.judged]


@dataclass
class Call:
    """A call of a function of torch, or of a module with weights, whose name is then its own within the layer.

    block: the module that makes it. numbers: its arguments without tensors. seen: by its mask, bool [B or 1, S, S].
    """

    name: str
    block: str
    numbers: tuple[Any, ...] = ()
    taken: tuple[Tensor, ...] = ()
    given: tuple[Tensor, ...] = ()
    seen: Tensor | None = None


def leaves_of(layer: nn.Module, opened: Iterable[str] = ()) -> set[str]:
    """Return the names of the outermost modules of a layer that have weights of their own, without those to look into."""
    leaves: set[str] = set()
    for name, module in layer.named_modules():
        own = next(module.parameters(recurse=False), None) is not None
        if own and name not in opened and not any(name.startswith(f"{leaf}.") for leaf in leaves):
            leaves.add(name)
    return leaves


class Listing(TorchFunctionMode):
    """The calls in the first call of a layer. arguments: the layer's; outputs: what each of its `leaves` gave, call by call."""

    def __init__(self, layer: nn.Module, leaves: set[str], layout: TokenLayout) -> None:
        super().__init__()
        self.layer, self.leaves, self.layout = layer, leaves, layout
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.calls: list[Call] = []
        self.outputs: dict[str, list[Any]] = defaultdict(list)
        self._blocks: list[str] = []
        self._in_leaf = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Listen while the block lasts."""
        with contextlib.ExitStack() as undone:
            for full_name, module in self.layer.named_modules():
                name = plain_name(full_name)
                if not any(name.startswith(f"{leaf}.") for leaf in self.leaves):
                    enter, leave = partial(self._enter, name), partial(self._leave, name)
                    first = name != ""  # engines gather the layer's weights in a hook of their own
                    undone.callback(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=first).remove)
                    undone.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
            with self:
                yield

    def _enter(self, name: str, _module: Any, args: Any, kwargs: Any) -> None:
        if name == "" and not self.calls:
            self.arguments = args, kwargs
        elif not self._blocks:
            return
        self._blocks.append(name)
        self._in_leaf += name in self.leaves

    def _leave(self, name: str, _module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not self._blocks:
            return
        self._blocks.pop()
        self._in_leaf -= name in self.leaves
        if self._in_leaf or (name and name not in self.leaves):
            return
        self._in_leaf += 1  # what is computed here is not the layer's
        taken, given = (tuple(self.layout.sampled(each) for each in _floats(values)) for values in ((args, kwargs), output))
        self.calls.append(Call(name, self._blocks[-1], (), taken[:1], given) if name else Call("the output", "", (), given[:1]))
        if name:
            self.outputs[name].append(output)
        self._in_leaf -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if not self._blocks or self._in_leaf or _UNLISTED.fullmatch(name) or len(self.calls) > _MOST_CALLS:
            return func(*args, **kwargs)
        tensors = _floats((args, kwargs))
        taken = [self.layout.sampled(each) for each in tensors]
        result = func(*args, **kwargs)
        given = tensors[:1] if name == "setitem" else _floats(result)
        if name in _CASTS and tensors and given:
            to = given[0].dtype
            name = f"{CAST}{str(to).rpartition('.')[2]}" if to is not tensors[0].dtype else ""
        if name and taken and given:
            call = Call(name, self._blocks[-1], _numbers(args, kwargs), tuple(taken))
            call.given = tuple(self.layout.sampled(each) for each in given)
            self._masked(call, args, kwargs)
            self.calls.append(call)
        return result

    def _masked(self, call: Call, args: Any, kwargs: Any) -> None:
        """Note the mask of a call of attention, or of an addition of a mask, and leave it out of what the call takes."""
        length = self.layout.rows.shape[1]
        if call.name == CORE:
            given = inspect.signature(_attention).bind(*args, **kwargs)
            given.apply_defaults()
            query, key, value, mask, dropout, causal, scale = given.args[:7]
            groups = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
            call.taken = tuple(self.layout.sampled(each) for each in (query, key, value))
            call.numbers = (float(scale if scale is not None else query.shape[-1] ** -0.5), float(dropout))
            whole = torch.ones(1, length, length, dtype=torch.bool)
            call.seen = (whole.tril() if causal else whole) if mask is None else _allowed(mask)
            return
        masks = [each for each in _tensors((args, kwargs))[1:] if each.dim() == 4 and each.shape[1:] == (1, length, length)]
        if masks and call.name in ("add", "masked_fill", "where"):
            call.taken, call.seen = call.taken[:1], _allowed(masks[0])


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
               scale: Any = None, enable_gqa: Any = False) -> None:  # fmt: skip
    """Have the arguments of torch's function, which as a built-in has no signature."""


def _allowed(mask: Tensor) -> Tensor:
    """Return a mask of attention [B or 1, 1, S, S], bool or added to scores, as bool [B or 1, S, S]."""
    return (mask if mask.dtype is torch.bool else mask > _LOW)[:, 0].cpu()


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors whose values are here: engines free those of gathered weights."""
    each = [item for item in _flat(value) if type(item) in (Tensor, nn.Parameter)]
    return [tensor for tensor in each if tensor.untyped_storage().nbytes()]


def _floats(value: Any) -> list[Tensor]:
    return [each for each in _tensors(value) if each.is_floating_point()]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _numbers(args: Any, kwargs: Any) -> tuple[Any, ...]:
    return tuple(each for each in _flat((args, kwargs)) if isinstance(each, (int, float, str)))


def _name_of(func: Any) -> str:
    """Return the name of a function without its marks for operators, reflected or in place."""
    name = str(getattr(func, "__name__", func)).strip("_")
    if name[:1] in ("r", "i") and name[1:] in ("mul", "add", "matmul"):
        name = name[1:]
    return _SAME.get(name, name)


def _next_of(name: str, outputs: list[Any], *_: Any, **__: Any) -> Any:
    if not outputs:
        raise ValueError(f"{name} is called more often in transformers")
    return outputs.pop(0)


def rerun(clean: nn.Module, suspect: Listing, seen: Tensor | None, attn: str) -> Listing:
    """Run transformers' layer, on the meta device, with the suspect's arguments and the outputs of its leaves.

    seen: the mask that follows from the input, bool [B, S, S]; None: the suspect's own. attn: the kernel. Raises ValueError for a
    module that the suspect calls less often, or does not call and whose weights are not whole here.
    """
    held = {plain_name(name): each for name, each in suspect.layer.named_parameters()}
    left = {name: list(outputs) for name, outputs in suspect.outputs.items()}
    leaves = set(left)
    for name in leaves_of(clean):
        module = clean.get_submodule(name)
        if name in left:
            module.forward = partial(_next_of, name, left[name])  # type: ignore[method-assign]
            continue
        for own, parameter in module.named_parameters():
            given = held.get(f"{name}.{own}" if name else own)
            if given is None or type(given) is not nn.Parameter or given.shape != parameter.shape or hasattr(given, "ds_id"):
                raise ValueError(f"{name} is not called as in transformers, and has other weights")
            parent, _, leaf = own.rpartition(".")
            module.get_submodule(parent)._parameters[leaf] = given
    args, kwargs = suspect.arguments
    bound = inspect.signature(clean.forward).bind(*args, **kwargs)
    hidden = _floats((args, kwargs))[0]
    if seen is not None and "attention_mask" in bound.signature.parameters:
        seen = (seen | torch.eye(seen.shape[-1], dtype=torch.bool))[:, None].to(hidden.device)  # padding sees itself
        added = torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device)
        eager = added.masked_fill(~seen, torch.finfo(hidden.dtype).min) if attn == "eager" else seen
        bound.arguments["attention_mask"] = eager
    for name in {"past_key_values", "cache"} & bound.arguments.keys():  # the second is transformers 5.24's
        bound.arguments[name] = None
    listing = Listing(clean.train(suspect.layer.training), leaves, suspect.layout)
    with listing.on():
        clean(*bound.args, **bound.kwargs)
    return listing
