"""Transfers of weights are hashed on both sides: a real PPO with a faulty engine, and transfers made up for the rest."""

import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
import torch
from commandline import invoke
from planted_syncs import CHANGED, LOST
from roots import ROOT
from torch import nn

import actordbg
from actordbg.base.errors import CorruptDump, NothingToDo
from actordbg.base.imports import is_there
from actordbg.demo.demo_training import build_assets, start_job
from actordbg.formats.weight_hashes import ParameterHash, WeightRecord, sha256_of
from actordbg.formats.weight_syncs import EngineAnswer, SentParameter, WeightSync
from actordbg.recorded.turns import turns_answer
from actordbg.recorded.weight_ladder import weights_answer
from actordbg.records.run_files import read_sync
from actordbg.replay.launch import free_port
from actordbg.trainers.openrlhf import told, weight_syncs
from actordbg.trainers.trainer import TRAINER

A, B = "a" * 64, "b" * 64


def parameter(had=A, arrived=A, loaded=1, recorded=True):
    answers = (EngineAnswer(recorded, arrived, loaded),) if had else ()
    return SentParameter("bfloat16", (2, 3), had, had, answers)


def synced(store, *transfers, apart=1, engines=1):
    for number, parameters in enumerate(transfers):
        when = f"2026-01-01T00:00:0{number}.000000Z"
        sync = WeightSync("r", 0, "h", 1, number, apart * number, when, 0.1, engines, parameters)
        path = store.root / "syncs" / "r" / sync.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sync.to_json())
        assert read_sync(path) == sync
    return store


HEALTHY = {f"layers.{number}.q_proj": parameter() for number in range(4)}


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"layers.1.q_proj": parameter(arrived=None, loaded=None)}, "1 of 4 parameters never arrived: layers.1.q_proj (step 1)"),
        ({"layers.3.q_proj": parameter(arrived=B)}, "layers.3.q_proj arrived other than sent (step 1)"),
        ({"lora_A": parameter(had=None)}, "1 of 5 parameters was never sent: lora_A (step 1)"),
        ({"lora_A": parameter(loaded=0)}, "the engine did not know 1 of 5 parameters: lora_A (step 1)"),
        ({"layers.2.q_proj": replace(parameter(), sent=B)}, "layers.2.q_proj left the trainer other than it had it"),
        ({name: parameter(arrived=None, loaded=None) for name in HEALTHY}, "the engine has not changed since step 0, and the trainer is at step 1"),
    ],
)  # fmt: skip
def test_each_rung_that_a_parameter_misses_is_named_with_its_step(store, changes, says):
    answer = weights_answer(synced(store, HEALTHY, {**HEALTHY, **changes}), "r")
    assert not answer.ok and answer.verdict == "WRONG" and says in answer.sentence
    assert answer["wrong"] == ["trainer" if "never sent" in says or "left the trainer" in says else "rollout"]


def test_parameters_that_do_not_move_are_no_fault_and_unrecorded_engines_are_not_checked(store):
    answer = weights_answer(synced(store, HEALTHY, HEALTHY))
    assert answer.ok and answer["moved"] == [0, 0] and "each arrived as sent" in answer.sentence
    blind = {name: parameter(arrived=None, loaded=None, recorded=False) for name in HEALTHY}
    answer = weights_answer(synced(store, blind, blind))
    assert not answer.ok and answer.verdict == "NOT CHECKED"


def answer_beside(store, hashed):
    path = store.root / "weights" / "r" / hashed.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(hashed.to_json())
    return weights_answer(store)


@pytest.mark.parametrize(
    "transfers, step, second, word",
    [(2, 11, 5, "RIGHT"), (2, 16, 5, "RIGHT"), (2, 17, 5, "WRONG"), (2, 17, 0, "RIGHT"), (1, 11, 5, "RIGHT")],
)
def test_a_transfer_is_missed_only_after_more_steps_than_ever_between_two(store, transfers, step, second, word):
    synced(store, *[HEALTHY] * transfers, apart=8)
    hashed = WeightRecord("r", 0, "h", 1, "i", 7, step, f"2026-01-01T00:00:0{second}.000000Z", 0.1, 1)
    answer = answer_beside(store, hashed)
    assert answer.verdict == word and answer.get("wrong", []) == ["trainer"] * (word == "WRONG")
    assert any("transfer is due" in left for left in answer["not_checked"]) == (transfers == 1)


@pytest.mark.parametrize("sha256, pid, word", [(A, 1, "RIGHT"), (B, 1, "WRONG"), (B, 2, "RIGHT"), (None, 1, "RIGHT")])
def test_what_is_sent_is_what_the_policy_computed_with_at_this_step(store, sha256, pid, word):
    synced(store, HEALTHY, HEALTHY)
    own = {"layers.2.q_proj": ParameterHash("bfloat16", (2, 3), sha256=sha256)}
    hashed = WeightRecord("r", 0, "h", pid, "i", 7, 1, "2026-01-01T00:00:05.000000Z", 0.1, 1, own)
    answer = answer_beside(store, hashed)
    assert answer.verdict == word and ("layers.2.q_proj left the trainer" in answer.sentence) == (word == "WRONG")


