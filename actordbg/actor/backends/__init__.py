"""The ways to run an Actor: alone (`backend`), in DeepSpeed, in `fully_shard`. What all of them share is in `backend.Backend`.

In: a model's folder and the configuration with nothing left open. Out: an Actor that can be called, its gradients and their norm.
Begin with `backend`; another backend is a class there and a line in `CLASSES`.
"""
