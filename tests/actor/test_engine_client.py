"""The client of an inference server: both protocols, what it refuses, and what it never sends or follows."""

import contextlib
import itertools
import math
import socket
import threading

import pytest
from scoring_server import ScoringServer, serving

from actordbg.actor import engine_client
from actordbg.actor.engine_client import TOKEN, EngineClient, checked_url
from actordbg.base.errors import ActordbgError, EnvironmentProblem, Unsupported, UsageError

ROWS = [[5, 6, 7, 8], [9, 10, 11]]


def by_ids(ids):
    return [-token / 10 - before / 1000 for before, token in itertools.pairwise(ids)]


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
def test_scores_are_those_of_the_next_ids_in_both_protocols(kind):
    with serving(ScoringServer(by_ids, kind)) as url:
        client = EngineClient(url, None)
        assert client.connect()["server"] == f"{kind} 0.0.stand-in" and client.model == "toy"
        assert client.score(ROWS) == [by_ids(ids) for ids in ROWS] and client.reset()
        if kind == "SGLang":
            (later,) = client.score([ROWS[0]], 1)
            assert math.isnan(later[0]) and later[1:] == by_ids(ROWS[0])[1:]
        else:
            assert client.score_next(ROWS[0]) == by_ids(ROWS[0])[-1]


def test_a_server_without_a_reset_says_so():
    with serving(ScoringServer(by_ids, resettable=False)) as url:
        client = EngineClient(url, "toy")
        client.connect()
        assert client.reset() is False


@pytest.mark.parametrize(
    "fault, kind, error, says",
    [
        ("no-logprobs", "vLLM", Unsupported, "returned no prompt_logprobs"),
        ("cut", "vLLM", Unsupported, "scored 3 tokens of 4"),
        ("400", "vLLM", Unsupported, "answered 400: prompt_logprobs are disabled"),
        ("400", "SGLang", Unsupported, "answered 400"),
    ],
)
def test_a_server_that_cannot_score_is_refused_with_what_it_said(fault, kind, error, says):
    with serving(ScoringServer(by_ids, kind, broken=fault)) as url:
        client = EngineClient(url, "toy")
        client.connect()
        with pytest.raises(error, match=says) as raised:
            client.score([ROWS[0]])
        assert raised.value.hint


ODD = {
    ("vLLM", "/v1/models"): [[], None, {}, {"data": ["x"]}, {"data": 1}],
    ("vLLM", "/v1/completions"): [
        *([], None, {"choices": 3}, {"choices": [None]}, {"choices": ["x"]}),
        *({"choices": [{"index": 0, "prompt_logprobs": [None, entry]}]} for entry in (None, [], 3, {"8": {"logprob": -1.0}}, {"6": None})),
    ],
    ("SGLang", "/generate"): [
        *(None, 7, [None], [{"meta_info": None}]),
        *({"meta_info": {"input_token_logprobs": [entry, entry]}} for entry in (None, 3, [])),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind, path", ODD)
def test_an_answer_of_another_shape_is_refused(kind, path):
    class Odd(ScoringServer):
        odd: object = None

        def answer(self, asked, body):
            return (200, self.odd) if asked == path else super().answer(asked, body)

    server = Odd(by_ids, kind)
    with serving(server) as url:
        for server.odd in ODD[kind, path]:
            client = EngineClient(url, "toy")
            with pytest.raises(Unsupported) as raised:
                client.connect()
                client.score([[5, 6]])
            assert raised.value.hint


@pytest.mark.parametrize("raw", [b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", b""])
def test_broken_http_is_a_server_that_does_not_answer(raw):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def once():
            with listening.accept()[0] as connection:
                connection.recv(2**16)
                connection.sendall(raw)

        thread = threading.Thread(target=once, daemon=True)
        thread.start()
        with pytest.raises(EnvironmentProblem, match="does not answer"):
            EngineClient(f"http://127.0.0.1:{listening.getsockname()[1]}", "toy", 5.0).connect()
        thread.join(5)


@pytest.mark.parametrize(
    "begins", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", b"HTTP/1.1 401 x\r\nContent-Length: 99\r\n\r\n"]
)
def test_a_server_that_drips_is_left_after_the_time_of_a_whole_answer(begins):
    """In its headers, its body or its refusal: each byte comes within the time of one read."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip():
            with listening.accept()[0] as connection, contextlib.suppress(OSError):
                connection.recv(2**16)
                connection.sendall(begins)
                while not over.wait(0.05):
                    connection.sendall(b" ")

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with pytest.raises(EnvironmentProblem, match="does not answer"):
            EngineClient(f"http://127.0.0.1:{listening.getsockname()[1]}", "toy", 0.5).connect()
        assert thread.is_alive()
        over.set()
        thread.join(5)


@pytest.mark.parametrize("status", [200, 400, 401, 500])
def test_what_a_server_says_of_the_token_is_not_repeated(status, monkeypatch):
    class Echoing(ScoringServer):
        def answer(self, asked, body):
            said = {"error": {"message": "Bearer s3cret-token" * 9}, "version": "s3cret-token"}
            return (status if asked == "/version" or status != 200 else 200), said if asked == "/version" or status != 200 else {
                "data": [{"id": "s3cret-token"}]
            }

    monkeypatch.setenv(TOKEN, "s3cret-token")
    with serving(Echoing(by_ids, token="s3cret-token")) as url:
        try:
            said = str(EngineClient(url, None).connect())
        except ActordbgError as error:
            said = error.message + error.hint
    assert "s3cret" not in said


def test_an_answer_has_limits(monkeypatch):
    class Large(ScoringServer):
        def answer(self, asked, body):
            return (200, {"choices": [[]] * 999}) if asked == "/v1/completions" else super().answer(asked, body)

    monkeypatch.setattr(engine_client, "_MOST_VALUES", 99)
    with serving(Large(by_ids)) as url, pytest.raises(Unsupported, match="did not answer JSON"):
        client = EngineClient(url, "toy")
        client.connect()
        client.score(ROWS)


def test_a_busy_server_keeps_its_cache():
    """SGLang answers /flush_cache with 400 while requests run."""
    with serving(ScoringServer(by_ids, "SGLang", resettable=False, broken="400")) as url:
        client = EngineClient(url, "toy")
        client.connect()
        assert client.reset() is False


@pytest.mark.parametrize("token, is_sent", [("s3cret\n", True), ("s3\ncret", False), ("s3crét", False)])
def test_a_token_is_sent_without_its_line_end_or_not_at_all(token, is_sent, monkeypatch):
    monkeypatch.setenv(TOKEN, token)
    with serving(ScoringServer(by_ids, token="s3cret")) as url:
        if is_sent:
            assert EngineClient(url, "toy").connect()
            return
        with pytest.raises(EnvironmentProblem, match=TOKEN) as raised:
            EngineClient(url, "toy").connect()
        assert "s3" not in raised.value.message


def test_who_does_not_answer_serves_another_model_or_wants_a_token(monkeypatch):
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
                                 "https://host/v1?key=pw", "http://[::1", "https://me:pw", "http://me:pw@[::1", "https//me:x@pw@host", "me:pw", "https://host/é@pw",
                                 "http://localhost:99999", "https://host/é"])  # fmt: skip
def test_an_address_that_would_leak_is_refused(url):
    with pytest.raises(UsageError) as raised:
        checked_url(url)
    assert "pw" not in raised.value.message + raised.value.hint


def test_an_address_may_end_in_v1():
    assert checked_url("http://localhost:8000/v1/") == "http://localhost:8000" and checked_url("https://host") == "https://host"
