"""Workers of replays that begin with torch and transformers imported, which takes each of them seconds of a core.

As a program this is the template, which imports them and forks whenever a worker, pytest or a program of the examples is started
with this folder on PYTHONPATH (`conftest.forked_workers`). The process that was started hands over its words, environment, folder and descriptors, and ends as the
fork ends; if it is killed, so is the fork. It goes on by itself where there is no template, or where a variable differs that
those packages read when they are imported.
"""

import os
import sys

MODULES = (
    "actordbg.reduce.trial_host", "actordbg.replay.rank_launcher", "actordbg.replay.worker", "actordbg.steps.step_engine",
    "actordbg.campaign.train_engine", "actordbg.trainers.openrlhf.demo_programs", "benchmarks.faulty_grpo", "benchmarks.faulty_trl",
    "deepspeed.launcher.launch", "deepspeed.launcher.runner", "fake_worker", "planted_syncs", "planted_training", "pytest",
    "torch.distributed.run",
)  # fmt: skip
OWN = (
    "actordbg.causes.in_worker", "actordbg.cli.replay", "actordbg.judge.check", "actordbg.laws.law_run", "actordbg.locate.locate_run",
    "actordbg.replay.actor_engine", "actordbg.trainers.rows_actor",
)  # fmt: skip
"""Modules of the product that most workers and commands import, with what these import."""
AS_TYPED = {"attach", "demo", "replay", "ui"}
"""Commands of `python -m actordbg` that are no forks: tests send their processes signals, or give them a terminal."""
ROOT = os.path.abspath(f"{__file__}/../../../..")
PROGRAMS = f"{ROOT}/tests", f"{ROOT}/examples"
"""And a program that FORKED_PROGRAM names: Ray's workers, where its actors import torch, too, or "-c", as for the test processes. Ray
itself cannot be imported before the fork: it reads a worker's RAY_JOB_ID then."""
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
    import _socket  # `socket` and `json` would take longer than all else that this process does
    from array import array

    request = ascii([words, dict(os.environ), read_at_import(), os.getcwd()])
    connection = _socket.socket(_socket.AF_UNIX)
    try:
        connection.connect(template)
        descriptors = _socket.SOL_SOCKET, _socket.SCM_RIGHTS, array("i", [0, 1, 2])
        connection.sendmsg([request.encode() + b"\n"], [descriptors])
        code = int(connection.recv(8))
    except (OSError, ValueError):
        connection.close()
        return
    if code < 0:
        import signal

        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path, own):
    """Fork for each request until standard input is closed and all forks have ended. Returns in each fork, with the words that it
    has to run. A fork whose process is gone that asked is killed."""
    running = {}  # by a descriptor of the fork's process: its id, and the connection to who asked
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    sources = [0, listener]
    while sources or running:
        asking = {connection: pid for pid, connection in running.values()}
        ready = set(select.select([*sources, *running, *asking], [], [])[0])
        for connection in asking.keys() & ready:
            os.kill(asking[connection], signal.SIGKILL)
        for process in running.keys() & ready:
            answer(process, *running.pop(process))
        if listener in ready:
            connection = listener.accept()[0]
            request, descriptors = received(connection)
            words, environment, read, folder = ast.literal_eval(request or "[[], {}, None, None]")
            if read != own:
                connection.close()
            elif pid := os.fork():
                running[os.pidfd_open(pid)] = pid, connection
            else:
                for other in (listener, connection, *asking):
                    other.close()
                become(environment, folder, descriptors)
                return words
            for descriptor in descriptors:
                os.close(descriptor)
        if 0 in ready:
            sources.clear()
            os.unlink(path)
    os._exit(0)


def received(connection):
    """A request and the descriptors that came with it; an empty one if who asked is gone."""
    request, descriptors, *_ = socket.recv_fds(connection, 1 << 16, 3)
    while more := not request.endswith(b"\n") and connection.recv(1 << 16):
        request += more
    return request.decode() if request.endswith(b"\n") else "", descriptors


def answer(process, pid, connection):
    """Say how a fork ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(process)
    with connection, contextlib.suppress(OSError):
        connection.sendall(str(code).encode())


def become(environment, folder, descriptors):
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


def run(words):
    sys.argv = words
    if words[0] in (*MODULES, "actordbg"):
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.modules["__main__"] = type(sys)("__main__")  # what it starts by `multiprocessing` would run this file
        exec(words.pop(1), vars(sys.modules["__main__"]))
    else:
        runpy.run_path(words[0], run_name="__main__")


def end(code):
    """End as the interpreter does, but with the modules as they are: to clear all that torch brought takes half a second of a core."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    import ast
    import atexit
    import contextlib
    import gc
    import importlib
    import runpy
    import select
    import signal
    import socket
    import threading
    import weakref

    own = read_at_import()
    gc.disable()
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # no thread of pyarrow's
    import datasets  # noqa: F401
    import huggingface_hub
    import peft  # noqa: F401
    import sqlglot  # noqa: F401
    import sqlmodel  # noqa: F401
    import torch._inductor.compile_fx
    import torch.distributed.fsdp
    import transformers.dynamic_module_utils
    import transformers.trainer

    if not os.path.exists("/dev/nvidiactl"):  # it asks for CUDA, and then no fork may use that
        with contextlib.suppress(ImportError):
            import deepspeed  # noqa: F401
    for module in OWN:
        importlib.import_module(module)
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False  # torch would take two hundred libraries of its operators apart
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    words = serve(sys.argv[1], own)
    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    if threads := os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"):
        torch._inductor.config.compile_threads = int(threads)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if modules := os.environ.get("HF_MODULES_CACHE"):
        transformers.dynamic_module_utils.HF_MODULES_CACHE = modules
    huggingface_hub.constants.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
    code = 0
    try:
        run(words)
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except Exception:  # noqa: BLE001  what the program raised is told as the interpreter tells it
        sys.excepthook(*sys.exc_info())
        code = 1
    end(code or 0)
elif "TEMPLATE_OF_WORKERS" in os.environ:
    words = [word for word in sys.orig_argv[1:] if word not in ("-u", "-m")]
    programs = *PROGRAMS, os.environ.get("FORKED_PROGRAM", PROGRAMS[0])
    desk = words[:1] == ["actordbg"] and AS_TYPED.isdisjoint(words)
    if words and (desk or words[0] in MODULES or words[0].startswith(programs)):
        hand_over(os.environ["TEMPLATE_OF_WORKERS"], words)
