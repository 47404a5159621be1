"""Every parser stands every input that was kept, and some hundred new ones. `make fuzz` gives each target a minute."""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import fuzzing
import pytest
import run
from amounts import amount
from roots import run_program

from actordbg import formats, records

FILES = 300_000
"""Most bytes of all inputs that are kept."""


@pytest.mark.parametrize("name", run.TARGETS)
def test_every_input_that_was_kept_breaks_nothing_and_the_parsers_are_reached(name):
    target = run.load(name)
    wanted = {parser.__code__: parser.__qualname__ for parser in map(plain, target.PARSERS)}
    reached = set()
    for data in run.inputs_of(name, target).values():
        reached |= {code for code, _, _ in run.reached(target, data)}
    assert {wanted[code] for code in wanted.keys() - reached} == set(), "no input gets to these"


READS = re.compile(r"read_|parse|unpack|from_json\Z|from_dict\Z")
NO_PARSER = {"read_regular", "unpacked"}
"""Hands out bytes as they are; makes rows of a call of this very process."""


def test_every_reader_of_the_formats_has_a_target():
    """By its name. A target that lists it has an input that gets to it: see above."""
    fuzzed = {plain(parser).__code__ for name in run.TARGETS for parser in run.load(name).PARSERS}
    readers = {}
    rooms = (formats, records)
    for found in (module for room in rooms for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")):
        module = importlib.import_module(found.name)
        kinds = [module, *(kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == found.name)]
        for name, function in ((name, plain(one)) for kind in kinds for name, one in vars(kind).items() if READS.match(name)):
            if getattr(function, "__module__", None) == found.name and hasattr(function, "__code__"):
                readers[function.__code__] = f"{found.name}.{name}"
    assert len(readers) > 15
    assert sorted({name for code, name in readers.items() if code not in fuzzed and name.split(".")[-1] not in NO_PARSER}) == []


def plain(function):
    """A class method's function, or what a generator's decorator wraps."""
    return getattr(function, "__wrapped__", getattr(function, "__func__", function))


@pytest.mark.slow
@pytest.mark.parametrize("name", run.TARGETS)
def test_new_inputs_break_nothing_and_a_seed_gives_the_same_ones(name):
    target = run.load(name)
    inputs = list(run.inputs_of(name, target).values())

    def made(seed):
        chance = fuzzing.Chance(seed)
        return run.mutated(target, chance.choice(inputs), chance, fuzzing.havoc_of(chance, others=inputs))[: run.LONGEST]

    several = [made(seed) for seed in range(amount(150, 5000))]
    assert several[:20] == [made(seed) for seed in range(20)] and len({*several} - {*inputs}) > len(several) / 4
    for data in several:
        assert run.survives(target, data), data


def test_the_inputs_that_are_kept_stay_small():
    assert sum(path.stat().st_size for path in run.CORPUS.rglob("*") if path.is_file()) < FILES
    assert {path.name for path in run.CORPUS.iterdir()} <= set(run.TARGETS)


BROKEN = '''
"""A parser with three faults, one of them behind two comparisons."""
PARSERS = ()
def seeds():
    return {"seed": b"{}"}
def one_input(data):
    if data[:1] == b"[" and FAULT == "error":
        raise KeyError("x")
    while data[:1] == b"[" and FAULT == "hang":
        pass
    if data[:1] == b"[" and FAULT == "memory":
        bytes(4 * 2**30)
'''


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "plain"])
@pytest.mark.parametrize("fault, said", [("error", "KeyError"), ("memory", "MemoryError"), ("hang", "")])
def test_a_fault_is_found_and_its_input_is_written(engine, fault, said, tmp_path):
    """A copy of the runner beside a broken parser: both engines find it, end with 1, and say how to run it again."""
    for name in ("run.py", "fuzzing.py"):
        text = (Path(run.__file__).parent / name).read_text()
        (tmp_path / name).write_text(
            text.replace("INPUT_SECONDS, LONGEST = 768 * 2**20, 20", "INPUT_SECONDS, LONGEST = 768 * 2**20, 1")
        )
    (tmp_path / "of_broken.py").write_text(BROKEN.replace("FAULT", repr(fault)))
    runner = [sys.executable, str(tmp_path / "run.py"), "broken"]
    done = run_program([*runner, "--seconds", "60", "--engine", engine])
    (written,) = (tmp_path / "findings").iterdir()
    assert done.returncode == 1 and "FOUND ONE" in done.stdout and said in done.stdout
    assert f"run.py broken {written}" in done.stdout and written.read_bytes()[:1] == b"["
    again = run_program([*runner, str(written)])
    assert again.returncode == 1 and (said or "TimeoutError") in again.stderr
