"""A rank's stop at a breakpoint, from its arrival until it continues, in a replay's worker and in a live job.

    arrive      at the meeting in the folder; the leader waits for the others (`Stop.arrival_s`)
    open        the leader waits for a terminal (`Stop.attach_s`), then opens its prompt; the others wait for its word
    end         all continue; or this input ends (StoppedByUser); or the leader died, and the others continue

A worker sets `in_replay`, which handles its breakpoints and the user's `breakpoint()`.

**In training code** (`stop_job`) the ranks on this machine pause, and `actordbg attach RUN` gets the prompt. Nothing here may
harm the run. Ranks wait for each other, and for somebody to attach, only as long as the call says; then they continue. After a
stop that nobody attached to, later stops wait for only a second, unless an `attach` is already waiting. `quit` and a closed
terminal do not end a training: they mean `detach` and `continue`. Processes of the same job meet by MASTER_PORT, in a folder
named after the run, which only this user can enter. Standard library only.
"""

from __future__ import annotations

import os
import pdb
import re
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from actordbg.debug import editor, prompt
from actordbg.debug.meeting import CONTINUE, DETACH, LOST, QUIT, Leading, meet
from actordbg.debug.prompt import Prompt, Said, StoppedByUser, await_terminal, evaluated, folded

KEEP_UP_S = 30.0
"""Seconds that a rank waits for the leader if no limit was given."""


in_replay: Any = None
"""The `ReplayStops` of this process, if it is a replay's worker."""


def take_over_pdb() -> None:
    """Make `pdb.set_trace()` act like `breakpoint()`, since a worker has no terminal."""

    def set_trace(**_: Any) -> None:
        if in_replay is not None:
            in_replay.reached(sys._getframe(1), None)

    pdb.set_trace = set_trace


