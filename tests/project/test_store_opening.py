"""Every file of a store is opened by `open_regular` or `read_regular`: a FIFO must not hang its reader, a link not lead out.

Rooms that read a store call nothing else that opens a file. What they open beside a store is listed here, with the reason.
"""

import ast

from roots import ROOT

ROOMS = (
    "formats", "records", "store", "catalog", "dumps", "replay", "judge", "compare", "recorded", "campaign", "measure", "doctor", "cli", "trainers", "cluster",
)  # fmt: skip
OPENERS = {"open", "read_bytes", "read_text", "safe_open", "load_file"}
SAFE = {"open_regular", "known_regular", "open_pack", "atomic_write"}
ALLOWED = {
    "formats/store_files.py": "the opener itself, temporary files of its own, folders",
    "formats/ringfile.py": "rings lie in shared memory and have an opener of their own; the list of mounts",
    "store/pack_build.py": "a temporary file that it made itself, O_EXCL",
    "trainers/fitting.py": "the trainer's own source",
    "trainers/recorded_model.py": "the books of a process, by their own `open`",
    "cli/check.py": "the summary page of a GitHub workflow, which its runner names",
    "measure/log_lines.py": "a log that the user names, a pipe of the shell too",
    "measure/run_logs.py": "the same",
    "catalog/migrate.py": "a script of this package",
    "doctor/checkup.py": "/proc, and a module of this package",
    "doctor/python_environment.py": "a table of this package",
    "dumps/child_pool.py": "an old pickle that the user names",
    "dumps/containers.py": "files of a run that the user names, behind links too",
    "dumps/rows_import.py": "the same files",
    "dumps/recover.py": "/proc",
    "cluster/order.py": "a runtime environment that the user names",
    "measure/watching.py": "a file that it made itself, by the opener",
    "measure/process_memory.py": "/proc",
}
"""By module what it opens that is not a file of a store."""


def openings(source):
    """(line, text) of each call that opens a file, and is not given the descriptor or the path of a safe one."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        opens = name in OPENERS and not (name == "open" and owner not in ("", "os", "io", "gzip") and node.args == [])
        inner = {
            one.func.id
            for arg in node.args
            for one in ast.walk(arg)
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)
        }
        if opens and owner != "self.engine" and not inner & SAFE:
            yield node.lineno, ast.unparse(node)


def found():
    paths = (path for room in ROOMS for path in sorted((ROOT / "actordbg" / room).rglob("*.py")))
    named = ((path.relative_to(ROOT / "actordbg").as_posix(), path.read_text()) for path in paths)
    return {name: calls for name, source in named if (calls := [f"{name}:{line}: {text}" for line, text in openings(source)])}


def test_a_stores_files_are_opened_by_the_opener():
    calls = found()
    assert [call for name in sorted(calls.keys() - ALLOWED.keys()) for call in calls[name]] == [], "open_regular or read_regular"
    assert sorted(ALLOWED.keys() - calls.keys()) == [], "no longer an exception"


def test_the_scan_sees_what_opens_a_file():
    source = "open(p)\np.read_bytes()\nos.open(p, 0)\np.open('rb')\nsafe_open(p)\nopen(open_regular(p), 'rb')\nread_regular(p)\n"
    assert [line for line, _ in openings(source)] == [1, 2, 3, 4, 5]
