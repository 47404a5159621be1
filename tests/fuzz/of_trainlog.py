"""Training logs: anything that a program may print, gzip, and bytes that are not text."""

import gzip

from fuzzing import refused, work_folder
from roots import ROOT

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.measure.log_exports import exported, plain_name
from actordbg.measure.log_lines import read_log, segments

PARSERS = (read_log, segments, exported, plain_name)
WORDS = (b"%|##| 2/24 [00:01<00:11, 1.9it/s, gpt_loss=6.21, lr=1e-5]", b"Global step 12: {'policy_loss': 0.02}", b"step=12 loss=2.1", b"\x1b[A",
         b"\r", b"(PPOTrainer pid=7085) ", b"[rank0]: ", b"loss=nan", b"inf", b"\x1f\x8b\x08", b"epoch 1: ", b"eval step 3")  # fmt: skip
_FILE = work_folder() / "log"


def seeds():
    lines = b"step=1 loss=2.1\nstep=2 loss=nan\nloss: 3\n{'gpt_loss': 5.78}\n"
    return {
        "logs": (ROOT / "tests/cases/train_logs.test").read_bytes()[-6000:],
        "lines": lines,
        "csv": b'"Step","a - train/gpt_loss"\n"1","2.5"\n"2","nan"\n',
        "history": b'{"_step": 1, "train/gpt_loss": 2.5}\n{"_step": 1e99, "loss": true}\n',
        "state": b'{"log_history": [{"step": 2, "loss": 2.5}, {"step": 4, "loss": null, "data": {"x": "NaN"}}]}',
        "database": b"SQLite format 3\0" + bytes(84),
        "gzip": gzip.compress(lines, mtime=0),
    }


def one_input(data):
    _FILE.write_bytes(data)
    with refused(UsageError, EnvironmentProblem):
        log = read_log(str(_FILE))
        for kinds in log.series.values():
            for series in kinds.values():
                assert len(series.points) <= len(data) and list(series.points) == sorted(series.points)
        assert len(log.metrics) <= len(data) and log.segments <= len(data)
