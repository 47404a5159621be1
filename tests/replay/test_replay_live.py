"""The catalog follows a running replay, and whatever is wrong with it is said and never raised."""

from __future__ import annotations

import pytest
from replaycases import publish

from actordbg.base.errors import CatalogProblem, NewerFormat, StoreProblem
from actordbg.catalog import indexer as index
from actordbg.catalog.query import select_dumps
from actordbg.replay.replay_data import LiveCatalog
from actordbg.store.layout import Store


@pytest.mark.parametrize(
    "problem", [StoreProblem("no store"), NewerFormat("newer"), CatalogProblem("locked"), OSError(28, "full")]
)
def test_whatever_keeps_the_catalog_from_being_written_is_kept_as_a_problem(
    store: Store, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def fail(store: Store) -> None:
        raise problem

    catalog = LiveCatalog(store)
    with monkeypatch.context() as patch:
        patch.setattr(index, "refresh", fail)
        catalog.tick()
    assert catalog.problem == str(problem)
    publish(store, 1)
    catalog.flush()
    assert catalog.problem is None and len(select_dumps(store)) == 1


def test_a_store_that_became_newer_meanwhile_does_not_stop_a_replay(store: Store) -> None:
    store.format_path.write_text('{"format": 99}')
    catalog = LiveCatalog(store)
    catalog.flush()
    assert "format 99" in (catalog.problem or "")
