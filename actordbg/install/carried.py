"""What a process below `actordbg run` carries, and how it is handed to processes that do not inherit an environment.

    ACTORDBG_STORE=/shared/actordbg       where to record
    ACTORDBG_RUN=ppo-7b                   the run's name, and so its switch (store/controls/ppo-7b.json)
    ACTORDBG_ADAPTERS=NAME=module,module  only under `run --adapter`: each adapter, and the modules whose import it waits for
    ACTORDBG_HASH_WEIGHTS=1               only under `run --hash-weights`: hashes of the weights that recorded calls meet
    ACTORDBG_RING_DIR=/scratch            only if the user set it
    PYTHONBREAKPOINT=actordbg.debug...    only under `run --break`: `breakpoint()` stops all ranks, for `actordbg attach`
    PYTHONPATH=<FOLDER>:...               the folder with our sitecustomize in front, the user's entries behind

Children get them from `child_environment`. Ray's workers get them through a *runtime environment* (`merged`), which Ray puts
together from the job's (`ray job submit`) and the driver's (`ray.init`); it refuses two values for one name, even equal ones,
so a driver inside a submitted job needs both at once (`reconciled`).

Invariants: the ACTORDBG_ names are ours; for every other name the user's value stays, PYTHONPATH's entries too. Merging twice is
merging once. Nothing that is passed in is changed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from actordbg.base.errors import EnvironmentProblem

NAMES = ("ACTORDBG_STORE", "ACTORDBG_RUN", "ACTORDBG_RING_DIR", "ACTORDBG_STOP_DIR", "ACTORDBG_ADAPTERS", "ACTORDBG_HASH_WEIGHTS")
BREAKPOINT = {"PYTHONBREAKPOINT": "actordbg.debug.breakpoint"}
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pythonpath")
_OURS = tuple(os.path.join("actordbg", room, "pythonpath") for room in ("install", "attach"))
"""How the folder ends, now and in the copies of earlier versions."""
_NODES_OWN = "${PYTHONPATH}"
"""Ray replaces this by the value that the worker's node has."""


def child_environment(
    environ: Mapping[str, str], store: str, run: str, *, stops: bool = False, adapters: str = "", hash_weights: bool = False
) -> dict[str, str]:
    """The environment of COMMAND. Raises EnvironmentProblem where our folder cannot stand in PYTHONPATH.

    stops: `breakpoint()` is ours in it. adapters: as `actordbg.adapters.find_adapter.carried_form` writes them. hash_weights: of
    the calls that are recorded (`actordbg.capture.weight_recording`).
    """
    if os.pathsep in FOLDER:
        raise EnvironmentProblem(
            f"{FOLDER} cannot stand in PYTHONPATH: its name holds {os.pathsep!r}", hint="install actordbg elsewhere"
        )
    path = _in_front(environ.get("PYTHONPATH") or None, None)
    ours = {"ACTORDBG_STORE": store, "ACTORDBG_RUN": run, "PYTHONPATH": path}
    asked = {"ACTORDBG_ADAPTERS": adapters} if adapters else {}
    asked |= {"ACTORDBG_HASH_WEIGHTS": "1"} if hash_weights else {}
    return {**environ, **ours, **asked, **(BREAKPOINT if stops else {})}


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """Of an environment, what is ours to hand on."""
    ours = {name: environ[name] for name in NAMES if environ.get(name)}
    return ours | {name: value for name, value in BREAKPOINT.items() if environ.get(name) == value}


def merged(runtime_env: dict[str, Any] | None, ours: Mapping[str, str]) -> dict[str, Any]:
    """A runtime environment of Ray, and what is ours."""
    result = copy.copy(runtime_env) if runtime_env is not None else {}  # a RuntimeEnv stays one
    variables = dict(result.get("env_vars") or {})
    variables.update(ours)
    variables["PYTHONPATH"] = _in_front(variables.get("PYTHONPATH"), _NODES_OWN)
    result["env_vars"] = variables
    return result


def reconciled(
    job: Mapping[str, Any], own: dict[str, Any] | None, ours: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the job's runtime environment, the driver's), with what is ours in exactly one of them.

    A name that the user set in both stays in both: that is a conflict without us, too.
    """
    job_variables = dict(job.get("env_vars") or {})
    own_variables = dict((own or {}).get("env_vars") or {})
    for name in NAMES:
        job_variables.pop(name, None)
    users_in_job = _without_ours(job_variables.get("PYTHONPATH"))
    if users_in_job is None:
        job_variables.pop("PYTHONPATH", None)
    elif "PYTHONPATH" in own_variables:
        job_variables["PYTHONPATH"] = users_in_job
    result = merged(own, ours)
    if users_in_job is not None and "PYTHONPATH" not in own_variables:
        job_variables["PYTHONPATH"] = _in_front(users_in_job, None)
        del result["env_vars"]["PYTHONPATH"]
    changed = {**job, "env_vars": job_variables}
    if not job_variables:
        del changed["env_vars"]
    return changed, result


def _in_front(value: str | None, otherwise: str | None) -> str:
    """PYTHONPATH with our folder in front, once; `otherwise` stands for a value that is not there."""
    rest = _without_ours(value)
    rest = otherwise if rest is None else rest
    return FOLDER if rest is None else f"{FOLDER}{os.pathsep}{rest}"


def _without_ours(value: str | None) -> str | None:
    """PYTHONPATH as the user wrote it, None where all of it is ours. (Another copy of actordbg may have written it.)"""
    if value is None:
        return None
    entries = value.split(os.pathsep)
    rest = [entry for entry in entries if not entry.endswith(_OURS)]
    if len(rest) < len(entries) and rest in ([], [_NODES_OWN]):
        return None
    return os.pathsep.join(rest)
