"""Failures of one kind have one name, and what varies between them does not show in it."""

import subprocess
import sys

import pytest
from casefiles import cases_of

from actordbg.actor.signatures import MAX_LENGTH, explain, known_failures, normalize, signature_of

SEEN = cases_of("failures")


def test_every_known_failure_has_a_case_here():
    assert known_failures().keys() == SEEN.keys()


@pytest.mark.parametrize("name", SEEN)
def test_a_known_failure_has_its_name_and_is_explained_with_ways_out(name):
    for line in SEEN[name].given:
        error_class, _, message = line.partition("  ")
        assert signature_of(error_class, message.replace("\\n", "\n")) == name
    explanation, ways_out = explain(name)
    assert explanation.endswith(".") and ways_out


def test_a_log_names_only_what_shows_there_alone():
    log = "...\nW1120 ProcessGroupNCCL.cpp Watchdog caught collective operation timeout: WorkNCCL\n..."
    assert signature_of("RuntimeError", "something ended", log) == "collective-timeout"
    assert signature_of("ValueError", "no", "DEBUG shapes cannot be multiplied? checked: fine") == "ValueError: no"


@pytest.mark.parametrize(
    "left, right",
    [
        ("size 1861 at 0x7f3a0010 does not fit 1024", "size 7 at 0x55aa does not fit 8"),
        ("shape (2, 1861, 64) of /tmp/a/x.bin, 1e-05 off", "shape [4, 312] of /data/y, 2.5e+3 off"),
        ("key 9f3a2c1bdeadbeef missing", "key 00112233445566778899 missing"),
    ],
)
def test_what_varies_does_not_show(left, right):
    assert signature_of("pkg.mod.OddError", left) == signature_of("pkg.mod.OddError", right)
    assert signature_of("pkg.mod.OddError", left).startswith("OddError: ")


def test_what_differs_in_words_stays_different():
    assert signature_of("ValueError", "no rows in batch 3") != signature_of("ValueError", "no columns in batch 3")
    assert signature_of("ValueError", "float32 wanted") == "ValueError: float32 wanted"
    assert signature_of(None, None) == "error"
    assert explain("ValueError: no") is None
    assert len(normalize("A\nB", "x" * 400)) == MAX_LENGTH and signature_of("A\nB", "x\ny") == "A B: x"


def test_the_desk_names_failures_and_checks_configurations_without_torch():
    code = "import sys, actordbg.actor.signatures, actordbg.actor.rules, actordbg.cli.from_signature; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
