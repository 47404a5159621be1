"""Pages made up, and read back as a browser's parser has them: elements, texts, addresses, scripts, and what a policy allows."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from itertools import product

import numpy as np
from hostilestore import HOSTILE
from reportcases import given, replay, result

from actordbg.document.blocks import Heading, Paragraph
from actordbg.document.page import as_html
from actordbg.judge.comparison_document import gradients_chart
from actordbg.judge.replay_charts import replay_charts
from actordbg.judge.replay_document import document
from actordbg.judge.summary import summarise
from actordbg.judge.token_charts import TokenPair, tokens_chart
from actordbg.records.comparison_record import DumpComparison
from actordbg.records.matrix_record import MatrixCell, MatrixRecord

OURS = frozenset(
    re.findall(
        r"\w+",
        "html head meta title link style body a main nav footer section figure figcaption details summary script"
        " h1 h2 h3 p ul li b span strong code pre button div table thead tbody tr th td dl dt dd form label input select option",
    )
)


class Read(HTMLParser):
    """What is in a page."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.elements = []
        self.scripts = []
        self.texts = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts.append((self.elements[-1][1], data))
        elif not self._inside:
            self.texts.append(data)

    def having(self, name):
        """Every value of an attribute."""
        return [str(attributes[name]) for _, attributes in self.elements if name in attributes]

    def assert_inert(self):
        """No element, attribute or script but those of actordbg's own pages."""
        assert {tag for tag, _ in self.elements} <= OURS
        assert not [name for _, attributes in self.elements for name in attributes if name.startswith("on") or name == "style"]

    @property
    def policy(self):
        (found,) = (
            a["content"] or "" for tag, a in self.elements if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
        )
        return found

    @property
    def running(self):
        """The scripts that a browser runs; the others are data."""
        return [text for attributes, text in self.scripts if "type" not in attributes]


def hashed(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_of(count):
    inputs = [given(i, 200 + i % 900) for i in range(count)]
    results = [
        result(
            i,
            started_at=f"2025-06-19T05:{i // 3600 % 60:02d}:{i % 60:02d}.000000Z",
            finished_at="2025-06-19T06:00:00.000000Z",
        )
        for i in range(count)
    ]
    data = replay(inputs, results)
    summary = summarise([data], selection="the last replay", now="now")
    return as_html(document(summary, {"A": replay_charts(data)}))


def tokens_page():
    """A dump of 2 x 12 tokens: 5 of prompt, then 7 answers; the first row is padded in front, row 1's fourth answer is far off."""
    a = [[-1.0 - at / 10 for at in range(7)] for _ in range(2)]
    b = [[value + 1e-3 * (at - 3) for at, value in enumerate(row)] for row in a]
    b[1][4] = a[1][4] - 0.5
    real = np.array([[0, 0] + [1] * 10, [1] * 12])
    pair = TokenPair(HOSTILE, np.array(a), np.array(b), np.ones((2, 7), bool), np.tile(np.arange(12), (2, 1)), real, 0.4)
    found = {f"model.layers.{layer}.{HOSTILE}.weight": 0.1 * layer + 0.01 for layer in range(3)}
    found |= {f"model.layers.0.mlp.experts.{expert}.up_proj.weight": 0.02 for expert in range(40)}
    charts = (
        tokens_chart(pair, lambda ids: f"{HOSTILE} {len(ids)}"),
        gradients_chart([DumpComparison(HOSTILE, "mismatch", distances=found)]),
    )  # fmt: skip
    return as_html([Heading("tokens", 1), Paragraph(HOSTILE), *(one for one in charts if one is not None)])


def _cells():
    made = []
    for index, (attn, packing, dtype, layers) in enumerate(
        product(("sdpa", "eager"), (False, True), ("fp32", "bf16"), range(1, 6))
    ):
        settings = {"attn": attn, "packing": packing, "dtype": dtype, "nproc": layers}
        status, verdict = ("failed", None) if index % 7 == 3 else ("passed", "mismatch" if index % 5 == 2 else "match")
        made.append(MatrixCell(index, f"{dtype}, {attn}", settings, status, {"model": "tiny", "backend": "plain", "compile": False} | settings,
                               f"r{index}", "" if index else HOSTILE, verdict=verdict, max_abs=1e-5 * index, forward_s=0.1))  # fmt: skip
    return tuple(made)


MATRIX_OF_40 = MatrixRecord(
    "m40", "2025-06-19T05:30:00.000000Z", "complete",
    {"dtype": ["fp32", "bf16"], "attn": ["sdpa", "eager"], "packing": [False, True], "nproc": [1, 2, 3, 4, 5]}, _cells(), ("d1", "d2"),
    selection="seq_len<600", options={"oracle": "fp32"},
)  # fmt: skip
"""Forty cells, some wrong, some failed."""
