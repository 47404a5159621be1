"""`actordbg run` puts this file, alone in its folder, on PYTHONPATH: every Python process below `run` executes it at start.

Most of these processes (pip, a git hook, Ray's daemons) have nothing to do with us. So it uses the standard library only,
imports nothing of actordbg, and does three things:

1. **Waits for `openrlhf.models.actor`** with a finder on `sys.meta_path`, and wraps `Actor` when that module has run, as the
   trailer of `actordbg patch` would. The module keeps its own loader. It also waits for three modules that start processes
   which do not inherit this environment (`DOORS`), and for those of `run --adapter` (`other_trainers`).
   Under `run --break`, `breakpoint()` is ours (`stop_all_ranks`): Ray sets PYTHONBREAKPOINT to its own debugger in each process.
2. **Lends the package `actordbg`** to an environment that does not have it: a finder at the end of `sys.meta_path` that knows
   only this name, and nothing else that is installed where `run` was called.
3. **Gets out of the way**: its folder leaves `sys.path`, and a `sitecustomize` that Python would have found without us runs
   now, in our place, under its name, with its errors going where they always go.

A failure here is a line on standard error; the program continues, unrecorded. `ACTORDBG_DISABLE=1` skips the first two.

If PYTHONPATH was lost on the way (a Ray actor with its own environment), `actordbg.install.ray_hooks` executes this file
under another name, and only the first two happen.

Annotations are in quotes, and nothing here is newer than Python 3.6: other interpreters than the trainer's run this as well.
"""

import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(HERE))


def main() -> None:
    """Install the import hook if a store is set, then hand over to the user's own `sitecustomize`.

    Safe to run twice in one process: the hook is not installed again.
    """
    enabled = os.environ.get("ACTORDBG_STORE") and os.environ.get("ACTORDBG_DISABLE", "") in ("", "0")
    if enabled and not any(type(finder).__name__ == ActordbgFinder.__name__ for finder in sys.meta_path):
        guarded(install)
    if __name__ == "sitecustomize":
        guarded(leave_the_path)
        run_the_users_own()


def install() -> None:
    """Wait for the modules of `DOORS`; run the action of those that are already imported."""
    other_trainers(os.environ.get("ACTORDBG_ADAPTERS", ""))
    if hashes_weights():
        DOORS.update(dict.fromkeys(SYNC_DOORS, hash_transfers))
    if os.environ.get("ACTORDBG_TURNS", "") not in ("", "0"):
        DOORS["openrlhf.utils.agent"] = record_turns
    sys.meta_path.insert(0, ActordbgFinder())  # type: ignore[arg-type]
    sys.meta_path.append(PackageFinder())  # type: ignore[arg-type]
    if os.environ.get("PYTHONBREAKPOINT") == "actordbg.debug.breakpoint":
        sys.breakpointhook = stop_all_ranks
    for name, action in DOORS.items():
        if name in sys.modules:
            guarded(action, sys.modules[name])


def stop_all_ranks(*arguments: "Any", **named: "Any") -> None:
    """Pause the ranks at the line that called `breakpoint()`."""
    from actordbg.debug import breakpoint

    breakpoint(*arguments, frame=sys._getframe(1), **named)


def record(module: "ModuleType") -> None:
    """Wrap the Actor of `openrlhf.models.actor`, which has just run, unless a patched file did it already."""
    from actordbg.capture.hook import install

    install(module.Actor, store=os.environ["ACTORDBG_STORE"])
    hash_weights()


def take_ray_along(module: "ModuleType") -> None:
    """Wrap `ray` or `ray.job_submission`, which has just run, so that its workers get our variables."""
    from actordbg.install import ray_hooks

    ray_hooks.take_along(module)


def take_deepspeed_along(module: "ModuleType") -> None:
    """Have the deepspeed launcher pass our variables to other nodes: it passes only those with listed prefixes."""
    if "ACTORDBG_" not in module.EXPORT_ENVS:
        module.EXPORT_ENVS.append("ACTORDBG_")


DOORS: "dict[str, Callable[[ModuleType], object]]" = {
    "openrlhf.models.actor": record,
    "ray": take_ray_along,
    "ray.job_submission": take_ray_along,
    "deepspeed.launcher.runner": take_deepspeed_along,
}


