"""OpenRLHF: builds and calls its Actor, its DeepSpeed strategy and its programs, with stand-ins for modules that need CUDA.

Only `trainers.trainer` imports this folder. Start with `adapter`, which lists every member.
"""

from __future__ import annotations

from actordbg.base.fault import EnvironmentProblem


def cannot_import(why: object) -> EnvironmentProblem:
    """Return the error for an OpenRLHF that cannot be imported."""
    return EnvironmentProblem(
        f"OpenRLHF cannot be imported here: {why}",
        hint="pass `--through rows`, or run `actordbg doctor` to see what is missing; pip install openrlhf --no-deps",
    )
