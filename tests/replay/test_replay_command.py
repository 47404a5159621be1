"""`actordbg replay` as typed: what it selects, refuses and answers. Nothing here starts a worker except the last test."""

import sqlite3
import sys
from functools import partial

import commandline
import pytest
from casefiles import cases_of, json_cases
from commandline import tried
from comparecases import write_replay
from replaycallers import callers
from replaycases import old_pickle, publish
from roots import environment, json_of, run_program, write_json
from supervised import spec_of

from actordbg.api.desk import Desk
from actordbg.api.reports import replay_answer
from actordbg.base.errors import (
    ActordbgError,
    CorruptDump,
    LaunchProblem,
    NothingToDo,
    Unsupported,
    UsageError,
)
from actordbg.base.units import new_replay_id
from actordbg.cli import output
from actordbg.config.choices import Facts
from actordbg.formats.store_files import make_folder
from actordbg.records.journal import SPEC, TENSORS
from actordbg.replay import supervise
from actordbg.replay.launch import launch
from actordbg.replay.supervise import load_spec

callers()


def typed(store, *arguments):
    return tried(store, *arguments)


def invoke(store, line="", *words):
    """`actordbg replay`; its error is raised."""
    return commandline.invoke(store, f"replay {line}", *words)


def planned(store, line="", *words):
    answer = json_of(invoke(store, f"--dry-run --json {line}", *words))
    return answer


def written_spec(store):
    """A replay of three inputs that has not begun."""
    spec = spec_of(publish(store, 3))
    make_folder(store.replays / spec.replay_id)
    (store.replays / spec.replay_id / SPEC).write_text(spec.to_json())
    return spec


def test_a_replay_that_is_given_up_answers_with_what_is_done_before_its_error(store, monkeypatch):
    """The second worker dies on start-up, three times."""
    spec = written_spec(store)
    script = {spec.inputs[1].dump_id: "kill", "open again": "kill"}
    write_json(store.replays / spec.replay_id / "script.json", script)
    monkeypatch.setattr(supervise, "run_replay", partial(supervise.run_replay, launcher=partial(launch, module="fake_worker")))
    result = typed(store, "replay", "--resume", spec.replay_id, "--json")
    answer = json_of(result)
    assert (answer["status"], answer["passed"], answer["crashed"], answer["not_run"]) == ("failed", 1, 1, 1)
    assert isinstance(result.exception, LaunchProblem) and answer["restarts"] == 3
    plan = typed(store, "replay", "--resume", spec.replay_id, "--dry-run")
    assert plan.exit_code == 0 and "3 inputs" in plan.stdout and "; 2 are done" in plan.stdout
    result = typed(store, "replay", "--resume", spec.replay_id)
    assert isinstance(result.exception, LaunchProblem)
    assert "result: 1 passed, 1 crashed, 1 not run of 3 (the replay is failed)" in result.stdout
    with sqlite3.connect(store.catalog_path) as catalog:
        assert catalog.execute("SELECT status FROM result ORDER BY status").fetchall() == [("crashed",), ("passed",)]
    stopped = typed(store, "report").stdout.partition("Why it stopped")[2].partition("Failures")[0]
    assert "3 attempts in a row ended without a result" in stopped and "    | --- launcher.log" in stopped


