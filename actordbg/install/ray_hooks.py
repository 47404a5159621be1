"""Pass what `actordbg run` set to Ray's workers, which do not inherit their driver's environment, in Ray's runtime environment.

Two calls lead to a cluster, and both are wrapped when their module is imported in a process below `run`:

- `ray.init(...)` of a driver: its `runtime_env` gets our variables and our PYTHONPATH, which Ray sets before a worker's Python
  starts. An actor with a PYTHONPATH of its own is reached by Ray's `worker_process_setup_hook`, which does the same
  inside the worker, and then calls the user's own hook.
- `JobSubmissionClient.submit_job(...)`, that is `ray job submit`, even when a script calls it: the job's runtime environment gets
  the variables, so its driver is a process below `run`, and its `ray.init` does the rest.

No training job fails because of this: a worker whose node has no actordbg starts and trains (the hook is sent by value and
looks for actordbg before it imports it); no hook is added where Ray accepts none (Ray client, containers, old versions); an
error of ours is a line on standard error, and Ray is called as the user called it.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from actordbg.base.errors import EnvironmentProblem
from actordbg.base.fault import complain, describe

MARK = "__actordbg_ray__"
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable in which Ray tells a submitted job's driver the job's runtime environment."""
HOOK = "worker_process_setup_hook"
_SENT_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
_WITHOUT_HOOK = ("container", "image_uri")
_FAILED = "Ray's workers will not be recorded: {}"


def take_along(module: ModuleType) -> None:
    """Wrap `ray.init`, or `submit_job` of `ray.job_submission`. Calling it again changes nothing."""
    if module.__name__ == "ray":
        if not hasattr(module.init, MARK):
            module.init = _init(module, module.init)  # type: ignore[attr-defined]
        return
    client = module.JobSubmissionClient
    if not hasattr(client.submit_job, MARK):
        client.submit_job = _submit_job(client.submit_job)


