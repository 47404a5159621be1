"""The catalog follows a running replay, and whatever is wrong with it is said and never raised."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from replaycases import publish

from actordbg.base.errors import StoreProblem
from actordbg.catalog import indexer as index
from actordbg.catalog.query import select_dumps
from actordbg.replay.replay_data import LiveCatalog
from actordbg.store.layout import Store


def test_whatever_keeps_the_catalog_from_being_written_is_kept_as_a_problem(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = LiveCatalog(store)
    for problem in (StoreProblem("no store"), OSError(28, "full")):
        with monkeypatch.context() as patch:
            patch.setattr(index, "refresh", Mock(side_effect=problem))
            catalog.flush()
        assert catalog.problem == str(problem)
    publish(store, 1)
    catalog.flush()
    assert catalog.problem is None and len(select_dumps(store)) == 1
    store.format_path.write_text('{"format": 99}')  # a store that became newer meanwhile
    catalog.flush()
    assert "format 99" in (catalog.problem or "")
