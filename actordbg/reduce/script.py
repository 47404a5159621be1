"""Render a case as a script: standard library, torch and transformers only (and deepspeed or openrlhf where the case needs them).

    text = render(case, "packed rows are not kept apart", versions="torch 2.13.0, transformers 5.15.0")

The script defines `attempt()`, which a trial calls: it returns the largest difference in each row (or of the gradients), raises,
dies or hangs. As a program it judges that: it exits with 1 while the fault is there, with 0 when it is gone, with 2 for
anything else. It is laid out as ruff formats it.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from actordbg.actor.hub_model import looks_like_path
from actordbg.base.foreign_text import in_line
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
)  # fmt: skip

_WIDTH = 88
_MODULES = (
    "importlib.util", "os", "random", "re", "resource", "signal", "socket", "subprocess", "sys", "tempfile", "traceback", "types",
)  # fmt: skip
_PACKAGES = {
    "deepspeed.": "import deepspeed",
    "torch.": "import torch",
    "dist.": "import torch.distributed as dist",
    "rearrange": "from einops import rearrange",
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
    "fully_shard": "from torch.distributed.fsdp import fully_shard",
    "AutoConfig.": "from transformers import AutoConfig, AutoModelForCausalLM",
    "MODEL,": "from transformers import AutoModelForCausalLM",
    "HfDeepSpeedConfig": "from transformers.integrations import HfDeepSpeedConfig",
}
"""What of a script's text needs which import."""


def render(case: FaultCase, title: str, *, versions: str = "", weights: float | None = None, private: bool = False) -> str:
    """Return the script. title: the cause. versions: what it was seen with. weights: the sum of the checkpoint's weights.

    private: a checkpoint in a folder is read from the environment variable MODEL, so that no path is in the script.
    """
    parts = [_build(case, weights)]
    if case.engine == "deepspeed":
        text = templates.SHARDED.replace("STAGE", str(case.zero)).replace("BF16", str(case.dtype == "bf16"))
        text = text.replace("ATTENTION", f'"{case.attn}"').replace("DTYPE", _dtype(case))
        parts.append(text.replace("END", templates.WITH_ADAM if case.zero in (1, 2) else templates.WITHOUT_ADAM))
    if case.through == TRAINER:
        parts.append(templates.STAND_IN)
    if case.kind in (DIFFERENCE, GRADIENT):
        parts += [templates.LOG_PROBS, templates.EXPECTED]
    elif case.kind == RERUN or case.backward:
        parts.append(templates.LOG_PROBS)
    parts += [] if _twice(case) else [_actual(case)]
    parts += [_attempt(case), _main(case), templates.END]
    body = "\n\n\n".join(part.strip("\n") for part in parts)
    constants = "\n".join(_constants(case, weights, private, body))
    imports = "\n".join(_imports(constants, body))
    return f"{_head(case, title, versions)}\n\n{imports}\n\n{constants}\n\n\n{body}\n"


def in_a_folder(case: FaultCase) -> bool:
    """Return whether the case's checkpoint is a folder of this machine, not a name on the hub."""
    return bool(case.checkpoint) and (is_local(case.checkpoint) or looks_like_path(case.checkpoint))


def _twice(case: FaultCase) -> bool:
    """Return whether the case's rows are run exactly as the expected ones are, by another model."""
    plain = case.layout == ALONE and not case.cache and case.temperature == 1.0 and case.through != TRAINER
    return plain and case.kind in (DIFFERENCE, GRADIENT) and case.processes == 1


def _head(case: FaultCase, title: str, versions: str) -> str:
    seen = f"Seen with {_wrapped(_in_docstring(versions), 10)}.\n" if versions else ""
    expected = _wrapped(expectation(case), 10)
    exits = "Exits with 1 while the fault is there, and with 0 when it is gone."
    return f'"""{_wrapped(_in_docstring(title))}\n\nExpected: {expected}.\n{exits}\n{seen}"""'


