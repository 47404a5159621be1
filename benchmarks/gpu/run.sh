#!/bin/bash
# Runs on a machine with CUDA what no other machine can: see docs/how-to/gpu-machine.md.
#     bash gpu-kit/run.sh --out DIR [--seconds 600] [--only capture,nccl]
# DIR gets report.md, report.json and a few more files. PYTHON names the interpreter that has torch (default: python3).
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$here/tree/benchmarks/gpu/run_kit.py" --kit "$here" "$@"
