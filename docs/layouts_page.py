"""The page of files that runs leave behind, from the tables of layouts and of files that are named only."""

from __future__ import annotations

from actordbg.dumps.containers import OTHERS, TEXTS
from actordbg.dumps.file_rows import ALIGN, PARTS, RESPONSE, FileLayout
from actordbg.dumps.layouts import LAYOUTS, TABLE, USUAL
from actordbg.recorded.recorded_laws import LAWS

INTRODUCTION = """\
# Layouts of files

Files that a run leaves behind, which `actordbg lint PATH`, `check PATH` and `dump import PATH` read
([how to](../how-to/files-you-already-have.md)). What a file is, its content says, not its name. Nothing in a file is executed or
unpickled. Fields and formats were read from the writers' source in the version that is named; their code was not run. A later
version whose fields have the same names is read too.

Each row of a file becomes a recorded row: token ids, masks and log-probs, of token t given those before it. Parts that the file
lacks are not made up: laws that need them are named as not checked.
"""
NAMES = {
    "ids": "token ids", "attention_mask": "real tokens", "action_mask": "actions", "log_probs": "log-probs of the trainer",
    "old_log_probs": "old log-probs", "rollout_log_probs": "log-probs of the rollout",
    "base_action_log_probs": "log-probs of the reference", "advantages": "advantages", "returns": "returns", "values": "values",
    "entropy": "entropies", "rewards": "rewards", "step": "step", "rank": "rank", "truncated": "whether it was cut off",
    "ranks": "ranks that have rows of their own", "response_length": "length of the response",
    "length": "length of the row", "sample_mask": "rows that count", "labels": "labels, unless there is a mask",
}  # fmt: skip
LEARNED = frozenset(("log_probs", "advantages"))
LAWS_OF: dict[str, tuple[frozenset[str], ...]] = {
    "lengths": (frozenset(),), "finite": (frozenset(("log_probs",)), frozenset(("rollout_log_probs",))),
    "log-probs": (frozenset(("log_probs",)), frozenset(("rollout_log_probs",))), "mask": (frozenset(("rollout_log_probs",)),),
    "entropy": (frozenset(("entropy", "log_probs")),), "actions": tuple(frozenset((name,)) for name in LEARNED),
    "end": (frozenset(),),
    "alignment": (frozenset(("log_probs", "rollout_log_probs")),), "rows": (frozenset(("log_probs", "rollout_log_probs")),),
    "placeholder": (frozenset(("log_probs", "rollout_log_probs")),), "duplicates": tuple(frozenset((name,)) for name in LEARNED),
    "agreement": (frozenset(("log_probs", "rollout_log_probs", "advantages")),),  # of many actions: more than a row without them
    "first action": (frozenset(("advantages",)), frozenset(("rewards",)), frozenset(("rollout_log_probs", "response_length"))),
    "advantages": (frozenset(("advantages",)),), "row advantage": (frozenset(("advantages", "rewards")),),
    "rewards": (frozenset(("advantages", "rewards")),),
}  # fmt: skip
"""The laws that a file can be asked, each with the parts that it needs, one set or another."""
OF_SOME_ROWS = {
    "environment": ("rows of several turns", {"log_probs", "rollout_log_probs"}),
    "cut off": ("rows that were cut off, with the rewards of a verifier", {"truncated", "rewards"}),
}
"""Laws that need rows of a kind, which not every file has, and the parts that they need."""
OF_ESTIMATOR = {"verl": ("bound",), "openrlhf": ("bound",)}
"""Laws that depend on the estimator of advantages, which a file does not name: GRPO's divides by a group's deviation."""


def asked(layout: FileLayout) -> list[str]:
    """Return the names of the laws that rows of a layout can be asked."""
    parts = {*layout.parts}
    more = OF_ESTIMATOR.get(layout.name, ())
    return [law.name for law in LAWS if law.name in more or any(needs <= parts for needs in LAWS_OF.get(law.name, ()))]


def layouts_markdown() -> str:
    """The whole page."""
    lines = [INTRODUCTION, "## Read", ""]
    for layout in (*LAYOUTS, TABLE):
        lines += [f"### {layout.name}", "", f"{layout.writer}. Source: {layout.source}.", ""]
        if layout is TABLE:
            lines += ["| Part | Usual names of its column |", "|---|---|"]
            usual = {part: ", ".join(f"`{name}`" for name in names) for part, names in USUAL.items()}
            lines += [f"| `{part}`: {NAMES[part]} | {names} |" for part, names in usual.items()]
            lines += [f"| `{ALIGN}` | `own` (the usual), `next` |", "", layout.notes, ""]
            continue
        lacks = [
            NAMES[part]
            for part in PARTS
            if part not in (*layout.parts, RESPONSE, "length", "sample_mask", "attention_mask", "ranks", "labels")
        ]
        some = {name: kind for name, (kind, needs) in OF_SOME_ROWS.items() if needs <= {*layout.parts}}
        others = [law.name for law in LAWS if law.name not in (*asked(layout), *some)]
        lines += [
            f"- holds: {', '.join(f'{NAMES[part]} (`{layout.fields[part]}`)' for part in layout.parts)}",
            f"- lacks: {', '.join(lacks)}; settings, weights and the order of calls",
            f"- laws that judge it: {', '.join([*asked(layout), *(f'{name} ({kind})' for name, kind in some.items())])}",
            f"- laws that cannot judge it: {', '.join(others)}",
            f"- {layout.notes}",
            "",
        ]
    lines += ["## Named, and not read", "", "| It is | Its content |", "|---|---|"]
    lines += [f"| {other.what} | {other.way} |" for other in OTHERS]
    lines += [f"| {what} | {way} |" for _, what, way in TEXTS]
    lines += [
        "", "Anything else is refused: it is not a file that is read.",
        "A plain pickle holds an old recorder's call, or rows as lists, arrays or tensors.",
        "", "Limits: 1 GiB of arrays that are needed at once, 8 GiB of a pickle, 64 MiB a line of JSON, 128 MiB a list in JSON.",
        "A parquet file takes as much memory as its largest row group.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
