"""A whole optimizer step, replayed from its recorded losses: forward, loss and backward of all micro-batches of all ranks.

Three sides: what was recorded, the trainer's own loss under a configuration, and the formula over the whole step as one batch in
fp32. Where they differ, `step_verdict` names the cause. Begin with `recorded_step`, then `run_step`.
"""
