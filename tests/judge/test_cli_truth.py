"""Which replay is the truth of another one, and `--truth`, `noise` and `compare --noise` as typed. Nothing here starts a worker."""

import importlib.metadata
import json
import os

import pytest
from casefiles import cases_of
from commandline import in_json, invoke
from comparecases import given, write_replay
from replaycases import publish
from replaylines import write_replays

from actordbg.actor import hub_model
from actordbg.actor.hub_model import versions_of
from actordbg.base.errors import EnvironmentProblem, StoreProblem, UsageError, WhereError
from actordbg.base.units import new_replay_id
from actordbg.cli.lazy import filled_in
from actordbg.compare.find_truth import ensure_truth, find_truth, wanted_truth
from actordbg.compare.noise_floor import measure, save
from actordbg.config.replay_config import ReplayConfig, validate
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import make_folder
from actordbg.records.journal import SPEC
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.supervise import load_spec


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "typed, read",
    [
        ("--truth", "--truth=fp32"),
        ("--truth fp64 --quiet", "--truth fp64 --quiet"),
        ("--truth=fp64 --resume", "--truth=fp64 --resume=last"),
        ("--where --truth", "--where --truth=fp32"),
        ("-- --truth", "-- --truth"),
        ("", ""),
    ],
)
def test_an_option_without_a_value_has_its_usual_one(typed, read):
    assert filled_in(typed.split(), {"--truth": "fp32", "--resume": "last"}) == read.split()


def test_the_bare_options_mean_what_they_say(store):
    inputs = publish(store, 2)
    planned = in_json(store, "replay --truth --dry-run")
    assert (planned["status"], planned["selected"]) == ("planned", 2)
    spec = ReplaySpec(new_replay_id(), now_timestamp(), ReplayConfig(), tuple(inputs))
    make_folder(store.replays / spec.replay_id)
    (store.replays / spec.replay_id / SPEC).write_text(spec.to_json())
    assert in_json(store, "replay --resume --dry-run")["selected"] == 2


@pytest.mark.parametrize(
    "words, why",
    [
        *((f"--truth fp64 {words}", "conflict") for words in (
            "--packing", "--compile", "--attn sdpa", "--backend fsdp2", "--align rank", "--tp 2", "--backend deepspeed --zero-stage 2")),
        ("--truth bf17", "bf17"),
    ],
)  # fmt: skip
def test_what_contradicts_the_truth_is_refused(store, words, why):
    with pytest.raises(UsageError, match=why):
        invoke(store, "replay", *words.split())


A, B, VARIED, TRUTH = (f"20250619T050000-00000{number}" for number in (1, 2, 3, 4))


@pytest.fixture
def pair(store):
    write_replay(store, A, [given(0)])
    write_replay(store, B, [given(0)])
    write_replay(store, VARIED, [given(0)], vary="repad")
    return store


def test_the_floor_is_the_newest_of_this_configuration_and_without_one_it_says_how_to_measure_it(pair):
    with pytest.raises(UsageError, match=f"the configuration of {A}") as caught:
        invoke(pair, "compare", A, B, "--noise")
    assert "actordbg noise" in caught.value.hint
    floor = measure(pair, A, {"repad": VARIED})
    save(pair, floor)
    found = in_json(pair, "compare", A, B, "--noise")
    assert (found["verdict"], found["noise_id"]) == ("NOT CHECKED", floor.noise_id)
    assert in_json(pair, "compare", B, A, "--noise", floor.noise_id)["noise_id"]


def test_a_truth_that_is_there_is_not_computed_and_last_is_what_somebody_asked_for(pair):
    lone = write_replay(pair, A.replace("05", "04", 1), [given(0)], truth="fp32")
    truth = write_replay(pair, TRUTH, [given(0)], truth="fp64")
    found = in_json(pair, "compare last truth")
    assert (found["a"]["replay_id"], found["b"]["replay_id"], found["rounding_id"]) == (B, truth, lone)
    assert "computing the truth" not in invoke(pair, "compare", A, "truth").stderr
    narrow = in_json(pair, "compare", A, "truth", "--truth", "fp32")
    assert (narrow["b"]["replay_id"], narrow["rounding_id"]) == (lone, None), "a truth in A's own dtype cannot measure rounding"

    def reported():
        return [shown["replay_id"] for shown in in_json(pair, "report")["replays"]]

    assert reported() == [B]
    spec = pair.replays / truth / SPEC
    spec.write_text(spec.read_text().replace('"command": ""', '"command": "actordbg replay --truth"'))
    invoke(pair, "index --rebuild")
    assert reported() == [truth], "a truth that somebody asked for"


