"""Packed calls through the writers: each becomes rows, whoever writes it, and what cannot be told apart is named."""

import functools
import json
import threading
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from adaptercases import dumps_of, record_here

from actordbg.actor.rules import leaked
from actordbg.dumps.recover import find_rings, recover
from actordbg.formats import nested_values
from actordbg.formats.nested_values import RUN_ON
from actordbg.store import payload
from actordbg.trainers import recorded_model
from actordbg.trainers.seam import Rows, Scores, Seam

IDS = torch.tensor([[5, 9, 11, 7, 3, 8, 4, 6, 2]])
BORDERS = torch.tensor([0, 3, 4, 9])
PLACES = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4]])
COUNTS = torch.tensor([[0, 1, 1, 0, 0, 0, 1, 1, 1]])
ROWS = [[5, 9, 11, 0, 0], [7, 0, 0, 0, 0], [3, 8, 4, 6, 2]]
REAL = [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]


def jagged(values):
    return torch.nested.nested_tensor_from_jagged(values.reshape(-1), BORDERS)


class Model(torch.nn.Module):
    pass


def score(model, given):
    """A function of a module, without a self: minus the id, for each token but the last."""
    return -IDS[:, 1:].float()


class Packing:
    name, package, tried = "packing", "pytest", ()
    seams = (
        Seam(
            "packing_loop:score",
            lambda call: Rows(call["model"], entropy=True, **call["given"]),
            lambda out: Scores(out, out / 2),
        ),
    )


WAYS = {
    "offsets": lambda: {"sequences": IDS, "offsets": BORDERS.int(), "action_mask": COUNTS[:, 1:]},
    "a long row": lambda: {"sequences": IDS[0], "offsets": BORDERS, "action_mask": COUNTS[0]},
    "positions": lambda: {"sequences": IDS, "positions": PLACES, "action_mask": COUNTS[:, 1:] != 0},
    "jagged": lambda: {"sequences": jagged(IDS), "action_mask": jagged(COUNTS)},
    "padded": lambda: {
        name: torch.nn.functional.pad(values, (0, 2))
        for name, values in (("sequences", IDS), ("positions", PLACES), ("action_mask", COUNTS))
    },
}


@pytest.fixture
def record(store, monkeypatch):
    monkeypatch.setattr(recorded_model, "_told", set())
    monkeypatch.setenv("ACTORDBG_DISABLE", "")
    monkeypatch.setattr("actordbg.trainers.recorded_model.of_user", lambda _: Packing)

    def run(*calls, before_the_end=lambda: None, **control):
        module = ModuleType("packing_loop")
        module.score = score  # type: ignore[attr-defined]
        assert recorded_model.attach(module, "packing", record_here(store, **control)) == ["packing_loop:score"]
        model = Model()
        for given in calls:
            module.score(model, given)
        before_the_end()
        return dumps_of(store)

    return run


def test_each_way_to_pack_gives_the_same_rows_and_the_golden_of_its_tokens(record):
    for way, dump in zip(WAYS, record(*(make() for make in WAYS.values())), strict=True):
        found = dump.record
        assert (found.batch_size, found.seq_len, found.tokens, found.action_len) == (3, 5, 9, 4), way
        assert found.packing_samples and found.replayable and not found.extra, way
        assert dump.inputs["sequences"].tolist() == ROWS and dump.inputs["attention_mask"].tolist() == REAL, way
        assert dump.inputs["action_mask"].int().tolist() == [[1, 1, 0, 0], [0] * 4, [0, 1, 1, 1]], way
        if way != "padded":  # whose function returns fewer
            assert dump.outputs["action_log_probs"].tolist() == [[-9, -11, 0, 0], [0] * 4, [-8, -4, -6, -2]], way
            assert dump.outputs["entropy"].tolist()[0] == [-4.5, -5.5, 0, 0], way


def test_masks_and_scores_of_several_packed_rows_are_those_of_their_next_tokens(record, monkeypatch):
    ids, places = IDS.view(3, 3), torch.tensor([[0, 1, 2], [0, 1, 0], [0, 1, 2]])
    several = Seam("packing_loop:score", lambda call: Rows(call["model"], **call["given"]), lambda _: Scores(-ids[:, 1:].float()))
    monkeypatch.setattr(Packing, "seams", (several,))
    counted = torch.tensor([[0, 1], [1, 0], [1, 1]])
    full = {"attention_mask": torch.ones_like(ids)}
    for dump in record(*({"sequences": ids, "positions": places, "action_mask": counted, **mask} for mask in ({}, full))):
        assert dump.inputs["sequences"].tolist() == [[5, 9, 11], [7, 3, 0], [8, 0, 0], [4, 6, 2]]
        assert dump.inputs["action_mask"].tolist() == [[0, 1], [1, 0], [0, 0], [1, 1]]
        assert dump.outputs["action_log_probs"].tolist() == [[-9, -11], [-3, 0], [0, 0], [-6, -2]]


def test_a_long_row_whose_positions_never_restart_says_so(record):
    run_on = {"sequences": IDS, "positions": torch.arange(9)[None]}
    given = run_on, run_on | {"attention_mask": torch.ones_like(IDS)}, {"sequences": IDS}
    assert [dump.record.extra for dump in record(*given, with_outputs=False)] == [{"rows": RUN_ON}, {}, {}]


