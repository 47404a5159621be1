"""What runs in somebody's training process: the hook around a forward, the switch, triggers, and the flight recorder.

In come the calls of an actor, and `control.json`, which a thread looks at twice a second. Out go dump files and counters,
written by a thread or a process of its own, and a ring in shared memory that outlives a kill. Nothing here raises into the
training, makes it wait, or imports what the desk needs. Begin with `hook`, then `recorder` (one call), `ring` (where it lies),
`writer` (to the disk).
"""
