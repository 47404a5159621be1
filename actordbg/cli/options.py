"""Options that several commands share, as `Annotated` types, and the store that a command works on."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import shlex
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from actordbg.base.errors import NothingToDo, Refused, StoreProblem, UsageError
from actordbg.cli import output
from actordbg.config import accelerate_file, consent, dist_plugin

if TYPE_CHECKING:
    from actordbg.base.owners import Owner
    from actordbg.config.sources import Settings
    from actordbg.store.layout import Store


Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Limit = Annotated[int, typer.Option("--limit", min=0, help="At most this many rows; 0 for all.")]
Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="EXPR",
        help='Select dumps by an SQL expression, e.g. "seq_len>4096 and rank=0"; of several, those that meet all.',
    ),
]
OfRun = Annotated[str | None, typer.Option("--run", metavar="NAME", help="Only dumps of this training run.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it; without this the command only says what it would do.")]
Format = Literal["text", "md", "json", "csv", "html"]
"""How an answer is written; only a report is written as CSV. A page of HTML goes into a file."""
FormatOption = Annotated[
    Literal["text", "md", "json"] | None,
    typer.Option("--format", "-f", help="How to write the answer (default: text). md can be pasted into an issue."),
]
AllowEmpty = Annotated[bool, typer.Option("--allow-empty", help="Exit code 0, not 5, if nothing is selected.")]
Power = Annotated[
    bool,
    typer.Option("--power", help="Plant faults of several sizes beside the truth, and say which would have been noticed."),
]
Explain = Annotated[bool, typer.Option("--explain", help="Say what the figures mean, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the answer.")]


TrustRemoteCode = Annotated[
    bool,
    typer.Option(consent.FLAG, help="Run the code that the model brings along. Taken from here only."),
]
AccelerateConfig = Annotated[
    str | None,
    typer.Option(
        accelerate_file.FLAG,
        metavar="PATH|default|JSON",
        help="Settings of an `accelerate config` file, or of its keys as JSON; flags win.",
    ),
]
DistPlugin = Annotated[
    str | None,
    typer.Option(
        dist_plugin.FLAG, metavar="MODULE", help="Import this module, which brings a --dist-backend along. Taken from here only."
    ),
]
ConfirmOption = Annotated[bool, typer.Option("--yes", "-y", help="Go on with what another user wrote, or what came from a URL.")]


def takes_options(
    name: str, options: Sequence[inspect.Parameter], gathered: Callable[[Mapping[str, Any]], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: these options stand in place of the command's parameter `name`, which gets what they were gathered into."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for one in inspect.signature(function).parameters.values():
            parameters += options if one.name == name else [one.replace(annotation=hints[one.name])]

        @functools.wraps(function)
        def called(**given: Any) -> Any:
            mine = {one.name: given.pop(one.name) for one in options}
            return function(**given, **{name: gathered(mine)})

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
        return called

    return decorate


def takes(name: str, group: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the fields of a dataclass are the options in place of the command's parameter `name`, which gets one.

    The help shows those made by `option_field` under the dataclass's `panel`, if it has one.
    """
    hints = typing.get_type_hints(group, include_extras=True)
    for field in fields(group):
        if info := field.metadata.get("option"):
            info.param_decls = info.param_decls or (f"--{field.name.replace('_', '-')}",)
            info.rich_help_panel = info.rich_help_panel or getattr(group, "panel", None)
    options = [parameter(field.name, hints[field.name], field.metadata.get("option", field.default)) for field in fields(group)]
    return takes_options(name, options, lambda given: group(**given))


def option(default: Any, help: str, *names: str, **facts: Any) -> Any:
    """An option as the default of a command's parameter. It is named after the parameter; a flag without a --no- names itself."""
    return typer.Option(default, *names, help=help, **facts)


def option_field(default: Any, help: str, *names: str, **facts: Any) -> Any:
    """A field of a dataclass as an option of a command that `takes` it; named after the field, unless `names` says otherwise."""
    return dataclasses.field(default=default, metadata={"option": option(default, help, *names, **facts)})


def parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """One parameter of a command, as typer reads it from a signature."""
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def chosen_format(asked: Format | None, as_json: bool, usual: Format = "text") -> Format:
    """The format that --format and --json come to; UsageError where they contradict each other."""
    if as_json and asked not in (None, "json"):
        raise UsageError(f"--json and --format {asked} exclude each other", hint="name one of them")
    return "json" if as_json else asked or usual


def typed_options(ctx: typer.Context, besides: Collection[str]) -> str:
    """The options that were typed, in one line, without those `besides` (names of parameters); "" for none."""
    typed = [
        (one.secondary_opts if ctx.params[one.name] is False and one.secondary_opts else one.opts)[0]
        for one in ctx.command.params
        if one.name in ctx.params and one.name not in besides
        if (source := ctx.get_parameter_source(one.name)) is not None and source.name == "COMMANDLINE"
    ]
    return ", ".join(typed)


def command_line(answered: Sequence[str] = ()) -> str:
    """What was typed, as a shell takes it again, without the values of secrets, since records keep it. answered: words that
    stand for what the user said to a question.

    Consent to a model's code is left out, and said to be needed.
    """
    from actordbg.base.fault import scrub

    typed = [word for word in sys.argv[1:] if word != consent.FLAG]
    remark = f"  # {consent.NEEDED}" if len(typed) < len(sys.argv) - 1 else ""
    return shlex.join(["actordbg", *map(scrub, typed), *answered]) + remark


def take_consent(given: bool) -> None:
    """What --trust-remote-code says, for this process and those that it starts."""
    if given:
        consent.give()
    else:
        consent.withhold()


def approve(what: str, owner: Owner, yes: bool) -> None:
    """Go on with what another user wrote only if --yes says so, or the user at the terminal; Refused otherwise."""
    from actordbg.base.owners import is_own, name_of

    if is_own(owner):
        return
    shown = f"{name_of(owner)} wrote {what}"
    if yes:
        output.note(shown)
    elif not output.agreed(shown):
        raise Refused(f"{shown}; it decides what runs under your name", hint="look at it, then go on with --yes")


def require_some(count: int, allow_empty: bool) -> None:
    """End with the exit code for "nothing to do" if the answer that was just given is about nothing."""
    if not count and not allow_empty:
        raise typer.Exit(NothingToDo.exit_code)


def require_selected(store: Store, where: str | None, done: int, allow_empty: bool) -> None:
    """The same of a command that brings a store into a state: nothing to do is good, a `where` that no dump meets is not."""
    if not done and where is not None and not allow_empty:
        from actordbg.catalog.query import count_dumps

        require_some(count_dumps(store, where), allow_empty)


def settings_of(ctx: typer.Context) -> Settings:
    """The merged settings of this invocation (`actordbg --store DIR COMMAND` comes first)."""
    from actordbg.config.sources import load_settings

    root = ctx.find_root()
    return load_settings(root.params.get("store"))


def store_of(ctx: typer.Context) -> Store:
    """The store of this invocation; it may not exist yet (`Store.create`, `Store.require`)."""
    from actordbg.store.layout import Store

    settings = settings_of(ctx)
    store = Store(settings.store)
    if settings.url is not None:
        from actordbg.cli.staged_store import staged

        staged(ctx, settings.url, store)
    if store.root.exists() and not store.root.is_dir():
        raise StoreProblem(f"{store.root} is a file, and a store is a folder", hint="name a folder with --store DIR")
    return store