def test_a_hash_that_failed_and_an_engine_without_an_answer_are_not_checked(store):
    failed = replace(parameter(), had=None, sent=B)
    answer = weights_answer(synced(store, HEALTHY | {"layers.1.q_proj": failed}))
    assert answer.ok and "3 parameters" in answer.sentence and "1 of 4 parameters, which could not be hashed" in answer.sentence
    assert weights_answer(synced(store, dict.fromkeys(HEALTHY, failed))).verdict == "NOT CHECKED"
    half = replace(parameter(), answers=(EngineAnswer(True, A, 1), EngineAnswer()))
    assert "1 of 2 answers were recorded" in weights_answer(synced(store, dict.fromkeys(HEALTHY, half), engines=2)).sentence


def test_a_damaged_transfer_costs_one_transfer(store):
    synced(store, HEALTHY, HEALTHY)
    path = max((store.root / "syncs" / "r").iterdir())
    path.write_text("{")
    answer = weights_answer(store)
    assert answer["transfers"] == 1 and "1 transfer, whose files are damaged" in answer.sentence


def test_a_folder_that_is_not_named_as_a_run_is_no_run(store):
    folder = synced(store, HEALTHY, HEALTHY).root / "syncs" / "r"
    folder.rename(folder.with_name("r$(id)"))
    with pytest.raises(NothingToDo):
        weights_answer(store)


def test_without_transfers_it_says_how_to_record_them_and_a_broken_file_is_refused(store):
    with pytest.raises(NothingToDo) as raised:
        invoke(store, "weights")
    assert "--hash-weights" in raised.value.hint
    synced(store, HEALTHY)
    (path,) = (store.root / "syncs" / "r").iterdir()
    path.write_text(path.read_text().replace('"number":0', '"number":"x"'))
    with pytest.raises(CorruptDump):
        read_sync(path)
    assert "damaged-weights" in invoke(store, "store fsck").output


class FakeEngine:
    """An engine's handle: `update_weight.remote` loads, as a worker with OpenRLHF's extension does."""

    def __init__(self, worker):
        self.update_weight = SimpleNamespace(remote=lambda name, **more: [worker.update_weight(name, **more)])


class WorkerWrap:
    """A worker whose model fuses nothing and knows no adapters."""

    def __init__(self, source):
        known = {name for name, _ in source.named_parameters() if "lora" not in name}
        self.source, self.known = source, known
        self.model_runner = SimpleNamespace(model=nn.Module())
        self.model_runner.model.load_weights = lambda pairs: {name for name, _ in pairs} & known

    def update_weight(self, name, dtype, shape, empty_cache=False):
        self.model_runner.model.load_weights([(name, dict(self.source.named_parameters())[name].data)])


def trainer_of(send):
    class ActorPPOTrainer:
        """The part of OpenRLHF's trainer that sends weights."""

        def __init__(self, module):
            self.actor = SimpleNamespace(model=SimpleNamespace(module=module, global_steps=3))
            self.vllm_engines = [FakeEngine(WorkerWrap(module))]

        def broadcast_to_vllm(self):
            for name, each in self.actor.model.module.named_parameters():
                if send(name):
                    for engine in self.vllm_engines:
                        engine.update_weight.remote(name, dtype=each.dtype, shape=each.shape)
            return "done"

    return ActorPPOTrainer


