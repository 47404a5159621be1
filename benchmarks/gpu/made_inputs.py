"""Made-up inputs for the kit's matrices; and with --lengths, a replay of five lengths, and memory and time over them.

python -m benchmarks.gpu.made_inputs STORE [--lengths CSV]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from actordbg.actor.models import build_tiny

WHAT_FITS = Path(__file__).parents[2] / "examples" / "what_fits.py"
LENGTHS, SHORT = (512, 1024, 2048, 4096, 8192), (64, 128, 256, 512, 1024)
LARGE = {
    "vocab_size": 32_000, "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 2816,
}  # fmt: skip
"""170 million weights, heads of 128 elements: a step of some tens of milliseconds on a large GPU."""


def cli(store: Path, *words: str) -> str:
    """Run a command; what it printed. SystemExit if it fails."""
    done = subprocess.run([sys.executable, "-m", "actordbg", "--store", str(store), *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def made(store: Path) -> None:
    """Three inputs of 2 x 256, which every model's vocabulary has."""
    sizes = ("--count", "3", "--batch-size", "2", "--seq-len", "256", "--vocab-size", "4000")
    print(cli(store, "dump", "create", *sizes))


def measured(store: Path, lengths: tuple[int, ...], into: Path, large: bool) -> None:
    """Replay one input of each length; keep the report's rows, and print what they say of longer ones."""
    for number, length in enumerate(lengths):
        sizes = ("--batch-size", "1", "--seq-len", str(length), "--vocab-size", "4000")
        cli(store, "dump", "create", *sizes, "--seed", str(number))
    model = str(build_tiny(store / "cache" / "large", **LARGE)) if large else "tiny"
    config = ("--backward", "--attn", "sdpa", "--model", model)
    cli(store, "replay", "--all", "--quiet", *config)
    cli(store, "report", "last", "--quiet", "-o", str(into))
    for words in (("--budget", "80e9"), ("--time",)):
        subprocess.run([sys.executable, str(WHAT_FITS), str(into), "--at", str(4 * lengths[-1]), *words], check=True)


def main() -> None:
    """Make inputs, or measure lengths."""
    parser = argparse.ArgumentParser(description="Inputs of the GPU kit.")
    parser.add_argument("store", type=Path)
    parser.add_argument("--lengths", type=Path)
    given = parser.parse_args()
    if given.lengths is None:
        return made(given.store)
    cuda = torch.cuda.is_available()
    return measured(given.store.with_name("lengths-store"), LENGTHS if cuda else SHORT, given.lengths, cuda)


if __name__ == "__main__":
    main()
