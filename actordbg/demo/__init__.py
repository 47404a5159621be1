"""A small real training, and the seven steps around it: `actordbg demo`.

In comes the name of a training program and an empty folder; out come a store, a report, and the trainer's file as it was before.
Begin with `demo_steps.Demo.run`; `demo_training` starts the training and makes what it needs on disk.
"""
