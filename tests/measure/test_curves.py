"""Curves of a run: healthy ones are RIGHT, and each fault of a training is named by its rule, with its step."""

import json
from pathlib import Path

import numpy as np
import pytest
from casefiles import cases_of
from commandline import invoke, tried, typed

from actordbg.base.errors import CorruptDump, EnvironmentProblem, UsageError
from actordbg.measure import run_logs
from actordbg.measure.curve_rules import RULES
from actordbg.measure.log_lines import read_log
from actordbg.measure.run_logs import answer

STEPS = 300
Run = dict[str, np.ndarray]


def healthy(seed):
    """A GRPO run as TRL logs it, that learns: every figure with its noise, some of it heavy-tailed."""
    rng = np.random.default_rng(seed)
    at = np.arange(STEPS) / STEPS
    learned = 0.6 / (1 + np.exp(-8 * (at - 0.5)))

    def noisy(curve, noise):
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
        "learning_rate": 1e-6 * np.clip(np.minimum(20 * at, 1.2 - at), 0, 1),
        "eval_reward_std": noisy(0.4 * (1 - at), 0.01),
    }


def written(folder, run):
    """The run as a `trainer_state.json`."""
    history = [{"step": step + 1, **{name: float(run[name][step]) for name in run}} for step in range(len(run["loss"]))]
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": history}, indent=1))
    return str(path)


def judged(folder, run):
    """The rules that a run breaks, each with its step."""
    result = answer([read_log(written(folder, run), every=True)])
    assert result.verdict in ("RIGHT", "WRONG")
    return [f"{finding['rule']} at step {finding['place']['step']}" for finding in result["findings"]]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_breaks_no_rule(tmp_path, seed):
    assert judged(tmp_path, healthy(seed)) == []


def ramp(values, end):
    """A line from the first values to `end`, with the noise of neighboring steps."""
    noise = np.diff(values, prepend=values[0]) / 2**0.5
    return noise + np.linspace(np.median(values[:20]), end, len(values))


def stalls(values, end):
    """Rewards and scores of which nothing is learned: they stay where they are."""
    level = values - np.linspace(0, 0.6, len(values))
    return end + 0.1 * (level - np.median(level))


CHANGES = {
    "add": lambda values, by: values + by,
    "scale": lambda values, by: values * by,
    "set": lambda values, to: 0 * values + to,
    "every-second": lambda values, to: np.where(np.arange(len(values)) % 2, values, to),
    "backwards": lambda values, _: values[::-1].copy(),
    "ramp": ramp,
    "stalls": stalls,
}
CASES = cases_of("curves")


def changed(lines):
    """A healthy run with the changes that lines of `curves.test` say."""
    run = healthy(7)
    for line in lines:
        verb, name, *words = line.split()
        if verb == "drop":
            for each in (name, *words):
                del run[each]
            continue
        if verb == "rename":
            run[words[0]] = run.pop(name)
            continue
        first, _, last = words[0].partition(":")
        of = slice(int(first), int(last) if last else None)
        run[name][of] = CHANGES[verb](run[name][of], float(words[1]))
    return run


@pytest.mark.parametrize("case", CASES)
def test_each_fault_is_named_by_its_rule_and_a_run_that_learns_may_move(tmp_path, case):
    assert judged(tmp_path, changed(CASES[case].given)) == CASES[case].expected


OPENRLHF = "(PolicyModelActor pid=7) Global step {step}: {{'policy_loss': -0.01, 'kl': {kl}, 'vllm_kl': 0.0011, 'actor_grad_norm': 0.{step}1}}"
VERL = '{{"step": {step}, "data": {{"actor/kl_loss": {kl}, "actor/grad_norm": 0.4{step}, "rollout_corr/kl": 0.0008, "actor/pg_loss": 0.01}}}}'
PRIME = '{{"step": {step}, "mismatch_kl/all/mean": 0.0009, "optim/grad_norm": 0.4{step}, "entropy/all/mean": 0.5, "kl": {kl}}}'


