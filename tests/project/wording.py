"""Patterns of English that no native engineer writes, in docstrings, messages, help and Markdown.

    python tests/project/wording.py [--list] PATH...       # count them, or show each with its place

Code in backticks, fenced blocks and names of laws are not text. `ALLOWED` is what is left; it may only shrink.
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

PATTERNS = {
    "a function's docstring begins without a verb": r"^def: (What|Whether|Who|How|Which|When|Where|One|Its|Of|Those|That)\b",
    "begins with Of, The same, Its": r"^(Of|The same|Its|For each|With each|In which)\b",
    "is no": r"(?<!there )\b(is|are|was|were|be) (no|none)\b(?! (more|longer|less|other|doubt))",
    "was asked": r"\b(was|were|is|are|been) (not )?asked\b",
    ", too": r", too\b",
    "British": r"(?i)\b(colou?r(?<=our)\w*|\w*colour\w*|\w+normalis\w+|serialis\w+|recognis\w+|behaviour|favour\w*|licence|learnt|grey|centre|initialis\w+|optimis\w+|summaris\w+|parametris\w+|synchronis\w+|organis\w+|analys(e|ed|ing)\b)",
    "bare one": r"^One\b|\bone's\b|\b[Oo]ne that\b|\b(that|this) one\b",
    "goes on": r"\bgo(es|ing)? on\b|\bwent on\b|\bgone on\b",
    "mend, take off": r"\bmend(s|ed|ing)?\b|\btak(e|es|en|ing) (off|out)\b|\bby itself\b|\bfrom which on\b",
    "begins with also if": r"\balso (if|when|where)\b|\bwhere there (is|are) (no|none)\b",
}
HISTORY = ("log.md", "weight.md")
ALLOWED = {}
"""What is left of each pattern."""


def texts(path):
    """Line and text of each docstring, message and paragraph of a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blank = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), source, flags=re.MULTILINE | re.DOTALL)
        yield from ((number, line.strip("| #-")) for number, line in enumerate(blank.splitlines(), 1))
        return
    seen = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            seen.add(node.body[0].value)  # type: ignore[attr-defined]
            yield node.body[0].lineno, f"def: {text}"
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            seen.update(node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value and node not in seen:
            yield node.lineno, node.value


def findings(path):
    """Line, pattern and text around each place of a file that a pattern matches."""
    for line, text in texts(path):
        plain = re.sub(r"`[^`]*`", "``", text)
        for name, pattern in PATTERNS.items():
            for match in re.finditer(pattern, plain):
                place = line + plain[: match.start()].count("\n")
                yield place, name, " ".join(plain[max(0, match.start() - 50) : match.end() + 40].split())


def files(root):
    """The product's modules and all pages, without what is generated and what keeps history."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")]
    written = [
        page for page in pages if "<!-- Generated" not in page.read_text(encoding="utf-8")[:15] and page.name not in HISTORY
    ]
    return [*sorted((root / "actordbg").rglob("*.py")), *sorted(written)]


if __name__ == "__main__":
    chosen = [Path(name) for name in sys.argv[1:] if name != "--list"]
    counts = Counter()
    for path in [
        file for one in chosen for file in (sorted(one.rglob("*.py")) + sorted(one.rglob("*.md")) if one.is_dir() else [one])
    ]:
        for place, pattern, text in findings(path):
            counts[pattern] += 1
            if "--list" in sys.argv:
                print(f"{path}:{place}: {pattern}: {text}")
    print(*(f"{count:5} {pattern}" for pattern, count in counts.most_common()), sum(counts.values()), sep="\n")
