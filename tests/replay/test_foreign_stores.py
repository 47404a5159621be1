"""A colleague's store is read freely. What in it decides what runs is shown, and confirmed; one's own is never asked for."""

import os
import sqlite3
import subprocess
import sys
import tempfile

import norename  # noqa: F401  registers the file system
import pytest
import typer
from commandline import in_json, invoke, run_here
from comparecases import write_replay
from ownercases import give_away
from replaycases import publish
from roots import run_program, write_json
from torch._inductor.runtime.runtime_utils import default_cache_dir

from actordbg.actor.actors import actors_of
from actordbg.actor.backends import backend
from actordbg.actor.models import locate
from actordbg.base import owners
from actordbg.base.errors import CatalogProblem, EnvironmentProblem, Refused, StoreProblem, Unsupported
from actordbg.campaign import run_matrix
from actordbg.campaign.run_train_check import CHECK, folder_of
from actordbg.catalog.connections import connect_readonly
from actordbg.catalog.indexer import refresh
from actordbg.catalog.query import dump_path
from actordbg.cli.options import approve
from actordbg.config import consent
from actordbg.config.choices import Choices
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.ringfile import new_file
from actordbg.install import patch_target
from actordbg.records.journal import SPEC
from actordbg.records.matrix_record import BASELINE, NOT_RUN, OPEN, MatrixCell, MatrixRecord, TrainCell, TrainCheckRecord
from actordbg.replay.launch import child_environment
from actordbg.replay.work_order import await_next, mailbox_of
from actordbg.store.layout import Store
from actordbg.trainers.find_adapter import of_user

REPLAY, MOMENT = "20250619T052608-000001", "2025-06-19T05:26:08.430740Z"
MODEL = "/models/of\x1b[31m-a-colleague"


def test_going_on_with_anothers_replay_is_confirmed(store, monkeypatch):
    write_replay(store, REPLAY, publish(store, 1))
    resume = ("replay", "--resume", REPLAY, "--dry-run")
    assert "wrote" not in invoke(store, *resume).stderr, "one's own is not asked for"
    origin = owners.origin_file(store.replays / REPLAY / SPEC)
    origin.write_text("x" * 10**6)
    with pytest.raises(Refused, match=r"somebody with access to x{300} wrote"):  # it floods no terminal
        invoke(store, *resume)
    origin.unlink()
    give_away(store.replays / REPLAY / SPEC, monkeypatch)
    with pytest.raises(Refused, match=rf"uid 54321.* wrote replay {REPLAY}, whose model is 'tiny'") as refused:
        invoke(store, *resume)
    assert refused.value.exit_code == 3 and "--yes" in refused.value.hint
    done = invoke(store, *resume, "--yes")
    assert done.exit_code == 0 and f"wrote replay {REPLAY}, whose model is 'tiny'" in done.stderr
    assert invoke(store, "report", REPLAY).exit_code == 0, "reading asks nothing"


def stopped_matrix(store, dumps):
    cell = MatrixCell(0, "plain", {}, NOT_RUN, ReplayConfig(model=MODEL).to_dict())
    matrix = MatrixRecord(REPLAY, MOMENT, "interrupted", {}, (cell,), dumps, options={"oracle": None})
    store.publish_text(run_matrix.path_of(store, REPLAY), matrix.to_json())


@pytest.mark.parametrize(
    "command, said",
    [
        (["matrix", "--resume", "last"], r"wrote matrix .* whose model is '/models/of\\x1b\[31m-a-colleague'"),
        (["compare", REPLAY, "truth"], rf"wrote replay {REPLAY}, whose model '/models/of\\x1b.* would be loaded"),
    ],
)
def test_the_model_of_anothers_matrix_or_replay_is_confirmed_before_it_is_loaded(command, said, store, monkeypatch):
    inputs = publish(store, 1)
    stopped_matrix(store, tuple(item.dump_id for item in inputs))
    write_replay(store, REPLAY, inputs, model=MODEL)
    refresh(store)
    give_away(run_matrix.path_of(store, REPLAY) if "matrix" in command else store.replays / REPLAY / SPEC, monkeypatch)
    with pytest.raises(Refused, match=said):
        invoke(store, *command)


