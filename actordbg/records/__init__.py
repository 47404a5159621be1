"""Records that commands and workers write into a store and read back: the contract between desk, workers and catalog.

Input: figures of a replay, a comparison, a matrix, a training check or a memory watch. Output: JSON files and journals that
outlive the process that wrote them. Begin with `replay_record` (the specification of a replay, and a result) and `journal` (how
results reach the disk), then `stored_record`, the base class of all other records.
"""
