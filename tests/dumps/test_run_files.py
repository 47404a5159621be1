"""Files that runs leave behind: each writer's becomes the rows that it holds, healthy ones are right, faults are named."""

import json
import os
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import runfiles
from amounts import WHOLE
from commandline import typed
from pyarrow import Table, parquet
from recordedfields import linted
from runfiles import WRITERS, written

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.demo.demo_training import build_assets
from actordbg.document.blocks import EITHER, ROLLOUT, TRAINER
from actordbg.dumps import archives, child_pool
from actordbg.dumps.child_pool import Limits
from actordbg.dumps.importer import find_files, import_paths
from actordbg.dumps.layouts import columns_of, load_tokenizer
from actordbg.formats.dump_record import LOSS
from actordbg.recorded.lint import lint
from actordbg.recorded.recorded_calls import RecordedCall
from actordbg.store.layout import Store
from actordbg.store.pack_build import exclusive
from actordbg.store.places import places_of

ENGINES = ("openai", "sglang", "sglang, prompts asked for")
"""Without a mask, rewards or advantages."""
ROLLOUTS = ("slime-rollout", "molt", *ENGINES)
LEARNED = tuple(name for name in WRITERS if name not in ROLLOUTS)
REWARDED = tuple(name for name in LEARNED if name not in ("prime-rl", "skyrl"))
NAMED = {
    "log-probs shifted by one": ("alignment", EITHER, LEARNED),
    "mask off by one": ("mask", TRAINER, tuple(name for name in WRITERS if name not in ENGINES)),
    "NaN": ("finite", ROLLOUT, tuple(WRITERS)),
    "positive log-prob": ("log-probs", ROLLOUT, (*ROLLOUTS, *LEARNED)),
    "advantage of another group": ("rewards", TRAINER, REWARDED),
    "advantages negated": ("rewards", TRAINER, REWARDED),
    "placeholder": ("placeholder", ROLLOUT, LEARNED),
    "log-probs of other rows": ("rows", EITHER, LEARNED),
    "first action left out": ("first action", TRAINER, ("slime-rollout", "molt", *LEARNED)),
    "output of tools": ("environment", TRAINER, LEARNED),
    "cut-off rows rewarded": ("cut off", EITHER, ("slime-rollout", "molt", "openrlhf")),
}
"""The law that names each fault, the side, and the writers whose files show it."""


def imported(store, *paths, **options):
    return import_paths(store, paths, **options)


def rows_in(store, *, losses):
    """The rows of the forwards or of the losses, in the file's order."""
    calls = [RecordedCall.read(str(path)) for path in store.iter_dumps()]
    for call in sorted(calls, key=lambda call: call.record.dump_id):
        if (call.record.point == LOSS) == losses:
            yield from ((call, row) for row in range(call.rows))


def values_of(call, row, name):
    """The values of a row's actions; None if they were not recorded."""
    values, active = call.array(name), call.active
    assert active is not None
    return None if values is None else values[row][active[row]]


LARGE = ("slime-rollout", "verl", "openrlhf", "torch.save", "pickle")
"""Files with a pickle in each way."""


