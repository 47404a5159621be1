"""A report as one HTML file: whole, small, quiet, and with nothing in it that somebody else could make run."""

import json
import math
import re

import pytest
from hostilestore import HOSTILE, forbidden
from pagecases import Read, hashed, page_of, tokens_page

from actordbg.base.foreign_text import in_line
from actordbg.document.blocks import Cell, Cells, Chart, Code, Grid, Heading, Items, Paragraph, Verdict
from actordbg.document.command_result import CommandResult, as_json_text
from actordbg.document.page import as_html
from actordbg.document.renderings import as_text
from actordbg.document.specifications import MOST_MARKS, layer, layered, names, quantity
from actordbg.judge.replay_findings import LEAKS, RANKS
from actordbg.laws.rules import RULES as LAW_RULES
from actordbg.locate.rules import EAGER, FORMULA, KERNEL, SAME_MODEL
from actordbg.recorded.recorded_laws import LAWS
from actordbg.recorded.turns import RULES as TURN_RULES
from actordbg.recorded.weight_ladder import RULES as WEIGHT_RULES
from actordbg.records.finding import Finding, NotChecked, Rule
from actordbg.steps.rules import RULES as STEP_RULES

POINTS = layered([{"x": 1, "y": 2, "k": HOSTILE}, {"x": 3, "y": 4, "k": "b"}], layer("point", color=names("k", HOSTILE)),
                 x=quantity("x", HOSTILE), y=quantity("y", "y"))  # fmt: skip
HOSTILE_BLOCKS = [
    Heading(HOSTILE, 1), Verdict(HOSTILE, HOSTILE, ((HOSTILE, HOSTILE),), (NotChecked(Rule(HOSTILE), HOSTILE, HOSTILE),), HOSTILE), Heading(HOSTILE, 2),
    Heading(HOSTILE, 3),
    Paragraph(HOSTILE), Items((HOSTILE, f"command: {HOSTILE}", f"a: {HOSTILE}")), Code(HOSTILE),
    Grid(("a", HOSTILE), ((HOSTILE, "1"),), frozenset({"a"}), (HOSTILE,)), Chart(HOSTILE, HOSTILE, POINTS, Grid((HOSTILE,),
    ((HOSTILE,),)), HOSTILE),
    Cells(HOSTILE, HOSTILE, (HOSTILE,), (HOSTILE,), ((Cell(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE),),)),
]  # fmt: skip


def test_nothing_that_others_wrote_becomes_an_element_an_attribute_or_a_script():
    page = as_html(HOSTILE_BLOCKS)
    found = Read(page)
    found.assert_inert()
    assert forbidden(page) == []
    assert "<script>alert(1)</script>" in "".join(found.texts), "it is shown as text"
    (data,) = (text for attributes, text in found.scripts if "type" in attributes)
    assert json.loads(data)["data"]["values"][0] == {"x": 1, "y": 2, "k": in_line(HOSTILE)}, "vega draws texts as they are"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_finite_is_null_with_its_name_in_json_and_no_point_of_a_chart(value):
    chart = Chart(
        "c", "c", layered([{"x": 1, "y": value}], layer("point"), x=quantity("x", "x"), y=quantity("y", "y")), Grid(("y",), ())
    )
    answer = CommandResult.of(Verdict("FAILED", "w", (("norm", "nan"),)), {"rows": [{"size": [1.0, value]}]}, chart)
    name = json.dumps(value)
    assert answer["rows"] == [{"size": [1.0, None]}] and answer["not_finite"]["rows[0].size[1]"] == name
    assert json.loads(as_json_text([{"size": value}, {}])) == [{"size": None, "not_finite": {"size": name}}, {}]
    (data,) = (text for attributes, text in Read(answer.to_html()).scripts if "type" in attributes)
    assert json.loads(data, parse_constant=pytest.fail)


def test_the_policy_allows_exactly_the_scripts_and_the_style_of_the_page():
    found = Read(as_html(HOSTILE_BLOCKS))
    allowed = dict(part.split(" ", 1) for part in found.policy.split("; "))
    assert allowed["default-src"] == "'none'" and "unsafe" not in found.policy and "http" not in found.policy
    assert allowed["script-src"].split() == [hashed(text) for text in found.running]
    logs = {str(a["href"]) for tag, a in found.elements if tag == "a" and not str(a["href"]).startswith("#")}
    assert all(re.fullmatch(r"[\w%/.~-]+", one) for one in logs), "relative, percent-encoded paths beside the page"
    addresses = {*found.having("src"), *found.having("href")} - logs
    assert all(one.startswith(("#", "data:image/svg+xml;base64,")) for one in addresses)


def test_a_page_is_small_and_only_one_with_charts_has_vega():
    assert len(as_html([Heading("a", 1), Paragraph("b")]).encode()) < 40_000
    assert 800_000 < len(page_of(3).encode()) < 1_200_000


