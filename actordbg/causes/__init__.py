"""Name the cause of wrong log-probs where there are only outputs: recorded by a training run, or returned by a rollout engine.

In: recorded log-probs, the truth's, and the truth's under each cause of a table (`bank`), which `signatures` computes in the
truth's worker. Out: the causes that explain the difference, each with its amount, or that none does (`fit`, on arrays alone).
The limit is always the noise that rounding makes on the very same tokens. Begin reading in `bank`, then `fit`.
"""
