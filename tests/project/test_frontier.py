"""What is relied on in other packages: that the table is true of what is installed, and what is said of a release that differs."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import frontier
import pytest
from frontier import Contract
from roots import ROOT

KNOWN = frontier.contracts()


@pytest.mark.parametrize("package", KNOWN)
def test_what_is_relied_on_is_there_in_the_version_that_was_tried(package):
    try:
        here = distribution(package)
    except PackageNotFoundError:
        assert package == "verl", "the test environment has all others"
        return
    contract = KNOWN[package]
    if here.version == contract.tried:
        folder = Path(str(here.locate_file("")))
        assert contract.places and list(frontier.compared(contract, folder, folder)) == []


def test_readme_names_the_versions_that_were_tried():
    supported = re.search(r"\*\*Supported\*\*.*?\n\n", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    for package, written in {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"}.items():
        newest = re.search(rf"{written} (?:[\d.]+ to )?([\d.]*\d)", supported)[1]
        assert KNOWN[package].tried.startswith(f"{newest}."), package


BEFORE = """
class Loss:
    def __init__(self, clip, beta): ...
    def forward(self, logits, mask):
        "Of each token."
        return logits.mean()
def norm(engine): return engine.total
def kept(a): return a
LIMITS = {"a": 1}
def moved(): ...
"""
AFTER = """
class Loss:
    def __init__(self, clip, *, alpha): ...
    def forward(self, logits, mask):
        "Another docstring."
        return logits.sum(), mask
def norm(engine):
    wait()
    return engine.total
def kept(a): return a  # a comment
LIMITS = {"a": 2}
"""


def test_a_release_is_compared_place_by_place(tmp_path):
    for folder, text in (("before", BEFORE), ("after", AFTER)):
        (tmp_path / folder / "lib").mkdir(parents=True)
        (tmp_path / folder / "lib" / "losses.py").write_text(text)
    names = ("Loss", "Loss.forward", "norm", "kept", "LIMITS", "moved", "never")
    contract = Contract("1.0", {f"lib.losses:{name}": "a law" for name in names})
    found = {(change.place[11:], change.what, change.breaks) for change in frontier.compared(contract, *_folders(tmp_path))}
    assert found == {
        ("Loss", "no longer takes beta", True),
        ("Loss", "takes alpha", False),
        ("Loss.forward", "returns (logits.sum(), mask) (was logits.mean())", False),
        ("norm", "another body", False),
        ("LIMITS", "another body", False),
        ("moved", "gone", True),
        ("never", "not in the version that was tried: correct the table", True),
    }


def _folders(folder):
    return folder / "before", folder / "after"
