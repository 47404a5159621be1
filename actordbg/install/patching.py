"""patch and unpatch: combine the pure trailer, the file on disk, the interpreter and the store.

`patch` either ends with the target interpreter seeing the hook, or leaves the file unchanged. `unpatch` restores the
original (bytes, mode and modification time), or the user's edit of it without the trailer, or refuses. Both may be
repeated: "already patched" and "not patched" are not errors.

    target = find_target()
    patch(target, Store("store")).action      # "patched"; a second time "already patched"
    unpatch(target).action                    # "unpatched"; a second time "not patched"

Decisions: a patched file whose trailer names another store or comes from another actordbg version gets a new trailer
(action "trailer renewed"); an edited file does not, since its original is no longer known. A proof that fails undoes
the patch. A folder whose fsync fails does not: the file is patched, and a note says what a power cut may do. If undoing fails
as well, the error says so.

A file's state (`inspect_target`) follows from its bytes alone, and so does its original: nothing is kept elsewhere.

**The actor.py that is meant** is found without importing it (torch takes seconds to import and has side effects).
Three ways to name it: `--target FILE`; `--python EXE`, for the environment of another interpreter; neither, for this
interpreter. The interpreter itself says what an import of the actor's module would load in the current folder (`probe`). So
editable installations, PYTHONPATH and a checkout that shadows the installed copy are seen as the training job sees them.

After every change the same interpreter proves that it would run the bytes on disk (`require_seen`). Python
does not read actor.py if it trusts the .pyc beside it. A .pyc with an unchecked hash is trusted whatever the source says
(compileall --invalidation-mode unchecked-hash, some container builds); a .pyc with a timestamp, if seconds and size agree.

A symbolic link is followed: `Target.path` is the real file, `Target.named` the path that was found or given.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from actordbg import __version__
from actordbg.base.errors import Conflict, EnvironmentProblem, StoreProblem, Unsupported, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.owners import NOT_FROM_HERE
from actordbg.capture.switch_file import read_control
from actordbg.install import replace_file as files, target_probe as probe, trailer
from actordbg.install.trailer import State
from actordbg.store.layout import Store
from actordbg.trainers.find_adapter import HOSTS, actor_module, host_of
from actordbg.trainers.trainer import TRAINER

PROBE_SECONDS = 120


@dataclass(frozen=True)
class Copy:
    """An actor.py that the interpreter could import, and the sys.path entry that it comes from."""

    path: str
    entry: str


@dataclass(frozen=True)
class Target:
    """The file to work on, the interpreter that runs it, and what else that interpreter could import instead."""

    path: Path
    named: Path
    python: str
    trainer_version: str | None
    copies: list[Copy] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Return what the user should know about which file this is."""
        notes = [*filter(None, [other_trainer(self.path)])]
        if self.named != self.path:
            notes.append(f"{self.named} leads to {self.path} through a link: everything else that links there also changes")
        if len(self.copies) > 1:
            notes.append(f"{self.copies[0].path} wins here (found through {self.copies[0].entry})")
            notes += [f"shadowed: {copy.path} (in {copy.entry}); --target names it" for copy in self.copies[1:]]
        return notes


def find_target(python: Path | None = None, target: Path | None = None) -> Target:
    """Find the actor.py of `--target`, of the interpreter `--python`, or of this interpreter.

    Raises UsageError if both are given, EnvironmentProblem if there is no such file or interpreter, or no trainer in it.
    """
    if python is not None and target is not None:
        raise UsageError("--python and --target cannot be combined", hint="name the file, or the interpreter, not both")
    if target is not None:
        if not target.is_file():
            raise EnvironmentProblem(f"{target} is not a file", hint="name an actor.py with --target")
        return _target(target, _interpreter_of(target), [])
    executable = str(python) if python is not None else sys.executable
    for module in (TRAINER.actor_module, *map(actor_module, HOSTS)):
        answer = ask(executable, "find", module)
        if answer["winner"]:
            break
    else:
        raise EnvironmentProblem(
            f"{executable} has no {' and no '.join((TRAINER.package, *HOSTS))}",
            hint="name the interpreter of the training environment with --python, or the file with --target",
        )
    return _target(Path(answer["winner"]), executable, [Copy(**copy) for copy in answer["copies"]])


