"""Builds flash attention from the kit's source: for this GPU's architecture, bf16, heads of 32 and 128 elements.

Whole, it takes an hour; so much of it takes some minutes on 16 cores. Dropout, ALiBi, windows and soft caps are left out. The
source's own macros choose among head sizes and dtypes: they are defined anew here, and what they cannot choose is an error.

    python -m benchmarks.gpu.build_flash WHEELS WORK [--arch 90] [--one]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
from pathlib import Path

HEADS = (32, 128)
LEFT_OUT = ("DROPOUT", "ALIBI", "SOFTCAP", "LOCAL")
SWITCHES = """
#include <stdexcept>
#undef FP16_SWITCH
#define FP16_SWITCH(COND, ...) [&] { if (COND) { throw std::runtime_error("built for bf16 alone"); } \\
    using elem_type = cutlass::bfloat16_t; return __VA_ARGS__(); }()
#undef HEADDIM_SWITCH
#define HEADDIM_SWITCH(HEADDIM, ...) [&] { \\
    if (HEADDIM <= 32) { constexpr static int kHeadDim = 32; return __VA_ARGS__(); } \\
    else if (HEADDIM > 96 && HEADDIM <= 128) { constexpr static int kHeadDim = 128; return __VA_ARGS__(); } \\
    else { throw std::runtime_error("built for heads of up to 32, or of 97 to 128 elements"); } }()
"""


def unpack(wheels: Path, work: Path) -> Path:
    """The source's folder."""
    (archive,) = wheels.glob("flash_attn-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(work, filter="data")
    (source,) = work.glob("flash_attn-*")
    return source


def lessen(source: Path, one: bool = False) -> int:
    """Leave out kernels that nobody asks for (`one`: all but one, to try the compiler); how many are left."""
    setup, switch = source / "setup.py", source / "csrc" / "flash_attn" / "src" / "static_switch.h"
    wanted = r"flash_fwd_hdim32_bf16_causal" if one else rf"_hdim({'|'.join(map(str, HEADS))})_bf16_"
    kernel = re.compile(r'^\s*"csrc/flash_attn/src/flash_(fwd|bwd)_\w+\.cu",\n', re.MULTILINE)
    text = kernel.sub(lambda found: found[0] if re.search(wanted, found[0]) else "", setup.read_text())
    for name in LEFT_OUT:
        text = text.replace(f'# "-DFLASHATTENTION_DISABLE_{name}"', f'"-DFLASHATTENTION_DISABLE_{name}"')
    setup.write_text(text)
    switch.write_text(switch.read_text() + SWITCHES)
    return len(kernel.findall(text))


def build(source: Path, arch: str, into: Path) -> None:
    """Build and install it. SystemExit with the reason if that fails."""
    chosen = {"FLASH_ATTENTION_FORCE_BUILD": "TRUE", "FLASH_ATTN_CUDA_ARCHS": arch, "NVCC_THREADS": "1"}
    environment = os.environ | chosen | {"MAX_JOBS": os.environ.get("MAX_JOBS", str(max(1, (os.cpu_count() or 2) - 2)))}
    command = ["nice", "-n", "5", sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(into)]
    done = subprocess.run(command, cwd=source, env=environment)
    if done.returncode:
        raise SystemExit(f"not built: the compiler's exit code was {done.returncode}; its output is above")


def install(wheel: Path) -> None:
    """Unpack a wheel into this environment's own packages: it has no scripts."""
    import zipfile

    zipfile.ZipFile(wheel).extractall(site.getsitepackages()[0])


def main() -> None:
    """Build it, install it, and try it."""
    parser = argparse.ArgumentParser(description="Build flash attention for this GPU.")
    parser.add_argument("wheels", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--arch", help="Such as 90 (default: this GPU's).")
    parser.add_argument("--one", action="store_true", help="One kernel alone, and nothing is installed: to try the compiler.")
    given = parser.parse_args()
    if shutil.which("nvcc") is None and not os.environ.get("CUDA_HOME"):
        raise SystemExit("not built: no wheel fits, and there is no nvcc")
    import torch

    arch = given.arch or "".join(map(str, torch.cuda.get_device_capability(0)))
    given.work.mkdir(parents=True, exist_ok=True)
    source = unpack(given.wheels, given.work)
    print(f"{lessen(source, given.one)} kernels for sm_{arch}", flush=True)
    build(source, arch, given.work)
    if not given.one:
        (wheel,) = given.work.glob("flash_attn-*.whl")
        install(wheel)
        subprocess.run([sys.executable, "-c", TRIAL], check=True)


TRIAL = """
import torch
from flash_attn import flash_attn_func
for size in (16, 128):
    q, k, v = (torch.randn(2, 64, 4, size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = flash_attn_func(q, k, v, causal=True)
    out.float().sum().backward()
    turned = (t.transpose(1, 2) for t in (q, k, v))
    same = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)
    worst = (out - same).abs().max().item()
    print(f"heads of {size}: largest difference from sdpa {worst:.2g}")
    assert worst < 0.05
"""


if __name__ == "__main__":
    main()
