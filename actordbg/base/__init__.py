"""What every room uses and what knows none of them: errors, units and ids, owners of files, processes, foreign text.

The standard library only. `errors` draws the tree of errors; `fault` is the part of it that a training process loads.
"""
