"""Memory over time: a series that leaks a megabyte at each step shows it, and parts from one that does not."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import commandline
import pytest
from roots import json_of

from actordbg.base.errors import UsageError
from actordbg.document.blocks import UNCHECKED, Items, Verdict
from actordbg.measure import process_memory, watching
from actordbg.measure.memory_document import ALIKE, APART, NOT_COMPARED, compare_page, compare_samples, watch_page
from actordbg.measure.watched import OfPids
from actordbg.measure.watching import STEP, Sample, figures, growth_of, read_samples, watch_into

MB = 1_000_000


def invoke(store, typed, *more):
    return commandline.invoke(store, "memory", *typed.split(), *more)


def sample(step, uss, *, seconds=None, **values):
    moment = seconds if seconds is not None else float(step or 0)
    made = Sample("2026-01-01T00:00:00.000000Z", moment, "n0", 7, 0, "", 3 * MB + uss, uss, None, step)
    return replace(made, **values)  # type: ignore[arg-type]


def series(leak, steps=40, noise=0, base=50 * MB):
    """A process that is loaded before its first step, grows by `leak` at each, and borrows a lot within one."""
    draw = random.Random(0)
    quiet = [sample(step, base + leak * step + draw.randint(0, noise)) for step in range(1, steps + 1)]
    return [sample(None, 5 * MB), *(one for at in quiet for one in (at, replace(at, uss=(at.uss or 0) + 90 * MB)))]


@pytest.mark.parametrize("leak, noise", [(MB, 0), (MB, 2 * MB), (200_000, 500_000)])
def test_growth_is_told_from_scatter_and_from_what_a_step_borrows(leak, noise):
    growth = figures(series(leak, noise=noise))[0].sizes["uss"].growth
    assert growth is not None and growth.grows and growth.low <= leak <= growth.high
    assert growth.slope == pytest.approx(leak, rel=0.1)
    steady = figures(series(0, noise=noise))[0].sizes["uss"].growth
    assert steady is not None and not steady.grows
    wild = growth_of([(float(n), 10 * MB + leak * n + (500 * MB if n % 3 == 0 else 0)) for n in range(60)], STEP)
    assert wild is not None and wild.slope == pytest.approx(leak, rel=0.1), "a third of the points is wild"


def test_what_too_few_steps_show_is_not_judged_and_not_called_steady():
    """A model that is loaded in ten seconds, and four steps that need no more."""
    loading = [sample(None, n * 10 * MB, seconds=n) for n in range(10)]
    samples = [*loading, *(sample(n, 100 * MB, seconds=9 + n) for n in range(1, 5))]
    (found,) = figures(samples)
    assert found.steps == 4 and found.sizes["uss"].growth is None
    _, verdict, *_, notes = watch_page("a.csv", (found,), ())
    assert isinstance(verdict, Verdict) and verdict.word == UNCHECKED and verdict.said.startswith("too few samples")
    assert isinstance(notes, Items) and notes.items[0] == "too few samples or steps to judge growth of rank 0"
    _, verdict, *_ = compare_page(compare_samples(("a", "a"), samples, samples, 0.05))
    assert isinstance(verdict, Verdict) and verdict.sentence == "RIGHT: peaks agree; growth was not checked"


def test_two_series_part_at_the_step_where_the_second_begins_to_grow():
    a = series(0)
    b = [replace(one, uss=(one.uss or 0) + max(0, (one.step or 0) - 20) * 4 * MB) for one in a]
    found = compare_samples(("a", "b"), a, b, 0.05, ["uss"])
    assert found.verdict == APART and found.pairs[0].parts == ("peak", "growth")
    assert found.pairs[0].from_step == 21
    assert compare_samples(("a", "a"), a, a, 0.05).verdict == ALIKE
    assert compare_samples(("a", "-"), a, [], 0.05).verdict == NOT_COMPARED
    higher = [replace(one, uss=(one.uss or 0) + 9 * MB) for one in a]
    assert compare_samples(("a", "b"), a, higher, 0.05, ["uss"]).pairs[0].parts == ("peak",)
    assert compare_samples(("a", "b"), a, higher, 0.2, ["uss"]).verdict == ALIKE


def test_samples_are_read_as_they_were_written_and_lines_that_are_cut_or_odd_are_left_out(tmp_path):
    path, made = tmp_path / "a.csv", series(MB, 3)
    watch_into(path, [made], list)
    with pytest.raises(UsageError, match="already exists"):
        watch_into(path, [], list)
    head, first, *rest = path.read_text().splitlines()
    figures = dict(zip(head.split(","), first.split(","), strict=True))
    changed = ({"seconds": "nan"}, {"rss": "1" + 400 * "0"}, {"uss": "-1"}, {"step": "-3"}, {"pid": ""})
    odd = [",".join((figures | one).values()) for one in changed]
    path.write_text("\n".join([head, *odd, first, *rest, rest[-1][:40]]))
    assert read_samples(path) == made
    no_table = "cannot read"
    for text, says in (("step,loss\n1", "no memory samples"), ("2026" + 200_000 * "0", no_table), ("a\rb", no_table)):
        (tmp_path / "b.csv").write_bytes(f"{text},1\n".encode())
        with pytest.raises(UsageError, match=says):
            read_samples(tmp_path / "b.csv")


def test_two_files_are_compared_and_one_is_shown_again(store, tmp_path):
    for name, leak in (("leaking", MB), ("sound", 0)):
        watch_into(tmp_path / f"{name}.csv", [series(leak)], list)
    page, leaking, sound = tmp_path / "memory.html", tmp_path / "leaking.csv", tmp_path / "sound.csv"
    done = invoke(store, f"compare {leaking} {sound} --of uss -o", str(page))
    assert done.exit_code == 1 and "USS: growth is" in done.stdout and "in B; diverging at step" in done.stdout
    assert "<html" in page.read_text() and "USS" in page.read_text()
    assert invoke(store, f"compare {sound} {sound}").exit_code == 0
    growth = json_of(invoke(store, f"compare {leaking} --json"))["processes"][0]["sizes"]["uss"]["growth"]
    assert growth["unit"] == "step" and growth["grows"] and growth["slope"] == pytest.approx(MB, rel=0.1)


def test_a_process_by_pid_is_watched_until_it_ends(store, tmp_path):
    out = tmp_path / "out.csv"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left = iter(range(6))

    def end_after_six(samples):
        if next(left, None) is None:
            child.communicate(b"\n")

    rounds = watching.rounds(OfPids([child.pid]), 0.01)
    watching.watch_into(out, rounds, lambda samples: end_after_six(samples) if samples else None)
    found = read_samples(out)
    assert len(found) == 7 and {one.pid for one in found} == {child.pid}
    assert all(one.rss and one.uss and one.rss >= one.uss for one in found)
    assert invoke(store, "compare", str(out)).exit_code == 0


def test_one_file_takes_the_samples(store):
    with pytest.raises(UsageError, match="more than once"):
        invoke(store, f"watch --pid {os.getpid()} -o a.csv -o b.csv", "--for", "1s")


def test_a_watching_without_a_file_is_beside_the_user_and_says_what_is_unknown(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        done = invoke(store, f"watch --pid {child.pid} --interval 10ms --for 100ms --json")
    finally:
        child.communicate(b"\n")
    answer = json_of(done)
    assert done.exit_code == 0 and answer["notes"]
    assert len(read_samples(tmp_path / answer["samples"])) == answer["processes"][0]["samples"] > 1


@pytest.mark.parametrize(
    "typed, says",
    [
        ("", "needs one of"), ("--pid 1 --run x", "needs one of"), ("--run x", "no process of run x"),
        ("--pid 4194304", "no process 4194304"), ("--pid 1 --ray", "needs one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_watched_is_refused(store, typed, says):
    with pytest.raises(UsageError, match=says):
        invoke(store, f"watch {typed}")


def test_gpu_memory_is_what_nvidia_smi_says_of_each_pid(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '11, 1024'\necho '12, 3'\necho '11, 1'\necho '13, [N/A]'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert process_memory.gpu_memory() == {11: 1025 * 2**20, 12: 3 * 2**20}