def ask(python: str, *question: str) -> dict[str, Any]:
    """Run a `probe` command in an interpreter. Raises EnvironmentProblem with the last line it printed if it cannot answer."""
    command = [python, "-c", Path(probe.__file__).read_text(encoding="utf-8"), *question]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL,
            env=os.environ | NOT_FROM_HERE,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer in {PROBE_SECONDS} s"
        raise EnvironmentProblem(
            f"{python} cannot be run as a Python: {reason}", hint="name a Python interpreter with --python"
        ) from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(probe.MARK)]
    if done.returncode != 0 or not answers:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        hint = "check that environment, or name another Python with --python"
        raise EnvironmentProblem(f"{python} cannot answer `{question[0]}`: {last}", hint=hint)
    answer: dict[str, Any] = json.loads(answers[-1].removeprefix(probe.MARK))
    return answer


def require_hook(python: str) -> None:
    """Check that `python` has an actordbg whose capture hook imports. Raises EnvironmentProblem otherwise."""
    try:
        ask(python, "hook")
    except EnvironmentProblem as problem:
        raise EnvironmentProblem(
            f"{python} would run the patched file, but cannot import actordbg.capture.hook: {problem.message}",
            hint=f"install actordbg into that environment: {in_shell(python)} -m pip install actordbg",
        ) from None


def require_seen(python: str, path: Path, store: str | None) -> None:
    """Check that `python` would run the trailer of `path`, capturing into `store`; or, if `store` is None, no trailer.

    Raises Conflict otherwise. A timestamped .pyc that contradicts its source is removed first.
    """
    for attempt in (1, 2):
        proof = ask(python, "prove", str(path))
        if proof["hooked"] == (store is not None) and (store is None or store in proof["constants"]):
            return
        if attempt == 1 and proof["kind"] == "timestamp":
            with contextlib.suppress(OSError):
                os.unlink(proof["cached"])  # a cache that contradicts its source, by a coincidence of second and size
        else:
            break
    if proof["error"]:
        raise Conflict(f"{python} cannot compile {path}: {proof['error']}", hint="this Python is too old or too new for the file")
    fault = "still sees the hook in" if store is None else "does not see the hook in"
    raise Conflict(
        f"{python} {fault} {path}: it runs {proof['cached']} ({proof['kind']}) instead of the source",
        hint=f"remove {proof['cached']} (Python rebuilds it from the source), then run this again",
    )


def version_beside(path: Path) -> str | None:
    """Read the version of the trainer that holds this file from the metadata beside the package; None if unknown."""
    inside = Path(TRAINER.actor_file).parts
    if path.parts[-len(inside) :] != inside:
        return None
    root = path.parents[len(inside) - 1]
    for info in sorted(root.glob(f"{TRAINER.package}-*.dist-info")):
        return info.name.removeprefix(f"{TRAINER.package}-").removesuffix(".dist-info")
    try:
        text = (root / "version.txt").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"\d[\w.+!-]*", text) else None


def _target(named: Path, python: str, copies: list[Copy]) -> Target:
    named = Path(os.path.abspath(named))
    path = Path(os.path.realpath(named))
    return Target(path, named, python, version_beside(named) or version_beside(path), copies)


def other_trainer(path: Path) -> str:
    """Say which other package than the trainer's a file belongs to, with its version; "" for the trainer's own file."""
    tops = list(itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), path.parents))
    if not tops or tops[-1].name == TRAINER.package:
        return ""
    root = tops[-1].parent
    owners = (dist for dist in distributions(path=[str(root)]) if any(root / file == path for file in dist.files or ()))
    whose = next((f" ({dist.name} {dist.version})" for dist in owners), "")
    return f"this is the Actor of {tops[-1].name}{whose}, not {TRAINER.name}'s: its dumps say so, and are replayed on the rows"


