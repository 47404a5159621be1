"""Made-up inputs for the kit's matrices; and with --curve, replays of five lengths and the curves of memory and time over them.

python -m benchmarks.gpu.made_inputs STORE [--curve JSON]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from actordbg.actor.models import TinyShape, build_tiny

LENGTHS, SHORT = (512, 1024, 2048, 4096, 8192), (64, 128, 256, 512, 1024)
LARGE = TinyShape(vocab_size=32_000, hidden=1024, layers=8, heads=8, kv_heads=8, intermediate=2816)
"""170 million weights, heads of 128 elements: a step of some tens of milliseconds on a large GPU."""


def cli(store: Path, *words: str) -> str:
    """Run a command; what it printed. SystemExit if it fails."""
    done = subprocess.run([sys.executable, "-m", "actordbg", "--store", str(store), *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def made(store: Path) -> None:
    """Three inputs of 2 x 256, which every model's vocabulary has."""
    print(cli(store, "dump", "create", "--count", "3", "--batch-size", "2", "--seq-len", "256", "--vocab-size", "4000"))


def curves(store: Path, lengths: tuple[int, ...], into: Path, large: bool) -> None:
    """Replay one input of each length, and print and keep the curves."""
    for number, length in enumerate(lengths):
        cli(store, "dump", "create", "--batch-size", "1", "--seq-len", str(length), "--vocab-size", "4000", "--seed", str(number))
    model = str(build_tiny(store / "cache" / "large", LARGE)) if large else "tiny"
    cli(store, "replay", "--all", "--quiet", "--backward", "--attn", "sdpa", "--model", model)
    asked = ("--at", str(4 * lengths[-1]))
    told = {"memory": (*asked, "--budget", "80GB"), "time": asked}
    found = {}
    for what, words in told.items():
        done = subprocess.run(
            [sys.executable, "-m", "actordbg", "--store", str(store), "curve", what, "last", *words],
            capture_output=True,
            text=True,
        )
        print(done.stdout or done.stderr)
        if done.returncode not in (0, 1):  # 1: that length is not sure to fit
            raise SystemExit(f"curve {what}: exit code {done.returncode}\n{done.stderr}")
        found[what] = json.loads(cli_json(store, "curve", what, "last", *words))
    into.write_text(json.dumps(found))


def cli_json(store: Path, *words: str) -> str:
    """A command's answer for programs, whatever its verdict."""
    command = [sys.executable, "-m", "actordbg", "--store", str(store), *words, "--json"]
    return subprocess.run(command, capture_output=True, text=True).stdout


def main() -> None:
    """Make inputs, or curves."""
    parser = argparse.ArgumentParser(description="Inputs and curves of the GPU kit.")
    parser.add_argument("store", type=Path)
    parser.add_argument("--curve", type=Path)
    given = parser.parse_args()
    if given.curve is None:
        return made(given.store)
    cuda = torch.cuda.is_available()
    return curves(given.store.with_name("lengths-store"), LENGTHS if cuda else SHORT, given.curve, cuda)


if __name__ == "__main__":
    main()
