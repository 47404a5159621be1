"""What a selection says of what is not there, why it is empty, and the selections that have names."""

import catalogcases as cases
import pytest
from commandline import run_here, tried
from roots import json_of

from actordbg.base.errors import NothingToDo
from actordbg.catalog import selections
from actordbg.catalog.query import count_dumps, open_fresh, select_dumps
from actordbg.catalog.selections import reasons
from actordbg.catalog.where import of_dumps
from actordbg.store.layout import Store


@pytest.fixture
def twelve(tmp_path):
    """Twelve dumps; the first three were replayed, and the third failed."""
    store = Store(tmp_path / "store").create()
    records = cases.fill(store, 12)
    folder = cases.write_spec(store, cases.spec("r-01", records[:3]))
    for index, record in enumerate(records[:3]):
        status = "failed" if index == 2 else "passed"
        cases.append(folder / "rank0.jsonl", cases.result("r-01", record.dump_id, status, forward_s=float(index + 1)))
    return store


def test_what_was_never_replayed_has_not_passed(twelve):
    catalog = open_fresh(twelve)
    assert count_dumps(catalog, "status = 'passed'") == 2
    assert count_dumps(catalog, "status != 'passed'") == count_dumps(catalog, "status not in ('passed')") == 10
    assert count_dumps(catalog, "status not like 'pass%'") == count_dumps(catalog, "'passed' <> status") == 10
    assert count_dumps(catalog, "status != 'passed' and status is not null") == 1


def test_an_empty_answer_names_the_part_that_selects_nothing_and_what_there_is(twelve):
    catalog = open_fresh(twelve)
    assert reasons(catalog, "rank=0 and role='critic' and seq_len>4000") == [
        "role = 'critic' selects none of 12: role is policy (8), reference (4)",
        "seq_len > 4000 selects none of 12: seq_len is 8 to 39",
    ]
    (together,) = reasons(catalog, "rank=0 and rank=1")
    assert together == "each part alone selects some: rank = 0 (3), rank = 1 (3)"
    (status,) = reasons(catalog, "status = 'pass'")
    assert status == "status = 'pass' selects none of 12: status is null (9), passed (2), failed (1)"
    (alike,) = reasons(catalog, "role like 'crit%'")
    assert alike == "role LIKE 'crit%' selects none of 12: role is policy (8), reference (4)"
    (moment,) = reasons(catalog, "replayed_at > now() + '1d'")
    assert "selects none of 12: replayed_at is " in moment
    (nobody,) = reasons(catalog, "dump_id = 'abc'")
    assert nobody.endswith(" selects none of 12: `actordbg dump ls` lists the ids"), nobody
    done = run_here("dump", "ls", "--where", "role='critic'", "--store", twelve.root)
    assert done.exit_code == 5 and "role is policy (8), reference (4)" in done.stderr


def test_selections_by_name(twelve):
    catalog = open_fresh(twelve)
    rows = select_dumps(catalog)
    assert [row.verdict for row in select_dumps(catalog, selections.BAD)] == ["FAILED"]
    long = select_dumps(catalog, selections.longest(catalog, "rank=1", 2), order="length")
    assert [row.seq_len for row in long] == sorted(row.seq_len for row in rows if row.rank == 1)[-2:]
    for where in (None, "rank=1"):
        most = select_dumps(catalog, where, order="longest")
        assert most == sorted(select_dumps(catalog, where), key=lambda row: (row.seq_len, row.dump_id))[::-1]
        assert selections.longest(catalog, where, 2) == of_dumps(row.dump_id for row in most[:2])
    sample = select_dumps(catalog, selections.diverse(catalog, None, 6))
    assert len(sample) == 6 and max(row.seq_len for row in sample) == max(row.seq_len for row in rows)
    for name in ("role", "training", "status"):
        assert {getattr(row, name) for row in sample} == {getattr(row, name) for row in rows}
    assert count_dumps(catalog, selections.longest(catalog, "rank=99", 3)) == 0


def test_a_selection_by_name_of_nothing_speaks_of_what_was_asked(twelve):
    done = tried(twelve, "replay --where rank=99 --longest 3")
    assert isinstance(done.exception, NothingToDo)
    assert "no dump matches rank=99; rank = 99 selects none of 12: rank is 0 to 3" in done.exception.message


def test_a_sample_has_one_of_each_kind_and_then_others_over_time(store):
    for index in range(0, 320, 32):  # every property of these repeats
        cases.publish(store, cases.record(index, role="policy", training=True))
    catalog = open_fresh(store)
    called = {row.call_index for row in select_dumps(catalog, selections.diverse(catalog, None, 4))}
    assert called == {0, 64, 160, 256}, "the first, and three of the nine others, evenly"
    assert count_dumps(catalog, selections.diverse(catalog, None, 50)) == 10
    cases.publish(store, cases.record(320, role="policy", training=True, run="another"))
    cases.publish(
        store, cases.record(352, role="policy", training=True, actor={"trainer": "a", "adapter": "a", "function": "a:f"})
    )
    catalog = open_fresh(store)
    sample = select_dumps(catalog, selections.diverse(catalog, None, 3))
    assert {row.call_index for row in sample} == {0, 320, 352}, "each run and each function may be the wrong one"


def test_a_sample_begins_with_the_longest_dump_of_the_fewest_rows(store):
    for index, (rows, length) in enumerate([(4, 64), (2, 64), (4, 16), (2, 16)]):
        cases.publish(store, cases.record(index, batch_size=rows, seq_len=length, tokens=rows * length))
    catalog = open_fresh(store)
    sample = select_dumps(catalog, selections.diverse(catalog, None, 2))
    assert {(row.batch_size, row.seq_len) for row in sample} == {(2, 64), (4, 16)}


@pytest.mark.parametrize(
    "options, inputs",
    [(("--lf",), 1), (("--diverse", "4", "--where", "rank<2"), 4)],
)
def test_a_replay_takes_a_selection_by_name(twelve, options, inputs):
    done = tried(twelve, "replay --dry-run --json", *options)
    assert done.exit_code == 0, done.exception
    assert json_of(done)["selected"] == inputs


def test_the_columns_are_listed_with_their_headings():
    answer = json_of(run_here("dump", "columns", "--json"))
    assert {one["heading"]: one["name"] for one in answer if one["heading"]} == {
        "S": "seq_len",
        "B": "batch_size",
    }
    shown = run_here("dump", "columns").stdout
    assert "seq_len" in shown and "operators: =" in shown
