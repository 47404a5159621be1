"""Which actor.py is meant: found as the training interpreter would find it, without importing anything of it."""

import sys
from pathlib import Path

import pytest
from roots import script

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.install.patch_target import find_target, require_hook

HERE = Path(sys.executable)
BOMB = "raise SystemExit('the package was imported')\n"


def _package(root):
    """An openrlhf under `root` that must not be imported; returns its actor.py."""
    models = root / "openrlhf" / "models"
    models.mkdir(parents=True)
    (root / "openrlhf" / "__init__.py").write_text(BOMB)
    (models / "__init__.py").write_text(BOMB)
    (models / "actor.py").write_text(BOMB)
    return models / "actor.py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty current folder and no PYTHONPATH."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


def test_the_installed_copy_is_found_with_its_version():
    found = find_target()
    assert found.path.parts[-3:] == ("openrlhf", "models", "actor.py")
    assert found.trainer_version is not None and found.trainer_version[0].isdigit()
    assert found.python == sys.executable and len(found.copies) == 1 and found.notes == []


def test_pythonpath_shadows_the_installed_copy_and_says_so(tmp_path, monkeypatch):
    installed = find_target().path
    mine = _package(tmp_path / "mine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    found = find_target(python=HERE)
    assert found.path == mine
    assert [copy.path for copy in found.copies] == [str(mine), str(installed)]
    assert any("wins" in line and str(mine) in line for line in found.notes)
    assert any("shadowed" in line and str(installed) in line for line in found.notes)


def test_a_checkout_in_the_current_folder_wins_as_with_python_m(elsewhere, tmp_path, monkeypatch):
    _package(tmp_path / "mine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    checkout = _package(elsewhere)
    (elsewhere / "version.txt").write_text("0.9.9\n")
    found = find_target()
    assert found.path == checkout and len(found.copies) == 3 and found.trainer_version == "0.9.9"


def test_an_editable_installation_through_an_import_hook_is_found(tmp_path, monkeypatch):
    """As setuptools installs it: a finder on sys.meta_path that a start-up file adds."""
    mine = _package(tmp_path / "checkout")
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(
        "import sys, importlib.util\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == 'openrlhf': return importlib.util.spec_from_file_location(name, {str(mine.parents[1] / '__init__.py')!r})\n"
        "sys.meta_path.insert(0, Finder)\n"
        "print('noise on standard output')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "start"))
    found = find_target()
    assert found.path == mine and "import hook" in found.copies[0].entry


def test_a_package_without_init_files_is_no_openrlhf(elsewhere):
    (elsewhere / "openrlhf" / "models").mkdir(parents=True)
    (elsewhere / "openrlhf" / "models" / "actor.py").write_text(BOMB)
    assert elsewhere not in find_target().path.parents


def test_a_file_is_taken_as_named_and_its_environment_inferred(tmp_path):
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    path = _package(site)
    (site / "openrlhf-0.8.5.dist-info").mkdir()
    outside = find_target(target=_package(tmp_path / "outside").rename(tmp_path / "outside" / "actor.py"))
    assert (outside.python, outside.trainer_version) == (sys.executable, None)
    (tmp_path / "env" / "bin").mkdir()
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    found = find_target(target=path)
    assert found.python == str(tmp_path / "env" / "bin" / "python") and found.trainer_version == "0.8.5"


def test_python_and_target_exclude_each_other_and_a_target_is_a_file(tmp_path):
    with pytest.raises(UsageError):
        find_target(python=HERE, target=_package(tmp_path))
    with pytest.raises(EnvironmentProblem, match="not a file"):
        find_target(target=tmp_path)


@pytest.mark.parametrize(
    "text, said",
    [("", "cannot be run"), ("echo no; exit 0", "cannot answer"), (f'exec {sys.executable} -S "$@"', "has no openrlhf")],
)
def test_an_interpreter_that_is_none_or_has_no_trainer_is_said(tmp_path, text, said):
    with pytest.raises(EnvironmentProblem, match=said):
        find_target(python=script(tmp_path / "python", text) if text else tmp_path / "missing")


def test_an_actordbg_in_the_current_folder_does_not_count(tmp_path, elsewhere):
    """A job that starts in another folder would not find it."""
    (elsewhere / "actordbg" / "capture").mkdir(parents=True)
    (elsewhere / "actordbg" / "capture" / "hook.py").write_text("")
    bare = script(tmp_path / "python", f'exec {sys.executable} -S "$@"')
    with pytest.raises(EnvironmentProblem, match="No module named 'actordbg'") as problem:
        require_hook(str(bare))
    assert problem.value.hint.endswith(f"{bare} -m pip install actordbg")
