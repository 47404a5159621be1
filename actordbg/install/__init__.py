"""How the hook gets into a trainer: `actordbg patch` appends it to a file, `actordbg run` hands it to every process of a job.

In come an interpreter, its actor.py and a store, or a command; out come a patched file that can be restored to the byte, with
events and a backup in the store, or the command with an environment that its processes inherit, in Ray's workers too. A failure
leaves the file as it was, and the job unrecorded but running. Begin with `patching`, or with `command` and
`pythonpath/sitecustomize.py`.
"""