def _interpreter_of(target: Path) -> str:
    """Return the interpreter of the environment that this file is installed in, or else this interpreter."""
    for folder in Path(os.path.abspath(target)).parents:
        if folder.name in ("site-packages", "dist-packages") and folder.parent.name.startswith("python"):
            for name in ("python", "python3"):
                python = folder.parents[2] / "bin" / name
                if os.access(python, os.X_OK):
                    return str(python)
    return sys.executable


WITHOUT_A_PATCH = "`actordbg run -- COMMAND` records a job without a patch"


@dataclass(frozen=True)
class Outcome:
    """What `patch` or `unpatch` did, or with `dry_run` would do (`diff` shows it). Hashes are of the file's bytes."""

    action: str
    file: str
    state: State
    store: str | None
    sha256_before: str
    sha256_after: str
    python: str
    openrlhf_version: str | None
    dry_run: bool = False
    diff: str = ""
    notes: list[str] = field(default_factory=list)


def patch(target: Target, store: Store, *, dry_run: bool = False) -> Outcome:
    """Append the trailer to the target, and prove that its interpreter sees it.

    Raises EnvironmentProblem (the interpreter cannot import the hook, the folder cannot be written), Unsupported (no
    Actor), Conflict (edited, hidden by a .pyc, changed meanwhile); after any of these the file is unchanged.
    """
    require_hook(target.python)
    with files.locked(target.path):
        old = files.read(target.path)
        inspection, root = _supported(target, old), str(store.root)
        here = inspection.trailer is not None and inspection.trailer.store == root
        if inspection.state is State.EDITED and not (here and inspection.source is not None):
            keeps = "run `actordbg unpatch` (it keeps the edit), then `actordbg patch`"
            hint = trailer.remedy(old.data) if inspection.source is None else keeps
            raise Conflict(f"{old.path} is left as it is: {inspection.reason}", hint=hint)
        hard_linked = "the file is hard-linked: its other names (caches, environments) keep the original"
        links = [hard_linked] if old.stat.st_nlink > 1 else []
        if here and inspection.trailer and (inspection.state is State.EDITED or inspection.trailer.actordbg == __version__):
            outcome = _outcome(target, old, dry_run, "already patched", inspection.state, store=root, notes=links)
            if not dry_run:
                require_seen(target.python, target.path, root)
            outcome.notes.extend(filter(None, [inspection.reason]))
            return outcome
        mtime_ns: int | None = old.stat.st_mtime_ns
        action, source = "patched", old.data
        if inspection.trailer and inspection.source is not None:
            action, source, mtime_ns = "trailer renewed", inspection.source, inspection.trailer.mtime_ns
        data = trailer.append(source, root, mtime_ns=mtime_ns, adapter=host_of(target.path))
        outcome = _outcome(target, old, dry_run, action, State.PATCHED, store=root, notes=links, data=data)
        if dry_run:
            return outcome
        store.create()
        with files.replaced(old, data, way_out=WITHOUT_A_PATCH) as notes:
            require_seen(target.python, target.path, root)
        outcome.notes.extend(notes)
        return outcome


def unpatch(target: Target, *, dry_run: bool = False) -> Outcome:
    """Remove the trailer: restore the original with its modification time, or keep the user's edit without the trailer.

    Raises Conflict if the cut would be guesswork (the file is unchanged), or if a .pyc still holds the hook.
    """
    with files.locked(target.path):
        old = files.read(target.path)
        inspection = _supported(target, old)
        if inspection.source is None:
            raise Conflict(f"{target.path} is left as it is: {inspection.reason}", hint=trailer.remedy(old.data))
        if inspection.trailer is None:
            outcome = _outcome(target, old, dry_run, "not patched", State.CLEAN)
        else:
            edited = inspection.state is State.EDITED
            kept = [f"{inspection.reason}: that edit is kept, only the trailer was cut off"] if edited else []
            was, data = inspection.trailer.store, inspection.source
            outcome = _outcome(target, old, dry_run, "unpatched", State.CLEAN, store=was, notes=kept, data=data)
            if not dry_run:
                mtime_ns = None if edited else inspection.trailer.mtime_ns
                with files.replaced(old, inspection.source, mtime_ns=mtime_ns) as notes:
                    pass
                outcome.notes.extend(notes)
        if not dry_run:  # errors from here on undo nothing; only a .pyc that still holds the hook is a Conflict
            try:
                require_seen(target.python, target.path, None)
            except EnvironmentProblem as problem:
                outcome.notes.append(f"not checked what the interpreter sees: {problem.message}")
        return outcome


