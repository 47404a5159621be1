"""Pages read back as a browser's parser has them: elements, texts, addresses and scripts, and what a page's policy allows."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

OURS = frozenset(
    re.findall(
        r"\w+",
        "html head meta title link style body a main nav footer section figure figcaption details summary script svg rect line circle text"
        " polyline h1 h2 h3 p ul li b span strong code pre button div table thead tbody tr th td dl dt dd form label input select option",
    )
)


class Read(HTMLParser):
    """What is in a page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.texts: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append((self.elements[-1][1], data))
        elif not self._inside:
            self.texts.append(data)

    def having(self, name: str) -> list[str]:
        """Every value of an attribute."""
        return [str(attributes[name]) for _, attributes in self.elements if name in attributes]

    @property
    def policy(self) -> str:
        (found,) = (
            a["content"] or "" for tag, a in self.elements if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
        )
        return found

    @property
    def running(self) -> list[str]:
        """The scripts that a browser runs; the others are data."""
        return [text for attributes, text in self.scripts if "type" not in attributes]


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
