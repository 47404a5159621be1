"""The Python API: what `import actordbg` offers, and the work behind the commands that replay.

Values in, a `CommandResult` out (`actordbg.document`). It raises `ActordbgError`, reports progress by a callback, never prints.
Begin with `store_commands`: a method for each command. Its work begins at a `desk` (settings, selection, plan) for a `client`: a
program, or a terminal (`actordbg.cli`). To add a command: a function of a `Desk` here, a method, and its options in `cli/`.
`own_model` judges a model in memory.
"""
