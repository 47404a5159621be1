"""The faults of `planted_table`, and what the judge says of each. Run in a process of its own.

python plantedfaults.py everything MODEL_CACHE      prints a line for each fault and dtype, and the figures
python plantedfaults.py some MODEL_CACHE            asserts what is said of some of them

A fault that changes no bit of what the Actor computes in a dtype does not count there.
"""

import os
import re
import sys
from dataclasses import dataclass, replace

from actorcases import main
from amounts import first_or_all
from judged import Truths, judge, same_bits
from lawcases import FAMILIES, build_model, dump_of
from planted_table import BOTH, FAULTS

from actordbg.actor.models import once
from actordbg.actor.session import open_actor
from actordbg.config.replay_config import ReplayConfig


@dataclass(frozen=True)
class Outcome:
    """What was said of a fault in a dtype. changed: whether it changed a bit of what the Actor computed."""

    name: str
    dtype: str
    changed: bool
    red: bool
    by: tuple[str, ...]
    module: bool
    cause: bool
    rows: bool
    said: str


def four_layers(cache, family):
    config = dict(FAMILIES[family]) | {"num_hidden_layers": 4}
    if family == "gemma2":  # a soft cap that these small scores come near
        config |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "attn_logit_softcapping": 1.0}
    return once(cache / f"{family}-planted", lambda folder: build_model(folder, config))


def run(cache, faults, dtypes=BOTH):
    """Plant each fault in a loaded Actor, and judge it; the healthy Actor has to be right before and after."""
    for dtype in dtypes:
        for family, trains in dict.fromkeys((fault.family, fault.trains) for fault in faults):
            chosen = [fault for fault in faults if (fault.family, fault.trains) == (family, trains) and dtype in fault.dtypes]
            if not chosen:
                continue
            model = str(four_layers(cache, family))
            dump = dump_of(length=64, actions=40)
            truth = Truths(cache / f"{family}-{trains}", model, dtype, trains).of(dump, cache)
            attn = "eager" if family == "gemma2" else None  # sdpa leaves out its soft cap
            config = ReplayConfig(model=model, dtype=dtype, attn=attn, backward=trains, keep_gradients=trains)
            with open_actor(config, defaults=dump.record, model_cache=cache) as session:
                healthy = {}
                for packed in dict.fromkeys(fault.packed for fault in chosen):
                    healthy[packed] = _judged(session, dump, truth, cache, config, packed)
                    assert not healthy[packed].by, (family, dtype, packed, healthy[packed].lines)
                for fault in chosen:
                    with fault.plant(session.model):
                        found = _judged(session, dump, truth, cache, config, fault.packed)
                    yield _outcome(fault, dtype, found, healthy[fault.packed])
                again = _judged(session, dump, truth, cache, config, chosen[-1].packed)
                assert same_bits(again, healthy[chosen[-1].packed]), "the last fault is gone"


def _judged(session, dump, truth, cache, config, packed):
    session.switch(replace(config, packing=packed), dump.record)
    return judge(session, dump, truth, cache / "kept")


def _outcome(fault, dtype, found, healthy):
    wrong = found.local.located.wrong if found.local.located else ()
    names_none = not wrong and not found.local.differences
    rows = wrong[0].rows if wrong else ()
    return Outcome(
        fault.name,
        dtype,
        not same_bits(found, healthy),
        bool(found.by),
        found.by,
        fault.module in found.said if fault.module else names_none,
        bool(re.search(fault.cause, found.said)),
        fault.rows is None or set(rows) == set(fault.rows),
        found.said,
    )


def figures(outcomes):
    """Count what the bars are about, of the faults that changed what the Actor computed."""
    real = [each for each in outcomes if each.changed]
    reds = [each for each in real if each.red]
    return {
        "changed": len(real),
        "of": len(outcomes),
        "green": [f"{each.name} ({each.dtype})" for each in real if not each.red],
        "module": round(sum(each.module for each in reds) / max(1, len(reds)), 3),
        "cause": round(sum(each.cause for each in reds) / max(1, len(reds)), 3),
        "rows": round(sum(each.rows for each in reds) / max(1, len(reds)), 3),
    }


SOME = first_or_all(
    (
        "a residual x0.98", "a scale x1.02 in the kernel", "interleaved pairs", "positions jump at 20", "router weights not normalised",
        "key heads swapped", "a norm that removes the mean", "temperature x1.02", "gate_proj x0.99", "cosines x1.01", "gelu for silu",
        "the third expert for the second", "final norm x1.01", "half of the dimensions turned",
    ),
    5,
)  # fmt: skip


def some(cache):
    """In bf16 every fault is red, with its module and its cause."""
    for outcome in run(cache, [fault for fault in FAULTS if fault.name in SOME], ["bf16"]):
        assert outcome.changed and outcome.red and outcome.module and outcome.cause and outcome.rows, outcome


def everything(cache):
    found = {}
    for dtype in os.environ.get("DTYPES", "bf16 fp32").split():
        outcomes = []
        for outcome in run(cache, FAULTS, [dtype]):
            outcomes.append(outcome)
            good = (outcome.red, outcome.module, outcome.cause, outcome.rows)
            marks = "".join(letter if ok else "-" for letter, ok in zip("rmcw", good, strict=True)) if outcome.changed else "===="
            print(f"{dtype} {marks:5}{outcome.name:36}{','.join(outcome.by):22}{outcome.said[:170]}", flush=True)
        found[dtype] = figures(outcomes)
    return found


if __name__ == "__main__":
    main(sys.argv[1:], globals())