def test_a_replay_or_a_matrix_that_says_it_is_another_is_refused(store):
    other = "20250619T052608-000002"
    write_replay(store, REPLAY, inputs := publish(store, 1))
    stopped_matrix(store, tuple(item.dump_id for item in inputs))
    for path in (store.replays / REPLAY, run_matrix.path_of(store, REPLAY)):
        path.rename(path.with_name(path.name.replace(REPLAY, other)))
    with pytest.raises(StoreProblem, match="another replay's"):
        invoke(store, "replay --resume last --dry-run")
    with pytest.raises(StoreProblem, match="another matrix's id"):
        invoke(store, "matrix --show last")


@pytest.fixture
def behind_a_url(store, tmp_path, monkeypatch):
    """A replay, a matrix and a training check, each of which can be continued with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    inputs = publish(store, 1)
    write_replay(store, REPLAY, inputs, model=MODEL)
    names = tuple(item.dump_id for item in inputs)
    stopped_matrix(store, names)
    trained = TrainCell(0, BASELINE, "plain", ReplayConfig(model=MODEL).to_dict(), "a.log", OPEN)
    check = TrainCheckRecord(REPLAY, MOMENT, "interrupted", (trained,), names, 4, 2, "fp32", 0.05, {}, "/logs")
    store.publish_text(folder_of(store, REPLAY) / CHECK, check.to_json())
    url = f"norename://{tmp_path}/bucket"
    invoke(store, "store push", str(store.root), url)
    return url


GOING_ON = [
    ["replay", "--resume", REPLAY, "--dry-run"], ["matrix", "--resume", REPLAY],
    ["train-check", "--resume", REPLAY, "--dry-run"], ["compare", REPLAY, "truth"],
]  # fmt: skip


@pytest.mark.parametrize("command", GOING_ON)
def test_what_came_from_a_url_is_foreign_until_it_is_confirmed(command, behind_a_url, tmp_path):
    """Bringing a file in makes it this user's, and not what this user wrote."""
    mirror, moved = Store(tmp_path / "mirror"), Store(tmp_path / "moved")
    invoke(mirror, "store pull", behind_a_url, str(mirror.root))
    mirror.root.rename(moved.root)
    refused = r"somebody with access to norename://.*/bucket wrote .*, whose model .*'/models/of\\x1b\[31m-a-colleague'"
    for root in (moved.root, behind_a_url, moved.root):
        with pytest.raises(Refused, match=refused):
            done = run_here("--store", root, *command)
            raise done.exception or AssertionError(done.output)
        invoke(moved, "store pull", behind_a_url, str(moved.root))
    done = run_here("--store", moved.root, *command, "--yes")
    assert "somebody with access to" in done.stderr and not isinstance(done.exception, Refused)


def test_what_one_wrote_stays_ones_own_beside_what_came_from_a_url(behind_a_url, store, tmp_path):
    there, back = tmp_path / "bucket" / "replays" / REPLAY / SPEC, Store(tmp_path / "back")

    def is_asked(mine, replay):
        with pytest.raises((Refused, EnvironmentProblem), match=r"somebody with access to|there is no model") as ended:
            invoke(mine, "replay --resume", replay, "--dry-run")
        return ended.type is Refused

    assert not is_asked(store, REPLAY), "what was pushed"
    os.utime(there, (1, 1))
    assert in_json(store, "store pull", behind_a_url, str(store.root))["files"] == 1
    assert not is_asked(store, REPLAY), "what came back as it was"
    invoke(back, "store pull", behind_a_url, str(back.root))
    later = write_replay(back, "20250619T052608-000002", publish(back, 1), model=MODEL)
    assert is_asked(back, REPLAY) and not is_asked(back, later), "what was made there afterwards"
    there.write_text(there.read_text() + " ")
    invoke(store, "store pull", behind_a_url, str(store.root))
    assert is_asked(store, REPLAY), "what was changed there"


