"""A client of a running inference server: log-probs of given token ids, from vLLM or SGLang, by the standard library's HTTP.

vLLM: POST /v1/completions, with `prompt` as lists of ids and `prompt_logprobs` 0, answers for each row null, and then for each
token a dict by its id: `[null, {"42": {"logprob": -1.5, "rank": 3, "decoded_token": "x"}}]`. SGLang: POST /generate, with
`input_ids`, `return_logprob` and `logprob_start_len`, answers `input_token_logprobs`: `[[null, 7, null], [-1.5, 42, null]]`.

Both are log-softmax of the model's raw logits: the sampling temperature does not change them, and vLLM's `logprobs_mode` concerns
sampled tokens.

Only `https://`, or `http://` to this machine. `ACTORDBG_ENDPOINT_TOKEN` is sent as a bearer token, and is never logged or stored.
Redirects are not followed.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from actordbg.actor.hub_model import answered_within
from actordbg.base.errors import EnvironmentProblem, Unsupported, UsageError
from actordbg.formats.record_reading import strict_json

TOKEN = "ACTORDBG_ENDPOINT_TOKEN"
VLLM, SGLANG = "vLLM", "SGLang"
NO_LOG_PROB = -9999.0
"""What vLLM sends for minus infinity."""
_MOST_BYTES, _MOST_VALUES = 2**27, 2**22
"""Limits of an answer: its bytes, and the values in it. vLLM's have six for each token."""
_LEAST_TOKEN = 7
"""A token of up to so many characters protects nothing, and may be part of a number."""


def checked_url(url: str) -> str:
    """Return a server's address without a slash at its end. UsageError for http to another machine, and for credentials."""
    hint = "use http://127.0.0.1:PORT, or https://HOST"
    try:
        parts = urlsplit(url if url.isascii() else "")
        _ = parts.port  # ValueError unless it is a port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("--url is not the address of a server", hint=hint)  # unread, it may hold a password anywhere
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError("--url has credentials or a query, which would be stored", hint=f"put a token into {TOKEN}")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        hint = "use https, or a tunnel to this machine: ssh -L 8000:localhost:8000 HOST"
        raise UsageError(f"--url http://{parts.netloc} would send tokens over the network unencrypted", hint=hint)
    return url.rstrip("/").removesuffix("/v1")


def is_loopback(host: str) -> bool:
    """Check whether a host name or an address is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse to follow: the token would go to another address."""


