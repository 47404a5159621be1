"""Stops inside of replays, driven through a terminal: ranks park, nothing is disturbed, and who dies or leaves takes nobody along."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time

import brokenactor
import pytest
import stopcases
from amounts import first_or_all
from editorcases import Editor, told_to_another_user
from replaycases import publish
from stopcases import AtTerminal, actordbg, events, figures, newest, nobody_is_left, results, status

from actordbg.debug import editor
from actordbg.replay.launch import free_port

pytestmark = pytest.mark.forked

BACKENDS = {
    "fsdp2": ("--backend", "fsdp2", "--nproc", "2"),
    "ZeRO 3": ("--backend", "deepspeed", "--zero-stage", "3", "--nproc", "2"),
    "plain": ("--nproc", "2"),
}
WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("name", first_or_all(list(BACKENDS)))
def test_stops_disturb_nothing_and_deaths_and_closed_terminals_end_in_a_verdict(store, tmp_path, name):
    """Two replays of the same two inputs: one goes by them, and has a breakpoint and an error behind; the other stops in them."""
    publish(store, 2, length=47)
    publish(store, 2, length=40, first=2)
    publish(store, 2, length=33, first=4)
    publish(store, 3, length=48, first=6)
    replay = ("replay", *BACKENDS[name], "--backward", "--dtype", "fp32")
    together = name != "plain"
    faulty = brokenactor.environment(tmp_path / "fault", stopcases.FAULT)
    passed_by = AtTerminal(store, *replay, "--where", "seq_len<48", "--break", "error", "-v", **faulty)
    undisturbed = _a_breakpoint_of_the_users_and_a_post_mortem(store, passed_by, together)
    stops = ("--where", "seq_len>=47", "--break", "before", "--break-rank", "1" if together else "0")
    stopping = AtTerminal(store, *replay, *stops)
    assert _gone_through(store, stopping, together) == undisturbed


def _a_breakpoint_of_the_users_and_a_post_mortem(store, terminal, together):
    """Then the terminal is closed. What came of the inputs at which nothing stops."""
    stops = []
    said = terminal.prompt()
    while True:
        stops.append("error" if "where the input failed" in said else "breakpoint")
        if stops[-1] == "error":
            assert "(ValueError: boom)" in said and 'raise ValueError("boom")' in said
            if "no other rank is paused" in said:
                assert "is paused at where the input failed" in terminal.prompt()
            assert "33" in terminal.type("p sequences.shape[1]") and "boom" in terminal.type("p error")
            assert ("refused" in terminal.type(f"gather({WEIGHT!r})")) is together
        else:
            assert "at breakpoint()" in said and "40" in terminal.type("p marked") and "forward" in terminal.type("where")
            assert all(
                f"{rank}: 40" in terminal.type('everywhere("marked")') for rank in ((0, 1) if together else (terminal.rank,))
            )
        if sorted(stops) == ["breakpoint", "error"] * together or len(stops) == 4:
            break
        said = terminal.type("continue")
    folder = newest(store)
    assert terminal.hang_up() and nobody_is_left(folder) and status(folder) == "interrupted"
    for rank in (0, 1):
        told = [event["text"] for event in events(folder, "line") if event["rank"] == rank]
        assert f"[rank {rank}] before forward" in told[0] and "sequences [2, 47] int64 cpu" in told[0]
        assert "training mode, weights float32 on cpu" in told[0] and "loss" in told[1]
        assert told[1] in (folder / f"rank{rank}.log").read_text()
    return {dump: one for dump, one in figures(folder).items() if _is_first(dump)}


def _gone_through(store, terminal, together):
    """Through the first inputs layer by layer, out of the second two, and in the last one a rank is killed. Then all has ended."""
    said = terminal.prompt()
    folder = newest(store)
    assert terminal.rank == int(together) and "before Actor.forward" in said and ("rank 0 paused" in said) is together
    assert "sequences                [2, 47] int64 cpu" in terminal.type("shapes()")
    assert "weight of a" in terminal.type("import torch; torch.rand(3); print('weight', 'of', 'a model')")
    assert "1.9" in terminal.type("stats(torch.tensor([1.9, float('nan')]))") and "'model.embed" not in said
    assert "[128, 64] float32 cpu" in terminal.type(f"stats(gather({WEIGHT!r}))")
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.glob("stop-*.sock")] == [0o600] * together
    assert "before model.layers.0" in terminal.type("layer")
    assert ("rank 1: torch.Size([2, 47, 64])" in terminal.type('everywhere("hidden_states.shape")')) is together
    assert "[128, 64] float32 cpu" in terminal.type(f"stats(gather({WEIGHT!r}))")
    assert "no attribute" in terminal.type("gather('model.layers.7.weight')") and "no layer" in terminal.type("layer nonsense")
    assert ("and hang in the" if together else "modeling_llama.py") in terminal.type("next" if together else "step")
    assert "after Actor.forward" in terminal.type("layer after")
    assert "min" in terminal.type("stats(log_probs)") and "tensor(" in terminal.type("p loss")
    assert "before Actor.forward" in terminal.type("continue") and "[2, 48]" in terminal.type("shapes()")
    assert "before Actor.forward" in terminal.type("quit")
    (victim,) = {event["pid"] for event in events(folder, "boot") if event["rank"] == 0}  # paused; alone, at its prompt
    os.kill(victim, signal.SIGKILL)
    code, said = terminal.leave()
    assert nobody_is_left(folder) and not list(folder.glob("*.sock*")) and status(folder) == "complete"
    found = results(folder)
    stopped = [one.error for one in found.values() if one.status == "stopped"]
    assert (code, stopped) == (1, ["stopped by the user"] * (2 if together else 1))
    crashed = [(one.worker, one.error or "") for one in found.values() if one.status == "crashed"]
    assert [worker for worker, _ in crashed] == [0] and "SIGKILL" in crashed[0][1], crashed
    assert all(one.forward_s < 60 for one in found.values() if one.forward_s is not None)
    return {dump: one for dump, one in figures(folder).items() if _is_first(dump)}


def _is_first(dump_id):
    return dump_id.endswith(("-00000000", "-00000001"))


def test_the_progress_bar_leaves_the_terminal_to_a_breakpoint_of_ones_own(store, tmp_path):
    publish(store, 1, length=40)
    faulty = brokenactor.environment(tmp_path / "fault", stopcases.FAULT)
    replaying = AtTerminal(store, "replay", TERM="xterm", **faulty)
    replaying.prompt()
    time.sleep(1.0)  # a bar is drawn ten times a second
    assert replaying.type("p marked + 2") == "p marked + 2\r\n42\r\n"
    code, said = replaying.leave("continue")
    assert code == 0 and "1/1" in said


def test_ranks_that_run_apart_have_one_prompt_where_step_enters_the_forward_and_next_passes_it(store):
    publish(store, 3, length=48)
    replaying = AtTerminal(store, "replay", "--nproc", "2", "--break", "before")
    assert "-> output = actor(" in replaying.prompt()
    assert "actor.py" in (said := replaying.type("step")) and "forward()" in said
    time.sleep(4.0)
    assert "--Return--" in replaying.type("return") and "-> output" in replaying.type("next")
    assert "--Return--" in replaying.type("next") and "before Actor.forward, input" in replaying.type("next")
    assert "-> output" in replaying.type("next")
    assert "min" in replaying.type("stats(output)") and replaying.rank == 0
    code, said = replaying.leave("continue")
    assert code == 0 and "3 passed" in said
    assert all(result.forward_s < 4 for result in results(newest(store)).values()), "a wait at a prompt is not a forward"


def test_without_a_terminal_a_stop_is_refused_with_the_way_to_attach(store, tmp_path):
    publish(store, 1, length=40)
    said = actordbg(store, "replay", "--break", "before")
    assert said.returncode == 2 and "--break-wait" in said.stderr and f"actordbg --store {store.root} attach" in said.stderr
    assert not store.replays.exists()
    faulty = brokenactor.environment(tmp_path / "fault", stopcases.FAULT)
    assert actordbg(store, "replay", "--expect-eval", "--no-backward", **faulty).returncode == 1
    (record,) = results(newest(store)).values()
    assert "no terminal for its prompt" in (record.error or "") and "Unsupported" in (record.error_class or "")


def test_expect_eval_fails_a_module_in_training_mode_and_debug_lines_name_each_layer(store):
    publish(store, 1, length=48)
    said = actordbg(store, "replay", "--backward", "--expect-eval", "--log-level", "debug")
    (record,) = results(newest(store)).values()
    assert said.returncode == 1 and "NotInEvalMode" in (record.error_class or "") and "dropout may be on" in (record.error or "")
    assert actordbg(store, "replay", "--no-backward", "--expect-eval", "--log-level", "debug").returncode == 0
    told = [event["text"].removeprefix("[rank 0] ") for event in events(newest(store), "line")]
    wanted = ("before forward", "before model.layers.0: [2, 48, 64]", "before model.layers.1: [2, 48, 64]", "after forward")
    assert [line.startswith(start) for line, start in zip(told, wanted, strict=True)] == [True] * 4


def test_an_editor_stops_looks_and_goes_on_and_another_user_gets_nothing(store):
    publish(store, 2, length=48)
    port = free_port()
    options = ("replay", "--nproc", "2", "--break", "before", "--debugpy", str(port))
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), *options]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    replaying = subprocess.Popen(command, text=True, env=stopcases.environment(), **pipes)
    with contextlib.ExitStack() as at_end:
        at_end.callback(replaying.kill)
        if os.geteuid() == 0:
            told_to_others = told_to_another_user(port)
            assert port in told_to_others and set(told_to_others.values()) == {""}, told_to_others
        attached = Editor(port)
        thread = attached.event("stopped")["threadId"]
        assert attached.evaluate("sequences.shape[1]", thread, "<module>") == "48"
        attached.ask("continue", threadId=thread)
        said, told = replaying.communicate(timeout=60)
    assert "2 passed of 2" in said and told.count(f"an editor, at 127.0.0.1:{port}") == 1
    assert nobody_is_left(newest(store))


@pytest.mark.parametrize("family, address", [("AF_INET", "127.0.0.1"), ("AF_INET6", "::1"), ("AF_INET6", "::ffff:127.0.0.1")])
def test_debugpy_is_not_led_to_what_is_not_a_server_of_this_users(family, address):
    """Another user may reach the port at which the adapter is awaited first, and name a server of its own at either loopback."""
    pytest.importorskip("debugpy")
    with (
        socket.socket(getattr(socket, family)) as client,
        editor.own_user_only(),
        pytest.raises(ConnectionRefusedError, match="not a"),
    ):
        client.connect((address, 9))


def test_attaching_from_another_terminal_and_closing_it(store):
    publish(store, 1, length=48)
    replaying = AtTerminal(store, "replay", "--break", "after", "--break-wait", "200")
    replaying.child.expect(r"actordbg --store \S+ attach ([0-9a-zA-Z-]+)")
    other = AtTerminal(store, "attach", replaying.child.match.group(1))
    other.prompt()
    assert "KeyboardInterrupt" in _interrupted(other)
    assert other.hang_up()
    code, said = replaying.leave()
    assert code == 1 and "1 stopped by the user" in said
    (record,) = results(newest(store)).values()
    assert (record.status, record.error) == ("stopped", "the terminal at the prompt is closed")
    assert nobody_is_left(newest(store))
    late = actordbg(store, "attach", "last")
    assert late.returncode == 2 and "has ended" in late.stderr


def _interrupted(terminal):
    """Ctrl-C in the middle of a command."""
    terminal.child.sendline("import time; time.sleep(3000)")
    terminal.child.expect("3000")
    time.sleep(1.0)  # sleeps there; if it does not yet, the prompt is interrupted, which says the same
    terminal.child.sendintr()
    return terminal.prompt()
