"""Dumps come in and go out in a process that has no torch."""

import pickle
import sys

import pytest
import torch
from roots import ROOT, run_program
from safetensors.torch import load_file


@pytest.mark.slow
def test_dumps_come_in_and_go_out_without_torch(tmp_path):
    """Import, create, look, verify, pack and export, where torch is not installed."""
    content = {"sequences": torch.arange(24).reshape(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.long),
               "action_mask": torch.ones(2, 4, dtype=torch.bfloat16), "return_output": False, "rank": 0, "batch_size": 2,
               "seq_len": 12, "timestamp": "20250619_052608_430740"}  # fmt: skip
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "actor_inputs_rank0_20250619_052608_430740.pkl").write_bytes(pickle.dumps(content))
    commands = (
        "dump import old --quiet", "dump import old --quiet", "dump create --seq-len 16 --quiet", "dump ls", "dump show last", "dump verify --quiet",
        "dump pack --quiet", "dump export --where rank=0 --out out --quiet", "store fsck --quiet", "status --json", "replay ls --allow-empty",
    )  # fmt: skip
    program = (
        "import sys, shlex; sys.modules['torch'] = None\nfrom typer.testing import CliRunner\nfrom actordbg.cli.app import app\n"
        "for typed in sys.argv[1:]:\n    done = CliRunner().invoke(app, ['--store', 'store', *shlex.split(typed)])\n"
        "    print(typed, done.exit_code, repr(done.exception or ''))"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = run_program([sys.executable, "-c", program, *commands], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    bad = [line for line in done.stdout.splitlines() if " 0 ''" not in line and not line.startswith(("status", "store fsck"))]
    assert bad == [], done.stdout
    exported = [load_file(path) for path in sorted((tmp_path / "out").iterdir())]
    assert any(torch.equal(one["action_mask"], content["action_mask"]) for one in exported) and len(exported) == 2