class EngineClient:
    """A server. Each method raises EnvironmentProblem if it does not answer, Unsupported if it refuses. Call `connect` first."""

    def __init__(self, url: str, served_model: str | None, timeout_s: float = 600.0) -> None:
        self.url, self.model, self._timeout_s = checked_url(url), served_model, timeout_s
        proxies = [ProxyHandler({})] if is_loopback(urlsplit(self.url).hostname or "") else []
        self._opener = build_opener(_NoRedirects(), *proxies)
        self.kind = ""

    def connect(self) -> dict[str, Any]:
        """Find out what the server is, and which model it serves. Returns facts for a replay's `resolved`.

        Raises UsageError if it does not serve the model.
        """
        listed = self._json("/v1/models")
        with _expecting("list of models"):
            served = [str(each["id"]) for each in listed["data"]]
        if self.model is None and len(served) == 1:
            self.model = served[0]
        if self.model not in served:
            shown = ", ".join(served[:5]) or "none"
            what = f"does not serve {self.model}" if self.model else "serves more than one model, or none"
            raise UsageError(f"{self.url} {what}", hint=f"--served-model: one of {shown}")
        for self.kind, path in ((VLLM, "/version"), (SGLANG, "/get_server_info"), (SGLANG, "/server_info")):
            if info := self._try(path):
                break
        else:
            hint = "start vLLM's or SGLang's own server"
            raise Unsupported(f"{self.url} says neither its version (/version) nor /get_server_info", hint=hint)
        facts = {"server": f"{self.kind} {info.get('version', '?')}", "served_model": self.model}
        return facts | ({"server_dtype": str(info["dtype"])} if info.get("dtype") else {})

    def score(self, rows: Sequence[Sequence[int]], start: int = 0) -> list[list[float]]:
        """Return for each row of ids [n] the log-probs of ids[1:], [n-1], all rows in one request.

        start: SGLang computes from this position on, and may read what is before it from its cache; earlier log-probs are NaN.
        """
        if self.kind == VLLM:
            answer = self._completion(rows, prompt_logprobs=0)
            with _expecting("prompt_logprobs"):
                choices = sorted(answer["choices"], key=lambda choice: choice["index"])
                values = [_of_vllm(choice["prompt_logprobs"], ids) for choice, ids in zip(choices, rows, strict=False)]
        else:
            asked = {"input_ids": [list(ids) for ids in rows], "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}}
            answer = self._json("/generate", {**asked, "return_logprob": True, "logprob_start_len": start})
            items: list[Any] = answer if isinstance(answer, list) else [answer]
            with _expecting("input_token_logprobs"):
                values = [_of_sglang(each["meta_info"]["input_token_logprobs"], ids, start)
                          for each, ids in zip(items, rows, strict=False)]  # fmt: skip
        if len(values) != len(rows):
            raise Unsupported(f"the server answered {len(values)} of {len(rows)} rows", hint="see the server's log")
        return values

    def score_next(self, ids: Sequence[int]) -> float | None:
        """Return the log-prob of the last id as vLLM samples it, behind a prefix that it may read from its cache.

        None if the server gives processed log-probs, in which the forced token has them all.
        """
        answer = self._completion([ids[:-1]], logprobs=0, allowed_token_ids=[ids[-1]])
        with _expecting("log-prob of a sampled token"):
            value = float(answer["choices"][0]["logprobs"]["token_logprobs"][0])
        return None if value == 0.0 else value

    def reset(self) -> bool:
        """Empty the prefix cache; False if the server does not offer that (vLLM: VLLM_SERVER_DEV_MODE=1), or is busy (SGLang)."""
        path = "/reset_prefix_cache" if self.kind == VLLM else "/flush_cache"
        try:
            self._open(path, b"")
        except _Refusal as error:
            if error.code in (404, 405, 501) or (error.code == 400 and self.kind == SGLANG):
                return False
            raise self._refused(path, error) from None
        return True

    def _completion(self, rows: Sequence[Sequence[int]], **asked: Any) -> dict[str, Any]:
        prompt = {"prompt": [list(ids) for ids in rows], "max_tokens": 1, "temperature": 1.0, "add_special_tokens": False}
        answer: dict[str, Any] = self._json("/v1/completions", {"model": self.model, **prompt, **asked})
        return answer

    def _try(self, path: str) -> Any:
        """Return the JSON object of an address that a server may not have; {} if it has not."""
        try:
            answer = strict_json(self._open(path), json.loads)
        except (_Refusal, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _json(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            answer = self._open(path, None if body is None else json.dumps(body).encode())
            return strict_json(answer, json.loads, _MOST_VALUES)
        except _Refusal as error:
            raise self._refused(path, error) from None
        except ValueError:
            raise Unsupported(f"{self.url}{path} did not answer JSON", hint="--url: vLLM's or SGLang's server") from None

    def _open(self, path: str, body: bytes | None = None) -> bytes:
        token = os.environ.get(TOKEN, "").strip()
        if not (token.isascii() and token.isprintable()):
            raise EnvironmentProblem(f"{TOKEN} has characters that no header may have", hint="set it to the token alone")
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        request = Request(self.url + path, body, headers)

        def ask() -> bytes:
            try:
                with self._opener.open(request, timeout=self._timeout_s) as response:
                    return _without(token, response.read(_MOST_BYTES + 1))
            except HTTPError as error:
                raise _Refusal(error.code, _without(token, error.read(2**16))) from None

        try:
            data = answered_within(self._timeout_s, ask)
        except (URLError, OSError, HTTPException) as error:
            said = str(getattr(error, "reason", None) or repr(error))
            why = _without(token, said.encode(errors="replace")).decode()
            hint = "start the server, check --url, or raise --timeout"
            raise EnvironmentProblem(f"{self.url} does not answer: {why}", hint=hint) from None
        if len(data) > _MOST_BYTES:
            raise Unsupported(f"{self.url}{path} answered more than {_MOST_BYTES:,} bytes", hint="replay shorter inputs")
        return data

    def _refused(self, path: str, error: _Refusal) -> Exception:
        """Return the error of a status that is not 200, with what the server said, unless it is about the token."""
        what = f"{self.url}{path} answered {error.code}"
        if error.code in (401, 403):
            return EnvironmentProblem(what, hint=f"put the server's token into {TOKEN}")
        with suppress(ValueError):
            said = strict_json(error.said, json.loads)
            for key in ("error", "message"):
                said = said.get(key, said) if isinstance(said, dict) else said
            what += f": {str(said)[:300]}"
        if error.code >= 500:
            return EnvironmentProblem(what, hint="see the server's log")
        return Unsupported(what, hint="the server must return log-probs of the prompt, for inputs of this length")


class _Refusal(Exception):
    """An answer with another status than 200. said: its body."""

    def __init__(self, code: int, said: bytes) -> None:
        self.code, self.said = code, said


def _without(token: str, said: bytes) -> bytes:
    """Return what a server said without the token that it was sent: it may say it anywhere, and facts about it are stored."""
    return said.replace(token.encode(), b"TOKEN") if len(token) > _LEAST_TOKEN else said


@contextmanager
def _expecting(what: str) -> Iterator[None]:
    """Raise Unsupported if the block cannot read an answer because it has another shape than the protocol says."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError):
        hint = "see the server's log; --url: a vLLM or SGLang server that returns log-probs of the prompt"
        raise Unsupported(f"the server returned no {what} as documented", hint=hint) from None


def _of_vllm(given: Any, ids: Sequence[int]) -> list[float]:
    if len(given) != len(ids):
        raise Unsupported(f"the server scored {len(given)} tokens of {len(ids)}: it added or cut some", hint=_COUNTS)
    return [_number(entry[str(token)]["logprob"]) for entry, token in zip(given[1:], ids[1:], strict=True)]


def _of_sglang(given: Any, ids: Sequence[int], start: int) -> list[float]:
    if len(given) != len(ids) - start or [entry[1] for entry in given] != list(ids[start:]):
        raise Unsupported(f"the server scored {len(given) + start} tokens of {len(ids)}, or others", hint=_COUNTS)
    return [math.nan] * start + [_number(entry[0]) for entry in given[1:]]


def _number(value: Any) -> float:
    """Return a log-prob; minus infinity for vLLM's stand-in of it, NaN for none."""
    return math.nan if not isinstance(value, int | float) else -math.inf if value == NO_LOG_PROB else float(value)


_COUNTS = "start the server without truncation of prompts, and with a context that is long enough"
