"""What many dumps cost the desk: journals, catalog rows, file opens, CPU and memory, and a line through it that is checked.

A store of N made-up dumps, replayed on 100 workers by journals that are written here as workers write them. Each size runs in a
process of its own. A cost is taken to be a + b N: the line through the two smaller sizes has to predict the largest one. Seconds
are CPU time of the one process, since these machines are shared; opens are counted by an audit hook; memory is the peak above
what the process had when the phase began.

    python -m benchmarks.bench_scale [N N N]       1,000, 10,000 and 100,000 dumps unless said otherwise: 5 minutes, 2 GB of disk
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Row

SIZES = (1_000, 10_000, 100_000)
WORKERS = 100
ASKED = 1_000_000
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_opened = 0


def run(sizes: Sequence[int] = SIZES) -> list[Row]:
    """How far the line through the smaller sizes is from the largest: one row for each cost that is a time."""
    found = {size: measured(size) for size in sizes}
    rows = []
    for phase in found[sizes[-1]]:
        values = [found[size][phase]["cpu_s"] for size in sizes]
        predicted = line(sizes[-3:-1], values[-3:-1], sizes[-1])
        note = f"{ASKED:,}: {line(sizes[-2:], values[-2:], ASKED):.1f} s by the last two sizes"
        rows.append(
            Row(
                f"{phase}, {sizes[-1]:,} dumps: predicted / measured",
                values[-1],
                predicted,
                "s",
                ratio=predicted / values[-1],
                note=note,
            )
        )
    return rows


def measured(size: int) -> dict[str, dict[str, float]]:
    """The costs of one size by phase, measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_scale", "--one", str(size)], stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def line(sizes: Sequence[int], values: Sequence[float], at: int) -> float:
    """The line through two points, at another size."""
    slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
    return values[1] + slope * (at - sizes[1])


def one_size(size: int) -> dict[str, dict[str, float]]:
    """Every phase, in this process."""
    from actordbg.catalog.indexer import refresh
    from actordbg.config.replay_config import ReplayConfig
    from actordbg.judge.load_replays import load
    from actordbg.records.journal import read_results
    from actordbg.records.replay_record import ReplaySpec
    from actordbg.replay.plan import make_plan
    from actordbg.replay.selection import rows_of
    from benchmarks.bench_index import make_store

    sys.addaudithook(_count)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder) / "store", size)
        phase = _phases(found, size)
        phase("index the dumps", lambda: refresh(store))
        found["index the dumps"]["bytes"] = store.catalog_path.stat().st_size
        phase("refresh, nothing new", lambda: refresh(store))
        rows = phase("select all dumps", lambda: rows_of(store, None, (), "time", None))
        spec = phase("plan the replay", lambda: make_plan(rows, ReplayConfig(nproc=WORKERS)).spec)
        path = store.replays / spec.replay_id / "spec.json"
        path.parent.mkdir(parents=True)
        phase("write the plan", lambda: path.write_text(spec.to_json()))
        found["write the plan"]["bytes"] = path.stat().st_size
        phase("read the plan", lambda: ReplaySpec.from_file(path))
        phase("write the journals", lambda: _journals(path.parent, spec))
        found["write the journals"]["bytes"] = sum(one.stat().st_size for one in path.parent.glob("*.jsonl"))
        before = store.catalog_path.stat().st_size
        phase("index the results", lambda: refresh(store))
        found["index the results"]["bytes"] = store.catalog_path.stat().st_size - before
        phase("read what is done (--resume)", lambda: read_results(path.parent))
        phase("load for a report", lambda: load(store, [spec.replay_id]))
    return found


def _phases(found: dict[str, dict[str, float]], size: int) -> Callable[[str, Callable[[], Any]], Any]:
    def phase(name: str, work: Callable[[], Any]) -> Any:
        _CLEAR.write_text("5")
        rss, opens, began = _status("VmRSS"), _opened, time.process_time()
        answer = work()
        cpu_s = time.process_time() - began
        found[name] = {"cpu_s": cpu_s, "opens": float(_opened - opens), "memory": float(max(0, _status("VmHWM") - rss))}
        return answer

    return phase


def _journals(folder: Path, spec: Any) -> None:
    """A `start` and an `end` for each input, spread over the workers, as `Journal.append` writes them, but not flushed."""
    from actordbg.records.replay_record import ResultRecord

    lines: list[list[str]] = [[] for _ in range(WORKERS)]
    for index, item in enumerate(spec.inputs):
        rank, moment = index % WORKERS, f"2025-06-19T06:{index // 60 % 60:02d}:{index % 60:02d}.000000Z"
        result = ResultRecord(
            spec.replay_id, item.dump_id, status="passed", attempt=1, worker=rank, slot=index // WORKERS, started_at=moment,
            finished_at=moment, load_s=0.01, forward_s=0.2, backward_s=0.4, tokens=item.tokens, tokens_per_s=9000.0,
            peak_memory_bytes=2**34 + index, logprob_count=1800, logprob_mean=-1.5, logprob_std=2.0, logprob_min=-20.0,
            logprob_max=-0.001, nonfinite=0, loss=1.5, grad_norm=0.5, output_digest=f"{index:064x}",
            extra={"packing": True, "temperature": 1.0, "training": True},
        )  # fmt: skip
        start = {
            "event": "start",
            "rank": rank,
            "attempt": 1,
            "dump_id": item.dump_id,
            "slot": 0,
            "started_at": moment,
            "log_at": 0,
        }
        lines[rank] += [json.dumps(start, separators=(",", ":"))]
        lines[rank] += [json.dumps({"event": "end", **result.to_dict()}, separators=(",", ":"), allow_nan=False)]
    for rank, own in enumerate(lines):
        (folder / f"rank{rank}.jsonl").write_text("\n".join(own) + "\n")


def _status(name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))


def _count(event: str, _: tuple[object, ...]) -> None:
    global _opened
    _opened += event == "open"


def main() -> None:
    """Print every cost of every size, the prediction of the largest, and what the model says of a million."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one_size(int(sys.argv[2]))))
        return
    sizes = [int(text) for text in sys.argv[1:]] or list(SIZES)
    found = {size: measured(size) for size in sizes}
    print(f"# {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for phase in found[sizes[-1]]:
        for cost in found[sizes[-1]][phase]:
            values = [found[size][phase][cost] for size in sizes]
            told = line(sizes[-3:-1], values[-3:-1], sizes[-1]) if len(sizes) > 2 else float("nan")
            shown = "  ".join(f"{value:>13,.3f}" for value in (*values, told, line(sizes[-2:], values[-2:], ASKED)))
            print(f"{phase:<30} {cost:<7} {shown}", flush=True)


if __name__ == "__main__":
    main()
