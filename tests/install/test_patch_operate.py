"""patch and unpatch on real files: byte, mode and time restored, edits kept, nothing hidden, nothing half done."""

import errno
import json
import os
import py_compile
import shutil
import stat
import sys
from pathlib import Path

import pytest
from commandline import run_here
from patchkit import ACTOR, OLD, facts_of, light_hook, written

from actordbg.base.errors import ActordbgError, Conflict, EnvironmentProblem, Unsupported
from actordbg.capture.control import Control
from actordbg.capture.switch_file import write_control
from actordbg.formats.dump_record import now_timestamp
from actordbg.install import patching, replace_file as replace
from actordbg.install.patch_target import find_target
from actordbg.install.trailer import State
from actordbg.store.layout import Store

__all__ = ["light_hook"]
pytestmark = pytest.mark.usefixtures("light_hook")
UNCHECKED, CHECKED, TIMESTAMP = (py_compile.PycInvalidationMode[name] for name in ("UNCHECKED_HASH", "CHECKED_HASH", "TIMESTAMP"))


@pytest.fixture
def actor(tmp_path):
    """A file as OpenRLHF installs it, with an unusual mode and an old time."""
    return written(tmp_path / "site" / "openrlhf" / "models" / "actor.py")


def patch(path, store, **how):
    return patching.patch(find_target(target=path), store, **how)


def unpatch(path, store, **how):
    return patching.unpatch(find_target(target=path), **how)


def status(path, store):
    return patching.inspect_target(find_target(target=path), store)


def compiled(path, mode):
    return Path(str(py_compile.compile(str(path), doraise=True, invalidation_mode=mode)))


def edited(path):
    path.write_bytes(path.read_bytes().replace(b"An actor.", b"Mine."))
    return path.read_bytes()


def said(notes, text):
    return any(text in line for line in notes)


def test_unpatch_restores_sha256_mode_and_mtime_of_the_installed_actor_and_both_can_be_repeated(tmp_path, store):
    path = written(tmp_path / "actor.py", find_target(python=Path(sys.executable)).path.read_bytes(), 0o751)
    before = facts_of(path)
    assert unpatch(path, store).action == "not patched"
    done = patch(path, store)
    assert (done.action, done.state) == ("patched", State.PATCHED)
    patched = facts_of(path)
    assert patched[1:3] == before[1:3] and patched[3] != before[3] and status(path, store).hooked
    assert patch(path, store).action == "already patched" and facts_of(path) == patched
    undone = unpatch(path, store)
    assert (undone.action, undone.sha256_before, undone.sha256_after) == ("unpatched", done.sha256_after, done.sha256_before)
    assert unpatch(path, store).action == "not patched" and facts_of(path) == before and not status(path, store).hooked
    assert not (path.parent / "__pycache__").exists()


def test_the_commands_say_it_as_text_and_as_json_and_a_dry_run_changes_nothing(actor, tmp_path):
    before = facts_of(actor)

    def run(command, *options):
        done = run_here("--store", tmp_path / "kept", command, "--target", actor, *options)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout) if "--json" in options else done

    shown = run("patch", "--dry-run", "--json")
    assert (
        shown["dry_run"]
        and not shown["next"]
        and shown["action"] == "patched"
        and facts_of(actor) == before
        and not (tmp_path / "kept").exists()
    )
    assert "+# >>> actordbg trailer" in shown["diff"] and "\n-" not in shown["diff"].replace("\n---", "")
    patched = run("patch")
    assert patched.stdout.startswith(f"patched: {actor}\n") and "dump enable" in patched.stderr
    assert run("patch", "--json")["next"] == f"actordbg --store {tmp_path / 'kept'} dump enable"
    seen = run("status", "--json")
    assert (seen["state"], seen["hooked"], seen["armed"], seen["store"]) == ("patched", True, False, str(tmp_path / "kept"))
    assert "hook seen   yes" in run("status").stdout
    run_here("--store", tmp_path / "kept", "dump", "enable", "--free-floor", "0")
    assert run("status").stderr.endswith(" dump status\n")
    assert "-# >>> actordbg trailer" in run("unpatch", "--dry-run", "--json")["diff"]
    undone = run("unpatch", "--json")
    assert (undone["action"], undone["state"], undone["sha256_after"]) == ("unpatched", "clean", seen["original_sha256"])
    assert undone["sha256_before"] == seen["sha256"] and facts_of(actor) == before


