"""What is handed to a maintainer: the script, run once as they will run it, and the text of an issue around it.

    script = script_of(record)                       # runs in a fresh interpreter without actordbg, or raises BadResult
    issue_text(record, script)

Neither has a path of this machine or a text of a prompt. Who is at fault is a guess, and said as one.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from actordbg.actor.model_code import require_consent
from actordbg.base.errors import BadResult, UsageError
from actordbg.base.foreign_text import fenced, in_line, in_markdown
from actordbg.config.replay_config import TINY
from actordbg.reduce.case import DIFFERENCE, MODEL, PACKED, RERUN, FaultCase
from actordbg.reduce.reduction import Reduction
from actordbg.reduce.script import expectation, in_a_folder, render

PATIENCE_S = 600.0
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES")
"""Environment variables that a fresh run keeps."""
_SHOWN = re.compile("WRONG|what comes")
"""What a script prints before it exits with 1; an interpreter that fails exits with 1 too."""
_STATE = re.compile(r"linear_attn|mamba|conv|mixer|recurrent|ssm")
"""Parts of the names of modules with a state along the sequence."""


@dataclass(frozen=True)
class Script:
    """A script that showed the fault. output: what it printed. fixed: its exit code where the fault is known to be gone."""

    text: str
    output: str
    fixed: int | None = None


def title_of(record: Reduction) -> str:
    """Return the cause as a title: "qwen3_5_text, rows packed: row 1 depends on row 0 in the attention of ..."."""
    case = record.case
    checkpoint = "a checkpoint" if in_a_folder(case) else Path(case.checkpoint).name  # a folder's name is private too
    about = [str((case.config or {}).get("model_type") or checkpoint)]
    if case.layout == PACKED and record.fingerprint.kind == DIFFERENCE:
        about.append("rows packed")
    if case.compile:
        about.append(f"torch.compile with {case.compile}")
    if case.processes > 1:
        about.append(f"{case.processes} processes under {case.engine}")
    return in_line(f"{', '.join(about)}: {record.fingerprint.said}")


def script_of(record: Reduction, fixed: str | None = None) -> Script:
    """Render the script, and run it in a fresh interpreter. fixed: an interpreter in whose environment the fault is gone.

    Raises BadResult if the script does not show the fault there, or shows it under `fixed`.
    """
    case = record.case
    weights = _sum_of_weights(case) if case.checkpoint else None
    seen = ", ".join(f"{name} {version}" for name, version in _versions(record))
    text = render(case, title_of(record), versions=f"{seen}, Python {platform.python_version()}", weights=weights, private=True)
    code, output = run_fresh(text, case)
    if code != 1 or not _SHOWN.search(output):
        raise BadResult(
            f"the script does not show it in a fresh interpreter: exit code {code}\n{output[-2000:]}",
            hint="what shows it here is in this process's environment: PYTHONPATH, a patched class, environment variables",
        )
    gone = None if fixed is None else run_fresh(text, case, fixed)
    if gone is not None and gone[0] != 0:
        code, said = gone
        raise BadResult(f"the script exits with {code} under {fixed}\n{said[-2000:]}", hint="is the fault gone there?")
    return Script(text, output, gone and gone[0])


def run_fresh(text: str, case: FaultCase, python: str = sys.executable) -> tuple[int, str]:
    """Run a script as a maintainer does: alone in an empty folder, isolated, with few environment variables."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    require_consent(case.checkpoint or TINY)
    if in_a_folder(case):
        kept["MODEL"] = os.path.abspath(case.checkpoint)
    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        path = Path(folder) / "repro.py"
        path.write_text(text)
        try:
            ran = subprocess.run(
                [python, "-I", str(path)], cwd=folder, env=kept, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=PATIENCE_S, check=False,
            )  # fmt: skip
        except FileNotFoundError:
            raise UsageError(f"{python} is not an interpreter", hint="name the python of another environment") from None
        except subprocess.TimeoutExpired:
            return 124, f"it did not end within {PATIENCE_S:g} s"
    return ran.returncode, ran.stdout if ran.returncode in (0, 1) and ran.stdout else ran.stdout + ran.stderr


