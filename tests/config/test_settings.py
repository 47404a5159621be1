"""Settings: a flag beats the environment, which beats actordbg.toml, which beats the default."""

from __future__ import annotations

from pathlib import Path

import pytest

from actordbg.base.errors import UsageError
from actordbg.config.sources import load_settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACTORDBG_STORE", raising=False)
    monkeypatch.delenv("ACTORDBG_CONFIG", raising=False)


def test_without_anything_the_store_is_the_folder_store():
    assert load_settings().store == Path("store") and load_settings().source == "default"


def test_the_file_of_a_parent_folder_counts_and_its_paths_are_relative_to_it(tmp_path: Path):
    (tmp_path / "actordbg.toml").write_text('store = "dumps"\n[replay]\nbackend = "deepspeed"\n')
    (tmp_path / "deep" / "er").mkdir(parents=True)
    found = load_settings(start=tmp_path / "deep" / "er")
    assert found.store == tmp_path / "dumps" and found.replay == {"backend": "deepspeed"}


def test_environment_beats_file_and_flag_beats_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "actordbg.toml").write_text('store = "dumps"')
    monkeypatch.setenv("ACTORDBG_STORE", "/elsewhere")
    assert load_settings().store == Path("/elsewhere")
    assert load_settings(Path("/flag")).store == Path("/flag")


@pytest.mark.parametrize("text", ["store = 3", "stor = 'x'", "= = =", "replay = 1", "\xff"])
def test_a_file_that_makes_no_sense_is_a_usage_error_that_names_it(tmp_path: Path, text: str):
    (tmp_path / "actordbg.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"actordbg\.toml"):
        load_settings()


def test_a_named_file_that_is_not_there_is_a_usage_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACTORDBG_CONFIG", "/nothing/here.toml")
    with pytest.raises(UsageError, match="ACTORDBG_CONFIG"):
        load_settings()
