"""patch and unpatch on real files: byte, mode and time restored, edits kept, nothing hidden, nothing half done."""

from __future__ import annotations

import errno
import json
import os
import py_compile
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from actordbg.base.errors import Conflict, EnvironmentProblem
from actordbg.capture.control import Control, write_control
from actordbg.formats.dump_record import now_timestamp
from actordbg.install import patching as history
from actordbg.install import patching as operate
from actordbg.install import replace_file as replace
from actordbg.install import trailer
from actordbg.install.patch_target import Target, find_target
from actordbg.install.patching import inspect_target
from actordbg.install.trailer import State
from actordbg.store.layout import Store

ACTOR = b'class Actor:\n    """An actor."""\n\n    def forward(self, sequences, attention_mask=None):\n        return sequences\n'
OLD = 1_600_000_000_123_456_789


@pytest.fixture(autouse=True)
def light_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actordbg on the interpreter's path whose hook imports at once: these tests are about the file, not the hook."""
    package = tmp_path / "light" / "actordbg"
    (package / "capture").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0"\n')
    (package / "capture" / "__init__.py").write_text("")
    (package / "capture" / "hook.py").write_text("def install(cls, *, store):\n    cls.store = store\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "light"))
    for name in ("ACTORDBG_STORE", "ACTORDBG_DISABLE", "PYTHONPYCACHEPREFIX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """A file as OpenRLHF installs it, with an unusual mode and an old time."""
    path = tmp_path / "site" / "openrlhf" / "models" / "actor.py"
    path.parent.mkdir(parents=True)
    return _write(path, ACTOR)


def _write(path: Path, data: bytes, mode: int = 0o640) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    os.utime(path, ns=(OLD, OLD))
    return path


def _target(path: Path) -> Target:
    return find_target(target=path)


def _facts(path: Path) -> tuple[bytes, int, int, int]:
    """Bytes, mode, owner, and modification time in nanoseconds."""
    found = path.stat()
    return path.read_bytes(), stat.S_IMODE(found.st_mode), found.st_uid, found.st_mtime_ns


def _replace(old: replace.FileRead, data: bytes) -> None:
    with replace.replaced(old, data):
        pass


def _seen(path: Path) -> bool:
    """Whether this interpreter, started anew, would run a trailer for `path`."""
    return bool(inspect_target(_target(path), Store(path.parent / "no store")).hooked)


def test_unpatch_restores_sha256_mode_and_mtime_of_the_installed_actor_and_both_can_be_repeated(
    tmp_path: Path, store: Store
) -> None:
    path = _write(tmp_path / "actor.py", find_target(python=Path(sys.executable)).path.read_bytes(), 0o751)
    before = _facts(path)
    assert operate.unpatch(_target(path), store).action == "not patched"
    done = operate.patch(_target(path), store)
    assert (done.action, done.state) == ("patched", State.PATCHED)
    patched = _facts(path)
    assert patched[1:3] == before[1:3] and patched[3] != before[3] and _seen(path)
    assert operate.patch(_target(path), store).action == "already patched" and _facts(path) == patched
    undone = operate.unpatch(_target(path), store)
    assert (undone.action, undone.sha256_before, undone.sha256_after) == ("unpatched", done.sha256_after, done.sha256_before)
    assert operate.unpatch(_target(path), store).action == "not patched" and _facts(path) == before and not _seen(path)


def test_dry_run_shows_the_change_and_makes_none(actor: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "not made")
    before = _facts(actor)
    shown = operate.patch(_target(actor), store, dry_run=True)
    assert shown.dry_run and "+# >>> actordbg trailer" in shown.diff and "\n-" not in shown.diff.replace("\n---", "")
    assert _facts(actor) == before and not store.root.exists()
    operate.patch(_target(actor), store)
    patched = _facts(actor)
    assert "-# >>> actordbg trailer" in operate.unpatch(_target(actor), store, dry_run=True).diff
    assert _facts(actor) == patched


def test_another_store_renews_the_trailer_and_the_original_still_comes_back(actor: Path, store: Store, tmp_path: Path) -> None:
    before = _facts(actor)
    operate.patch(_target(actor), store)
    other = Store(tmp_path / "other")
    assert operate.patch(_target(actor), other).action == "trailer renewed"
    assert inspect_target(_target(actor), other).store == str(other.root)
    operate.unpatch(_target(actor), other)
    assert _facts(actor) == before
    assert inspect_target(_target(actor), store).state is State.CLEAN, "the first store knows that it lost the file"


def test_unpatch_needs_neither_the_store_nor_actordbg_in_the_interpreter(actor: Path, store: Store, monkeypatch: Any) -> None:
    before = _facts(actor)
    operate.patch(_target(actor), store)
    shutil.rmtree(store.root)
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    operate.unpatch(_target(actor), Store("/nowhere/store"))
    assert _facts(actor) == before


def test_the_backup_and_the_events_are_in_the_store(actor: Path, store: Store) -> None:
    done = operate.patch(_target(actor), store)
    operate.unpatch(_target(actor), store)
    assert done.backup is not None and Path(done.backup).read_bytes() == ACTOR
    origin = json.loads(Path(done.backup).with_name("origin.json").read_text())
    assert (origin["target"], origin["mode"], origin["mtime_ns"]) == (str(actor), 0o640, OLD)
    patched, unpatched = history.events(store)
    assert (patched.event, unpatched.event) == ("patch", "unpatch")
    assert patched.sha256_before == unpatched.sha256_after == trailer.sha256_of(ACTOR)
    assert patched.sha256_after == unpatched.sha256_before == done.sha256_after
    assert patched.target == str(actor) and patched.timestamp < unpatched.timestamp
    assert sorted(path.name for path in actor.parent.iterdir()) == ["actor.py"], "nothing is left beside the file"


# --- edits -------------------------------------------------------------------------------------------------------------


def test_an_edit_since_is_kept_without_the_old_time(actor: Path, store: Store) -> None:
    operate.patch(_target(actor), store)
    actor.write_bytes(actor.read_bytes().replace(b"An actor.", b"Mine."))
    assert inspect_target(_target(actor), store).state is State.EDITED
    assert operate.patch(_target(actor), store).action == "already patched"
    done = operate.unpatch(_target(actor), store)
    assert actor.read_bytes() == ACTOR.replace(b"An actor.", b"Mine.")
    assert any("edit is kept" in line for line in done.notes)
    assert actor.stat().st_mtime_ns != OLD and stat.S_IMODE(actor.stat().st_mode) == 0o640


def test_an_edited_file_is_not_moved_to_another_store(actor: Path, store: Store, tmp_path: Path) -> None:
    operate.patch(_target(actor), store)
    actor.write_bytes(actor.read_bytes().replace(b"An actor.", b"Mine."))
    before = _facts(actor)
    with pytest.raises(Conflict, match="edited") as refusal:
        operate.patch(_target(actor), Store(tmp_path / "other"))
    assert "unpatch" in refusal.value.hint and _facts(actor) == before


@pytest.mark.parametrize("change", [lambda d: d + b"mine = 1\n", lambda d: d.replace(b"install(Actor", b"install(Critic")])
def test_an_edit_in_or_behind_the_trailer_is_refused_with_the_backup_as_remedy(actor: Path, store: Store, change: Any) -> None:
    done = operate.patch(_target(actor), store)
    actor.write_bytes(change(actor.read_bytes()))
    before = _facts(actor)
    for action in (operate.patch, operate.unpatch):
        with pytest.raises(Conflict) as refusal:
            action(_target(actor), store)
        assert str(done.backup) in refusal.value.hint and refusal.value.exit_code == 3
        assert _facts(actor) == before


def test_an_upgrade_over_the_patch_is_seen_and_can_be_patched_again(actor: Path, store: Store) -> None:
    operate.patch(_target(actor), store)
    _write(actor, ACTOR + b"# next version\n")
    found = inspect_target(_target(actor), store)
    assert found.state is State.OVERWRITTEN and "another version" in found.reason
    assert operate.patch(_target(actor), store).action == "patched"
    assert inspect_target(_target(actor), store).state is State.PATCHED
    _write(actor, ACTOR + b"# next version\n")
    assert any("overwritten" in line for line in operate.unpatch(_target(actor), store).notes)
    assert inspect_target(_target(actor), store).state is State.CLEAN


def test_a_patch_on_another_host_says_nothing_about_this_one(actor: Path, store: Store, monkeypatch: Any) -> None:
    with monkeypatch.context() as there:
        there.setattr(operate.socket, "gethostname", lambda: "another-node")
        operate.patch(_target(actor), store)
    _write(actor, ACTOR)
    assert inspect_target(_target(actor), store).state is State.CLEAN


# --- what Python would really run ---------------------------------------------------------------------------------------


def _compile(path: Path, mode: py_compile.PycInvalidationMode) -> Path:
    return Path(str(py_compile.compile(str(path), doraise=True, invalidation_mode=mode)))


def test_an_unchecked_hash_pyc_that_would_hide_the_hook_undoes_the_patch(actor: Path, store: Store) -> None:
    cached = _compile(actor, py_compile.PycInvalidationMode.UNCHECKED_HASH)
    before = _facts(actor)
    with pytest.raises(Conflict, match="does not see the hook") as refusal:
        operate.patch(_target(actor), store)
    assert str(cached) in refusal.value.hint
    assert _facts(actor) == before and history.events(store) == []
    cached.unlink()
    assert operate.patch(_target(actor), store).action == "patched"


def test_patch_says_so_when_the_hook_became_hidden_afterwards(actor: Path, store: Store) -> None:
    cached = _compile(actor, py_compile.PycInvalidationMode.UNCHECKED_HASH)
    hidden = cached.read_bytes()
    cached.unlink()
    operate.patch(_target(actor), store)
    cached.write_bytes(hidden)
    found = inspect_target(_target(actor), store)
    assert found.state is State.PATCHED and found.hooked is False and not found.armed
    with pytest.raises(Conflict, match="does not see the hook"):
        operate.patch(_target(actor), store)


def test_an_unchecked_hash_pyc_that_keeps_the_hook_is_reported_after_unpatch(actor: Path, store: Store) -> None:
    operate.patch(_target(actor), store)
    _compile(actor, py_compile.PycInvalidationMode.UNCHECKED_HASH)
    with pytest.raises(Conflict, match="still sees the hook"):
        operate.unpatch(_target(actor), store)
    assert _facts(actor)[0] == ACTOR, "the source is restored all the same"


@pytest.mark.parametrize("mode", [py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.CHECKED_HASH])
def test_an_ordinary_pyc_hides_neither_the_patch_nor_its_removal(actor: Path, store: Store, mode: Any) -> None:
    _compile(actor, mode)
    operate.patch(_target(actor), store)
    assert _seen(actor)
    _compile(actor, mode)
    operate.unpatch(_target(actor), store)
    assert not _seen(actor)


def test_a_timestamp_pyc_that_agrees_by_coincidence_is_removed(actor: Path, store: Store) -> None:
    """As a process leaves it that compiled the patched text while the file was being restored: right time and size, wrong code."""
    operate.patch(_target(actor), store)
    cached = _compile(actor, py_compile.PycInvalidationMode.TIMESTAMP)
    stale = bytearray(cached.read_bytes())
    stale[8:16] = (OLD // 10**9).to_bytes(4, "little") + len(ACTOR).to_bytes(4, "little")
    cached.write_bytes(stale)
    operate.unpatch(_target(actor), store)
    assert not cached.exists() and not _seen(actor)


def test_patching_leaves_no_pyc_behind(actor: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    operate.patch(_target(actor), store)
    operate.unpatch(_target(actor), store)
    assert not (actor.parent / "__pycache__").exists()


def test_a_file_that_the_interpreter_cannot_compile_is_given_back(actor: Path, store: Store) -> None:
    _write(actor, ACTOR + b"return 1\n")
    before = _facts(actor)
    with pytest.raises(Conflict, match="cannot compile"):
        operate.patch(_target(actor), store)
    assert _facts(actor) == before


# --- the file system ----------------------------------------------------------------------------------------------------


def test_other_names_of_a_hard_linked_file_keep_the_original(actor: Path, store: Store, tmp_path: Path) -> None:
    cache = tmp_path / "cache.py"
    os.link(actor, cache)
    done = operate.patch(_target(actor), store)
    assert cache.read_bytes() == ACTOR and cache.stat().st_mtime_ns == OLD
    assert any("hard-linked" in line for line in done.notes)
    operate.unpatch(_target(actor), store)
    assert actor.read_bytes() == ACTOR


def test_a_symbolic_link_stays_and_the_real_file_is_patched(actor: Path, store: Store, tmp_path: Path) -> None:
    link = tmp_path / "link.py"
    link.symlink_to(actor)
    done = operate.patch(_target(link), store)
    assert link.is_symlink() and done.file == str(actor)
    assert any(str(link) in line for line in done.notes)
    operate.unpatch(_target(link), store)
    assert link.is_symlink() and actor.read_bytes() == ACTOR


def test_extended_attributes_are_kept(actor: Path, store: Store) -> None:
    try:
        os.setxattr(actor, "user.note", b"mine")
    except OSError:
        pytest.skip("this file system has no user attributes")
    operate.patch(_target(actor), store)
    assert os.getxattr(actor, "user.note") == b"mine"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_named(actor: Path, store: Store, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The kernel's refusal is played here: the tests may run as root, whom a mode does not stop."""
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".tmp") and Path(path).parent == actor.parent:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    before = _facts(actor)
    with pytest.raises(EnvironmentProblem, match=str(actor.parent)) as problem:
        operate.patch(_target(actor), store)
    assert problem.value.exit_code == 4
    assert (str(actor) + " is read-only here" in problem.value.message) == (code != errno.ENOSPC)
    assert ("actordbg run -- COMMAND" in problem.value.hint) == (code != errno.ENOSPC)
    assert _facts(actor) == before and history.events(store) == []


def test_a_read_only_file_that_is_patched_cannot_be_unpatched_and_run_is_no_help(
    actor: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    operate.patch(_target(actor), store)
    patched = _facts(actor)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(EnvironmentProblem, match="is read-only here: Read-only file system") as problem:
        operate.unpatch(_target(actor), store)
    assert "actordbg run" not in problem.value.hint and _facts(actor) == patched


def test_a_really_read_only_folder_is_named() -> None:
    """As root, whom a mode does not stop, the replacement runs as nobody, in a folder that nobody may read but not write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        actor = _write(folder / "actor.py", ACTOR, 0o644)
        folder.chmod(0o555)
        user = os.geteuid()
        try:
            os.seteuid(user or 65534)
            with replace.locked(actor), pytest.raises(EnvironmentProblem, match=str(folder)) as problem:
                _replace(replace.read(actor), b"new")
            assert "Permission denied" in problem.value.message
        finally:
            os.seteuid(user)
            folder.chmod(0o755)
        assert [path.name for path in folder.iterdir()] == ["actor.py"] and actor.read_bytes() == ACTOR


def test_an_owner_that_cannot_be_kept_is_a_refusal(actor: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    old = replace.read(actor)
    other = os.stat_result([*old.stat[:4], old.stat.st_uid + 1, *old.stat[5:]])
    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(EnvironmentProblem, match="not permitted"):
        _replace(replace.FileRead(actor, old.data, other), b"new")
    assert actor.read_bytes() == ACTOR and [path.name for path in actor.parent.iterdir()] == ["actor.py"]


def test_a_file_that_someone_else_changes_meanwhile_is_left_alone(actor: Path) -> None:
    old = replace.read(actor)
    actor.write_bytes(b"someone else's")
    with pytest.raises(Conflict, match="another program"):
        _replace(old, b"new")
    assert actor.read_bytes() == b"someone else's"


def test_a_file_system_without_flock_on_folders_gets_a_lock_file(
    actor: Path, store: Store, tmp_path: Path, monkeypatch: Any
) -> None:
    real = replace.fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(descriptor, operation)

    monkeypatch.setattr(replace.fcntl, "flock", flock)
    monkeypatch.setattr(replace.tempfile, "tempdir", str(tmp_path))
    assert operate.patch(_target(actor), store).action == "patched"
    assert len(list(tmp_path.glob("actordbg-*.lock"))) == 1


def test_waiting_for_another_actordbg_ends_with_a_message(actor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "LOCK_SECONDS", 0.05)
    with replace.locked(actor), pytest.raises(EnvironmentProblem, match="another actordbg"), replace.locked(actor):
        pass


def test_capture_is_armed_only_when_patched_enabled_and_not_disabled(actor: Path, store: Store, monkeypatch: Any) -> None:
    def armed() -> bool:
        return inspect_target(_target(actor), store).armed

    write_control(store, Control(enabled=True, run="run", since=now_timestamp()))
    assert not armed()
    operate.patch(_target(actor), store)
    assert armed()
    monkeypatch.setenv("ACTORDBG_DISABLE", "1")
    assert not armed()
    monkeypatch.delenv("ACTORDBG_DISABLE")
    write_control(store, Control(enabled=False, run="run", since=now_timestamp()))
    assert not armed()
    store.control_path.write_text("{")
    found = inspect_target(_target(actor), store)
    assert not found.armed and any("dumping is off" in line for line in found.notes)
