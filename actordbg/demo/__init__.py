"""`actordbg demo`: a small real training run, and the seven steps around it.

Input: the name of a training program and an empty folder. Output: a store with a checked replay; the trainer's file is restored.
Begin with `demo_training.Demo.run`; `start_job` starts the training.
"""
