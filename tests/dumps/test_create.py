"""Synthetic inputs have the shapes, paddings and dtypes that OpenRLHF's actor receives, and are repeatable."""

import json

import pytest
import torch
from commandline import invoke
from hypothesis import given, settings, strategies as st

from actordbg.base.errors import UsageError
from actordbg.dumps.create import Draws, create_dumps, make_inputs
from actordbg.store import payload
from actordbg.store.layout import Store
from actordbg.store.places import dump_id_of


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(2, 40), st.data(), st.integers(2, 200_000), st.integers(0, 2**31))
def test_every_input_is_one_that_an_actor_accepts(batch, length, data, vocabulary, seed):
    actions = data.draw(st.integers(1, length - 1))
    made = make_inputs(batch, length, actions, vocabulary, Draws(seed))
    sequences, attention, mask = map(torch.from_numpy, made.values())
    assert sequences.shape == attention.shape == (batch, length)
    assert sequences.dtype == attention.dtype == torch.int64
    assert int(sequences.min()) >= 0 and int(sequences.max()) < vocabulary
    assert bool(((sequences == 0) == (attention == 0)).all())
    assert bool((attention.diff(dim=1).abs().sum(1) <= 2).all()), "the tokens of a row are one stretch"
    assert mask.shape == (batch, actions) and mask.dtype == torch.bool
    assert bool(mask.any(1).all()), "every row has an action"
    assert torch.equal(mask, attention[:, -actions:].bool())
    assert bool(attention[:, :-actions].any(1).all()), "every row has a prompt"


def test_rows_are_padded_on_both_sides():
    mask = make_inputs(64, 32, 16, 100, Draws(0))["attention_mask"]
    assert (mask[:, 0] == 0).any() and (mask[:, -1] == 0).any()


def test_dumps_land_in_the_store_with_their_record(store):
    paths = create_dumps(store, 2, batch_size=3, seq_len=20, ranks=2, run="made", seed=5)
    assert sorted(paths) == sorted(store.iter_dumps()) and len(paths) == 4
    for path in paths:
        dump = payload.load(path)
        record = dump.record
        assert (record.run, record.source, record.world_size) == ("made", "create", 2)
        assert (record.batch_size, record.seq_len, record.action_len) == (3, 20, 10)
        assert record.tokens == int(dump.tensors["attention_mask"].sum())
        assert record.origin == {"seed": 5, "vocab_size": 128_256}
        assert path == store.dump_path(record)
    assert {(payload.load(path).record.rank, payload.load(path).record.call_index) for path in paths} == {
        (0, 0), (0, 1), (1, 0), (1, 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [{"count": 0}, {"ranks": 0}, {"batch_size": 0}, {"seq_len": 1}, {"vocab_size": 1}, {"run": "a/b"}],
    ids=str,
)
def test_numbers_that_make_no_sense_are_usage_errors(tmp_path, wrong):
    with pytest.raises(UsageError):
        create_dumps(Store(tmp_path / "s"), **({"count": 1} | wrong))  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


def test_the_command_makes_dumps_names_them_and_says_how_to_see_them(tmp_path):
    store = Store(tmp_path / "s")
    done = invoke(store, "dump create --count", 2, "--ranks", 2, "--seq-len", 64, "--json")
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["created"], answer["run"]) == (0, 4, "created")
    assert sorted(answer["dump_ids"]) == sorted(map(dump_id_of, store.iter_dumps()))
    done = invoke(store, "dump create")
    assert done.exit_code == 0 and "made 1 dump in run created (" in done.stdout and "run='created'" in done.stderr


def test_the_same_seed_draws_what_torch_draws():
    for seed in (0, 7, 2**31, 2**40 + 3):
        theirs, ours = torch.Generator().manual_seed(seed), Draws(seed)
        for low, high, shape in ((1, 128_256, (4, 700)), (0, 5, (4, 1)), (0, 2, (3, 3))):
            drawn = torch.randint(low, high, shape, generator=theirs)
            assert torch.equal(torch.from_numpy(ours.between(low, high, shape)), drawn)
