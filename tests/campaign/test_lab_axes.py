"""The axes of a matrix: comma lists to combinations, what collapses, what is the same thing twice; and who can share an Actor."""

from dataclasses import fields, replace

import pytest
from casefiles import cases_of

from actordbg.actor.sharing import CHANGEABLE, host_key
from actordbg.base.errors import UsageError
from actordbg.campaign.cells import batches, combinations, make_cells, parse_axes
from actordbg.config.choices import Facts, choose
from actordbg.config.replay_config import ReplayConfig

LAPTOP = Facts(cuda=False, gpus=0, flash_attn=False, versions={"transformers": "5.15.0"})
CLUSTER = Facts(cuda=True, gpus=8, flash_attn=True, versions={"transformers": "5.15.0"})


def combined(base=None, **given):
    return combinations(base or ReplayConfig(), parse_axes(given))


CASES = cases_of("axes")


@pytest.mark.parametrize("typed", CASES)
def test_axes_make_these_combinations_or_are_refused(typed):
    """What a backend does not have is no combination; a list replaces the usual eight, a single value narrows them."""
    given = dict(word.split("=") for word in typed.removesuffix(" by name").split("  ") if "=" in word)
    heads = [line.partition(": ") for line in CASES[typed].expected]
    first, _, found = heads[0]
    if first == "refused":
        with pytest.raises(UsageError, match=found) as caught:
            combined(**given)
        assert CASES[typed].expected[1] in caught.value.hint
    elif first == "name":
        assert [one.name for one in combined(**given)] == [name for _, _, name in heads]
    else:
        configs = [one.config for one in combined(**given)]
        assert ", ".join(" ".join(str(getattr(config, name)) for name in first.split()) for config in configs) == found


def test_what_is_refused_here_is_unavailable_with_its_way_out():
    cells = make_cells(combined(), LAPTOP, None)
    assert [(cell.status, cell.open) for cell in cells] == [("unavailable", False)] * 4 + [("not run", True)] * 4
    assert "no CUDA device" in cells[0].reason and "try: --attn sdpa" in cells[0].reason
    assert cells[0].known == ("flash-attention-unavailable",)
    cells = make_cells(combined(backend="fsdp2", tp="2", nproc="2,3"), CLUSTER, None)
    assert [cell.status for cell in cells] == ["not run", "unavailable"] and "--nproc 3 cannot be divided" in cells[1].reason
    two = combined(backend="deepspeed", deepcompile="on", attn="flash_attention_2")
    assert "CUDA only" in make_cells(two, LAPTOP, None)[0].reason  # the second refusal


def test_what_is_known_to_fail_is_run_unless_it_shall_be_skipped():
    everything = make_cells(combined(dtype="bf16"), CLUSTER, None)
    assert all(cell.open for cell in everything) and "varlen-flash-attention-under-compile" in everything[3].known
    fewer = make_cells(combined(dtype="bf16"), CLUSTER, None, skip_known=True)
    assert [(cell.index, cell.status, cell.reason.partition(":")[0]) for cell in fewer if not cell.open] == [
        (3, "not run", "known to fail")
    ]
    cells = make_cells(combined(backend="deepspeed", zero_stage="0,3", dtype="bf16"), CLUSTER, None, skip_known=True)
    assert "zero3-bf16-rotary" in cells[1].known and all(cell.open for cell in cells), "a warning that names no failure"


def key(**settings):
    config = ReplayConfig(**settings)
    return host_key(config, choose(config, None, LAPTOP))


@pytest.mark.parametrize(
    "base, changed, shared",
    [
        *(({}, changed, True) for changed in (
            {"attn": "eager"}, {"packing": True}, {"compile": True, "compile_backend": "eager"}, {"temperature": 0.5},
            {"backward": True}, {"timeout_s": 9.0}, {"vary": "repad"}, {"keep_gradients": True}, {"dtype": "fp32"},
        )),
        *(({}, changed, False) for changed in (
            {"model": "/models/other"}, {"num_layers": 1}, {"dtype": "bf16"}, {"backend": "deepspeed"}, {"nproc": 2},
            {"truth": "fp32"}, {"align": "same", "nproc": 2},
        )),
        *(({"backend": "deepspeed"}, changed, False) for changed in (  # an engine was built for more
            {"backward": True}, {"zero_stage": 3}, {"dist_backend": "gloo"}, {"timeout_s": 7200.0}, {"deepcompile": True},
        )),
        ({"backend": "deepspeed", "deepcompile": True, "zero_stage": 1}, {"attn": "eager"}, False),
        ({"backend": "fsdp2", "ring": 2, "nproc": 2}, {"attn": "eager"}, False),
    ],
)  # fmt: skip
def test_only_what_can_be_changed_on_a_loaded_actor_is_not_in_the_key(base, changed, shared):
    assert (key(**(base | changed)) == key(**base)) is shared
    known = {*CHANGEABLE, "backward"}
    assert {f.name for f in fields(ReplayConfig)} - known <= {name for name, _ in key()}, "what nobody thought of is in it"


def test_cells_are_put_together_by_what_they_load_and_compiled_ones_come_last():
    cells = make_cells(combined(compile="on,off", dtype="fp32,bf16", packing="both"), LAPTOP, None)
    found = list(batches(cells, LAPTOP, None).values())
    for batch in found:
        assert [cells[index].config["compile"] for index in batch] == [False] * 2 + [True] * 2
    assert sorted(index for batch in found for index in batch) == list(range(8)) and len(found) == 2
    decided = [replace(cell, status="passed") if cell.index in found[0] else cell for cell in cells]
    assert list(batches(decided, LAPTOP, None).values()) == found[1:]
