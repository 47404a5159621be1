"""Variations of an input come back into the captured layout exactly, whatever its masks look like. No model runs here."""

from dataclasses import replace

import pytest
import torch
from actorcases import make_dump

from actordbg.actor.changes import LEFT, RIGHT, vary
from actordbg.base.errors import Unsupported
from actordbg.config.replay_config import VARIATIONS
from actordbg.store.payload import Dump
from actordbg.trainers.captured_call import summary_mask

ODD_MASK = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 0]])


def odd_dump(actions):
    """Three unlike rows: padded on both sides with a hole, a long hole, and an empty one. Every id is another."""
    dump = make_dump(length=9, actions=0)
    dump.tensors["sequences"] = torch.arange(100, 127).reshape(3, 9)
    dump.tensors["attention_mask"] = ODD_MASK.clone()
    if actions:
        dump.tensors["action_mask"] = (ODD_MASK != 0)[:, -actions:]
    return Dump(replace(dump.record, seq_len=9), dump.tensors)


def marks(dump):
    """Stands for log-probs: of each place that the call gives one for, the token that it is of."""
    following = dump.tensors["sequences"][:, 1:]
    return following[:, -dump.tensors["action_mask"].shape[1] :] if "action_mask" in dump.tensors else following


@pytest.mark.parametrize("how", VARIATIONS)
@pytest.mark.parametrize("actions", [0, 1, 4, 8])
def test_every_place_comes_back_to_its_token_the_mean_stays_and_the_dump_too(how, actions):
    dump, before = odd_dump(actions), odd_dump(actions)
    varied, undo = vary(dump, how)
    assert torch.equal(undo(marks(varied)), marks(dump))
    assert torch.equal(undo(summary_mask(varied.inputs)), summary_mask(dump.inputs))
    means = [marks(one)[summary_mask(one.inputs)].double().mean() for one in (varied, dump)]
    assert means[0].equal(means[1]) or not summary_mask(dump.inputs).any()
    assert dump.record == before.record and all(torch.equal(dump.tensors[name], was) for name, was in before.tensors.items())


def test_each_variation_does_what_it_says():
    dump = odd_dump(4)
    assert vary(dump, None)[0] is dump and vary(dump, "repeat")[0] is dump
    wider, twice, turned = (vary(dump, how)[0] for how in ("repad", "rebatch", "reorder"))
    assert wider.record.seq_len == wider.tensors["sequences"].shape[1] == 9 + LEFT + RIGHT
    assert wider.tensors["attention_mask"].sum() == ODD_MASK.sum() == wider.record.tokens
    assert set(wider.tensors["sequences"][:, :LEFT].flatten().tolist()) == {100}, "the id that pads the dump already"
    assert twice.record.batch_size == 6 and twice.record.tokens == 2 * ODD_MASK.sum()
    assert torch.equal(twice.tensors["sequences"][3:], dump.tensors["sequences"])
    assert torch.equal(turned.tensors["sequences"][0], dump.tensors["sequences"][2])


def test_masks_keep_their_dtype_and_generator_states_stay():
    dump = odd_dump(4)
    dump.tensors["rng.cpu"] = torch.zeros(8, dtype=torch.uint8)
    dump.tensors["output.action_log_probs"] = torch.zeros(3, 4)
    varied, _ = vary(dump, "repad")
    assert varied.tensors["action_mask"].dtype is torch.bool
    assert "rng.cpu" in varied.tensors
    assert "output.action_log_probs" not in varied.tensors, "it is in the captured layout"


def test_what_has_no_rows_of_tokens_is_refused():
    dump = odd_dump(4)
    dump.tensors["pixel_values"] = torch.zeros(7, 3)
    with pytest.raises(Unsupported, match="pixel_values"):
        vary(dump, "reorder")
