"""What only a command line may allow: code that ships with a model (`--trust-remote-code`), and a module that registers further
backends of torch.distributed (`--dist-plugin MODULE`).

Both are facts of a process, not settings: no file, no variable and no store can hold them. A command gets its consent from its
own command line, for every model that it names. A worker gets both from the argument list that the command gave it, the consent
for a single model: whatever a file in the store says by then, no other model's code runs.

Example::

    give("/models/mine")                      # in a worker; a command calls give() without a model
    is_given("/models/mine")                  # True
    arguments("/models/mine")                 # ["--trust-remote-code", "/models/mine"]: for child processes
    use_plugin("oneccl_bindings_for_pytorch") # then `load_plugin` imports it, before a worker creates a process group
"""

from __future__ import annotations

import re
import shlex
from importlib import import_module

from actordbg.base.errors import UsageError
from actordbg.base.foreign_text import in_shell

FLAG = "--trust-remote-code"
NEEDED = f"needs {FLAG}: the model brings code of its own"
PLUGIN = "--dist-plugin"
_ANY = "*"
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z", re.ASCII)
_given: str | None = None
_plugin: str | None = None


def typed_again(command: str | None) -> str:
    """Quote a stored command line, with its remark that consent is needed, to be read and pasted.

    Returns "" for a command of another program: nobody is told to paste what somebody else wrote.
    """
    line, mark, _ = (command or "").partition(f"  # {NEEDED}")
    try:
        words = shlex.split(line)
    except ValueError:  # a quotation that does not end
        return ""
    return " ".join(map(in_shell, words)) + mark if words[:1] == ["actordbg"] else ""


def give(model: str = _ANY) -> None:
    """Let this process run the code of `model`; by default, of every model that it is told to load."""
    global _given
    _given = model


def withhold() -> None:
    """Withdraw the consent: this process runs no model's code, which is how each process starts."""
    global _given
    _given = None


def is_given(model: str) -> bool:
    """Return whether the code of this model may run here. The tiny model has none."""
    from actordbg.config.replay_config import TINY

    return model != TINY and _given in (_ANY, model)


def use_plugin(module: str | None) -> None:
    """Use this plugin in this process and its children; None: no plugin. UsageError if it is not a module name."""
    global _plugin
    if module is not None and not _MODULE.match(module):
        raise UsageError(
            f"{PLUGIN} {module!r:.80} is not a module name", hint="pass the name that Python imports, such as my_backend"
        )
    _plugin = module


def load_plugin() -> None:
    """Import the plugin, in a worker. UsageError if that fails."""
    if _plugin is None:
        return
    try:
        import_module(_plugin)
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        hint = "install it where torch is, or set PYTHONPATH"
        raise UsageError(f"{PLUGIN} {_plugin} cannot be imported: {type(error).__name__}: {error}"[:400], hint=hint) from None


def arguments(model: str) -> list[str]:
    """Return the arguments that give a worker the consent for this model, and the plugin."""
    return [*([FLAG, model] if is_given(model) else []), *([PLUGIN, _plugin] if _plugin is not None else [])]
