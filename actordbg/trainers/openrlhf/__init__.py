"""OpenRLHF: its Actor built and called, its DeepSpeed strategy, its programs, and stand-ins for what needs CUDA.

Nothing outside of this folder but `trainers.trainer` imports it. Begin with `adapter`, which has every member in one list.
"""

from __future__ import annotations

from actordbg.base.fault import EnvironmentProblem


def cannot_import(why: object) -> EnvironmentProblem:
    """Return what to raise where an Actor of OpenRLHF is asked for and it cannot be imported."""
    return EnvironmentProblem(
        f"OpenRLHF cannot be imported here: {why}",
        hint="`--through rows` needs no OpenRLHF; `actordbg doctor` says what is missing; pip install openrlhf --no-deps",
    )
