"""Render a case as a script: standard library, torch and transformers only (and deepspeed or openrlhf where the case needs them).

    text = render(case, "packed rows are not kept apart", versions="torch 2.13.0, transformers 5.15.0")

The script defines `attempt()`, which a trial calls: it returns the largest difference in each row (or of the gradients), raises,
dies or hangs. As a program it judges that: it exits with 1 while the fault is there, with 0 when it is gone, with 2 for
anything else. It is laid out as ruff formats it.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator
from typing import Any

from actordbg.actor.hub_model import looks_like_path
from actordbg.config.choices import is_local
from actordbg.config.replay_config import DTYPES
from actordbg.reduce import templates
from actordbg.reduce.case import (
    ALONE,
    CRASH,
    DIFFERENCE,
    ERROR,
    GRADIENT,
    HANG,
    MOST_INLINE,
    PACKED,
    PADDED,
    PATHS,
    RERUN,
    SEVERAL,
    TRAINER,
    FaultCase,
)

_WIDTH = 88


def render(case: FaultCase, title: str, *, versions: str = "", weights: float | None = None, private: bool = False) -> str:
    """Return the script. title: the cause. versions: what it was seen with. weights: the sum of the checkpoint's weights.

    private: a checkpoint in a folder is read from the environment variable MODEL, so that no path is in the script.
    """
    top = "\n".join([*_head(case, title, versions, private), *_constants(case, weights, private)])
    parts = [top, _build(case, weights)]
    if case.through == TRAINER:
        parts.append(templates.STAND_IN)
    if case.kind in (DIFFERENCE, GRADIENT):
        parts += [templates.LOG_PROBS, templates.EXPECTED]
    elif case.kind == RERUN or case.backward:
        parts.append(templates.LOG_PROBS)
    parts += [] if _twice(case) else [_actual(case)]
    parts += [_attempt(case), _main(case)]
    return "\n\n\n".join(part.strip("\n") for part in [*parts, templates.END]) + "\n"


def in_a_folder(case: FaultCase) -> bool:
    """Return whether the case's checkpoint is a folder of this machine, not a name on the hub."""
    return bool(case.checkpoint) and (is_local(case.checkpoint) or looks_like_path(case.checkpoint))


def _twice(case: FaultCase) -> bool:
    """Return whether the case's rows are run exactly as the expected ones are, by another model."""
    plain = case.layout == ALONE and not case.cache and case.temperature == 1.0 and case.through != TRAINER
    return plain and case.kind in (DIFFERENCE, GRADIENT) and case.processes == 1


def launched(case: FaultCase) -> bool:
    """Return whether the attempt needs processes of its own."""
    return case.kind in SEVERAL


def _head(case: FaultCase, title: str, versions: str, private: bool) -> Iterator[str]:
    yield f'"""{_wrapped(_in_docstring(title))}'
    yield ""
    yield f"Expected: {_wrapped(_expectation(case), 10)}."
    yield "Exits with 1 while the fault is there, and with 0 when it is gone."
    if versions:
        yield f"Seen with {_wrapped(_in_docstring(versions), 10)}."
    yield '"""'
    yield ""
    modules = {"sys", "traceback"}
    modules |= {"os", "socket", "subprocess"} if launched(case) else set()
    modules |= {"os"} if private and in_a_folder(case) else set()
    modules |= {"random"} if _seeded(case) else set()
    modules |= {"resource"} if case.memory else set()
    modules |= {"re"} if case.kind == ERROR else set()
    modules |= {"signal"} if case.kind == CRASH else set()
    modules |= {"importlib.util", "types"} if case.through == TRAINER else set()
    yield from (f"import {name}" for name in sorted(modules))
    if case.through == TRAINER:
        yield "from importlib.machinery import ModuleSpec"
    yield ""
    yield "try:"
    if case.engine == "deepspeed":
        yield "    import deepspeed"
    yield "    import torch"
    if case.processes > 1:
        yield "    import torch.distributed as dist"
    if case.through == TRAINER:
        yield "    from einops import rearrange"
    if case.engine == "fsdp2":
        yield "    from torch.distributed.device_mesh import init_device_mesh"
        yield "    from torch.distributed.fsdp import fully_shard"
    yield f"    from transformers import {'AutoConfig, ' * bool(case.config)}AutoModelForCausalLM"
    yield from templates.MISSING.splitlines()
    yield ""


