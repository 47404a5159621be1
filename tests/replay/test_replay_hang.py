"""What a hang is, in words: stacks read, and every rank named. Made-up text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from actordbg.actor.signatures import explain, signature_of
from actordbg.base.processes import ALIVE, STOPPED
from actordbg.replay import worker_logs as logs
from actordbg.replay.blame import Seen, overdue
from actordbg.replay.hang import MAX_RANKS, Standing, describe, excerpt, in_brief
from actordbg.replay.worker_logs import Stack, before_stacks, is_complete, read_stack

PACKAGES = "/home/user/venv/lib/python3.11/site-packages"
WATCH = """Thread 0x00007f01 (most recent call first):
  File "/src/actordbg/actordbg/replay/worker.py", line 251 in watch
  File "/usr/lib/python3.11/threading.py", line 982 in run

"""
LOOP = """  File "/src/actordbg/actordbg/replay/worker.py", line 183 in _run
  File "/src/actordbg/actordbg/replay/worker.py", line 128 in _loop
  File "/src/actordbg/actordbg/replay/worker.py", line 109 in run
  File "/src/actordbg/actordbg/replay/worker.py", line 280 in main
"""
BROADCAST = f"""{WATCH}Current thread 0x00007f02 (most recent call first):
  File "{PACKAGES}/torch/distributed/distributed_c10d.py", line 3151 in broadcast
  File "{PACKAGES}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "{PACKAGES}/deepspeed/comm/torch.py", line 323 in broadcast
  File "{PACKAGES}/deepspeed/comm/comm.py", line 122 in log_wrapper
  File "{PACKAGES}/deepspeed/utils/nvtx.py", line 33 in wrapped_fn
  File "{PACKAGES}/deepspeed/runtime/zero/utils.py", line 88 in assert_lst_len_same_as_other_ranks
  File "{PACKAGES}/torch/nn/modules/module.py", line 1789 in _call_impl
  File "{PACKAGES}/openrlhf/models/actor.py", line 265 in forward
{LOOP}"""
GATHER = f"""Current thread 0x00007f02 (most recent call first):
  File "{PACKAGES}/deepspeed/runtime/zero/partition_parameters.py", line 640 in wait
  File "{PACKAGES}/deepspeed/runtime/zero/partitioned_param_coordinator.py", line 300 in fetch_sub_module
{LOOP}"""
BUSY = f"""Current thread 0x00007f02 (most recent call first):
  File "{PACKAGES}/torch/nn/functional.py", line 20 in linear
  File "{PACKAGES}/transformers/models/llama/modeling_llama.py", line 312 in forward
{LOOP}"""
BACKWARD = f"""Thread 0x00007f05 (most recent call first):
  File "{PACKAGES}/torch/distributed/distributed_c10d.py", line 99 in reduce_scatter_tensor
  File "{PACKAGES}/deepspeed/runtime/zero/stage3.py", line 1400 in _partition_grads

