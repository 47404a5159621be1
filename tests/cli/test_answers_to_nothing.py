"""What a script meets: nothing selected has an exit code of its own, errors are JSON where JSON was requested, lists are
whole."""

import json
import subprocess
import sys

import pytest
from commandline import program, run_here, tried, typed
from roots import json_of

from actordbg.base.errors import ActordbgError, NothingToDo, StoreProblem, UsageError, WhereError
from actordbg.dumps.create import create_dumps
from actordbg.store.layout import Store

SELECTING = (
    "replay", "replay --dry-run", "matrix", "noise", "train-check", "dump export --out OUT", "dump pack", "dump unpack", "dump "
    "prune",
    "dump prune --yes", "dump verify", "dump ls",
)  # fmt: skip


@pytest.fixture(scope="module")
def sixty(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("sixty") / "store")
    create_dumps(store, 60, batch_size=1, seq_len=8)
    return store


def run(store, line, *words):
    result = tried(store, line, *words)
    known = result.exception if isinstance(result.exception, ActordbgError) else None
    return known.exit_code if known else result.exit_code, result.stdout, known.message if known else result.stderr


@pytest.mark.parametrize("line", SELECTING)
def test_nothing_selected_is_exit_5_and_0_where_that_is_allowed(sixty, tmp_path, line):
    words = [*line.replace("OUT", str(tmp_path)).split(), "--where", "seq_len>9999"]
    assert run(sixty, *words)[0] == NothingToDo.exit_code == 5
    assert run(sixty, *words, "--allow-empty")[0] == 0


@pytest.mark.parametrize("line", (*SELECTING, "check", "lint", "report", "bundle -o OUT/x"))
def test_a_bad_condition_and_a_missing_store_are_refused_before_anything_is_done(tmp_path, line):
    store, words = Store(tmp_path / "store"), [*line.replace("OUT", str(tmp_path)).split(), "--where", "typo>1"]
    assert run(store, *words)[0] in (StoreProblem.exit_code, WhereError.exit_code) and not store.root.exists()
    create_dumps(store, 1, batch_size=1, seq_len=8)
    assert run(store, *words)[0] == WhereError.exit_code == 2 and not store.catalog_path.exists()


@pytest.mark.parametrize("typed, advice", [(("--where", "seq_len>9999"), "widen"), (("--lf",), "widen"), ((), "dump create")])
def test_the_hint_is_not_to_do_what_was_done(sixty, tmp_path, typed, advice):
    store = sixty if typed else Store(tmp_path / "store").create()
    nothing = tried(store, "replay --dry-run", *typed).exception
    assert isinstance(nothing, NothingToDo) and nothing.hint is not None
    assert advice in nothing.hint and "select dumps with --where" not in nothing.hint


@pytest.mark.parametrize(
    "line, code, said",
    [
        ("train-check --show= --dry-run", 2, "training check"),  # without a name it is none, and starts no new one
        ("train-check --resume= --dry-run", 2, "training check"),
        ("report -o OUT/x.html5", 2, "cannot write .html5"),
        ("report -o OUT/missing/x.md", 4, "is not a folder"),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(sixty, tmp_path, line, code, said):
    done, shown, message = run(sixty, *line.replace("OUT", str(tmp_path)).split())
    assert done == code and said in message and (code == 2 or not shown) and list(tmp_path.iterdir()) == []


def test_a_list_in_json_is_whole_and_on_a_terminal_fifty(sixty):
    assert len(json.loads(run(sixty, "dump ls --json")[1])) == 60
    assert len(json.loads(run(sixty, "dump ls --json --limit 7")[1])) == 7
    code, shown, note = run(sixty, "dump ls")
    assert code == 0 and len(shown.splitlines()) == 51 and "10 more" in note  # headings and 50 rows


@pytest.mark.parametrize(
    "line, code",
    [
        ("--store /nowhere replay --json", "store"),
        ("--store /etc/passwd dump ls --json", "store"),
        ("--store STORE dump ls --where nonsense=1 --json", "where"),
        ("--store STORE report no-such-replay --format json", "usage"),
        ("--store STORE matrix --where seq_len>9999 --json", "nothing"),
        ("--store STORE train-check --where seq_len>9999 --json", "nothing"),
        ("dump ls --jsn --json", "usage"),
    ],
)
def test_an_error_under_json_is_json_on_standard_output_and_words_on_the_other(sixty, line, code):
    done = typed(line.replace("STORE", str(sixty.root)))
    error = json_of(done)["error"]
    assert error["code"] == code and error["message"] and error["message"].splitlines()[0] in done.stderr
    assert done.returncode == {"store": 4, "where": 2, "usage": 2, "nothing": 5}[code]


def test_an_error_behind_an_answer_is_no_second_document():
    code = "from actordbg.cli import output; output.emit_json({})"
    done = program("--store", "/nowhere", "dump", "ls", "--json", code=code)
    assert done.returncode == 4 and json_of(done) == {}
    done = program("--store", "/proc/nowhere", "run", "python", "job.py", "--json")
    assert done.returncode == 4 and done.stdout == "" and "error[" in done.stderr, "words of a job ask for no JSON"


def test_a_store_may_be_named_behind_the_command_and_once(sixty):
    done = run_here("dump", "ls", "--store", sixty.root, "--json")
    assert done.exit_code == 0 and len(json_of(done)) == 60
    for words in (["--store", "a", "dump", "ls", "--store", "b"], ["--store", "a", "--store", "b", "dump", "ls"]):
        with pytest.raises(UsageError, match="--store takes one value, but is given more than once"):
            run_here(*words, catch_exceptions=False)


def test_a_failed_import_leaves_no_store(tmp_path):
    (tmp_path / "bad.pkl").write_bytes(b"no pickle at all")
    store = Store(tmp_path / "store")
    assert run(store, "dump import", str(tmp_path / "bad.pkl"))[0] == 1
    assert not store.root.exists()


def test_a_reader_that_has_seen_enough_is_no_failure(sixty):
    words = [sys.executable, "-m", "actordbg", "--store", str(sixty.root), "dump", "ls", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 141
