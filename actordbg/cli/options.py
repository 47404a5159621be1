"""The options that several commands share, the output options, and the store that a command works on.

`from_signature` makes a command's own options out of its function. A shared option is an `Annotated` type, declared here.
"""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from actordbg.base.errors import NothingToDo, Refused, StoreProblem, UsageError, require_package
from actordbg.base.option import Option
from actordbg.base.owners import Owner, is_own, name_of
from actordbg.cli import HELP_ALL, OUTPUT, HelpPlace, output
from actordbg.cli.output import Format, note
from actordbg.config import consent, sources

if TYPE_CHECKING:
    from actordbg.store.layout import Store


INTERRUPTED = 130
"""The exit code after Ctrl-C."""
TERMINAL = "actordbg.terminal"
"""The key of a command's `Terminal` in click's context."""


Limit = Annotated[int, Option(help="At most N rows; 0 for all.", min=0)]
Where = Annotated[
    str | None,
    Option(
        "--where",
        help='Select dumps with an SQL expression, e.g. "seq_len>4096 and rank=0"; repeat it to combine with "and".',
        metavar="EXPR",
        heading="Inputs",
        rank=0,
    ),
]
Yes = Annotated[bool, Option("-y", help="Do it (default: only print what would be done).")]
TrustRemoteCode = Annotated[bool, Option(consent.FLAG, help="Run the model's own code. Command line only.", rank=30)]
Given = Mapping[str, Any]
"""The settings that were given on the command line, by name."""
ConfirmOption = Annotated[bool, Option("-y", help="Accept what another user wrote, or what came from a URL.", rank=30)]


def with_parameters(
    function: Callable[..., Any], called: Callable[..., Any], parameters: Iterable[inspect.Parameter], help: str | None
) -> Callable[..., Any]:
    """Give `called` the name of `function`, these parameters, and this help."""
    functools.update_wrapper(called, function)
    # None has to stand in an order: typer passes each by its name
    own = [mine.replace(kind=mine.KEYWORD_ONLY) for mine in parameters]
    called.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    called.__annotations__ = {mine.name: mine.annotation for mine in own} | {"return": None}
    called.__doc__ = help
    return called


def option(
    name: str, kind: Any, default: Any, help: str, *names: str, heading: str = "", rank: int = HelpPlace().rank, **facts: Any
) -> inspect.Parameter:
    """Build an option for typer: `--name`, unless one of `names` begins with `--`. heading, rank: see `HelpPlace`."""
    if not any(name.startswith("--") for name in names):
        spelled = name.strip("_").replace("_", "-")
        names = (f"--{spelled}", *names)
    place: Any = HelpPlace(heading, rank)
    info = typer.Option(default, *names, help=help, rich_help_panel=place, **facts)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)


def _say_all(ctx: typer.Context, requested: bool) -> None:
    """Print the help with all options, under their headings, and exit (callback of --help-all)."""
    if requested and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        output.say_lines(ctx.get_help())
        raise typer.Exit


_output = functools.partial(option, heading=OUTPUT)
_OUTPUTS = {
    "html": _output("opened", bool, False, "Open the page in a browser.", "--open", rank=13),
    "empty": _output("allow_empty", bool, False, "Exit 0, not 5, if nothing is selected.", rank=50),
    "json": _output("as_json", bool, False, "Print the result as JSON.", "--json", rank=18),
    "quiet": _output("quiet", bool, False, "Print only the first line of a verdict; no notes, no progress.", "-q", rank=19),
    "store": _output("store", str | None, None, "The store; also valid before the command.", rank=20, metavar="DIR|URL"),
    "format": _output("format", Literal["text", "md", "json"] | None, None, "Print in this format.", "-f", rank=90, hidden=True),
    "forms": _output("format", Format | None, None, "Print or write in this format.", "-f", rank=90, hidden=True),
    "help": _output(HELP_ALL, bool, False, "Show all options and exit.", rank=99, callback=_say_all, is_eager=True),
}
"""The output options, by their word in `lazy.Command.outputs`."""
_SAID = {mine.name for mine in _OUTPUTS.values()} - {"allow_empty"} | {"files"}


def takes_outputs(function: Callable[..., Any], words: str) -> Callable[..., Any]:
    """Append the output options named in `words`, -o for their files, and --store, to a command's own options.

    Their values go into `output.wanted`, which the printing functions read. A `CommandResult` that the command returns is
    printed, and decides the exit code.
    """
    has_store, named = "ctx" in inspect.signature(function).parameters, words.split()
    forms = {*named, "text"} if "md" in named else {*named}
    suffixes = [suffix for suffix, form in output.FORMS.items() if form in forms] if "file" in named else []
    named += ["store", "help"] if has_store else ["help"]
    options = [_OUTPUTS[word] for word in named if word in _OUTPUTS]
    if suffixes:
        shown = [suffix for suffix in suffixes if suffix not in (".htm", ".markdown")]
        text = f"Write the result to FILE: {', '.join(shown)}; repeatable."
        rank = 12 if "html" in named else 19
        options.insert(0, _output("files", list[Path] | None, None, text, "-o", "--output", rank=rank, metavar="FILE"))

    def called(**given: Any) -> Any:
        mine = {option.name: given.pop(option.name) for option in options}
        del mine[HELP_ALL]
        if (folder := mine.pop("store", None)) is not None:
            root = given["ctx"].find_root()
            if is_typed(root, "store"):
                raise repeated("--store")
            root.params["store"] = folder
        mine["store"] = given["ctx"].find_root().params.get("store") if has_store else None
        form, as_json, files = mine.pop("format", None), mine.pop("as_json", False), mine.pop("files", None) or ()
        if as_json and form not in (None, "json"):
            raise UsageError(f"--json conflicts with --format {form}", hint="use only one")
        for file in files:
            _require_writable(file, suffixes if form is None else ())
        mine["files"] = {file: form or output.form_of(file) or "text" for file in files}
        mine["format"] = "json" if as_json else form if form and not files else "text"
        output.wanted = output.OutputOptions(**mine)
        try:
            if (answer := function(**given)) is not None:
                output.say_answer(answer)
                if has_store and (terminal := given["ctx"].meta.get(TERMINAL)):
                    terminal.conclude()
                require_good(answer.ok)
        except NothingToDo as nothing:
            if not output.wanted.allow_empty:
                raise
            note(nothing.message)
            if output.wanted.json:
                output.emit_json({"verdict": "", "sentence": nothing.message, "next": "", "selected": 0})
        except KeyboardInterrupt:
            raise typer.Abort from None  # typer would exit without a word
        finally:
            output.finish()

    return with_parameters(function, called, [*inspect.signature(function).parameters.values(), *options], function.__doc__)