@dataclass
class Stop:
    """A rank's stop at a breakpoint.

    folder: where the ranks meet. ranks: all ranks that stop together. place: a short description of the place. frame: None in a
    post mortem, which has a trace. names: names known at the prompt. opened: called with the missing ranks, and with the editor's
    address or "". ended: called with the word and the requested layer, which `answer` keeps.

    arrival_s: seconds that ranks wait for each other; None for no limit, if a supervisor watches. attach_s: seconds to wait for a
    terminal. gathers: returns a parameter's full value; collective if it is sharded. refusal: why `gather` is refused here.
    layers: the layers that `layer` can continue to. quits: what `quit` does, in words. debugpy: the port for an editor, 0 for
    any. attached: somebody came to the prompt.
    """

    folder: Path
    rank: int
    ranks: tuple[int, ...]
    leader: int
    place: str
    frame: FrameType | None
    names: dict[str, Any]
    opened: Callable[[list[int], str], None]
    ended: Callable[[str, str], None] = lambda word, layer: None
    arrival_s: float | None = None
    attach_s: float | None = None
    trace: TracebackType | None = None
    gathers: Callable[[str], Any] | None = None
    refusal: str = ""
    banner: str = ""
    layers: tuple[str, ...] = ()
    quits: str = "end this input"
    debugpy: int | None = None
    attached: bool = field(default=False, init=False)
    answer: tuple[str, str] = field(default=(CONTINUE, ""), init=False)
    _others: Leading | None = field(default=None, init=False)

    def hold(self) -> Prompt | None:
        """Stop here until the user continues; StoppedByUser if this input is to end.

        A rank that runs alone may step: then its open prompt is returned, which the caller has to end when the input ends.
        """
        if len(self.ranks) == 1:
            return self._lead()
        patience_s = KEEP_UP_S if self.arrival_s is None else self.arrival_s
        name, leads = f"stop-{self.ranks[0]}.sock", self.rank == self.leader
        met = meet(self.folder, name, self.rank, self.place, leads=leads, patience_s=patience_s)
        if isinstance(met, Leading):
            self._others = met
            return self._lead()
        names = self._helpers()
        message = met.follow(lambda text: evaluated(text, self._here, names))
        word = str(message["word"])
        self._end(CONTINUE if word == LOST else word, str(message.get("layer", "")))
        if word == QUIT:
            raise StoppedByUser(message.get("why") or "stopped by the user")
        return None

    def _lead(self) -> Prompt | None:
        """Lead the meeting, and open a prompt if a terminal connects."""
        missing: list[int] = []
        why = ""
        try:
            if self._others is not None and self.trace is None:
                missing = self._others.await_ranks(self.ranks, self.arrival_s)
            if missing:
                self.refusal = f"{_ranks(missing)} did not reach this breakpoint"
            wire = None
            if self.debugpy is not None:
                self.opened(missing, editor.listening(self.debugpy))
                editor.look_here(self.trace, self.names.get("error"), self.attach_s)
            else:
                wire = await_terminal(self.folder, self.rank, self._others, self.attach_s, lambda: self.opened(missing, ""))
            if wire is None:
                self._end(CONTINUE, "")
                return None
            self.attached = True
            alone = self._others is None
            pdb_prompt = Prompt(wire, self.rank, self._helpers(), alone=alone, layers=self.layers, on_end=self._end)
            wire.write(self._introduction())
            try:
                pdb_prompt.ask(self.frame if self.trace is None else None, self.trace)
            except StoppedByUser as error:
                why = str(error)
                raise
            return pdb_prompt
        finally:
            if self._others is not None:
                word, layer = self.answer
                self._others.release(word, layer=layer, why=why)

    def _end(self, word: str, layer: str) -> None:
        self.answer = word, layer
        self.ended(word, layer)

    @property
    def _here(self) -> FrameType:
        """Return the frame in which expressions are evaluated."""
        trace = self.trace
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        frame = self.frame if trace is None else trace.tb_frame
        assert frame is not None
        return frame

    def _helpers(self) -> dict[str, Any]:
        """Return the names known at the prompt, including its functions."""

        def shapes(*values: Any) -> Said:
            """shapes() lists all tensors here, shapes(x, y) only these."""
            if values:
                return prompt.shapes({f"[{number}]" if len(values) > 1 else "it": value for number, value in enumerate(values)})
            local = {name: value for name, value in self._here.f_locals.items() if name != "arguments"}
            return prompt.shapes({**self.names.get("arguments", {}), **local})

        def everywhere(text: str) -> Said:
            """everywhere("stats(x)"): evaluate an expression on each rank."""

            def mine() -> str:
                return evaluated(text, self._here, names)

            values = self._others.everywhere(text, mine) if self._others is not None else {self.rank: mine()}
            return Said("\n".join(f"rank {rank}: {value}" for rank, value in values.items()))

        names = {**self.names, "stats": prompt.stats, "shapes": shapes, "_gather_here": self.gathers}
        return names | {"everywhere": everywhere, "gather": self._gather}

    def _gather(self, name: str) -> Any:
        """gather("model.layers.0.mlp.up_proj.weight"): return a parameter's full value; all ranks take part."""
        if self.gathers is None:
            return Said("refused: there is no model to gather from here")
        if self.refusal:
            return Said(f"refused: gather needs all ranks, and {self.refusal}")
        if self._others is None:
            return self.gathers(name)
        places = self._others.places
        if len(set(places.values())) > 1:
            stands = ", ".join(f"rank {rank} at {place}" for rank, place in sorted(places.items()))
            return Said(f"refused: the ranks are at different places ({stands}), where other weights may be in use")
        kept: list[Any] = []
        names = {"_gather_here": self.gathers, "_keep": kept.append}
        mine = f"_keep(_gather_here({name!r}))"
        answers = self._others.everywhere(f"_gather_here({name!r}) is None", lambda: evaluated(mine, self._here, names))
        wrong = [f"rank {rank}: {value}" for rank, value in answers.items() if value not in ("False", "None")]
        return Said("refused: " + "; ".join(wrong)) if wrong else kept[0]

    def _introduction(self) -> str:
        lines = [f"rank {self.rank} of {self.names.get('world_size', len(self.ranks))} stops {self.place}{self.banner}"]
        if self._others is not None:
            paused = sorted(set(self._others.places) - {self.rank})
            lines[0] += f"; {_ranks(paused)} paused" if paused else "; no other rank is paused"
            lines += [f"({self.refusal})"] if self.refusal else []
        lines.append("here: " + ", ".join(name for name in self.names if not name.startswith("_")))
        lines.append('shapes(), stats(tensor), gather("parameter"), everywhere("expression")')
        steps = ["step", "next"] if self._others is None and self.trace is None else []
        steps += ["layer [NAME]"] if self.layers and self.trace is None else []
        lines.append(", ".join(["continue", *steps, "detach (ignore further breakpoints)", f"quit ({self.quits})"]))
        return "\n".join(folded(f"--- {line}") for line in lines) + "\n"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