def _in_docstring(text: str) -> str:
    """Return foreign text as a part of a docstring that cannot end it."""
    return text.replace("\\", "/").replace('"""', "'''").removesuffix('"')


def _expectation(case: FaultCase) -> str:
    alone = "those of the row alone in fp32 with eager attention"
    return {
        DIFFERENCE: f"the log-probs of each row are {alone}, to {case.limit:g} nats",
        GRADIENT: f"the gradient of each parameter is that of the rows alone, to {case.limit:g} of its norm",
        RERUN: "the same call gives the same log-probs twice",
        ERROR: "it runs",
        CRASH: "it runs",
        HANG: f"it ends within {max(60.0, case.timeout_s):g} seconds",
    }[case.kind]


def _constants(case: FaultCase, weights: float | None, private: bool) -> Iterator[str]:
    if case.config:
        yield f"CONFIG = {_literal(case.config, 9)}"
    else:
        if private and in_a_folder(case):
            yield 'MODEL = os.environ.get("MODEL", "")  # the folder of the checkpoint'
        else:
            yield f"MODEL = {json.dumps(case.checkpoint)}"
        if weights is not None:
            yield f"WEIGHTS = {weights!r}  # the sum of all weights"
    if _seeded(case):
        lengths = _literal([len(row) for row in case.rows], 10)
        yield f"LENGTHS = {lengths}"
        yield "ROWS = ["
        yield f"    random.Random(row).choices(range({case.vocabulary}), k=length)"
        yield "    for row, length in enumerate(LENGTHS)"
        yield "]"
    elif case.tokens > MOST_INLINE:
        yield 'IDS = """'
        yield from (" ".join(map(str, row)) for row in case.rows)
        yield '"""'
        yield "ROWS = [[int(token) for token in line.split()] for line in IDS.strip().splitlines()]"
    else:
        yield f"ROWS = {_literal([list(row) for row in case.rows], 7)}"
    if case.layout == PADDED:
        yield f"LEFT = {_literal(list(case.left), 7)}  # padding in front of each row"
    if case.kind in (DIFFERENCE, GRADIENT):
        yield f"LIMIT = {case.limit!r}  # {'nats' if case.kind == DIFFERENCE else 'of the norm'}"
    if case.through == TRAINER:
        yield f"PACKED = {case.layout == PACKED}"
        yield f"TEMPERATURE = {case.temperature!r}"
    if case.kind == ERROR:
        yield f"PATHS = {_flat(PATHS)}"
        yield f"ERROR = {_flat(f'{case.error_class}: {case.error}')}"
    if case.kind == CRASH:
        yield f"SIGNAL = {_flat(case.error)}"
    if launched(case):
        yield f"PROCESSES = {case.processes}"
        yield f"SECONDS = {max(60.0, case.timeout_s)!r}"


def _seeded(case: FaultCase) -> bool:
    return case.synthetic and case.tokens > MOST_INLINE


def _dtype(case: FaultCase) -> str:
    return f"torch.{DTYPES[case.dtype]}"


