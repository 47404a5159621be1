"""The pytest plugin, for a trainer's own tests: nothing to import, and nothing loaded until a test uses it.

    def test_grpo(actordbg_check):  # the failure's text is the verdict
        with actordbg_check.calls("trl"):  # each of the trainer's calls, by the weights it had
            trainer.train()


    def test_model(actordbg_check):
        actordbg_check(model, batch)  # `actordbg.check_model`
        actordbg_check("store", where="seq_len>4096")  # `actordbg check`


    @pytest.mark.actordbg_dumps("store", where="rank=0", sample=8)
    def test_dump(actordbg_dump): ...  # once for each of 8 dumps, a `StoredDump`

`--actordbg-html DIR` writes the page of each check there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from actordbg.api.tapping import Caller, Tap
    from actordbg.document.command_result import CommandResult
    from actordbg.trainers.seam import Rows, Scores

MARK, DUMP = "actordbg_dumps", "actordbg_dump"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's option."""
    group = parser.getgroup("actordbg", "actordbg")
    group.addoption("--actordbg-html", metavar="DIR", help="Write the page of each actordbg check into this folder.")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    text = f"{MARK}(store, where=None, sample=8): run the test once for each of `sample` diverse dumps, as the argument {DUMP}"
    config.addinivalue_line("markers", text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the dumps of the marker the parameters of a test."""
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is not None:
        dumps = _sample(*mark.args, **mark.kwargs)
        metafunc.parametrize(DUMP, dumps, ids=[dump.dump_id.rpartition("-")[2] for dump in dumps])


def _sample(store: str, where: str | None = None, sample: int = 8) -> list[Any]:
    from actordbg.api.opened_store import OpenStore
    from actordbg.base.errors import ActordbgError

    try:
        dumps = list(OpenStore(store).sample(where, sample))
    except ActordbgError as error:
        raise pytest.Collector.CollectError(f"{error.message}\n{error.hint}") from None
    if not dumps:  # an empty list of parameters would skip the test
        raise pytest.Collector.CollectError(f"no dump of {store} to run the test for\nselect others with where=...")
    return dumps


class Checker:
    """Checks a model in memory, a store, or a trainer's calls; a check that is not RIGHT fails the test with its verdict."""

    def __init__(self, pages: Path | None, name: str) -> None:
        self._pages, self._name, self._count = pages, name, 0

    def __call__(self, target: Any, batch: Any = None, **options: Any) -> CommandResult:
        """Check a model of transformers on a batch, or a store (a path, an `OpenStore`). options: of `check_model` or `check`."""
        import actordbg

        if batch is not None:
            return self._judge(actordbg.check_model(target, batch, **options))
        store = target if isinstance(target, actordbg.OpenStore) else actordbg.open(target)
        return self._judge(store.check(**options))

    def calls(self, target: Any, *, most: int = 4, packing: bool | None = False) -> Tap:
        """Check the first `most` calls of a model, a function or an adapter's trainer while the block lasts (`tapping.Tap`).

        The call's own log-probs are held against the truth of the weights that the model has then. No call is a failure.
        """
        from actordbg.api.own_model import judged
        from actordbg.api.tapping import Tap

        if most < 1:
            raise ValueError(f"most is {most}: no call would be checked")

        def check(rows: Rows, scores: Scores, caller: Caller) -> None:
            if tap.calls <= most:
                self._judge(judged(rows, scores, packing=packing, caller=caller))

        tap = Tap(target, check, required=True)
        return tap

    def _judge(self, result: CommandResult) -> CommandResult:
        __tracebackhide__ = True
        self._count += 1
        page = ""
        if self._pages is not None:
            from actordbg.document.page import write_named

            path = self._pages / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', self._name)}-{self._count}.html"
            self._pages.mkdir(parents=True, exist_ok=True)
            write_named(path, result.to_html().encode())
            page = f"\n\npage: {path}"
        if not result.ok:
            pytest.fail(f"{result}{page}", pytrace=False)
        return result


@pytest.fixture
def actordbg_check(request: pytest.FixtureRequest) -> Iterator[Checker]:
    """Check a model in memory, a store or a trainer's calls (`Checker`)."""
    folder = request.config.getoption("--actordbg-html")
    yield Checker(Path(folder) if folder else None, request.node.name)