def test_a_settings_file_that_came_from_a_url_decides_nothing(behind_a_url, tmp_path, monkeypatch):
    """It would lie in the store, where commands are typed, and be this user's."""
    (tmp_path / "bucket" / "actordbg.toml").write_text('[replay]\nmodel = "/models/of-others"\n')
    mirror = Store(tmp_path / "mirror")
    invoke(mirror, "store pull", behind_a_url, str(mirror.root))
    monkeypatch.chdir(mirror.root)
    with pytest.raises(Refused, match=r"actordbg.toml belongs to somebody with access to norename://"):
        invoke(mirror, "replay --max-inputs 1 --dry-run")


def test_a_link_of_another_in_the_place_of_a_replays_folder_is_confirmed(store, tmp_path, monkeypatch):
    """Else results of a colleague's dumps would be written into one's own replay."""
    write_replay(store, REPLAY, inputs := publish(store, 1))
    theirs = Store(tmp_path / "theirs").create()
    assert [one.dump_id for one in publish(theirs, 1)] == [one.dump_id for one in inputs]
    theirs.replays.mkdir(exist_ok=True)
    link = theirs.replays / REPLAY
    link.symlink_to(store.replays / REPLAY)
    resume = ("replay", "--resume", REPLAY, "--dry-run")
    assert invoke(theirs, *resume).exit_code == 0, "a link of one's own is not asked for"
    give_away(link, monkeypatch)
    with pytest.raises(Refused, match=rf"uid 54321.* wrote replay {REPLAY}"):
        invoke(theirs, *resume)


def test_a_truth_that_is_there_loads_no_foreign_model_for_what_the_dtype_costs(store, monkeypatch):
    """Whoever writes the replay can write its truth too."""
    inputs = publish(store, 1)
    write_replay(store, REPLAY, inputs, model=MODEL, dtype="bf16")
    write_replay(store, "20250619T052608-000002", inputs, model=MODEL, dtype="bf16", truth="fp32")
    give_away(store.replays / REPLAY / SPEC, monkeypatch)
    with pytest.raises(Refused, match=rf"wrote replay {REPLAY}, whose model .* would be loaded"):
        invoke(store, "compare", REPLAY, "truth")
    assert invoke(store, "compare", REPLAY, "truth", "--flat-limits").exit_code == 0


PLANTED = """
import pathlib
pathlib.Path(__file__).with_name("marker").touch()
from actordbg.trainers.seam import Seam
class X:
    name, package, tried, seams = "x", "planted", (), (Seam("planted:f", rows=lambda call: None, again=lambda model, rows: None),)
"""


@pytest.mark.forked
def test_a_module_that_a_dump_names_is_never_imported(store, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path))
    seam = {"trainer": "planted", "function": "planted:f", "actor_class": "planted:X.f"}
    inputs = publish(store, 1, length=16, actor=seam | {"adapter": "planted:X"})
    write_replay(store, REPLAY, inputs, through="trainer", status="interrupted")
    trainer, refused = ("--where", "adapter='planted:X'", "--through", "trainer"), "planted:X is not installed here"
    for words in (["replay", *trainer], ["check", *trainer], ["noise", *trainer], ["replay", "--resume", REPLAY]):
        with pytest.raises(Unsupported, match=refused):
            invoke(store, *words)
    for words in (["dump", "ls"], ["dump", "show", "last"], ["train-check", *trainer, "--dry-run"], ["compare", REPLAY, "truth"]):
        invoke(store, *words)
    cells = invoke(store, "matrix", *trainer[:2], "--through", "rows,trainer", "--compile", "off", "--dry-run", "--json").stdout
    assert refused in cells
    actors_of(Choices("tiny", "fp32", "sdpa", False, 1.0, False, adapter="planted:X"))  # what a worker does
    assert "planted" not in sys.modules and not (tmp_path / "marker").exists()
    assert of_user("planted:X").name == "x" and (tmp_path / "marker").exists(), "the user's own --adapter is another matter"


def test_at_a_terminal_it_is_asked(monkeypatch):
    asked = []
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda text, err: asked.append(text) or len(asked) == 1)
    monkeypatch.setattr(owners, "own_uids", lambda: frozenset({1}))
    approve("replay X", 54321, False)
    with pytest.raises(Refused):
        approve("replay X", 54321, False)
    approve("replay X", 1, False)
    assert asked == ["uid 54321 wrote replay X. Continue?"] * 2


