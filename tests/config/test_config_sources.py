"""The configuration that flags, environment variables and `actordbg.toml` come to."""

import os
from pathlib import Path

import pytest
from ownercases import ANOTHER, give_away

from actordbg.base.errors import NewerFormat, Refused, UsageError
from actordbg.campaign.cells import combinations
from actordbg.cli.from_signature import merged_settings
from actordbg.config.replay_config import ReplayConfig
from actordbg.config.sources import Settings, build_config, load_settings


def built(file, flags):
    return build_config(Settings(Path("store"), file, "/project/actordbg.toml"), flags).config


def test_another_backend_takes_nothing_that_the_file_says_for_its_own():
    usual = {"backend": "deepspeed", "zero-stage": 3, "deepcompile": True, "ring": 2, "packing": True}
    assert built(usual, {"backend": "plain"}) == ReplayConfig(packing=True)
    assert built(usual, {"backend": "fsdp2"}) == ReplayConfig(backend="fsdp2", ring=2, nproc=2, packing=True)
    with pytest.raises(UsageError, match="--zero-stage needs DeepSpeed"):
        built(usual, {"backend": "plain", "zero_stage": 3})


@pytest.mark.parametrize("short, attn", [("no_flash_attn", "sdpa"), ("flash_attn", "flash_attention_2")])
def test_flash_attn_and_no_flash_attn_are_values_of_attn(short, attn):
    given = {f"short_{short}": True}
    assert built({"attn": "eager"}, dict(merged_settings("replay", attn=None, **given))).attn == attn
    with pytest.raises(UsageError, match=f"--{short.replace('_', '-')} and --attn eager conflict"):
        merged_settings("replay", attn="eager", **given)


def test_a_wrong_line_in_the_file_is_named():
    for line, says in (
        ({"modell": "x"}, "unknown key 'modell'"),
        ({"zero-stage": "2"}, "type int"),
        ({"packing": 1}, "type bool"),
    ):
        with pytest.raises(UsageError, match=says):
            built(line, {})


def test_the_truth_silences_what_the_file_says_against_it():
    usual = {"backend": "deepspeed", "zero-stage": 3, "packing": True, "model": "/models/mine", "nproc": 2}
    found = built(usual, {"truth": "fp32"})
    assert (found.backend, found.zero_stage, found.packing, found.model) == ("plain", 0, None, "/models/mine")
    assert built(usual, {}).backend == "deepspeed"


class TestEnvironment:
    def test_a_variable_stands_between_flag_and_file(self, monkeypatch):
        monkeypatch.setenv("ACTORDBG_REPLAY_DTYPE", "fp16")
        monkeypatch.setenv("ACTORDBG_REPLAY_PACKING", "off")
        monkeypatch.setenv("ACTORDBG_REPLAY_TIMEOUT", "30")
        file = {"dtype": "bf16", "packing": True, "zero-stage": 2, "backend": "deepspeed"}
        found = built(file, {"dtype": None, "zero_stage": 3})
        assert found == ReplayConfig(dtype="fp16", packing=False, timeout_s=30.0, backend="deepspeed", zero_stage=3)
        assert built({"dtype": "bf16"}, {"dtype": "fp32"}).dtype == "fp32"

    def test_debug_disable_fsdp_wins_over_a_flag_and_only_over_fsdp2(self, monkeypatch):
        monkeypatch.setenv("DEBUG_DISABLE_FSDP", "1")
        sharded = {"backend": "fsdp2", "nproc": 4, "tp": 2, "ring": 2, "dist_backend": "gloo", "packing": True}
        asked = build_config(Settings(Path("store"), {}, ""), sharded)
        assert asked.config == ReplayConfig(packing=True) and asked.in_words == "backend plain (DEBUG_DISABLE_FSDP)"
        assert built({"backend": "fsdp2", "nproc": 2}, {}) == ReplayConfig()
        assert built({}, {"backend": "deepspeed", "nproc": 2}).backend == "deepspeed"
        with pytest.raises(UsageError, match="--backend lists fsdp2"):
            combinations(ReplayConfig(), {"backend": ["plain", "fsdp2"]})
        monkeypatch.setenv("DEBUG_DISABLE_FSDP", "0")
        assert built({}, sharded).nproc == 4

    @pytest.mark.parametrize(
        "variable, value, said",
        [
            ("ACTORDBG_REPLAY_COMPLIE", "1", "ACTORDBG_REPLAY_COMPLIE is not a setting"),
            ("ACTORDBG_REPLAY_TRUTH", "fp32", "ACTORDBG_REPLAY_TRUTH is not a setting"),
            ("ACTORDBG_REPLAY_NPROC", "two", "ACTORDBG_REPLAY_NPROC=two is not a value of --nproc"),
            ("ACTORDBG_REPLAY_PACKING", "perhaps", "ACTORDBG_REPLAY_PACKING=perhaps is not"),
        ],
    )
    def test_a_variable_that_says_nothing_is_refused_by_name(self, monkeypatch, variable, value, said):
        monkeypatch.setenv(variable, value)
        with pytest.raises(UsageError, match=said) as refused:
            built({}, {})
        assert "unset it" in refused.value.hint

    def test_a_setting_that_has_two_values_is_refused_by_both_names(self, monkeypatch):
        monkeypatch.setenv("ACTORDBG_REPLAY_ZERO_STAGE", "2")
        with pytest.raises(UsageError, match=r"\[replay\] zero_stage appears in two spellings"):
            built({"zero-stage": 2, "zero_stage": 3}, {})
        monkeypatch.setenv("ACTORDBG_REPLAY_Zero_Stage", "3")
        with pytest.raises(UsageError, match="ACTORDBG_REPLAY_Zero_Stage and ACTORDBG_REPLAY_ZERO_STAGE set the same setting"):
            built({}, {})