def _supported(target: Target, old: files.FileRead) -> trailer.Inspection:
    """Inspect the target's bytes. Raises Unsupported, with its path, if they are not an actor.py."""
    inspection = trailer.inspect(old.data)
    if inspection.state is State.UNSUPPORTED:
        hint = f"name {TRAINER.name}'s own file with --target .../{TRAINER.actor_file}; `actordbg adapters` has other trainers"
        raise Unsupported(f"{target.path}: {inspection.reason}", hint=hint)
    return inspection


def _outcome(
    target: Target, old: files.FileRead, dry_run: bool, action: str, state: State, *, store: str | None = None,
    notes: Sequence[str] = (), data: bytes | None = None,
) -> Outcome:  # fmt: skip
    """Build the Outcome, with a diff if `dry_run`. `data`: the file's new bytes; None if it stays."""
    file, after, diff = str(target.path), old.data if data is None else data, ""
    if dry_run:
        name = file.lstrip("/")
        mine, new = (text.decode("utf-8", "backslashreplace").splitlines() for text in (old.data, after))
        diff = "\n".join(difflib.unified_diff(mine, new, f"a/{name}", f"b/{name}", lineterm=""))
    return Outcome(
        action, file, state, store, old.sha256, trailer.sha256_of(after), python=target.python,
        openrlhf_version=target.trainer_version, dry_run=dry_run, diff=diff, notes=[*target.notes, *notes],
    )  # fmt: skip


@dataclass(frozen=True)
class Status:
    """A file's state, and whether a training job started now would capture.

    `hooked`: the interpreter sees the hook (None: it did not run). `enabled`: the store's dump switch. `armed`:
    hooked, enabled and not ACTORDBG_DISABLE. `store` and `original_sha256` are the trailer's; None without one.
    """

    file: str
    state: State
    reason: str
    openrlhf_version: str | None
    python: str
    sha256: str
    original_sha256: str | None
    store: str | None
    hooked: bool | None
    enabled: bool
    armed: bool
    copies: list[Copy]
    notes: list[str]


def inspect_target(target: Target, store: Store) -> Status:
    """Return the target's state and whether it would capture. Only reads."""
    old = files.read(target.path)
    inspection = trailer.inspect(old.data)
    chosen = Store(inspection.trailer.store) if inspection.trailer else store
    try:
        hooked = bool(ask(target.python, "prove", str(target.path))["hooked"])
    except EnvironmentProblem:
        hooked = None
    enabled, notes = False, [*target.notes]
    try:
        control = read_control(Store(os.environ.get("ACTORDBG_STORE") or chosen.root))
        enabled = control is not None and control.enabled
    except StoreProblem as problem:
        notes.append(f"recording is off: {problem.message}")
    there, disabled = inspection.trailer, os.environ.get("ACTORDBG_DISABLE", "") not in ("", "0")
    if there and hooked is False:
        notes.append("the interpreter does not see the hook: run `actordbg patch` for the reason")
    if not there and enabled and not hooked:
        notes.append("recording is on, but this file has no hook (an upgrade removes it): only `actordbg run` records jobs here")
    if not there and hooked:
        notes.append("the interpreter still sees the hook, through a .pyc: run `actordbg unpatch`")
    if there and disabled:
        notes.append("ACTORDBG_DISABLE is set: jobs started from this shell do not capture")
    if there and os.environ.get("ACTORDBG_STORE"):
        notes.append("ACTORDBG_STORE is set: jobs started from this shell capture into that store")
    return Status(
        file=str(target.path), state=inspection.state, reason=inspection.reason, openrlhf_version=target.trainer_version,
        python=target.python,
        sha256=old.sha256, original_sha256=there.sha256 if there else None, store=there.store if there else None, hooked=hooked,
        enabled=enabled, armed=bool(hooked) and enabled and not disabled, copies=target.copies, notes=notes,
    )  # fmt: skip
