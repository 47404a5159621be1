"""Optimizer steps for real: configurations agree and planted faults are found; a training that lost its group begins again."""

import json
import os
from dataclasses import replace

import pytest
from actorcases import ZERO3
from amounts import WHOLE, first_or_all
from commandline import invoke
from matrixcases import training_check
from replaycases import publish
from roots import SUPPORT, json_of, read_json
from supervised import fake_launcher

from actordbg.actor.training_checkpoints import Checkpoints
from actordbg.base.errors import GroupsLost
from actordbg.base.processes import session_members
from actordbg.campaign import run_train_check as running
from actordbg.campaign.run_train_check import CHECK, TrainRun, folder_of
from actordbg.campaign.train_document import FIGURES, verdicts
from actordbg.campaign.train_engine import KEPT, TRAINING, step_of
from actordbg.campaign.train_plan import configurations, make_train_cells
from actordbg.config.choices import gather_facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.journal import SPEC, Journal
from actordbg.records.matrix_record import ASKED, TRAINED, TrainCheckRecord
from actordbg.records.replay_record import PASSED, ResultRecord
from actordbg.replay.group_engine import GroupEngine, Losses, WarmGroups, using
from actordbg.replay.supervise import Progress, ReplayOutcome

FAULTS = {"fsdp2, ring 2": ["ring_without_reduction"], "fsdp2": first_or_all(["state_of_one_shard_lost", "no_zero_grad"], 0)}
"""What a step looks like that parts from the baseline's is in `partings.test`; two more faults are real in `make whole`."""
SKIPPED = () if WHOLE else (("fsdp2", True, False), ("fsdp2", False, True))
"""Tensor parallelism and a ring are in one configuration; each alone in `make whole`."""
DIVERGES_AT = {
    "ring_without_reduction": (1, "grad_norm", "not reduced over all ranks"),
    "state_of_one_shard_lost": (3, "update_norm", "state was reset"),
    "no_zero_grad": (2, "grad_norm", "missing zero_grad"),
}


@pytest.mark.forked
def test_configurations_agree_over_three_steps_and_faults_are_found(store, tmp_path, monkeypatch):
    """On four processes, in fp32: within 1e-5 of the plain Actor in every step and figure. Faults run beside sound cells."""
    inputs = publish(store, 4, length=24)
    base = ReplayConfig(nproc=4, dtype="fp32", timeout_s=600.0)
    every, cells = (make_train_cells(configurations(base, {}, skip=skip), base, gather_facts(), None) for skip in ([], SKIPPED))
    asked = [cell.name for cell in cells if cell.role == ASKED]
    planted = {}
    for sound in [cell for cell in every if cell.name in FAULTS]:
        for fault in FAULTS[sound.name]:
            planted[str(len(cells))] = fault
            cells.append(replace(sound, index=len(cells), name=fault, log_name=f"{fault}.log"))
    monkeypatch.setenv("PLANTED", json.dumps(planted))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    sessions = []
    record = training_check(cells, inputs, 3, tmp_path / "logs", batch=4)

    done = TrainRun(store, record, inputs, warm=WarmGroups(fake_launcher(sessions, "planted_training"))).run()
    assert [(cell.name, cell.reason) for cell in done.cells if cell.status != "trained"] == []
    judged = {cell.name: one for cell, one in zip(done.cells, verdicts(done), strict=True) if cell.role == ASKED}
    sound = {name: one for name, one in judged.items() if name not in DIVERGES_AT}
    assert list(sound) == asked and len(asked) == 6 - len(SKIPPED) and asked[-1] == "fsdp2, tp 2, ring 2"
    assert {one.word for one in sound.values()} == {"agrees"} and {one.falls for one in sound.values()} == {"yes"}
    assert max(one.largest[figure] for one in sound.values() for figure in FIGURES) < 1e-5
    for fault in planted.values():
        step, figure, words = DIVERGES_AT[fault]
        found = judged[fault].parting
        assert found is not None and (found.step, found.figure) == (step, figure), (fault, found)
        assert words in found.looks_like
    assert [pid for session in sessions for pid in session_members(session)] == [], "processes were left behind"
    _as_the_ancestor_reads_it(store, tmp_path / "logs")
    _printed_again(store, tmp_path)