def _imports(constants: str, body: str) -> Iterator[str]:
    """Yield the imports that a script needs. Constants hold foreign text, in which the name of a package needs no import."""
    text = f"{constants}\n{body}"
    yield from (f"import {name}" for name in _MODULES if re.search(rf"\b{re.escape(name)}\.", text))
    if "ModuleSpec(" in body:
        yield "from importlib.machinery import ModuleSpec"
    yield "\ntry:"
    yield from (f"    {line}" for needs, line in _PACKAGES.items() if re.search(rf"\b{re.escape(needs)}", body))
    yield templates.MISSING.rstrip()


def _in_docstring(text: str) -> str:
    """Return foreign text as a part of a docstring that cannot end it, without hidden characters."""
    return in_line(text).replace("\\", "/").replace('"""', "'''")


def expectation(case: FaultCase) -> str:
    """Say what comes when the fault is gone."""
    alone = f"those without {case.engine}" if case.engine else "those of the row alone in fp32 with eager attention"
    return {
        DIFFERENCE: f"the log-probs of each row are {alone}, to {case.limit:g} nats",
        GRADIENT: f"the gradient of each parameter is that of the rows alone, to {case.limit:g} of its norm",
        RERUN: "the same call gives the same log-probs twice",
        ERROR: "it runs",
        CRASH: "it runs",
        HANG: f"it ends within {max(60.0, case.timeout_s):g} seconds",
    }[case.kind]


def _constants(case: FaultCase, weights: float | None, private: bool, body: str) -> Iterator[str]:
    if case.config:
        yield f"CONFIG = {_literal(case.config, 9)}"
    elif private and in_a_folder(case):
        yield 'MODEL = os.environ.get("MODEL", "")  # the folder of the checkpoint'
    else:
        yield f"MODEL = {_flat(case.checkpoint)}"
    if case.synthetic and case.tokens > MOST_INLINE:
        yield f"LENGTHS = {_literal([len(row) for row in case.rows], 10)}"
        yield templates.DRAWN.replace("VOCABULARY", str(case.vocabulary)).strip("\n")
    elif case.tokens > MOST_INLINE:
        ids = "\n".join(" ".join(map(str, row)) for row in case.rows)
        yield f'IDS = """\n{ids}\n"""'
        yield "ROWS = [[int(token) for token in line.split()] for line in IDS.strip().splitlines()]"
    else:
        rows = [list(row) for row in case.rows]
        yield f"ROWS = {_literal(rows, 7)}"
    unit = "nats" if case.kind == DIFFERENCE else "of the norm"
    values = {
        "WEIGHTS": f"{weights!r}  # the sum of all weights",
        "LEFT": f"{_literal(list(case.left), 7)}  # padding in front of each row",
        "LIMIT": f"{case.limit!r}  # {unit}",
        "PACKED": case.layout == PACKED,
        "TEMPERATURE": case.temperature,
        "PATHS": _flat(PATHS),
        "ERROR": _flat(f"{case.error_class}: {case.error}"),
        "SIGNAL": _flat(case.error),
        "PROCESSES": case.processes,
        "SECONDS": max(60.0, case.timeout_s),
    }
    yield from (f"{name} = {value}" for name, value in values.items() if re.search(rf"\b{name}\b", body))


def _dtype(case: FaultCase) -> str:
    return f"torch.{DTYPES[case.dtype]}"


def _build(case: FaultCase, weights: float | None) -> str:
    if case.config:
        body = """
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIG)
    model = AutoModelForCausalLM.from_config(
        config, trust_remote_code=False, attn_implementation=attention
    )
"""
        after = "    return model.float().eval()"
        if case.dtype != "fp32":  # as a checkpoint in this dtype: buffers stay as they are
            after = f"""\
    for weight in model.parameters():
        weight.data = weight.data.to({_dtype(case)}).to(dtype)
    return model.eval()"""
    else:
        extra = "" if case.layers is None else f"        num_hidden_layers={case.layers},\n"
        body = f"""
    model = AutoModelForCausalLM.from_pretrained(
        MODEL,
        trust_remote_code=False,
        attn_implementation=attention,
        dtype={_dtype(case)},
{extra}    )
"""
        after = f"""\
    if dtype != {_dtype(case)}:  # else some stay in fp32
        model = model.to(dtype)
    return model.eval()"""
        if weights is not None:
            after = f"""\
    found = sum(weight.double().sum().item() for weight in model.parameters())
    if abs(found - WEIGHTS) > 1e-6 * max(1, abs(WEIGHTS)):
        print(f"other weights: their sum is {{found}}, not {{WEIGHTS}}")
        sys.exit(2)
{after}"""
    return f"def build(attention, dtype):\n{body.strip(chr(10))}\n{after}"


