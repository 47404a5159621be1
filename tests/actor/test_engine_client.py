"""The client of an inference server: both protocols, what it refuses, and what it never sends or follows."""

from __future__ import annotations

import itertools
import math

import pytest
from scoring_server import ScoringServer, serving

from actordbg.actor.engine_client import TOKEN, EngineClient, checked_url
from actordbg.base.errors import ActordbgError, EnvironmentProblem, Unsupported, UsageError

ROWS = [[5, 6, 7, 8], [9, 10, 11]]


def by_ids(ids: list[int]) -> list[float]:
    return [-token / 10 - before / 1000 for before, token in itertools.pairwise(ids)]


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
def test_scores_are_those_of_the_next_ids_in_both_protocols(kind: str) -> None:
    with serving(ScoringServer(by_ids, kind)) as url:
        client = EngineClient(url, None)
        assert client.connect()["server"] == f"{kind} 0.0.stand-in" and client.model == "toy"
        assert client.score(ROWS) == [by_ids(ids) for ids in ROWS] and client.reset()
        if client.reads_cache:
            (later,) = client.score([ROWS[0]], 1)
            assert math.isnan(later[0]) and later[1:] == by_ids(ROWS[0])[1:]
        else:
            assert client.score_next(ROWS[0]) == by_ids(ROWS[0])[-1]


def test_a_server_without_a_reset_says_so() -> None:
    with serving(ScoringServer(by_ids, resettable=False)) as url:
        client = EngineClient(url, "toy")
        client.connect()
        assert client.reset() is False


@pytest.mark.parametrize(
    ("fault", "kind", "error", "says"),
    [
        ("no-logprobs", "vLLM", Unsupported, "returned no prompt_logprobs"),
        ("cut", "vLLM", Unsupported, "scored 3 tokens of 4"),
        ("400", "vLLM", Unsupported, "answered 400: prompt_logprobs are disabled"),
        ("400", "SGLang", Unsupported, "answered 400"),
    ],
)
def test_a_server_that_cannot_score_is_refused_with_what_it_said(
    fault: str, kind: str, error: type[ActordbgError], says: str
) -> None:
    with serving(ScoringServer(by_ids, kind, broken=fault)) as url:
        client = EngineClient(url, "toy")
        client.connect()
        with pytest.raises(error, match=says) as raised:
            client.score([ROWS[0]])
        assert raised.value.hint


def test_who_does_not_answer_serves_another_model_or_wants_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ScoringServer(by_ids, token="s3cret")) as url:
        with pytest.raises(EnvironmentProblem, match="401") as raised:
            EngineClient(url, "toy").connect()
        assert TOKEN in raised.value.hint
        monkeypatch.setenv(TOKEN, "s3cret")
        with pytest.raises(UsageError, match="does not serve other") as wrong:
            EngineClient(url, "other").connect()
        assert "toy" in wrong.value.hint and "s3cret" not in str(EngineClient(url, "toy").connect())
    with pytest.raises(EnvironmentProblem, match="does not answer"):
        EngineClient(url, "toy", 5.0).connect()


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://example.com", "https://me:pw@host", "ftp://localhost", "x",
                                 "https://host/v1?key=pw"])  # fmt: skip
def test_an_address_that_would_leak_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        checked_url(url)
    assert "pw" not in raised.value.message + raised.value.hint


def test_an_address_may_end_in_v1() -> None:
    assert checked_url("http://localhost:8000/v1/") == "http://localhost:8000" and checked_url("https://host") == "https://host"
