"""The options of `actordbg matrix`: the axes, as comma lists, and what is the matrix's own."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_PANEL = "The axes: comma lists"


def _axis(name: str, metavar: str, help: str) -> Any:
    return typer.Option(name, metavar=metavar, help=help, rich_help_panel=_PANEL)


Attn = Annotated[
    str | None,
    _axis("--attn", "LIST", "Of flash_attention_2, sdpa, eager (default: flash_attention_2,sdpa)."),
]
Compile = Annotated[str | None, _axis("--compile", "off,on", "torch.compile: on, off or both (default: both).")]
Packing = Annotated[str | None, _axis("--packing", "off,on", "Packed rows: on, off or both (default: both).")]
CompileBackend = Annotated[
    str | None, _axis("--compile-backend", "LIST", "Of inductor, aot_eager, eager; for compiled cells.")
]
Deepcompile = Annotated[
    str | None, _axis("--deepcompile", "off,on", "DeepSpeed's DeepCompile (needs CUDA), for cells with deepspeed.")
]
Backend = Annotated[str | None, _axis("--backend", "LIST", "Of plain, deepspeed, fsdp2 (default: plain).")]
ZeroStage = Annotated[str | None, _axis("--zero-stage", "LIST", "Of 0, 1, 2, 3; for cells with deepspeed.")]
Dtype = Annotated[str | None, _axis("--dtype", "LIST", "Of bf16, fp16, fp32 (default: as `replay`'s).")]
Nproc = Annotated[str | None, _axis("--nproc", "LIST", "Numbers of processes (default: 1, or what tp and ring need).")]
Tp = Annotated[str | None, _axis("--tp", "LIST", "Tensor-parallel sizes (fsdp2).")]
Ring = Annotated[str | None, _axis("--ring", "LIST", "Ring sizes, for packed cells of deepspeed and fsdp2.")]

SkipKnown = Annotated[
    bool, typer.Option("--skip-known", help="Leave out cells that are known to fail; they are run otherwise.")
]
NoTruth = Annotated[
    bool, typer.Option("--no-truth", help="Do not compare passed cells with the truth: green then means finished.")
]
Oracle = Annotated[str, typer.Option("--oracle", metavar="fp32|fp64", help="The dtype in which the truth is computed.")]
BaselineOption = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="REPLAY|MATRIX",
        help="Exit 1 if a cell got worse than this replay, or than this matrix's cell with the same settings; "
        "failures that it has too are then no reason.",
    ),
]
Slower = Annotated[
    float | None,
    typer.Option("--slower", metavar="FACTOR", help="A cell this many times slower than the baseline has got worse."),
]
ResumeMatrix = Annotated[
    str | None,
    typer.Option("--resume", metavar="MATRIX|last", help="Go on with a matrix where it stopped."),
]
Show = Annotated[
    str | None, typer.Option("--show", metavar="MATRIX|last", help="Print a matrix that is there; run nothing.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the cells and run nothing.")]
