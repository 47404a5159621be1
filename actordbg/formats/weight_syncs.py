"""A transfer of the weights from the trainer to its rollout engines: a file per transfer and sending rank (`run --hash-weights`).

    store/syncs/<run>/<rank>-<host>-<pid>-<number>.json

For each parameter it has the SHA-256 of the bytes that the trainer had and sent, and of those that each engine was given to load,
as they arrived: engines fuse parameters (q, k and v) only then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actordbg.formats.weight_hashes import RunFile, check_sizes

SYNCS = "syncs"
"""The folder in a store."""


@dataclass(frozen=True)
class EngineAnswer:
    """What an engine did with a parameter. sha256: of what it was given to load; None if nothing reached its loader.

    loaded: the number of its own parameters that it changed, if it says so. recorded: whether the engine's process was recorded.
    """

    recorded: bool = False
    sha256: str | None = None
    loaded: int | None = None


@dataclass(frozen=True)
class SentParameter:
    """A trainable parameter in a transfer. had: hash of the trainer's bytes at the send; None if it was not sent, or if hashing
    failed: only a parameter without answers was never sent.

    sent: hash of what went out, where the transport shows it. answers: of each engine.
    """

    dtype: str
    shape: tuple[int, ...]
    had: str | None = None
    sent: str | None = None
    answers: tuple[EngineAnswer, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(self.shape)


@dataclass(frozen=True)
class WeightSync(RunFile):
    """A transfer. number: of this process, from 0. step: the optimizer steps before it, if known. engines: their number."""

    what = "a transfer of weights"
    run: str
    rank: int
    host: str
    pid: int
    number: int
    step: int | None
    timestamp: str
    seconds: float
    engines: int
    parameters: dict[str, SentParameter] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the file's name."""
        return f"{self.rank:04d}-{self.host}-{self.pid}-{self.number:06d}.json"
