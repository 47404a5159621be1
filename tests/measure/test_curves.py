"""Curves of a run: healthy ones are RIGHT, and each fault of a training is named by its rule, with its step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from actordbg.base.errors import CorruptDump, UsageError
from actordbg.cli.app import app
from actordbg.measure.curve_rules import RULES
from actordbg.measure.log_lines import read_log
from actordbg.measure.run_logs import answer
from actordbg.store.layout import Store

STEPS = 300
Run = dict[str, np.ndarray]


def healthy(seed: int) -> Run:
    """A GRPO run as TRL logs it, that learns: every figure with its noise, some of it heavy-tailed."""
    rng = np.random.default_rng(seed)
    at = np.arange(STEPS) / STEPS
    learned = 0.6 / (1 + np.exp(-8 * (at - 0.5)))

    def noisy(curve: np.ndarray, noise: float) -> np.ndarray:
        return curve + noise * rng.standard_t(4, STEPS)

    return {
        "loss": noisy(0 * at, 0.02),
        "grad_norm": np.exp(noisy(-0.7 - 0.3 * at, 0.15)) * np.where(np.arange(STEPS) < 3, 8, 1),
        "kl": np.abs(noisy(0.15 * at, 0.002)) * (np.arange(STEPS) > 0),
        "entropy": noisy(0.9 * np.exp(-0.8 * at), 0.02),
        "clip_ratio/region_mean": np.abs(noisy(0.05 + 0 * at, 0.01)),
        "reward": noisy(0.3 + learned, 0.04),
        "rewards/format/mean": np.clip(noisy(1 - np.exp(-20 * at), 0.01), 0, 1),
        "rewards/correct/mean": np.clip(noisy(0.2 + learned, 0.04), 0, 1),
        "eval_accuracy": noisy(0.15 + learned, 0.02),
        "completions/mean_length": noisy(400 + 80 * at, 15),
        "completions/clipped_ratio": np.clip(noisy(0.02 + 0 * at, 0.01), 0, 1),
        "frac_reward_zero_std": np.clip(noisy(0.2 + 0.1 * at, 0.05), 0, 1),
        "sampling/sampling_logp_difference/mean": np.abs(noisy(0.01 + 0 * at, 0.001)),
        "loss_scale": np.full(STEPS, 65536.0),
    }


def written(folder: Path, run: Run) -> str:
    """The run as a `trainer_state.json`."""
    history = [{"step": step + 1, **{name: float(run[name][step]) for name in run}} for step in range(len(run["loss"]))]
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": history}, indent=1))
    return str(path)


def judged(folder: Path, run: Run) -> set[str]:
    result = answer([read_log(written(folder, run), every=True)])
    assert result.verdict in ("RIGHT", "WRONG")
    return {rule["rule"] for rule in result["rules"] if rule["state"] == "broken"}


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_breaks_no_rule(tmp_path: Path, seed: int):
    assert judged(tmp_path, healthy(seed)) == set()


def after(step: int, run: Run, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    run[name][step:] = change(run[name][step:])


def ramp(values: np.ndarray, end: float) -> np.ndarray:
    """A line from the first values to `end`, with the noise of neighboring steps."""
    noise = np.diff(values, prepend=values[0]) / 2**0.5
    return noise + np.linspace(np.median(values[:20]), end, len(values))


FAULTS: dict[str, Callable[[Run], None]] = {
    "finite curves": lambda run: after(280, run, "grad_norm", lambda norm: norm * np.nan),
    "reference at start": lambda run: run.update(kl=run["kl"] + 0.2),
    "KL bounded": lambda run: after(100, run, "kl", lambda kl: ramp(kl, 3.0)),
    "rollout agrees": lambda run: after(150, run, "sampling/sampling_logp_difference/mean", lambda gap: gap + 0.3),
    "few ratios clipped": lambda run: after(100, run, "clip_ratio/region_mean", lambda share: share + 0.4),
    "groups differ": lambda run: after(150, run, "frac_reward_zero_std", lambda share: np.clip(share + 0.5, 0, 1)),
    "answers end": lambda run: after(150, run, "completions/clipped_ratio", lambda share: share + 0.3),
    "no norm spikes": lambda run: after(200, run, "grad_norm", lambda norm: np.where(np.arange(len(norm)) == 7, 40.0, norm)),
    "steps move": lambda run: after(100, run, "grad_norm", lambda norm: np.where(np.arange(len(norm)) % 2, norm, 0.0)),
    "curves move": lambda run: after(290, run, "grad_norm", lambda norm: 0 * norm + 0.4173915),
    "held-out follows": lambda run: after(120, run, "eval_accuracy", lambda score: ramp(score, 0.1)),
    "reward is the task's": lambda run: run.update({"rewards/correct/mean": 0.03 * run["rewards/correct/mean"]}),
    "loss scale kept": lambda run: after(250, run, "loss_scale", lambda scale: 2.0 ** np.maximum(16 - np.arange(len(scale)), 0)),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_each_fault_is_named_by_its_rule_alone(tmp_path: Path, rule: str):
    run = healthy(7)
    FAULTS[rule](run)
    assert judged(tmp_path, run) == {rule}


def flat(run: Run, at: float = 0.4) -> None:
    """Nothing is learned anymore: rewards and held-out scores stay where they are."""
    for name in ("reward", "eval_accuracy", "rewards/correct/mean"):
        run[name] = run[name] - np.linspace(0, 0.6, STEPS) * (np.arange(STEPS) > 0)
        run[name] = at + 0.1 * (run[name] - np.median(run[name]))


@pytest.mark.parametrize(
    ("rule", "name", "end"),
    [
        ("entropy kept", "entropy", 0.01),
        ("entropy kept", "entropy", 4.0),
        ("length is earned", "completions/mean_length", 1200.0),
    ],
)
def test_entropy_and_length_may_move_only_while_something_is_learned(tmp_path: Path, rule: str, name: str, end: float):
    learns, stalls = healthy(3), healthy(3)
    for run in (learns, stalls):
        after(60, run, name, lambda values: ramp(values, end))
    flat(stalls)
    assert judged(tmp_path, learns) == set()
    assert rule in judged(tmp_path, stalls)


def test_a_kl_that_may_be_a_sum_over_tokens_counts_only_where_nothing_is_learned(tmp_path: Path):
    learns, stalls = healthy(2), healthy(2)
    for run in (learns, stalls):
        run["actor/kl_loss"] = 40 * run.pop("kl")
    flat(stalls)
    assert judged(tmp_path, learns) == set() and "KL bounded" in judged(tmp_path, stalls)


def test_a_reward_that_falls_is_named_with_its_best_step(tmp_path: Path):
    run = healthy(5)
    run["reward"] = run["reward"][::-1].copy()
    run["reward"][12] = 2.0
    result = answer([read_log(written(tmp_path, run), every=True)])
    broken = {finding["rule"]: finding for finding in result["findings"]}
    assert broken["reward kept"]["place"]["step"] == 13 and "the best step was 13" in broken["reward kept"]["said"]


OPENRLHF = "(PolicyModelActor pid=7) Global step {step}: {{'policy_loss': -0.01, 'kl': {kl}, 'vllm_kl': 0.0011, 'actor_grad_norm': 0.{step}1}}"
VERL = '{{"step": {step}, "data": {{"actor/kl_loss": {kl}, "actor/grad_norm": 0.4{step}, "rollout_corr/kl": 0.0008, "actor/pg_loss": 0.01}}}}'
PRIME = '{{"step": {step}, "mismatch_kl/all/mean": 0.0009, "optim/grad_norm": 0.4{step}, "entropy/all/mean": 0.5, "kl": {kl}}}'


@pytest.mark.parametrize("line", [OPENRLHF, VERL, PRIME])
def test_the_names_of_each_trainer_are_known(tmp_path: Path, line: str):
    log = tmp_path / "log"
    log.write_text("\n".join(line.format(step=step, kl=0.3 if step == 1 else 0.31) for step in range(1, 20)))
    result = answer([read_log(str(log), every=True)])
    states = {rule["rule"]: rule["state"] for rule in result["rules"]}
    assert states["reference at start"] == "broken" and states["rollout agrees"] == states["no norm spikes"] == "kept"
    assert states["loss scale kept"] == "not-checked"


def test_what_is_not_logged_or_too_short_is_not_checked(tmp_path: Path):
    run = {name: values[:8] for name, values in healthy(1).items()}
    result = answer([read_log(written(tmp_path, run), every=True)])
    held = {rule["rule"] for rule in result["rules"] if rule["state"] == "kept"}
    assert held == {"finite curves", "reference at start", "loss scale kept"}
    (tmp_path / "other.log").write_text("loading took: 3 s\n")
    assert answer([read_log(str(tmp_path / "other.log"), every=True)]).verdict == "NOT CHECKED"
    (tmp_path / "losses.log").write_text("\n".join(f"step {step} loss: {1 / step}" for step in range(1, 40)))
    result = answer([read_log(str(tmp_path / "losses.log"), every=True)])
    assert result.verdict == "NOT CHECKED", "finite losses say nothing of the training"
    assert {name for rule in RULES for name in rule.needs} >= {"entropy", "loss scale"}


def lint(store: Store, *words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["--store", str(store.root), "lint", *map(str, words)])
    return result.exit_code, result.stdout


def test_lint_judges_logs_by_their_content(tmp_path: Path, store: Store):
    run = healthy(4)
    state = Path(written(tmp_path, run))
    log = state.rename(tmp_path / "out.txt")
    code, said = lint(store, log)
    assert code == 0 and said.startswith("RIGHT: the curves of out.txt keep 16 rules"), said
    FAULTS["KL bounded"](run)
    log.write_text(Path(written(tmp_path, run)).read_text())
    code, said = lint(store, log, "--json")
    answer = json.loads(said)
    assert code == 1 and [finding["rule"] for finding in answer["findings"]] == ["KL bounded"]
    assert answer["findings"][0]["place"]["file"] == "out.txt" and answer["logs"] == [str(log)]


def test_of_a_run_folder_rows_and_the_last_checkpoints_log_are_judged_together(tmp_path: Path, store: Store):
    folder, run = tmp_path / "run", healthy(6)
    FAULTS["rollout agrees"](run)
    for last in (100, 250):
        (folder / f"checkpoint-{last}").mkdir(parents=True)
        written(folder / f"checkpoint-{last}", {name: values[:last] for name, values in run.items()})
    (folder / "checkpoint-250" / "scheduler.json").write_text('{"kind": "cosine"}')
    code, said = lint(store, folder)
    assert code == 1 and "WRONG: rollout engine and trainer disagree since step 151, in trainer_state.json\n" in said
    assert " 250 " in said, "the steps of the last checkpoint"
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "log_probs": [0.0, 0.0, -1.0, 0.5]}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    code, said = lint(store, folder, "--json")
    files = {finding["rule"]: finding["place"]["file"] for finding in json.loads(said)["findings"]}
    assert code == 1 and files["rollout agrees"] == "trainer_state.json" and "rows.jsonl" in files.values()


def test_rows_that_cannot_be_read_are_not_passed_over_beside_a_healthy_log(tmp_path: Path, store: Store):
    folder = tmp_path / "run"
    folder.mkdir()
    log, bad = written(folder, healthy(8)), folder / "rows.jsonl"
    bad.write_text('{"input_ids": [1, 2')
    named = CliRunner().invoke(app, ["--store", str(store.root), "lint", log, str(bad)])
    assert isinstance(named.exception, CorruptDump) or "rows.jsonl" in str(named.exception)
    found = CliRunner().invoke(app, ["--store", str(store.root), "lint", str(folder)])
    assert found.exit_code == 0 and "1 other file not read as rows" in found.output


def test_a_log_is_nothing_to_replay(tmp_path: Path, store: Store):
    log = written(tmp_path, healthy(0))
    result = CliRunner().invoke(app, ["--store", str(store.root), "check", log])
    assert isinstance(result.exception, UsageError) and "actordbg lint" in str(result.exception.hint)
