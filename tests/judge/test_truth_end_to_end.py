"""Judged by the truth: what is right is green, what was broken on purpose is red, and a wrong reference misleads nobody.

Real workers, OpenRLHF's own packing and masking, the tiny model.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import brokenactor
import pytest
from replaycases import publish
from roots import ROOT
from typer.testing import CliRunner

from actordbg.base.ids import new_replay_id
from actordbg.cli.app import app
from actordbg.config.replay_config import ReplayConfig
from actordbg.dumps.importer import import_paths
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.replay_record import ReplayInput, ReplaySpec
from actordbg.replay.supervise import run_replay
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow

REAL = ROOT.parent / "shared/data/input_dumps/actor_inputs_rank2_20250619_052824_036233.pkl"
"""A real dump, two rows of 343; beside the made-up ones where it is there."""


@pytest.fixture(autouse=True, scope="module")
def a_usual_shell() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_SIZE"):
            patch.delenv(name, raising=False)
        yield


@dataclass(frozen=True)
class Bench:
    """A store with replays of two inputs: packed, packed with a fault, and padded with another fault."""

    store: Store
    right: str
    broken: str
    padded_wrongly: str


@contextlib.contextmanager
def fault(folder: Path, program: str) -> Iterator[None]:
    """Inside the block workers have this fault, and it is reached."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in brokenactor.environment(folder, program).items():
            patch.setenv(name, value)
        yield
    assert (folder / "reached").is_file(), "the fault was in the worker"


def run(store: Store, inputs: list[ReplayInput], **settings: Any) -> str:
    config = ReplayConfig(backward=True, keep_gradients=True, **settings)
    outcome = run_replay(store, ReplaySpec(new_replay_id(), now_timestamp(), config, tuple(inputs)))
    assert outcome.all_passed, "a fault that is seen by itself would be no test of the verdict"
    return outcome.replay_id


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("truth")
    store = Store(folder / "store").create()
    if REAL.is_file():
        import_paths(store, [REAL])
    inputs = publish(store, 2, batch=3, length=96)
    right = run(store, inputs, packing=True)
    with fault(folder / "run-on", brokenactor.POSITIONS_RUN_ON):
        broken = run(store, inputs, packing=True)
    with fault(folder / "attended", brokenactor.PADDING_ATTENDED):
        padded_wrongly = run(store, inputs, packing=False)
    return Bench(store, right, broken, padded_wrongly)


def command(store: Store, *words: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["--store", str(store.root), *words, "--json"])
    assert isinstance(result.exception, SystemExit | None), result.exception
    answer: dict[str, Any] = json.loads(result.stdout)
    return result.exit_code, answer


def test_unbroken_packing_is_as_near_the_truth_as_fp32_allows(bench: Bench) -> None:
    code, found = command(bench.store, "compare", bench.right, "truth")
    assert (code, found["verdict"], found["b"]["kind"]) == (0, "match", "truth")
    assert len(found["dumps"]) == 2
    for dump in found["dumps"]:
        assert dump["log_probs"]["max_abs"] < 1e-5 and dump["grad_norm_rel"] < 1e-4
        assert dump["gradients"]["distance"] < 1e-4 and not dump["not_compared"]


def test_packing_without_its_position_reset_turns_red(bench: Bench) -> None:
    code, found = command(bench.store, "compare", bench.broken, "truth")
    assert (code, found["verdict"]) == (1, "mismatch")
    assert all(dump["verdict"] == "mismatch" for dump in found["dumps"])
    assert found["dumps"][0]["log_probs"]["max_abs"] > 0.1
    reached = {token["row"] for dump in found["dumps"] for token in dump["worst_tokens"]}
    assert 0 not in reached, "the first packed row has nothing before it that could leak"


def test_a_reference_that_is_padded_wrongly_misleads_nobody(bench: Bench) -> None:
    assert command(bench.store, "compare", bench.right, bench.padded_wrongly)[0] == 1, "side by side, who is wrong?"
    assert command(bench.store, "compare", bench.right, "truth")[0] == 0
    assert command(bench.store, "compare", bench.padded_wrongly, "truth")[0] == 1


class TestBf16:
    """A configuration in bf16, its noise floor, and the truth of its weights."""

    @pytest.fixture(scope="class")
    def noise(self, bench: Bench) -> dict[str, Any]:
        words = ("--dtype", "bf16", "--packing", "--backward", "--order", "length", "--max-inputs", "3")
        code, found = command(bench.store, "noise", *words)
        assert code == 0
        return found

    def test_every_variation_is_measured(self, noise: dict[str, Any]) -> None:
        assert [one["name"] for one in noise["variants"]] == ["repeat", "repad", "rebatch", "reorder", "rounding"]
        assert noise["dumps"] == 2 + REAL.is_file()
        assert all(one["log_probs"]["count"] == noise["tokens"] >= 270 for one in noise["variants"])
        assert noise["deterministic"] is True and noise["reasons"] == []
        assert 0.005 < noise["floor"]["max_abs"] < 0.5, "what bf16 costs by itself"

    def test_a_fault_is_red_in_spite_of_it(self, bench: Bench, noise: dict[str, Any]) -> None:
        assert command(bench.store, "compare", bench.broken, "truth", "--noise", noise["noise_id"])[0] == 1


def noise_of(store: Store, count: int = 1) -> dict[str, Any]:
    words = ("--dtype", "fp32", "--packing", "--backward", "--order", "length", "--max-inputs", str(count))
    code, found = command(store, "noise", *words)
    assert code == 0
    return found


def judged(store: Store, replay_id: str, noise: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The exit code and the record against the truth and this floor."""
    return command(store, "compare", replay_id, "truth", "--noise", noise["noise_id"])


def test_the_noise_of_a_broken_configuration_does_not_excuse_it(bench: Bench, tmp_path: Path) -> None:
    """Rows that leak into each other move when they are reordered, by as much as they are wrong."""
    with fault(tmp_path / "fault", brokenactor.POSITIONS_RUN_ON):
        noise = noise_of(bench.store, 2)
    assert max(one["log_probs"]["max_abs"] for one in noise["variants"]) > 0.1, "it moves as far as it is wrong"
    assert noise["floor"]["max_abs"] < 1e-4
    assert noise["reasons"] and all("taken for a fault" in reason for reason in noise["reasons"])
    assert judged(bench.store, bench.broken, noise)[0] == 1


def test_random_noise_does_not_excuse_itself(bench: Bench, tmp_path: Path) -> None:
    with fault(tmp_path / "fault", brokenactor.RANDOM_NOISE):
        noise = noise_of(bench.store)
    assert noise["deterministic"] is False and noise["floor"]["max_abs"] < 1e-4
    assert any(reason.startswith("repeat of ") for reason in noise["reasons"])
    assert judged(bench.store, noise["replay_id"], noise)[0] == 1
