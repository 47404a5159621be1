"""Whether a model can be had is found out before anything starts, from a hub that answers, refuses, hangs or is not there."""

import http.server
import json
import os
import socket
import sys
import threading

import pytest
from amounts import first_or_all
from roots import run_program, write_json

from actordbg.actor import hub_model
from actordbg.base.errors import EnvironmentProblem
from actordbg.config.replay_config import ReplayConfig
from actordbg.dumps.create import create_dumps
from actordbg.replay.launch import child_environment

constants = pytest.importorskip("huggingface_hub.constants", reason="a desk without the training environment has no hub to ask")
CONFIG = {"model_type": "llama", "num_attention_heads": 4}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model, `org/there`; `org/slow` never answers, `org/drops` does so a byte at a time."""

    asked: list[tuple[str, str]] = []
    over = threading.Event()

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if self.path.startswith("/org/"):  # the client has requests of its own besides
            self.asked.append((self.command, self.path))
        body = json.dumps(CONFIG).encode()
        if self.path.startswith("/org/slow/"):
            self.over.wait(20)
        elif self.path.startswith("/org/drops/"):
            for byte in b"HTTP/1.1 200 OK\r\n" * 9:
                if self.over.wait(0.05):
                    break
                self.wfile.write(bytes([byte]))
        elif self.path.startswith("/org/there/"):
            self.send_response(200)
            for name, value in (("ETag", '"1"'), ("X-Repo-Commit", COMMIT), ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")
        else:
            self.send_error(404)

    def log_message(self, *_):
        """Nothing is printed."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The address of a hub on this machine, which huggingface_hub asks, and an empty cache."""
    _Hub.asked, _Hub.over = [], threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    hub_model._find_by_name.cache_clear()
    yield address
    _Hub.over.set()
    server.shutdown()
    server.server_close()


def _refusal(model):
    with pytest.raises(EnvironmentProblem) as caught:
        hub_model.find_model(model)
    assert caught.value.hint
    return caught.value


def test_a_model_of_the_hub_is_asked_for_once_and_its_config_is_read(hub):
    assert hub_model.find_model("org/there") == CONFIG
    asked = len(_Hub.asked)
    assert hub_model.find_model("org/there") == CONFIG and len(_Hub.asked) == asked
    assert {path for _, path in _Hub.asked} == {"/org/there/resolve/main/config.json"}


def test_a_hub_that_says_no_or_nothing_or_too_little_is_named(hub, monkeypatch):
    assert f"the hub at {hub} did not serve model org/absent" in _refusal("org/absent").message
    assert [method for method, _ in _Hub.asked] == ["HEAD"], "one request, not repeated"
    monkeypatch.setattr(hub_model, "TIMEOUT_S", 0.2)
    assert f"cannot reach the hub at {hub}" in _refusal("org/slow").message
    monkeypatch.setattr(hub_model, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(hub_model, "DEADLINE_S", 0.3)
    assert "no answer within 0.3 s" in _refusal("org/drops").message


def test_offline_only_a_cached_model_can_be_had(hub, monkeypatch, tmp_path):
    hub_model.find_model("org/there")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_model._find_by_name.cache_clear()
    assert "HF_HUB_OFFLINE" in _refusal("org/there").message, "a config.json alone is not a model"
    (tmp_path / "hub" / "models--org--there" / "snapshots" / COMMIT / "model.safetensors").write_bytes(b"weights")
    asked = len(_Hub.asked)
    assert hub_model.find_model("org/there") == CONFIG and len(_Hub.asked) == asked, "the hub is not asked for a cached model"


def test_only_a_model_that_is_whole_in_the_cache_is_loaded_without_the_hub(hub, monkeypatch, tmp_path):
    """Without a network each of a worker's questions for a cached model's files took half a minute."""
    hub_model.find_model("org/there")
    folder = tmp_path / "hub" / "models--org--there" / "snapshots" / COMMIT
    assert child_environment(ReplayConfig(), {})["HF_HUB_ETAG_TIMEOUT"] == "3", "seconds, unless the user says otherwise"
    assert child_environment(ReplayConfig(), {"HF_HUB_ETAG_TIMEOUT": "30"})["HF_HUB_ETAG_TIMEOUT"] == "30"
    config, shards = ReplayConfig(model="org/there"), ("model-1.safetensors", "model-2.safetensors")
    write_json(folder / "model.safetensors.index.json", {"weight_map": dict(zip("ab", shards, strict=True))})
    (folder / shards[0]).write_bytes(b"weights")
    assert "HF_HUB_OFFLINE" not in child_environment(config, {}), "a shard is missing"
    (folder / shards[1]).write_bytes(b"weights")
    assert child_environment(config, {})["HF_HUB_OFFLINE"] == "1"
    assert child_environment(config, {"HF_HUB_OFFLINE": "0"})["HF_HUB_OFFLINE"] == "0"
    write_json(folder / "config.json", CONFIG | {"auto_map": {"AutoModel": "org/code--modeling.Model"}})
    assert "HF_HUB_OFFLINE" not in child_environment(config, {}), "its code lies in another repository"
    (folder / "tokenizer.json").write_text("{}")
    assert hub_model.cached_file("org/there", "tokenizer.json") == folder / "tokenizer.json"
    assert hub_model.cached_file("org/absent", "tokenizer.json") is hub_model.cached_file("no name", "x") is None


def test_a_name_that_is_no_model_is_refused_without_asking(hub, tmp_path):
    assert hub_model.find_model("tiny") is None
    folder, config = str(tmp_path), tmp_path / "config.json"
    for name, text, why in (
        ("/nope", "", "there is no model in /nope"), ("no name", "", "is neither a model folder nor a hub name"), (folder, "", "holds no model"),
        (folder, "[" * 100_000, "is not a JSON object"), (folder, "[]", "is not a JSON object"),
    ):  # fmt: skip
        if text:
            config.write_text(text)
        assert why in _refusal(name).message
    config.unlink()
    os.mkfifo(config)
    assert "holds no model" in _refusal(folder).message and _Hub.asked == []


@pytest.mark.slow
@pytest.mark.parametrize("command", first_or_all([["matrix"], ["actor", "init"], ["replay"]], 2), ids=" ".join)
def test_without_a_hub_every_command_that_builds_an_actor_says_so_and_starts_nothing(store, tmp_path, command):
    create_dumps(store, 1, 1, 8)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused
        environment = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{closed.getsockname()[1]}", "HF_HOME": str(tmp_path / "hf")}
        environment |= {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
        program = [sys.executable, "-m", "actordbg", "--store", str(store.root), *command, "--model", "org/name"]
        done = run_program(program, env=environment, timeout=60)
    assert done.returncode == 4 and "error[environment]: offline: cannot reach the hub at http://127.0.0.1:" in done.stderr, (
        done.stderr
    )
    assert "Retry" not in done.stderr and not store.replays.exists() and not store.matrices.exists()
