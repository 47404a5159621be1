"""Dumps as wholes: create, import, export, pack, prune, recover, check and repair them.

In: a store and a condition, old pickles (`importer`; `decode_child` reads them inertly in another process), or the rings of dead
processes (`recover`). Out: files of the store, or findings (`checking`, a table of all checks; `finding`, what each means;
`repairing`). Whatever moves dumps follows one order: write, read again, then remove.
Begin with `packing.py`, and with `checking.py` for `fsck`.
"""
