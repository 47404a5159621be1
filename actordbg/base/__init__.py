"""What every room uses and what knows none of them: errors (begin with `errors`), units and ids, owners of files, processes,
imports, and foreign text made safe to show. In and out: plain values. The standard library only; `fault` is what trainings load.
"""