def _require_writable(file: Path, suffixes: Sequence[str]) -> None:
    """Refuse a file for -o that cannot be written, before work that may take minutes; suffixes: those to choose from."""
    from actordbg.document.page import check_place

    suffix = file.suffix.lower()
    if suffixes and suffix not in suffixes:
        what = suffix or "a name without a suffix"
        raise UsageError(f"-o {file.name}: this command cannot write {what}", hint=f"use one of {', '.join(suffixes)}")
    check_place(file)
    if output.form_of(file) == "plot":
        require_package(f"-o {file.name}", "vl_convert", "vl-convert-python")


def repeated(option: str) -> UsageError:
    return UsageError(f"{option} takes one value, but is given more than once", hint=f"give {option} once")


def refuse_beside(ctx: typer.Context, what: str, *may_stay: str, groups: Iterable[type[Any]] = ()) -> None:
    """Refuse typed options that would have no effect.

    what: the reason, for the message. may_stay: parameters that do have an effect; groups: dataclasses of such options.
    """
    stay = {*may_stay, *_SAID, "trust_remote_code", "dist_plugin"}.union(*(group.__dataclass_fields__ for group in groups))
    typed = [
        (mine.secondary_opts if ctx.params[mine.name] is False and mine.secondary_opts else mine.opts)[0]
        for mine in ctx.command.params
        if mine.name in ctx.params and mine.name not in stay
        if is_typed(ctx, mine.name)
    ]
    if typed:
        raise UsageError(f"{what}, so {', '.join(typed)} cannot be given", hint=f"drop {', '.join(typed)}, or start a new one")


def is_typed(ctx: typer.Context, name: str) -> bool:
    """Check whether this option was given on the command line."""
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def command_line(answered: Sequence[str] = ()) -> str:
    """Return the typed command line, quoted for a shell, with secrets masked: records keep it.

    answered: options to append for what the user answered to a question. Consent to a model's code is replaced by a remark.
    """
    from actordbg.base.fault import scrub

    typed = [word for word in sys.argv[1:] if word != consent.FLAG]
    remark = f"  # {consent.NEEDED}" if len(typed) < len(sys.argv) - 1 else ""
    return shlex.join(["actordbg", *map(scrub, typed), *answered]) + remark


def take_consent(given: bool) -> None:
    """Apply --trust-remote-code to this process and the processes that it starts."""
    (consent.give if given else consent.withhold)()


def approve(what: str, owner: Owner, yes: bool) -> None:
    """Ask before using what another user wrote. Raises Refused unless --yes is given or the user at the terminal agrees."""
    if is_own(owner):
        return
    shown = f"{name_of(owner)} wrote {what}"
    if yes:
        note(shown)
    elif not output.agreed(shown):
        raise Refused(f"{shown}; it controls what runs as you", hint="review it, then pass --yes")


def require_good(good: object) -> None:
    """Exit with code 1 unless the printed result is good."""
    if not good:
        raise typer.Exit(1)


def require_some(count: int) -> None:
    """Exit with the code for "nothing to do" if the printed result is empty, unless --allow-empty is given."""
    if not count and not output.wanted.allow_empty:
        raise typer.Exit(NothingToDo.exit_code)


def require_selected(store: Store, where: str | None, done: int) -> None:
    """Like `require_some`, but having nothing to do is fine: a `where` without matches is not, and a note has the reasons."""
    if not done and where is not None:
        from actordbg.catalog.query import count_dumps, open_fresh
        from actordbg.catalog.selections import no_match

        catalog = open_fresh(store, where)
        if not (count := count_dumps(catalog, where)):
            note(no_match(catalog, where))
        require_some(count)


def settings_of(ctx: typer.Context) -> sources.Settings:
    """Return the merged settings of this invocation; `--store` wins."""
    return sources.load_settings(ctx.find_root().params.get("store"))


def store_of(ctx: typer.Context) -> Store:
    """Return the store of this invocation, which may not exist yet (`Store.create`, `Store.require`)."""
    from actordbg.store.layout import Store  # here, since the help of each command would wait for it

    settings = settings_of(ctx)
    store = Store(settings.store)
    if settings.url is not None:
        from actordbg.cli.remote_store import staged

        staged(ctx, settings.url, store)
    if store.root.exists() and not store.root.is_dir():
        raise StoreProblem(f"{store.root} is a file, not a store folder", hint="pass a folder with --store DIR")
    return store