def test_another_store_renews_the_trailer_and_the_original_still_comes_back(actor, store, tmp_path):
    before = facts_of(actor)
    patch(actor, store)
    other = Store(tmp_path / "other")
    assert patch(actor, other).action == "trailer renewed"
    assert status(actor, other).store == str(other.root)
    unpatch(actor, other)
    assert facts_of(actor) == before


def test_unpatch_needs_neither_the_store_nor_actordbg_in_the_interpreter(actor, store, monkeypatch):
    before = facts_of(actor)
    patch(actor, store)
    shutil.rmtree(store.root)
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    unpatch(actor, Store("/nowhere/store"))
    assert facts_of(actor) == before


def test_an_edit_since_is_kept_without_the_old_time_and_not_moved_to_another_store(actor, store, tmp_path):
    patch(actor, store)
    mine = edited(actor)
    assert status(actor, store).state is State.EDITED and patch(actor, store).action == "already patched"
    with pytest.raises(Conflict, match="edited") as refusal:
        patch(actor, Store(tmp_path / "other"))
    assert "unpatch" in refusal.value.hint and actor.read_bytes() == mine
    assert said(unpatch(actor, store).notes, "edit is kept")
    assert actor.read_bytes() == ACTOR.replace(b"An actor.", b"Mine.")
    assert actor.stat().st_mtime_ns != OLD and stat.S_IMODE(actor.stat().st_mode) == 0o640


@pytest.mark.parametrize("change", [lambda d: d + b"mine = 1\n", lambda d: d.replace(b"install(Actor", b"install(Critic")])
def test_an_edit_in_or_behind_the_trailer_is_refused_with_a_remedy(actor, store, change):
    patch(actor, store)
    actor.write_bytes(change(actor.read_bytes()))
    before = facts_of(actor)
    for action in (patch, unpatch):
        with pytest.raises(Conflict) as refusal:
            action(actor, store)
        assert f"line {len(ACTOR.splitlines()) + 2} to the end is the trailer" in refusal.value.hint
        assert refusal.value.exit_code == 3 and facts_of(actor) == before


def test_an_upgrade_over_the_patch_is_clean_and_can_be_patched_again(actor, store):
    patch(actor, store)
    written(actor, ACTOR + b"# next version\n")
    assert status(actor, store).state is State.CLEAN and not said(status(actor, store).notes, "has no hook")
    write_control(store, Control(enabled=True, run="run", since=now_timestamp()))
    assert said(status(actor, store).notes, "has no hook")
    assert patch(actor, store).action == "patched" and status(actor, store).state is State.PATCHED


# --- what Python would really run ---------------------------------------------------------------------------------------


def test_an_unchecked_hash_pyc_that_would_hide_the_hook_undoes_the_patch_and_is_told_of_later(actor, store):
    cached = compiled(actor, UNCHECKED)
    before, hidden = facts_of(actor), cached.read_bytes()
    with pytest.raises(Conflict, match="does not see the hook") as refusal:
        patch(actor, store)
    assert str(cached) in refusal.value.hint and facts_of(actor) == before
    cached.unlink()
    assert patch(actor, store).action == "patched"
    cached.write_bytes(hidden)
    found = status(actor, store)
    assert found.state is State.PATCHED and found.hooked is False and not found.armed
    with pytest.raises(Conflict, match="does not see the hook"):
        patch(actor, store)


def test_an_unchecked_hash_pyc_that_keeps_the_hook_is_reported_after_unpatch(actor, store):
    patch(actor, store)
    compiled(actor, UNCHECKED)
    with pytest.raises(Conflict, match="still sees the hook"):
        unpatch(actor, store)
    assert actor.read_bytes() == ACTOR, "the source is restored all the same"


