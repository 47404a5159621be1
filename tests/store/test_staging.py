"""A store behind a URL: what comes in and goes out, both sides changed, and a replay that is killed and resumed from there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import norename
import pytest
import storecases
from commandline import run_here
from fsspec.implementations.local import LocalFileSystem
from roots import ROOT, SUPPORT, environment, json_of, read_json, write_json
from supervised import Bench, make_spec, statuses

from actordbg.base.errors import EnvironmentProblem, Refused, StoreProblem, UsageError
from actordbg.base.fault import scrub, without_password
from actordbg.cli.options import command_line
from actordbg.records.journal import rank_journal, read_events
from actordbg.store.layout import UNPRINTABLE, Store
from actordbg.store.staging import Mirror, Pusher

INPUTS = 8


def files_of(folder):
    """What is mirrored of a store, by path."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not Path(name).name.startswith(("catalog", "."))}


@pytest.fixture
def there(tmp_path, monkeypatch):
    """What lies behind a URL."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "bucket"


@pytest.fixture
def url(there):
    """A URL of a file system without rename."""
    return f"norename://{there}"


@pytest.fixture
def ours(tmp_path, url):
    """A mirror of the URL on one machine."""
    return Mirror(url, tmp_path / "a")


@pytest.fixture
def theirs(tmp_path, url):
    """The same on another one."""
    return Mirror(url, tmp_path / "b")


@pytest.fixture
def built(tmp_path):
    """A store that has everything, in the folder of `ours`."""
    return storecases.build(tmp_path / "a")


def test_a_whole_store_goes_there_and_comes_back_and_only_news_moves_then(tmp_path, built, ours, theirs, there):
    pushed = ours.push()
    assert pushed.files == len(files_of(there)) and theirs.pull().files == pushed.files
    assert files_of(tmp_path / "b") == files_of(there) and set(files_of(there)) <= set(files_of(tmp_path / "a"))
    assert storecases.contents(Store(tmp_path / "b")) == storecases.contents(built)
    assert (ours.push().files, theirs.pull().files, theirs.push().files) == (0, 0, 0)
    assert not any("catalog" in name or "/." in f"/{name}" for name in files_of(there))
    (there / ".." / "escaped").write_bytes(b"")
    (there / "replays" / ".hidden").write_bytes(b"x")
    (there / "noise" / "n-02.json").write_text("{}")
    assert theirs.pull().files == 1 and not (tmp_path / "b" / "replays" / ".hidden").exists()


def test_of_a_journal_that_both_have_the_longer_counts_and_anything_else_is_refused(tmp_path, ours, theirs, there):
    journal = Path("replays") / "r-1" / "rank0.jsonl"
    for side in (tmp_path / "a", tmp_path / "b"):
        (side / journal).parent.mkdir(parents=True)
    (tmp_path / "a" / journal).write_text("1\n")
    ours.push()
    (tmp_path / "b" / journal).write_text("1\n2\n")
    theirs.pull()
    theirs.push()
    assert (there / journal).read_text() == "1\n2\n"
    ours.push()
    assert (there / journal).read_text() == "1\n2\n", "an old one does not replace it"
    ours.pull()
    assert (tmp_path / "a" / journal).read_text() == "1\n2\n"
    (tmp_path / "a" / journal).write_text("1\n2\n3\n")
    (tmp_path / "b" / journal).write_text("1\n2\nother\n")
    theirs.push()
    with pytest.raises(StoreProblem, match=r"rank0\.jsonl was changed both here and in"):
        ours.push()
    with pytest.raises(StoreProblem, match="was changed both here"):
        ours.pull()
    assert (there / journal).read_text() == "1\n2\nother\n"


def test_a_folder_goes_behind_another_url_too_and_a_side_that_is_gone_comes_again(tmp_path, built, ours, theirs, there):
    ours.pull()
    whole = ours.push().files
    other = Mirror(f"norename://{tmp_path}/other", tmp_path / "a")
    other.pull()
    assert other.push().files == whole and files_of(tmp_path / "other") == files_of(there)
    assert theirs.pull().files == whole and not theirs.was_there
    shutil.rmtree(tmp_path / "b")
    assert theirs.pull().files == whole and files_of(tmp_path / "b") == files_of(there)
    theirs.pull()
    assert theirs.was_there and theirs.is_there
    shutil.rmtree(there)
    theirs.pull()
    assert theirs.was_there and not theirs.is_there
    assert theirs.push().files == whole and files_of(there) == files_of(tmp_path / "b")


def test_machines_that_record_for_themselves_push_behind_one_url(tmp_path, ours, theirs, there):
    for side in ("a", "b"):
        store = Store(tmp_path / side).create()
        write_json(store.root / "control.json", {"run": side})
        for place in ("backups/0a/origin.json", "controls/job.json", f"counters/{side}/0-host-1-0.json"):
            (store.root / place).parent.mkdir(parents=True)
            (store.root / place).write_text(side)
    for mirror in (ours, theirs, ours):
        mirror.pull()
        mirror.push()
    assert set(files_of(there)) == {"FORMAT", "counters/a/0-host-1-0.json", "counters/b/0-host-1-0.json"}
    assert read_json(tmp_path / "a" / "control.json")["run"] == "a"


def test_a_store_that_is_gone_there_is_not_put_there_again_by_another_command(tmp_path, there, url):
    create = ["dump", "create", "--store", url, "--seq-len", "8", "--quiet"]
    assert run_here(*create, catch_exceptions=False).exit_code == 0
    mirror = next(path for path in (tmp_path / "cache" / "actordbg" / "staged").iterdir() if path.is_dir())
    shutil.rmtree(there)
    for command in (["--store", url, "dump", "ls"], create, ["store", "pull", url, str(mirror)]):
        with pytest.raises(StoreProblem, match=r"the store at .* is gone|there is no store at"):
            run_here(*command, catch_exceptions=False)
    assert not there.exists()
    with pytest.raises(UsageError, match="every run"):
        run_here("store", "push", mirror, f"{url}#created", catch_exceptions=False)
    assert run_here("store", "push", mirror, url, catch_exceptions=False).exit_code == 0
    assert run_here(*create, catch_exceptions=False).exit_code == 0
    assert len(list(there.rglob("*.zst"))) == 2


def test_a_push_that_was_killed_in_the_middle_of_a_file_is_made_good_by_the_next_one(tmp_path, built, ours, theirs, there, url):
    ours.push()
    whole = files_of(there)
    dump = next(there.rglob("*.zst"))
    os.truncate(dump, 100)
    os.truncate(there / "FORMAT", 0)
    (tmp_path / "a.staged.json").unlink()
    theirs.pull()
    assert files_of(tmp_path / "b") != whole
    again = Mirror(url, tmp_path / "a")
    again.pull()
    assert again.push().files == 2 and files_of(there) == whole
    theirs.pull()
    assert files_of(tmp_path / "b") == whole


def moved(*words, code=0):
    """What `store pull` or `store push` left out."""
    done = run_here("store", *words, "--json")
    assert done.exit_code == code, (done.output, done.exception)
    left = json_of(done)["skipped"]
    return left


STALLED = """
import signal, sys, time, norename
from actordbg.cli.app import main
get, last = norename.NoRename.get_file, sys.argv[1]
def stalled(self, there, here, **more):
    get(self, there, here, **more)
    time.sleep(100 * (there == last))
