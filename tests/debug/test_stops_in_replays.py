"""Stops inside of distributed replays, driven through a terminal: every rank parks, and afterwards everything is as if nothing was."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import brokenactor
import pytest
import stopcases
from replaycases import publish
from stopcases import AtTerminal, actordbg, events, figures, newest, nobody_is_left, results, status

from actordbg.store.layout import Store

pytestmark = pytest.mark.slow

BACKENDS = {
    "fsdp2": ("--backend", "fsdp2", "--nproc", "2"),
    "ZeRO 3": ("--backend", "deepspeed", "--zero-stage", "3", "--nproc", "2"),
    "plain": ("--nproc", "2"),
}
WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_forward_is_gone_through_and_what_comes_out_is_the_same_to_the_bit(store: Store, name: str):
    replay = ("replay", *BACKENDS[name], "--backward", "--dtype", "fp32")
    together = name != "plain"
    publish(store, 2, length=48)
    assert actordbg(store, *replay, "--quiet").returncode == 0
    undisturbed = figures(newest(store))

    rank = 1 if together else 0
    terminal = AtTerminal(store, *replay, "--break", "before", "--break-rank", str(rank))
    said = terminal.prompt()
    assert terminal.rank == rank and "before Actor.forward" in said
    assert ("rank 0 parked" in said) is together
    assert "sequences                [2, 48] int64 cpu" in terminal.type("shapes()")
    assert "weight of a" in terminal.type("import torch; torch.rand(3); print('weight', 'of', 'a model')")
    assert "1.9" in terminal.type("stats(torch.tensor([1.9, float('nan')]))") and "'model.embed" not in said
    assert "[128, 64] float32 cpu" in terminal.type(f"stats(gather({WEIGHT!r}))")
    folder = newest(store)
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.glob("stop-*.sock")] == [0o600] * together

    assert "before model.layers.0" in terminal.type("layer")
    assert "rank 1: torch.Size([2, 48, 64])" in terminal.type('everywhere("hidden_states.shape")') or not together
    assert "[128, 64] float32 cpu" in terminal.type(f"stats(gather({WEIGHT!r}))")
    assert "no attribute" in terminal.type("gather('model.layers.7.weight')")
    if together:
        assert "hang in the next collective" in terminal.type("next")
    else:
        assert "modeling_llama.py" in terminal.type("step")
    assert "no layer nonsense" in terminal.type("layer nonsense") or not together
    assert "after Actor.forward" in terminal.type("layer after") or not together
    if together:
        assert "min" in terminal.type("stats(log_probs)") and "tensor(" in terminal.type("p loss")
    code, said = terminal.leave("continue")
    assert (code, "2 inputs, 2 passed" in said) == (0, True)
    assert figures(newest(store)) == undisturbed
    assert all(record.forward_s < 60 for record in results(folder).values() if record.forward_s is not None)
    assert nobody_is_left(folder) and not list(folder.glob("*.sock*"))


@pytest.fixture
def faulty(store: Store, tmp_path: Path) -> dict[str, str]:
    """Two inputs with a breakpoint() in the Actor, two at which it raises; the environment in which it does."""
    publish(store, 2, length=40)
    publish(store, 2, length=33, first=2)
    return brokenactor.environment(tmp_path / "fault", stopcases.FAULT)


def test_a_breakpoint_of_the_users_and_a_post_mortem(store: Store, faulty: dict[str, str]):
    terminal = AtTerminal(store, "replay", *BACKENDS["fsdp2"], "--break", "error", "--expect-eval", "-v", **faulty)
    assert "at breakpoint()" in terminal.prompt()
    assert "40" in terminal.type("p marked") and "forward" in terminal.type("where")
    assert "1: 40" in terminal.type('everywhere("marked")')
    said = terminal.type("continue")
    assert "where the input failed (ValueError: boom)" in said and 'raise ValueError("boom")' in said
    assert "33" in terminal.type("p sequences.shape[1]") and "boom" in terminal.type("p error")
    assert "refused" in terminal.type(f"gather({WEIGHT!r})")
    code, said = terminal.leave("quit")
    folder = newest(store)
    assert (code, "2 passed, 2 stopped by the user" in said) == (1, True)
    stopped = [record for record in results(folder).values() if record.status == "stopped"]
    assert [record.error for record in stopped] == ["stopped by the user"] * 2
    for rank in (0, 1):
        told = [event["text"] for event in events(folder, "line") if event["rank"] == rank]
        assert f"[rank {rank}] before forward" in told[0] and "sequences [2, 40] int64 cpu" in told[0]
        assert (
            "eval mode, weights float32 on cpu" in told[0]
            and "loss" in told[1]
            and told[1] in (folder / f"rank{rank}.log").read_text()
        )
    assert nobody_is_left(folder)


def test_without_a_terminal_a_stop_is_refused_with_the_way_to_attach(store: Store, faulty: dict[str, str]):
    said = actordbg(store, "replay", "--break", "before")
    assert said.returncode == 2 and "--break-wait" in said.stderr and "actordbg attach" in said.stderr
    assert not store.replays.exists()
    replayed = actordbg(store, "replay", "--where", "seq_len=40", "--max-inputs", "1", "--expect-eval", "--json", **faulty)
    assert replayed.returncode == 1
    (record,) = results(newest(store)).values()
    assert "nobody can come to its prompt" in (record.error or "") and "Unsupported" in (record.error_class or "")


def test_who_dies_at_a_stop_releases_the_others_and_leaves_nothing(store: Store):
    publish(store, 2, length=48)
    terminal = AtTerminal(store, "replay", *BACKENDS["fsdp2"], "--break", "layers.1", "--timeout", "20")
    terminal.prompt()
    folder = newest(store)
    (parked,) = (event["pid"] for event in events(folder, "boot") if event["rank"] == 1)
    os.kill(parked, signal.SIGKILL)
    assert "model.layers.1" in terminal.prompt()  # of the next attempt, with the input that is left
    died = [record for record in results(folder).values() if record.status == "crashed"]
    assert [(one.worker, "SIGKILL" in (one.error or "")) for one in died] == [(1, True)]

    assert terminal.hang_up()
    assert nobody_is_left(folder) and status(folder) == "interrupted"


def test_attaching_from_another_terminal_and_closing_it(store: Store):
    publish(store, 1, length=48)
    replaying = AtTerminal(store, "replay", *BACKENDS["fsdp2"], "--break", "after", "--break-wait", "200", "--align", "same")
    replaying.child.expect("actordbg attach ([0-9a-zA-Z-]+)")
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
    assert late.returncode == 2 and "is over" in late.stderr


def _interrupted(terminal: AtTerminal) -> str:
    """Ctrl-C in the middle of a command."""
    terminal.child.sendline("import time; time.sleep(3000)")
    terminal.child.expect("3000")
    time.sleep(1.0)  # sleeps there; if it does not yet, the prompt is interrupted, which says the same
    terminal.child.sendintr()
    return terminal.prompt()
