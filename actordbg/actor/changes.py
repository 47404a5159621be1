"""Change a captured input, and tell which of its tokens have a truth. Pure: a new dump is returned, and none changed in place.

**Changes for the laws.** Tokens are replaced by other tokens of the same dump, so that the model knows them and no fork treats
them as special. Positions, masks and shapes stay; the recorded outputs are left out.

    call = plain_call(dump, vocab_size)             # every log-prob and the logits, ids within the vocabulary
    changed = with_other_tokens(call, behind_the_middle(call))

**Variations** (`vary`) must not change the results: `actordbg noise` measures what they do.

| variation | the Actor's input | undone in the outputs |
|---|---|---|
| repeat | the very same call | nothing |
| repad | 5 more columns of padding on the left of every row, 11 on the right | the columns |
| rebatch | every row twice, in a batch of twice the size | the copies |
| reorder | the rows in reversed order | the order |

In exact arithmetic each gives the same log-probs, the same mean loss and the same gradients: padding is not attended to and not
in the mask, and the mean over a batch that holds every row twice is the mean over the batch. On real hardware
other shapes mean other kernels, other blocks and another order of summation: how far that moves a configuration is its noise.

    varied, undo = vary(dump, "repad")
    outcome = session.run(varied, backward=True)
    log_probs = undo(outcome.log_probs)                 # [B, A], as of the captured call
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.routing import EXPERTS, as_recorded
from actordbg.base.errors import Unsupported
from actordbg.store.payload import Dump
from actordbg.trainers.images import GRID, PIXELS, Images

_STEP = 7
"""The shift from a token to its replacement in the list of ids; odd, and not a power of two."""


def plain_call(dump: Dump, vocab_size: int) -> Dump:
    """Return the call that laws compare: it returns log-probs of all next tokens, and logits; the forward is unchanged."""
    inputs = {name: tensor for name, tensor in dump.inputs.items() if name != "action_mask"}
    inputs["sequences"] = inputs["sequences"].remainder(vocab_size)
    inputs.setdefault("attention_mask", torch.ones_like(inputs["sequences"]))
    arguments = dump.record.arguments | {"return_logprobs": True, "return_output": True}
    call = _with(dump, inputs, as_recorded(dump.tensors))
    return Dump(replace(call.record, arguments={k: v for k, v in arguments.items() if k != "action_mask"}), call.tensors)


def unsupported(dump: Dump, besides: Collection[str] = ()) -> str:
    """Return why the rows of this call cannot be told apart, so that neither laws nor places can be judged, or "".

    besides: names of other inputs that the judge knows.
    """
    if others := sorted(set(dump.inputs) - {*_BY_TOKEN, *besides}):
        return f"only text is supported, not {', '.join(others)}"
    packed = dump.record.arguments.get("packed_seq_lens") is not None
    return "the rows were packed before the Actor got them" if packed else ""


def attended(dump: Dump) -> Tensor:
    """Mark the real (non-padding) tokens, bool [B, S]."""
    return dump.inputs["attention_mask"] != 0


def with_other_tokens(dump: Dump, where: Tensor, pictures: Images | None = None) -> Dump:
    """Return the dump with other ids wherever `where`, bool and broadcastable to [B, S], is set.

    pictures: its images. Their placeholders stay; an image whose placeholders are all in `where` gets other pixels.
    """
    sequences, painted = dump.inputs["sequences"], {}
    where = where.expand_as(sequences)
    kept = torch.zeros_like(where)
    if pictures is not None:
        kept, painted = torch.stack(pictures.marked).any(0), {PIXELS: pictures.repainted(dump.tensors, where)}
    known = torch.unique(sequences[~kept])
    index = torch.searchsorted(known, sequences)
    if len(known) == 1:
        other = torch.where(sequences > 0, sequences - 1, sequences + 1)
    else:
        shift = 1 + (_STEP * torch.arange(sequences.shape[1])) % (len(known) - 1)
        other = known[(index + shift) % len(known)]
    return Dump(dump.record, dump.tensors | {"sequences": torch.where(where & ~kept, other, sequences)} | painted)


def behind_the_middle(dump: Dump) -> Tensor:
    """Mark each row's real tokens after its first half, bool [B, S]; none in rows with fewer than three."""
    real = attended(dump)
    count = real.cumsum(1)
    total = real.sum(1, keepdim=True)
    return real & (count > (total + 1) // 2) & (total > 2)


def before(changed: Tensor) -> Tensor:
    """Mark log-probs that no changed token may affect, not even as the label, in rows with a changed token, bool [B, S-1]."""
    reached = changed.cumsum(1) > 0
    return ~reached[:, 1:] & changed.any(1, keepdim=True)


def next_tokens(dump: Dump) -> Tensor:
    """Mark next tokens that are real and follow a real token, bool [B, S-1]."""
    real = attended(dump)
    return real[:, 1:] & real[:, :-1]


def with_rows(dump: Dump, rows: Tensor, pictures: Images | None = None) -> Dump:
    """Return the dump with these rows in this order, with their padding and their `pictures`."""
    inputs = dump.inputs
    shown = {} if pictures is None else pictures.of_rows(inputs, rows.tolist())
    of_rows = {name: tensor[..., rows, :] for name, tensor in inputs.items() if name not in (PIXELS, GRID)}
    experts = as_recorded(dump.tensors)
    return _with(dump, of_rows | shown, None if experts is None else experts[rows])


def places(dump: Dump, packing: bool, rank: int = 0, size: int = 1) -> Tensor:
    """Return the row and column of each position that the model computes, in its order, int [n, 2]; -1 for a ring's filler.

    rank, size: the place in a ring-attention group and its size; each rank computes an equal part of the packed positions.
    """
    real = attended(dump)
    positions = (real if packing else torch.ones_like(real)).nonzero()
    if size > 1:
        positions = torch.cat((positions, torch.full((-len(positions) % size, 2), -1)))
        positions = positions.tensor_split(size)[rank]
    return positions


# Measure what rounding does to one input: one forward with the output of each module rounded at random.
#
# This is Monte Carlo arithmetic: the output of every module without children is multiplied by 1 +- u, where u is the unit
# roundoff of its dtype. How far a log-prob moves is the effect of the last bit of every intermediate result. Shapes stay, and
# rows do not interact, so a fault that leaks between rows cannot raise the limit that it is judged by.
#
#     with rounded_anew(model): ...forward...


FACTOR = 4.0
"""How much further than in one random draw rounding may move a log-prob: kernels round more often than once per module."""


_UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@contextlib.contextmanager
def rounded_anew(model: Any) -> Iterator[None]:
    """Round the output of each module of `model` at random inside the block.

    A module that was compiled in place runs eagerly in the block; its graphs stay.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def perturb(_module: Any, _inputs: Any, output: Any) -> Any:
        if type(output) is not Tensor or output.dtype not in _UNITS:
            return None
        generator = generators.setdefault(output.device, torch.Generator(output.device).manual_seed(1))
        sign = torch.randint(0, 2, output.shape, generator=generator, device=output.device, dtype=torch.int8).mul_(2).sub_(1)
        return torch.addcmul(output, output, sign.to(output.dtype), value=_UNITS[output.dtype])  # only the sum is rounded

    with contextlib.ExitStack() as undone:
        for module in model.modules():
            if next(module.children(), None) is None:
                undone.callback(module.register_forward_hook(perturb).remove)
        undone.enter_context(eagerly(model))
        yield


@contextlib.contextmanager
def eagerly(model: Any) -> Iterator[None]:
    """Run a model that was compiled in place without its graphs, which stay."""
    compiled = getattr(model, "_compiled_call_impl", None)
    model._compiled_call_impl = None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled


LEFT, RIGHT = 5, 11
"""Columns of padding that `repad` adds. Odd and unequal, so that no block of 8 or 16 and neither side lines up as before."""

_BY_TOKEN = ("sequences", "attention_mask", "action_mask")

Undo = Callable[[Tensor], Tensor]
"""Restores the captured call's layout of a tensor shaped like the mask, [B', A'] or [B', S'-1]."""


def vary(dump: Dump, how: str | None) -> tuple[Dump, Undo]:
    """Return the varied dump, and a function that restores the layout of its outputs. None and "repeat" change nothing.

    Raises Unsupported for inputs with an unknown layout, such as images.
    """
    if how is None or how == "repeat":
        return dump, lambda values: values
    unknown = sorted(set(dump.inputs) - set(_BY_TOKEN))
    if unknown:
        raise Unsupported(f"--vary {how} supports text only, not {', '.join(unknown)}", hint="measure noise on text dumps")
    if how == "repad":
        return _repad(dump)
    rows = torch.arange(dump.inputs["sequences"].shape[0])
    if how == "reorder":
        return with_rows(dump, rows.flip(0)), lambda values: values.flip(0)
    return with_rows(dump, torch.cat((rows, rows))), lambda values: values[: len(rows)]


def _repad(dump: Dump) -> tuple[Dump, Undo]:
    """Add padding columns on both sides. The action mask ends where the sequences end, so it grows on the right."""
    inputs = dump.inputs
    inputs.setdefault("attention_mask", torch.ones_like(inputs["sequences"]))
    unattended = inputs["sequences"][inputs["attention_mask"] == 0]
    # the dump's own padding id, else its smallest id, which is in the vocabulary in any case
    padding = int(unattended[0]) if unattended.numel() else int(inputs["sequences"].min())
    wider = {
        "sequences": torch.nn.functional.pad(inputs["sequences"], (LEFT, RIGHT), value=padding),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (LEFT, RIGHT)),
    }
    experts = as_recorded(dump.tensors)
    if experts is not None:
        experts = torch.nn.functional.pad(experts, (0, 0, 0, 0, LEFT, RIGHT), value=-1)
    if "action_mask" in inputs:
        wider["action_mask"] = torch.nn.functional.pad(inputs["action_mask"], (0, RIGHT))
        actions = inputs["action_mask"].shape[1]
        return _with(dump, wider, experts), lambda values: values[:, :actions]
    length = inputs["sequences"].shape[1]
    return _with(dump, wider, experts), lambda values: values[:, LEFT : LEFT + length - 1]


