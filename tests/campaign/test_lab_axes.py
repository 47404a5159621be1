"""The axes of a matrix: comma lists to combinations, what collapses, what is the same thing twice; and who can share an Actor."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from actordbg.actor.sharing import CHANGEABLE, host_key
from actordbg.base.errors import UsageError
from actordbg.campaign.cells import Combination, batches, combinations, make_cells, parse_axes
from actordbg.config.choices import Facts, choose
from actordbg.config.replay_config import AXES, ReplayConfig

LAPTOP = Facts(cuda=False, gpus=0, flash_attn=False, versions={"transformers": "5.15.0"})
CLUSTER = Facts(cuda=True, gpus=8, flash_attn=True, versions={"transformers": "5.15.0"})


def combined(base: ReplayConfig | None = None, **given: str) -> list[Combination]:
    return combinations(base or ReplayConfig(), parse_axes(given))


def names(**given: str) -> list[str]:
    return [one.name for one in combined(**given)]


class TestAxes:
    def test_without_any_axis_it_is_the_eight(self) -> None:
        assert names() == [
            "flash, not compiled, not packed", "flash, not compiled, packed", "flash, compiled, not packed",
            "flash, compiled, packed", "sdpa, not compiled, not packed", "sdpa, not compiled, packed",
            "sdpa, compiled, not packed", "sdpa, compiled, packed",
        ]  # fmt: skip

    def test_single_values_narrow_the_eight_and_a_list_replaces_them(self) -> None:
        assert names(attn="sdpa", backend="deepspeed", zero_stage="2") == [
            "not compiled, not packed", "not compiled, packed", "compiled, not packed", "compiled, packed",
        ]  # fmt: skip
        assert names(backend="deepspeed", zero_stage="0,3") == ["ZeRO 0", "ZeRO 3"]

    @pytest.mark.parametrize(
        ("name", "text", "values"),
        [
            ("packing", "both", [False, True]),
            ("packing", "on,off,on", [True, False]),
            ("compile", "No, YES", [False, True]),
            ("attn", "sdpa, eager,sdpa", ["sdpa", "eager"]),
            ("zero_stage", "3,0", [3, 0]),
            ("nproc", "2", [2]),
        ],
    )
    def test_lists_keep_their_order_and_lose_what_is_twice(self, name: str, text: str, values: list[Any]) -> None:
        assert AXES[name].list_of(text) == values

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("attn", "flash", "--attn flash is not known"),
            ("packing", "maybe", "--packing maybe is not known"),
            ("nproc", "0", "--nproc 0 is not known"),
            ("nproc", "two", "--nproc two is not known"),
            ("zero_stage", " , ", "--zero-stage lists no value"),
            ("compile_backend", "nvfuser", "--compile-backend nvfuser is not known"),
        ],
    )
    def test_a_value_that_the_setting_does_not_have_is_a_usage_error(self, name: str, text: str, said: str) -> None:
        with pytest.raises(UsageError, match=said) as caught:
            parse_axes({name: text})
        assert "for example" in caught.value.hint


class TestCollapse:
    @pytest.mark.parametrize(
        ("given", "said", "way_out"),
        [
            ({"zero_stage": "3"}, "--zero-stage 3 means nothing", "add --backend deepspeed"),
            ({"tp": "1,2", "backend": "plain"}, "--tp 1,2 means nothing", "add --backend fsdp2"),
            ({"deepcompile": "on"}, "--deepcompile on means nothing", "add --backend deepspeed"),
            ({"compile": "off", "compile_backend": "eager"}, "--compile-backend eager means", "add --compile on"),
        ],
    )
    def test_an_axis_that_no_cell_uses_is_refused(self, given: dict[str, str], said: str, way_out: str) -> None:
        with pytest.raises(UsageError, match=said) as caught:
            combined(**given)
        assert way_out in caught.value.hint

    def test_an_axis_that_asks_for_nothing_is_not(self) -> None:
        assert len(combined(zero_stage="0", tp="1", ring="1", deepcompile="off")) == 8

    @pytest.mark.parametrize(
        ("given", "settings", "found"),
        [
            (
                {"backend": "plain,deepspeed,fsdp2", "zero_stage": "0,1,3", "nproc": "2"}, ("backend", "zero_stage"),
                [("plain", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 3), ("fsdp2", 0)],
            ),
            (
                {"backend": "plain,fsdp2", "tp": "1,2", "ring": "1,2"}, ("backend", "tp", "ring", "nproc"),
                [("plain", 1, 1, 1), ("fsdp2", 1, 1, 1), ("fsdp2", 1, 2, 2), ("fsdp2", 2, 1, 2), ("fsdp2", 2, 2, 4)],
            ),
            ({"backend": "fsdp2", "tp": "1,2", "nproc": "2"}, ("nproc",), [(2,), (2,)]),
            (
                {"compile": "off,on", "compile_backend": "inductor,eager"}, ("compile", "compile_backend"),
                [(False, None), (True, "inductor"), (True, "eager")],
            ),
            (
                {"backend": "plain,deepspeed", "deepcompile": "off,on", "zero_stage": "1"}, ("backend", "deepcompile"),
                [("plain", False), ("deepspeed", False), ("deepspeed", True)],
            ),
        ],
    )  # fmt: skip
    def test_what_a_backend_does_not_have_is_no_combination(self, given: Any, settings: Any, found: Any) -> None:
        assert [tuple(getattr(one.config, name) for name in settings) for one in combined(**given)] == found


class TestCells:
    def test_what_is_refused_here_is_unavailable_with_its_way_out(self) -> None:
        cells = make_cells(combined(), LAPTOP, None)
        assert [cell.status for cell in cells] == ["unavailable"] * 4 + ["not run"] * 4
        assert "no CUDA device" in cells[0].reason and "way out: --attn sdpa" in cells[0].reason
        assert cells[0].known == ("flash-attention-unavailable",)
        assert [cell.open for cell in cells] == [False] * 4 + [True] * 4

    def test_settings_that_contradict_each_other_are_unavailable_too(self) -> None:
        cells = make_cells(combined(backend="fsdp2", tp="2", nproc="2,3"), CLUSTER, None)
        assert [cell.status for cell in cells] == ["not run", "unavailable"]
        assert "--nproc 3 cannot be divided" in cells[1].reason

    def test_what_is_known_to_fail_is_run_unless_it_shall_be_skipped(self) -> None:
        everything = make_cells(combined(dtype="bf16"), CLUSTER, None)
        assert all(cell.open for cell in everything)
        assert "varlen-flash-attention-under-compile" in everything[3].known
        fewer = make_cells(combined(dtype="bf16"), CLUSTER, None, skip_known=True)
        assert [cell.index for cell in fewer if not cell.open] == [3]
        assert fewer[3].status == "not run" and fewer[3].reason.startswith("known to fail: packing calls flash-attn")

    def test_a_warning_that_names_no_failure_is_no_reason_to_skip(self) -> None:
        cells = make_cells(combined(backend="deepspeed", zero_stage="0,3", dtype="bf16"), CLUSTER, None, skip_known=True)
        assert "zero3-bf16-rotary" in cells[1].known and all(cell.open for cell in cells)


class TestSharing:
    def key(self, **settings: Any) -> Any:
        config = ReplayConfig(**settings)
        return host_key(config, choose(config, None, LAPTOP))

    @pytest.mark.parametrize(
        "changed",
        [
            {"attn": "eager"}, {"packing": True}, {"compile": True}, {"compile": True, "compile_backend": "eager"}, {"seed": 3},
            {"temperature": 0.5}, {"backward": True}, {"timeout_s": 9.0}, {"vary": "repad"}, {"keep_gradients": True},
            {"dtype": "fp32"},
        ],
    )  # fmt: skip
    def test_what_can_be_changed_on_a_loaded_actor_is_not_in_the_key(self, changed: dict[str, Any]) -> None:
        assert self.key(**changed) == self.key()

    @pytest.mark.parametrize(
        "changed",
        [
            {"model": "/models/other"}, {"num_layers": 1}, {"dtype": "bf16"}, {"backend": "deepspeed"}, {"nproc": 2},
            {"backend": "fsdp2"}, {"truth": "fp32"}, {"align": "same", "nproc": 2},
        ],
    )  # fmt: skip
    def test_what_was_loaded_is(self, changed: dict[str, Any]) -> None:
        assert self.key(**changed) != self.key()

    @pytest.mark.parametrize(
        "changed",
        [{"backward": True}, {"zero_stage": 3}, {"dist_backend": "gloo"}, {"timeout_s": 7200.0}, {"deepcompile": True}],
    )
    def test_a_deepspeed_engine_was_built_for_more(self, changed: dict[str, Any]) -> None:
        assert self.key(backend="deepspeed", **changed) != self.key(backend="deepspeed")

    def test_deepcompile_and_a_ring_hold_on_to_the_attention(self) -> None:
        for fixed in (
            {"backend": "deepspeed", "deepcompile": True, "zero_stage": 1},
            {"backend": "fsdp2", "ring": 2, "nproc": 2},
        ):
            assert self.key(**fixed, attn="eager") != self.key(**fixed, attn="sdpa")

    def test_a_setting_that_nobody_thought_of_is_in_the_key(self) -> None:
        known = {*CHANGEABLE, "backward"}
        assert {f.name for f in fields(ReplayConfig)} - known <= {name for name, _ in self.key()}

    def test_cells_are_put_together_by_what_they_load_and_compiled_ones_come_last(self) -> None:
        cells = make_cells(combined(compile="on,off", dtype="fp32,bf16", packing="both"), LAPTOP, None)
        found = list(batches(cells, LAPTOP, None).values())
        for batch in found:
            assert [cells[index].config["compile"] for index in batch] == [False] * 2 + [True] * 2
        assert sorted(index for batch in found for index in batch) == list(range(8)) and len(found) == 2
        decided = [replace(cell, status="passed") if cell.index in found[0] else cell for cell in cells]
        assert list(batches(decided, LAPTOP, None).values()) == found[1:]


def test_names_are_short_and_tell_all_combinations_apart() -> None:
    given = {"backend": "plain,deepspeed,fsdp2", "zero_stage": "0,3", "tp": "1,2", "ring": "1,2", "packing": "both"}
    found = [one.name for one in combined(ReplayConfig(nproc=4), **given)]
    assert len(set(found)) == len(found)
    assert {"plain, not packed", "ZeRO 3, ring 2, packed", "fsdp2, tp 2, not packed"} <= set(found)
    assert [one.name for one in combined(ReplayConfig(backend="fsdp2", nproc=2), tp="1,2")] == ["tp 1", "tp 2"]
