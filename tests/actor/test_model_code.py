"""A model's own code runs only with --trust-remote-code: typed on this command line, and taken from nowhere else."""

import json
import os
import sys
from pathlib import Path

import codedmodel
import pytest
from commandline import tried
from replaycases import publish
from roots import environment, run_program, write_json

from actordbg.actor import model_code
from actordbg.actor.endpoint_session import EndpointSession
from actordbg.actor.model_code import own_code, require_consent
from actordbg.actor.models import ensure_tiny
from actordbg.actor.session import ActorSession
from actordbg.actor.truth_session import TruthSession
from actordbg.base.errors import ActordbgError, NewerFormat, UnsafeInput, UsageError
from actordbg.config import consent
from actordbg.config.replay_config import ReplayConfig
from actordbg.records.journal import SPEC, rank_journal, read_events
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.work_order import WorkOrder
from actordbg.steps.step_sessions import ReferenceSession

COMMANDS = (["replay"], ["replay", "--truth"], ["replay", "--dry-run"], ["noise"], ["matrix"], ["actor", "init"])


@pytest.fixture(autouse=True)
def nothing_agreed(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    consent.withhold()


def folder_of(path, config=None, **files):
    """A model's folder with a config.json, and further JSON files by their names without the suffix."""
    path.mkdir(parents=True)
    for name, content in {"config": config or {"model_type": "llama"}, **files}.items():
        write_json(path / f"{name}.json", content)
    return path


def refused(*arguments, store):
    result = tried(store, *arguments)
    assert isinstance(result.exception, ActordbgError), (arguments, result.output, result.exception)
    return result.exception


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_that_loads_a_model_refuses_one_with_code_before_anything_starts(command, store):
    publish(store, 1)
    model = folder_of(store.root.parent / "model", {"text_config": {"parts": [{"auto_map": codedmodel.AUTO_MAP}]}})
    error = refused(*command, "--model", str(model), store=store)
    assert (type(error), error.exit_code) == (UnsafeInput, 3)
    assert f"{model}/config.json says auto_map" in error.message and "modeling_own.OwnModel" in error.message
    assert "--trust-remote-code" in error.hint and not store.replays.exists() and not store.matrices.exists()


def test_nothing_but_the_command_line_consents(store, monkeypatch):
    publish(store, 1)
    model = folder_of(store.root.parent / "model", {"auto_map": codedmodel.AUTO_MAP})
    Path("actordbg.toml").write_text(f'[replay]\nmodel = "{model}"\n')
    assert isinstance(refused("replay", store=store), UnsafeInput), "the model may be named in a file, consent may not"
    Path("actordbg.toml").write_text(f'[replay]\nmodel = "{model}"\ntrust-remote-code = true\n')
    assert isinstance(refused("replay", store=store), UsageError)
    Path("actordbg.toml").unlink()
    with monkeypatch.context() as patch:
        patch.setenv("ACTORDBG_REPLAY_TRUST_REMOTE_CODE", "1")
        assert isinstance(refused("replay", "--model", str(model), store=store), UsageError)
    with pytest.raises(NewerFormat):
        ReplayConfig.from_dict(ReplayConfig().to_dict() | {"trust_remote_code": True})
    assert isinstance(refused("replay", "--model", str(model), store=store), UnsafeInput)


def test_what_would_run_is_found_wherever_a_model_may_say_it(tmp_path):
    mapped = {"auto_map": {"AutoModelForCausalLM": "other/repository--modeling.Model"}}
    base = folder_of(tmp_path / "base", mapped)
    adapter = folder_of(tmp_path / "adapter", adapter_config={"base_model_name_or_path": str(base)})
    assert next(own_code(str(adapter))).startswith(f"{base}/config.json says auto_map")
    imports = folder_of(tmp_path / "megatron", adapter_config={"megatron_config": {"a": 1}, "megatron_core": "os"})
    assert next(own_code(str(imports))).endswith("adapter_config.json says megatron_core: os")
    generates = folder_of(tmp_path / "generates")
    (generates / "custom_generate").mkdir()
    (generates / "custom_generate" / "generate.py").write_text("")
    assert next(own_code(str(generates))).endswith("custom_generate/generate.py")
    circle = folder_of(tmp_path / "circle", adapter_config={"base_model_name_or_path": str(tmp_path / "circle")})
    plain = folder_of(tmp_path / "plain", {"auto_map": {}}, tokenizer_config=mapped)  # no command loads a tokenizer
    assert not list(own_code(str(circle))) and not list(own_code(str(plain)))


def test_a_name_of_the_hub_is_refused_by_its_configuration(store, monkeypatch):
    publish(store, 1)
    monkeypatch.setattr(model_code, "find_model", lambda name: {"auto_map": codedmodel.AUTO_MAP})
    error = refused("replay", "--model", "some/model", store=store)
    assert isinstance(error, UnsafeInput) and "config.json of some/model on the hub says auto_map" in error.message


def test_consent_of_a_worker_is_for_one_model(tmp_path):
    mine, other = (str(folder_of(tmp_path / name, {"auto_map": codedmodel.AUTO_MAP})) for name in ("mine", "other"))
    consent.give(mine)
    assert consent.arguments(mine) == ["--trust-remote-code", mine] and consent.arguments(other) == []
    require_consent(mine)
    with pytest.raises(UnsafeInput):
        require_consent(other)
    consent.give()
    assert consent.arguments("tiny") == [], "the tiny model has no code to agree to"


@pytest.mark.parametrize("kind", [ActorSession, TruthSession, EndpointSession, ReferenceSession], ids=lambda kind: kind.__name__)
def test_every_kind_of_session_refuses_code_before_it_loads(kind, tmp_path):
    """In the worker, where a specification and a model's files may have changed since the command looked at them."""
    model = folder_of(tmp_path / "model", {"auto_map": codedmodel.AUTO_MAP})
    more = [None] if kind is ReferenceSession else []
    with pytest.raises(UnsafeInput):
        kind(ReplayConfig(model=str(model)), None, tmp_path / "models", *more)


def test_a_folder_that_pretends_to_be_the_tiny_model_is_refused(store):
    folder = ensure_tiny(store.models)
    require_consent("tiny", store.models)
    (folder / "modeling_own.py").write_text("")
    for spoil in (lambda: None, lambda: (folder / "config.json").write_text('{"auto_map": {"AutoConfig": "modeling_own.C"}}')):
        spoil()
        with pytest.raises(UnsafeInput, match="not the tiny model"):
            require_consent("tiny", store.models)


def test_a_specification_names_no_other_place(store):
    spec = ReplaySpec("20250619T052608-000001", "2025-06-19T05:26:08.430740Z", ReplayConfig(), tuple(publish(store, 1)))
    for change in ({"replay_id": "../../elsewhere"}, {"replay_id": "/etc"}):
        with pytest.raises(ActordbgError, match="is not an id of a replay"):
            ReplaySpec.from_json(json.dumps(json.loads(spec.to_json()) | change))
    data = json.loads(spec.to_json())
    data["inputs"][0]["dump_id"] = "../../../home/me/file"
    with pytest.raises(ActordbgError, match="is not an id of a replay or a dump"):
        ReplaySpec.from_json(json.dumps(data))


def run(*command, **more):
    return run_program([sys.executable, *command], env=environment(**more))


@pytest.mark.forked
def test_with_consent_it_runs_in_the_actor_and_in_the_truth(store, tmp_path):
    model, mark = codedmodel.make(tmp_path / "model")
    publish(store, 1, batch=1, length=16)
    command = ("-m", "actordbg", "--store", str(store.root))
    for backend in ([], ["--truth"]):
        done = run(
            *command, "replay", "--model", str(model), *backend, "--trust-remote-code", HF_MODULES_CACHE=str(tmp_path / "hub")
        )
        assert done.returncode == 0, done.stderr
        assert mark.read_text().count("\n") == 1, backend
        mark.unlink()
    spec = max(store.replays.glob(f"*/{SPEC}"))
    assert ReplaySpec.from_file(spec).command.endswith("--truth  # needs --trust-remote-code: the model brings code of its own")
    done = run(*command, "replay", "--resume", "last")
    assert (done.returncode, mark.exists()) == (3, False), "--resume does not inherit consent"


@pytest.mark.forked
def test_a_worker_runs_no_code_but_the_consented_models_whatever_its_files_say(store, tmp_path):
    """The specification is exchanged between the command's look at it and the worker's; so is a model's configuration."""
    model, mark = codedmodel.make(tmp_path / "model")
    spec = ReplaySpec("20250619T052608-000001", "2025-06-19T05:26:08.430740Z", ReplayConfig(model=str(model)), ())
    folder = store.replays / spec.replay_id
    folder.mkdir(parents=True)
    (folder / SPEC).write_text(spec.to_json())
    order = WorkOrder(1, [0], [])
    (folder / "work-0-1.json").write_text(order.to_json())
    given = ["--work", str(folder / "work-0-1.json"), "--supervisor", str(os.getpid()), "--trust-remote-code", "/another"]
    run("-m", "actordbg.replay.worker", *given, RANK="0")
    broken = [event for event in read_events(rank_journal(folder, 0)) if event["event"] == "broken"]
    assert broken and broken[0]["error_class"].endswith("UnsafeInput") and not mark.exists()
    done = run("-c", _WALL, str(model), FORKED_PROGRAM="-c")
    assert done.returncode == 0 and done.stdout.split()[-3:] == ["actor:refused", "truth:refused", "generate:refused"], (
        done.stderr
    )
    assert not mark.exists()


_WALL = """
import sys
from pathlib import Path
import torch
import transformers.generation.utils
from actordbg.actor.model_code import guard
from actordbg.actor import truth_model
from actordbg.base.errors import UnsafeInput
from actordbg.config.choices import Choices
from actordbg.trainers.trainer import TRAINER
path = sys.argv[1]
def refused(name, call):
    try:
        call()
    except UnsafeInput:
        print(f"{name}:refused", flush=True)
TRAINER.prepare_process()
guard(path)
choices = Choices(path, "fp32", "eager", False, 1.0, False)
refused("actor", lambda: TRAINER.build_actor(path, choices))
refused("truth", lambda: truth_model.load(path, weights="float32", dtype=torch.float32, device=torch.device("cpu"), trust=True))
(Path(path) / "custom_generate").mkdir()
(Path(path) / "custom_generate" / "generate.py").write_text(f"open({str(path) + '.mark'!r}, 'w')\\ndef generate(): ...\\n")
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8).save_pretrained(path)
refused("generate", lambda: LlamaForCausalLM.from_pretrained(path, trust_remote_code=True, ignore_mismatched_sizes=True))
"""
