"""The inert decoder reads what the old recorder wrote, exactly, and raises nothing but our errors on anything else."""

import collections
import io
import json
import pickle
from dataclasses import replace

import pytest
import torch
from casefiles import cases_of
from oldpickles import decode

from actordbg.base.errors import CorruptDump, UnsafeInput
from actordbg.dumps.archives import pickle_value
from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.decode import parse_stamp
from actordbg.store.payload import as_torch


def inputs(**changes):
    """What the old recorder put into a pickle; a change to `...` leaves a key out."""
    content = {
        "sequences": torch.arange(20).reshape(2, 10) + 120_000,
        "action_mask": torch.tensor([[True, False, True], [True, True, True]]),
        "attention_mask": torch.ones(2, 10, dtype=torch.long),
        "return_output": False,
        "allgather_logits": False,
        "return_logprobs": True,
        "packed_seq_lens": None,
        "return_entropy": False,
        "timestamp": "20250619_052608_430740",
        "rank": 3,
        "batch_size": 2,
        "seq_len": 10,
        **changes,
    }
    return {key: value for key, value in content.items() if value is not ...}


def pickled(protocol=4, **changes):
    return pickle.dumps(inputs(**changes), protocol)


def tensors_of(data):
    return {name: as_torch(replace(one, values=one.values.copy())) for name, one in decode(data).tensors.items()}


def assert_same(ours, theirs):
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.stride() == theirs.stride()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_tensors_and_arguments_come_out_as_pickled(protocol):
    content = inputs(packed_seq_lens=[7, 3])
    data = pickle.dumps(content, protocol=protocol)
    dump = decode(data)
    for name, tensor in tensors_of(data).items():
        assert_same(tensor, content[name])  # type: ignore[arg-type]
    assert dump.arguments == {key: content[key] for key in content if key.startswith(("return", "allg", "packed"))}
    assert (dump.rank, dump.timestamp) == (3, "2025-06-19T05:26:08.430740Z")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int16", "uint8", "bool"])
def test_masks_of_every_dtype_keep_it(dtype):
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(getattr(torch, dtype))
    assert_same(tensors_of(pickled(action_mask=mask))["action_mask"], mask)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60).reshape(2, 30)[:, 5:25:2],
        torch.arange(20).reshape(10, 2).T,
        torch.ones(1, 1, dtype=torch.long).expand(2, 10),
        torch.ones(24, dtype=torch.long).as_strided((2, 10), (1, 1)),
    ],
    ids=["slice", "turned", "expanded", "overlapping"],
)
def test_a_view_keeps_its_strides_and_its_place_in_the_storage(tensor):
    assert_same(tensors_of(pickled(sequences=tensor))["sequences"], tensor)


def test_a_tensor_that_is_pickled_twice_is_read_twice():
    mask = torch.ones(2, 10, dtype=torch.long)
    dump = tensors_of(pickled(action_mask=mask, attention_mask=mask))
    assert torch.equal(dump["action_mask"], dump["attention_mask"])


def test_absent_masks_are_arguments_that_were_none():
    dump = decode(pickled(action_mask=None, attention_mask=None))
    assert set(dump.tensors) == {"sequences"}
    assert dump.arguments["action_mask"] is None and dump.arguments["attention_mask"] is None


NO_TENSORS_OF_A_CALL = [
    {"sequences": torch.zeros(2, 10)}, {"sequences": torch.zeros(20, dtype=torch.long)},
    {"sequences": torch.zeros(0, 10, dtype=torch.long)}, {"attention_mask": torch.ones(2, 9)}, {"action_mask": torch.ones(2, 11)},
    {"action_mask": torch.ones(1, 3)}, *({key: collections.OrderedDict()} for key in ("action_mask", "rank", "surprise")),
]  # fmt: skip
FIELDS = [
    {case.removeprefix("without "): ...} if case.startswith("without ") else json.loads(case)
    for case in cases_of("corrupt_pickles")
]


@pytest.mark.parametrize("changes", [*FIELDS, *NO_TENSORS_OF_A_CALL], ids=str)
def test_a_pickle_that_is_not_an_actor_dump_is_refused(changes):
    with pytest.raises(CorruptDump) as caught:
        decode(pickled(**changes))
    assert caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    "data, said",
    [
        *((pickle.dumps(value), None) for value in (1, "text", [inputs()], (), None, b"bytes")),
        *((data, None) for data in (b"", b"\x80", b"PK\x03\x04zip", b"\x80\x04.", b"\x80\x09N.", b"(" * 5000)),
        (pickled() + b"x", "after the end"),
    ],
)
def test_bytes_that_are_no_pickle_of_a_dump_are_refused(data, said):
    with pytest.raises((CorruptDump, UnsafeInput), match=said):
        decode(data)


def test_a_boolean_that_is_neither_0_nor_1_is_refused():
    elements = bytes((1, 0, 1, 1, 1, 1))
    data = pickled()
    assert data.count(elements) == 1
    with pytest.raises(CorruptDump, match="boolean"):
        decode(data.replace(elements, bytes((2, 0, 1, 1, 1, 1))))


def test_timestamps_are_taken_as_utc():
    assert parse_stamp("20250619_052608_430740") == "2025-06-19T05:26:08.430740Z"
    assert parse_stamp("20250619_052608_43074") is None
    assert parse_stamp("٢٠٢٥٠٦١٩_٠٥٢٦٠٨_٤٣٠٧٤٠") is None


class Lying(LegacyReader):
    """A child that was taken over, and answers this about a file."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def _answer(self, data):
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"null", b"[]", b"{}", b'{"error": "unknown", "message": ""}', b"\xff",
        *(b'{"ok": {"$tensor": %b}}\n' % tensor for tensor in (
            b"1", b'[990, "int64", 20, 0, [2, 10], [10, 1]]', b'[0, "int64", 20, 1, [2, 10], [10, 1]]', b'[0, "x", 1, 0, [1], [1]]',
            b'["a", "int64", 1, 0, [1], [1]]', b'[0, "int64", 1, -9, [1], [1]]',
        )),
    ],
)  # fmt: skip
def test_an_answer_that_makes_no_sense_or_points_outside_the_file_is_refused(answer):
    with pytest.raises((UnsafeInput, CorruptDump)):
        pickle_value(Lying(answer), bytes(1000))


def test_the_real_dumps_equal_what_torch_reads(shared_dumps):
    paths = sorted(shared_dumps.glob("*.pkl"))
    assert len(paths) >= 257
    for path in paths:
        data = path.read_bytes()
        theirs = pickle.load(io.BytesIO(data))
        dump = decode(data)
        ours = tensors_of(data)
        assert ours.keys() == {key for key, value in theirs.items() if isinstance(value, torch.Tensor)}
        for name, tensor in ours.items():
            assert_same(tensor, theirs[name])
        assert dump.rank == theirs["rank"] and dump.timestamp == parse_stamp(theirs["timestamp"])
        assert all(theirs[key] == value and type(theirs[key]) is type(value) for key, value in dump.arguments.items())