FOLDER = "ACTORDBG_STOP_DIR"
"""The environment variable that replaces shared memory as the meeting folder of live jobs."""
SHORT_S = 1.0
_off, _missed, _alone = False, False, False
"""No more stops; ranks missed the last stop; nobody attached to it."""


def root() -> Path:
    """Return the folder below which live jobs of this user meet."""
    memory = "/dev/shm"
    base = os.environ.get(FOLDER) or (memory if os.access(memory, os.W_OK) else tempfile.gettempdir())
    return Path(base) / f"actordbg-stops-{os.getuid()}"


def run_folder(run: str = "") -> Path:
    """Return a run's folder; default: this process's run, named by its environment variable or the job's port."""
    job = os.environ.get("MASTER_PORT") or os.getpid()
    run = run or os.environ.get("ACTORDBG_RUN") or f"job-{job}"
    return root() / re.sub(r"[^\w.-]", "_", run)


def expect(run: str) -> None:
    """Create a run's rendezvous folder, so that `actordbg attach` can wait there before the first stop."""
    _private(run_folder(run))


def stop_job(frame: FrameType, leader: int, timeout_s: float) -> None:
    """Stop here with the other ranks of a training job; continue after any error."""
    global _off, _missed, _alone
    if _off:
        return
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    run = run_folder()
    attach_s = SHORT_S if _alone and not (run / "attach").exists() else timeout_s

    def opened(missing: list[int], _editor: str) -> None:
        without = f" without {_ranks(missing)}, which did not arrive" if missing else ""
        _say(rank, f"stops {place}{without}; for {attach_s:.0f} s: actordbg attach {run.name}")

    try:
        if int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world:
            raise OSError(f"{world} ranks run on several machines, and breakpoints need all ranks on one machine")
        folder = _private(run / (os.environ.get("MASTER_PORT") or str(os.getpid())))
    except OSError as error:
        return _say(rank, f"skips breakpoint(): {error}")
    place = f"at {frame.f_code.co_filename}:{frame.f_lineno}"
    stop = Stop(
        folder,
        rank,
        tuple(range(world)),
        leader=min(leader, world - 1),
        place=place,
        frame=frame,
        names={"rank": rank, "world_size": world},
        opened=opened,
        arrival_s=SHORT_S if _missed else timeout_s,
        attach_s=attach_s,
        banner=f", in {frame.f_code.co_name}",
        quits="like detach",
    )
    try:
        stop.hold()
    except StoppedByUser as error:
        _off = "terminal" not in str(error)
    except OSError as error:  # a word from the prompt, and that nobody attached, still count
        _say(rank, f"skips breakpoint(): {error}")
    _off = _off or stop.answer[0] == DETACH
    _missed, _alone = bool(stop.refusal), not stop.attached
    return _say(rank, "continues" + (" and ignores further breakpoints" if _off else ""))


def _private(folder: Path) -> Path:
    """Create a folder below `root`, and its parents; OSError if another user created one of them first."""
    below = folder.relative_to(root()).parts
    for made in (root().joinpath(*below[:depth]) for depth in range(len(below) + 1)):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = os.lstat(made)
        if state.st_uid != os.getuid() or not stat.S_ISDIR(state.st_mode) or state.st_mode & 0o077:
            raise PermissionError(f"{made} is not a folder that only this user can enter")
    return folder


def _say(rank: int, text: str) -> None:
    print(f"actordbg: rank {rank} {text}", file=sys.stderr, flush=True)  # noqa: T201 - the job's own standard error