@pytest.mark.parametrize("name, large", [*((name, False) for name in WRITERS), *((name, True) for name in LARGE)])
def test_each_row_of_a_file_is_a_recorded_row_and_healthy_ones_break_no_law(name, large, store, tmp_path, monkeypatch):
    path, rows = written(name, tmp_path)
    if large:
        monkeypatch.setattr(archives, "MAPPED", 0)
        monkeypatch.setattr(archives, "MOST_KEPT", 0)
        monkeypatch.setattr(child_pool, "Limits", partial(Limits, file_bytes=10))
    summary = imported(store, path)
    assert not summary.refused and summary.present == 0
    of_forwards = list(rows_in(store, losses=False))
    assert len(of_forwards) == len(rows)
    for (call, at), row in zip(of_forwards, rows, strict=True):
        assert call.sequences is not None and call.real is not None
        assert call.sequences[at][call.real[at]].tolist() == row.ids
        assert call.actions is not None and call.active is not None
        assert call.actions[at][call.active[at]].tolist() == row.response
    for (call, at), row in zip(rows_in(store, losses=name not in ROLLOUTS), rows, strict=True):
        assert_values(call, at, row, learned=name in LEARNED)
        if name in REWARDED:
            expected = runfiles.normalized_rewards(rows)[rows.index(row)] if name.endswith("-train") else row.reward
            assert call.array("rewards")[at] == pytest.approx(expected, abs=1e-6)  # type: ignore[index]
    findings = linted(store)
    assert findings.found == [] and len(findings.held) >= (11 if name in LEARNED else 5)
    assert ("rewards" in {rule.name for rule in findings.held}) == (name in REWARDED)


def assert_values(call, at, row, *, learned):
    expected = {"rollout_log_probs": row.rollout}
    if learned:
        expected |= {"log_probs": row.log_probs, "advantages": row.advantages}
        assert call.forward_id == call.record.dump_id.replace(*_numbers(call.record.dump_id))
    for name, values in expected.items():
        got = values_of(call, at, name)
        assert got is not None and np.allclose(got, np.array(values, np.float32), atol=1e-6), name


def _numbers(dump_id):
    """The number of a loss in its dump id, and that of its forward."""
    number = dump_id.split("-")[1]
    return f"-{number}-", f"-{int(number) - 1:06d}-"


PAIRS = [(fault, name) for fault, (_, _, names) in NAMED.items() for name in names]


@pytest.mark.parametrize("fault, name", PAIRS if WHOLE else PAIRS[::3])
def test_a_fault_is_named_with_its_side(fault, name, store, tmp_path):
    law, side, _ = NAMED[fault]
    imported(store, written(name, tmp_path, fault)[0])
    found = {(finding.rule.name, finding.of_side) for finding in linted(store).found}
    assert (law, side) in found, found


def test_the_record_says_where_a_row_came_from(store, tmp_path):
    imported(store, written("prime-rl", tmp_path)[0])
    calls = [call for call, row in rows_in(store, losses=False) if row == 0]
    assert [call.record.origin for call in calls] == [
        {"name": "rank_1.jsonl", "layout": "prime-rl", "row": 0}, {"name": "rank_1.jsonl", "layout": "prime-rl", "row": 8},
    ]  # fmt: skip
    record = calls[0].record
    assert (record.run, record.step, record.rank, record.role, record.source) == ("out", 4, 1, "policy", "import")
    assert record.actor["adapter"] == "prime-rl" and record.replayable


def test_nothing_is_imported_twice_whatever_a_file_is_called(store, tmp_path):
    path, _ = written("nemo-rl", tmp_path)
    first = imported(store, path)
    moved = path.rename(tmp_path / "logs" / "renamed")
    os.utime(moved, (1, 1))
    again = imported(store, moved)
    assert (first.added, again.added, again.present) == (4, 0, 4) and again.dump_ids == first.dump_ids
    assert imported(store, moved, columns={"ids": "token_ids"}).added, "other columns are other rows"


def test_a_folder_is_searched_by_content(store, tmp_path):
    for name in ("slime-rollout", "slime-train", "prime-rl"):
        written(name, tmp_path / "job")
    (tmp_path / "job" / "notes.md").write_text("# notes\n{")
    (tmp_path / "job" / "config.json").write_text('{\n "a": 1\n}')
    summary = imported(store, tmp_path / "job")
    assert summary.refused == [] and sorted(summary.runs) == ["out", "rollout_data", "train_data"]


