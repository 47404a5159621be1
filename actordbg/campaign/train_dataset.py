"""The samples of a data set as dumps, one for each, so that a training check under any backend takes them as its inputs.

A run is named by what is in it, `sft-<digest>`: the same samples of the same tokenizer are written once.
"""

import hashlib
import json
from pathlib import Path

from actordbg.base.errors import UsageError
from actordbg.catalog.query import count_dumps
from actordbg.config.replay_config import TINY
from actordbg.dumps.create import dump_of_inputs
from actordbg.store.layout import Store
from actordbg.store.payload import encode_plain
from actordbg.trainers.trainer import TRAINER

MAX_LEN = 2048


def run_of_dataset(store: Store, source: Path, model: str, max_len: int | None, most: int) -> str:
    """Write up to `most` samples of a data set as dumps, unless they are there; return their run. Raises as `sft_rows` does."""
    if model == TINY:
        raise UsageError(
            "the built-in tiny model has no tokenizer for a data set", hint="pass --model PATH of a folder with a tokenizer"
        )
    TRAINER.prepare_process()
    longest = max_len or MAX_LEN
    rows = [{name: values.numpy() for name, values in row.items()} for row in TRAINER.sft_rows(source, model, longest, most)]
    if not rows:
        raise UsageError(f"{source} has no sample of at most {longest} tokens", hint="raise MAX_LEN")
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([values.tolist() for values in row.values()]).encode())
    run = f"sft-{digest.hexdigest()[:12]}"
    there = count_dumps(store.create(), f"run='{run}'")  # packed ones too
    for at, row in enumerate(rows[there:], there):
        made = dump_of_inputs(row, run, call_index=at, training=True, grad_enabled=True, origin={"dataset": source.name})
        store.put_dump(*encode_plain(*made), hint="make room, or name another store")
    return run
