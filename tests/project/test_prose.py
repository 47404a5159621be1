"""Prose where it can be measured: short design, dated decisions, one word for one thing.

The glossary is both the page and the rule: its terms must be used on other pages, and the words that it retires must not be.
"""

import re
from collections import Counter
from pathlib import Path

import docpages
import figures
import pytest
import wording
from docpages import page_id
from roots import ROOT

DESIGN = ROOT / "docs" / "design.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
WRITTEN = [
    page for page in docpages.pages() if page.name != "log.md" and not page.read_text().startswith("<!-- Generated")
]  # the log is history


def terms():
    """Each term of the glossary with what is said about it."""
    text = re.sub(r"\n  +", " ", GLOSSARY.read_text())
    return dict(re.findall(r"^- \*\*(.+?)\*\*: (.+)$", text, re.MULTILINE))


def retired():
    """The words and phrases that the glossary retires; one with a condition in brackets is for people to watch."""
    table = GLOSSARY.read_text().partition("## Retired words")[2]
    return [word for word in re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[1:] if not re.search(r"[(\-]", word)]


def uses(word, text):
    """The places of a word in prose and tables; code and links' targets may show old names."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|^#[^\n]*$", " ", text, flags=re.MULTILINE | re.DOTALL)
    return [text[max(0, m.start() - 40) : m.end() + 40] for m in re.finditer(rf"\b{re.escape(word)}s?\b", text, re.I)]


# ---- length ----


def test_the_design_is_two_pages_and_one_picture():
    text = DESIGN.read_text()
    assert len(text.splitlines()) <= 120
    assert text.count("```mermaid") == 1


def test_every_room_is_in_the_design():
    listed = set(re.findall(r"^\| `(\w+)/[^`]*` \|", DESIGN.read_text(), re.MULTILINE))
    assert listed == {*figures.rooms(ROOT)}


# ---- decisions ----


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_number_date_status_context_decision_and_consequence(page):
    text = page.read_text()
    assert re.match(rf"# {page.name[:4]}\. \S.*\n\nDate: 20\d\d-\d\d-\d\d\. Status: (accepted|replaced by .+)\.\n", text)
    assert [part for part in ("Context", "Decision", "Consequence") if f"\n**{part}.** " not in text] == []
    assert len(text.splitlines()) <= 40


def test_every_decision_has_a_number_of_its_own_and_stands_once_in_the_list():
    numbers = [page.name[:4] for page in DECISIONS]
    assert len(set(numbers)) == len(numbers) <= 30, "keep those that somebody could undo by accident"
    listed = re.findall(r"^- \[\d{4}\]\((.+?)\)", (ROOT / "docs/decisions/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.name for page in DECISIONS]


# ---- one word, one meaning ----


def test_a_term_stands_once_and_leads_to_the_page_that_explains_it():
    text = GLOSSARY.read_text()
    assert len(re.findall(r"^- \*\*", text, re.MULTILINE)) == len(terms()) > 50
    assert [term for term, said in terms().items() if not re.search(r"See \[[^\]]+\]\([^)]+\)\.?$", said)] == []


def test_every_term_is_used_on_another_page():
    text = " ".join(" ".join(page.read_text() for page in WRITTEN if page != GLOSSARY).split())
    assert [term for term in terms() if not re.search(rf"\b{re.escape(term)}(s|es)?\b", text, re.I)] == []


def test_no_page_has_a_retired_word():
    """The log is history, and the schema's comments change with a migration."""
    assert len(retired()) >= 3
    assert len(uses("oracle", "An oracle.\n\n| Oracles |\n\n`--oracle`\n")) == 2
    texts = {page_id(page): page.read_text() for page in docpages.pages()}
    ours = {page: text for page, text in texts.items() if Path(page).name not in (GLOSSARY.name, "log.md", "catalog.md")}
    assert [(page, word, places) for page, text in ours.items() for word in retired() if (places := uses(word, text))] == []


# ---- files that pages name ----


@pytest.mark.parametrize("page", WRITTEN, ids=page_id)
def test_every_file_of_the_project_that_a_page_names_exists(page):
    rooms = "|".join(figures.rooms(ROOT))
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(rf"`((?:actordbg|tests|migrations|examples|{rooms})/[\w./-]*)`", text)
    ours = [name for name in named if ("." in Path(name).name or name.endswith("/")) and "NAME" not in name]
    assert [name for name in ours if not ((ROOT / name).exists() or (ROOT / "actordbg" / name).exists())] == []


# ---- wording ----


def test_no_text_has_a_pattern_that_no_native_engineer_writes():
    left = Counter(pattern for path in wording.files(ROOT) for _, pattern, _ in wording.findings(path))
    assert dict(left) == wording.ALLOWED, "rewrite the sentence; `python tests/project/wording.py --list PATH` shows each place"


@pytest.mark.parametrize(
    "source, patterns",
    [
        ('"""Return the sum."""\nWORD = "continue"\n', []),
        ('def f():\n    """What it holds."""\n', ["a function's docstring begins without a verb"]),
        ('SAID = f"{1} is no URL, and the replay goes on"\n', ["is no", "goes on"]),
        ('HELP = "Write the page, too."\n# It is no comment.\nCOLOUR = "colour"\n', [", too"]),
        ('"""One replay; `is no` is code, and nobody was asked."""\n', ["bare one", "was asked"]),
    ],
)
def test_the_patterns_are_noticed_in_texts_alone(tmp_path, source, patterns):
    (tmp_path / "module.py").write_text(source)
    assert sorted(pattern for _, pattern, _ in wording.findings(tmp_path / "module.py")) == sorted(patterns)
