"""Runs fuzz targets: `python tests/fuzz/run.py [NAME ...] [--seconds 60]`. `make fuzz` runs all of them.

Two engines. Atheris (libFuzzer) mutates what reached new code; it has wheels for Linux on x86-64 and Python 3.11 to 3.13. Elsewhere,
and with `--engine plain`, inputs of the corpus are mutated without that feedback. A target runs in a process of its own, which may
take MEMORY more than it begins with, and INPUT_SECONDS for one input.

What reached new code is kept in `tests/fuzz/found/NAME/`, an input that broke something in `tests/fuzz/findings/`; neither is
committed. `--keep` puts the smallest inputs that reach all that code into `corpus/NAME/`, which is. FILES of a target are run once:
`python tests/fuzz/run.py where tests/fuzz/findings/where-crash-...`.
"""

import argparse
import hashlib
import importlib
import importlib.util
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

CORPUS, FOUND, FINDINGS = HERE / "corpus", HERE / "found", HERE / "findings"
TARGETS = tuple(sorted(path.stem.removeprefix("of_") for path in HERE.glob("of_*.py")))
MEMORY, INPUT_SECONDS, LONGEST = 768 * 2**20, 20, 16_384
INSTRUMENTED = ["actordbg", "sqlglot"]
PRODUCT = str(HERE.parents[1] / "actordbg") + os.sep
MEMORY_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
_EXIT_FINDING = 77
BEGUN = time.monotonic()
"""Imports are part of the seconds that a target may take."""


def inputs_of(name, target):
    """The target's seeds, then its corpus, by name."""
    kept = sorted((CORPUS / name).glob("*"))
    return {**target.seeds(), **{path.name: path.read_bytes() for path in kept}}


def load(name):
    return importlib.import_module(f"of_{name}")


# ---- one target, in this process ----


def run_with_atheris(name, seconds):
    """Ends the process: with 0, or as libFuzzer ends after a finding."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        target = load(name)
    seeds = Path(tempfile.mkdtemp(prefix="actordbg-seeds-"))
    inputs = list(inputs_of(name, target).values())
    for number, data in enumerate(inputs):
        (seeds / str(number)).write_bytes(data)

    def atheris_havoc(part):
        return bytes(atheris.Mutate(part, len(part) + 64))

    def mutate(data, longest, seed):
        chance = random.Random(seed)
        if chance.random() < 0.3:
            return bytes(atheris.Mutate(data, longest))[:longest]
        havoc = atheris_havoc if chance.random() < 0.5 else havoc_for(target, chance, inputs)
        return mutated(target, data, chance, havoc)[:longest]

    words = seeds.with_suffix(".words")  # in which each byte is \xHH
    spelled = (re.sub("..", r"\\x\g<0>", word.hex()) for word in getattr(target, "WORDS", ()))
    words.write_text("".join(f'"{word}"\n' for word in spelled))
    options = [
        f"-max_total_time={max(1, round(seconds - (time.monotonic() - BEGUN)))}", f"-timeout={INPUT_SECONDS}", "-rss_limit_mb=4096", f"-max_len={LONGEST}", "-len_control=20",
        "-print_final_stats=1", f"-artifact_prefix={FINDINGS}/{name}-", *([f"-dict={words}"] if words.stat().st_size else []),
    ]  # fmt: skip
    limit_memory()
    atheris.Setup([sys.argv[0], *options, str(FOUND / name), str(seeds)], target.one_input, custom_mutator=mutate)
    atheris.Fuzz()


def run_plainly(name, seconds):
    """Mutates seeds and corpus at random; the exit status."""
    target, seed = load(name), random.randrange(2**32)
    chance, inputs = random.Random(seed), list(inputs_of(name, target).values())
    limit_memory()
    count, started = 0, time.monotonic()
    deadline = max(BEGUN + seconds, started + 1)
    while time.monotonic() < deadline:
        data = chance.choice(inputs)
        havoc = havoc_for(target, chance, inputs)
        data = mutated(target, data, chance, havoc)[:LONGEST] if chance.random() < 0.7 else havoc(data)
        if not survives(target, data):
            path = FINDINGS / f"{name}-crash-{hashlib.sha1(data).hexdigest()}"
            path.write_bytes(data)
            print(f"written to {path}")
            return _EXIT_FINDING
        count += 1
    print(f"stat::number_of_executed_units: {count}\nstat::average_exec_per_sec: {count / (time.monotonic() - started):.0f}")
    return 0


def mutated(target, data, chance, havoc):
    """What the target makes of an input; changed bytes where that is not of its format."""
    try:
        return target.mutate(data, chance, havoc) if hasattr(target, "mutate") else havoc(data)
    except Exception:  # noqa: BLE001 - a mutator opens damaged inputs, with whatever breaks
        return havoc(data)


def havoc_for(target, chance, inputs):
    """Changes bytes, with the target's words and pieces of its inputs."""
    from fuzzing import havoc_of  # not before atheris instruments what it imports

    return havoc_of(chance, getattr(target, "WORDS", ()), inputs)