def _with(dump: Dump, inputs: dict[str, Tensor], experts: Tensor | None = None) -> Dump:
    """Return the dump with other inputs, without the run's outputs, which are in the captured layout.

    experts: its recorded experts, in the layout of the inputs.
    """
    batch, length = inputs["sequences"].shape
    attention, actions = inputs.get("attention_mask"), inputs.get("action_mask")
    record = replace(
        dump.record,
        batch_size=batch,
        seq_len=length,
        tokens=batch * length if attention is None else int((attention != 0).sum()),
        action_len=None if actions is None else actions.shape[1],
    )
    states = {name: tensor for name, tensor in dump.tensors.items() if name not in dump.inputs and name.startswith("rng.")}
    return Dump(record, inputs | states | ({} if experts is None else {EXPERTS: experts}))


def next_first_ids(sequences: Tensor, attended: Tensor) -> Tensor:
    """Return, for each row, the first attended id of the next, the first row being next to the last, [B]."""
    first = attended.long().argmax(-1)
    return sequences.gather(-1, first[:, None])[:, 0].roll(-1)


def attended_tokens(attention: Tensor | None, sequences: Tensor) -> Tensor:
    """Return which tokens are attended, bool [B, S]. Unsupported for masks with values other than 0 and 1."""
    if attention is None:
        return torch.ones_like(sequences, dtype=torch.bool)
    if tuple(attention.shape) != tuple(sequences.shape):
        raise Unsupported(
            f"the attention mask is {list(attention.shape)}, the sequences are {list(sequences.shape)}",
            hint="replay another dump of this run",
        )
    if not bool(((attention == 0) | (attention == 1)).all()):
        raise Unsupported(
            "the attention mask has values other than 0 and 1 (packed-row ids?), so rows cannot be split",
            hint="replay a dump of unpacked rows",
        )
    return attention != 0


def chosen_tokens(mask: Tensor, attended: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each row with selected tokens, their predecessors' columns in [0, S-1), and their places among the attended tokens.

    Raises Unsupported, before anything is computed, if a selected token's predecessor is not attended: no model predicts it.
    """
    shift = attended.shape[1] - 1 - mask.shape[1]
    rank = attended.long().cumsum(-1) - 1
    orphans = mask & ~attended[:, shift : shift + mask.shape[1]]
    if bool(orphans.any()):
        row, column = (int(value) for value in orphans.nonzero()[0])
        raise Unsupported(
            f"row {row}'s action {column} follows a masked token: no model predicts it, so it has no truth",
            hint="its masks conflict; compare two configurations on this dump with each other",
        )
    for row in range(mask.shape[0]):
        columns = mask[row].nonzero().squeeze(-1) + shift
        if len(columns):
            yield row, columns, rank[row, columns]
