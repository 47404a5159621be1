"""Workers of replays that begin with torch and transformers imported, which takes each of them seconds of a core.

As a program this is the template, which imports them and forks whenever a worker, pytest or a program of the examples is started
with this folder on PYTHONPATH (`conftest.forked_workers`). The process that was started hands over its words, environment, folder and descriptors, and ends as the
fork ends; if it is killed, so is the fork. It goes on by itself where there is no template, or where a variable differs that
those packages read when they are imported.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

MODULES = (
    "actordbg.reduce.trial_host", "actordbg.replay.worker", "actordbg.steps.step_engine", "actordbg.campaign.train_engine",
    "actordbg.trainers.openrlhf.demo_programs", "benchmarks.faulty_grpo", "benchmarks.faulty_trl", "deepspeed.launcher.launch",
    "deepspeed.launcher.runner", "fake_worker", "planted_syncs", "planted_training", "pytest", "torch.distributed.run",
)  # fmt: skip
OWN = (
    "actordbg.causes.in_worker", "actordbg.cli.replay", "actordbg.judge.check", "actordbg.laws.law_run", "actordbg.locate.locate_run",
    "actordbg.replay.actor_engine", "actordbg.trainers.rows_actor",
)  # fmt: skip
"""Modules of the product that most workers and commands import, with what these import."""
AS_TYPED = {"attach", "demo", "replay", "ui"}
"""Commands of `python -m actordbg` that are no forks: tests send their processes signals, or give them a terminal."""
PROGRAMS = tuple(str(Path(__file__).parents[3] / folder) for folder in ("tests", "examples"))
"""And a program that FORKED_PROGRAM names: Ray's workers, where its actors import torch, too, or "-c", as for the test processes."""
READ_AT_IMPORT = ("HF_", "OMP_", "PYTORCH", "TORCH", "TRANSFORMERS")
NOT_THEN = (
    "HF_HUB_",
    "HF_MODULES_CACHE",
    "OMP_WAIT_POLICY",
    "PYTORCH_NVML_",
    "TORCHDYNAMO_DISABLE",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_FORCE_",
    "TORCH_NCCL_",
)
"""Read later, or set again in each fork; the template waits as workers do (`OMP_WAIT_POLICY`)."""


def read_at_import():
    return {
        name: value for name, value in os.environ.items() if name.startswith(READ_AT_IMPORT) and not name.startswith(NOT_THEN)
    }


def hand_over(template, words):
    """Run a module or a file in a fork, and end as it ends; return if there is none."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(template)
            request = [words, dict(os.environ), read_at_import(), os.getcwd()]
            socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
            code = int(connection.recv(8))
        except (OSError, ValueError):
            return
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path, own):
    """Fork for each request until standard input is closed. Returns in each fork, with the words that it has to run."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        while listener in select.select([listener, 0], [], [])[0]:
            connection = listener.accept()[0]
            if os.fork() == 0:
                listener.close()
                return attend(connection, own)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    os.unlink(path)
    os._exit(0)


def attend(connection, own):
    """Fork a worker, and end when it has ended, or end it when the process is gone that asked. Returns in the worker."""
    request, descriptors, *_ = socket.recv_fds(connection, 1 << 16, 3)
    while not request.endswith(b"\n"):
        request += connection.recv(1 << 16)
    words, environment, read, folder = json.loads(request)
    if read != own:
        os._exit(0)
    if pid := os.fork():
        if connection in select.select([connection, os.pidfd_open(pid)], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(str(code).encode())
        os._exit(0)
    connection.close()
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")  # a fault's (`brokenactor`), where that comes first
    return words


if __name__ == "__main__":
    import gc
    import runpy

    own = read_at_import()
    gc.disable()
    import huggingface_hub
    import peft  # noqa: F401
    import sqlglot  # noqa: F401
    import sqlmodel  # noqa: F401
    import torch._inductor.compile_fx
    import torch.distributed.fsdp
    import transformers.dynamic_module_utils

    if not os.path.exists("/dev/nvidiactl"):  # it asks for CUDA, and then no fork may use that
        with contextlib.suppress(ImportError):
            import deepspeed  # noqa: F401
    for module in OWN:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    sys.argv = serve(sys.argv[1], own)
    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    if threads := os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"):
        torch._inductor.config.compile_threads = int(threads)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if modules := os.environ.get("HF_MODULES_CACHE"):
        transformers.dynamic_module_utils.HF_MODULES_CACHE = modules
    huggingface_hub.constants.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
    if sys.argv[0] in (*MODULES, "actordbg"):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        sys.modules["__main__"] = type(sys)("__main__")  # what it starts by `multiprocessing` would run this file
        exec(sys.argv.pop(1), vars(sys.modules["__main__"]))
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
elif "TEMPLATE_OF_WORKERS" in os.environ:
    words = [word for word in sys.orig_argv[1:] if word not in ("-u", "-m")]
    programs = *PROGRAMS, os.environ.get("FORKED_PROGRAM", PROGRAMS[0])
    desk = words[:1] == ["actordbg"] and AS_TYPED.isdisjoint(words)
    if words and (desk or words[0] in MODULES or words[0].startswith(programs)):
        hand_over(os.environ["TEMPLATE_OF_WORKERS"], words)
