"""Judge a chat template: does a conversation's prefix stay a prefix as turns are added (`turns --template MODEL`)?

A rollout that renders each turn anew with the template trains on other ids than it sampled, unless for each assistant turn k:

1. the ids of messages[:k], with the prompt for generation, are a prefix of the ids of messages[:k+1];
2. the ids of messages[:k+1] are a prefix of the ids of the longer conversation;
3. the text of the turn stands in the rendered conversation as it was sampled.

`CONVERSATIONS` are made up, of what templates and tokenizers stumble over: reasoning, tools, whitespace at both ends, an empty
answer. Recorded conversations (`run --turns`) are text as it was sampled: there the ids of the text up to each border must be a
prefix of those up to the next. A template runs in transformers' sandbox; code of a model is not run.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from actordbg.base.errors import Unsupported
from actordbg.base.units import plural
from actordbg.document.command_result import CommandResult
from actordbg.document.found import answer_of, verdict_of
from actordbg.dumps.layouts import load_tokenizer
from actordbg.formats.turn_record import Trajectory
from actordbg.recorded.turns import RULES as TURN_RULES, Decode, difference
from actordbg.records.finding import Finding, Findings, NotChecked, outcomes_of

Messages = Sequence[Mapping[str, Any]]
RULES = tuple(rule for rule in TURN_RULES if rule.name not in ("two BOS", "other actions"))
"""What a template can break of the rules of turns."""
_RULE = {rule.name: rule for rule in RULES}


def _talk(*contents: str, system: str = "", role: str = "user") -> list[dict[str, Any]]:
    """Build a conversation: the first message is the user's, then the assistant's and `role`'s in turn."""
    roles = ["user", *(("assistant", role) * len(contents))]
    said = [{"role": who, "content": text} for who, text in zip(roles, contents, strict=False)]
    return [{"role": "system", "content": system}, *said] if system else said


CONVERSATIONS: Mapping[str, Messages] = {
    "plain": _talk("What is 2 + 3?", "5", "And 7 + 1?", "8", "Thanks", "You are welcome."),
    "system": _talk("Hello", "Hi", "Again", "Hi again", system="Be brief."),
    "reasoning": _talk("What is 2 + 3?", "<think>\n2 + 3 is 5\n</think>\n\n5", "And 7 + 1?", "<think>\n8\n</think>\n\n8"),
    "tool": _talk("Weather?", "I ask the tool.", "sunny", "It is sunny.", "And now?", "Sunny.", role="tool"),
    "newline at the end": _talk("List two", "- a\n- b\n", "More", "- c\n\n", "Stop", "ok"),
    "space at the ends": _talk("Continue: a", " b ", "Continue", "  c", "Continue", "d "),
    "empty answer": _talk("Say nothing", "", "Say a", "a"),
    "code": _talk("Write code", "```python\nif x:\n    y = 1\n```", "Run it", "y = 1\n>>> "),
}


def template_answer(model: str, trajectories: Sequence[Trajectory] = ()) -> CommandResult:
    """Judge the chat template of a model's folder, on made-up and recorded conversations.

    Raises EnvironmentProblem if the tokenizer cannot be loaded, Unsupported if it has no chat template.
    """
    tokenizer = load_tokenizer(model)
    if not tokenizer.chat_template:
        raise Unsupported(f"the tokenizer of {model} has no chat template", hint="pass the model that the rollout uses")
    broken: list[Finding] = []
    skipped: dict[str, str] = {}
    made_up = {name: partial(_faults, tokenizer, name, messages) for name, messages in CONVERSATIONS.items()}
    recorded = {each.name: partial(_recorded, tokenizer, each) for each in trajectories}
    for name, find in (made_up | recorded).items():
        try:
            broken += itertools.islice(find(), 1)
        except Exception as error:  # noqa: BLE001  # a template raises what it likes about roles that it does not know
            skipped[name] = str(error)[:120]
    rendered = len(made_up.keys() - skipped.keys())
    kept = _RULE["template drops text"]
    left = [NotChecked(kept, f"{name}: it could not be rendered or encoded ({why})") for name, why in skipped.items()]
    findings = Findings(outcomes_of(RULES, broken, rendered), model, left)
    said = "the template refused every made-up conversation"
    if rendered:
        count = f"{plural(rendered, 'made-up conversation')} and {len(recorded.keys() - skipped.keys())} recorded"
        said = f"every prefix of {count} stays a prefix as turns are added"
    about = {"model": model, "skipped": skipped, "recorded": len(trajectories)}
    return answer_of(findings, verdict_of(findings, said), title="chat template", **about)


def _fault(name: str, turn: int, kind: str, words: str) -> Finding:
    """A conversation stops being its own prefix at a turn of the assistant, counted from 0."""
    return Finding(_RULE[kind], words, {"conversation": name, "turn": turn})


def _faults(tokenizer: Any, name: str, messages: Messages) -> Iterator[Finding]:
    def rendered(upto: int, *, prompt: bool) -> str:
        text: str = tokenizer.apply_chat_template(list(messages[:upto]), add_generation_prompt=prompt, tokenize=False)
        return text

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for number, index in enumerate(turns):
        before, after = rendered(index, prompt=True), rendered(index + 1, prompt=False)
        if after.startswith(before) and messages[index]["content"] not in after[len(before) :]:
            yield _fault(name, number, "template drops text", f"{messages[index]['content']!r} became {after[len(before) :]!r}")
        if (fault := _not_a_prefix(tokenizer, before, after, ids)) is not None:
            yield _fault(name, number, *fault)
        for later in turns[number + 1 :]:
            if (fault := _not_a_prefix(tokenizer, after, rendered(later, prompt=True), ids)) is not None:
                yield _fault(name, number, *fault)


def _not_a_prefix(tokenizer: Any, before: str, after: str, ids: Any) -> tuple[str, str] | None:
    """Return kind and words if the ids of one text are not a prefix of those of a longer one."""
    ours, theirs = ids(before), ids(after)
    decode: Decode = tokenizer.decode
    differs = difference(
        ours, theirs[: len(ours)], decode, bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, borders=[len(ours)]
    )
    if differs is None:
        gone = ours[len(theirs) :]
        return ("template drops text", f"token {len(theirs)}: {decode(gone)!r} is gone") if gone else None
    kind, at, words = differs
    if not after.startswith(before) and kind not in ("extra BOS", "EOS appended", "border lost"):
        kind = "template drops text"
    return "retokenized" if after.startswith(before) else kind, f"token {at}: {words}"


def _recorded(tokenizer: Any, trajectory: Trajectory) -> Iterator[Finding]:
    """Yield where the text of a recorded conversation, encoded up to a border, has ids that do not begin the longer text's."""
    ends = [len(turn.given) for turn in trajectory.turns] + [stop for _, stop in trajectory.ranges]
    texts = [tokenizer.decode(trajectory.trained[:end]) for end in sorted({*ends, len(trajectory.trained)})]
    for number, (before, after) in enumerate(itertools.pairwise(texts)):
        fault = _not_a_prefix(tokenizer, before, after, lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]))
        if fault is not None:
            yield _fault(trajectory.name, number, *fault)
