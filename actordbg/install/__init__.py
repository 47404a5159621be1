"""Install the hook in a trainer: `actordbg patch` appends it to a file, `actordbg run` passes it to every process of a job.

Input: an interpreter, its actor.py and a store, or a command. Output: a patched file that can be restored to the byte; or
the command, in an environment that its processes inherit, Ray's workers included. A failure leaves the file unchanged, and the
job running but unrecorded. Begin with `patching`, or with `command` and
`pythonpath/sitecustomize.py`.
"""
