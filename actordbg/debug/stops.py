"""A stop of one rank, from its arrival to the word that sends it on; the same in a replay's worker and in a live job.

    arrive      at the meeting in the folder; the leader waits for the others (`Stop.arrival_s`)
    open        the leader waits for a terminal (`Stop.attach_s`), then has its prompt; the others wait for its word
    end         all continue; or this input ends (StoppedByUser); or the leader died, and the others continue

`in_replay` is what a worker put here: its own breakpoints and the user's `breakpoint()` are the same.

**In somebody's training code** (`stop_job`) the ranks on this machine park, and `actordbg attach RUN` gets the prompt. Nothing
here may harm the run. Ranks wait for each other, and for somebody to attach, only as long as the call says; then they continue.
After a stop to which nobody came, later ones wait for a second only, unless an `attach` is waiting already. `quit` and a closed
terminal end no training: they mean `detach` and `continue`. Processes of the same job meet by MASTER_PORT, in a folder named
after the run, which only this user can enter. Standard library only.
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
from actordbg.debug.prompt import Prompt, Said, StoppedByUser, await_terminal, evaluated

KEEP_UP_S = 30.0
"""How long a rank waits for the one that should lead, where no limit was given."""


in_replay: Any = None
"""The `ReplayStops` of this process, where it is a worker of a replay: its own stops, and the user's `breakpoint()`."""


def take_over_pdb() -> None:
    """`pdb.set_trace()` is the same as `breakpoint()` in a worker: it has no terminal."""

    def set_trace(**_: Any) -> None:
        if in_replay is not None:
            in_replay.reached(sys._getframe(1), None)

    pdb.set_trace = set_trace


@dataclass
class Stop:
    """One rank's stop.

    folder: where the ranks meet. ranks: all that stop together. place: where, in a few words. frame: None in a post mortem,
    which has a trace. names: what the prompt can name. opened: called with the ranks that did not come, and where an editor can
    connect, if one is to; ended: with the word, and the layer that was requested.

    arrival_s: how long ranks wait for each other, None for ever, since a supervisor watches. attach_s: how long for a terminal.
    gathers: gives a parameter's full value; a collective where that is sharded. refusal: why it cannot be asked for here.
    layers: the names of those that `layer` can continue to. quits: what `quit` does, in words. debugpy: the port for an editor, 0
    for any. attached: somebody came to the prompt.
    """

    folder: Path
    rank: int
    ranks: tuple[int, ...]
    leader: int
    place: str
    frame: FrameType | None
    names: dict[str, Any]
    opened: Callable[[list[int], str], None]
    ended: Callable[[str, str], None]
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
    _others: Leading | None = field(default=None, init=False)
    _answer: tuple[str, str] = field(default=(CONTINUE, ""), init=False)

    def hold(self) -> Prompt | None:
        """Stop here until somebody says how to continue; StoppedByUser if this input is to end.

        A rank alone may step: then its prompt is returned, which is still open, and whoever ends the input has to end it.
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
        self.ended(CONTINUE if word == LOST else word, str(message.get("layer", "")))
        if word == QUIT:
            raise StoppedByUser(message.get("why") or "stopped by the user")
        return None

    def _lead(self) -> Prompt | None:
        """Lead the meeting, with a prompt if a terminal comes."""
        missing: list[int] = []
        why = ""
        try:
            if self._others is not None and self.trace is None:
                missing = self._others.await_ranks(self.ranks, self.arrival_s)
            if missing:
                self.refusal = f"{_ranks(missing)} did not come here"
            wire = None
            if self.debugpy is not None:
                self.opened(missing, editor.listening(self.debugpy))
                editor.look_here(self.trace, self.names.get("error"), self.attach_s)
            else:
                wire = await_terminal(self.folder, self.rank, self._others, self.attach_s, lambda: self.opened(missing, ""))
            if wire is None:
                self.ended(CONTINUE, "")
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
                word, layer = self._answer
                self._others.release(word, layer=layer, why=why)

    def _end(self, word: str, layer: str) -> None:
        self._answer = word, layer
        self.ended(word, layer)

    @property
    def _here(self) -> FrameType:
        """The frame that expressions are evaluated in."""
        trace = self.trace
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        frame = self.frame if trace is None else trace.tb_frame
        assert frame is not None
        return frame

    def _helpers(self) -> dict[str, Any]:
        """What the prompt can name, with its functions."""

        def shapes(*values: Any) -> Said:
            """shapes() of all tensors here, shapes(x, y) of these."""
            if values:
                return prompt.shapes({f"[{number}]" if len(values) > 1 else "it": value for number, value in enumerate(values)})
            local = {name: value for name, value in self._here.f_locals.items() if name != "arguments"}
            return prompt.shapes({**self.names.get("arguments", {}), **local})

        def everywhere(text: str) -> Said:
            """everywhere("stats(x)"): what an expression comes to on each rank."""

            def mine() -> str:
                return evaluated(text, self._here, names)

            values = self._others.everywhere(text, mine) if self._others is not None else {self.rank: mine()}
            return Said("\n".join(f"rank {rank}: {value}" for rank, value in values.items()))

        names = {**self.names, "stats": prompt.stats, "shapes": shapes, "_gather_here": self.gathers}
        return names | {"everywhere": everywhere, "gather": self._gather}

    def _gather(self, name: str) -> Any:
        """gather("model.layers.0.mlp.up_proj.weight"): a parameter's full value, all ranks taking part."""
        if self.gathers is None:
            return Said("refused: there is no model to gather from here")
        if self.refusal:
            return Said(f"refused: all ranks have to take part in gathering, and {self.refusal}")
        if self._others is None:
            return self.gathers(name)
        places = self._others.places
        if len(set(places.values())) > 1:
            stands = ", ".join(f"rank {rank} at {place}" for rank, place in sorted(places.items()))
            return Said(f"refused: the ranks stand at different places ({stands}), where other weights may be in use")
        kept: list[Any] = []
        names = {"_gather_here": self.gathers, "_keep": kept.append}
        mine = f"_keep(_gather_here({name!r}))"
        answers = self._others.everywhere(f"_gather_here({name!r}) is None", lambda: evaluated(mine, self._here, names))
        wrong = [f"rank {rank}: {value}" for rank, value in answers.items() if value not in ("False", "None")]
        return Said("refused: " + "; ".join(wrong)) if wrong else kept[0]

    def _introduction(self) -> str:
        lines = [f"rank {self.rank} of {self.names.get('world_size', len(self.ranks))} stops {self.place}{self.banner}"]
        if self._others is not None:
            parked = sorted(set(self._others.places) - {self.rank})
            lines[0] += f"; {_ranks(parked)} parked" if parked else "; no other rank is parked"
            lines += [f"({self.refusal})"] if self.refusal else []
        lines.append("here: " + ", ".join(name for name in self.names if not name.startswith("_")))
        lines.append('shapes(), stats(tensor), gather("parameter"), everywhere("expression")')
        steps = ["step", "next"] if self._others is None and self.trace is None else []
        steps += ["layer [NAME]"] if self.layers and self.trace is None else []
        lines.append(", ".join(["continue", *steps, "detach (stop no more)", f"quit ({self.quits})"]))
        return "\n".join(f"--- {line}" for line in lines) + "\n"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