norename.NoRename.get_file = stalled
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = [sys.argv[0], "store", "pull", *sys.argv[2:]]
main()
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_pull_beside_a_transfer_that_stalls_and_what_has_come_is_kept(tmp_path, built, ours, theirs, there, url):
    ours.push()
    whole, last = files_of(there), str(max(there.rglob("*.zst")))
    program = [sys.executable, "-c", STALLED, last, url, str(tmp_path / "b")]
    pull = subprocess.Popen(program, env=environment())
    while len(files_of(tmp_path / "b")) < len(whole) - 1 or not list((tmp_path / "b").rglob(".tmp-*")):
        assert pull.poll() is None
        time.sleep(0.02)
    pull.send_signal(signal.SIGINT)
    assert pull.wait(60) == 130 and not list((tmp_path / "b").rglob(".tmp-*"))
    assert theirs.pull().files == 1 and files_of(tmp_path / "b") == whole


def test_a_pull_takes_the_runs_that_are_named_and_names_all_that_it_leaves_out(tmp_path, monkeypatch, built, there, url):
    moved("push", str(tmp_path / "a"), url)
    whole, run = files_of(there), f"dumps/{storecases.LOOSE}"
    for name in ("b", "c"):
        assert moved("pull", f"{url}#{storecases.LOOSE}" if name == "c" else url, str(tmp_path / name)) == {}
        assert {path for path in whole if path.startswith(run)} <= set(files_of(tmp_path / name)) <= set(whole)
    assert not list((tmp_path / "c").rglob("*.pack")) and list((tmp_path / "c" / "replays").iterdir())
    folders = [path for path in (tmp_path / "b").rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    for number in (10, 11, 12):
        (there / "noise" / f"n-{number}.json").write_text("{}")
    (there / "noise" / "n-2.json").symlink_to(tmp_path)
    (there / "noise" / "n-3.json").symlink_to("nowhere")
    (there / "noise" / "n-\n.json").write_text("")
    os.mkfifo(there / "noise" / "n-4.json")
    (tmp_path / "d" / "noise" / "n-11.json").mkdir(parents=True)
    copy = norename.NoRename.get_file

    def denied(self, rpath, lpath, **options):
        if rpath.endswith("n-10.json"):
            raise PermissionError(13, "Permission denied")
        copy(self, rpath, lpath, **options)

    def shut(self, path, detail=False, **options):
        if path.endswith("shut"):
            raise PermissionError(13, "Permission denied")
        return listed_there(self, path, detail, **options)

    listed_there = norename.NoRename.ls
    (there / "noise" / "shut").mkdir()
    monkeypatch.setattr(norename.NoRename, "get_file", denied)
    monkeypatch.setattr(norename.NoRename, "ls", shut)
    left = moved("pull", url, str(tmp_path / "d"), code=1)
    assert {Path(path).name: why for path, why in left.items()} == {
        "n-2.json": "it is a symbolic link, not a file", "n-3.json": "it is a symbolic link, not a file",
        "n-4.json": "it is a FIFO, not a file", "n-\\n.json": UNPRINTABLE, "n-10.json": "Permission denied",
        "n-11.json": "it is a folder, not a file", "shut": "Permission denied",
    }  # fmt: skip
    assert len(files_of(tmp_path / "d")) == len(whole) + 1
    listed = run_here("--store", f"{url}#gone", "dump", "ls")
    assert "7 not staged: " in listed.stderr and "noise/n-3.json (it is a symbolic link, not a file)" in listed.stderr
    assert moved("pull", f"{url}#gone", str(tmp_path / "e"), code=1)["#gone"] == "no dumps of that run are there"


def test_a_push_names_all_that_it_leaves_out(tmp_path, built, there, url):
    whole, noise = files_of(tmp_path / "a"), tmp_path / "a" / "noise"
    (tmp_path / "a" / "replays").rename(tmp_path / "large-disk")
    (tmp_path / "a" / "replays").symlink_to(tmp_path / "large-disk")
    (noise / "n-2.json").symlink_to(tmp_path / "a" / "FORMAT")
    (tmp_path / "a" / "models").symlink_to(tmp_path)
    (noise / "n-3.json").write_text("{}")
    (there / "noise" / "n-3.json").mkdir(parents=True)
    os.mkfifo(noise / "n-4.json")
    left = moved("push", str(tmp_path / "a"), url, code=1)
    assert set(left) == {"replays", "noise/n-2.json", "noise/n-3.json", "noise/n-4.json"}
    assert set(files_of(there)) == {one for one in whole if not one.startswith(("replays", "backups", "control"))}


def test_folders_are_made_behind_a_url_where_they_are_real(tmp_path, monkeypatch, built):
    make, making = LocalFileSystem.makedirs, threading.Lock()

    def alone(self, path, **options):
        assert making.acquire(blocking=False), "another thread makes folders"
        time.sleep(0.001)
        make(self, path, **options)
        making.release()

    monkeypatch.setattr(LocalFileSystem, "makedirs", alone)
    mirror = Mirror(f"file://{tmp_path}/disk", tmp_path / "a")
    mirror.pull()
    assert mirror.push().files == len(files_of(tmp_path / "disk")) > 10


KILLED = """
import sys, norename
from pathlib import Path
from supervised import Bench
from actordbg.records.replay_record import ReplaySpec
from actordbg.store.layout import Store
from actordbg.store.staging import Mirror, Pusher
mirror = Mirror(sys.argv[1], Path(sys.argv[2]))
store = Store(sys.argv[2]).create()
Pusher(mirror, print, every_s=0.05)
Bench(store).run(ReplaySpec.from_json(Path(sys.argv[3]).read_bytes()), {"d3": "hang"})
"""


def ends_there(there, spec):
    journal = rank_journal(there / "replays" / spec.replay_id, 0)
    return [one["dump_id"] for one in read_events(journal) if one["event"] == "end"] if journal.is_file() else []


@pytest.mark.slow
def test_a_replay_whose_machine_dies_is_resumed_on_another_one_from_a_store_without_rename(
    tmp_path, monkeypatch, there, url, theirs
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), str(ROOT)]))
    spec = make_spec(INPUTS, timeout_s=600.0)
    (tmp_path / "spec.json").write_text(spec.to_json())
    arguments = [url, str(tmp_path / "a"), str(tmp_path / "spec.json")]
    machine = subprocess.Popen([sys.executable, "-c", KILLED, *arguments], start_new_session=True)
    while len(ends_there(there, spec)) < 3:
        assert machine.poll() is None
        time.sleep(0.02)
    machine.send_signal(signal.SIGKILL)
    machine.wait()
    theirs.pull()
    pusher = Pusher(theirs, print, every_s=0.05)
    bench = Bench(Store(tmp_path / "b").require())
    outcome = bench.run(spec, {})
    pusher.close()
    assert statuses(outcome) == {f"d{n}": "passed" for n in range(INPUTS)} and bench.left_running() == []
    assert sorted(ends_there(there, spec)) == [f"d{n}" for n in range(INPUTS)], "each once, none lost"
    events = read_events(rank_journal(there / "replays" / spec.replay_id, 0))
    started = [one["dump_id"] for one in events if one["event"] == "start"]
    assert started.count("d0") == 1 and started.count("d3") == 2


