"""The Python API: what `import actordbg` offers, and the work behind the commands that replay.

Values in, a `CommandResult` out (`actordbg.document`). It raises `ActordbgError`, reports progress by a callback, never prints.
Begin with `opened_store.Store`. `planning` turns a selection and settings into a plan, `own_model` judges a model in memory.
"""
