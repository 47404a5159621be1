"""A run that goes on is followed: what is new is read once, each finding is told once, and Ctrl-C ends with what was found."""

import json

import pytest
import runfiles
from commandline import invoke
from torch.utils.tensorboard import SummaryWriter

from actordbg.api import following
from actordbg.api.following import QUIET, Follower
from actordbg.base.errors import UsageError
from actordbg.dumps.importer import reading


def row(made, step, **changes):
    of_row = {"input_ids": made.ids, "loss_mask": made.wide(made.mask, outside=0), "logprobs": made.wide(made.log_probs)}
    return (
        json.dumps({**of_row, "rollout_logprobs": made.wide(made.rollout), "reward": made.reward, "step": step, **changes}) + "\n"
    )


def figures(first, last):
    return "".join(
        f"Global step {at}: {{'policy_loss': 0.0{at}, 'kl': 0.01, 'actor_grad_norm': 0.{at}1}}\n" for at in range(first, last)
    )


def add(path, text):
    with path.open("a") as file:
        file.write(text)


def test_what_is_added_to_a_runs_files_is_judged_once_and_never_read_again(tmp_path, monkeypatch):
    rows, log, made, read = tmp_path / "out" / "rows.jsonl", tmp_path / "train.log", runfiles.made_rows(), []
    lines, high = following._File.lines, [0.7]
    monkeypatch.setattr(following._File, "lines", lambda *given: (read.append(part) or part for part in lines(*given)))
    follower = Follower([tmp_path], pytest.fail)
    with reading(follower.judge, {}) as job:

        def found():
            return [(each.rule.name, each.place["file"], each.place["step"]) for each in follower.look(job)]

        assert found() == [], "a folder without files"
        log.write_text(figures(1, 5))
        assert found() == []
        rows.parent.mkdir()
        rows.write_text(row(made[0], 1) + row(made[1], 1)[:-9])
        add(log, "Global step 5: {'policy_lo")
        assert found() == [] and follower.linting.findings.rows == 1, "half a line waits for its end"
        add(rows, row(made[1], 1)[-9:] + row(made[2], 7, rollout_logprobs=high * len(made[2].ids)))
        add(log, "ss': 0.05, 'kl': nan}\n")
        assert found() == [("log-probs", "rows.jsonl", 7), ("finite curves", "train.log", 5)]
        add(rows, row(made[3], 8, rollout_logprobs=high * len(made[3].ids)))
        assert found() == [], "a fault is told once"
        assert sum(map(len, read)) == sum(path.stat().st_size for path in (rows, log))
        log.rename(tmp_path / "train.log.1")
        log.write_text(figures(6, 9))
        rows.write_text(row(made[4], 9, advantages=[float("nan")] * len(made[4].ids)))
        assert found() == [("finite", "rows.jsonl", 9)], "a log that was rotated, and a file that was cut and written anew"
        assert max(follower.logs[log].series["kl"]["line"].points) == 8


def test_tables_and_events_are_read_on_and_whole_files_not_at_each_change(tmp_path, monkeypatch):
    follower, table, state = Follower([tmp_path], pytest.fail), tmp_path / "log.csv", tmp_path / "trainer_state.json"
    monkeypatch.setattr(following, "AGAIN", 1e9)
    monkeypatch.setattr(following, "MOST_OF_LOG", 40)
    events = SummaryWriter(str(tmp_path / "tb"))
    table.write_text("step,kl,grad_norm\n")
    with reading(follower.judge, {}) as job:
        for first in (1, 4, 7):
            for step in range(first, first + 3):
                add(table, f"{step},0.001,0.5{step}\n")
                events.add_scalar("train/kl", 0.001, step)
            events.flush()
            add(table, "9")  # half a line
            state.write_text(json.dumps({"log_history": [{"step": step, "kl": 0.001} for step in range(first + 3)]}, indent=1))
            assert follower.look(job) == []
            table.write_text(table.read_text()[:-1])
    counted = sorted(log.metrics["kl"] for log in follower.logs.values())
    assert counted == [4, 9, 9], "each value once; the whole file not again"
    assert "the newest of trainer_state.json" in str(follower.answer()), "and what was not read is said"


@pytest.mark.parametrize("of_state, indent", [(True, 1), (True, None), (False, None), (False, 1)])
def test_a_history_that_ends_in_the_middle_is_not_taken_for_read(tmp_path, of_state, indent):
    follower, path = Follower([tmp_path], pytest.fail), tmp_path / "history.json"
    rows = [{"step": step, "kl": 0.001} for step in range(9)]
    text = json.dumps({"epoch": 1.0, "log_history": rows} if of_state else rows, indent=indent)
    with reading(follower.judge, {}) as job:
        path.write_text(text[: len(text) // 2])
        assert follower.look(job) == []
        assert not follower.logs and "the newest of history.json" in str(follower.answer())
        path.write_text(text)
        assert follower.look(job) == [] and follower.logs[path].metrics == {"kl": 9}


def test_laws_of_a_step_wait_for_its_rows(tmp_path):
    follower, path = Follower([tmp_path], pytest.fail), tmp_path / "rows.jsonl"
    zero = [{"advantages": [0.0] * len(made.ids)} for made in runfiles.made_rows()]
    with reading(follower.judge, {}) as job:
        for at, (made, no) in enumerate(zip(runfiles.made_rows(), zero, strict=True)):
            add(path, row(made, at // 8, **no))
            assert follower.look(job) == [], "a step that goes on may have others"
        add(path, row(made, 2, advantages=[1.0] * len(made.ids)))
        assert [finding.said for finding in follower.look(job)] == [
            "step 0: every advantage is 0, so nothing is learned, although rewards differ"
        ]
        assert "the newest step" in str(follower.answer().not_checked)
        for _ in range(QUIET):
            follower.look(job)
        assert "the newest step" not in str(follower.answer().not_checked)


@pytest.mark.parametrize("command", ["lint", "check"])
def test_the_command_ends_at_control_c_with_what_was_found(command, tmp_path, store, monkeypatch):
    path, made = tmp_path / "rows.jsonl", runfiles.made_rows()[0]
    more = iter([row(made, 1), row(made, 2, rollout_logprobs=[0.7] * len(made.ids))])

    def wait(seconds):
        if not (new := next(more, "")):
            raise KeyboardInterrupt
        add(path, new)

    monkeypatch.setattr(following.time, "sleep", wait)
    result = invoke(store, command, str(tmp_path), "--watch", "--json")
    first, last = map(json.loads, result.stdout.splitlines())
    assert result.exit_code == 1 and (first["rule"], first["side"], first["place"]["step"]) == ("log-probs", "rollout", 2)
    assert (last["verdict"], last["looks"], [each["rule"] for each in last["findings"]]) == ("WRONG", 3, ["log-probs"])
    with pytest.raises(UsageError, match="follows the files of a run"):
        invoke(store, command, "--watch")
