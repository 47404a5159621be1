"""`--truth`, its old name `--oracle`, `noise` and `compare --noise` as typed: what they take, refuse and say. Nothing here starts a worker."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from click.testing import Result
from comparecases import given, write_replay
from replaycases import publish
from typer.testing import CliRunner

from actordbg.actor.weights_version import versions_of
from actordbg.base.errors import ActordbgError, EnvironmentProblem, NothingToDo, UsageError, WhereError
from actordbg.base.ids import new_replay_id
from actordbg.cli.app import app
from actordbg.cli.lazy import filled_in
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import make_folder
from actordbg.judge.noise_floor import measure, save
from actordbg.records.journal import SPEC
from actordbg.records.replay_record import ReplaySpec
from actordbg.store.layout import Store


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def invoke(store: Store, *arguments: str) -> Result:
    result = CliRunner().invoke(app, ["--store", str(store.root), *arguments])
    if isinstance(result.exception, ActordbgError):
        raise result.exception
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("--oracle", "--oracle=fp32"),
        ("--oracle --quiet", "--oracle=fp32 --quiet"),
        ("--oracle fp64 --quiet", "--oracle fp64 --quiet"),
        ("--truth=fp64 --resume", "--truth=fp64 --resume=last"),
        ("--where --oracle", "--where --oracle=fp32"),
        ("-- --oracle", "-- --oracle"),
        ("", ""),
    ],
)
def test_an_option_without_a_value_has_its_usual_one(typed: str, read: str) -> None:
    assert filled_in(typed.split(), {"--oracle": "fp32", "--resume": "last"}) == read.split()


def test_the_bare_options_mean_what_they_say(store: Store) -> None:
    inputs = publish(store, 2)
    planned = json.loads(invoke(store, "replay", "--oracle", "--dry-run", "--json").stdout)
    assert (planned["status"], planned["selected"]) == ("planned", 2)
    spec = ReplaySpec(new_replay_id(), now_timestamp(), ReplayConfig(), tuple(inputs))
    make_folder(store.replays / spec.replay_id)
    (store.replays / spec.replay_id / SPEC).write_text(spec.to_json())
    assert json.loads(invoke(store, "replay", "--dry-run", "--json", "--resume").stdout)["selected"] == 2


@pytest.mark.parametrize(
    "contradiction",
    [
        "--packing",
        "--compile",
        "--attn sdpa",
        "--backend fsdp2",
        "--align rank",
        "--tp 2",
        "--backend deepspeed --zero-stage 2",
    ],
)
def test_what_contradicts_the_truth_is_refused(store: Store, contradiction: str) -> None:
    with pytest.raises(UsageError, match="contradict"):
        invoke(store, "replay", "--oracle", "fp64", *contradiction.split())


def test_other_dtypes_are_named(store: Store) -> None:
    with pytest.raises(UsageError, match="bf17") as caught:
        invoke(store, "replay", "--oracle", "bf17")
    assert "fp64" in caught.value.hint


def test_noise_on_nothing_says_what_there_is(store: Store) -> None:
    publish(store, 2)
    with pytest.raises(NothingToDo, match="selects none of 2: seq_len is"):
        invoke(store, "noise", "--where", "seq_len>4000")
    with pytest.raises(UsageError, match="contradict"):
        invoke(store, "noise", "--order", "time", "--shuffle-inputs")


class TestCompareWithNoise:
    """The floor that `--noise` takes."""

    A, B, VARIED = (f"20250619T050000-00000{number}" for number in (1, 2, 3))

    @pytest.fixture
    def pair(self, store: Store) -> Store:
        write_replay(store, self.A, [given(0)])
        write_replay(store, self.B, [given(0)])
        write_replay(store, self.VARIED, [given(0)], vary="repad")
        return store

    def test_without_a_floor_it_says_how_to_measure_one(self, pair: Store) -> None:
        with pytest.raises(UsageError, match=f"the configuration of {self.A}") as caught:
            invoke(pair, "compare", self.A, self.B, "--noise")
        assert "actordbg noise" in caught.value.hint

    def test_the_newest_of_this_configuration_is_taken(self, pair: Store) -> None:
        floor = measure(pair, self.A, {"repad": self.VARIED})
        save(pair, floor)
        found = json.loads(invoke(pair, "compare", self.A, self.B, "--noise", "--json").stdout)
        assert (found["verdict"], found["noise_id"]) == ("match", floor.noise_id)
        assert json.loads(invoke(pair, "compare", self.B, self.A, "--noise", floor.noise_id, "--json").stdout)["noise_id"]

    def test_a_truth_that_is_there_is_not_computed_and_last_is_what_somebody_asked_for(self, pair: Store) -> None:
        truth = write_replay(pair, "20250619T050000-000004", [given(0)], truth="fp32")
        found = json.loads(invoke(pair, "compare", "last", "truth", "--json").stdout)
        assert (found["a"]["replay_id"], found["b"]["replay_id"]) == (self.B, truth)
        assert "computing the truth" not in invoke(pair, "compare", self.A, "truth").stderr

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_without_torch_a_truth_that_is_there_answers_and_one_of_other_versions_does_not(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, dtype: str
    ) -> None:
        """The versions that count are those under which the replay itself ran: nothing here says others."""
        really = importlib.metadata.version
        ran = versions_of("tiny") | {"torch": "2.9.1", "transformers": "5.1.0", "actordbg": "0.2.0"}

        def version(name: str) -> str:
            if name in ("torch", "transformers"):
                raise importlib.metadata.PackageNotFoundError(name)
            return really(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        write_replay(store, self.A, [given(0)], dtype=dtype, versions=ran)
        write_replay(store, "20250619T050000-000004", [given(0)], dtype=dtype, truth="fp32", versions=ran | {"torch": "2.8.0"})
        with pytest.raises(
            EnvironmentProblem, match=r"no finished truth in fp32 .* under .*torch 2\.9\.1.*not installed"
        ) as caught:
            invoke(store, "compare", self.A, "truth")
        assert caught.value.exit_code == 4 and len(list(store.replays.iterdir())) == 2
        write_replay(store, "20250619T050000-000003", [given(0)], dtype=dtype, truth="fp32", versions=ran)
        done = invoke(store, "compare", self.A, "truth", "--json")
        told = json.loads(done.stdout)
        assert (done.exit_code, told["verdict"], told["b"]["replay_id"]) == (0, "match", "20250619T050000-000003")
        assert ("what the dtype costs is not measured" in invoke(store, "compare", self.A, "truth").stderr) is (dtype == "bf16")

    def test_a_mistake_in_where_is_found_before_a_truth_is_computed(self, pair: Store) -> None:
        with pytest.raises(WhereError, match="no column 'foo'"):
            invoke(pair, "compare", self.A, "truth", "--where", "foo=1")
        assert len(list(pair.replays.iterdir())) == 3

    def test_reports_and_curves_mean_the_same_by_last(self, pair: Store) -> None:
        truth = write_replay(pair, "20250619T050000-000004", [given(0)], truth="fp32")
        shown = json.loads(invoke(pair, "report", "--json").stdout)
        assert [one["replay_id"] for one in shown["replays"]] == [self.B]
        assert json.loads(invoke(pair, "curve", "memory", "last", "--json").stdout)["notes"] == []
        spec = pair.replays / truth / SPEC
        spec.write_text(spec.read_text().replace('"command": ""', '"command": "actordbg replay --oracle"'))
        invoke(pair, "index", "--rebuild")
        shown = json.loads(invoke(pair, "report", "--json").stdout)
        assert [one["replay_id"] for one in shown["replays"]] == [truth], "a truth that somebody asked for"

    def test_the_truth_is_none_to_be_judged(self, pair: Store) -> None:
        with pytest.raises(UsageError, match="A is the side that is judged"):
            invoke(pair, "compare", "truth", "truth")
        with pytest.raises(UsageError, match="bf16 is no truth"):
            invoke(pair, "compare", self.A, "truth", "--oracle", "bf16")