def _as_the_ancestor_reads_it(store, logs):
    """The logs have the ancestor's names, and compare-logs reads them."""
    names = {"plain_test.log", "deepspeed_test.log", "fsdp2_test.log", "fsdp2_tp2_ring2_test.log"}
    assert names <= {path.name for path in logs.iterdir()}
    pair = [str(logs / name) for name in ("deepspeed_test.log", "fsdp2_tp2_ring2_test.log")]
    compared = invoke(store, "compare-logs", *pair, "--json")
    answer = json_of(compared)
    assert (answer["verdict"], answer["metric"], answer["common"]) == ("NOT CHECKED", "gpt_loss", 3)


def _printed_again(store, folder):
    """--show: a table of 80 columns, a picture, exit code 1 for the faults; and --resume has nothing left to run."""
    picture = folder / "check.png"
    shown = invoke(store, "train-check --show last -o", str(picture))
    assert shown.exit_code == 1 and picture.read_bytes().startswith(b"\x89PNG")
    assert max(map(len, shown.stdout.split("\nLogs\n")[0].splitlines()[1:])) <= 80
    assert "ring_without_reduction: at step 1 the gradient norm is " in " ".join(shown.stdout.split())
    again = invoke(store, "train-check --resume last --json")
    assert json_of(again)["check"]["status"] == "complete"


