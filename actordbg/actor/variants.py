"""Ways to run the same captured input differently that must not change what comes out: `actordbg noise` measures what they do.

| variation | what the Actor gets | what is undone |
|---|---|---|
| repeat | the very same call | nothing |
| repad | 5 columns of padding more on the left of every row, 11 on the right | the columns |
| rebatch | every row twice, in a batch of twice the size | the copies |
| reorder | the rows in reversed order | the order |

In exact arithmetic each gives the same log-probs, the same mean loss and the same gradients: padding is not attended to and not
in the mask, and the mean over a batch that holds every row twice is the mean over the batch. On a machine other shapes mean
other kernels, other blocks and another order of summation: how far that moves a configuration is its noise.

`vary` makes the varied dump and `Undo`, which brings what came out back into the captured layout. Pure: tensors in, tensors
out; a dump is never changed in place. Example:

    varied, undo = vary(dump, "repad")
    outcome = session.run(varied, backward=True)
    log_probs = undo(outcome.log_probs)                 # [B, A], as of the captured call
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from actordbg.base.errors import Unsupported
from actordbg.store.payload import Dump

LEFT, RIGHT = 5, 11
"""Columns of padding that `repad` adds. Odd and unequal, so that neither blocks of 8 or 16 nor both sides line up as before."""

_BY_TOKEN = ("sequences", "attention_mask", "action_mask")

Undo = Callable[[Tensor], Tensor]
"""Brings a tensor of the mask's layout, [B', A'] or [B', S'-1], back into that of the captured call."""


def vary(dump: Dump, how: str | None) -> tuple[Dump, Undo]:
    """The varied dump, and how its outputs are brought back. `how` None and "repeat" leave it as it is.

    Raises Unsupported for inputs whose layout is not known, such as images.
    """
    if how is None or how == "repeat":
        return dump, lambda values: values
    unknown = sorted(set(dump.inputs) - set(_BY_TOKEN))
    if unknown:
        raise Unsupported(f"--vary {how} knows rows of tokens, not {', '.join(unknown)}", hint="measure noise on dumps of text")
    return {"repad": _repad, "rebatch": _rebatch, "reorder": _reorder}[how](dump)


def _repad(dump: Dump) -> tuple[Dump, Undo]:
    """More columns of nothing on both sides. The action mask ends where the sequences end, so it grows on the right."""
    inputs = dump.inputs
    inputs.setdefault("attention_mask", torch.ones_like(inputs["sequences"]))
    attention = inputs["attention_mask"] != 0
    padding = _padding_id(inputs["sequences"], attention)
    wider = {
        "sequences": torch.nn.functional.pad(inputs["sequences"], (LEFT, RIGHT), value=padding),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (LEFT, RIGHT)),
    }
    if "action_mask" in inputs:
        wider["action_mask"] = torch.nn.functional.pad(inputs["action_mask"], (0, RIGHT))
        actions = inputs["action_mask"].shape[1]
        return _with(dump, wider), lambda values: values[:, :actions]
    length = inputs["sequences"].shape[1]
    return _with(dump, wider), lambda values: values[:, LEFT : LEFT + length - 1]


def _rebatch(dump: Dump) -> tuple[Dump, Undo]:
    rows = dump.inputs["sequences"].shape[0]
    twice = {name: torch.cat((tensor, tensor)) for name, tensor in dump.inputs.items()}
    return _with(dump, twice), lambda values: values[:rows]


def _reorder(dump: Dump) -> tuple[Dump, Undo]:
    return _with(dump, {name: tensor.flip(0) for name, tensor in dump.inputs.items()}), lambda values: values.flip(0)


def _padding_id(sequences: Tensor, attention: Tensor) -> int:
    """The id that pads this dump already, else the smallest one in it: it is in the vocabulary in any case."""
    unattended = sequences[~attention]
    return int(unattended[0]) if unattended.numel() else int(sequences.min())


def _with(dump: Dump, inputs: dict[str, Tensor]) -> Dump:
    """The dump with other inputs. What the run returned is left out: it is in the captured layout."""
    batch, length = inputs["sequences"].shape
    attention = inputs.get("attention_mask")
    actions = inputs.get("action_mask")
    record = replace(
        dump.record,
        batch_size=batch,
        seq_len=length,
        tokens=batch * length if attention is None else int((attention != 0).sum()),
        action_len=None if actions is None else actions.shape[1],
    )
    states = {name: tensor for name, tensor in dump.tensors.items() if name not in dump.inputs and name.startswith("rng.")}
    return Dump(record, inputs | states)