def test_commands_work_on_a_url_and_those_that_cannot_say_why(tmp_path, monkeypatch, built, there):
    url = f"memory://{tmp_path.name}/store"

    def invoke(*words):
        done = run_here(*words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert json.loads(invoke("store", "push", str(tmp_path / "a"), url, "--json"))["files"] > 10
    assert len(json.loads(invoke("--store", url, "dump", "ls", "--json"))) == 14
    invoke("dump", "create", "--store", url, "--seq-len", "8", "--quiet")
    assert len(fsspec.filesystem("memory").glob(f"/{tmp_path.name}/store/dumps/*/*/*.zst")) == 9
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert len(json.loads(invoke("--store", url, "dump", "ls", "--json"))) == 15
    for words in (["dump", "prune", "--keep", "1GB"], ["dump", "enable"], ["store", "fsck"], ["dump", "pack"]):
        with pytest.raises(Refused, match="does not work on a store behind a URL"):
            invoke("--store", url, *words)
    assert len(json.loads(invoke("--store", f"file://{tmp_path}/a", "dump", "ls", "--json"))) == 14
    with pytest.raises(UsageError, match="bad store URL"):
        invoke("--store", "nosuch://x/y", "dump", "ls")
    with pytest.raises(StoreProblem, match=f"there is no store at {url}x"):
        invoke("store", "pull", f"{url}x", str(tmp_path / "c"))
    assert f"there is no store at {url}y yet" in run_here("--store", f"{url}y", "dump", "ls").stderr
    assert json.loads(invoke("store", "pull", url, str(tmp_path / "d"), "--json"))["files"] > 10
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(EnvironmentProblem, match="needs fsspec"):
        invoke("--store", url, "dump", "ls")


@pytest.mark.parametrize("password", ["hunter22", "hunter22/x", "hunter22@x", "1234-hunter22", "hunter22'x"])
def test_a_password_in_a_url_is_in_nothing_that_is_printed_stored_or_raised(tmp_path, monkeypatch, built, there, password):
    head = f"norename://me:{password}@"
    monkeypatch.setattr(norename.NoRename, "_strip_protocol", classmethod(lambda cls, path: str(path).removeprefix(head)))
    url = f"{head}{there}"
    said = [run_here("store", "push", built.root, url).output]
    for words in (
        ["store", "pull", url, str(tmp_path / "b")],
        ["--store", url, "dump", "ls", "--json"],
        ["--store", url, "dump", "enable"],
    ):
        done = run_here(*words)
        said += [done.output, str(done.exception), getattr(done.exception, "hint", "")]
    monkeypatch.setattr(sys, "argv", ["actordbg", "--store", url, "replay"])
    said.append(command_line())
    with pytest.raises(StoreProblem) as raised:
        (there / "noise").mkdir(exist_ok=True)
        monkeypatch.setattr(norename.NoRename, "find", lambda *_, **__: 1 / 0)
        Mirror(url, tmp_path / "b").pull()
    said += [str(raised.value), raised.value.hint]
    monkeypatch.undo()
    assert any("[hidden]" in text for text in said) and len(files_of(tmp_path / "b")) > 10
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name.endswith(".staged.json") for path in written) and any(
        path.read_bytes() == f"norename://me:[hidden]@{there}".encode() for path in written
    )
    for path in written:
        said += [str(path), path.read_text(errors="replace")]
    assert not [text for text in said if "hunter22" in text]


