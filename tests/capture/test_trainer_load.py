"""What the hook costs a training process before it records anything: the modules that it loads, and how they guard themselves."""

import ast
import json
from pathlib import Path

import pytest
from roots import ROOT, write_json
from runkit import clean_environment, python

MOST_MODULES = 20
"""Every entry of sys.modules under `actordbg`, the empty `__init__` of each folder included."""
MOST_LINES = {"all": 5_000, "usual": 4_900}
"""Bounds that should fall: with everything on, and in a job that records every call with a writer process. The aim is 4,000."""
MOST_EXCEPTS = 15

TRAINING = """
import json, sys
import torch
from actordbg.capture import hook

class Actor(torch.nn.Module):
    def forward(self, sequences, action_mask=None, attention_mask=None, sizes=None, mood="good"):
        if mood == "broken":
            raise RuntimeError("they say")
        return sequences.float()[:, 1:] * (float("nan") if mood == "nan" else 1)

assert hook.install(Actor, store=sys.argv[1])
actor, ids = Actor(), torch.arange(24).view(2, 12) * 99_991
for number in range(30):
    mask = torch.ones(2, 12, dtype=torch.int64)
    actor(ids, attention_mask=mask, action_mask=mask[:, 1:].bool(), sizes=[number, {"a": 1.5}], mood="nan" if number == 20 else "good")
try:
    actor(ids, mood="broken")
except RuntimeError:
    pass
(slot,) = hook._slots.values()
assert slot.recorder.close()
(ledger,) = slot.recorder.writer.watched()
loaded = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "actordbg"}
print(json.dumps({"captured": ledger.captured, "triggered": ledger.triggered, "rotated": ledger.rotated, "loaded": loaded}))
"""

CONTROL = {
    "format": 2, "enabled": True, "generation": 1, "run": "r", "since": "2026-11-20T12:00:00.000000Z", "free_floor_bytes": 0,
    "with_outputs": True, "with_rng": True, "triggers": ["nan", "exception", "slow:1000x", "logprobs:-1000000000:1000000000"], "before": 2,
    "keep_bytes": 20_000, "ring": 8,
}  # fmt: skip


USUAL = {
    **{name: CONTROL[name] for name in ("format", "enabled", "generation", "run", "since", "free_floor_bytes")},
    "writer": "process",
}


@pytest.mark.parametrize("what", MOST_LINES)
def test_a_training_process_loads_few_modules_and_lines(tmp_path, what):
    (tmp_path / "FORMAT").write_text('{"format": 1}\n')
    write_json(tmp_path / "control.json", CONTROL if what == "all" else USUAL)
    answer = json.loads(python(TRAINING, clean_environment(), str(tmp_path)))
    assert (answer["captured"] == 31 and what == "usual") or (
        answer["rotated"] > 0 and set(answer["triggered"]) - {"slow"} == {"nan", "exception"}  # a busy machine may hold up a call
    )
    assert ("actordbg.formats.encoding" in answer["loaded"]) == (what == "all"), "the writer process encodes"
    lines = {name: len(Path(path).read_text().splitlines()) for name, path in answer["loaded"].items()}
    table = "\n".join(f"{count:6d} {name}" for name, count in sorted(lines.items(), key=lambda pair: -pair[1]))
    assert len(lines) <= MOST_MODULES, f"the trainer loads\n{table}"
    assert sum(lines.values()) <= MOST_LINES[what], f"the trainer loads {sum(lines.values())} lines\n{table}"


def _is_broad(node):
    if isinstance(node, ast.ExceptHandler):
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)
    suppresses = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress")
    return suppresses and any(ast.unparse(kind) in ("Exception", "BaseException") for kind in node.args)


def test_capture_has_few_broad_excepts():
    found = [
        f"{path.name}:{node.lineno}"
        for path in sorted((ROOT / "actordbg" / "capture").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if _is_broad(node)
    ]
    assert 0 < len(found) <= MOST_EXCEPTS, found


def test_only_the_host_names_its_trainer():
    texts = {path.name: path.read_text() for path in (ROOT / "actordbg" / "capture").glob("*.py")}
    allowed = 'DISTRIBUTIONS = ["openrlhf",'  # whose version a record says
    assert [name for name, text in texts.items() if "openrlhf" in text.replace(allowed, "").lower()] == []
