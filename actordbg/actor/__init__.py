"""Build the model that a replay asks for and run captured calls through it, alone or on many ranks.

In: a `ReplayConfig`, the record of the first dump, and dumps. Out: a `ForwardOutcome` for each call (log-probs, gradients),
and before anything starts, whether the configuration can run here at all (`rules`). `truth_session` computes the same
calls in the plainest way. Begin with `session`; `backends/` has the ways to run an Actor, `backends/backend.py` the shortest.
"""
