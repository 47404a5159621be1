"""`actordbg demo`: a small real training run, and the seven steps around it.

Input: the name of a training program and an empty folder. Output: a store with a checked replay; the trainer's file is restored.
Begin with `demo_steps.Demo.run`; `demo_training` starts the training and makes what it needs on disk.
"""
