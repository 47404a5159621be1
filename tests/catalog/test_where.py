"""`--where`: what is allowed means what SQL says; everything else is refused by name, quickly, and never reaches SQLite."""

from __future__ import annotations

import inspect
import logging
import sys
from datetime import datetime, timezone

import pytest
from steps import counted

from actordbg.base.errors import WhereError
from actordbg.catalog import where
from actordbg.catalog.tables import CALLER, LAST_RESULT, WHERE_COLUMNS, parse_duration, to_micros
from actordbg.catalog.where import MAX_DEPTH, MAX_OPERATORS, compile_where

NOW = datetime(2025, 6, 20, 12, 0, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "sql", "params"),
    [
        ("seq_len>4096 and rank=0", "((d.seq_len > ?) AND (k.rank = ?))", (4096, 0)),
        ("rank in (0, 2) or not training", "((k.rank IN (?, ?)) OR (NOT k.training))", (0, 2)),
        ("training <> 0", "(k.training IS NOT 0)", ()),
        ("training is true", "(k.training IS 1)", ()),
        ("role is not null", "(NOT (k.role IS NULL))", ()),
        ("host not like 'node-%'", "(NOT coalesce((k.host LIKE ?), 0))", ("node-%",)),
        ("seq_len not between 10 and 20", "(NOT (d.seq_len BETWEEN ? AND ?))", (10, 20)),
        ("tokens / batch_size > 1.5", "((CAST(d.tokens AS REAL) / d.batch_size) > ?)", (1.5,)),
        ("-rank < -1", "((- k.rank) < (- ?))", (1,)),
        ("rank < 99999999999999999999", "(k.rank < ?)", (1e20,)),
        ("SEQ_LEN == 4", "(d.seq_len = ?)", (4,)),
        ('"seq_len" > 4', "(d.seq_len > ?)", (4,)),
        ("model_name = 'it''s; -- here'", "(k.model_name = ?)", ("it's; -- here",)),
        ("timestamp >= '2025-06-19'", "(d.timestamp >= ?)", (to_micros("2025-06-19T00:00:00.000000Z"),)),
        ("timestamp < '2025-06-19T05:26:08.5Z'", "(d.timestamp < ?)", (to_micros("2025-06-19T05:26:08.500000Z"),)),
        ("timestamp < '2025-06-19T05:26:08+02:00'", "(d.timestamp < ?)", (to_micros("2025-06-19T03:26:08.000000Z"),)),
        ("timestamp > now() - '2h30m'", "(d.timestamp > ?)", (to_micros("2025-06-20T09:30:00.000000Z"),)),
        ("timestamp between '2025-06-19' and now()", "(d.timestamp BETWEEN ? AND ?)",
         (to_micros("2025-06-19T00:00:00.000000Z"), to_micros("2025-06-20T12:00:00.000000Z"))),
        ("timestamp not like '2025-06-19%'", "(NOT coalesce((moment(d.timestamp) LIKE ?), 0))", ("2025-06-19%",)),
        ("timestamp like '%06-19%'", "(moment(d.timestamp) LIKE ?)", ("%06-19%",)),
        ("replayed_at like '2025-06-19%'", "(moment(micros(r.finished_at)) LIKE ?)", ("2025-06-19%",)),
        ("length(timestamp) = 27 and replayed_at < now()", "((length(moment(d.timestamp)) = ?) AND (micros(r.finished_at) < ?))",
         (27, to_micros("2025-06-20T12:00:00.000000Z"))),
        ("1 in (rank=0)", "(1 IN ((k.rank = ?)))", (0,)),
        ("'2025-06-20' between '2025-06-19' and timestamp", "(? BETWEEN ? AND d.timestamp)",
         (to_micros("2025-06-20T00:00:00.000000Z"), to_micros("2025-06-19T00:00:00.000000Z"))),
        ("1 - 2 + 3 - (4 - 5) > 2 * 3 / 4", "((((? - ?) + ?) - (? - ?)) > (CAST((? * ?) AS REAL) / ?))", (1, 2, 3, 4, 5, 2, 3, 4)),
        ("timestamp > '2025-06-19' + '6h'", "(d.timestamp > ?)", (to_micros("2025-06-19T06:00:00.000000Z"),)),
    ],
)  # fmt: skip
def test_what_is_allowed_is_spelled_out_with_bound_values(text: str, sql: str, params: tuple[object, ...]) -> None:
    condition = compile_where(text, now=NOW)
    assert condition.sql == sql
    assert condition.params == params


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ('"typo" > 4096', "typo"),
        ("seqlen > 4096", "seq_len"),
        ("1) or (1=1", "')'"),
        ("load_extension('x')", "load_extension"),
        ("rank in (select rank from dump)", "queries inside"),
        ("exists(select 1)", "queries inside"),
        ("rank = 0; drop table dump", "';'"),
        ("rank /* x */ = 0", "comments"),
        ("-- rank", "comment"),
        ("pragma writable_schema", "cannot be parsed"),
        ("1=1 union select 1", "cannot be parsed"),
        ("rank = 0 order by 1", "cannot be parsed"),
        ("host glob 'x*'", "glob"),
        ("host like 'x' escape 'y'", "escape"),
        (f"host like '{'%a' * 50}'", "pattern"),
        ("host || run = 'x'", "||"),
        ("host collate nocase = 'x'", "collate"),
        ("case when rank=0 then 1 end = 1", "CASE"),
        ("rank & 1 = 1", "&"),
        ("d.rank = 0", "not allowed"),
        ("rank = ?", "not allowed"),
        ("rank = $1", "$1"),
        ("(rank, 1) = (0, 1)", "not allowed"),
        ("rank in ()", "in"),
        ("run = 'a' 'b'", "not allowed"),
        ("rank", "number"),
        ("'x'", "text"),
        ("null", "null"),
        ("rank = null", "never true"),
        ("rank = 'x'", "number with a text"),
        ("run = 1", "text with a number"),
        ("training > 0", "condition"),
        ("training = 2", "yes/no with a number"),
        ("rank = 0 = 1", "condition"),
        ("rank / 0 > 1", "zero"),
        ("rank + 'x' > 1", "text"),
        ("length(rank) = 1", "text"),
        ("coalesce(step) = 1", "two values"),
        ("count(*) > 1", "count"),
        ("min(rank, 1) = 1", "not allowed"),
        ("now('x') > timestamp", "now"),
        ("timestamp > '2025-13-45'", "2025-13-45"),
        ("timestamp > now() - '2 fortnights'", "2 fortnights"),
        ("timestamp > now() - 2", "computes"),
        ("timestamp - '2h' > now()", "column of times"),
        ("timestamp > now() - '99999999999w'", ""),
        ("timestamp > 5", "time with a number"),
        ("rank = 1e999", "large"),
        ("", "empty"),
        ("rank = 'x", "not closed"),
        ("rank = 0\0", "control character"),
        ("rank is 1", "is"),
        ("rank over (partition by rank) = 1", ""),
        ("rank = 0 and", "cannot be parsed"),
        ("'a'{{=}}", "cannot be parsed"),
        ("{{ : || from }}", "cannot be parsed"),
        ("seq_len > 4096x", ""),
        ("seq_len > 'long'", "number with a text"),
        ("rank = 4kg", ""),
        ("timestamp > 'soon'", "soon"),
        ("last week or", ""),
        ("a4k > 1", "a4k"),
        ("status", "text"),
        ("verdict = 'mismatch'", "'mismatch' is not a verdict"),
        ("theirs in ('RIGHT', 'passed')", "'passed' is not a verdict"),
    ],
)
def test_everything_else_is_refused_and_named(text: str, culprit: str) -> None:
    with pytest.raises(WhereError) as caught:
        compile_where(text)
    assert culprit in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 2


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
def test_bombs_are_refused_after_few_steps(text: str) -> None:
    with counted() as steps, pytest.raises(WhereError):
        compile_where(text)
    assert steps.count < 1000 + 20 * len(text), "work grows faster than the text"


