"""`actordbg doctor`: check what works in this environment, with the command that fixes what does not.

Input: an interpreter and a store. Output: a `Check` for each thing examined. Begin with `checkup.examine`, which has the order
of the checks; `python_environment` has the known-good versions.
"""
