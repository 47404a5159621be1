#!/usr/bin/env bash
# The first cosine of a process may be wrong by 1.5e-4 in what one of two threads computed; each later one is right.
#
# Surprise: on the CPU, the first `cos` of a process, of a tensor that two threads share, is now and then wrong by 1.5e-4 in one
#   thread's half, by the same amount each time: 1 to 8 of 100 processes with OMP_WAIT_POLICY=PASSIVE. The same call again is right,
#   and so is the first one where any small cosine was computed before, in one thread.
# Guess: a function of fp32 is as exact the first time as the second.
# Versions: torch 2.13.0 (CPU build, x86-64), two threads on two cores. Seen 2026-11-30: 7 of 85 processes, and 0 of 60 with a cosine ahead.
# Source: aten/src/ATen/cpu/vml.h, which calls MKL's vector functions from each thread of a parallel loop; what happens at the
#   first call is inside of MKL, whose source is not public.
# For RLHF: rotary positions are cosines. The first forward of a replay, an evaluation or a test on the CPU has log-probs that are
#   1.7e-4 nats off in half of its rows (a tiny Llama, 4 x 2,048), and they never come again: a golden value, or a comparison of
#   "the same call twice", is red without a fault in the model.
# By chance: it fails if none of 300 processes shows it (some minutes), or if one with a cosine ahead does.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/rotary.py" <<'PYTHON'
import sys

import torch

torch.set_num_threads(2)
if sys.argv[1] == "warm":
    torch.ones(8).cos()
frequencies = 1.0 / 10000 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16)
places = torch.ones(4, 2048).cumsum(-1) - 1
angles = (frequencies[None, :, None].expand(4, -1, 1) @ places[:, None, :]).transpose(1, 2)
angles = torch.cat((angles, angles), -1)
first, second = angles.cos(), angles.cos()
exact = angles.double().cos()
assert (second - exact).abs().max() < 1e-6
off = (first - exact).abs().amax((1, 2))
print("off" if off.max() > 1e-5 else "exact", [f"{row:.2g}" for row in off.tolist()])
PYTHON
export OMP_WAIT_POLICY=PASSIVE
for number in $(seq 300); do
  said=$("$folder/venv/bin/python" "$folder/rotary.py" cold)
  [[ $said == off* ]] && break
done
echo "process $number, first cosine of four rows: $said"
[[ $said == off* ]]
for number in $(seq 30); do
  said=$("$folder/venv/bin/python" "$folder/rotary.py" warm)
  [[ $said == exact* ]]
done
echo "30 processes with a cosine ahead: exact"
