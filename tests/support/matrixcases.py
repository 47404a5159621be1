"""Matrices over scripted workers: real supervision, groups that stay, and journals, without torch.

`Bench.script(config)` says what the workers of a cell do (`fake_worker`); input number n of the selection is called "d<n>" in it.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import supervised
from replaycases import PlannedRow

from actordbg.base.units import new_replay_id
from actordbg.campaign.cells import combinations, make_cells, parse_axes
from actordbg.campaign.run_matrix import MatrixRun, Surroundings, new_matrix
from actordbg.config.choices import Facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.matrix_record import OPEN, TrainCheckRecord
from actordbg.replay.group_engine import WarmGroups

LAPTOP = Facts(cuda=False, gpus=0, flash_attn=False, versions={"transformers": "5.15.0"})
FOUR = {"attn": "sdpa,eager", "packing": "both"}
Script = Callable[[ReplayConfig], dict[str, Any]]


@dataclass
class ScriptedGroups(WarmGroups):
    """Writes each cell's script into its folder before its workers hear of it."""

    script: Script = lambda config: {}

    def launch(self, config, group, work):
        (work.parent / "script.json").write_text(json.dumps(self.script(config)))
        return super().launch(config, group, work)


class Bench(supervised.Bench):
    """Runs scripted matrices in one store, and remembers the sessions that they started."""

    def new(
        self,
        given,
        inputs=3,
        baseline=None,
        slower=None,
        **base,
    ):
        config = ReplayConfig(**({"timeout_s": 30.0} | base))
        axes = parse_axes(given)
        cells = make_cells(combinations(config, axes), LAPTOP, None)
        options = {"order": "time", "oracle": None, "slower": slower}
        return new_matrix(cells, axes, self.rows(inputs), options, baseline=baseline.matrix_id if baseline else None)

    def rows(self, inputs):
        return [PlannedRow(f"d{n}", f"dumps/d{n}", timestamp=f"2025-06-19T05:26:0{n}.000000Z") for n in range(inputs)]

    def run(
        self,
        record,
        script=lambda config: {},
        baseline=None,
        on_progress=lambda words, steps: None,
    ):
        warm = ScriptedGroups(supervised.fake_launcher(self.sessions), script=script)
        around = Surroundings(None, LAPTOP, on_progress, warm=warm)
        return MatrixRun(self.store, record, self.rows(len(record.dump_ids)), around, baseline).run()


def training_check(
    cells,
    inputs,
    steps,
    logs,
    batch=2,
    **about,
):
    """A training check in fp32 before its first cell."""
    from actordbg.actor.backends.training import Training

    began = new_replay_id(), now_timestamp(), OPEN
    ids = tuple(item.dump_id for item in inputs)
    more = {"dtype": "fp32", "threshold": 0.05, "training": asdict(Training(lr=1e-3)), "log_dir": str(logs)} | about
    return TrainCheckRecord(*began, tuple(cells), ids, steps, batch, **more)


def in_cell(attn, packing, actions):
    """These actions in the cell with these settings, nothing special in the others."""
    return lambda config: actions if (config.attn, config.packing) == (attn, packing) else {}
