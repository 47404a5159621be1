"""Short ways to name a replay, wherever one is named, and the list that shows them; and what a shell offers."""

import pytest
from commandline import in_json, invoke
from comparecases import given, write_replay
from replaycases import publish

from actordbg.base.errors import UsageError
from actordbg.base.units import resolve, with_handles
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store

INPUTS = [given(0), given(1)]


@pytest.fixture()
def three(store):
    """Two replays, the first with a name, and the truth of it, which is the newest."""
    write_replay(store, "20250619T050000-000001", INPUTS, name="packed", packing=True, command="actordbg replay --name packed")
    write_replay(store, "20250619T060000-000002", INPUTS, command="actordbg replay")
    write_replay(store, "20250619T070000-000003", INPUTS, truth="fp64", command="the truth of replay 20250619T050000-000001")
    return store


def reported(store, *names):
    found = in_json(store, "report", *names)["replays"]
    return [one["replay_id"][-1] for one in found]


def test_a_handle_and_a_name_mean_a_replay_in_every_command(three):
    assert reported(three, "@1") == reported(three, "@last") == reported(three, "last") == ["2"]
    assert reported(three, "@2", "packed") == ["1"]
    assert invoke(three, "compare packed @1 --quiet --json").exit_code == 0
    assert load_spec(three, "@1").replay_id.endswith("2") and load_spec(three, "packed").replay_id.endswith("1")
    with pytest.raises(UsageError, match="no replay @3") as caught:
        invoke(three, "report @3")
    assert "use @1 to @2" in str(caught.value.hint)
    for name in ("20250619", "-x", "truth", "a b"):
        with pytest.raises(UsageError, match="cannot name a replay"):
            invoke(three, "replay --name", name)


def test_the_list_has_the_newest_first_and_what_became_of_each(three):
    invoke(three, "compare packed truth --flat-limits --quiet")
    rows = invoke(three, "replay ls").stdout.splitlines()
    assert [row.split()[:3] for row in rows[1:]] == [
        ["@1", "20250619T060000-000002", rows[1].split()[2]],
        ["@2", "20250619T050000-000001", "packed"],
    ]
    assert "2/2" in rows[2] and "RIGHT" in rows[2] and "TOY MODEL (tiny) fp32 sdpa, packed, plain" in rows[2]
    assert invoke(three, "replay ls").stdout.splitlines() == rows, "the same, as other lists are called"
    every = in_json(three, "replay ls --all")
    assert [(row["handle"], row["replay_id"][-1]) for row in every] == [(None, "3"), ("@1", "2"), ("@2", "1")]
    assert invoke(Store(three.root.parent / "new").create(), "replay ls").exit_code == 5


def test_the_handle_that_a_table_shows_is_taken_wherever_an_id_is(three):
    published = publish(three, 2)
    full, other = published[0].dump_id, published[1].dump_id
    shown = with_handles(full)
    assert len(shown) == 8 and full.rpartition("-")[2].startswith(shown)
    assert shown in invoke(three, "dump ls").stdout and full not in invoke(three, "dump ls").stdout
    assert f"dump `{full}`" in invoke(three, "dump show", shown).stdout
    assert [row["dump_id"] for row in in_json(three, "dump ls --where", f"dump='{shown}'")] == [full]
    assert resolve(shown, [full, other], "dump", made_by="dump enable") == full
    with pytest.raises(UsageError, match=r"means several ids: .*b, .*a"):
        resolve("0000000", [full[:-8] + "0000000a", full[:-8] + "0000000b"], "dump", made_by="dump enable")
    with pytest.raises(UsageError, match="no dump has the id"):
        invoke(three, "dump show ffffffff")
