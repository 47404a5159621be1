"""Dumps as wholes: made, imported, exported, packed, pruned, recovered, checked, repaired.

In come a store and a condition, old pickles (`importer`; `decode_child` reads them inertly in a process of its own),
or the rings of dead processes (`recover`). Out go files of the store, or findings (`checking`, a table of all checks;
`finding`, what each means; `repairing`). Whatever moves dumps follows one order: write, read again, then remove.
Begin with `packing.py`, and with `checking.py` for `fsck`.
"""
