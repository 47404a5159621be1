"""Reading training logs: what OpenRLHF's trainers really print, and other ways of writing figures down."""

from __future__ import annotations

import gzip
import math
import tracemalloc
from pathlib import Path

import logcases
import pytest

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.measure.log_lines import Series, TrainLog, read_log


def log_of(tmp_path: Path, text: str | bytes, metric: str | None = None) -> TrainLog:
    path = tmp_path / "train.log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_log(str(path), metric)


def points(series: Series) -> dict[int, float]:
    assert list(series.points) == sorted(series.points)
    return series.points


def test_the_bars_of_a_real_sft_training(tmp_path: Path):
    log = log_of(tmp_path, logcases.SFT)
    series = log.series["gpt_loss"]["bar"]
    assert points(series) == {1: 8.02, 2: 8.5, 3: 8.13, 24: 7.19, 25: 6.96, 26: 7.37}
    assert (series.rerun, series.totals) == (0, (24,))
    assert set(log.metrics) == {"gpt_loss", "lr", "grad_norm"} and set(log.series) == {"gpt_loss"}


def test_a_real_ppo_training_has_global_steps_and_bars(tmp_path: Path):
    log = log_of(tmp_path, logcases.PPO)
    assert points(log.series["policy_loss"]["line"]) == {1: -7.635354995727539e-05, 2: -0.023798852131284517}
    # a bar of two micro-batches for each global step, whose figures are set before it counts
    assert points(log.series["act_loss"]["bar"]) == {1: -0.317, 3: -0.23}
    other = log_of(tmp_path, logcases.PPO, "no_such_thing")
    assert other.series == {} and {"policy_loss", "reward", "act_loss"} <= set(other.metrics)
    rewards = log_of(tmp_path, logcases.PPO, "reward").series["reward"]
    assert points(rewards["line"]) == {1: 0.36200106143951416, 2: 0.4213128834962845}
    assert points(rewards["bar"]) == {1: 0.4, 3: 0.358}


@pytest.mark.parametrize("hurry", [0.0, 0.5, 1.0])
def test_when_a_bar_was_printed_does_not_matter(tmp_path: Path, hurry: float):
    """tqdm prints on its own clock besides what the trainer asks for; both orders of counting and setting figures."""
    losses = [5 - 0.1 * i for i in range(24)]
    for bar in (logcases.sft_bars, logcases.dpo_bars):
        text = bar(losses, epochs=3, chance=hurry, seed=7)
        (series,) = log_of(tmp_path, text).series["gpt_loss"].values()
        assert points(series) == {i + 1: pytest.approx(loss, abs=0.006) for i, loss in enumerate(losses)}


def test_a_resumed_run_keeps_its_step_numbers(tmp_path: Path):
    whole = logcases.sft_bars([5 - 0.1 * i for i in range(24)], epochs=3)
    second = "Train step of epoch 1" + whole.split("Train step of epoch 1", 1)[1]
    resumed = points(log_of(tmp_path, second).series["gpt_loss"]["bar"])
    assert min(resumed) == 9 and max(resumed) == 24
    both = log_of(tmp_path, whole + second).series["gpt_loss"]["bar"]
    assert (len(both.points), both.rerun) == (24, 16)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("gpt_loss: 5.78", 5.78),
        ("{'gpt_loss': 5.78, 'lr': 1e-05}", 5.78),
        ('{"gpt_loss": 5.78e-3}', 5.78e-3),
        ("{'gpt_loss': tensor(5.78)}", 5.78),
        ("gpt_loss=np.float64(5.78)", 5.78),
        ("12:30:01 | INFO | train/gpt_loss=5.78, lr=1", 5.78),
        ("gpt_loss: -inf", -math.inf),
        ("the gpt_loss: 5.78.", 5.78),
        ("Train epoch: 5%|##        | gpt_loss: 5.78, lr: 1e-05", 5.78),
    ],
)
def test_lines_without_a_step_are_counted(tmp_path: Path, line: str, value: float):
    log = log_of(tmp_path, f"{line}\nnothing here\n{line}\n")
    assert points(log.series["gpt_loss"]["order"]) == {1: value, 2: value}


