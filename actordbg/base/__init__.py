"""Utilities that every room uses and that import none of them: errors (begin with `errors`), units and ids, owners of files,
processes, imports, and foreign text made safe to show. Standard library only; training processes load only `fault`.
"""
