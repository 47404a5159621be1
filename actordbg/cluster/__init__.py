"""Replays on a Ray cluster: the only room that knows Ray.

In comes a `ClusterOrder`; out comes an engine (`ray_engine.connected`) that starts a replay's groups in places on the cluster's
nodes (`group_place`), each with a host (`node_host`) that starts and watches the ranks there. `node_store` carries files where
nodes share no folder with the command. Begin reading in `ray_engine`.
"""