@pytest.mark.parametrize("mode", [TIMESTAMP, CHECKED])
def test_an_ordinary_pyc_hides_neither_the_patch_nor_its_removal(actor, store, mode):
    compiled(actor, mode)
    patch(actor, store)
    assert status(actor, store).hooked
    cached = compiled(actor, mode)
    if mode is TIMESTAMP:  # compiled while the file was being restored: right time and size, wrong code
        stale = bytearray(cached.read_bytes())
        stale[8:16] = (OLD // 10**9).to_bytes(4, "little") + len(ACTOR).to_bytes(4, "little")
        cached.write_bytes(stale)
    unpatch(actor, store)
    assert not status(actor, store).hooked


def test_a_file_that_the_interpreter_cannot_compile_is_given_back(actor, store):
    before = facts_of(written(actor, ACTOR + b"return 1\n"))
    with pytest.raises(Conflict, match="cannot compile"):
        patch(actor, store)
    assert facts_of(actor) == before
    written(actor, b"def f(:")
    with pytest.raises(Unsupported, match=rf"{actor}: .*actor.py, line 1"):
        patch(actor, store)


# --- the file system ----------------------------------------------------------------------------------------------------


def test_hard_links_keep_the_original_symbolic_links_stay_and_extended_attributes_are_kept(actor, store, tmp_path):
    cache, link = tmp_path / "cache.py", tmp_path / "link.py"
    os.link(actor, cache)
    link.symlink_to(actor)
    try:
        os.setxattr(actor, "user.note", b"mine")
        attributes = ["user.note"]
    except OSError:  # this file system has no user attributes
        attributes = []
    done = patch(link, store)
    assert done.file == str(actor) and said(done.notes, "hard-linked") and said(done.notes, str(link))
    assert cache.read_bytes() == ACTOR and cache.stat().st_mtime_ns == OLD and os.listxattr(actor) == attributes
    unpatch(link, store)
    assert link.is_symlink() and actor.read_bytes() == ACTOR


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_named(actor, store, monkeypatch, code):
    """The kernel's refusal is played here: the tests may run as root, whom a mode does not stop."""
    real = os.open

    def refuse(path, flags, *rest, **more):
        if str(path).endswith(".tmp") and Path(path).parent == actor.parent:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *rest, **more)

    before = facts_of(actor)
    with monkeypatch.context() as refusing, pytest.raises(EnvironmentProblem, match=str(actor.parent)) as problem:
        refusing.setattr(os, "open", refuse)
        patch(actor, store)
    assert (f"{actor} is read-only here" in problem.value.message) == (code != errno.ENOSPC)
    assert ("actordbg run -- COMMAND" in problem.value.hint) == (code != errno.ENOSPC)
    assert facts_of(actor) == before
    patch(actor, store)
    patched = facts_of(actor)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(EnvironmentProblem) as problem:
        unpatch(actor, store)
    assert "actordbg run" not in problem.value.hint and facts_of(actor) == patched, "a file that is patched needs no other way"


def replaced(old):
    with replace.replaced(old, b"new"):
        pass


def test_an_owner_that_cannot_be_kept_and_a_file_that_changed_meanwhile_are_refused(actor, monkeypatch):
    old = replace.read(actor)
    other = replace.FileRead(actor, old.data, os.stat_result([*old.stat[:4], old.stat.st_uid + 1, *old.stat[5:]]))

    def refuse(*arguments):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(EnvironmentProblem, match="not permitted"):
        replaced(other)
    assert actor.read_bytes() == ACTOR and os.listdir(actor.parent) == ["actor.py"]
    actor.write_bytes(b"someone else's")
    with pytest.raises(Conflict, match="another program"):
        replaced(old)
    assert actor.read_bytes() == b"someone else's"


@pytest.mark.parametrize("locks", ["every file", "files alone", "nothing"])
def test_a_folder_that_another_actordbg_works_on_is_waited_for_and_then_named(actor, store, tmp_path, monkeypatch, locks):
    real = replace.fcntl.flock

    def flock(descriptor, operation):
        if locks == "nothing" or (locks == "files alone" and stat.S_ISDIR(os.fstat(descriptor).st_mode)):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(descriptor, operation)

    monkeypatch.setattr(replace, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(replace.fcntl, "flock", flock)
    monkeypatch.setattr(replace.tempfile, "tempdir", str(tmp_path))
    if locks == "nothing":
        with pytest.raises(EnvironmentProblem, match="cannot lock"):
            patch(actor, store)
        assert actor.read_bytes() == ACTOR
        return
    with replace.locked(actor), pytest.raises(ActordbgError, match="another actordbg"), replace.locked(actor):
        pass
    assert patch(actor, store).action == "patched"


def test_capture_is_armed_only_when_patched_enabled_and_not_disabled(actor, store, monkeypatch):
    def armed():
        return status(actor, store).armed

    write_control(store, Control(enabled=True, run="run", since=now_timestamp()))
    assert not armed()
    patch(actor, store)
    assert armed()
    monkeypatch.setenv("ACTORDBG_DISABLE", "1")
    assert not armed()
    monkeypatch.delenv("ACTORDBG_DISABLE")
    write_control(store, Control(enabled=False, run="run", since=now_timestamp()))
    assert not armed()
    store.control_path.write_text("{")
    found = status(actor, store)
    assert not found.armed and said(found.notes, "recording is off")
