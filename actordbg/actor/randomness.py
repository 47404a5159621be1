"""The RNG state of a replayed call: the run's, if it was recorded, else that of a seed.

A dump made with `dump enable --with-rng` holds the RNG states before the call. Restored right before the forward, they make
dropout drop what it dropped in the run. The record also holds the digests of the states *after* the call, so the replay can
check that it drew as many numbers as the run did:

| recorded | replayed on | restored | compared |
|---|---|---|---|
| cpu | a CPU | cpu | cpu |
| cpu, cuda:3 | a GPU | both, the GPU's on whichever GPU the replay has | both |
| cpu, cuda:3 | a CPU | cpu | nothing: the run drew from its GPU's generator, which a CPU does not have |
| cpu | a GPU | cpu | nothing: the run drew from the CPU's generator, the replay draws from the GPU's |

A requested seed wins over recorded states: whoever requests it wants to see the effect of other random numbers.

The state after the call is read before a backward: there, gradient checkpointing draws the forward's numbers once more, from the
state that it saved, and restores the RNG state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from actordbg.base.units import first_line
from actordbg.capture.facts import digests, states
from actordbg.store.payload import Dump

CPU = "cpu"


@dataclass(frozen=True)
class Randomness:
    """Where a forward's random numbers came from, and whether its RNG state ended as the run's did.

    restored: the recorded generators whose states were set ("cpu", "cuda:3"); () if the forward was seeded. match: whether every
    restored generator ended in the run's state; None if that is unknown, for the reason `why`.
    """

    restored: tuple[str, ...] = ()
    match: bool | None = None
    why: str = ""


def restore(dump: Dump, device: torch.device, seed: int | None) -> Randomness | None:
    """Restore the dump's RNG states in this process; None if it has none. `seed`: the requested seed, which wins.

    The caller has seeded everything: a generator without a recorded state stays seeded.
    """
    recorded = dump.rng
    if not recorded:
        return None
    if seed is not None:
        return Randomness(why=f"seed {seed} was requested instead of the recorded RNG states")
    restored, problem = [], ""
    for name, here in _places(recorded, device).items():
        failure = _set(here, recorded[name])
        problem = problem or failure
        restored += [] if failure else [name]
    return Randomness(tuple(restored), why=problem or _not_comparable(dump, device))


def check(before: Randomness, dump: Dump, device: torch.device) -> Randomness:
    """Return `before`, which `restore` returned, with `match` filled in. Call it right after the forward."""
    if before.why:
        return before
    places = _places(dump.rng, device)
    now = digests(states(device))
    return replace(before, match=all(now[places[name]] == dump.record.rng[name] for name in before.restored))


def _places(recorded: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, str]:
    """Map recorded generators to their counterparts in this process.

    A single recorded GPU maps to the replay's GPU; of several, only that with the same number does.
    """
    places = {CPU: CPU} if CPU in recorded else {}
    gpus = [name for name in recorded if name.startswith("cuda")]
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        current_gpu = f"cuda:{number}"
        places |= {name: current_gpu for name in gpus if len(gpus) == 1 or name == current_gpu}
    return places


def _not_comparable(dump: Dump, device: torch.device) -> str:
    """Return why the states after the call cannot be compared with the run's; "" if they can."""
    gpus = [name for name in dump.rng if name.startswith("cuda")]
    if gpus and device.type != "cuda":
        return f"the run drew its random numbers on {gpus[0]}, the replay on a CPU"
    if device.type == "cuda" and not gpus:
        return "the run drew its random numbers on a CPU, the replay on a GPU"
    places = _places(dump.rng, device)
    if device.type == "cuda" and not any(name in places for name in gpus):
        return f"the run recorded the RNG states of {len(gpus)} GPUs, not of {device}"
    if any(name not in dump.record.rng for name in places):
        return "the run recorded no RNG states after the call"
    return ""


def _set(name: str, state: torch.Tensor) -> str:
    """Set a generator of this process; return why that failed, or ""."""
    generator = torch.default_generator if name == CPU else torch.cuda.default_generators[torch.device(name).index]
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:  # another torch's layout, or no state at all
        return f"the recorded RNG state of {name} is invalid for this torch: {first_line(error):.120}"
    return ""