def test_reasonable_sizes_are_allowed() -> None:
    compile_where("(" * MAX_DEPTH + "rank=0" + ")" * MAX_DEPTH)
    compile_where(" or ".join(f"rank={n}" for n in range(MAX_OPERATORS // 4)))
    assert len(compile_where(f"rank in ({','.join(map(str, range(900)))})").params) == 900


def test_columns_that_were_used_are_known() -> None:
    assert compile_where("rank=0 and status='failed'").columns == {"rank", "status"}
    assert compile_where("status='failed' and seq_len>1").joins == LAST_RESULT
    assert compile_where("rank=0 and replayed_at is null").joins == f"{CALLER} {LAST_RESULT}"
    assert compile_where("seq_len>1").joins == ""


@pytest.mark.parametrize(("text", "seconds"), [("7d", 604_800), ("2h30m", 9_000), ("1.5h", 5_400), ("90s", 90), ("1w", 604_800)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text).total_seconds() == seconds


@pytest.mark.parametrize("word", ["or", "and"])
def test_a_long_chain_of_conditions_is_one_flat_chain(word: str) -> None:
    condition = compile_where(f" {word} ".join(["replayable"] * 299))
    assert condition.sql == f"({f' {word.upper()} '.join(['k.replayable'] * 299)})"


def test_what_is_nested_too_deep_for_python_is_refused() -> None:
    text, before = "replayable" + " is true" * 299, sys.getrecursionlimit()
    assert compile_where("replayable" + " is true" * 20).columns == {"replayable"}
    sys.setrecursionlimit(len(inspect.stack(0)) + 400)
    try:
        with pytest.raises(WhereError, match="nested too deep"):
            compile_where(text)
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("text", ["seq_len -> '1d'", "seq_len ->> '1d'", "seq_len -> '$[' = 1"])
def test_the_parsers_own_log_never_reaches_the_terminal(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("sqlglot")
    heard: list[str] = []
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


def test_the_headings_of_the_table_are_columns() -> None:
    assert compile_where("S = 3 and B = 2") == compile_where("seq_len = 3 and batch_size = 2")


def test_plain_comparisons_are_understood_as_the_parser_understands_them(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("text", "hint"),
    [
        ("seqlen > 5", "`actordbg dump columns` lists the columns"),
        ("role = policy", "text goes in 'single quotes'; `actordbg dump columns` lists the columns"),
        ("seq_len > 5 ORDER  BY seq_len", "use --order, and --limit or --max-inputs"),
        ("role = None", "use null for a missing value: role is null"),
        ("seq_len > 5 limit 3", "use --order, and --limit or --max-inputs"),
    ],
)
def test_a_hint_names_what_there_is_in_a_line(text: str, hint: str) -> None:
    with pytest.raises(WhereError) as refused:
        compile_where(text)
    assert refused.value.hint.endswith(hint) and len(refused.value.hint) < 80