def test_a_waiting_worker_is_not_sent_out_of_its_store(tmp_path):
    work = tmp_path / "replays" / REPLAY / "work-0-1.json"
    work.parent.mkdir(parents=True)
    write_json(mailbox_of(work), {"work": "/home/me/.config/work-0-1.json"})
    assert await_next(work) == tmp_path / "replays" / ".config" / "work-0-1.json"


@pytest.mark.parametrize(
    "row", [("../../../../victim", "run", 0), ("dump", "/etc", 0), ("dump", "run", 0, "packs/../../other.pack")]
)
def test_no_row_of_anothers_catalog_names_a_place_outside(row):
    """A catalog is an SQLite file that somebody may have made. Its rows say what is read, moved and removed."""
    with pytest.raises(CatalogProblem, match="outside the store"):
        dump_path(*row)


def test_anothers_catalog_loads_no_extension(store):
    publish(store, 1)
    refresh(store)
    with sqlite3.connect(store.catalog_path) as catalog:
        catalog.execute("CREATE TRIGGER t AFTER INSERT ON dump BEGIN SELECT load_extension('/tmp/evil'); END")
    publish(store, 1, first=1)
    with pytest.raises(CatalogProblem, match="it has a trigger 't'"):
        refresh(store)
    with connect_readonly(store.catalog_path) as opened, pytest.raises(sqlite3.OperationalError, match="not authorized"):
        opened.execute("SELECT load_extension('/tmp/evil')")


def test_a_ring_takes_the_place_of_no_file_and_follows_no_link(tmp_path):
    """Who writes the switch names the folder of rings, and could have put something there beforehand."""
    kept, link = tmp_path / "kept.ring", tmp_path / "link.ring"
    kept.write_bytes(b"mine")
    link.symlink_to(tmp_path / "elsewhere")
    for taken in (kept, link):
        with pytest.raises(FileExistsError):
            new_file(taken)
    assert kept.read_bytes() == b"mine" and not (tmp_path / "elsewhere").exists()


def test_no_process_of_ours_imports_from_the_current_folder(tmp_path, monkeypatch):
    """A command may be typed in anybody's folder. Python 3.10 cannot be told so."""
    for name in ("argparse", "json"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    around = child_environment(ReplayConfig(), os.environ)
    done = subprocess.run(
        [sys.executable, "-m", "actordbg.replay.worker", "--help"], env=around, capture_output=True, check=False
    )
    if sys.version_info >= (3, 11):
        assert done.returncode == 0
        assert patch_target.ask(sys.executable, "hook")["executable"] == sys.executable
    assert (tmp_path / "ran").exists() == (sys.version_info < (3, 11))
    assert around["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"


def test_a_folder_in_the_place_of_a_cache_goes_with_its_process(tmp_path):
    (tmp_path / "file").touch()  # no folder can be made below it
    around = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    code = "from actordbg.base.owners import own_cache; path = own_cache('inductor'); assert path.is_dir(); print(path)"
    made = run_program([sys.executable, "-c", code], env=around, check=True).stdout
    assert made.startswith(f"{tmp_path}/actordbg-") and os.listdir(tmp_path) == ["file"]


def test_what_is_executed_later_lies_in_the_users_own_cache(store, monkeypatch, tmp_path):
    """Kernels that torch.compile built, and a shortened model that brings code: others may write into a store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    backend._prepare_compiler()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine"), "what the user set stays"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch leaves it, below /tmp
    backend._prepare_compiler()
    kernels = tmp_path / "cache" / "actordbg" / "inductor"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(kernels) and kernels.stat().st_mode & 0o777 == 0o700
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"num_hidden_layers": 2, "auto_map": {"AutoConfig": "own.Own"}}')
    assert locate(str(model), store.models, num_layers=1).startswith(str(store.models))
    consent.give(str(model))
    assert locate(str(model), store.models, num_layers=1).startswith(str(tmp_path / "cache" / "actordbg" / "models"))
    consent.withhold()
    kernels.chmod(0o777)
    assert owners.own_cache("inductor") != kernels
    kernels.chmod(0o700)
    give_away(kernels, monkeypatch)
    assert owners.own_cache("inductor") != kernels