@pytest.mark.parametrize("line", [OPENRLHF, VERL, PRIME])
def test_the_names_of_each_trainer_are_known(tmp_path, line):
    log = tmp_path / "log"
    log.write_text("\n".join(line.format(step=step, kl=0.3 if step == 1 else 0.31) for step in range(1, 20)))
    result = answer([read_log(str(log), every=True)])
    states = {rule["rule"]: rule["state"] for rule in result["rules"]}
    assert states["reference at start"] == "broken" and states["rollout agrees"] == states["no norm spikes"] == "kept"
    assert states["loss scale kept"] == "not-checked"


def test_a_log_of_two_runs_is_judged_by_its_last_and_says_so(tmp_path):
    first, last = changed(["ramp kl 100 3.0"]), healthy(2)
    lines = [
        json.dumps({"step": at + 1, **{name: float(run[name][at]) for name in run}})
        for run in (first, last)
        for at in range(STEPS)
    ]
    log = tmp_path / "runs.jsonl"
    log.write_text("\n".join(lines[: STEPS + 100]))
    result = answer([read_log(str(log), every=True)])
    kept = read_log(str(log), every=True).series["kl"]["line"].points
    assert result.verdict == "RIGHT" and list(kept.values()) == [float(value) for value in last["kl"][:100]]
    assert any("300 steps of runs.jsonl" in left for left in result["not_checked"])


def test_a_norm_that_is_logged_after_clipping_is_not_judged(tmp_path):
    result = answer([read_log(written(tmp_path, changed(["set grad_norm 0 1.0"])), every=True)])
    states = {rule["rule"]: rule["state"] for rule in result["rules"]}
    assert result.verdict == "RIGHT" and states["no norm spikes"] == states["steps move"] == "not-checked"


@pytest.mark.parametrize(
    "columns", [{"_step": range(40)}, {"_step": range(40), "ids": [[1, 2]] * 40}, {"at": range(40)}, {"step": range(40)}]
)
def test_a_history_in_parquet_is_read_and_other_tables_are_no_log(tmp_path, columns):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "history"
    table = pyarrow.table({**columns, "train/kl": [None, *range(39)], "note": ["text"] * 40})
    pyarrow.parquet.write_table(table, path)
    if len(columns) == 1 and "_step" in columns:
        assert read_log(str(path), "kl").series["kl"]["call"].points == {step: step - 1.0 for step in range(1, 40)}
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(EnvironmentProblem):
            read_log(str(path))
    else:
        with pytest.raises(UsageError):
            read_log(str(path))


def test_what_is_not_logged_or_too_short_is_not_checked(tmp_path):
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


def lint(store, *words):
    result = invoke(store, "lint", *map(str, words))
    return result.exit_code, result.stdout


def test_lint_judges_logs_by_their_content(tmp_path, store):
    run = healthy(4)
    state = Path(written(tmp_path, run))
    log = state.rename(tmp_path / "out.txt")
    code, said = lint(store, log)
    assert code == 0 and said.startswith("RIGHT: the curves of out.txt keep 18 rules"), said
    run = changed(["ramp kl 100 3.0"])
    log.write_text(Path(written(tmp_path, run)).read_text())
    code, said = lint(store, log, "--json")
    answer = json.loads(said)
    assert code == 1 and [finding["rule"] for finding in answer["findings"]] == ["KL bounded"]
    assert answer["findings"][0]["place"]["file"] == "out.txt" and answer["logs"] == [str(log)]


def test_of_a_run_folder_rows_and_the_last_checkpoints_log_are_judged_together(tmp_path, store):
    folder, run = tmp_path / "run", changed(["add sampling/sampling_logp_difference/mean 150 0.3"])
    for last in (100, 250):
        (folder / f"checkpoint-{last}").mkdir(parents=True)
        written(folder / f"checkpoint-{last}", {name: values[:last] for name, values in run.items()})
    (folder / "checkpoint-250" / "scheduler.json").write_text('{"kind": "cosine"}')
    code, said = lint(store, folder)
    assert code == 1 and "WRONG: log-probs of rollout engine and trainer disagree since step 151, in trainer_state.json\n" in said
    assert " 250 " in said, "the steps of the last checkpoint"
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "log_probs": [0.0, 0.0, -1.0, 0.5]}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    code, said = lint(store, folder, "--json")
    files = {finding["rule"]: finding["place"]["file"] for finding in json.loads(said)["findings"]}
    assert code == 1 and files["rollout agrees"] == "trainer_state.json" and "rows.jsonl" in files.values()


