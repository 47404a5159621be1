"""The page of layouts says of each which laws its files can be asked: those that hold on a healthy file."""

import importlib

import pytest
from recordedfields import linted
from roots import ROOT
from runfiles import written

from actordbg.dumps.importer import import_paths
from actordbg.dumps.layouts import LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_laws_that_the_page_names_are_those_that_a_healthy_file_is_asked(layout, store, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page = importlib.import_module("layouts_page")
    import_paths(store, [written(layout.name, tmp_path)[0]])
    findings = linted(store)
    assert [rule.name for rule in findings.held] == page.asked(layout)
    assert f"### {layout.name}\n" in page.layouts_markdown()
