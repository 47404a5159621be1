"""A trainer that is made up, recorded by the adapter that the how-to writes, held against the truth."""

import importlib
import io
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adaptercases import IDS, MASK, dumps_of, record_here, small_model, truth_of
from commandline import invoke, run_here
from roots import FORKED, ROOT, json_of, read_json, run_program, write_json

from actordbg.actor.session import ActorSession
from actordbg.base.errors import EnvironmentProblem, Unsupported
from actordbg.capture import hook
from actordbg.config.replay_config import ReplayConfig
from actordbg.dumps.checking import check
from actordbg.dumps.create import create_dumps
from actordbg.records.replay_record import ReplayInput
from actordbg.records.run_files import MET_WEIGHTS, RECORDED_WEIGHTS, read_weights, weights_of
from actordbg.replay.recorded_weights import statement
from actordbg.store import payload
from actordbg.trainers import captured_call, find_adapter, fitting, recorded_model
from actordbg.trainers.openrlhf.told import _told, told
from actordbg.trainers.seam import Rows, Seam, Unreadable

PAGE = ROOT / "docs" / "how-to" / "other-trainers.md"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The how-to's files, importable; its trainer's module."""
    for name, text in re.findall(r"```python file=(\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(recorded_model, "_told", set())
    monkeypatch.setenv("ACTORDBG_DISABLE", "")  # a truth in this process sets it
    yield importlib.import_module("my_loop")
    for name in ("my_loop", "my_adapter"):
        sys.modules.pop(name, None)


def adapter_with(**changes):
    """The how-to's adapter, with another seam."""
    adapter = importlib.import_module("my_adapter").MyAdapter
    adapter.seams = (replace(adapter.seams[0], **changes),)
    return adapter


@pytest.fixture
def recording(store):
    record_here(store)
    return store


def attach(loop, store):
    """Record the calls of the how-to's trainer."""
    return recorded_model.attach(loop, "my_adapter:MyAdapter", str(store.root))


class Body(torch.nn.Module):
    """A model that computes next to nothing."""

    def forward(self, **given):
        return type("Output", (), {"logits": torch.zeros(*given["input_ids"].shape, 16)})()


def test_an_adapter_written_from_the_how_to_gives_dumps_whose_golden_is_the_truth(written, recording, tmp_path):
    model = small_model(tmp_path / "model").eval()
    loop = written.Loop(model, 0.7)
    plain = loop.score(IDS, MASK, 3)
    assert [attach(written, recording), attach(written, recording)] == [["my_loop:Loop.score"]] * 2
    loop.steps = 4
    assert torch.equal(loop.score(IDS, MASK, keep=3), plain)
    (dump,) = dumps_of(recording)
    record = dump.record
    assert (record.batch_size, record.seq_len, record.tokens, record.action_len) == (2, 6, 9, 3)
    assert (record.step, record.temperature, record.training, record.replayable) == (4, 0.7, False, True)
    assert record.actor["actor_class"] == "mine.Loop.score" and record.actor["model_class"] == "LlamaForCausalLM"
    told = ("my-trainer", "mine", "my_loop:Loop.score")
    assert tuple(record.actor[name] for name in ("trainer", "adapter", "function")) == told
    assert torch.equal(dump.inputs["sequences"], IDS) and torch.equal(dump.inputs["action_mask"], MASK[:, -3:])
    golden = dump.outputs["action_log_probs"]
    assert torch.equal(golden, plain)
    truth = truth_of(tmp_path / "model", dump)
    assert (truth - golden).abs().max() < 1e-5 and truth.abs().max() > 0.5


def test_a_complaint_that_nobody_can_hear_stops_no_training(written, recording, monkeypatch):
    """Standard error may be a log on a full disk, or closed, or absent as in a daemon."""
    adapter_with(rows=lambda call: {}["rows"])
    attach(written, recording)
    loop = written.Loop(Body(), 1.0)
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        for heard in (full, None):
            monkeypatch.setattr(recorded_model, "_told", set())
            monkeypatch.setattr(sys, "stderr", heard)
            assert loop.score(IDS, MASK, 3).shape[1] == 3
            with told("an agent's turns"):
                raise ValueError("unreadable")
            _told.clear()


