"""`breakpoint()` in a running training: its ranks park, another terminal has the prompt, and nobody waits for ever."""

import sys

import pytest
import stopcases
from roots import run_program
from stopcases import AtTerminal, live_job

from actordbg.debug import stops
from actordbg.debug.meeting import DETACH, attend

pytestmark = pytest.mark.slow


def test_all_ranks_park_and_another_terminal_has_the_prompt(store, tmp_path):
    with live_job(tmp_path, ranks=3, steps=4, ACTORDBG_RUN="ppo") as (first, *others):
        assert first.stderr is not None
        assert "actordbg attach ppo" in first.stderr.readline()
        terminal = AtTerminal(store, "attach", "ppo", ACTORDBG_STOP_DIR=str(tmp_path))
        assert "ranks 1, 2 paused" in terminal.prompt()
        assert all(line in terminal.type('everywhere("secret")') for line in ("rank 0: 0", "rank 1: 10", "rank 2: 20"))
        assert "alone while the others are paused" in terminal.type("step")
        assert "refused" in terminal.type('gather("x")')
        assert "paused" in terminal.type("continue") and "1" in terminal.type("p step")
        terminal.child.sendline("detach")  # in the second step; the others are gone through
        ends = [process.communicate(timeout=stopcases.PATIENCE_S)[0] for process in (first, *others)]
        for rank, said in enumerate(ends):
            assert [f"rank {rank} did step {step}" in said for step in range(4)] == [True] * 4
            assert "'actordbg.debug.stops'" in said and "catalog" not in said and "replay" not in said.replace("replay_", "")
        terminal.child.sendintr()
        assert terminal.leave()[0] == 130


def test_a_rank_that_does_not_come_is_named_and_nobody_hangs(tmp_path):
    with live_job(tmp_path, ranks=2, steps=3, PATIENCE="1", MISSES="1") as started:
        (said, errors), (other, _) = (process.communicate(timeout=stopcases.PATIENCE_S) for process in started)
    assert "rank 0 did step 2" in said and "rank 1 did step 2" in other
    assert errors.count("without rank 1, which did not arrive") == 3


def test_a_leader_that_does_not_come_is_replaced_and_a_rank_that_dies_is_told_of(store, tmp_path):
    with live_job(tmp_path, ranks=3, steps=1, PATIENCE="3", MISSES="0", ACTORDBG_RUN="sft") as started:
        ends = [process.communicate(timeout=stopcases.PATIENCE_S) for process in started]
    assert "without rank 0, which did not arrive" in ends[1][1] + ends[2][1]

    with live_job(tmp_path, ranks=2, steps=1, ACTORDBG_RUN="sft") as (first, second):
        assert first.stderr is not None
        first.stderr.readline()
        terminal = AtTerminal(store, "attach", "sft", ACTORDBG_STOP_DIR=str(tmp_path))
        terminal.prompt()
        second.kill()
        terminal.child.expect("rank 1 is gone")
        assert "rank 0 did step 0" in first.communicate(timeout=stopcases.PATIENCE_S)[0]
        terminal.child.sendintr()
        terminal.leave()


def test_a_run_with_stops_can_be_attached_to_before_its_first_stop(store, tmp_path):
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "run", "--break", "--run", "early", "--", "true"]
    done = run_program(command, env=stopcases.environment({"ACTORDBG_STOP_DIR": str(tmp_path)}))
    assert done.returncode == 0 and "actordbg attach early" in done.stderr
    terminal = AtTerminal(store, "attach", "early", ACTORDBG_STOP_DIR=str(tmp_path))
    terminal.child.expect("waiting for a breakpoint in run early")
    terminal.child.sendintr()
    assert terminal.leave()[0] == 130


def test_what_was_said_at_a_prompt_counts_also_where_the_stop_then_fails(tmp_path, monkeypatch):
    held = []

    def hold(stop):
        held.append(stop.place)
        stop._end(DETACH, "")
        raise OSError("no space left")

    monkeypatch.setenv(stops.FOLDER, str(tmp_path))
    monkeypatch.setattr(stops.Stop, "hold", hold)
    for name in ("_off", "_missed", "_alone"):
        monkeypatch.setattr(stops, name, False)
    for _ in range(2):
        stops.stop_job(sys._getframe(), 0, 1.0)
    assert len(held) == 1


def test_what_others_put_among_the_prompts_of_a_shared_store_is_passed_by(tmp_path):
    (tmp_path / "prompt-x.sock").touch()
    goes_on = iter([True, False])
    attend(lambda: [tmp_path], lambda: next(goes_on), print)


def test_what_a_prompt_says_at_first_fits_a_terminal_of_80_columns_and_breaks_no_word(tmp_path):
    names = dict.fromkeys(("sequences", "attention_mask", "action_mask", "allgather_logits", "return_output", "temperature"))
    place = {"place": "before Actor.forward", "banner": ", input 20261130T171314.000001Z-000000-4711-00000000"}
    said = stops.Stop(tmp_path, 0, (0,), 0, frame=None, names=names, opened=print, layers=("lm_head",), **place)._introduction()
    assert max(map(len, said.splitlines())) <= 80
    words = " ".join(said.split())
    assert all(whole in words for whole in (place["banner"], *names, "layer [NAME], detach (ignore further breakpoints), quit"))
