"""`--where`: what is allowed means what SQL says; everything else is refused by name, quickly, and never reaches SQLite."""

import inspect
import json
import logging
import sys
from datetime import datetime, timezone

import pytest
from casefiles import cases_of
from steps import counted

from actordbg.base.errors import WhereError
from actordbg.catalog import where
from actordbg.catalog.tables import CALLER, LAST_RESULT, WHERE_COLUMNS, parse_duration, to_micros
from actordbg.catalog.where import MAX_DEPTH, MAX_OPERATORS, compile_where

NOW = datetime(2025, 6, 20, 12, 0, tzinfo=timezone.utc)


CASES = cases_of("where")


@pytest.mark.parametrize("text", CASES)
def test_a_condition_becomes_sql_with_bound_values_or_is_refused_by_name(text):
    sql, *bound = CASES[text].expected
    if sql.startswith("refused:"):
        refused(text, sql.removeprefix("refused:").strip())
        return
    condition = compile_where(text, now=NOW)
    values = json.loads(bound[0])
    assert condition.sql == sql
    assert list(condition.params) == [to_micros(value) if str(value).endswith("Z") else value for value in values]


def refused(text, culprit):
    with pytest.raises(WhereError) as caught:
        compile_where(text)
    assert culprit in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_control_characters_and_patterns_without_end_are_refused():
    refused("rank = 0\0", "control character")
    refused(f"host like '{'%a' * 50}'", "pattern")


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000 + "1=1" + ")" * 5000,
        "(" * (MAX_DEPTH + 1) + "rank=0" + ")" * (MAX_DEPTH + 1),
        "not " * 4000 + "training",
        "-" + " -" * 3000 + "rank > 1",
        " or ".join(["rank=0"] * 2000),
        " + ".join(["rank"] * 3000) + " > 1",
        "rank in (" + ",".join("1" * 9000) + ")",
        "x" * 100_000,
        "case " * 800 + "rank",
        "rank = 0 " + "and rank in (1) " * 500,
        "rank between " * 300 + "1",
        "rank is " * 900 + "null",
    ],
)
def test_bombs_are_refused_after_few_steps(text):
    with counted() as steps, pytest.raises(WhereError):
        compile_where(text)
    assert steps.count < 1000 + 20 * len(text), "work grows faster than the text"


def test_reasonable_sizes_are_allowed():
    compile_where("(" * MAX_DEPTH + "rank=0" + ")" * MAX_DEPTH)
    compile_where(" or ".join(f"rank={n}" for n in range(MAX_OPERATORS // 4)))
    assert len(compile_where(f"rank in ({','.join(map(str, range(900)))})").params) == 900


def test_columns_that_were_used_are_known():
    assert compile_where("rank=0 and status='failed'").columns == {"rank", "status"}
    assert compile_where("status='failed' and seq_len>1").joins == LAST_RESULT
    assert compile_where("rank=0 and replayed_at is null").joins == f"{CALLER} {LAST_RESULT}"
    assert compile_where("seq_len>1").joins == ""


@pytest.mark.parametrize("text, seconds", [("7d", 604_800), ("2h30m", 9_000), ("1.5h", 5_400), ("90s", 90), ("1w", 604_800)])
def test_durations(text, seconds):
    assert parse_duration(text).total_seconds() == seconds


@pytest.mark.parametrize("word", ["or", "and"])
def test_a_long_chain_of_conditions_is_one_flat_chain(word):
    condition = compile_where(f" {word} ".join(["replayable"] * 299))
    assert condition.sql == f"({f' {word.upper()} '.join(['k.replayable'] * 299)})"


def test_what_is_nested_too_deep_for_python_is_refused():
    text, before = "replayable" + " is true" * 299, sys.getrecursionlimit()
    assert compile_where("replayable" + " is true" * 20).columns == {"replayable"}
    sys.setrecursionlimit(len(inspect.stack(0)) + 400)
    try:
        with pytest.raises(WhereError, match="nested too deep"):
            compile_where(text)
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("text", ["seq_len -> '1d'", "seq_len ->> '1d'", "seq_len -> '$[' = 1"])
def test_the_parsers_own_log_never_reaches_the_terminal(text, capfd):
    log = logging.getLogger("sqlglot")
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with pytest.raises(WhereError, match="is not allowed"):
            compile_where(text)
        assert heard == [] and not log.disabled, "silent while a condition is read, and as it was afterwards"
    finally:
        log.removeHandler(handler)
    assert capfd.readouterr() == ("", "")


def test_the_headings_of_the_table_are_columns():
    assert compile_where("S = 3 and B = 2") == compile_where("seq_len = 3 and batch_size = 2")


def test_plain_comparisons_are_understood_as_the_parser_understands_them(monkeypatch):
    """Every column with every sign and every kind of value, alone and joined; and what only looks plain is left to the parser."""
    values = [
        "007",
        "1.50",
        "999999999999999",
        "'x'",
        "'a:b/c+d-e .1'",
        "'2025-06-19'",
        "null",
        "-1",
        "1e3",
        "1_0",
        "x",
    ]
    signs = ["<", "<=", ">", ">=", "=", "==", "!=", "<>", "=>", "is", "<=>"]
    plain = []
    for name in (*WHERE_COLUMNS, "S", "Rank", "nothing"):
        for place, sign in enumerate(signs):
            for value in values[place % 3 :: 3]:
                text = f"{name} {sign} {value}"
                if (found := where._simple(text)) is not None:
                    assert found == where._parsed(text, None), text
                    plain.append(text)
    assert len(plain) > 300
    for text in (" and ".join(plain[::97]), "rank=0 AND run='x and y'", "run='x' and rank=0 or step=1", "rank=0 and (step=1)"):
        found = where._simple(text)
        assert found is None or found == where._parsed(text, None), text
    monkeypatch.setattr(where, "_parse", lambda text: pytest.fail("the parser was asked"))
    assert compile_where("seq_len>4000 and status!='passed'").params == (4000, "passed")
    assert compile_where("timestamp>'2025-06-19 05:26'").params == (to_micros("2025-06-19T05:26:00.000000Z"),)


@pytest.mark.parametrize(
    "text, hint",
    [
        ("seqlen > 5", "`actordbg dump columns` lists the columns"),
        ("role = policy", "text goes in 'single quotes'; `actordbg dump columns` lists the columns"),
        ("seq_len > 5 ORDER  BY seq_len", "use --order, and --limit or --max-inputs"),
        ("role = None", "use null for a missing value: role is null"),
        ("seq_len > 5 limit 3", "use --order, and --limit or --max-inputs"),
    ],
)
def test_a_hint_names_what_there_is_in_a_line(text, hint):
    with pytest.raises(WhereError) as refused:
        compile_where(text)
    assert refused.value.hint.endswith(hint) and len(refused.value.hint) < 80
