"""Many replays, one answer: settings against each other (`matrix`), and steps of a training (`train-check`).

In: dumps, and lists of settings. Out: one record for each campaign, replaced after every step, so that all of them continue after
an interruption; and its document. Each cell is an ordinary replay in the store. Begin with `runner.py`, which runs any campaign,
then `run_matrix.py`; `run_train_check.py` adds attempts after lost groups.
"""