FOLDER = "ACTORDBG_STOP_DIR"
"""The variable that says where live jobs meet, instead of shared memory."""
SHORT_S = 1.0
_off, _missed, _alone = False, False, False
"""No more stops; ranks did not come to the last one; nobody attached to it."""


def root() -> Path:
    """The folder below which live jobs of this user meet."""
    memory = "/dev/shm"
    base = os.environ.get(FOLDER) or (memory if os.access(memory, os.W_OK) else tempfile.gettempdir())
    return Path(base) / f"actordbg-stops-{os.getuid()}"


def run_folder(run: str = "") -> Path:
    """The folder of a run: this process's own is named by its variable, or after the job's port."""
    run = run or os.environ.get("ACTORDBG_RUN") or f"job-{os.environ.get('MASTER_PORT') or os.getpid()}"
    return root() / re.sub(r"[^\w.-]", "_", run)


def expect(run: str) -> None:
    """Create a run's rendezvous folder, so that `actordbg attach` can wait there before the first stop."""
    _private(run_folder(run))


def stop_job(frame: FrameType, leader: int, timeout_s: float) -> None:
    """Stop here with the other ranks of a training job; whatever goes wrong, continue."""
    global _off, _missed, _alone
    if _off:
        return
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    run = run_folder()
    missed, word = False, ""
    attach_s = SHORT_S if _alone and not (run / "attach").exists() else timeout_s

    def opened(missing: list[int], _editor: str) -> None:
        nonlocal missed
        missed = bool(missing)
        without = f" without {', '.join(f'rank {other}' for other in missing)}, which did not come" if missing else ""
        _say(rank, f"stops {place}{without}; for {attach_s:.0f} s: actordbg attach {run.name}")

    def ended(how: str, _layer: str) -> None:
        nonlocal word
        word = how

    try:
        if int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world:
            raise OSError(f"{world} ranks run on several machines, and one can park only those of its own")
        folder = _private(run / (os.environ.get("MASTER_PORT") or str(os.getpid())))
    except OSError as error:
        return _say(rank, f"breakpoint() is passed: {error}")
    place, names = f"at {frame.f_code.co_filename}:{frame.f_lineno}", {"rank": rank, "world_size": world}
    ranks, arrival_s = tuple(range(world)), SHORT_S if _missed else timeout_s
    stop = Stop(folder, rank, ranks, min(leader, world - 1), place, frame, names, opened, ended, arrival_s, attach_s)
    stop.banner, stop.quits = f", in {frame.f_code.co_name}", "the same as detach"
    try:
        stop.hold()
    except StoppedByUser as error:
        _off = "terminal" not in str(error)
    except OSError as error:  # what was said at the prompt, and that nobody came, counts all the same
        _say(rank, f"breakpoint() is passed: {error}")
    _off = _off or word == DETACH
    _missed, _alone = missed, not stop.attached
    return _say(rank, "continues" + (" and stops no more" if _off else ""))


def _private(folder: Path) -> Path:
    """Make a folder below `root`, and those above it; OSError where another user made one of them before us."""
    below = folder.relative_to(root()).parts
    for made in (root().joinpath(*below[:depth]) for depth in range(len(below) + 1)):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = os.lstat(made)
        if state.st_uid != os.getuid() or not stat.S_ISDIR(state.st_mode) or state.st_mode & 0o077:
            raise PermissionError(f"{made} is not a folder of this user alone")
    return folder


def _say(rank: int, text: str) -> None:
    print(f"actordbg: rank {rank} {text}", file=sys.stderr, flush=True)  # noqa: T201 - the job's own standard error
