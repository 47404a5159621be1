"""Replays: recorded inputs run again in worker processes, under a supervisor that says what broke.

In come a `ReplaySpec` and dumps; out go journals, logs and results in `store/replays/<id>`. The worker is `worker` (its engine
`actor_engine`); `supervise` runs groups of workers (`group`), started by `launch` where `group_engine` says, and `blame` judges
those that die or hang. `selection` and `plan` decide who runs what. Begin reading in `worker`, then `supervise`.
"""
