"""A report as text, Markdown, JSON and CSV: the same facts, each in its form."""

import csv
import dataclasses
import io
import json

from reportcases import NOW, given, replay, result

from actordbg.base.foreign_text import in_markdown
from actordbg.base.units import human_bytes
from actordbg.document.blocks import Grid, number, rate, seconds
from actordbg.document.command_result import as_json_text
from actordbg.document.renderings import as_markdown, as_text, grid
from actordbg.judge import exports
from actordbg.judge.replay_document import document
from actordbg.judge.summary import summarise


def two_replays():
    inputs = [given(i, seq_len, rank=i % 2) for i, seq_len in enumerate((100, 300, 310, 1861, 2000))]
    first = [
        result(0, forward_s=9.0), result(1), result(2, forward_s=1.5),
        result(3, status="failed", forward_s=None, error_class="RuntimeError", error="max_seqlen_q | FakeTensor <b>",
               signature="cuda-out-of-memory", log_excerpt="Traceback"),
    ]  # fmt: skip
    second = [result(i, "r2", forward_s=0.5, backward_s=None) for i in range(5)]
    return [replay(inputs, first, status="interrupted"), replay(inputs, second, "r2", attn="eager")]


def summary():
    return summarise(two_replays(), selection="2 replays", now=NOW)


def test_the_text_of_one_replay_begins_with_its_verdict_and_ends_with_the_next_command():
    inputs = [given(0, 200), given(1, 300), given(2, 400), given(3, 2000)]
    results = [result(0, forward_s=9.0), result(1), result(2, status="hung", forward_s=None, error="no answer in 600 s")]
    text = as_text(document(summarise([replay(inputs, results, status="interrupted")], selection="the last replay", now=NOW)))
    assert text.startswith(
        "FAILED (TOY MODEL): 1 of 4 dumps, 00000002, did not pass: timed out, no answer in 600 s\n"
        "  did not pass                           1 of 4 dumps\n"
        "  forward (TOY MODEL)                    1.00 s\n"
    )
    assert text.endswith("\nnext: actordbg replay --resume r1\n")
    for told in (
        "  result: 2 passed, 1 hung, 1 not run of 4 (the replay is interrupted)\n",
        "  timed out: 1 input, 1 hung\n  cause: no answer in 600 s\n  for example: 00000002\n",
        "  all           3       1  1.00  1.00  2.00  2.00    300        300   1.0 GiB\n",
        "  00000001     0  2  300   1.00   2.00\n",
    ):
        assert told in text


def test_a_text_fits_80_columns_and_a_table_that_is_too_wide_loses_text_never_figures():
    assert max(map(len, as_text(document(summary())).splitlines()[1:-1])) <= 80
    inputs = [dataclasses.replace(given(0, 12345678), rank=1234567, dump_id="d" * 90)]
    data = replay(inputs, [dataclasses.replace(result(0, forward_s=123.0), dump_id="d" * 90)])
    text = as_text(document(summarise([data], selection="one", now=NOW)))
    assert max(map(len, text.splitlines()[1:-1])) <= 80
    assert "1234567" in text and "12345678" in text
    heads = ("rank", "micro-batch", "actions", "loss", "replayed", "clip ratio", "replayed clip ratio", "KL to old, nats")
    lines = grid(Grid(heads, [("0", "1", "64", *["-0.2351"] * 5)])).splitlines()
    assert max(map(len, lines)) <= 80 and all(word in "\n".join(lines) for head in heads for word in head.split())
    words = [f"word{number}" for number in range(40)]
    wrapped = as_text([Grid(("law", "what"), [("x", " ".join(words))], {"law", "what"}, wraps=True)])
    assert max(map(len, wrapped.splitlines())) <= 80 and all(word in wrapped for word in words)


def test_a_wrapped_table_breaks_no_id_while_a_text_beside_it_can_be_wrapped():
    row = ("@1", "20261128T233211-178b07", "7 s ago", "0/3 interrupted", "NOT CHECKED", "TOY MODEL (tiny) fp32, packed, plain")
    columns = ("", "replay", "when", "passed", "verdict", "configuration")
    lines = grid(Grid(columns, [row], {"", "replay", "verdict", "configuration"}), fold=True).splitlines()
    assert row[1] in lines[2] and max(map(len, lines)) <= 80, lines


def test_what_a_narrow_table_leaves_of_a_parameter_names_its_layer():
    row = (
        "20250619T052754.913437Z-000000-0-86cb69034f0722d6",
        f"model.{'deeply.' * 5}layers.11.self_attn.q_proj.weight",
        "0.0126",
    )
    lines = grid(Grid(("dump", "gradient of", "cosine"), [row], frozenset({"dump", "gradient of"})), 60).splitlines()
    assert lines[2].split() == ["86cb6903", "..deeply.layers.11.self_attn.q_proj.weight", "0.0126"]


def test_markdown_shows_what_came_from_outside_as_text_and_each_row_of_a_table_has_all_columns():
    text = as_markdown(document(summary()))
    assert r"max_seqlen_q \| FakeTensor \<b>" in text
    for given_text, shown in (("# a", r"\# a"), ("- a", r"\- a"), ("a_b _c_ [x](y) `z`", r"a_b \_c\_ \[x\](y) \`z\`")):
        assert in_markdown(given_text, leading=True) == shown
    assert in_markdown("-") == "-"
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) >= 3
    for lines in tables:
        assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1


def test_json_is_the_whole_summary_and_csv_has_one_row_for_each_result():
    data = json.loads(as_json_text(dataclasses.asdict(summary())))
    counts = {"inputs": 5, "passed": 3, "failed": 1, "crashed": 0, "hung": 0, "not_run": 1, "stopped": 0}
    assert data["replays"][0]["counts"] == counts and data["replays"][0]["resolved"]["attn"] == "sdpa"
    assert data["comparison"]["rows"][1]["differs"] == {"attn": "eager"}
    rows = list(csv.DictReader(io.StringIO(exports.render_csv(two_replays()))))
    assert [row["warm_up"] for row in rows] == ["first", "", "", "", "first", "", "", "", ""]
    assert [rows[4][name] for name in ("attn", "seq_len", "backward_s", "packing")] == ["eager", "100", "", "false"]
    (row,) = csv.DictReader(io.StringIO(exports.render_csv([replay([given(0, 9)], [result(0, error="=HYPERLINK(1)")])])))
    assert row["error"] == "'=HYPERLINK(1)", "no formula"


def test_figures_are_written_with_their_significant_digits():
    assert [seconds(v) for v in (None, 0.0, 2.0, 0.95, 12.345, 123.4, 4321.0, 0.00012)] == [
        "-", "0", "2.00", "0.950", "12.3", "123", "4321", "0.00012"
    ]  # fmt: skip
    assert [number(v) for v in (None, -2.0, 1e-7, 123456.0)] == ["-", "-2", "1e-07", "123456"]
    assert [rate(v) for v in (None, 12.34, 12345.6)] == ["-", "12.3", "12,346"]
    assert [human_bytes(v) for v in (None, 12, 12345, 2**31)] == ["-", "12 B", "12.1 KiB", "2.0 GiB"]
