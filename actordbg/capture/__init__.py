"""Code that runs inside the training process: the hook around a forward, the switch, triggers, and the flight recorder.

Inputs: the calls of an actor, and `control.json`, which a thread polls twice a second. Outputs: dump files and counters, written
by a background thread or process, and a ring in shared memory that outlives a kill. Nothing here raises into the training, blocks
it, or imports modules that only the desk needs. Start with `hook`, then `recorder` (one call), `ring` (where it is stored),
`writer` (to the disk).
"""
