"""What replays came to: reports, comparisons with another replay, the truth or the run itself, noise floors, and `check`.

In: finished replays (their records, kept tensors) and dumps, read from a store and its catalog. Out: records
(`actordbg.records.comparison_record`) with a verdict, and documents of `actordbg.document` that say it. Only what computes a
truth or a floor starts replays. Begin with `comparing` for a verdict, `summary` for a report; `check` uses all of it.
"""
