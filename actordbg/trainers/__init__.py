"""Everything that is specific to trainers: OpenRLHF, whose Actor is recorded and replayed, and adapters for other trainers.

In training: an adapter (`*_adapter`) reads a call of its trainer as `seam.Rows`, and `recorded_model` hands it to the recorder.
In a replay: `trainer.TRAINER` (`openrlhf/`) or `rows_actor` builds an Actor, and `captured_call` repeats the call.
Start with `seam` to record another trainer, with `trainer` to replay through another.
"""