def _init(ray: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        try:
            address = kwargs.get("address", args[0] if args else None)
            changed, job = prepared(kwargs, os.environ, takes_hook=_takes_hook(ray, address, kwargs.get("job_config")))
        except Exception as error:  # noqa: BLE001  # ours, not the user's: call Ray as they did
            complain(_FAILED.format(describe(error)))
            return original(*args, **kwargs)
        if job is None:
            return original(*args, **changed)
        before, os.environ[JOB_CONFIG] = os.environ[JOB_CONFIG], job
        try:
            return original(*args, **changed)
        finally:
            os.environ[JOB_CONFIG] = before

    setattr(init, MARK, original)
    return init


def _submit_job(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def submit_job(*args: Any, **kwargs: Any) -> Any:
        try:
            changed = {**kwargs, "runtime_env": merged(kwargs.get("runtime_env"), carried(os.environ))}
        except Exception as error:  # noqa: BLE001  # ours, not the user's: call Ray as they did
            complain(_FAILED.format(describe(error)))
            changed = kwargs
        return original(*args, **changed)

    setattr(submit_job, MARK, original)
    return submit_job


def prepared(kwargs: Mapping[str, Any], environ: Mapping[str, str], *, takes_hook: bool) -> tuple[dict[str, Any], str | None]:
    """Return the arguments for `ray.init`, and `JOB_CONFIG`'s value during the call (None: leave it), from the user's."""
    own = kwargs.get("runtime_env")
    if own is None:
        own = getattr(kwargs.get("job_config"), "runtime_env", None)  # an argument of ours would replace it
    config = json.loads(environ[JOB_CONFIG]) if environ.get(JOB_CONFIG) else None
    job = (config or {}).get("runtime_env") or {}
    job, result = reconciled(job, own, carried(environ))
    variables = {**(job.get("env_vars") or {}), **(result.get("env_vars") or {})}
    refused = _SENT_HOOK in variables or any(env.get(key) for env in (job, result) for key in _WITHOUT_HOOK)
    if takes_hook and not refused:  # Ray would refuse a hook in a container, or where it sent one already
        in_job = HOOK in job and HOOK not in result
        result[HOOK] = worker_setup(job.pop(HOOK) if in_job else result.get(HOOK), FOLDER)
    return {**kwargs, "runtime_env": result}, None if config is None else json.dumps({**config, "runtime_env": job})


def worker_setup(users_own: Callable[[], Any] | str | None, folder: str) -> Callable[[], None]:
    """Return the set-up hook for Ray's workers: ours, then the user's (a function, or "module.function"), whose errors propagate.

    Ray pickles the inner function by value, since it is local: it must not use any name of this module.
    """

    def actordbg_worker_setup() -> None:
        import contextlib
        import importlib
        import importlib.util
        import os
        import sys

        try:
            if not any(type(finder).__name__ == "ActordbgFinder" for finder in sys.meta_path):
                file = os.path.join(folder, "sitecustomize.py")
                if not os.path.isfile(file):
                    attach = importlib.import_module("actordbg.install")
                    file = os.path.join(os.path.dirname(str(attach.__file__)), "pythonpath", "sitecustomize.py")
                spec = importlib.util.spec_from_file_location("actordbg_in_worker", file)
                assert spec is not None and spec.loader is not None
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except Exception as error:  # noqa: BLE001  # a worker without actordbg trains on, unrecorded
            with contextlib.suppress(Exception):  # `complain`, which may not be here
                sys.stderr.write(f"actordbg: not recording in Ray worker {os.getpid()}: {type(error).__name__}: {error}\n")
        if isinstance(users_own, str):
            module, _, name = users_own.rpartition(".")
            getattr(importlib.import_module(module), name)()
        elif users_own is not None:
            users_own()

    return actordbg_worker_setup


def _takes_hook(ray: ModuleType, address: str | None, job_config: Any) -> bool:
    """Check whether this Ray sends functions as set-up hooks: old versions and both sides of Ray client do not."""
    named = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
    known: set[str] = getattr(ray.runtime_env.RuntimeEnv, "known_fields", set())
    return HOOK in known and "://" not in (named or "") and not getattr(job_config, "_client_job", False)


# The variables of a process below `actordbg run`, and how they reach processes that do not inherit an environment.


NAMES = ("ACTORDBG_STORE", "ACTORDBG_RUN", "ACTORDBG_RING_DIR", "ACTORDBG_STOP_DIR", "ACTORDBG_ADAPTERS", "ACTORDBG_HASH_WEIGHTS",
         "ACTORDBG_TURNS")  # fmt: skip
BREAKPOINT = {"PYTHONBREAKPOINT": "actordbg.debug.breakpoint"}
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pythonpath")
_OURS = os.path.join("actordbg", "install", "pythonpath")
"""How the folder ends, in every copy of actordbg."""
_NODES_OWN = "${PYTHONPATH}"
"""Ray replaces this by the value that the worker's node has."""


def child_environment(
    environ: Mapping[str, str],
    store: str,
    run: str,
    *,
    stops: bool = False,
    adapters: str = "",
    hash_weights: bool = False,
    turns: bool = False,
) -> dict[str, str]:
    """Build the environment of COMMAND. Raises EnvironmentProblem if our folder cannot be in PYTHONPATH.

    stops: replace `breakpoint()` by ours. adapters: as `actordbg.trainers.find_adapter.carried_form` writes them. hash_weights:
    hash the weights of recorded calls (`actordbg.capture.hook.hash_weights`). turns: record the turns of rollouts.
    """
    if os.pathsep in FOLDER:
        raise EnvironmentProblem(
            f"{FOLDER} cannot be in PYTHONPATH: its name contains {os.pathsep!r}", hint="install actordbg elsewhere"
        )
    path = _in_front(environ.get("PYTHONPATH") or None, None)
    ours = {"ACTORDBG_STORE": store, "ACTORDBG_RUN": run, "PYTHONPATH": path}
    requested = {"ACTORDBG_ADAPTERS": adapters} if adapters else {}
    requested |= {"ACTORDBG_HASH_WEIGHTS": "1"} if hash_weights else {}
    requested |= {"ACTORDBG_TURNS": "1"} if turns else {}
    return {**environ, **ours, **requested, **(BREAKPOINT if stops else {})}


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """Select from an environment the variables of ours to pass on."""
    ours = {name: environ[name] for name in NAMES if environ.get(name)}
    return ours | {name: value for name, value in BREAKPOINT.items() if environ.get(name) == value}


def merged(runtime_env: dict[str, Any] | None, ours: Mapping[str, str]) -> dict[str, Any]:
    """Return a copy of a Ray runtime environment with our variables added."""
    result = copy.copy(runtime_env) if runtime_env is not None else {}  # a RuntimeEnv stays one
    variables = dict(result.get("env_vars") or {})
    variables.update(ours)
    variables["PYTHONPATH"] = _in_front(variables.get("PYTHONPATH"), _NODES_OWN)
    result["env_vars"] = variables
    return result


def reconciled(
    job: Mapping[str, Any], own: dict[str, Any] | None, ours: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the job's runtime environment and the driver's, with our variables in exactly one of them.

    A name that the user set in both stays in both: Ray reports that conflict without us as well.
    """
    variables = {name: value for name, value in (job.get("env_vars") or {}).items() if name not in NAMES}
    users_in_job = _without_ours(variables.pop("PYTHONPATH", None))
    result = merged(own, ours)
    if users_in_job is not None:
        if "PYTHONPATH" in ((own or {}).get("env_vars") or {}):
            variables["PYTHONPATH"] = users_in_job
        else:
            variables["PYTHONPATH"] = _in_front(users_in_job, None)
            del result["env_vars"]["PYTHONPATH"]
    changed = {**job, "env_vars": variables}
    if not variables:
        del changed["env_vars"]
    return changed, result


def _in_front(value: str | None, otherwise: str | None) -> str:
    """Return PYTHONPATH with our folder in front, once; `otherwise` replaces a missing value."""
    rest = _without_ours(value)
    rest = otherwise if rest is None else rest
    return FOLDER if rest is None else f"{FOLDER}{os.pathsep}{rest}"


def _without_ours(value: str | None) -> str | None:
    """Return PYTHONPATH as the user wrote it, None if all of it is ours. (Another copy of actordbg may have written it.)"""
    if value is None:
        return None
    entries = value.split(os.pathsep)
    rest = [entry for entry in entries if not entry.endswith(_OURS)]
    if len(rest) < len(entries) and rest in ([], [_NODES_OWN]):
        return None
    return os.pathsep.join(rest)
