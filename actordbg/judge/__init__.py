"""Judge replays: reports, noise floors, `check`, and comparisons with another replay, the truth or the recorded run.

In: finished replays (their records, kept tensors) and dumps, read from a store and its catalog. Out: records
(`actordbg.records.comparison_record`) with a verdict, and documents (`actordbg.document`) that explain them. Only truths
and noise floors start replays. Begin reading with `comparing` for a verdict, `summary` for a report; `check` uses everything.
"""