def test_what_the_adapter_raises_harms_no_call_is_told_once_and_counts_as_dropped(written, recording, capsys):
    read = importlib.import_module("my_adapter").MyAdapter.seams[0].rows

    def rows(call):
        if call["keep"] == 1:
            raise Unreadable("one token is too few")
        if call["keep"] == 4:
            return Rows(call["self"].model, call["ids"], offsets=[0, 6, 12])  # type: ignore[arg-type]
        return None if call["keep"] == 2 else read(call)

    adapter_with(rows=rows, result=lambda output: {}["scores"])
    attach(written, recording)
    loop = written.Loop(Body(), 1.0)
    assert [loop.score(IDS, MASK, keep).shape[1] for keep in (1, 1, 4, 2, 3)] == [1, 1, 4, 2, 3]
    with pytest.raises(AttributeError, match="cumsum"):
        loop.score(IDS, None, 2)
    told = capsys.readouterr().err
    assert told.count("a call was not recorded: Unreadable: one token is too few") == 1
    assert told.count("its result was not read: KeyError") == 1 and told.count("'list' object has no attribute") == 1
    lost, kept = hook._slots[str(recording.root)].recorder.writer.watched()
    assert (lost.calls, lost.dropped, kept.calls) == (3, {"error": 3}, 1)
    assert (lost.last_error or "").startswith("my_loop:Loop.score: AttributeError: 'list'")
    (dump,) = dumps_of(recording)
    assert dump.record.action_len == 3 and not dump.outputs and dump.record.replayable


def test_a_recorded_function_inside_of_a_recorded_one_counts_once_and_a_copied_model_stays_its_own(written, recording):
    import copy

    made = Seam("my_loop:prepare", lambda call: Rows(call["self"], call["input_ids"]), makes_model="model", needs=("model",))

    def prepare(model):
        model.forward = type(model).forward.__get__(model)

    written.prepare = prepare  # type: ignore[attr-defined]
    importlib.import_module("my_adapter").MyAdapter.seams += (made,)
    attach(written, recording)
    model = Body()
    written.prepare(model)  # type: ignore[attr-defined]
    written.Loop(model, 1.0).score(IDS, MASK, 3)  # the model's own forward is inside
    model(input_ids=IDS)
    assert copy.deepcopy(model).forward.__self__ is not model
    assert [dump.record.actor["actor_class"] for dump in dumps_of(recording)] == ["mine.Loop.score", "mine.prepare"]


def test_rows_are_read_only_while_recording_is_on(written, store):
    read, rows = [], importlib.import_module("my_adapter").MyAdapter.seams[0].rows
    adapter_with(rows=lambda call: (read.append(call["keep"]), rows(call))[1])
    attach(written, store)
    loop = written.Loop(Body(), 1.0)
    assert [tuple(loop.score(IDS, MASK, keep).shape) for keep in (1, 2, 3)] == [(2, 1), (2, 2), (2, 3)]
    assert read == [1], "the first call starts the thread that looks at the switch"


def test_another_release_is_left_alone_and_the_difference_named(written, recording, capsys):
    Path(str(written.__file__)).write_text("class Loop:\n    def score(self, tokens, mask, keep):\n        return 7\n")
    other = importlib.reload(written)
    adapter = importlib.import_module("my_adapter").MyAdapter
    adapter.package = "pytest"  # some distribution that is installed
    before = other.Loop.score
    assert attach(other, recording) == []
    differs = "my_loop:Loop.score: it takes no ids; it takes tokens, mask, keep"
    assert other.Loop.score is before and differs in capsys.readouterr().err
    found = fitting.fit(adapter)
    assert not found.fits and found.differs == (differs,) and found.answer == "no"
    adapter.seams = tuple(
        Seam(where, print) for where in ("my_loop:Loop.gone", "my_loop:No.score", "my_loop.deep:f", "no_such:f")
    )
    assert len(fitting.fit(adapter).differs) == 4
    adapter.seams = (Seam("my_loop:Loop.score", print, needs=("tokens",)), *adapter.seams)
    assert fitting.fit(adapter).answer == "1 of 5 functions"
    adapter.package, fit = "no-such-package", adapter.seams[:1]
    adapter.seams = (*adapter.seams[-1:], Seam("transformers.trainer:Trainer._get_grad_norm", print))
    assert fitting.fit(adapter).answer == "not installed"
    adapter.seams = fit
    assert fitting.fit(adapter).fits, "code beside the script has no package"