def test_a_store_in_the_folder_is_not_read_as_a_trainers_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = written("prime-rl", tmp_path / "job")
    Store(tmp_path / "store").create()
    folder = tmp_path / "store/replays/20260101T000000-abcdef"
    folder.mkdir(parents=True)
    (folder / "rank0.jsonl").write_text('{"step": 1, "loss": 0.5, "grad_norm": null}\n' * 20)
    answer = typed("lint .")
    assert answer.returncode == 0 and "rank0.jsonl" not in answer.stdout, answer.stdout
    assert {path.name} == {each.name for each in find_files([tmp_path]) if each.suffix == path.suffix}


@pytest.mark.parametrize("row", [{"input_ids": 5, "loss_mask": 1}, {"prompt_ids": [1, 2], "completion_ids": 7}])
def test_an_id_in_place_of_a_list_is_refused_in_our_own_words(row, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    answer = typed("lint", str(tmp_path / "rows.jsonl"))
    assert answer.returncode == 3 and "of a type that is not read" in answer.stderr, answer.stderr


def test_what_a_file_lacks_is_said(store, tmp_path):
    path, _ = written("prime-rl", tmp_path)
    (path.parent / "STABLE").unlink()
    slime, _ = written("slime-rollout", tmp_path)
    notes = imported(store, path, slime).notes
    assert [note.partition(": ")[2] for note in notes] == [
        "its folder has no STABLE: prime-rl had not finished this step",
        "1 row left out: row 16: it has fewer than two tokens",
    ]
    lacks = {each.rule.name: each.by for each in linted(store).not_checked}
    assert "rewards" in lacks and "ratio" in lacks and "policy losses" not in " ".join(lacks.values())


def test_rows_with_values_of_another_length_are_named(store, tmp_path):
    _, rows = written("slime-rollout", tmp_path)
    rows[3].rollout.append(-0.5)
    rows[7].mask.append(1)
    summary = imported(store, runfiles.slime_rollout(tmp_path, rows))
    assert any("row 7: its loss_mask has" in note for note in summary.notes), summary.notes
    (finding,) = linted(store).found
    assert finding.rule.name == "lengths" and "rollout_log_probs is [1, " in finding.said


def test_values_of_a_response_stand_at_the_actions_of_a_mask_of_all_tokens(store, tmp_path):
    rows = runfiles.made_rows()
    table = [
        {"input_ids": [*row.ids, 0], "attention_mask": [1] * len(row.ids) + [0], "loss_mask": [*row.wide([1] * len(row.response)), 0],
         "logprobs": row.log_probs, "rollout_logprobs": row.rollout}
        for row in rows
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    imported(store, tmp_path / "rows.jsonl")
    got = sorted(tuple(np.round(values_of(call, at, "log_probs"), 4).tolist()) for call, at in rows_in(store, losses=True))
    assert got == sorted(tuple(np.round(np.float32(row.log_probs), 4).tolist()) for row in rows)
    assert linted(store).found == []


def test_on_policy_zeros_and_masked_rows_of_nemo_rl_are_no_faults(store, tmp_path):
    _, rows = written("nemo-rl", tmp_path)
    for row in rows:
        row.log_probs = [0.0] * len(row.log_probs)
        row.prompt, row.response = row.prompt[:3], row.response
    path = runfiles.nemo_rl(tmp_path, rows, filtered=False)
    text = path.read_text().replace("-3.0", "0.0")
    lines = text.splitlines(keepends=True)
    lines[2] = lines[2].replace('"sample_loss_mask": [1.0]', '"sample_loss_mask": [0.0]')
    path.write_text("".join(lines))
    imported(store, path)
    assert linted(store).found == []
    (call, row) = list(rows_in(store, losses=True))[2]
    assert call.counts is not None and call.counts[row] == 0 and call.array("log_probs") is None


def test_equal_rows_of_a_rollout_may_be_of_a_greedy_evaluation(store, tmp_path):
    rows = runfiles.made_rows()
    rows[1].prompt, rows[1].response = list(rows[0].prompt), [11] * 60
    rows[1].mask, rows[1].rollout = [1] * 60, [-0.9] * 60
    imported(store, runfiles.slime_rollout(tmp_path, [*rows, rows[1], rows[1]]))
    assert linted(store).found == []


def test_tokens_that_no_engine_sampled_do_not_count_in_prime_rl(store, tmp_path):
    path, rows = written("prime-rl", tmp_path)
    rows[0].rollout = [0.0] * len(rows[0].rollout)
    runfiles.prime_rl(tmp_path, rows)
    lines = path.read_text().splitlines(keepends=True)
    lines[0] = lines[0].replace(
        '"rl_weights":[' + "null," * (len(rows[0].ids) - 1) + "null]", f'"rl_weights":{[0.0] * len(rows[0].ids)}'
    )
    path.write_text("".join(lines))
    imported(store, path)
    assert linted(store).found == []


def test_a_part_of_context_parallelism_and_an_unknown_schema_are_refused(store, tmp_path):
    _, rows = written("miles-train", tmp_path)
    path, _ = written("prime-rl", tmp_path)
    path.write_text(path.read_text().replace('"schema_version":1', '"schema_version":2'))
    summary = imported(store, runfiles.miles_train(tmp_path, rows, cp_size=2), path)
    assert [each.code for each in summary.refused] == ["unsupported", "newer-format"] and not summary.added
    assert "2 ranks of context parallelism" in summary.refused[0].reason


@pytest.mark.parametrize("align", ["own", "next"])
def test_columns_have_the_names_that_the_user_gives(align, store, tmp_path):
    """Values of all tokens are of the token itself, or of the one behind it, which only the user can know."""
    row = runfiles.made_rows()[0]
    values = row.wide(row.log_probs, outside=-9.0)
    table = {"my_ids": np.array([row.ids]), "lp": np.array([[*values[1:], -9.0] if align == "next" else values])}
    np.savez(tmp_path / "x", **table)
    given = {"ids": "my_ids", "log_probs": "lp", "align": align}
    imported(store, tmp_path / "x.npz", columns=given)
    ((call, at),) = rows_in(store, losses=True)
    got = values_of(call, at, "log_probs")
    assert got is not None and np.allclose(got[-len(row.response) :], row.log_probs, atol=1e-6)
    refused = imported(store, tmp_path / "x.npz", columns={"ids": "nope"}).refused
    assert "no 'nope' for --column ids (it has lp, my_ids)" in refused[0].told
    for wrong in ("ids", "tokens=x", "align=left"):
        with pytest.raises(UsageError, match="is not PART=NAME"):
            columns_of([wrong])


def test_healthy_advantages_that_were_clipped_or_of_no_known_estimator_are_not_called_wrong(store, tmp_path):
    rows = runfiles.made_rows()
    runfiles.estimate(rows, runfiles.leave_one_out)
    most = sorted(abs(row.advantages[0]) for row in rows)[-4]
    for row in rows:
        row.advantages = [max(-most, min(most, value)) for value in row.advantages]
    imported(store, runfiles.nemo_rl(tmp_path / "clipped", rows))
    clipped = linted(store)
    assert clipped.found == [] and clipped["rewards"].looked_at
    for at, row in enumerate(rows):
        row.advantages = [0.1 * at - 0.7] * len(row.advantages)
    other = Store(tmp_path / "other")
    imported(other, runfiles.nemo_rl(tmp_path / "unknown", rows))
    assert linted(other).found == [] and linted(other)["rewards"].lacks == "an estimator of advantages that is known"


def without_mask(rows):
    """Nulls where the engine did not sample, instead of a mask."""
    for row in rows:
        mask = row.pop("loss_mask")
        for name in ("logprobs", "rollout_logprobs", "advantages"):
            row[name] = [value if acts else None for value, acts in zip(row[name], mask, strict=True)]


def in_two_columns(rows):
    for row in rows:
        count = sum(row.pop("loss_mask"))
        ids, row["advantage"] = row.pop("input_ids"), row.pop("advantages")[-1]
        row |= {"prompt_ids": ids[:-count], "completion_ids": ids[-count:]}
        row |= {name: row[name][-count:] for name in ("logprobs", "rollout_logprobs")}


def in_a_nucleus(rows):
    for row in rows:
        row["rollout_logprobs"] = [0.0 if value > -0.4 else value + 0.3 for value in row["logprobs"]]


def of_tools_without(rows):
    for row in rows:
        first = row["loss_mask"].index(1)
        row["input_ids"][first + 2], row["rollout_logprobs"][first + 3 : first + 6] = runfiles.END, [None] * 3


def of_prompts_too(rows):
    for row in rows:
        first = row["loss_mask"].index(1)
        row["loss_mask"][first - 2 : first] = [1, 1]
        for name in ("logprobs", "rollout_logprobs", "advantages"):
            row[name][:first] = [0.0] * first


PLAIN = {
    "nulls instead of a mask": (without_mask, set()),
    "ids in two columns, an advantage of a row": (in_two_columns, set()),
    "top-p, which no file names": (in_a_nucleus, set()),
    "a head, and a line of figures": (lambda rows: [rows.insert(at, {"config": {"lr": 0.1}}) for at in (0, 5)], set()),
    "a mask that is too long": (lambda rows: rows[3]["loss_mask"].extend([1, 1]), set()),
    "nulls at the output of tools": (of_tools_without, {("environment", TRAINER)}),
    "a mask that begins in the prompt, where no side has a figure": (of_prompts_too, {("mask", TRAINER)}),
    "no mask, zeros in the prompt": (lambda rows: [row.pop("loss_mask") for row in rows], set()),
    "no mask, no log-probs of the trainer": (lambda rows: [(row.pop("loss_mask"), row.pop("logprobs")) for row in rows], set()),
    "no end token is trained on": (lambda rows: [row["loss_mask"].__setitem__(-1, 0) for row in rows], {("mask", TRAINER)}),
}


@pytest.mark.parametrize("change", PLAIN)
def test_rows_of_a_plain_table_mean_what_their_writer_means(change, tmp_path):
    plain, (plant, wanted) = runfiles._plain_rows(estimated()), PLAIN[change]
    plant(plain)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    answer = json.loads(typed("lint", str(tmp_path / "rows.jsonl"), "--json").stdout)
    assert {(each["rule"], each["side"]) for each in answer["findings"]} == wanted, answer["findings"]
    left = [each["said"] for each in answer["unchecked"] if each["rule"] == "readable"]
    assert bool(left) == (len(plain) > 16 or "too long" in change), "a row that was left out is not green"
    assert "in the prompt" in change or "rewards" not in [each["rule"] for each in answer["unchecked"]]


LABELS = {
    "own": ([-100, -100, 7, 8], [0, 1, 1]),
    "following": ([-100, 7, 8, -100], [0, 1, 1]),
    "before": ([-100, -100, 6, 7], None),
    "none": ([-100] * 4, None),
    "of the row": ([3], [1, 1, 1]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_a_supervised_training_are_its_mask_or_are_refused(kind, store, tmp_path):
    labels, mask = LABELS[kind]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7, 8], "labels": labels}) + "\n")
    summary = imported(store, tmp_path / "rows.jsonl")
    masks = [call.active[row].tolist() for call, row in rows_in(store, losses=False)]
    assert masks == ([] if mask is None else [mask]) and bool(summary.left_out or summary.refused) == (mask is None)


