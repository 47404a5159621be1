"""The command line as a table: a command's module is imported only when the command is called.

So `actordbg --help` costs little more than `import typer`, however many commands there are. A `Command` holds what the help of
its group needs: a name, a line of text, and where the function is. Running the command, its own `--help` and the completion of
its options import the module; the list of commands, suggestions for a mistyped name and the completion of names do not. The
line repeats the first line of the function's docstring (a test compares them).

Example::

    CONTENTS = (Section("Commands", (Command("Index new files in the store.", "index:index"),)),)
    app = typer.Typer(cls=group_class(CONTENTS), rich_markup_mode=None)
"""

from __future__ import annotations

import functools
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from actordbg.cli import HELP_ALL, OUTPUT, place_of

_WHERE = "where"
"""The parameter of --where, which may be repeated: dumps must meet all conditions."""
SHORT = 15
"""Number of options that a command's `--help` shows; `--help-all` shows all."""


USUAL = "Options"


@dataclass(frozen=True)
class Command:
    """A command of the table.

    target: `module:function`, a module of actordbg.cli and its function; `:method`, a method of `StoreCommands`. outputs: its
    output options (`options.takes_outputs`). settings: click's context settings. called: its name, if it is not the function's.
    settings_of: the command whose settings it has, if its name is not that. label: what the list of commands shows for its
    name. also: commands that follow it as a second word (`replay ls`). on_cluster: whether its method can run on a Ray cluster.
    """

    line: str
    target: str
    outputs: str = "quiet json"
    settings: Mapping[str, Any] = field(default_factory=dict)
    called: str = ""
    settings_of: str = ""
    label: str = ""
    also: tuple[Command, ...] = ()
    on_cluster: bool = False

    @property
    def name(self) -> str:
        return self.called or self.target.partition(":")[2].strip("_").replace("_", "-")

    def function(self) -> Callable[..., Any]:
        """Import the command's module and return its function as typer takes it, with the output options added."""
        from actordbg.cli.from_signature import as_command, of_method
        from actordbg.cli.options import takes_outputs

        module, _, name = self.target.partition(":")
        if module:
            function = getattr(import_module(f"actordbg.cli.{module}"), name)
        else:
            function = of_method(getattr(import_module("actordbg.api.store_commands").StoreCommands, name), self.on_cluster)
        return takes_outputs(as_command(function, self.settings_of or self.name), self.outputs)

    def build(self) -> Any:
        """Import the command's module and build the click command."""
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        function = self.function()
        app.command(self.name, cls=_Built, context_settings=dict(self.settings))(function)
        built: Any = typer.main.get_command(app)
        built.also = self.also
        for mine in built.params:
            mine.metavar = mine.metavar or _placeholder(function.__annotations__.get(mine.name))
        return built


@dataclass(frozen=True)
class CommandGroup:
    """Commands under one name: `dump ls`, `dump show`. label: as in `Command`."""

    name: str
    line: str
    commands: tuple[Command | CommandGroup, ...]
    label: str = ""

    def build(self) -> TyperGroup:
        """Build the click group, without importing its commands."""
        kind = group_class((Section("Commands", self.commands),))
        return kind(name=self.name, help=self.line, no_args_is_help=True, rich_markup_mode=None)


@dataclass(frozen=True)
class Section:
    """Commands and groups under one heading of the help; without a heading, the help leaves them out."""

    heading: str
    entries: tuple[Command | CommandGroup, ...]