@pytest.mark.parametrize("hashes, dtype", [(True, None), (False, None), (False, "bf16"), (True, "bf16")])
def test_a_replay_names_the_parameter_that_is_not_the_recorded_one(written, recording, tmp_path, hashes, dtype):
    """By hashes, or by samples alone: by those also where the replay's dtype is narrower."""
    model = small_model(tmp_path / "model").eval()
    attach(written, recording)
    if hashes:
        hook.hash_weights(str(recording.root))
    loop = written.Loop(model, 1.0)
    for step in (0, 0, 1, 1):
        loop.steps = step
        loop.score(IDS, MASK, 3)
        with torch.no_grad():
            model.lm_head.weight[3, 0] += 1 - step
    records = [dump.record for dump in dumps_of(recording)]
    files = sorted((recording.root / "weights" / "r").iterdir())
    assert [read_weights(path).call_index for path in files] == [0, 2], "one for each step"
    paths = sorted(map(str, recording.iter_dumps()))
    assert [weights_of(recording.root, record) for record in records] == [files[0], files[0], files[1], files[1]]
    inputs = [ReplayInput(one.dump_id, path, 0, 2, 6, 9) for one, path in zip(records, paths, strict=True)]
    session = ActorSession(
        ReplayConfig(model=str(tmp_path / "model"), through="rows", dtype=dtype), records[0], tmp_path / "cache"
    )
    said = statement(recording.root, inputs, session)[RECORDED_WEIGHTS]
    differs = "1 of 21 parameters differ from those recorded at step 1: lm_head.weight"
    assert said == f"{differs}; they are those that were recorded at step 0 (21 parameters)"
    record = read_json(files[1])
    record["parameters"]["lm_head.weight"]["sample"] = "0000c07f"  # NaN
    write_json(files[1], record)
    facts = statement(recording.root, inputs, session)
    assert facts[RECORDED_WEIGHTS].endswith("; the run's own values were not finite: lm_head.weight"), "a fault of the run"
    assert facts[MET_WEIGHTS]["other"] == {} and facts[MET_WEIGHTS]["same"] == [0, 1], "and not another step's weights"
    files[0].write_text("{}")
    said = statement(recording.root, inputs, session)[RECORDED_WEIGHTS]
    assert said.startswith("not checked: ") and files[0].name in said
    found = [one.place for one in check(recording, deep=False) if "weights" in one.place.parts]
    assert found == [files[0]], "the other one is known"
    session.close()


@pytest.mark.forked
def test_what_other_weights_computed_is_not_held_against_a_checkpoint(written, recording, tmp_path):
    """Three healthy steps, and the checkpoint that the first one met."""
    model, folder = small_model(tmp_path / "model").eval(), str(tmp_path / "model")
    attach(written, recording)
    hook.hash_weights(str(recording.root))
    loop = written.Loop(model, 1.0)
    for loop.steps in range(3):
        loop.score(IDS, MASK, 3)
        with torch.no_grad():
            model.lm_head.weight.add_(0.1 * torch.randn(16, 32))
    dumps_of(recording)

    def check(*words):
        done = run_here("--store", recording.root, "check", "--recorded", "--json", "--model", folder, *words)
        return json_of(done) | {"code": done.exit_code}

    answer = check("--junit", str(tmp_path / "junit.xml"))
    assert (answer["verdict"], answer["code"]) == ("RIGHT", 0)
    left = 'the outputs of the run in 2 of 3 dumps: its weights were not this model\'s (--where "step=0" excludes them)'
    assert answer["sentence"].startswith("RIGHT: 3 of 3 dumps match the truth to fp32 rounding; held against the clean model")
    assert f"not checked: {left}; the laws of 1 dump" in answer["sentence"]
    assert (tmp_path / "junit.xml").read_text().count('classname="actordbg.golden"') == 3
    answer = check("--where", "step=2")
    assert (answer["verdict"], answer["code"]) == ("NOT CHECKED", 1)
    assert "its weights were not this model's (pass that step's checkpoint as --model)" in answer["sentence"]


