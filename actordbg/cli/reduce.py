"""`actordbg reduce`, `repro` and `bundle`: the smallest case of a fault, one file that shows it, an archive for a colleague."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actordbg.base.errors import UsageError
from actordbg.cli.options import ConfirmOption, TrustRemoteCode, Where, argument, option, take_consent

Trials = Annotated[int, option(..., "Most trials of this call (default 200).", min=1, rank=5)]
Seconds = Annotated[float, option(..., "Most seconds of trials of this call (default 300).", min=1, rank=6)]


def reduce(
    ctx: typer.Context,
    name: str = argument("last", "REPLAY|COMPARISON", "What is wrong: an id, a name, `@1` or `last`."),
    trials: Trials = 200,
    seconds: Seconds = 300.0,
    trust_remote_code: TrustRemoteCode = False,
    yes: ConfirmOption = False,
) -> object:
    """Reduce a wrong replay to the smallest faulty case.

    Same fault: the same error, signal, hang, broken law, or module and cause. Fewer rows, tokens, layers and processes, a
    small random model instead of the checkpoint, settings back to their defaults: by bisection, then by delta debugging. Each
    trial runs in a process of its own, and the case that is reported ran again in fresh ones. The same command continues a
    stopped reduction.

    Exit code: 1 if no case could be confirmed; 5 if nothing is wrong.

    Example: actordbg reduce last --seconds 120
    """
    from actordbg.cli.terminal import opened

    take_consent(trust_remote_code)
    return opened(ctx, yes=yes).reduce(name, trials=trials, seconds=seconds)


def repro(
    ctx: typer.Context,
    name: str = argument(
        "last", "REDUCTION|REPLAY|COMPARISON", "What is wrong: an id, a name, `@1` or `last`. It is reduced first, unless it was."
    ),
    out: Path = option(Path("repro.py"), "The script to write (default repro.py).", "--out", "-o", metavar="FILE", rank=1),
    issue: Path | None = option(None, "Also write the text of an issue.", metavar="FILE.md", rank=2),
    fixed: str | None = option(
        None, "Also run it with this interpreter, where the fault is gone: it must exit with 0.", metavar="PYTHON", rank=3
    ),
    trials: Trials = 200,
    seconds: Seconds = 300.0,
    trust_remote_code: TrustRemoteCode = False,
    yes: ConfirmOption = False,
) -> object:
    """Write one script that shows the fault, without actordbg.

    The script needs torch and transformers (deepspeed or openrlhf only where the fault does). It says what is expected and
    what comes, and exits with 1 while the fault is there and with 0 when it is gone. Before success is claimed it runs once in
    a fresh interpreter. It has token ids and no text, and no path of this machine.

    Exit code: 1 if the script does not show the fault there.

    Example: actordbg repro last -o repro.py --issue issue.md
    """
    from actordbg.cli.terminal import opened

    take_consent(trust_remote_code)
    return opened(ctx, yes=yes).repro(name, out, issue=issue, fixed=fixed, trials=trials, seconds=seconds)


def bundle(
    ctx: typer.Context,
    names: list[str] | None = argument(None, "REPLAY|COMPARISON", "Also their results, and the dumps of each replay."),
    where: Where = None,
    out: Path = option(Path("bundle.tar.zst"), "The archive to write.", "--out", "-o", metavar="FILE", rank=1),
    redact: bool = option(False, "Permute token ids; keep padding and special tokens. Dumps only.", "--redact", rank=2),
    keep_ids: str | None = option(None, "With --redact, also keep these ids.", metavar="ID,...", rank=3),
    model: str | None = option(None, "With --redact, the model whose special tokens are kept.", metavar="NAME|PATH", rank=4),
    to: str | None = option(None, "Upload it: hf://datasets/OWNER/NAME, private.", metavar="URL", rank=5),
    public: bool = option(False, "With --to, allow a repository that is public already.", "--public", rank=6),
) -> object:
    """Pack dumps, replays and comparisons into one archive.

    `actordbg dump import FILE` opens it, then `check` works there. It has token ids, names of models and hosts, and commands;
    no logs. --redact replaces token ids by a permutation that is not kept, and leaves out outputs, images, texts, and the names
    of runs, models and hosts.

    Exit code: 5 if nothing was selected.

    Example: actordbg bundle last -o case.tar.zst
    """
    from actordbg.cli.terminal import opened

    if (keep_ids or model) and not redact:
        raise UsageError("--keep-ids and --model are for --redact", hint="add --redact")
    try:
        keep = {int(word) for word in (keep_ids or "").split(",") if word}
    except ValueError:
        raise UsageError(f"--keep-ids {keep_ids!r:.80} are not numbers", hint="use ids, such as 0,1,2") from None
    return opened(ctx).bundle(
        *(names or []), where=where, out=out, redact=redact, keep_ids=keep, model=model or "", to=to, public=public
    )
