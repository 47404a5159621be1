"""An id, the beginning of one, or `last`: the same answer for dumps, replays, matrices and noise floors."""

import pytest

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.base.units import resolve
from actordbg.campaign import run_matrix
from actordbg.catalog import query
from actordbg.records.comparison_record import NoiseRecord
from actordbg.replay.supervise import load_spec

IDS = ["20250618T01-aa", "20250619T01-bb", "20250619T02-cc", "20250619T02-cccc"]


def test_an_id_the_only_beginning_and_last_are_found():
    meant = {"last": IDS[-1], IDS[0]: IDS[0], "20250618": IDS[0], "20250619T01": IDS[1], IDS[2]: IDS[2]}
    assert {name: resolve(name, IDS, "replay", made_by="replay") for name in meant} == meant


@pytest.mark.parametrize(
    "name, said",
    [("20250619", "means several ids"), ("2024", "no replay has the id"), ("", "no replay has the id")],
)
def test_what_none_or_several_have_is_refused_with_the_newest_ids(name, said):
    with pytest.raises(UsageError, match=said) as caught:
        resolve(name, IDS, "replay", made_by="replay")
    assert IDS[-1] in caught.value.message + caught.value.hint
    assert "last of them" not in caught.value.hint  # `report last` is not the truth that a comparison computed after it


def noise_floor_named(store, name):
    return NoiseRecord.named(store.noise, name, "noise")


def test_every_command_answers_a_name_in_an_empty_store_alike(store):
    found = []
    for look in (query.get_dump, query.get_replay, noise_floor_named, load_spec, run_matrix.load):
        with pytest.raises((UsageError, StoreProblem), match=r"^there is no [a-z ]+ yet$") as caught:
            look(store, "last")
        found.append(caught.value)
    assert all(one.hint.endswith("creates one") for one in found)