@pytest.fixture
def attach(store, monkeypatch):
    """Records the transfers of such a trainer as run "r"."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda references: references))
    monkeypatch.setenv("ACTORDBG_STORE", str(store.root))
    monkeypatch.setenv("ACTORDBG_RUN", "r")
    monkeypatch.setattr(WorkerWrap, "update_weight", WorkerWrap.update_weight)
    return lambda kind: weight_syncs.attach(SimpleNamespace(ActorPPOTrainer=kind, WorkerWrap=WorkerWrap))  # type: ignore[arg-type]


@pytest.mark.parametrize("send, says", [(lambda name: "lora" not in name, "never sent: lora_A"),
                                            (lambda name: True, "did not know 1 of 2 parameters: lora_A")])  # fmt: skip
def test_an_adapter_that_is_not_sent_or_not_known_is_named(store, attach, send, says):
    module = nn.Module()
    module.weight, module.lora_A = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    kind = trainer_of(send)
    attach(kind)
    trainer = kind(module)
    engines = trainer.vllm_engines
    assert trainer.broadcast_to_vllm() == "done" and trainer.vllm_engines is engines
    answer = actordbg.open(store.root).weights("r")
    assert says in answer.sentence and "step 3" in answer.sentence


def test_what_cannot_be_hashed_is_told_once_and_is_not_called_different(store, attach, monkeypatch, capsys):
    def sha256(tensor):
        if tensor.dim() < 3:
            raise RuntimeError("planted")
        return A

    class Trainer(trainer_of(lambda name: True)):  # type: ignore[misc]
        _model_update_group = SimpleNamespace(broadcast=lambda tensor: None)

        def broadcast_to_vllm(self):
            super().broadcast_to_vllm()
            self._model_update_group.broadcast(torch.ones(1, 2, 3))  # of the last parameter, in another shape

    module = nn.Module()
    module.weight, module.bias = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    monkeypatch.setattr(weight_syncs, "sha256_of", sha256)
    monkeypatch.setattr(told, "_told", set())
    attach(Trainer)
    Trainer(module).broadcast_to_vllm()
    (path,) = (store.root / "syncs" / "r").iterdir()
    for each in read_sync(path).parameters.values():
        assert (each.had, each.sent) == (None, None) and each.answers == (EngineAnswer(True, None, 1),)
    assert capsys.readouterr().err.count("not hashed") == 1


def test_only_the_first_rank_of_an_engine_hashes(monkeypatch):
    monkeypatch.setattr(weight_syncs, "sha256_of", lambda tensor: A)
    monkeypatch.setattr(WorkerWrap, "update_weight", WorkerWrap.update_weight)
    weight_syncs.attach(SimpleNamespace(WorkerWrap=WorkerWrap))  # type: ignore[arg-type]
    answers = []
    for rank in range(2):
        worker = WorkerWrap(nn.Linear(2, 2))
        worker.rank = rank
        answers.append(worker.update_weight("bias", dtype=None, shape=(2,)))
    assert answers == [{"sha256": A, "loaded": 1}, None]


@pytest.mark.skipif(not is_there("openrlhf"), reason="needs openrlhf")
@pytest.mark.parametrize("lost", [False, True])
def test_openrlhfs_own_worker_returns_what_its_loader_got(monkeypatch, lost):
    """Its `update_weight` as installed; only the device and the transport are a CPU's."""
    (root,) = importlib.util.find_spec("openrlhf").submodule_search_locations or []  # type: ignore[union-attr]
    spec = importlib.util.spec_from_file_location("worker_wrap", f"{root}/trainer/ray/vllm_worker_wrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weight_syncs.attach(module)
    made = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **more: made(*shape, **more))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    group = SimpleNamespace(broadcast=lambda tensor, src, stream: tensor.fill_(3.0))

    class Model(nn.Module):
        def load_weights(self, weights):
            return set() if lost else {name for name, _ in weights}

    worker = module.WorkerWrap()
    worker.model_config, worker.model_runner = SimpleNamespace(dtype=torch.float32), SimpleNamespace(model=Model())
    worker._model_update_with_ray, worker._model_update_group = False, group
    answer = worker.update_weight("w", torch.float32, (2, 3))
    assert answer == {"sha256": sha256_of(torch.full((2, 3), 3.0)), "loaded": int(not lost)}
    assert "load_weights" not in vars(worker.model_runner.model)


@pytest.mark.forked
@pytest.mark.skipif(not (is_there("openrlhf") and is_there("ray")), reason="needs openrlhf and ray")
def test_a_real_ppo_whose_engine_goes_wrong_step_by_step(store, tmp_path, monkeypatch):
    monkeypatch.setenv("FORKED_PROGRAM", f"{ray.__path__[0]}/_private/workers/default_worker.py")
    program = TRAINER.programs["ppo"]
    model, data = build_assets(tmp_path, 16)
    typed = [*program.command(model, data, tmp_path / "checkpoint", free_port()), "--algo.kl.init_coef", "0"]  # no reference
    recording = ["run", "--run", "ppo", "--hash-weights", "--turns", "--max-dumps", "1", "--"]
    job = [sys.executable, "-m", "actordbg", "--store", str(store.root), *recording]
    command = [*job, *(word.replace("actordbg.trainers.openrlhf.demo_programs", "planted_syncs") for word in typed)]
    with start_job(program, command, tmp_path, tmp_path / "log", ROOT / "tests" / "support") as running:
        running.wait(timeout=280)
    answer = weights_answer(store, "ppo")
    syncs = sorted((read_sync(path) for path in (store.root / "syncs" / "ppo").glob("*.json")), key=lambda sync: sync.number)
    assert len(syncs) == 4 and not any("not recorded" in left for left in answer["not_checked"])
    of, steps = len(syncs[0].parameters), [sync.step for sync in syncs]
    assert [finding["said"] for finding in answer["findings"]] == [
        f"the engine has not changed since step {steps[2]}, and the trainer is at step {steps[-1]}",
        f"1 of {of} parameters never arrived: {LOST} (step {steps[1]})",
        f"{CHANGED} arrived other than sent (step {steps[2]})",
    ]
    assert max(answer["moved"][1:]) > 0
    turns = turns_answer(store, run="ppo")
    assert not turns["findings"] and turns["trajectories"] == turns["turns"] == 32, turns.sentence
