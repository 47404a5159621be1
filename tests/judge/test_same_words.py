"""Two replays that differ in one setting: `compare`, `report` and its CSV say so in the same words, and `curve` repeats each whole."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import docpages
import pytest
from comparecases import given, write_replay
from curvecases import keep, run
from typer.testing import CliRunner

from actordbg.cli.app import app
from actordbg.config.replay_config import ReplayConfig
from actordbg.store.layout import Store

APART: dict[str, tuple[dict[str, Any], Any, Any, str, str]] = {
    "compile_backend": ({"compile": True}, "eager", "aot_eager", "compile backend eager", "compile backend aot_eager"),
    "seed": ({}, 1, 2, "seed 1", "seed 2"),
    "temperature": ({}, 0.7, 1.0, "temperature 0.7", "temperature 1"),
    "align": ({"backend": "fsdp2", "nproc": 2}, "same", "rank", "align same", "align rank"),
    "dist_backend": ({"backend": "fsdp2", "nproc": 2}, "gloo", "nccl", "over gloo", "over nccl"),
    "num_layers": ({}, 1, None, "1 layers", "all layers"),
}
"""By setting: what both replays have, the setting's values, and the words for them."""
ONE, TWO = "20250619T050000-000001", "20250619T050100-000002"


def shown(store: Store, *arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["--store", str(store.root), *arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("name", APART)
def test_what_differs_is_named_alike_everywhere(store: Store, name: str) -> None:
    both, ours, theirs, our_words, their_words = APART[name]
    for replay_id, value in ((ONE, ours), (TWO, theirs)):
        settings = both | {name: value}
        ran = {"world_size": settings.get("nproc", 1)} | ({"num_layers": value or 2} if name == "num_layers" else settings)
        write_replay(store, replay_id, [given(0)], resolved=ran, **settings)
    compared = " ".join(shown(store, "compare", ONE, TWO, code=int(name == "num_layers")).split())
    if name == "num_layers":
        assert "A ran 1 layers, B 2" in compared  # two models: their numbers are not compared
    else:
        assert f"A is {our_words}, B {their_words}; no log-prob moves beyond the thresholds." in compared
    reported = " ".join(shown(store, "report", ONE, TWO).split())
    assert f"A {ONE}: {our_words}" in reported and f"B {TWO}: {their_words}" in reported
    rows = list(csv.DictReader(io.StringIO(shown(store, "report", ONE, TWO, "--format", "csv"))))
    assert [row[name] for row in rows] == [
        str(ours),
        str(theirs or 2),
    ]  # of layers, where nobody asked: the model's two


def test_nothing_differs_where_only_what_is_kept_does(store: Store) -> None:
    write_replay(store, ONE, [given(0)])
    write_replay(store, TWO, [given(0)], timeout_s=5.0, keep_gradients=True)
    assert "Both are configured alike" in shown(store, "compare", ONE, TWO)


def test_the_command_of_a_curve_measures_more_lengths_under_the_configuration_of_the_run(store: Store) -> None:
    ran = {"compile": True, "compile_backend": "aot_eager", "backend": "fsdp2", "dist_backend": "gloo"}
    keep(store, run("r1", lengths=(128,), config=ReplayConfig(num_layers=1, nproc=2, **ran), world_size=2, **ran))
    text = " ".join(shown(store, "curve", "memory").split())
    (words,) = re.findall(r"More lengths: actordbg (curve memory r1 --measure [\d,]*\d)", text)
    docpages.parse(words.split())
    assert "1 layers" in text and "compile backend aot_eager" in text


def test_settings_of_a_curve_change_what_is_measured_and_nothing_else(store: Store) -> None:
    keep(store, run("r1", lengths=(128,)))
    done = CliRunner().invoke(app, ["--store", str(store.root), "curve", "memory", "r1", "--packing"])
    assert done.exit_code != 0 and "--packing changes nothing without --measure" in str(done.exception)