def group_class(contents: Iterable[Section]) -> type[TyperGroup]:
    """Return a class for `typer.Typer(cls=...)`: a group with these commands, shown in these sections."""
    sections = tuple(contents)
    entries = [entry for section in sections for entry in section.entries]

    class WithContents(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            for entry in entries:
                self.add_command(entry.build() if isinstance(entry, CommandGroup) else _Deferred(entry), entry.name)

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            quicken(self.get_params(ctx))
            typed_once(self, ctx, args)
            return super().parse_args(ctx, args)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            listed = [section for section in sections if section.heading]
            widest = max(len(entry.label or entry.name) for section in listed for entry in section.entries)
            for section in listed:
                with formatter.section(section.heading):
                    formatter.write_dl([((entry.label or entry.name).ljust(widest), entry.line) for entry in section.entries])

    return WithContents


def every_command(contents: Iterable[Section]) -> Iterator[tuple[str, Command]]:
    """Yield the full name ("dump ls") and the Command of every command, in the order of the help."""
    for entry in (entry for section in contents for entry in section.entries):
        if isinstance(entry, Command):
            yield entry.name, entry
        below = entry.commands if isinstance(entry, CommandGroup) else entry.also
        yield from ((f"{entry.name} {name}", under) for name, under in every_command([Section("", below)]))


class _Deferred(TyperCommand):
    """A placeholder with a command's name and help line; it builds the command when it is called."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.name, short_help=command.line)
        self._command = command

    def make_context(self, info_name: str | None, args: list[str], *arguments: Any, **settings: Any) -> Any:
        for command in self._command.also:
            if args[:1] == [command.name]:
                return command.build().make_context(f"{info_name} {command.name}", args[1:], *arguments, **settings)
        return self._command.build().make_context(info_name, args, *arguments, **settings)


class _Built(TyperCommand):
    """A built command, with three features that typer lacks.

    Its `--help` shows the most used options, `--help-all` all of them under their headings (`HelpPlace`). Options shown as
    `[...|last]`, and those in its function's `bare_values`, may be given without a value: `--resume` is read as `--resume=last`
    at the end of the line or before another option.
    """

    also: tuple[Command, ...] = ()
    typed = False

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete options, and as the first word after the command's name also the commands that follow it."""
        group = TyperGroup(commands={command.name: _Deferred(command) for command in self.also if not self.typed})
        return [*group.shell_complete(typer.Context(group), incomplete), *super().shell_complete(ctx, incomplete)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.typed = bool(args)
        quicken(self.get_params(ctx))
        optional = (option for option in self.params if str(option.metavar).endswith("|last]"))
        usual = {name: "last" for option in optional for name in option.opts if name.startswith("--")}
        args = filled_in(args, usual | getattr(self.callback, "bare_values", {}))
        conditions = typed_once(self, ctx, args)
        rest = super().parse_args(ctx, args)
        if len(conditions) > 1:
            from actordbg.catalog.where import all_of

            ctx.params[_WHERE] = all_of(conditions)
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(spelled(mine) for mine in self.params if mine.param_type_name == "argument")]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        every: list[Any] = [mine for mine in self.get_params(ctx) if not getattr(mine, "hidden", False)]
        sections = {"Arguments": [mine for mine in every if mine.param_type_name == "argument"]}
        options = [mine for mine in every if mine not in sections["Arguments"]]
        own = [mine for mine in options if not mine.name.startswith("help")]
        if ctx.meta.get(HELP_ALL):
            for mine in sorted(options, key=lambda mine: place_of(mine).heading in ("", OUTPUT)):
                sections.setdefault(place_of(mine).heading or USUAL, []).append(mine)
        else:
            sections[USUAL] = sorted(own, key=lambda mine: place_of(mine).rank)[:SHORT]
        rows = {heading: [(spelled(mine), described(mine)) for mine in some] for heading, some in sections.items()}
        rows["Commands"] = [(f"{ctx.command_path} {command.name}", command.line) for command in self.also]
        for heading, some in rows.items():
            if some:
                with formatter.section(heading):
                    formatter.write_dl(some)
        if not ctx.meta.get(HELP_ALL) and len(own) > SHORT:
            formatter.write_paragraph()
            formatter.write(f"All options: {ctx.command_path} --help-all\n")


def spelled(parameter: Any) -> str:
    """Return an option as typed, `--limit N`, or an argument as the usage line shows it, `[REPLAY...]`."""
    value = parameter.metavar or "VALUE"
    if parameter.param_type_name == "argument":
        name = f"{value}..." if parameter.nargs == -1 else value
        return name if parameter.required else f"[{name}]"
    names = sorted(parameter.opts[:2], key=lambda name: name.startswith("--"))  # others are not shown
    return " / ".join([", ".join(names), *parameter.secondary_opts]) + ("" if parameter.is_flag else f" {value}")


def _placeholder(kind: Any) -> str:
    """Return what stands for a value of this type in a help: N, X, TEXT, FILE or the choices."""
    while typing.get_origin(kind) is not typing.Literal and typing.get_args(kind):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return "|".join(typing.get_args(kind)) or {int: "N", float: "X", Path: "FILE"}.get(kind, "TEXT")


def described(parameter: Any) -> str:
    """Return the help of an option or argument, with its default unless the help says it."""
    default = parameter.default
    if default is None or default is False or default in ((), []) or "(default" in parameter.help or not parameter.show_default:
        return str(parameter.help)
    shown = "on" if default is True else f"{default:g}" if isinstance(default, float) else default
    return f"{parameter.help} [default: {shown}]"


def typed_once(command: Any, ctx: Any, arguments: Sequence[str]) -> list[str]:
    """Refuse a command line that repeats a single-value option (click would silently use the last value). Returns each --where.

    Flags without a `--no-` form and options with several values may be repeated.
    """
    if ctx.resilient_parsing:  # a shell completes the line
        return []
    where = [parameter for parameter in command.params if parameter.name == _WHERE]
    for parameter in where:
        parameter.multiple = True
    values, _, typed = command.make_parser(ctx).parse_args(list(arguments))
    for parameter in where:
        parameter.multiple = False
    for parameter, times in Counter(typed).items():
        several = parameter.param_type_name != "option" or parameter.multiple or parameter.count or parameter in where
        if times > 1 and not several and (parameter.secondary_opts or not parameter.is_flag):
            from actordbg.cli.options import repeated

            raise repeated("/".join([*parameter.opts, *parameter.secondary_opts]))
    return values.get(_WHERE) or []


def filled_in(arguments: Sequence[str], usual: Mapping[str, str]) -> list[str]:
    """Add the default value in `usual` to each option that was given without a value. Leaves everything after `--` unchanged."""
    filled: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return filled + list(arguments[index:])
        following = arguments[index + 1] if index + 1 < len(arguments) else "-"
        bare = argument in usual and following.startswith("-")
        filled.append(f"{argument}={usual[argument]}" if bare else argument)
    return filled


def quicken(parameters: Iterable[Any]) -> None:
    """Skip typer's pydantic validation of defaults and strings: it takes longer than most commands."""
    for parameter in parameters:
        if getattr(parameter, "type_descriptor", None) is not None:
            parameter.process_value = functools.partial(_process, parameter, parameter.process_value)


def _process(parameter: Any, usual: Callable[..., Any], ctx: Any, value: Any) -> Any:
    """Convert `value` as typer does, but return None, the default, or a string for a string parameter unchanged."""
    taken = value
    if value is None:
        taken = () if parameter.multiple or parameter.nargs == -1 else None
    elif value is not parameter.default and not (parameter.type_descriptor.annotation is str and isinstance(value, str)):
        return usual(ctx, value)
    if parameter.required and not taken:
        return usual(ctx, value)
    return taken if parameter.callback is None else parameter.callback(ctx, parameter, taken)