def test_rows_that_cannot_be_read_are_not_passed_over_beside_a_healthy_log(tmp_path, store):
    folder = tmp_path / "run"
    folder.mkdir()
    log, bad = written(folder, healthy(8)), folder / "rows.jsonl"
    bad.write_text('{"input_ids": [1, 2')
    named = tried(store, "lint", log, str(bad))
    assert isinstance(named.exception, CorruptDump) or "rows.jsonl" in str(named.exception)
    found = tried(store, "lint", str(folder))
    assert found.exit_code == 0 and "1 other file not read as rows" in found.output


def test_a_folder_of_a_log_alone_is_judged_and_one_step_is_no_curve(tmp_path, store):
    written(tmp_path, healthy(0))
    assert invoke(store, "lint", str(tmp_path)).exit_code == 0
    (tmp_path / "summary.json").write_text('{"_step": 120, "train/loss": 0.1, "train/kl": 0.2}')
    log = run_logs.log_at(tmp_path / "summary.json")
    assert log and answer([log])["verdict"] == "NOT CHECKED"


def test_a_log_is_nothing_to_replay(tmp_path, store):
    log = written(tmp_path, healthy(0))
    result = tried(store, "check", log)
    assert isinstance(result.exception, UsageError) and "actordbg lint" in str(result.exception.hint)


def test_of_json_that_is_no_log_the_head_alone_is_read(tmp_path, monkeypatch):
    read = list[str]()
    monkeypatch.setattr(run_logs, "read_log", lambda path, **_: read.append(Path(path).name) or read_log(path, every=True))
    state = {"log_history": [{"loss": 1.0 / step, "step": step} for step in range(1, 9)]}
    for name, text in {
        "rows.jsonl": json.dumps({"tokens": [7] * 2**16}), "tokenizer.json": json.dumps({"version": 1, "vocab": {"a": 1}}, indent=1),
        "vocab.json": json.dumps({str(token): token for token in range(2**14)}), "trainer_state.json": json.dumps(state),
        "rows.csv": 'reward,input_ids\n1.0,"[1, 2]"\n', "rows.json": json.dumps([{"reward": 1.0, "input_ids": [1, 2]}], indent=1),
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    assert [Path(log.path).name for log in run_logs.logs_below([tmp_path])] == ["trainer_state.json"]
    assert read == ["rows.csv", "trainer_state.json"]


@pytest.mark.parametrize("of_state", [True, False])
def test_a_history_that_was_cut_off_is_refused_and_not_read_as_text(tmp_path, of_state):
    history = [{"step": step, "loss": 2 - step / 100, "grad_norm": 1.0, "kl": 0.01} for step in range(1, 90)]
    text = json.dumps({"epoch": 1.0, "log_history": history} if of_state else history, indent=2)
    (tmp_path / "trainer_state.json").write_text(text[: len(text) // 2])
    for words in (
        ("lint", tmp_path / "trainer_state.json"),
        ("lint", tmp_path),
        ("compare-logs", *[tmp_path / "trainer_state.json"] * 2),
    ):
        result = typed(*map(str, words))
        assert result.returncode == 4 and "ends in the middle" in result.stderr, result


def test_a_supervised_loss_has_one_line_and_a_log_alone_sends_nobody_to_a_store(tmp_path):
    history = [{"step": step, "loss": 2 - step / 100, "grad_norm": 1 + step % 7 / 99} for step in range(1, 90)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    out = typed("lint", str(tmp_path)).stdout
    assert out.startswith("RIGHT") and out.count("\n  loss  ") == 1 and "next: " not in out, out
