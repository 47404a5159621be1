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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_WHERE = "where"
"""The parameter of --where, which may be repeated: dumps must meet all conditions."""


@dataclass(frozen=True)
class Command:
    """A command of the table.

    target: `module:function`, a module of actordbg.cli and a function with the command's name. outputs: its output options
    (`options.takes_outputs`). settings: click's context settings.
    """

    line: str
    target: str
    outputs: str = "json"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.target.partition(":")[2].strip("_").replace("_", "-")

    def function(self) -> Callable[..., Any]:
        """Import the command's module and return its function, with the output options added."""
        from actordbg.cli.options import takes_outputs

        module, _, name = self.target.partition(":")
        return takes_outputs(getattr(import_module(f"actordbg.cli.{module}"), name), self.outputs)

    def build(self) -> Any:
        """Import the command's module and build the click command."""
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(self.name, cls=_Built, context_settings=dict(self.settings))(self.function())
        return typer.main.get_command(app)


@dataclass(frozen=True)
class CommandGroup:
    """Commands under one name: `dump ls`, `dump show`."""

    name: str
    line: str
    commands: tuple[Command, ...]

    def build(self) -> TyperGroup:
        """Build the click group, without importing its commands."""
        kind = group_class((Section("Commands", self.commands),))
        return kind(name=self.name, help=self.line, no_args_is_help=True, rich_markup_mode=None)


@dataclass(frozen=True)
class Section:
    """Commands and groups under one heading of the help."""

    heading: str
    entries: tuple[Command | CommandGroup, ...]


def group_class(contents: Iterable[Section], also: Mapping[tuple[str, str], str] | None = None) -> type[TyperGroup]:
    """Return a class for `typer.Typer(cls=...)`: a group with these commands, shown in these sections.

    also: aliases of two words ("replay ls") for a command; the first word must be a command that takes no arguments.
    """
    sections, others = tuple(contents), also or {}

    class WithContents(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            for entry in (entry for section in sections for entry in section.entries):
                self.add_command(entry.build() if isinstance(entry, CommandGroup) else _Deferred(entry), entry.name)

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            quicken(self.get_params(ctx))
            typed_once(self, ctx, args)
            return super().parse_args(ctx, args)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            other = others.get((args[0], args[1])) if len(args) > 1 else None
            return super().resolve_command(ctx, args if other is None else [other, *args[2:]])

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            widest = max(len(entry.name) for section in sections for entry in section.entries)
            for section in sections:
                with formatter.section(section.heading):
                    formatter.write_dl([(entry.name.ljust(widest), entry.line) for entry in section.entries])

    return WithContents


def every_command(contents: Iterable[Section]) -> Iterator[tuple[str, Command]]:
    """Yield the full name ("dump ls") and the Command of every command, in the order of the help."""
    for entry in (entry for section in contents for entry in section.entries):
        if isinstance(entry, CommandGroup):
            yield from ((f"{entry.name} {command.name}", command) for command in entry.commands)
        else:
            yield entry.name, entry


class _Deferred(TyperCommand):
    """A placeholder with a command's name and help line; it builds the command when it is called."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.name, short_help=command.line)
        self._command = command

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        return self._command.build().make_context(*arguments, **settings)


class _Built(TyperCommand):
    """A built command, with two features that typer lacks.

    Its help groups options under their headings (`rich_help_panel`). Options shown as `[...|last]`, and those in its function's
    `bare_values`, may be given without a value: `--resume` is read as `--resume=last` at the end of the line or before another
    option.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
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

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            if (row := parameter.get_help_record(ctx)) is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(row)
        for heading in sorted(sections, key=lambda heading: (heading != "Arguments", heading == "Options")):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])


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