def _build(case: FaultCase, weights: float | None) -> str:
    rounded = "" if case.dtype == "fp32" else f".to({_dtype(case)})"
    if case.config:
        body = """
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIG)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
"""
        after = f"    return model.float(){rounded}.to(dtype).eval()"
    else:
        more = [f"revision={json.dumps(case.revision)}"] * bool(case.revision)
        more += [f"num_hidden_layers={case.layers}"] * (case.layers is not None)
        extra = "".join(f"        {each},\n" for each in more)
        body = f"""
    model = AutoModelForCausalLM.from_pretrained(
        MODEL,
        attn_implementation=attention,
        dtype={_dtype(case)},
{extra}    )
"""
        after = "    return model.to(dtype).eval()"
        if weights is not None:
            after = f"""\
    found = sum(weight.double().sum().item() for weight in model.parameters())
    if abs(found - WEIGHTS) > 1e-6 * max(1, abs(WEIGHTS)):
        print(f"other weights: their sum is {{found}}, not {{WEIGHTS}}")
        sys.exit(2)
{after}"""
    return f"def build(attention, dtype):\n{body.strip(chr(10))}\n{after}"


def _actual(case: FaultCase) -> str:
    rows = "mine" if case.processes > 1 else "ROWS"
    cache = "" if case.cache else ", use_cache=False"
    doc = {ALONE: "Run each row alone.", PACKED: "Run all rows as one, packed.", PADDED: "Run all rows as one padded batch."}
    head = f'def actual(model{", mine" * (case.processes > 1)}):\n    """{doc[case.layout]}"""\n'
    if case.through == TRAINER:
        return head + templates.TRAINERS.replace("ROWS", rows)
    if case.layout == ALONE:
        run = f"    outputs = [model(torch.tensor([row]){cache}).logits[0] for row in {rows}]"
    else:
        text = templates.PACKED if case.layout == PACKED else templates.PADDED
        run = text.strip("\n").replace("ROWS", rows).replace(", use_cache=False", cache)
        if case.borders:
            call = "    logits = model(ids, position_ids=positions"
            run = run.replace(call, f"{templates.BORDERS.replace('ROWS', rows)}{call}, **borders")
    if case.kind in (ERROR, CRASH, HANG) and not case.backward:
        return f"{head}{run}\n    return outputs"
    scale = "" if case.temperature == 1.0 else f" / {case.temperature!r}"
    return f"{head}{run}\n    return [log_probs(logits{scale}, row) for logits, row in zip(outputs, {rows})]"


def _model_line(case: FaultCase) -> str:
    lines = [f'    model = build("{case.attn}", {_dtype(case)})']
    if case.through == TRAINER:
        lines = [f'    model = build_actor("{case.attn}", {_dtype(case)})']
    if case.compile:
        lines.append(f'    model = torch.compile(model, backend="{case.compile}")')
    if case.engine == "fsdp2":
        lines += ['    mesh = init_device_mesh("cpu", (PROCESSES,))', "    model = fully_shard(model, mesh=mesh)"]
    elif case.engine == "deepspeed":
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": case.zero},
            "bf16": {"enabled": case.dtype == "bf16"},
        }
        lines.append(f"    settings = {_literal(settings, 15, 4)}")
        lines.append("    model = deepspeed.initialize(model=model, config=settings)[0]")
    return "\n".join(lines)