def survives(target, data):
    """Whether one input breaks nothing, in the time that it may take; prints what it broke."""
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(INPUT_SECONDS)
    try:
        target.one_input(data)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
        traceback.print_exc()
        return False
    finally:
        signal.alarm(0)
    return True


def too_long(*_):
    raise TimeoutError(f"one input takes more than {INPUT_SECONDS} s")


def limit_memory():
    """From now on this process may have MEMORY more: an input that wants it ends in a MemoryError, which is a finding."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))


# ---- a small corpus ----


def reached(target, data):
    """The jumps between lines of the product that one input takes."""
    jumps = set()

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return None
        before = frame.f_lineno

        def local(frame, event, _):
            nonlocal before
            jumps.add((frame.f_code, before, frame.f_lineno))
            before = frame.f_lineno
            return local

        jumps.add((frame.f_code, 0, before))
        return local

    sys.settrace(trace)
    try:
        target.one_input(data)
    finally:
        sys.settrace(None)
    return frozenset(jumps)


def keep_smallest(name):
    """Make `corpus/NAME` the smallest inputs that reach what seeds, corpus and everything found reach. Named inputs stay."""
    target = load(name)
    old = sorted((CORPUS / name).glob("*"))
    named = [path for path in old if not re.fullmatch(r"[0-9a-f]{12}", path.name)]
    covered = set()
    for data in (*target.seeds().values(), *(path.read_bytes() for path in named)):
        covered |= reached(target, data)
    others = {path.read_bytes() for path in (*set(old).difference(named), *(FOUND / name).glob("*"))}
    for path in set(old).difference(named):
        path.unlink()
    for data in sorted(others, key=len):
        new = reached(target, data) - covered
        if new:
            covered |= new
            (CORPUS / name).mkdir(parents=True, exist_ok=True)
            (CORPUS / name / hashlib.sha1(data).hexdigest()[:12]).write_bytes(data)
    kept = list((CORPUS / name).glob("*"))
    print(f"{name}: {len(kept)} inputs of {sum(path.stat().st_size for path in kept)} bytes take {len(covered)} jumps")


# ---- all targets, each in a process of its own ----


def run_all(names, seconds, engine):
    """Print a row for each target; the number of those with a finding."""
    print(f"{'target':<10} {'executions':>11} {'a second':>9} {'edges':>7} {'new inputs':>10}  finding")
    broken = 0
    for name in names:
        command = [sys.executable, __file__, name, "--seconds", str(seconds), "--engine", engine, "--alone"]
        (FOUND / name).mkdir(parents=True, exist_ok=True)
        before = set((FOUND / name).iterdir())
        with tempfile.TemporaryDirectory(prefix="actordbg-fuzz-", dir=MEMORY_FOLDER) as folder:  # libFuzzer runs no exit handlers
            environment = os.environ | {"TMPDIR": folder}
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
        new = len(set((FOUND / name).iterdir()) - before)
        print(_row(name, done.stdout, new, done.returncode), flush=True)
        if done.returncode:
            broken += 1
            print(_what_broke(name, done.stdout))
    return broken


def _row(name, output, new, status):
    patterns = (r"executed_units: *(\d+)", r"exec_per_sec: *(\d+)", r"cov: (\d+)")
    count, rate, edges = (["-", *re.findall(pattern, output)][-1] for pattern in patterns)
    return f"{name:<10} {count:>11} {rate:>9} {edges:>7} {new:>10}  {'FOUND ONE' if status else 'none'}"


def _what_broke(name, output):
    path = re.findall(rf"\S*{re.escape(str(FINDINGS))}/\S+", output)
    lines = [line for line in output.splitlines() if not re.match(r"#\d+\s|INFO|stat::|==\d+==|MS:|0x", line)]
    replay = f"python tests/fuzz/run.py {name} {path[-1]}" if path else "(no input was written)"
    return "\n".join([*lines[-40:], f"again with: {replay}"])


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help=f"targets, of {', '.join(TARGETS)}; or one target and files to run")
    parser.add_argument("--seconds", type=float, default=60, help="for each target (default: 60)")
    parser.add_argument("--engine", choices=("auto", "atheris", "plain"), default="auto")
    parser.add_argument("--keep", action="store_true", help="put the smallest such inputs into the corpus, and end")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parsed()
    names = [name for name in options.names if name in TARGETS] or list(TARGETS)
    files = [Path(name) for name in options.names if name not in TARGETS]
    FINDINGS.mkdir(exist_ok=True)
    if files:
        target = load(names[0])
        limit_memory()
        return sum(not survives(target, path.read_bytes()) for path in files)
    if options.keep:
        for name in names:
            keep_smallest(name)
        return 0
    engine = options.engine
    if engine == "auto":
        engine = "atheris" if importlib.util.find_spec("atheris") else "plain"
    if not options.alone:
        return 1 if run_all(names, options.seconds, engine) else 0
    if engine == "plain":
        return run_plainly(names[0], options.seconds)
    run_with_atheris(names[0], options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
