"""Show that a refactoring changed nothing: `make same BEFORE=DIR`, or `python tests/project/same.py BEFORE [NOW]`.

A fixed list of commands runs on the same inputs in both checkouts: the 257 real pickles where they are there, else dumps that
`dump create` makes. Kept of each command: its exit code, every value of its JSON, the lines of its text, and the digest of each file
that it wrote. BEFORE runs twice, so that what differs from run to run (ids, times, peaks of memory) is measured rather than listed:
a value that differs between the two runs of BEFORE is not compared. Exits with 1 if anything else differs.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICKLES = ROOT.parent / "shared" / "data" / "input_dumps"
SMALL = "batch_size*seq_len<1200"
"""Selects the inputs that a replay on a CPU takes in a moment."""


STEPS = """
import    dump import INPUT --json
create    dump create --count 6 --batch-size 2 --seq-len 96 --json
index     index --json
rebuild   index --rebuild --json
ls        dump ls --json --limit 0
where     dump ls --where "seq_len>200 and rank=0 or padding>0.3" --limit 0
bad       dump ls --where "seq_len>"
columns   dump columns --json
verify    dump verify --json
export    dump export --where "seq_len<400" --out OUT/exported
pack      dump pack --json
packed    dump ls --json --limit 0
exported  dump export --where "seq_len<400" --out OUT/exported_again
unpack    dump unpack --all --json
status    status --json
plain     replay --where WHERE --max-inputs 3 --laws 1 --name plain --json
packing   replay --where WHERE --max-inputs 3 --packing --name packing --json
bf16      replay --where WHERE --max-inputs 3 --dtype bf16 --name bf16 --json
zero2     replay --where WHERE --max-inputs 2 --backend deepspeed --zero-stage 2 --nproc 2 --name zero2 --json
broken    replay --where WHERE --max-inputs 2 --tp 3 --json
replays   replay ls --json
truth     compare plain truth --json
text      compare packing truth --power
sides     compare bf16 plain --json -o OUT/sides.html
report    report plain --json
page      report plain --format html --output OUT/plain.html
markdown  report --all --format md
csv       report plain --format csv
check     check --where WHERE --max-inputs 3 --json -o OUT/check.html
matrix    matrix --where WHERE --max-inputs 1 --packing off,on --dtype fp32,bf16 --json
cells     matrix --where WHERE --max-inputs 1 --packing off,on --backend plain,deepspeed --zero-stage 0
noise     noise --where WHERE --max-inputs 2 --dtype bf16 --json
train     train-check --where WHERE --backend plain --steps 3 --json
logs      compare-logs LOG LOG2 --json
fsck      store fsck --json
prune     dump prune --where "rank=0 and seq_len>300" --json
doctor    doctor --json
adapters  adapters --json
help      --help
"""


def steps(inputs, out):
    """Yields the name and the arguments of each command."""
    made = {"INPUT": str(inputs), "WHERE": SMALL, "LOG": str(out / "a.log"), "LOG2": str(out / "b.log")}
    for line in STEPS.strip().splitlines():
        name, *words = shlex.split(line)
        yield name, [made.get(word, word.replace("OUT", str(out))) for word in words]


def leaves(value, path):
    """Yields the path and the text of every value in a JSON document."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from leaves(item, f"{path}[{position}]")
    else:
        yield path, json.dumps(value)


def printed(text, path):
    """Yields the values of a JSON document, or the lines of a text with every number replaced by #."""
    try:
        document = json.loads(text)
    except ValueError:
        for position, line in enumerate(text.splitlines()):
            yield f"{path} line {position}", re.sub(r"\d[\d.,:TZ/-]*", "#", re.sub(r"\s+", " ", line))
        return
    yield from leaves(document, path)


def rows(catalog):
    """Yields every row of every table of a catalog, and the statement that made the table."""
    with sqlite3.connect(f"file:{catalog}?mode=ro", uri=True) as connection:
        for table, statement in sorted(connection.execute("SELECT name, sql FROM sqlite_master WHERE type='table'")):
            yield f"{table} schema", re.sub(r"\s+", " ", statement)
            names = [column[1] for column in connection.execute(f'PRAGMA table_info("{table}")')]
            for position, row in enumerate(connection.execute(f'SELECT * FROM "{table}" ORDER BY 1')):
                yield from ((f"{table}[{position}].{name}", repr(value)) for name, value in zip(names, row, strict=True))


def files(folder):
    """Yields the digest of every file below a folder, by a name in which numbers are #."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        yield f"{path.relative_to(folder)}", hashlib.sha256(path.read_bytes()).hexdigest()


def run(checkout):
    """Runs the commands in a checkout and returns everything that they printed and wrote."""
    work = Path(tempfile.mkdtemp(prefix="same-"))
    store, out = work / "store", work / "out"
    out.mkdir()
    for name, offset in ("a.log", 0.0), ("b.log", 0.01):
        (out / name).write_text("".join(f"step {n}: loss={2.0 / n + offset * (n == 7)}\n" for n in range(1, 12)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACTORDBG_")}
    environment = kept | {"PYTHONPATH": str(checkout), "COLUMNS": "80", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    environment |= {"HOME": str(work), "CUDA_VISIBLE_DEVICES": ""}
    everything = {}
    for name, words in steps(PICKLES if PICKLES.is_dir() else store / "dumps", out):
        command = [sys.executable, "-m", "actordbg", "--store", str(store), *words]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        texts = {
            stream: text.replace(str(work), "WORK").replace(sys.prefix, "VENV").replace(str(checkout), "CHECKOUT")
            for stream, text in (("stdout", done.stdout), ("stderr", done.stderr if done.returncode else ""))
        }
        print(f"  {name}: exit {done.returncode}", file=sys.stderr, flush=True)
        everything[f"{name}: exit"] = str(done.returncode)
        for stream, text in texts.items():
            everything |= {f"{name}: {path}": value for path, value in printed(text, stream)}
        if name in ("rebuild", "pack", "check"):
            everything |= {f"{name}: catalog {path}": value for path, value in rows(store / "catalog.db")}
        if name in ("import", "pack"):
            everything |= {f"{name}: store {path}": digest for path, digest in files(store / "dumps")}
    everything |= {f"files: {path}": digest for path, digest in files(out)}
    shutil.rmtree(work)
    return {without_ids(path): value for path, value in everything.items()}


def without_ids(path):
    """Returns a path without the time and the random part of ids made today, so that two runs have the same paths."""
    return re.sub(time.strftime(r"%Y%m%d[-T]\d{6}(\.\d{6})?Z?((-\d+)*)(-[0-9a-f]{6,8}\b)?", time.gmtime()), r"ID\2", path)


def differences(before, again, now):
    """Returns what differs between two checkouts, by path: the value before and the value now; `-` if there is none.

    `before` and `again` are two runs of the first checkout: what differs between them is not compared.
    """
    paths = [path for path in before.keys() | now.keys() if before.get(path) == again.get(path) != now.get(path)]
    return {path: (before.get(path, "-"), now.get(path, "-")) for path in sorted(paths)}


def main(arguments):
    """Compares two checkouts and prints what differs."""
    first, last = (Path(word).resolve() for word in [*arguments, ROOT][:2])
    before, again, now = run(first), run(first), run(last)
    changed = differences(before, again, now)
    for path, (old, new) in changed.items():
        print(f"{path}\n  before: {old[:300]}\n  now:    {new[:300]}")
    compared = sum(again.get(path) == value for path, value in before.items())
    print(f"{compared:,} values compared, {len(before) - compared:,} change from run to run, {len(changed):,} differ")
    return 1 if changed or not compared else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