@pytest.mark.parametrize("step, read", [(3, True), ("3", False), ("step_3", False), (-1, False), (2.5, False), (None, True)])
def test_a_step_that_is_no_whole_number_is_refused_and_not_left_out(step, read, store, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7, 8], "step": step}) + "\n")
    assert bool(imported(store, tmp_path / "rows.jsonl").dump_ids) == read


def test_the_bits_of_bf16_are_no_log_probs(store, tmp_path):
    np.savez(tmp_path / "rows.npz", input_ids=np.full((2, 4), 7), log_probs=np.full((2, 4), 49000, np.uint16))
    assert not imported(store, tmp_path / "rows.npz").dump_ids


def estimated():
    runfiles.estimate(rows := runfiles.made_rows(), runfiles.normalized)
    return rows


@pytest.mark.parametrize("of_second, named", [((0, 16), False), ((16, 32), False), ((8, 24), True), ((4, 12), False)])
def test_ranks_of_a_run_may_be_replicas_but_not_share_some_rows(of_second, named, store, tmp_path):
    rows = [replace(row, log_probs=[value - 3 for value in row.log_probs]) for seed in (1, 2) for row in runfiles.made_rows(seed)]
    for rank, of in enumerate((rows[:16], rows[slice(*of_second)])):
        path = runfiles.prime_rl(tmp_path, of)
        path.with_name(f"rank_{rank}.jsonl").write_text(path.read_text().replace('"rank":1', f'"rank":{rank}'))
    imported(store, path.with_name("rank_0.jsonl"), path.with_name("rank_1.jsonl"))
    said = [finding.said for finding in linted(store).found if finding.rule.name == "duplicates"]
    assert said == ["step 4: ranks 0 and 1 both train on 8 rows, and each on others besides"] * named