@pytest.mark.parametrize("dtype, wider", [("fp32", "fp64"), ("bf16", "fp32")])
def test_without_torch_a_truth_that_is_there_answers_and_one_of_other_versions_does_not(store, monkeypatch, dtype, wider):
    """The versions that count are those under which the replay itself ran: nothing here says others."""
    really = importlib.metadata.version
    ran = versions_of("tiny") | {"torch": "2.9.1", "transformers": "5.1.0", "actordbg": "0.2.0"}

    def version(name):
        if name in ("torch", "transformers"):
            raise importlib.metadata.PackageNotFoundError(name)
        return really(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    write_replay(store, A, [given(0)], dtype=dtype, versions=ran)
    write_replay(store, TRUTH, [given(0)], dtype=dtype, truth=wider, versions=ran | {"torch": "2.8.0"})
    with pytest.raises(
        EnvironmentProblem, match=rf"no finished truth in {wider} .* under .*torch 2\.9\.1.*not installed"
    ) as caught:
        invoke(store, "compare", A, "truth")
    assert caught.value.exit_code == 4 and len(list(store.replays.iterdir())) == 2
    write_replay(store, VARIED, [given(0)], dtype=dtype, truth=wider, versions=ran)
    done = invoke(store, "compare", A, "truth", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["verdict"], told["b"]["replay_id"]) == (0, "RIGHT", VARIED)
    assert "the dtype's rounding was not measured" in invoke(store, "compare", A, "truth").stderr


@pytest.mark.parametrize(
    "words, error, why",
    [
        ("truth truth", UsageError, "A is the side under test"),
        (f"{A} truth --truth bf16", UsageError, "--truth cannot be bf16"),
        (f"{A} truth --where foo=1", WhereError, "no column 'foo'"),  # found before a truth is computed
    ],
)
def test_a_mistake_is_found_before_a_truth_is_computed(pair, words, error, why):
    with pytest.raises(error, match=why):
        invoke(pair, "compare", *words.split())
    assert len(list(pair.replays.iterdir())) == 3


MINE, REFERENCE, THIRD = A, B, VARIED
INPUTS = [given(0), given(1)]


def found(store, name=MINE, dtype="fp32"):
    return find_truth(store, wanted_truth(store, load_spec(store, name), dtype))


CASES = cases_of("truths")


@pytest.mark.parametrize("case", CASES)
def test_a_truth_that_is_there_serves_every_configuration_of_its_inputs_and_no_other(store, case):
    write_replays(store, CASES[case].given)
    for line in CASES[case].expected:
        name, _, truth = line.partition(" ")
        assert str(found(store, name)) == truth, line
        assert truth == "None" or ensure_truth(store, name, dtype="fp32") == truth


@pytest.mark.parametrize("large", [False, True])
def test_a_model_that_was_changed_since_has_another_truth(store, tmp_path, monkeypatch, large):
    """Also where its size and its time are those of before, as `rsync --times` leaves them."""
    if large:
        monkeypatch.setattr(hub_model, "WHOLE", 8)
        monkeypatch.setattr(hub_model, "PIECE", 4)
    (tmp_path / "config.json").write_text("{}")
    model, weights = str(tmp_path), tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * 64)
    before = weights.stat()
    write_replay(store, MINE, INPUTS, model=model)
    write_replay(store, REFERENCE, INPUTS, model=model, truth="fp32")
    assert found(store) == REFERENCE
    weights.write_bytes(b"b" * 64)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(StoreProblem, match="have changed since replay"):
        found(store)
    later = write_replay(store, THIRD, INPUTS, model=model)
    assert found(store, later) is None, "the truth of the weights of before is none of these"


def test_a_truth_keeps_gradients_only_if_there_is_a_backward(store):
    """An engine whose calls ran no backward, under a command that keeps gradients where there are some."""
    write_replay(store, MINE, INPUTS, backend="deepspeed", zero_stage=2, backward=None, keep_gradients=True)
    config = wanted_truth(store, load_spec(store, MINE)).config
    validate(config)
    assert (config.backward, config.keep_gradients) == (False, False)


def test_what_has_no_truth_says_so(store):
    write_replay(store, REFERENCE, INPUTS, truth="fp32")
    with pytest.raises(UsageError, match="is itself a truth"):
        found(store, REFERENCE)
    with pytest.raises(StoreProblem):
        ensure_truth(store, "nothing")
    write_replay(store, MINE, INPUTS)
    (store.replays / MINE / "supervisor.jsonl").write_text("")
    with pytest.raises(StoreProblem, match="built no actor"):
        found(store)