def _sum_of_weights(case: FaultCase) -> float:
    """Return the sum of a checkpoint's weights, as the script says it when it finds another."""
    asked = replace(case, kind=RERUN, through=MODEL, engine="", processes=1, memory=None)
    output = run_fresh(render(asked, "", weights=-1e300, private=True), case)[1]
    if (total := re.search(r"their sum is (\S+),", output)) is None:
        raise BadResult(f"the script cannot load the checkpoint\n{output[-2000:]}", hint="it needs transformers and the weights")
    return float(total[1])


def _versions(record: Reduction) -> list[tuple[str, str]]:
    known = record.versions or {}
    return [(name, known[name]) for name in ("torch", "transformers", *record.case.packages) if name in known]


def issue_text(record: Reduction, script: Script) -> str:
    """Return the issue as Markdown: environment, what happens, what is expected, the script, what was tried, whose it is."""
    case = record.case
    needs = f" It needs {' and '.join(case.packages)}." if case.packages else ""
    what = "\n".join(script.output.strip().splitlines()[-12:])
    aside = list((record.aside or {}).items())
    tried = [f"- {in_markdown(f'{words}: {result}')}" for words, result in (record.tried or {}).items()]
    lines = [
        f"# {in_markdown(title_of(record))}",
        "## Environment",
        "\n".join(f"- {in_markdown(f'{name} {version}')}" for name, version in _versions(record)),
        f"- Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "## What happens",
        _happens(record),
        fenced(what),
        "## What is expected",
        f"Expected: {expectation(case)}.",
        "## Script",
        f"It exits with 1 while this happens, and with 0 when it is gone.{needs}",
        fenced(script.text.rstrip(), "python"),
        "## What was tried",
        "\n".join(tried or ["- nothing beside it"]),
        *[f"A smaller case shows something else: {in_markdown(f'{fault} ({size})')}." for fault, size in aside[:3]],
        "## Where this may belong",
        "\n\n".join(_guess(record)),
    ]
    return "\n\n".join(lines) + "\n"


def _happens(record: Reduction) -> str:
    case = record.case
    broken = in_markdown(", ".join(record.fingerprint.laws))
    laws = f" Broken invariances: {broken}." if broken else ""
    weights = "random weights from a seed" if case.config else "the checkpoint's weights"
    return f"{in_markdown(record.fingerprint.said, leading=True)}.{laws} Seen with {case.words}, {weights}, {case.dtype}."


def _guess(record: Reduction) -> Iterator[str]:
    """Say what each project would need to do, and whose code it is: guesses from the module, the frames and the settings."""
    fingerprint, case = record.fingerprint, record.case
    if fingerprint.behind and _STATE.search(fingerprint.module):
        yield (
            "A guess, from the module: **transformers**. These layers have a state along the sequence. It is reset at the "
            "borders of packed rows only by kernels that are given them (`cu_seq_lens_q`, and `seq_idx` for the convolution). "
            "The code in torch ignores both, without an error. transformers would need to use `cu_seq_lens_q` there too, derive "
            "it from `position_ids`, or refuse packed rows."
        )
        yield (
            "**OpenRLHF** packs all rows into one and passes `position_ids` only. It would have to pass `cu_seq_lens_q` and "
            "`cu_seq_lens_k` (int32, the cumulated lengths of the rows, from 0), and `seq_idx`; or refuse `packing_samples` for "
            "such models."
        )
    elif fingerprint.cause == "cache":
        yield (
            "A guess, from the call: **transformers**. It keeps packed rows apart by `position_ids` only while no cache is made, "
            "and `use_cache` is on by default. It would need to find the borders with a cache as well, or to warn. **Callers** "
            "have to pass `use_cache=False`."
        )
    elif fingerprint.cause == "kernel":
        yield (
            "A guess, from the attention: **transformers**. Another attention gives the right log-probs from the same weights. "
            "transformers would need to apply the missing operation, or to refuse this attention for this model. **Trainers** "
            'should use `attn_implementation="eager"` for it meanwhile.'
        )
    else:
        frames = [frame for frame in record.stack if not frame.startswith("case.py")]
        package = frames[-1].split("/")[0] if frames and "/" in frames[-1] else ""
        owner = package or (case.packages or ["transformers or torch"])[-1]
        source = "the innermost frame" if frames else "the module and the settings"
        yield f"A guess, from {source}: **{in_markdown(owner)}**."
        if frames:
            yield fenced("\n".join(frames[-5:]))