@pytest.fixture
def here(monkeypatch, tmp_path):
    """The working folder, empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACTORDBG_STORE", raising=False)
    monkeypatch.delenv("ACTORDBG_CONFIG", raising=False)
    return tmp_path


def test_a_flag_beats_the_environment_which_beats_a_file_of_a_parent_folder(here, monkeypatch):
    assert load_settings().store == Path("store")
    (here / "actordbg.toml").write_text('store = "dumps"\n[replay]\nbackend = "deepspeed"\n')
    (here / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(here / "deep" / "er")
    found = load_settings()
    assert found.store == here / "dumps" and found.replay == {"backend": "deepspeed"}, "its paths are relative to it"
    monkeypatch.setenv("ACTORDBG_STORE", "/elsewhere")
    assert load_settings().store == Path("/elsewhere")
    assert load_settings(Path("/flag")).store == Path("/flag")


@pytest.mark.parametrize("text", ["store = 3", "stor = 'x'", "= = =", "\xff"])
def test_a_file_that_makes_no_sense_or_is_not_there_is_a_usage_error_that_names_it(here, text, monkeypatch):
    (here / "actordbg.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"actordbg\.toml"):
        load_settings()
    monkeypatch.setenv("ACTORDBG_CONFIG", "/nothing/here.toml")
    with pytest.raises(UsageError, match="ACTORDBG_CONFIG"):
        load_settings()


@pytest.mark.parametrize("text", ["", " "])
def test_a_store_without_a_name_is_not_the_working_folder(text, monkeypatch):
    """`--store "$STORE"` of a variable that is not set."""
    with pytest.raises(UsageError, match="--store names no store"):
        load_settings(text)
    monkeypatch.setenv("ACTORDBG_STORE", text or " ")
    with pytest.raises(UsageError, match="ACTORDBG_STORE names no store"):
        load_settings()


class TestAnothersFile:
    """An actordbg.toml of another user decides nothing, unless the user names it."""

    @pytest.fixture
    def planted(self, here, monkeypatch):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "home"))
        file = here / "shared" / "actordbg.toml"
        (file.parent / "mine" / "deep").mkdir(parents=True)
        file.write_text('store = "evil"\n[replay]\nmodel = "/evil"\n')
        give_away(file, monkeypatch)
        return file

    def test_it_is_refused_with_its_owner_and_a_way_out(self, planted, monkeypatch):
        monkeypatch.chdir(planted.parent / "mine" / "deep")
        planted.write_bytes(b"\xff = [")  # it is refused before it is read
        for flag in (None, Path("other")):
            with pytest.raises(Refused, match=f"{planted} belongs to .*uid") as refused:
                load_settings(flag)
        assert refused.value.exit_code == 3
        assert f"ACTORDBG_CONFIG={planted}" in refused.value.hint

    def test_what_the_user_names_or_typed_under_sudo_is_the_users(self, planted, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setenv("ACTORDBG_CONFIG", str(planted))
            assert load_settings().store == planted.parent / "evil"
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setenv("SUDO_UID", str(ANOTHER))
        monkeypatch.chdir(planted.parent)
        assert load_settings().store == planted.parent / "evil"

    def test_a_link_of_another_to_a_file_of_mine_is_anothers(self, planted, monkeypatch):
        mine = planted.parent / "mine" / "settings.toml"
        mine.write_text("")
        planted.rename(planted.with_name("given-away"))
        planted.symlink_to(mine)
        monkeypatch.chdir(planted.parent)
        assert load_settings().store == Path("store")
        give_away(planted, monkeypatch)
        with pytest.raises(Refused, match="belongs to"):
            load_settings()


def test_a_setting_of_a_later_version_is_refused():
    with pytest.raises(NewerFormat, match="unknown settings: warp"):
        ReplayConfig.from_dict(ReplayConfig(nproc=2).to_dict() | {"warp": 9})