def _actual(case: FaultCase) -> str:
    rows, given = ("mine", "model, mine") if case.processes > 1 else ("ROWS", "model")
    cache = "" if case.cache else ", use_cache=False"
    doc = {ALONE: "Run each row alone.", PACKED: "Run all rows as one, packed.", PADDED: "Run all rows as one padded batch."}
    head = f'def actual({given}):\n    """{doc[case.layout]}"""\n'
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


def _suspect(case: FaultCase) -> str:
    model = f'build("{case.attn}", {_dtype(case)})'
    return f"actor_of({model})" if case.through == TRAINER else model


def _model_line(case: FaultCase) -> str:
    lines = [f"    model = {_suspect(case)}"]
    if case.engine == "deepspeed":
        inner = "model.model" if case.through == TRAINER else "model"
        lines.append(f"    {inner} = sharded({inner})")
    if case.compile:
        lines.append(f'    model = torch.compile(model, backend="{case.compile}")')
    if case.engine == "fsdp2":
        lines += ['    mesh = init_device_mesh("cpu", (PROCESSES,))', "    model = fully_shard(model, mesh=mesh)"]
    return "\n".join(lines)


def _attempt(case: FaultCase) -> str:
    grad = case.backward or case.kind == GRADIENT
    lines = [] if grad else ["@torch.no_grad()"]
    lines.append("def attempt():")
    lines.append(f'    """{_RETURNS[case.kind]}"""')
    if case.memory:
        lines.append(f"    resource.setrlimit(resource.RLIMIT_AS, ({case.memory}, {case.memory}))")
    given, actual = "model", "expected" if _twice(case) else "actual"
    if case.engine == "deepspeed":  # its own collectives would be compiled first
        lines.append('    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False')
        lines.append('    os.environ.setdefault("LOCAL_RANK", "0")')
    if case.processes > 1 or case.engine:
        alone = "" if case.processes > 1 else ", store=dist.HashStore(), rank=0, world_size=1"
        lines.append(f'    dist.init_process_group("gloo"{alone})')
    if case.processes > 1:
        lines.append("    mine = ROWS[dist.get_rank() :: PROCESSES] or ROWS[:1]")
        given = "model, mine"
    lines.append(_model_line(case))
    run = f"{actual}({given})"
    if case.kind in templates.ATTEMPTS:
        right = f"{actual}({_suspect(case)})" if case.engine else 'expected(build("eager", torch.float32))'
        lines.append(templates.ATTEMPTS[case.kind].strip("\n").replace("RUN", run).replace("RIGHT", right))
    else:
        lines.append(f"    (-torch.cat({run}).mean()).backward()" if case.backward else f"    {run}")
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
    if case.kind in SEVERAL:  # it needs processes of its own
        shown = "-signal.Signals[SIGNAL] in codes" if case.kind == CRASH else "None in codes and set(codes) <= {None, 0}"
        first = "        actor_class()\n" if case.through == TRAINER else ""
        return templates.LAUNCH.rstrip() + "\n\n" + templates.MAIN_LAUNCHED.replace("SHOWN", shown).replace("FIRST", first)
    if case.kind == ERROR:
        return templates.MAIN_ERROR
    unit = "of its norm" if case.kind == GRADIENT else "nats"
    what = "parameter" if case.kind == GRADIENT else "row"
    text = templates.MAIN_DIFFERENCES.replace("WHAT", what).replace("UNIT", unit)
    return text.replace("LIMIT", "0") if case.kind == RERUN else text


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
        literal = repr(value) if '"' in value and "'" not in value else json.dumps(value, ensure_ascii=False)
        return in_line(literal)  # it writes hidden characters as Python does
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flat(key)}: {_flat(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return "[" + ", ".join(map(_flat, value)) + "]" if isinstance(value, list | tuple) else repr(value)


def _wrapped(text: str, before: int = 3) -> str:
    return textwrap.fill(" ".join(text.split()), _WIDTH, initial_indent=" " * before).lstrip()
