"""A small inference server for tests: vLLM's or SGLang's protocol for log-probs of a prompt, a transformers model behind it.

It stands in for neither: it shows that the client speaks the protocol as documented. `fault` plants what engines get wrong.
"""

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Scores = Callable[[list[int]], list[float]]
"""ids [n] -> log-probs of ids[1:], [n-1]."""


def scores_of(model, temperature=1.0):
    """Log-probs of a transformers model, each row alone."""
    import torch

    def scores(ids):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float() / temperature
        return logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    return scores


class ScoringServer:
    """The server's state. kind: "vLLM" or "SGLang". stale: what the cache has for rows seen before; None: the same.

    broken: "no-logprobs", "cut", "nan" or "400". resettable: whether the prefix cache can be reset. token: the bearer token that
    it wants.
    """

    def __init__(self, scores, kind = "vLLM", *, stale = None, stale_from = 0, broken = "",
                 resettable = True, token = ""):  # fmt: skip
        self.scores, self.kind, self.stale, self.stale_from, self.broken = scores, kind, stale, stale_from, broken
        self.resettable, self.token = resettable, token
        self.cached = set()
        self.paths = []

    def of_row(self, ids):
        values = self.scores(ids)
        if self.stale is not None and tuple(ids) in self.cached:
            values[self.stale_from :] = self.stale(ids)[self.stale_from :]
        self.cached.add(tuple(ids))
        return [float("nan")] * len(values) if self.broken == "nan" else values

    def answer(self, path, body):
        self.paths.append(path)
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "toy", "object": "model", "max_model_len": 512}]}
        if path == "/version" and self.kind == "vLLM":
            return 200, {"version": "0.0.stand-in"}
        if path == "/get_server_info" and self.kind == "SGLang":
            return 200, {"version": "0.0.stand-in", "dtype": "bfloat16"}
        if path in ("/reset_prefix_cache", "/flush_cache") and self.resettable:
            self.cached.clear()
            return 200, {}
        if self.broken == "400":
            return 400, {"error": {"message": "prompt_logprobs are disabled", "code": 400}}
        if path == "/v1/completions" and self.kind == "vLLM":
            return 200, {"choices": [self.completion(index, ids, body) for index, ids in enumerate(body["prompt"])]}
        if path == "/generate" and self.kind == "SGLang":
            return 200, [self.generated(ids, body) for ids in body["input_ids"]]
        return 404, {"detail": "Not Found"}

    def completion(self, index, ids, body):
        if "allowed_token_ids" in body:
            value = self.of_row([*ids, *body["allowed_token_ids"]])[-1]
            return {"index": index, "logprobs": {"token_logprobs": [value]}, "prompt_logprobs": None}
        entries = [{str(token): {"logprob": value, "rank": 1, "decoded_token": "x"}}
                   for token, value in zip(ids[1:], self.of_row(ids), strict=True)]  # fmt: skip
        given = None if self.broken == "no-logprobs" else [None, *entries][: -1 if self.broken == "cut" else None]
        return {"index": index, "prompt_logprobs": given, "logprobs": None}

    def generated(self, ids, body):
        start = body["logprob_start_len"]
        scored = self.of_row(ids)[start:]
        return {"meta_info": {"input_token_logprobs": [[None, ids[start], None], *([value, token, None] for value, token in zip(scored, ids[start + 1 :], strict=True))]}}  # fmt: skip


@contextmanager
def serving(server):
    """Serve on a free port of loopback; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def _respond(self, body):
            allowed = not server.token or self.headers.get("Authorization") == f"Bearer {server.token}"
            status, answer = server.answer(self.path, body) if allowed else (401, {"error": "Unauthorized"})
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self._respond(None)

        def do_POST(self):
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._respond(json.loads(raw) if raw else None)

        def log_message(self, *_): ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join(10)