def test_an_interruption_that_left_no_word_is_one(store, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    spec = written_spec(store)
    monkeypatch.setattr(supervise, "run_replay", interrupted)
    result = typed(store, "replay", "--resume", spec.replay_id)
    assert result.exit_code == 130 and result.stdout.startswith("NOT CHECKED (TOY MODEL): none of 3 dumps has a result; ")


def test_an_answer_says_what_was_folded_and_that_no_input_was_steady_and_needs_no_kept_outputs(store):
    name = write_replay(
        store, new_replay_id(), publish(store, 3), change=lambda index, made: None,
        result=lambda index: {"worker": index, "forward_s": 0.133, "logprob_count": 3, "folded_ids": index != 1},
    )  # fmt: skip
    (store.replays / name / TENSORS / "gone").symlink_to("nowhere")
    answer = replay_answer(store, load_spec(store, name))
    assert (answer["folded_ids"], answer["kept_bytes"]) == (2, 0)
    said = " ".join(str(answer).split())
    assert "token ids of 2 inputs were wrapped (modulo) into the model's vocabulary" in said
    assert "forward while warming up (TOY MODEL) 0.133 s" in said


def test_nothing_selected_is_said_with_what_there_is_and_has_an_exit_code_of_its_own(store):
    with pytest.raises(NothingToDo, match="the store has no dumps") as none:
        invoke(store)
    assert "dump import" in none.value.hint
    publish(store, 2, length=64)
    reason = "no dump matches seq_len>4096; seq_len > 4096 selects none of 2: seq_len is 64 to 64"
    with pytest.raises(NothingToDo, match="nothing to replay: no dump matches") as caught:
        invoke(store, "--where seq_len>4096")
    assert reason in caught.value.message and "--allow-empty" in caught.value.hint
    allowed = invoke(store, "--where seq_len>4096 --allow-empty")
    assert (allowed.exit_code, allowed.stdout) == (0, "") and reason in allowed.stderr
    empty = json_of(typed(store, "replay", "--where", "seq_len>4096", "--json", "--allow-empty"))
    assert reason in empty["sentence"] and empty["selected"] == 0
    assert list(store.replays.glob("*")) == []


def test_a_plan_says_what_each_rank_gets(store):
    publish(store, 3)
    shares = planned(store, "--nproc 2 --align shuffle")["shares"]
    assert [(share["ranks"], len(share["dumps"])) for share in shares] == [([0], 2), ([1], 1)]
    same = invoke(store, "--nproc 2 --align same --dry-run")
    assert "each on all ranks" in same.stdout and "ranks 0, 1: 3 inputs, seq_len 96 x 3" in same.stdout
    with pytest.raises(UsageError, match="no call is complete for 2 processes"):
        invoke(store, "--nproc 2 --align rank --dry-run")
    alone = invoke(store, "--align rank --dry-run")
    assert "aligns nothing" in alone.stderr


BACKENDS = cases_of("recorded_backend")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.usefixtures("old_cpu")
def test_a_replay_runs_the_backend_that_was_recorded_unless_one_is_set(store, monkeypatch, name):
    monkeypatch.setattr("actordbg.api.desk.gather_facts", lambda: Facts(False, 0, False, versions={"deepspeed": "0.19"}))
    (recorded, *options), (runs, *told) = BACKENDS[name]
    what, _, value = recorded.partition(" ")
    publish(store, 3, **({"actor": {what: int(value)}} if value.isdigit() else {what: value} if value else {}))
    ran = []
    monkeypatch.setattr(supervise, "run_replay", lambda where, spec, *given, **more: ran.append(spec))
    result = invoke(store, *" ".join(options).split())
    assert f"{ran[0].config.backend} {ran[0].config.zero_stage}" == runs
    said = [line for line in result.stderr.splitlines() if "not from the command line" in line]
    assert said == [f"not from the command line: {line}" for line in told]


def test_every_command_that_replays_dumps_runs_the_recorded_backend(store, monkeypatch):
    publish(store, 2, actor={"zero_stage": 2})
    ran = []

    def stop(desk, name, config, chosen, purpose=""):
        ran.append(config)
        raise NothingToDo(name, hint="")

    with monkeypatch.context() as patched:
        patched.setattr(Desk, "planned", stop)
        for command in ("replay", "check", "noise", "locate"):
            with pytest.raises(NothingToDo, match=command):
                commandline.invoke(store, command)
    assert [(config.backend, config.zero_stage) for config in ran] == [("deepspeed", 2)] * 4
    for options, expected in (([], {"deepspeed"}), (["--backend", "plain,fsdp2"], {"plain", "fsdp2"})):
        plan = commandline.invoke(store, "matrix --attn sdpa --compile off", *options, "--dry-run", "--json")
        assert {cell["config"]["backend"] for cell in json_of(plan)["cells"]} == expected


def test_a_refusal_of_what_only_deepspeed_has_names_it_and_not_the_backend(store, old_cpu):
    publish(store, 1, source="import")
    with pytest.raises(Unsupported, match="DeepSpeed does not train in fp16 on a CPU"):
        invoke(store, "--dtype fp16 --zero-stage 1 --dry-run")
    old_cpu.write_text("flags\t\t: fpu avx512f avx512_fp16\n")
    assert "(deepspeed)" in invoke(store, "--dtype fp16 --zero-stage 1 --dry-run").stdout


@pytest.mark.parametrize("command", ["replay", "train-check"])
def test_more_layers_than_the_model_has_are_refused_before_a_worker_starts(store, command):
    publish(store, 1)
    with pytest.raises(UsageError, match="--num-layers 9: the model has 2 layers"):
        commandline.invoke(store, command, "--num-layers=9", "--dry-run")


@pytest.fixture
def old_cpu(tmp_path, monkeypatch):
    """The flags of a CPU without fp16, as a file that a test may change."""
    path = tmp_path / "cpuinfo"
    path.write_text("flags\t\t: fpu avx512f\n")
    monkeypatch.setattr("actordbg.config.choices._CPU", path)
    return path


def test_deepspeed_that_is_not_installed_is_not_chosen(store, monkeypatch):
    publish(store, 1, source="import")
    monkeypatch.setattr("actordbg.api.desk.gather_facts", lambda: Facts(False, 0, False))
    result = invoke(store, "--dry-run")
    assert "on 1 worker (plain)" in result.stdout
    assert "backend plain (recorded under DeepSpeed, which is not installed)" in result.stderr


def test_a_whole_store_is_replayed_only_if_that_was_asked_for(store, monkeypatch):
    publish(store, 51, model_name="org/model")
    for mode in ([], ["--dry-run"], ["--dry-run", "--json"]):
        with pytest.raises(UsageError, match="refusing to replay 51 dumps") as caught:
            invoke(store, *mode)
        assert "pass --all" in str(caught.value.hint) and not store.replays.exists()
    assert "51 inputs" in invoke(store, "--dry-run --all").stdout
    with monkeypatch.context() as at_terminal:
        at_terminal.setattr(output, "can_ask", lambda: True)
        plan = invoke(store, "--dry-run")
    assert "51 inputs" in plan.stdout and "--all skips the question" in plan.stderr
    monkeypatch.setattr(supervise, "run_replay", lambda *given, **more: None)
    for way in (["--all"], ["--max-inputs", "51"], ["--where", "rank=0"], ["--diverse", "60"]):
        assert "your model: the dumps recorded it: --model org/model" in invoke(store, *way).stdout
    assert "your model" not in invoke(store, "--all --model tiny").stdout


def test_the_model_that_the_dumps_name_is_asked_for_at_a_terminal_and_nowhere_else(store, monkeypatch):
    publish(store, 2, model_name="org/model")
    ran = []
    asked = []
    monkeypatch.setattr(supervise, "run_replay", lambda where, spec, *given, **more: ran.append(spec))
    monkeypatch.setattr("actordbg.api.desk.require_model", lambda *what: None)
    monkeypatch.setattr("actordbg.api.desk.require_consent", lambda model: None)
    invoke(store)
    assert ran[-1].config.model == "tiny", "a pipe is not asked"
    for said, expected in (("org/model", "org/model"), ("other/one", "other/one"), ("tiny", "tiny")):
        monkeypatch.setattr(output, "answered", lambda question, usual, said=said: asked.append(question) or said)
        invoke(store)
        assert ran[-1].config.model == expected
        assert ran[-1].command.endswith(f"--model {said}") == (said != "tiny"), "so that it can be repeated"
    assert "The dumps were recorded with org/model" in asked[0] and len(asked) == 3
    for quiet in (["--quiet"], ["--model", "tiny"], ["--dry-run"]):
        invoke(store, *quiet)
    assert len(asked) == 3


def test_dumps_that_cannot_be_replayed_are_left_out_and_counted(store):
    publish(store, 2, replayable=False, extra={"pixel_values": "not storable"})
    with pytest.raises(NothingToDo, match="no dump can be replayed; the store has 2 dumps"):
        invoke(store, "--dry-run")
    with pytest.raises(NothingToDo, match="2 dumps match rank=0, but none can be replayed"):
        invoke(store, "--dry-run --where rank=0")
    allowed = invoke(store, "--where rank=0 --allow-empty")
    assert "skipped 2 dumps: " in allowed.stderr


def test_what_is_selected_is_planned_and_a_named_file_wherever_it_lies(store, tmp_path):
    publish(store, 3, length=64)
    inputs = publish(store, 4, length=128, first=3)
    inside, outside = store.root / inputs[0].path, tmp_path / "copied.safetensors.zst"
    outside.write_bytes((store.root / inputs[1].path).read_bytes())
    for selection, count in (
        ([], 7),
        (["--where", "seq_len>100 and rank=0", "--max-inputs", "3"], 3),
        (["--input-file", str(inside), "--input-file", str(outside)], 2),
        (["--input-file", str(inside), "--input-file", str(inside)], 1),
    ):
        assert planned(store, *selection)["selected"] == count


def test_a_pickle_is_imported_and_never_unpickled(store, tmp_path):
    """By the inert reader, into a store that need not be there yet; one that would run something is refused."""
    good = old_pickle(tmp_path / "ppo")
    for _ in range(2):  # the second time it is there already
        plan = planned(store, "--input-file", str(good), "--input-file", str(good))
        assert (plan["status"], plan["selected"]) == ("planned", 1)
    assert len(list(store.iter_dumps())) == 1
    attack = tmp_path / "attack.pkl"
    attack.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(CorruptDump, match=r"attack\.pkl is refused"):
        invoke(store, "--dry-run --input-file", str(attack))
    assert not (tmp_path / "ran").exists()


def test_a_plugin_is_code_and_comes_from_the_command_line_only(store, monkeypatch):
    publish(store, 1)
    monkeypatch.setenv("ACTORDBG_REPLAY_DIST_PLUGIN", "relaybackend")
    with pytest.raises(UsageError, match="is not a setting of a replay"):
        invoke(store, "--dry-run")


def test_debug_disable_fsdp_makes_a_replay_under_fsdp2_a_plain_one_and_says_so(store, monkeypatch):
    write_replay(store, "20250619T052608-000001", publish(store, 2), status="interrupted", backend="fsdp2", nproc=2)
    monkeypatch.setenv("DEBUG_DISABLE_FSDP", "1")
    done = invoke(store, "--backend fsdp2 --nproc 2 --dry-run")
    assert "on 1 worker (plain)" in done.stdout and "backend plain (DEBUG_DISABLE_FSDP)" in done.stderr
    done = invoke(store, "--resume last --dry-run")
    assert "on 2 workers (fsdp2)" in done.stdout and "DEBUG_DISABLE_FSDP has no effect" in done.stderr


def test_the_last_replay_to_continue_is_not_one_that_another_command_started(store):
    inputs = publish(store, 2)
    write_replay(store, "20250619T052608-000001", inputs, status="interrupted", dtype="bf16")
    write_replay(store, "20250619T052608-000002", inputs, truth="fp32")
    write_replay(store, "20250619T052608-000003", inputs[:1], command="modules of replay 20250619T052608-000001")
    assert "2 inputs" in invoke(store, "--resume last --dry-run").stdout


JOINING = """
import torch, torch.distributed as dist
from actordbg.actor.backends.backend import Place, initialize
from actordbg.config import consent
from actordbg.config.replay_config import ReplayConfig
for plugin in (None, "no_such_plugin", "relaybackend"):
    consent.use_plugin(plugin)
    try:
        initialize(Place.from_environment(), torch.device("cpu"), ReplayConfig(backend="fsdp2", dist_backend="relay"))
    except Exception as error:
        print(error)
dist.all_reduce(torch.ones(1))
print(consent.arguments("tiny"), dist.get_backend())
"""


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_makes_its_process_group_with_what_the_plugin_brings():
    around = environment(FORKED_PROGRAM="-c")
    done = run_program([sys.executable, "-c", JOINING], env=around)
    without, unknown, joined = done.stdout.splitlines()
    assert "torch does not know --dist-backend relay" in without, done.stderr
    assert "--dist-plugin no_such_plugin cannot be imported: ModuleNotFoundError" in unknown
    assert joined == "['--dist-plugin', 'relaybackend'] relay"


REFUSED = cases_of("refused")


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.usefixtures("old_cpu")
def test_what_makes_no_sense_or_cannot_work_here_is_refused_before_anything_starts(store, words):
    publish(store, 1)
    code, said = REFUSED[words].expected
    with pytest.raises(ActordbgError) as caught:
        commandline.invoke(store, *words.split())
    assert said in str(caught.value) and caught.value.exit_code == int(code)
    assert not any(path for folder in ("replays", "matrices", "trainchecks") for path in (store.root / folder).glob("*"))


@pytest.mark.parametrize("variables, result", json_cases("launchers"))
def test_under_a_launcher_rank_0_takes_over_its_size_and_backend(store, monkeypatch, variables, result):
    """`deepspeed --num_gpus 2 --module actordbg replay ...`: the command is run once for each rank."""
    (code, said), spec = result, written_spec(store)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    done = typed(store, "replay", "--dry-run")
    problem = done.exception if isinstance(done.exception, ActordbgError) else None
    assert problem.exit_code == code if problem else done.exit_code == code
    assert said in f"{done.stdout}{problem}" and (said or done.stdout == "")
    if "(deepspeed)" in said:
        assert "1 worker (plain)" in planned(store, "--resume", spec.replay_id)["sentence"], "under its own configuration"


@pytest.mark.forked
def test_a_failed_input_gives_exit_code_1_and_every_result_is_in_the_catalog(store):
    from actordbg.catalog.query import get_replay, results_for

    damaged, good = publish(store, 2)
    path = store.root / damaged.path
    path.write_bytes(path.read_bytes()[:-20])
    arguments = ["--input-file", str(path), "--input-file", str(store.root / good.path)]
    done = invoke(store, *arguments, "--json")
    assert done.exit_code == 1, done.stderr
    answer = json_of(done)
    assert (answer["passed"], answer["failed"], answer["status"]) == (1, 1, "complete")
    assert answer["failures"][0]["signature"] == "damaged-dump" and answer["failures"][0]["ways_out"]
    rows = {record.dump_id: record.status for record in results_for(store, answer["replay_id"])}
    assert rows == {damaged.dump_id: "failed", good.dump_id: "passed"}
    kept = get_replay(store, "last")
    ran = (kept.config["model"], (kept.resolved or {})["attn"])
    assert (kept.replay_id, kept.status, *ran) == (answer["replay_id"], "complete", "tiny", "sdpa")