def _attempt(case: FaultCase) -> str:
    grad = case.backward or case.kind == GRADIENT
    lines = [] if grad else ["@torch.no_grad()"]
    lines.append("def attempt():")
    lines.append(f'    """{_RETURNS[case.kind]}"""')
    if case.memory:
        lines.append(f"    resource.setrlimit(resource.RLIMIT_AS, ({case.memory}, {case.memory}))")
    given, actual = "model", "expected" if _twice(case) else "actual"
    if case.processes > 1:
        start = "deepspeed.init_distributed" if case.engine == "deepspeed" else "dist.init_process_group"
        if case.engine == "deepspeed":  # its own collectives would be compiled first
            lines.append('    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False')
        lines.append(f'    {start}("gloo")')
        lines.append("    mine = ROWS[dist.get_rank() :: PROCESSES] or ROWS[:1]")
        given = "model, mine"
    lines.append(_model_line(case))
    if case.kind == DIFFERENCE:
        lines += [
            '    right = expected(build("eager", torch.float32))',
            f"    pairs = zip({actual}({given}), right)",
            "    return [float((a - b).abs().max()) if len(b) else 0.0 for a, b in pairs]",
        ]
    elif case.kind == GRADIENT:
        lines += [
            '    right = build("eager", torch.float32)',
            f"    for outputs in ({actual}({given}), expected(right)):",
            "        (-torch.cat(outputs).mean()).backward()",
            "    pairs = zip(model.parameters(), right.parameters())",
            "    pairs = [(a.grad, b.grad) for a, b in pairs if b.grad is not None]",
            "    zero = [torch.zeros_like(b) if a is None else a.float() for a, b in pairs]",
            "    norms = [float(b.norm()) for _, b in pairs]",
            "    apart = [float((a - b).norm()) for a, (_, b) in zip(zero, pairs)]",
            "    return [a / b for a, b in zip(apart, norms) if b > 1e-6]",
        ]
    elif case.kind == RERUN:
        lines += [
            f"    once, again = actual({given}), actual({given})",
            "    pairs = zip(once, again)",
            "    return [float((a - b).abs().max()) if len(b) else 0.0 for a, b in pairs]",
        ]
    else:
        lines.append(f"    (-torch.cat(actual({given})).mean()).backward()" if case.backward else f"    actual({given})")
        if case.processes > 1:
            lines += ["    dist.barrier()", "    dist.destroy_process_group()"]
        lines.append("    return []")
    return "\n".join(lines)


_RETURNS = {
    DIFFERENCE: "Return the largest difference in each row, nats.",
    GRADIENT: "Return the relative difference of each parameter's gradient.",
    RERUN: "Return the largest difference in each row, nats.",
    ERROR: "Run it: this is what fails.",
    CRASH: "Run it: this is what dies.",
    HANG: "Run it: this is what hangs.",
}


def _main(case: FaultCase) -> str:
    if launched(case):
        shown = "-signal.Signals[SIGNAL] in codes" if case.kind == CRASH else "None in codes and set(codes) <= {None, 0}"
        return templates.LAUNCH.rstrip() + "\n\n" + templates.MAIN_LAUNCHED.replace("SHOWN", shown)
    if case.kind == ERROR:
        return templates.MAIN_ERROR
    unit = "nats" if case.kind != GRADIENT else "of its norm"
    limit = "0" if case.kind == RERUN else "LIMIT"
    what = "parameter" if case.kind == GRADIENT else "row"
    return f'''
def main():
    differences = attempt()
    for number, difference in enumerate(differences):
        verdict = "right" if difference <= {limit} else "WRONG"
        print(f"{what} {{number}}: off by {{difference:.3g}} {unit}: {{verdict}}")
    print("expected: at most", {limit})
    return int(not all(difference <= {limit} for difference in differences))
'''


def _literal(value: Any, before: int, indent: int = 0) -> str:
    """Write plain data as ruff formats it: on one line, or else an item on each. before: columns in front of it."""
    flat = _flat(value)
    if len(flat) + before <= _WIDTH or not isinstance(value, dict | list) or not value:
        return flat
    inner = " " * (indent + 4)
    if isinstance(value, dict):
        names = {key: f"{inner}{_flat(key)}: " for key in value}
        lines = [f"{name}{_literal(value[key], len(name) + 1, indent + 4)}," for key, name in names.items()]
    else:
        lines = [f"{inner}{_literal(item, indent + 5, indent + 4)}," for item in value]
    ends = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([ends[0], *lines, " " * indent + ends[1]])


def _flat(value: Any) -> str:
    if isinstance(value, str):  # ruff prefers the quotes that need no escapes
        return repr(value) if '"' in value and "'" not in value else json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flat(key)}: {_flat(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return "[" + ", ".join(map(_flat, value)) + "]" if isinstance(value, list | tuple) else repr(value)


def _wrapped(text: str, before: int = 3) -> str:
    return textwrap.fill(" ".join(text.split()), _WIDTH, initial_indent=" " * before).lstrip()