def test_packed_rows_that_flash_attention_does_not_keep_apart_are_recorded_as_such(record, monkeypatch):
    seam = Seam(
        "packing_loop:score", lambda call: Rows(call["model"], context={"rows_leak": True}, **call["given"]), lambda _: Scores()
    )
    monkeypatch.setattr(Packing, "seams", (seam,))
    one = {"sequences": IDS, "positions": PLACES}
    several = {"sequences": IDS.view(3, 3), "positions": torch.tensor([[0, 1, 2], [0, 1, 0], [0, 1, 2]])}
    padding = torch.tensor([[1] * 8 + [0]])
    kept = [one, one | {"attention_mask": torch.ones_like(IDS)}, several | {"more": {"cu_seq_lens_q": BORDERS.int()}}]
    leak = [one | {"attention_mask": padding}, several, several | {"attention_mask": torch.ones(3, 3)}]
    dumps = record(*kept, *leak, with_outputs=False)
    found = [leaked(replace(dump.record, actor={"attn_implementation": "flash_attention_2"})) for dump in dumps]
    assert found == [False, False, False, True, True, True]
    assert all(leaked(replace(dump.record, actor={"attn_implementation": "sdpa"})) for dump in dumps)


def test_a_writer_process_makes_the_same_rows_and_drops_a_call_whose_masks_cannot_belong_to_its_tokens(record, store):
    rows = {"sequences": IDS.view(3, 3)}
    odd = [
        {"action_mask": torch.ones(1, 6)},
        {"attention_mask": torch.ones(3, 2)},
        {"positions": PLACES, "action_mask": COUNTS[:, :4]},
    ]
    (dump,) = record(WAYS["jagged"](), *(rows | masks for masks in odd), writer="process", with_outputs=False)
    assert dump.inputs["sequences"].tolist() == ROWS and dump.record.tokens == 9
    (counters,) = (json.loads(path.read_text()) for path in store.counters.glob("*/*.json"))
    assert (counters["captured"], counters["dropped"]) == (1, {"error": 3})
    assert "do not fit together: sequences" in counters["last_error"]


def test_what_a_ring_alone_had_is_recovered_as_rows(record, store):
    live = []

    def die():
        (report,) = recover(store, find_rings(store), live=True)
        live.extend((*report.dumps, *map(payload.load, store.iter_dumps())))

    record(WAYS["positions"](), triggers=["exception"], ring=4, before_the_end=die)
    found, dump = live
    assert (found.batch_size, found.seq_len) == (3, 5) and dump.record.recovered
    assert dump.inputs["sequences"].tolist() == ROWS


@pytest.mark.parametrize("offsets", [[0, 5, 3, 9], [0, 3, 20], [0], [-1, 9]])
def test_borders_that_make_no_sense_leave_a_named_call_and_harm_nothing(offsets, record):
    (dump,) = record({"sequences": IDS, "offsets": torch.tensor(offsets)})
    assert not dump.record.replayable and "cannot be separated: borders" in dump.record.extra["rows"]
    assert torch.equal(dump.tensors["sequences"], IDS)


@dataclass
class Batch:
    weights: Any
    loss: Any


def test_tokens_in_no_row_are_left_out_and_counted(record):
    (dump,) = record({"sequences": IDS, "offsets": torch.tensor([0, 3, 4])})
    assert dump.inputs["sequences"].tolist() == [[5, 9, 11], [7, 0, 0]] and dump.record.replayable
    assert dump.record.extra == {"rows": "5 of 9 packed tokens are in no row and are left out"}


def test_what_else_a_call_has_is_kept_by_name_and_it_is_replayable(record):
    context = {
        "batch": Batch([IDS.float(), {"deep": IDS[0]}], functools.partial(score, 1)),
        "old": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "advantages": jagged(IDS.float()),
        "loss": score, "model": Model(), "lock": threading.Lock(), "scale": 0.5, "step": 3,
    }  # fmt: skip
    (dump,) = record({**WAYS["offsets"](), "context": context, "more": {"kinds": IDS}})
    assert dump.record.replayable and {*dump.inputs} == {"sequences", "action_mask", "kinds", "attention_mask"}
    assert dump.inputs["kinds"].tolist() == ROWS
    told = {name: one for name, one in dump.record.arguments.items() if name.startswith("context.")}
    assert told == {
        "context.batch.loss": f"partial of function {__name__}.score", "context.loss": f"function {__name__}.score",
        "context.model": f"module {__name__}.Model", "context.lock": "left out: _thread.lock", "context.scale": 0.5,
        "context.step": 3,
    }  # fmt: skip
    kept = {name for name in dump.tensors if name.startswith("context.")}
    assert kept == {
        f"context.{name}"
        for name in ("batch.weights.0", "batch.weights.1.deep", "old.0", "old.1", "advantages.values", "advantages.offsets")
    }


class Sharded:
    """As a DTensor tells of itself."""

    dtype, layout, is_nested, shape, placements = torch.float32, torch.strided, False, (4, 2), ("Shard(dim=0)",)
    device_mesh = torch.empty(2)
    stride = to_local = staticmethod(lambda: IDS)


def test_values_come_back_as_they_were_nested():
    class TensorDict(dict[str, Any]):
        batch_size = ()

    proto = SimpleNamespace(batch=TensorDict(ids=IDS), non_tensor_batch={"uid": "a"}, meta_info={"t": 0.7})
    parts = nested_values.flat({"proto": proto, "images": (1, [2, 3]), "cut": Sharded()})
    assert parts["cut.placement"] == "Shard(dim=0) of [4, 2] over (2,)" and parts["cut.shard"] is IDS
    back = nested_values.nested(parts)
    assert back["proto"] == {"batch": {"ids": IDS}, "non_tensor_batch": {"uid": "a"}, "meta_info": {"t": 0.7}}
    assert back["images"] == [1, [2, 3]]
    round_ = []
    round_.append(round_)
    assert nested_values.flat({"round": round_}) == {"round.0.0.0.0.0": "left out: builtins.list"}
    assert len(nested_values.flat({"many": [[one] for one in range(999)]})) == nested_values.MOST_PARTS + 1