@pytest.mark.parametrize(
    "line",
    ["step {} gpt_loss: 2.5", "{{'global_step': {}, 'gpt_loss': 2.5}}", "Step {}/100 | gpt_loss = 2.5",
     "\x1b[36m(PolicyModelActor pid=7022, ip=10.0.0.1)\x1b[0m \x1b[1mGlobal step {}:\x1b[0m {{'gpt_loss': 2.5}}", "[iteration {}] gpt_loss: 2.5", "{{'gpt_loss': 2.5, 'train/global_step': {}}}"],
)  # fmt: skip
def test_lines_that_say_their_step_are_numbered(tmp_path: Path, line: str):
    text = "".join(line.format(step) + "\n" for step in (5, 6, 6, 11))
    assert points(log_of(tmp_path, text).series["gpt_loss"]["line"]) == {5: 2.5, 6: 2.5, 11: 2.5}


def test_settings_and_source_lines_are_no_losses(tmp_path: Path):
    text = "aux_loss_coef: 0.01\nNamespace(loss_scale=1)\nINFO sft_trainer.py:45] loss went down\n'gpt_loss_weights': 3\n"
    assert log_of(tmp_path, text).series == {}


def test_bars_of_two_actors_do_not_disturb_each_other(tmp_path: Path):
    text = ""
    for k in range(4):
        text += f"(PolicyModelActor pid=1) \rTrain epoch [1/1]: 100%|##| {k % 2 + 1}/2 [0:00<0:00, 1it/s, act_loss=0.{k}]\n"
        text += f"(CriticModelActor pid=2) \rTrain epoch [1/1]: 100%|##| {2 - k % 2}/2 [0:00<0:00, 1it/s, critic_loss=0.{k}]\n"
    log = log_of(tmp_path, text)
    assert points(log.series["act_loss"]["bar"]) == {1: 0.0, 2: 0.1, 3: 0.2, 4: 0.3}
    assert set(points(log.series["critic_loss"]["bar"])) == {2, 3, 4, 5}


def test_an_evaluation_belongs_to_its_step(tmp_path: Path):
    text = "".join(f"\rEval stage of steps 24:  50%|#| {n}/2 [0:00<0:00, 1it/s, eval gpt_loss=5.{n}]" for n in (1, 2))
    assert points(log_of(tmp_path, text).series["eval gpt_loss"]["bar"]) == {24: 5.2}


def test_a_bar_cut_off_at_the_terminals_width_gives_no_half_a_number(tmp_path: Path):
    text = "\rTrain step of epoch 0:   4%|#| 1/24 [00:00<00:02, 9it/s, gpt_loss=8.02, lr=2.5\n"
    assert log_of(tmp_path, text).metrics == {"gpt_loss": 1}
    assert log_of(tmp_path, text.replace("02, lr=2.5", "")).metrics == {}


def test_gzip_is_read_and_damage_is_said(tmp_path: Path):
    packed = gzip.compress(logcases.SFT.encode())
    assert points(log_of(tmp_path, packed).series["gpt_loss"]["bar"])[24] == 7.19
    for broken in (packed[:-9], packed[:40] + b"\0" * 40 + packed[80:]):
        with pytest.raises(EnvironmentProblem, match="damaged"):
            log_of(tmp_path, broken)


def test_what_is_no_file_is_a_usage_error(tmp_path: Path):
    for name, what in (("missing.log", "not there"), (".", "a folder"), ("missing.csv", "not there")):
        with pytest.raises(UsageError, match=what):
            read_log(str(tmp_path / name))


def test_memory_does_not_grow_with_repeated_states(tmp_path: Path):
    text = logcases.sft_bars([5 - i / 1000 for i in range(100)], epochs=1)
    (tmp_path / "train.log").write_text(text * 100)
    tracemalloc.start()
    (series,) = read_log(str(tmp_path / "train.log")).series["gpt_loss"].values()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(series.points) == 100 and peak < 12 * 2**20


@pytest.mark.parametrize(
    "text", ["step=1 loss={}x", "8%|8  | 2/24 [1, loss={}x]", "{}%|x", "step{}x loss=1", "eval {}x 8%|8  | 2/24 [1, loss=1]"]
)
@pytest.mark.parametrize("run", ["1", " "])
def test_a_long_run_of_digits_or_spaces_is_read_in_one_go(text: str, run: str, tmp_path: Path):
    """A pattern that tried each of them twice would not end today."""
    assert log_of(tmp_path, text.format(run * 1_000_000).encode()).segments == 1
