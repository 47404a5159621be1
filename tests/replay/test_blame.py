"""Who is to blame for a death or a hang, and a hang in words: made-up observations, stacks and logs."""

import subprocess

import pytest
from casefiles import cases_of

from actordbg.actor.signatures import explain, signature_of
from actordbg.base.processes import ALIVE, GONE, STOPPED, ZOMBIE
from actordbg.records.replay_record import ReplayInput
from actordbg.replay import worker_logs
from actordbg.replay.blame import (
    MAX_RANKS,
    Standing,
    culprits_of_death,
    culprits_of_hang,
    describe,
    excerpt,
    in_brief,
    overdue,
)
from actordbg.replay.rank_view import RankView
from actordbg.replay.worker_logs import before_stacks, is_complete, read_stack

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


def view(rank, slot=None, **values):
    doing = None if slot is None else {"slot": slot}
    return RankView(rank, doing=doing, **({"since": 0.0} | values))


CASES = cases_of("blame")


def rank_of(rank, line):
    words = dict(word.partition("=")[::2] for word in line.split())
    numbers = {name: int(text) for name, text in words.items() if text.isdigit()}
    state = STOPPED if "stopped" in words else ALIVE
    if "dead" in words:
        state = ZOMBIE if "wait_status" in words else GONE
    restart = "its peers are gone" if "restart" in words else ""
    return view(rank, numbers.pop("slot", None), state=state, done="done" in words, restart=restart, **numbers)


@pytest.mark.parametrize("name", CASES)
def test_who_is_to_blame(name):
    *lines, asked = CASES[name].given
    ranks = [rank_of(rank, line) for rank, line in enumerate(lines)]
    what, *more = asked.split()
    if what == "died":
        found = culprits_of_death(ranks)
    elif what == "late":
        found = overdue(ranks, float(more[1]), 10.0, collective=more[2] == "together")
    else:
        stacks = {rank: globals()[line.partition("stack=")[2]] for rank, line in enumerate(lines) if "stack=" in line}
        found = culprits_of_hang(ranks, list(map(int, more)), stacks)
    assert found == [int(word) for word in " ".join(CASES[name].expected).split()]


def standing(rank, text="", *, slot=0, done=0, share=1, seq_len=8, state=ALIVE):
    item = None if slot is None else ReplayInput(f"d{rank}", "", rank, 2, seq_len, seq_len)
    return Standing(view(rank, slot, done=slot is None, state=state), read_stack(text), item, 20.2, share, done)


@pytest.mark.parametrize(
    "text, waits_in, caller",
    [
        (BROADCAST, "broadcast (deepspeed/runtime/zero/utils.py)", "deepspeed/runtime/zero/utils.py:88"),
        (GATHER, "the all-gather of parameters (all_gather_into_tensor) (deepspeed/runtime/zero/partition_parameters.py)", ""),
        (BACKWARD, "reduce_scatter_tensor (deepspeed/runtime/zero/stage3.py)", ""),
        (WATCH + BUSY, None, "transformers/models/llama/modeling_llama.py:312 forward"),  # not the thread that watches
    ],
)
def test_a_stack_says_which_collective_its_thread_waits_in_and_who_called_it(text, waits_in, caller):
    stack = read_stack(text)
    assert stack is not None and stack.waits_in == waits_in and str(stack.caller).startswith(caller)
    assert read_stack("nothing of the kind\n") is None


def test_what_a_worker_printed_is_told_from_the_stacks_it_was_asked_for_and_these_are_whole_with_the_main_thread():
    assert is_complete(BROADCAST) and not is_complete(WATCH) and not is_complete("")
    assert is_complete(BUSY.replace(LOOP, "  ...\n")), "faulthandler shows a hundred frames at most"
    assert before_stacks(f"one\ntwo\n{BROADCAST}") == "one\ntwo" and before_stacks("one\n") == "one\n"


UNEVEN = [standing(0, BROADCAST, slot=1, done=1, share=2), standing(1, slot=None, done=1)]


@pytest.mark.parametrize(
    "ranks, words, signature",
    [
        (
            UNEVEN,
            "rank 0 waits in broadcast (deepspeed/runtime/zero/utils.py) since 20 s; rank 1 has no input left (1 of 1 done): "
            "ranks ran 2 and 1 inputs; it did not finish within 20 s (--timeout)",
            "collective-mismatch",
        ),
        (
            [standing(0, BROADCAST, seq_len=96), standing(1, BACKWARD, seq_len=2048)],
            "rank 1 waits in reduce_scatter_tensor (deepspeed/runtime/zero/stage3.py) since 20 s: every rank waits in a "
            "collective that not all reached; their inputs are [2, 96] and [2, 2048]; it",
            "collective-mismatch",
        ),
        (
            [standing(0, BROADCAST, slot=1), standing(1, BROADCAST)],
            ", in different rounds; it",
            "collective-mismatch",
        ),
        (
            [standing(0, GATHER), standing(1, BUSY)],
            "rank 1 is in forward (transformers/models/llama/modeling_llama.py:312), outside of any collective, since 20 s: "
            "the others wait for rank 1; it",
            "worker-hung",
        ),
        ([standing(0, GATHER), standing(1, state=STOPPED)], "rank 1 was stopped by a signal: the others wait for", "worker-hung"),
        # where a stack did not come nothing is concluded
        ([standing(0, BROADCAST), standing(1)], "rank 1 has been busy since 20 s and gave no stack; it", "worker-hung"),
        ([standing(0)], "rank 0 has been busy since 20 s and gave no stack; it did not finish", "worker-hung"),
    ],
)
def test_a_hang_in_words_is_where_each_rank_is_and_what_follows(ranks, words, signature):
    error = describe(ranks, 20)
    assert words in error and signature_of("TimeoutError", error) == signature
    assert (explain(signature) or ("", ""))[1]


def test_the_excerpt_has_every_ranks_stack_under_its_name_the_blamed_first_and_a_report_its_first_frames():
    text = excerpt([standing(0, slot=None, done=1), standing(1, BROADCAST)], [1], "loading\n")
    assert text.startswith("loading\n") and text.index("--- rank 1 waits") < text.index("--- rank 0 has no input left")
    assert "called by the model's openrlhf/models/actor.py:265 forward" in text
    assert "\n  torch/distributed/distributed_c10d.py:3151 broadcast\n" in text and PACKAGES not in text
    assert text.endswith("(no stack)")
    lines = in_brief(text, frames=3).splitlines()
    assert lines[0].startswith("--- rank 1 waits in broadcast") and lines[2].endswith("distributed_c10d.py:3151 broadcast")
    assert lines[4].startswith("--- rank 0 has no input left") and len(lines) == 6
    assert in_brief("Traceback (most recent call last):\n...") == ""
    many = excerpt([standing(rank, BROADCAST) for rank in range(MAX_RANKS + 3)], [0])
    assert many.count("\n  torch/distributed/distributed_c10d.py") == MAX_RANKS
    assert f"--- rank {MAX_RANKS + 2} waits in broadcast" in many, "of further ranks only where they stand"


def test_a_worker_that_dies_while_it_is_asked_for_its_stacks_gives_none(tmp_path, monkeypatch):
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(worker_logs, "state_of", lambda pid, ticks: (ALIVE, None))
    monkeypatch.setattr(worker_logs, "STACKS_S", 0.1)
    assert worker_logs.take_stacks(tmp_path, {0: (gone.pid, 1)}) == {}
