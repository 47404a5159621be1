"""The Python API: what `import actordbg` offers, and the work behind the commands that replay.

Values in, a `CommandResult` out (`actordbg.document`). It raises `ActordbgError`, reports progress by a callback, never prints.
Begin with `plain_commands` and `store_commands`: a method for each command. Its work begins at a `desk` (settings, selection,
plan) for a `client`: a program, or a terminal (`actordbg.cli`). CONTRIBUTING.md has the recipe of a command.
`own_model` judges a model in memory.
"""