Current thread 0x00007f02 (most recent call first):
  File "{PACKAGES}/torch/autograd/graph.py", line 800 in _engine_run_backward
{LOOP}"""


def stack(text: str) -> Stack:
    found = read_stack(text)
    assert found is not None
    return found


def standing(rank: int, text: str = "", *, slot: int | None = 0, done: int = 0, share: int = 1, **values: object) -> Standing:
    seen = Seen(rank, slot=slot, done=slot is None)
    return Standing(seen, read_stack(text), "" if slot is None else f"d{rank}", 20.2, share, done, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "waits_in"),
    [
        (BROADCAST, "broadcast (deepspeed/runtime/zero/utils.py)"),
        (
            GATHER,
            "the gathering of parameters (all_gather_into_tensor) (deepspeed/runtime/zero/partition_parameters.py)",
        ),
        (BACKWARD, "reduce_scatter_tensor (deepspeed/runtime/zero/stage3.py)"),
        (BUSY, None),
    ],
)
def test_a_stack_says_which_collective_its_thread_waits_in_and_who_called_it(text: str, waits_in: str | None) -> None:
    assert stack(text).waits_in == waits_in


def test_the_thread_that_runs_the_input_is_read_and_not_the_one_that_watches() -> None:
    assert str(stack(WATCH + BUSY).caller) == "transformers/models/llama/modeling_llama.py:312 forward"
    assert str(stack(BROADCAST).model_frame) == "openrlhf/models/actor.py:265 forward"
    assert read_stack("nothing of the kind\n") is None


def test_an_answer_is_complete_when_the_main_thread_is_in_it() -> None:
    assert is_complete(BROADCAST) and not is_complete(WATCH) and not is_complete("")
    assert is_complete(BUSY.replace(LOOP, "  ...\n")), "faulthandler shows a hundred frames at most"


def test_ranks_with_different_numbers_of_inputs_are_named_with_what_they_wait_in() -> None:
    ranks = [standing(0, BROADCAST, slot=1, done=1, share=2), standing(1, slot=None, done=1)]
    error = describe(ranks, 20)
    assert error == (
        "rank 0 waits in broadcast (deepspeed/runtime/zero/utils.py) since 20 s; rank 1 has no input left (1 of 1 done): "
        "ranks ran 2 and 1 inputs; it did not finish within 20 s (--timeout)"
    )
    assert signature_of("TimeoutError", error) == "collective-mismatch"
    known = explain("collective-mismatch")
    assert known is not None and known[1]


def test_ranks_that_wait_in_different_collectives_are_told_with_their_lengths() -> None:
    ranks = [standing(0, BROADCAST, batch_size=2, seq_len=96), standing(1, BACKWARD, batch_size=2, seq_len=2048)]
    error = describe(ranks, 20)
    assert "every rank waits in a collective that not all of them came to; their inputs are [2, 96] and [2, 2048]" in error
    assert "rank 1 waits in reduce_scatter_tensor" in error
    assert signature_of("TimeoutError", error) == "collective-mismatch"
    elsewhere = [standing(0, BROADCAST, slot=1), standing(1, BROADCAST, slot=0)]
    assert "they are in different slots" in describe(elsewhere, 20)


def test_a_rank_outside_of_any_collective_is_who_the_others_wait_for() -> None:
    error = describe([standing(0, GATHER), standing(1, BUSY)], 20)
    assert "rank 1 is in forward (transformers/models/llama/modeling_llama.py:312), outside of any collective" in error
    assert "the others wait for rank 1" in error
    assert signature_of("TimeoutError", error) == "worker-hung"
    stopped = Standing(Seen(1, slot=0, state=STOPPED), None, "d1", 20.0)
    assert "rank 1 was stopped by a signal: the others wait for rank 1" in describe([standing(0, GATHER), stopped], 20)


def test_where_stacks_did_not_come_nothing_is_concluded() -> None:
    error = describe([standing(0, BROADCAST), standing(1)], 20)
    assert "rank 1 has been busy since 20 s and gave no stack; it did not finish" in error
    assert "wait for" not in error and signature_of("TimeoutError", error) == "worker-hung"
    assert describe([standing(0)], 20).startswith("rank 0 has been busy since 20 s and gave no stack; it did not")


def test_the_excerpt_has_every_ranks_stack_under_its_name_the_blamed_first() -> None:
    ranks = [standing(0, slot=None, done=1), standing(1, BROADCAST)]
    text = excerpt(ranks, [1], "loading\n")
    assert text.startswith("loading\n") and text.index("--- rank 1 waits") < text.index("--- rank 0 has no input left")
    assert "called by the model's openrlhf/models/actor.py:265 forward" in text
    assert "\n  torch/distributed/distributed_c10d.py:3151 broadcast\n" in text and PACKAGES not in text
    assert text.endswith("(no stack)")
    many = excerpt([standing(rank, BROADCAST) for rank in range(MAX_RANKS + 3)], [0])
    assert many.count("\n  torch/distributed/distributed_c10d.py") == MAX_RANKS
    assert f"--- rank {MAX_RANKS + 2} waits in broadcast" in many, "of further ranks only where they stand"


def test_a_report_shows_the_first_frames_of_each_rank() -> None:
    text = excerpt([standing(0, slot=None, done=1), standing(1, BROADCAST)], [1], "loading\n")
    lines = in_brief(text, frames=3).splitlines()
    assert lines[0].startswith("--- rank 1 waits in broadcast") and lines[2].endswith("distributed_c10d.py:3151 broadcast")
    assert lines[4].startswith("--- rank 0 has no input left") and len(lines) == 6
    assert in_brief("Traceback (most recent call last):\n...") == ""


def test_what_a_worker_printed_is_told_from_the_stacks_that_it_was_asked_for() -> None:
    assert before_stacks(f"one\ntwo\n{BROADCAST}") == "one\ntwo"
    assert before_stacks("one\n") == "one\n"


def test_a_rank_that_is_done_does_not_hold_up_the_clock_of_the_others() -> None:
    waiting = Seen(0, slot=1, started=5.0, slots_finished=1)
    assert overdue([waiting, Seen(1, slots_finished=1, done=True)], 16.0, 10.0, collective=True) == [0]
    assert overdue([waiting, Seen(1, slots_finished=1)], 16.0, 10.0, collective=True) == [], "it is about to say so"


def test_a_worker_that_dies_while_it_is_asked_for_its_stacks_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(logs, "state_of", lambda pid, ticks: (ALIVE, None))
    monkeypatch.setattr(logs, "STACKS_S", 0.1)
    assert logs.take_stacks(tmp_path, {0: (gone.pid, 1)}) == {}