def test_every_chart_has_an_open_table_and_a_description_for_whoever_has_no_javascript():
    found = Read(page_of(3))
    pictures = [attributes for _, attributes in found.elements if attributes.get("role") == "img"]
    assert sum(attributes.get("class") == "chart" for _, attributes in found.elements) == len(pictures) == 3
    assert all(len(str(picture["aria-label"])) > 20 for picture in pictures)
    assert sum(tag == "details" and "open" in attributes for tag, attributes in found.elements) == 3
    assert "Data as a table" in found.texts


def test_5000_inputs_are_thinned_and_the_page_says_so():
    page = page_of(5000)
    assert len(page.encode()) < 3_000_000
    assert f"{MOST_MARKS:,} of 5,000 shown, evenly sampled" in page


def test_the_verdict_stands_first_with_the_toy_model_what_was_not_checked_and_the_next_command():
    told = " ".join("".join(Read(page_of(3)).texts).split())
    assert "NOT CHECKED (TOY MODEL) 3 of 3 dumps passed" in told and "tokens/s in one worker (TOY MODEL)" in told
    assert "next actordbg compare r1 truth copy" in told and told.count("NOT CHECKED (TOY MODEL)") == 2, "in the title, too"


@pytest.mark.parametrize(
    "said, fails, second",
    [
        ("CLAUSE", "", None), ("short", "short", None), ("CLAUSE; 3 of 8 are wrong", "", "3 of 8 are wrong"),
        ("recorded data: ratio (slime#774): CLAUSE, in row 1 of dump 9f3a2c1b; also fails: mask", "", "recorded data: ratio (slime#774); also fails: mask"),
        ("CLAUSE; the next one", "short", "CLAUSE; the next one"), ("8 of 8 differ", "", "8 of 8 differ"),
    ],
)  # fmt: skip
def test_the_second_line_says_what_the_first_does_not(said, fails, second):
    clause = "the norm is 2 (limit 1; worst: 3)"
    place = {"dump": "20250619T052608.430740Z-000012-4711-9f3a2c1b7", "row": 1}
    finding = Finding(Rule("ratio", remedy="look", fails=fails), clause, place)
    verdict = Verdict("WRONG", said.replace("CLAUSE", clause), findings=[finding])
    lines = [second.replace("CLAUSE", clause)] if second else []
    assert verdict.details == [*lines, "do: look"]
    assert verdict.brief == (fails or clause) + ", in row 1 of dump 9f3a2c1b"


def test_a_dump_id_is_shown_as_a_handle_except_where_it_must_stay_usable():
    dump_id = "20250619T052608.430740Z-000012-4711-9f3a2c1b7"
    blocks = [Paragraph(f"worst: {dump_id}. In dumps/r/{dump_id}.safetensors.zst; dump_id = '{dump_id}'")]
    page = as_html(blocks)
    assert f'worst: <span title="{dump_id}">9f3a2c1b</span>. In dumps/r/{dump_id}.safetensors' in page
    assert f"dump_id = &#x27;{dump_id}&#x27;" in page
    assert as_text(blocks).startswith("worst: 9f3a2c1b. In")


def test_the_title_is_the_page_s_own_and_a_sentence_with_a_colon_is_no_label():
    items = Items(("response length: counts the actions", "align log-probs with tokens: the log-prob at t is of the id at t + 1"))
    page = CommandResult(True, {}, [Verdict("RIGHT", "all"), Heading("Laws", 3), items], title="laws of recorded data").to_html()
    assert "<title>RIGHT: laws of recorded data</title>" in page and page.count("<h1") == 1
    assert page.count('class="fact"') == 1 and "<b>response length</b>" in page


def test_no_figure_is_torn_behind_its_hyphen():
    assert '<span class="n">2e-06</span> nats' in as_html([Paragraph("shifted by 2e-06 nats")])


def test_no_remedy_is_torn_into_a_label_and_its_value():
    """ "replay with `--no-packing`: if that is right, ..." was a label of four words and half a sentence."""
    rules = [
        *LAWS,
        *STEP_RULES.values(),
        *LAW_RULES.values(),
        *TURN_RULES,
        *WEIGHT_RULES,
        RANKS,
        LEAKS,
        SAME_MODEL,
        FORMULA,
        KERNEL,
    ]
    pages = {remedy: as_html([Items([remedy])]) for remedy in [*(rule.remedy for rule in rules), EAGER]}
    assert [remedy for remedy, page in pages.items() if 'class="fact"' in page] == []


def test_a_dump_is_drawn_with_its_prompt_padding_response_and_worst_token():
    page = tokens_page()
    told = " ".join("".join(Read(page).texts).split())
    assert "Worst token circled: row 1, position 9, 0.5 nats." in told
    assert '"prompt"' in page and '"padding"' in page


def test_no_line_of_a_text_is_a_command_of_githubs_runner():
    """Foreign text that is wrapped may come to stand at the beginning of a line."""
    foreign = "word " * 15 + "::stop-commands::now " + "word " * 14 + "##[error]none"
    text = as_text([Paragraph(foreign), Items([foreign])])
    assert "\\::stop-commands::now" in text and not re.search(r"(?m)^\s*(::|##\[)", text)
