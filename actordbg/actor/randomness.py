"""The random numbers of a replayed call: those of the run where it recorded its generators, else those of a seed.

A dump made with `dump enable --with-rng` holds the generators' states before the call. Set here right before the forward, they
make dropout drop what it dropped in the run; and since the record holds the digests of the states *after* the call, it
can be checked that the replay drew as many numbers as the run did:

| recorded | replayed on | restored | compared |
|---|---|---|---|
| cpu | a CPU | cpu | cpu |
| cpu, cuda:3 | a GPU | both, the GPU's on whichever GPU the replay has | both |
| cpu, cuda:3 | a CPU | cpu | nothing: the run drew from its GPU's generator, which a CPU has not |
| cpu | a GPU | cpu | nothing, the other way round |

A seed that was requested wins over recorded states: it is given to see what another draw comes to.

The state after is taken before a backward: gradient checkpointing draws the forward's numbers once more there, from the state
that it kept, and puts the generators back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from actordbg.capture.facts import digests, states
from actordbg.store.payload import Dump

CPU = "cpu"


@dataclass(frozen=True)
class Randomness:
    """Where one forward's random numbers came from, and whether they ended where the run's did.

    restored: the recorded generators whose states were set ("cpu", "cuda:3"), none where the forward was seeded. match: whether
    every one of them ended in the run's own state; None where that cannot be said, and `why` says why.
    """

    restored: tuple[str, ...] = ()
    match: bool | None = None
    why: str = ""


def restore(dump: Dump, device: torch.device, seed: int | None) -> Randomness | None:
    """Set the generators of this process as the dump has them; None where it has none. `seed`: the one asked for.

    The caller has seeded everything: a generator without a recorded state keeps that.
    """
    recorded = dump.rng
    if not recorded:
        return None
    if seed is not None:
        return Randomness(why=f"seed {seed} was requested instead of the recorded generator states")
    restored, problem = [], ""
    for name, here in _places(recorded, device).items():
        refused = _set(here, recorded[name])
        problem = problem or refused
        restored += [] if refused else [name]
    return Randomness(tuple(restored), why=problem or _not_comparable(dump, device))


def check(before: Randomness, dump: Dump, device: torch.device) -> Randomness:
    """The same with `match`: call it right after the forward."""
    if before.why:
        return before
    places = _places(dump.rng, device)
    now = digests(states(device))
    return replace(before, match=all(now[places[name]] == dump.record.rng[name] for name in before.restored))


def _places(recorded: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, str]:
    """Recorded generator -> the one of this process that takes its place. Of several GPUs' the one that is called alike."""
    places = {CPU: CPU} if CPU in recorded else {}
    gpus = [name for name in recorded if name.startswith("cuda")]
    if device.type == "cuda":
        here = f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
        places |= {name: here for name in gpus if len(gpus) == 1 or name == here}
    return places


def _not_comparable(dump: Dump, device: torch.device) -> str:
    """Why the states after the call cannot be compared with the run's; "" if they can."""
    gpus = [name for name in dump.rng if name.startswith("cuda")]
    if gpus and device.type != "cuda":
        return f"the run drew its random numbers on {gpus[0]}, the replay on a CPU"
    if device.type == "cuda" and not gpus:
        return "the run drew its random numbers on a CPU, the replay on a GPU"
    places = _places(dump.rng, device)
    if device.type == "cuda" and not any(name in places for name in gpus):
        return f"the run recorded {len(gpus)} GPUs' generators, none of them {device}'s"
    if any(name not in dump.record.rng for name in places):
        return "the run recorded no generator states after the call"
    return ""


def _set(here: str, state: torch.Tensor) -> str:
    """Set one generator of this process; why that cannot be, or ""."""
    generator = torch.default_generator if here == CPU else torch.cuda.default_generators[torch.device(here).index]
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:  # another torch's layout, or no state at all
        return f"the recorded state of the {here} generator is none for this torch: {str(error).splitlines()[0]:.120}"
    return ""
