"""What of this environment works, and the command that fixes what does not: `actordbg doctor`.

In come an interpreter and a store; out comes one `Check` for each thing that was looked at. Begin with `checkup.examine`, which
has the order of the checks; `python_environment` has the versions that are known to be good.
"""