def other_trainers(carried: str) -> None:
    """Wait for the modules of each `run --adapter`, written "name=module,module;name=module"."""
    for entry in filter(None, carried.split(";")):
        name, _, modules = entry.partition("=")
        for module in modules.split(","):
            DOORS[module] = attaching(name, DOORS.get(module))


def attaching(name: str, before: "Callable[[ModuleType], object] | None") -> "Callable[[ModuleType], object]":
    """Return the action for a module of this adapter: `before`, if given, then attach the adapter."""

    def attach(module: "ModuleType") -> None:
        if before is not None:
            guarded(before, module)
        from actordbg.trainers.recorded_model import attach

        attach(module, name, os.environ["ACTORDBG_STORE"])
        hash_weights()

    return attach


def record_turns(module: "ModuleType") -> None:
    """Record the token ids of rollouts, under `run --turns`."""
    from actordbg.trainers.openrlhf.turn_recording import attach

    attach(module)


SYNC_DOORS = (
    "openrlhf.trainer.ray.ppo_actor",
    "openrlhf.trainer.ray.vllm_worker_wrap",
    "actordbg.trainers.openrlhf.vllm_standin",
)
"""Modules in which weights are sent to rollout engines, and received."""


def hash_transfers(module: "ModuleType") -> None:
    """Hash the weights that are sent to rollout engines, and that arrive there."""
    from actordbg.trainers.openrlhf.weight_syncs import attach

    attach(module)


def hashes_weights() -> bool:
    """Check whether this process runs under `run --hash-weights`."""
    return os.environ.get("ACTORDBG_HASH_WEIGHTS", "") not in ("", "0")


def hash_weights() -> None:
    """Hash the weights of recorded calls, under `run --hash-weights`."""
    if hashes_weights():
        from actordbg.capture import hook

        hook.hash_weights(os.environ["ACTORDBG_STORE"])


class ActordbgFinder:
    """Delegates to the finders after it, and has the loader that they return call us when the module has run."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname not in DOORS:
            return None
        finders: list[object] = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else []:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                if spec.loader is not None:
                    guarded(call_after, spec, DOORS[fullname])
                return spec
        return None


class PackageFinder:
    """Finds the package `actordbg` that this file belongs to, if no other finder knows one."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname != "actordbg":
            return None
        from importlib.util import spec_from_file_location

        init = os.path.join(PACKAGE, "__init__.py")
        return spec_from_file_location(fullname, init, submodule_search_locations=[PACKAGE])


def call_after(spec: "ModuleSpec", action: "Callable[[ModuleType], object]") -> None:
    """Wrap `exec_module` of the spec's loader instance to call `action` afterwards."""
    loader = spec.loader
    assert loader is not None
    execute = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        execute(module)
        guarded(action, module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def guarded(action: "Callable[..., object]", *arguments: object) -> None:
    """Call `action(*arguments)`; print what it raises to standard error. What a signal handler of the program raises passes."""
    try:
        action(*arguments)
    except BaseException as error:  # whatever it is: a debugger does not stop somebody's program
        try:
            from actordbg.base.fault import from_outside

            stops = from_outside(error, BaseException)
        except Exception:  # noqa: BLE001  # the package cannot be imported
            stops = False
        if stops or isinstance(error, KeyboardInterrupt):
            raise
        message = f"actordbg: not recording in process {os.getpid()}: {type(error).__name__}: {error}"
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        remedy = f" ({sys.executable} -m pip install {missing.partition('.')[0]})" if missing else ""
        try:
            sys.stderr.write(f"{message}{remedy}\n")
        except Exception:  # noqa: BLE001  # there is no standard error
            return


def leave_the_path() -> None:
    """Remove our folder from sys.path, so that the program sees the path that it would have had.

    Under Ray our part of PYTHONPATH is `HERE:${PYTHONPATH}`; on a node without a PYTHONPATH that leaves `HERE:`, whose empty
    second part means the working directory to Python, and is removed as well.
    """
    if os.environ.get("PYTHONPATH", "").endswith(HERE + os.pathsep) and HERE in sys.path:
        os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"][: -len(os.pathsep)]
        behind = sys.path.index(HERE) + 1
        if sys.path[behind : behind + 1] == [os.getcwd()]:
            del sys.path[behind]
    sys.path[:] = [entry for entry in sys.path if entry != HERE]


def run_the_users_own() -> None:
    """Import the `sitecustomize` that Python would have found without us, if there is one. Its errors propagate."""
    ours = sys.modules.pop(__name__)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules[__name__] = ours


main()
