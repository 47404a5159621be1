"""Makes the GPU kit: `make gpu-kit`. A folder for a machine with CUDA, Python 3.12, torch and transformers, and no package index.

    build/gpu-kit/run.sh     what to run there: `bash gpu-kit/run.sh --out DIR`
    build/gpu-kit/wheels/    what `packages.txt` lists, for Python 3.12 on x86-64 Linux, and flash-attn's source
    build/gpu-kit/tree/      this checkout: the package, its tests, its benchmarks

The packages come without their dependencies: those that are needed are in the list. DeepSpeed is an sdist that asks torch what
there is, so its wheel is built here, without any of its operators. Invariant: the folder takes less than 60 MB.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MOST_BYTES = 60_000_000
TREE = ("actordbg", "tests", "benchmarks", "migrations", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
FLASH = "flash-attn==2.8.3"
SOURCES = ("deepspeed", "openrlhf", "pylatexenc")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)]
PLATFORMS += [f"manylinux{year}_x86_64" for year in (2014, 2010, 1)]


def names_of(path: Path) -> list[str]:
    """The packages of a list with comments."""
    return [line for line in map(str.strip, path.read_text().splitlines()) if line and not line.startswith("#")]


def pinned(names: list[str], constraints: Path) -> list[str]:
    """`name==version` of each; SystemExit for a name that has no version there."""
    versions = {_plain(name): version for name, _, version in (line.partition("==") for line in names_of(constraints))}
    missing = [name for name in names if _plain(name) not in versions]
    if missing:
        raise SystemExit(f"{constraints} pins no version of {', '.join(missing)}")
    return [f"{name}=={versions[_plain(name)]}" for name in names]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def copy_tree(into: Path) -> None:
    """This checkout's files as git has them or would add them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *TREE], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def fetch_wheels(into: Path) -> None:
    """Download what the list names; build the wheel of what has none."""
    wanted = pinned(names_of(HERE / "packages.txt"), ROOT / "constraints.txt")
    built = [name for name in wanted if name.startswith(SOURCES)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    download = [
        *pip,
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
    ]
    subprocess.run([*download, *platforms, "--dest", str(into), *(name for name in wanted if name not in built)], check=True)
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    subprocess.run(
        [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(into), *built],
        check=True,
        env=environment,
    )
    for path in into.glob("openrlhf-*-cp3*.whl"):  # it has no compiled code, whatever its name says
        tags = ["--remove", "--python-tag", "py3", "--abi-tag", "none", "--platform-tag", "any"]
        subprocess.run([sys.executable, "-m", "wheel", "tags", *tags, str(path)], check=True, stdout=subprocess.DEVNULL)
    fetch_source(into)


def fetch_source(into: Path) -> None:
    """flash-attn's source, less what no build for CUDA reads."""
    import tarfile

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--no-binary=:all:", "--dest", str(into), FLASH],
        check=True,
        env=os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"},
    )
    (path,) = into.glob("flash_attn-*.tar.gz")
    lean = path.with_suffix(".lean")
    with tarfile.open(path) as source, tarfile.open(lean, "w:gz") as made:
        for member in source:
            if not re.search(
                r"/csrc/(composable_kernel|flash_attn_ck|layer_norm|fused_dense_lib)/|/hopper/|/tests/", member.name
            ):
                made.addfile(member, source.extractfile(member) if member.isfile() else None)
    lean.replace(path)


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def make(into: Path, wheels: bool = True) -> int:
    """Make the kit anew; its bytes."""
    shutil.rmtree(into, ignore_errors=True)
    (into / "wheels").mkdir(parents=True)
    copy_tree(into / "tree")
    shutil.copy2(HERE / "run.sh", into / "run.sh")
    if wheels:
        fetch_wheels(into / "wheels")
    return size_of(into)


def main() -> None:
    """Make it, and say how large it is."""
    parser = argparse.ArgumentParser(description="Make the GPU kit.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "gpu-kit")
    folder = parser.parse_args().folder
    nbytes = make(folder)
    print(f"{folder}: {nbytes / 1e6:.1f} MB. Copy it to the machine, then: bash {folder.name}/run.sh --out DIR")
    if nbytes > MOST_BYTES:
        raise SystemExit(f"that is more than {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
