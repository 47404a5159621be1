"""The reference page of adapters: what their seams declare, and what of it ran, in which version."""

from __future__ import annotations

from collections.abc import Iterator

from actordbg.trainers.find_adapter import BUILT_IN, HOSTS, installed

INTRODUCTION = """\
# Trainers

What each adapter declares, and what of it ran. "ran": the trainer's own code, on a CPU; that is `FSDPEngine.train_batch` of
AReaL, `FSDPTrainRayActor._train_step` of miles, `forward` and `compute_loss` of prime-rl, `train_one_step` of slime,
`automodel/train.py` and `ClippedPGLossFn` of NeMo-RL, each around a small Llama, with imports that were not there replaced.
"read": the source only. "-": not supported, or there is nothing of it. Nothing here ran on a GPU.
[Other trainers](../how-to/other-trainers.md) says how to use them.
"""
HEAD = (
    "Trainer",
    "Version",
    "Record",
    "Losses",
    "Rows equal",
    "Outputs equal to the truth",
    "`--through trainer`",
    "Faults named",
)
RAN: dict[str, tuple[str, str, str, str, str, str]] = {
    "areal": ("1.0.4 (4aef98d), FSDP engine", "ran", "ran", "ran", "ran", "`benchmarks/own_functions.py`"),
    "miles": ("0.1.0 (31f1ca9), FSDP backend", "ran", "ran", "ran", "ran", "`benchmarks/own_functions.py`"),
    "molt": ("0.2.1", "ran", "ran", "ran", "ran", "`benchmarks/own_classes.py`"),
    "nemo-rl": ("0.6.0 (7ea279a), automodel", "ran", "ran", "ran", "ran", "`benchmarks/own_functions.py`"),
    "plain": ("transformers 5.15.0, 5.24.0", "ran", "-", "ran", "ran", "`benchmarks/own_functions.py`"),
    "prime-rl": ("0.8.0 (559b447)", "ran", "ran", "ran", "ran", "`benchmarks/own_functions.py`"),
    "skyrl": ("0.3.0; a956457 read", "ran", "ran", "ran", "ran", "`benchmarks/own_classes.py`"),
    "slime": ("0.3.1 (624b824), Megatron", "ran", "ran", "ran", "ran", "`benchmarks/own_functions.py`"),
    "trl": (
        "1.16.0, with transformers 5.15.0 and 5.24.0",
        "ran",
        "ran",
        "ran",
        "ran",
        "`benchmarks/faulty_grpo.py`, `faulty_trl.py`",
    ),
    "verl": (
        "0.9.1, FSDP and FSDP2; VeOmni, TorchTitan, Automodel read",
        "ran",
        "ran",
        "ran",
        "ran",
        "`benchmarks/own_classes.py`",
    ),
}
"""Of each adapter: the version; whether forwards and losses ran, rows, truth and faults. One without a row fails the build."""


def trainers_markdown() -> str:
    """The whole page."""
    rows = [HEAD, ("---",) * len(HEAD), *map(_row, sorted(BUILT_IN))]
    table = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([INTRODUCTION, *table, "", *_functions(), ""])


def _row(name: str) -> tuple[str, ...]:
    version, record, losses, rows, truth, faults = RAN[name]
    seams = installed(name).seams
    again = [seam for seam in seams if seam.again]
    through = "-" if not again else "ran, also with FSDP2" if any(seam.shards for seam in again) else "ran"
    has_losses = any(seam.loss for seam in seams)
    assert has_losses == (losses != "-"), f"{name} has losses, or has none"
    shown = f"{name} (without an option)" if name in HOSTS else name
    return shown, version, record, losses, rows, truth, through, faults


def _functions() -> Iterator[str]:
    """Yield the functions of each adapter."""
    yield from ("## Functions", "", "| Trainer | Forward | Loss | Optimizer step |", "|---|---|---|---|")
    for name in sorted(BUILT_IN):
        seams = installed(name).seams
        losses = [seam for seam in seams if seam.loss]
        steps = [seam for seam in seams if seam.steps]
        inert = (
            *losses,
            *steps,
            *(seam for seam in seams if seam.around or seam.backward or seam.silent or seam.function.endswith("training_step")),
        )
        kinds = ([seam for seam in seams if seam not in inert], losses, steps)
        cells = ("<br>".join(f"`{seam.where}`" for seam in kind) or "-" for kind in kinds)
        yield f"| {' | '.join((name, *cells))} |"