@pytest.mark.parametrize(
    "text, shown",
    [
        ("s3://key:se/cr@bucket/x", "s3://key:[hidden]@bucket/x"), ("https://token@host/x", "https://[hidden]@host/x"),
        ("hf://token@models/x", "hf://[hidden]@models/x"), ("ssh://me@host/x\nand a@b", "ssh://[hidden]@host/x\nand a@b"),
        ("s3://key:se\ncret@bucket/x", "s3://key:[hidden]@bucket/x"), ("s3://k:p@a\nsftp://k:p@b", "s3://k:[hidden]@a\nsftp://k:[hidden]@b"),
        ("https://h/f?sig=a%2Fb&se=1", "https://h/f?sig=[hidden]&se=1"), ("'https://h?X-Amz-Signature=ab'", "'https://h?X-Amz-Signature=[hidden]'"),
        ("https://me:pa@h/?access_token=x y", "https://me:[hidden]@h/?access_token=[hidden] y"), ("a Bearer xyz", "a Bearer [hidden]"),
        *((same, same) for same in ("tcp://h:80\na@b", "hf://models/me/x@main/y", "http://h:8000/a@b", '{"u":"http://h:80","m":"a@b"}', "s3://b/a:b@c")),
    ],
)  # fmt: skip
def test_of_a_url_only_passwords_and_tokens_are_hidden(text, shown):
    assert without_password(text) == shown == scrub(text) == StoreProblem("", hint=text).hint


def test_a_secret_of_several_lines_is_hidden_whole_as_text_in_a_message_and_line_by_line(monkeypatch):
    secret = "first half\nsecond half"
    monkeypatch.setenv("PLANTED_PASSWORD", secret)
    for text in (secret, repr(secret), *secret.splitlines()):
        assert scrub(f"it is {text}!").replace("'", "") == "it is [hidden]!"
