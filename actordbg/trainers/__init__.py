"""What actordbg knows of trainers: the one whose Actor it records and replays, and adapters for others.

In a training: an adapter (`*_adapter`) reads a call of its trainer as `seam.Rows`, and `recorded_model` hands it to the recorder.
In a replay: `trainer.TRAINER` (`openrlhf/`) or `rows_actor` builds an Actor, `captured_call` makes the call again.
Begin with `seam` to record another trainer, with `trainer` to replay through one.
"""
