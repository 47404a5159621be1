"""Twenty faults drawn from the table of planted faults, each in an environment of its own: check, reduce, repro, and the repro without it.

python plantedrepros.py FOLDER [COUNT] [SEED]

A fault counts if its repro exits with 1 in a fresh interpreter that has the fault, and with 0 in one without the fault and without
actordbg. What was done is in FOLDER/outcomes.jsonl, and the same command continues. Faults outside of the model (the trainer's
log-probs) are not drawn: they are planted in a process, not in a package. Nor are those of Gemma 2: it is wrong under sdpa without
a fault, and its eager attention is what the truth runs.
"""

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from lawcases import dump_of
from planted_table import FAULTS
from plantedenvs import actordbg, environment, from_the_table
from plantedfaults import four_layers

from actordbg.store import payload
from actordbg.store.layout import Store


def drawn(count, seed):
    inside = [fault for fault in FAULTS if fault.plant.__qualname__.split(".")[0] != "outside"]
    order = random.Random(seed).sample(inside, len(inside))
    return [fault for fault in order if fault.family != "gemma2"][:count]


def outcome(fault, folder):
    """Plant the fault, and say how far the way to its repro went."""
    faulty, clean = environment(folder / "faulty", from_the_table(fault.name)), environment(folder / "clean", "")
    model = four_layers(folder.parent, fault.family)
    store, script = folder / "store", folder / "repro.py"
    words = ["--packing" if fault.packed else "--no-packing", "--backward" if fault.trains else "--no-backward"]
    dump = dump_of(length=64, actions=40)
    Store(store).create().publish_dump(*payload.encode(dump.record, dump.tensors))
    checked = actordbg(
        faulty, "check", "--model", str(model), "--through", "rows", "--dtype", "fp32", "--attn", "sdpa", *words, "-q",
        store=store, code=None,
    )  # fmt: skip
    said = {"name": fault.name, "checked": checked.split("\n")[0][:200]}
    if not checked.startswith(("WRONG", "FAILED")):
        return said | {"repro": False, "why": "check does not see it"}
    reduced = actordbg(faulty, "reduce", "last", "--trials", "90", "--seconds", "240", "-q", store=store, code=None)
    said |= {"reduced": reduced.split("\n")[0][:300]}
    actordbg(faulty, "repro", "last", "-o", str(script), store=store, code=None)
    if not script.exists():
        return said | {"repro": False, "why": "no script shows it"}
    codes = [
        subprocess.run([str(python), "-I", str(script)], capture_output=True, check=False).returncode
        for python in (faulty, clean)
    ]
    text = script.read_text()
    free = "actordbg" not in text and not re.search(r"^(import|from) (openrlhf|deepspeed)", text, re.MULTILINE)
    return said | {"repro": codes == [1, 0] and free, "codes": codes, "lines": len(text.splitlines())}


def main(folder, count=20, seed=30):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "outcomes.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for number, fault in enumerate(drawn(count, seed)):
        if fault.name in {each["name"] for each in done}:
            continue
        began = time.monotonic()
        said = outcome(fault, folder / f"{number:02d}-{time.time_ns()}") | {"seconds": round(time.monotonic() - began)}
        done.append(said)
        with open(file, "a") as lines:
            lines.write(json.dumps(said) + "\n")
        print(f"{'repro' if said['repro'] else 'none '}  {fault.name:36}{json.dumps(said)[:230]}", flush=True)
    print(f"{sum(each['repro'] for each in done)} of {len(done)} faults have a repro that fails with it and passes without it")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *map(int, sys.argv[2:]))