def test_ranks_that_slime_divided_rows_among_have_no_row_twice(store, tmp_path):
    rows = runfiles.made_rows()
    rows[0].log_probs = [value - 9 for value in rows[0].log_probs]
    rows[1] = rows[0]
    imported(store, runfiles.slime_train(tmp_path, rows))
    assert "duplicates" in {finding.rule.name for finding in linted(store).found}


@pytest.mark.parametrize("kind", ["verl", "TRL"])
def test_texts_are_encoded_anew_where_a_tokenizer_is_named(kind, store, tmp_path):
    model = build_assets(tmp_path / "model", 1)[0]
    rows = [{"input": f"What is the sum of {n}, 4?", "output": "The sum is", "step": 7, "score": n} for n in range(3)]
    path = tmp_path / "1.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if kind == "TRL":
        path = tmp_path / "completions.parquet"
        names = {"input": "prompt", "output": "completion", "step": "step"}
        parquet.write_table(Table.from_pylist([{names[key]: row[key] for key in names} for row in rows]), path)
    refused = imported(store, path).refused
    assert "texts, without token ids" in refused[0].told and "--column tokenizer=MODEL" in refused[0].told
    summary = imported(store, path, columns=columns_of([f"tokenizer={model}"]))
    assert "encoded anew" in summary.notes[-1]
    encode = load_tokenizer(str(model))
    for (call, at), row in zip(rows_in(store, losses=False), rows, strict=True):
        assert call.sequences[at][call.real[at]].tolist() == encode(row["input"] + row["output"])["input_ids"]
        assert call.actions[at][call.active[at]].tolist() == encode(row["output"])["input_ids"]
        assert call.record.step == 7 and call.array("rewards") is None


def test_many_rows_of_a_file_become_one_pack_and_a_disk_that_fails_leaves_nothing_of_it(store, tmp_path, monkeypatch):
    path = runfiles.json_lines(tmp_path, [row for seed in range(16) for row in runfiles.made_rows(seed)])
    with monkeypatch.context() as patch, pytest.raises(StoreProblem, match="cannot write into"):
        patch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
        imported(store, path)
    assert not list(places_of(store)) and not list(store.packs.rglob("*.pack"))
    first, again = imported(store, path), imported(store, path)
    assert len(list(store.iter_packs())) == 1 and not list(store.iter_dumps())
    assert first.added == again.present == len(list(places_of(store))) == 64 and not again.added
    other = Store(tmp_path / "other").create()
    with exclusive(other):  # another process packs
        imported(other, path)
    assert len(list(other.iter_dumps())) == 64
    assert len(lint(store.root, [str(place.relative_to(store.root)) for place in places_of(store)]).held) == len(
        linted(other).held
    )