ODD = """
from actordbg.trainers.seam import Seam
class NoTuple:
    name = package = "odd"; tried = (); seams = Seam("my_loop:f", print)
class Empty(NoTuple): seams = ()
class Names(NoTuple): seams = ("my_loop:f",)
"""


@pytest.mark.parametrize(
    "named",
    ["nobody", "no_such_module:Adapter", "json:JSONDecoder", "ends:Adapter", "odd:NoTuple", "odd:Empty", "odd:Names"],
)  # fmt: skip
def test_what_is_no_adapter_is_refused_before_the_job_starts(named, tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(ODD)
    (tmp_path / "ends.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("odd", None)
    with pytest.raises(Unsupported) as refused:
        find_adapter.carried_form([named])
    assert refused.value.hint and named.partition(":")[0] in refused.value.message


def test_a_replay_runs_the_code_of_one_trainer(written, recording):
    attach(written, recording)
    written.Loop(Body(), 1.0).score(IDS, MASK, 3)
    dumps_of(recording)
    create_dumps(recording, 1, batch_size=1, seq_len=8)
    files = [f"--input-file={path}" for path in sorted(recording.iter_dumps())]
    for words in (["replay"], ["replay", *files], ["check"], ["noise"], ["matrix", "--through", "rows,trainer"]):
        refused = run_here("--store", recording.root, *words).exception
        assert isinstance(refused, Unsupported) and "(1 without an adapter, 1 by adapter mine)" in refused.message
        assert '"adapter is null" or "adapter=\'mine\'"), or pass --through rows' in str(refused.hint)
    for given in (["--through", "rows"], ["--where", "adapter is null"], ["--where", "adapter='mine'"]):
        assert invoke(recording, "replay --dry-run", *given).exit_code == 0


def test_a_trainer_that_is_not_installed_is_named_with_the_way_without_it():
    for where in ("no_such_trainer.loop:score", "json:nothing"):  # an input's failure shows the message alone
        with pytest.raises(EnvironmentProblem, match=r"cannot be imported: .*--through rows"):
            captured_call.function(where)


@pytest.mark.forked
def test_a_trainer_is_recorded_by_its_adapter_and_replayed_on_the_rows_without_openrlhf(written, store, tmp_path):
    small_model(tmp_path / "model")
    (tmp_path / "train.py").write_text(
        "import my_loop, torch\n"
        "from transformers import LlamaForCausalLM\n"
        "loop = my_loop.Loop(LlamaForCausalLM.from_pretrained('model').eval(), 0.7)\n"
        "ids = torch.arange(10).view(2, 5)\n"
        "for keep in (2, 3, 4):\n"
        "    loop.score(ids, torch.ones_like(ids), keep)\n"
    )
    blocked = tmp_path / "blocked" / "openrlhf"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('it is not installed')\n")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (blocked.parent, tmp_path, FORKED, ROOT))),
        "ACTORDBG_DISABLE": "",
    }

    def run(*given):
        command = [sys.executable, "-m", "actordbg", "--store", str(store.root), *given]
        return run_program(command, cwd=tmp_path, env=environment)

    announced = tmp_path / "my_adapter-1.0.dist-info"
    announced.mkdir()
    (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: my-adapter\nVersion: 1.0\n")
    (announced / "entry_points.txt").write_text("[actordbg.adapters]\nmine = my_adapter:MyAdapter\n")
    adapter = ["--adapter", "mine", "--with-outputs", "--hash-weights"]
    done = run("run", "--run", "a", *adapter, "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    assert "3 calls = 3 captured + 0 dropped" in done.stderr
    assert {payload.load(path).record.batch_size for path in store.iter_dumps()} == {2}
    done = run("replay", "--all", "--model", "model", "--laws", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout and "laws of 1 of 3" in done.stdout and "on the rows" in done.stdout
    assert "the weights are those that were recorded at step 0" in done.stdout
    done = run("replay", "--all", "--model", "model", "--through", "trainer")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "through the trainer" in done.stdout and "log-probs: 3 inputs, 18 tokens; all equal" in done.stdout
