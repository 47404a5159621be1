"""Healthy models, judged as `check` judges them: every red is a false one. Resumable: one JSON line for each cell that was judged.

python census.py FILE CACHE [SEEDS]      judges the cells that the file does not have, and prints how many are red

A cell is a family, a dtype, packed or not, a configuration and an input. One process (or one for each rank) judges all cells of a
configuration, so torch is imported once. If it dies, its cell is FAILED, and another process judges the rest.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import roots
from actorcases import ZERO3
from amounts import WHOLE, amount

FAMILIES = ("llama3", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "phi3", "olmo2", "qwen3_5")
CONFIGURATIONS = {
    "plain": {},
    "ZeRO 2": {"backend": "deepspeed", "zero_stage": 2},
    "ZeRO 3": ZERO3,
    "fsdp2": {"backend": "fsdp2"},
    "tp 2": {"backend": "fsdp2", "tp": 2},
    "ring 2": {"backend": "fsdp2", "ring": 2},
}
PACKED_IS_BROKEN = ("qwen3_5",)
"""Families whose state runs across the border of packed rows, which is a fault and no false red."""
EAGER = ("gemma2",)
"""sdpa leaves out its soft cap."""
TRUE_REDS = {("ZeRO 3", "bf16"): r"model\.rotary_emb\.\w*inv_freq was rounded to bf16"}
"""Configurations that really are wrong, and how they have to be named: transformers makes the angles in bf16 under ZeRO-3."""
SIDES = ("both", "left", "right", "none")
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Cell:
    """What is judged. seed: of the input; under several ranks each rank has one, the next."""

    configuration: str
    family: str
    dtype: str
    packed: bool
    seed: int

    @property
    def ranks(self):
        return 1 if self.configuration == "plain" else 2

    @property
    def lanes(self):
        """Inputs that are judged at the same time."""
        return 1 if self.configuration in ("plain", "tp 2", "ring 2") else 2


def all_cells(seeds):
    """Every cell: plain has three times as many inputs as the others, which start at even seeds where two ranks have one each."""
    for configuration in CONFIGURATIONS:
        for family in FAMILIES:
            for dtype in ("bf16", "fp32"):
                for packed in (False, True):
                    if (packed and family in PACKED_IS_BROKEN) or (configuration == "ring 2" and not packed):
                        continue
                    cell = Cell(configuration, family, dtype, packed, 0)
                    for seed in range(0, 3 * seeds if configuration == "plain" else seeds, cell.lanes):
                        yield replace(cell, seed=seed)


def sample():
    """A sample of them for every run of the tests, each of another shape; with WHOLE=1 four for each family, and two ranks.

    Llama and ranks that compute together are judged healthy beside their faults (`plantedfaults`, `locatecases.together`).
    """
    plain = (("qwen3_5", "bf16", (0,)), ("gemma2", "fp32", (3,)), ("mixtral", "bf16", (2,)), ("llama3", "bf16", ()))
    cells = [
        Cell("plain", family, dtype, seed % 2 == 1 and family not in PACKED_IS_BROKEN, seed)
        for family, dtype, seeds in plain
        for seed in (range(4) if WHOLE else seeds)
    ]
    return cells + [Cell("tp 2", "llama3", "bf16", seed % 2 == 1, seed) for seed in range(amount(0, 4))]


def dump_of_seed(seed):
    """An input of two to four rows, of another shape for each seed; answers of one token now and then."""
    from lawcases import dump_of

    rows, length = 2 + seed % 3, 24 + 13 * (seed % 5)
    actions = (8, 1, 0, 17)[seed % 4]
    dump = dump_of(SIDES[seed % 4], rows=rows, length=length, actions=actions, seed=seed)
    arguments = dump.record.arguments | ({"return_logprobs": True} if not actions else {})
    return replace(dump, record=replace(dump.record, dump_id=f"dump-{seed}", arguments=arguments))


# ---- a worker ----


def work(file, cache, cells):
    """Judge cells of one configuration, in this process and those of the other ranks."""
    import torch.distributed as dist
    from judged import Truths, judge

    from actordbg.actor import family_models
    from actordbg.actor.models import once
    from actordbg.actor.session import open_actor
    from actordbg.config.replay_config import ReplayConfig
    from benchmarks.families import build_model

    rank = int(os.environ.get("RANK", "0"))

    def line(cell, **told):
        if rank == 0:
            with file.open("a") as lines:
                lines.write(json.dumps(asdict(cell) | told) + "\n")

    for family, dtype in dict.fromkeys((cell.family, cell.dtype) for cell in cells):
        here = [cell for cell in cells if (cell.family, cell.dtype) == (family, dtype)]
        shape = dict(family_models.FAMILIES[family].config)
        model = str(once(cache / family, lambda folder, shape=shape: build_model(folder, shape)))
        truths = Truths(cache / f"truths-{family}", model, dtype, backward=True)
        dumps = {seed: dump_of_seed(seed) for cell in here for seed in range(cell.seed, cell.seed + cell.lanes)}
        if here[0].ranks == 1:
            for dump in dumps.values():
                truths.of(dump, cache)
        settings = CONFIGURATIONS[here[0].configuration] | ({"nproc": 2} if here[0].ranks > 1 else {})
        attn = "eager" if family in EAGER else None
        config = ReplayConfig(
            model=model, dtype=dtype, attn=attn, backward=True, keep_gradients=True, packing=here[0].packed, **settings
        )
        now = here[0]
        try:
            with open_actor(config, defaults=dumps[here[0].seed].record, model_cache=cache) as session:
                for now in here:
                    began = time.perf_counter()
                    dump = dumps[now.seed + rank * (now.lanes > 1)]
                    session.switch(replace(config, packing=now.packed), dump.record)
                    found = judge(session, dump, truths.of(dump, cache), cache / f"kept-{rank}", together=session.is_collective)
                    located = found.local.located
                    told = {
                        "dump": int(dump.record.dump_id.rpartition("-")[2]),
                        "word": found.word,
                        "by": found.by,
                        "places": located.places if located else 0,
                        "gradients": located.gradients if located else 0,
                        "largest": round(located.largest, 3) if located and located.largest is not None else None,
                    }
                    told |= {"said": found.said[:300]} if found.word != "RIGHT" else {}
                    each = [told]
                    if now.ranks > 1:
                        each = [None] * now.ranks
                        dist.all_gather_object(each, told)
                    for told in each[: now.lanes]:
                        line(now, **told, seconds=round(time.perf_counter() - began, 1))
        except Exception as error:  # noqa: BLE001 - the cell's result
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            for cell in here[here.index(now) :] if type(error).__name__ == "Unsupported" else [now]:
                line(cell, word="UNAVAILABLE" if type(error).__name__ == "Unsupported" else "FAILED", by=[], said=words)
            if type(error).__name__ != "Unsupported":
                sys.stderr.write(f"{now}: {words}\n")
                os._exit(1)
    os._exit(0)


# ---- the parent ----


def read(file):
    return [json.loads(each) for each in file.read_text().splitlines()] if file.is_file() else []


def run(file, cache, cells):
    """Judge what the file lacks, configuration by configuration, and return every line."""
    for configuration in CONFIGURATIONS:
        while left := _left(file, [cell for cell in cells if cell.configuration == configuration]):
            before = len(read(file))
            _start(file, cache, left)
            if len(read(file)) == before:  # it died or hung without a word
                first = left[0]
                with file.open("a") as lines:
                    lines.write(
                        json.dumps(asdict(first) | {"word": "FAILED", "by": [], "said": "its process died or hung"}) + "\n"
                    )
    return read(file)


def _left(file, cells):
    names = Cell.__dataclass_fields__
    done = {Cell(**{name: line[name] for name in names}) for line in read(file)}
    return [cell for cell in cells if cell not in done]


def _start(file, cache, cells):
    """Run the workers until they end, or say nothing for too long."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    order = cache / "cells.json"
    order.write_text(json.dumps([asdict(cell) for cell in cells]))
    base = {name: value for name, value in roots.environment().items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    command = [sys.executable, __file__, "--work", str(file), str(cache), str(order)]
    ranks, started = cells[0].ranks, []
    with (cache / "workers.log").open("a") as log:
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            started.append(subprocess.Popen(command, env=base | place, stdout=log, stderr=log))
        said, since = len(read(file)), time.monotonic()
        while None in (codes := [process.poll() for process in started]) and not any(codes):
            time.sleep(0.2)
            if (count := len(read(file))) > said:
                said, since = count, time.monotonic()
            if time.monotonic() > since + PATIENCE_S:
                break
        for process in started:
            process.kill()
            process.wait()


def figures(lines):
    """Count the cells by word, and list those that are falsely red."""
    known = [line for line in lines if _is_known(line)]
    words = Counter(line["word"] for line in lines if line not in known)
    return {"cells": len(lines), **words, "truly red": len(known), "falsely red": [
        line for line in lines if line["word"] in ("WRONG", "FAILED") and line not in known
    ]}  # fmt: skip


def _is_known(line):
    words = TRUE_REDS.get((line["configuration"], line["dtype"]))
    return line["word"] == "WRONG" and words is not None and re.match(words, line["said"]) is not None


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(Path(sys.argv[2]), Path(sys.argv[3]), [Cell(**each) for each in json.loads(Path(sys.argv[4]).read_text())])
    file, cache = Path(sys.argv[1]), Path(sys.argv[2])
    cache.mkdir(parents=True, exist_ok=True)
    found = figures(run(file, cache, list(all_cells(int((sys.argv[3:] or ["2"])[0])))))
    print(json.dumps(found, indent=1))
    sys.exit(1 if found["falsely red"] else 0)