@pytest.mark.forked
def test_a_lost_training_continues_from_its_last_checkpoint_and_ends_with_the_same_bits(store, tmp_path, monkeypatch):
    """On two ranks, under FSDP2 and DeepSpeed, whose stage 0 is DDP. Each cell runs as it is, and with rank 1 killed in step 3."""
    inputs = publish(store, 4, length=24)
    base = ReplayConfig(nproc=2, backward=True, timeout_s=600.0)
    stages = first_or_all(((ZERO3["zero_stage"], "bf16"), (0, "fp32"), (2, "bf16")))
    backends = [{"backend": "deepspeed", "zero_stage": stage, "dtype": dtype} for stage, dtype in stages]
    backends.append({"backend": "fsdp2", "dtype": "bf16"})
    configs = [replace(base, **settings) for settings in backends for _ in range(2)]
    cells = [
        replace(cell, index=at, log_name=f"{at}.log")
        for at, cell in enumerate(make_train_cells(configs, base, gather_facts(), None)[2:])
    ]
    killed = range(1, len(cells), 2)
    monkeypatch.setenv("PLANTED", json.dumps(dict.fromkeys(map(str, killed), "killed_once")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    kept = {"storage": {"folder": f"file://{tmp_path}/kept", "every": 1}}
    record = training_check(cells, inputs, 4, tmp_path / "logs", batch=4, options=kept)

    done = TrainRun(store, record, inputs, warm=WarmGroups(fake_launcher([], "planted_training"))).run()
    assert [(cell.name, cell.reason) for cell in done.cells if cell.status != TRAINED] == []
    assert done.options["continued"] == {str(at): [2] for at in killed}
    weights = [
        [(tmp_path / f"kept/{record.check_id}/cell-{at}/step-0004/rank-{rank}.safetensors").read_bytes() for rank in range(2)]
        for at in range(len(cells))
    ]
    for at in killed:
        assert done.cells[at].folder == f"cell-{at}.2" and done.cells[at].steps == done.cells[at - 1].steps, cells[at].name
        assert weights[at] == weights[at - 1], cells[at].name


class OfACluster(GroupEngine):
    def __init__(self, most=3):
        self.most = most

    def losses(self):
        return Losses(self.most, "--max-failures")


def lost_replays(left, begun):
    """Stand in for `run_replay`: a group of the cell that has losses `left` is gone after its third micro-batch.

    Each loss is how many were left. begun: gets the step of the checkpoint that each attempt begins from.
    """

    def replayed(_store, spec, on_event, *, folder, losses, **_):
        (folder / SPEC).write_text(spec.to_json())
        journal, cell = Journal(folder / "rank0.jsonl"), int(folder.name[5])
        on_event(Progress("line", "waits for 2 CPU"))
        kept = read_json(folder / TRAINING).get(KEPT, {"from": 0})
        begun.append(kept["from"])
        for item in spec.inputs[: 3 if left[cell] else None]:
            extra = {"step": {"grad_norm": 1.0, "update_norm": 1.0}} if "-m02-" in item.dump_id else {}
            times = {"started_at": now_timestamp(), "finished_at": now_timestamp()}
            result = ResultRecord(spec.replay_id, item.dump_id, PASSED, 1, 0, 0, loss=float(left[cell]), extra=extra, **times)
            journal.append("end", **result.to_dict())
            if extra and "folder" in kept:
                Checkpoints(kept["folder"]).save(step_of(item.dump_id), 0, {})
            on_event(Progress("result", PASSED, result))
        if left[cell]:
            left[cell] -= 1
            if losses is not None and left[cell]:
                losses.count("node 1 is gone")  # a node; the supervisor does not count what died between two inputs
            on_event(Progress("attempt", "node 1 is gone"))
        return ReplayOutcome(spec.replay_id, folder, "complete", len(spec.inputs))

    return replayed


@pytest.mark.parametrize("most, times", [(0, 1), (2, 2), (-1, 5)])
def test_a_training_on_a_cluster_continues_from_its_last_checkpoint_as_often_as_it_may(store, tmp_path, monkeypatch, most, times):
    """`--max-failures` 0, n and -1: with 0, the command ends at the first loss, and `--resume` continues."""
    inputs, base, begun = publish(store, 2, length=24), ReplayConfig(dtype="fp32"), []
    monkeypatch.setattr(running, "run_replay", lost_replays([times], begun))
    kept = {"storage": {"folder": str(tmp_path / "kept"), "every": 1}}
    record = training_check(make_train_cells([base], base, gather_facts(), None)[:1], inputs, 8, tmp_path / "logs", options=kept)
    with using(OfACluster(most)):
        if most == 0:
            with pytest.raises(GroupsLost):
                TrainRun(store, record, inputs).run()
            record = TrainCheckRecord.from_file(folder_of(store, record.check_id) / CHECK)
        (cell,) = TrainRun(store, record, inputs).run().cells
    assert begun == [*range(times + 1)] and cell.status == TRAINED
    assert [step.loss for step in cell.steps] == [*range(times, 0, -1), *[0] * (8 - times)]


@pytest.mark.parametrize("deaths, engine", [([1], GroupEngine()), ([9], GroupEngine()), ([2, 2], OfACluster())])
def test_a_group_that_is_lost_starts_its_training_again_and_too_often_leaves_it_open(
    store, tmp_path, monkeypatch, deaths, engine
):
    """From step 1, in another folder. What one attempt left half done is never mixed into the next.

    deaths: of each cell's group. On a cluster those of all cells are counted together, each once.
    """
    inputs, base, left = publish(store, 2, length=24), ReplayConfig(dtype="fp32"), list(deaths)
    monkeypatch.setattr(running, "run_replay", lost_replays(left, []))
    cells = tuple(make_train_cells([base], base, gather_facts(), None)[: len(deaths)])
    record = training_check(cells, inputs, 2, tmp_path / "logs")
    if deaths == [1]:
        heard = []
        (cell,) = running.TrainRun(store, record, inputs, lambda _, what: heard.append(what)).run().cells
        assert (cell.status, cell.folder, [one.loss for one in cell.steps]) == (TRAINED, "cell-0.2", [0.0, 0.0])
        assert heard[:2] == ["starts", "waits for 2 CPU"] and heard.count("waits for 2 CPU") == 2
        return
    with using(engine), pytest.raises(GroupsLost, match=r"groups were lost 4 times.*node 1 is gone") as stopped:
        running.TrainRun(store, record, inputs).run()
    assert "train-check --resume" in stopped.value.hint
    *others, cell = TrainCheckRecord.from_file(folder_of(store, record.check_id) / CHECK).cells
    assert (cell.status, cell.steps) == ("not run", ()) and all(one.status == TRAINED for one in others)
    left[:] = [0] * len(deaths)
    again = TrainCheckRecord.from_file(folder_of(store, record.check_id) / CHECK)
    done = running.TrainRun(store, again, inputs).run()
    assert (done.status, done.cells[:-1]) == ("complete", tuple(others)), "what is done is not run again"
    assert (done.cells[-1].status, len(done.cells[-1].steps)) == (TRAINED, 2) and done.cells[-1].folder != cell.folder
