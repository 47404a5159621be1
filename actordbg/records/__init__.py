"""What commands and workers write into a store, and read again: the contract between the desk, the workers and the catalog.

In come figures of a replay, a comparison, a matrix, a training check or a watching of memory; out come JSON files and journals
that outlive who wrote them. Begin with `replay_record` (what is asked of a replay, and a result) and `journal` (how results reach
the disk), then `comparison_record`, which has the base of all other records.
"""
