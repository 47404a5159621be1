"""Dumps for the packs' tests: the same samples in several passes and ranks, padded differently, as a PPO run has them."""

import hashlib
import random
from dataclasses import replace

import catalogcases
import torch

from actordbg.formats import dumpfile
from actordbg.store import payload
from actordbg.store.pack_build import PackWriter
from actordbg.store.places import Pack, places_of, read_payload

EOS = 128_009
"""Pads on the right, and ends every sample: so it is in OpenRLHF."""


def samples(count):
    """Token ids of made-up samples: common tokens often, rare ones seldom; some prompts shared."""
    generator = random.Random(0)
    common = [generator.randrange(1000, 128_000) for _ in range(400)]
    prompts = [[generator.choice(common) for _ in range(60)] for _ in range(max(1, count // 4))]
    return [
        torch.tensor([*prompts[n // 4 % len(prompts)], *(generator.choice(common) for _ in range(generator.randint(200, 700)))])
        for n in range(count)
    ]  # fmt: skip


def batch(rows, left, right):
    """The inputs of one call for these samples, padded to the longest and by `left` and `right` more."""
    longest = max(len(row) for row in rows)
    size = (len(rows), left + longest + 1 + right)
    ids, mask = torch.full(size, EOS), torch.zeros(size, dtype=torch.int64)
    for number, row in enumerate(rows):
        start = left + longest - len(row)
        ids[number, :start] = 0
        ids[number, start : start + len(row)] = row
        mask[number, start : start + len(row) + 1] = 1
    return {"sequences": ids, "attention_mask": mask, "action_mask": mask[:, -100:].bool()}


def publish(store, index, tensors, **changes):
    """One dump of these tensors, as call `index` of `catalogcases`."""
    size, length = tensors["sequences"].shape
    described = catalogcases.record(index, batch_size=size, seq_len=length, **changes)
    return store.publish_dump(*payload.encode(described, tensors))


def fill_ppo(store, calls=12, first=0, **changes):
    """`calls` batches, each recorded twice: in the log-prob pass, and in the training pass in halves with other padding. `first`: number of the first dump."""
    size, pool = 4, samples(calls * 4)
    number = first
    for call in range(calls):
        rows = pool[call * size : (call + 1) * size]
        for part, left, right in ((rows, 30, 40), (rows[: size // 2], 7, 5), (rows[size // 2 :], 0, 11)):
            publish(store, number, batch(part, left, right), **changes)
            number += 1


def odd_tensors():
    """Everything that a dump may hold and a row store may stumble over."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randint(0, 128_256, (4, 400), generator=generator)
    return {
        "sequences": wide[:, 30:],
        "attention_mask": (wide[:, 30:] > 60).long(),
        "transposed": wide.t(),
        "expanded": wide[:1].expand(6, 400),
        "one_dimension": torch.randn(700, generator=generator),
        "constant": torch.full((3, 500), -7),
        "scalar": torch.tensor(7),
        "no_rows": torch.zeros(0, 30),
        "no_columns": torch.zeros(5, 0, dtype=torch.int64),
        "many_rows": torch.zeros(5000, 3, dtype=torch.int16),
        "deep": torch.randn(3, 4, 5, 6, generator=generator),
        "bf16": torch.randn(3, 90, generator=generator).bfloat16(),
        "float8": torch.randn(3, 90, generator=generator).to(torch.float8_e4m3fn),
        "double": torch.randn(2, 70, generator=generator).double(),
        "nan": torch.tensor([[float("nan"), float("inf"), -0.0] * 30] * 2),
        "output.action_log_probs": torch.randn(4, 370, generator=generator),
        "rng.cpu": torch.randint(0, 256, (5056,), generator=generator).to(torch.uint8),
        "large": torch.randint(-(2**40), 2**40, (1, 300_000), generator=generator),
    }


def write_pack(folder, dumps):
    """A pack of dump files' records and blobs."""
    writer = PackWriter(folder)
    for record, blob in dumps:
        writer.add(record, dumpfile.line_of(blob), dumpfile.unpack(blob)[1])
    return Pack(writer.publish()[0])


def blobs(path, **changes):
    """Records and dump files of what a pack holds, perhaps with other records."""
    pack, found = Pack(path), []
    for dump_id in pack.dump_ids:
        line, data = pack.read(dump_id)
        record = replace(dumpfile.parse_line(line), **changes)
        found.append((record, dumpfile.pack(record, data)))
    return found


def contents(store):
    """Every dump that the store's files hold, by id: its whole record and the SHA-256 of its payload, read and checked."""
    found = {}
    for place in places_of(store):
        record, data = read_payload(place)
        assert record.dump_id not in found
        found[record.dump_id] = record.to_json(), hashlib.sha256(data).hexdigest()
    return found
