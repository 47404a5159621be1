"""What must hold of a recorded step, and what to do where it does not."""

from __future__ import annotations

from actordbg.document.blocks import TRAINER
from actordbg.records.finding import Finding, Rule

_GROUPS = "look at what makes or changes the optimizer's groups"
RULES = {
    name: Rule(name, holds, remedy=remedy, side=TRAINER)
    for name, holds, remedy in (
        ("dp_size", "dp_size is the number of ranks that share a step", "pass the size of the data-parallel group"),
        ("engine accumulation", "DeepSpeed accumulates what the trainer normalizes over",
         "give DeepSpeed the accumulation of the trainer (gradient_accumulation_steps)"),
        ("own means", "losses are divided by what the step has", "divide by the step's tokens or rows, over all ranks"),
        ("counts of ranks", "ranks divide by one count", "count the step's tokens or rows over all ranks"),
        ("accumulation", "a loss is divided by the accumulation once", "scale the loss by the accumulation once"),
        ("token count", "losses are divided by the step's tokens", "count the step's tokens over all ranks and micro-batches"),
        ("row count", "losses are divided by the step's rows", "count the step's rows over all ranks and micro-batches"),
        ("formula", "a loss is what its formula gives", "look at clipping and mask of the loss: `actordbg lint`"),
        ("with the wrong sign", "a loss is minimized", "minimize the negated objective: -min(ratio * advantage, ...)"),
        ("without the action mask", "only actions count", "multiply the terms by the mask before their sum"),
        ("without clipping", "ratios are clipped as set", "pass clip_eps_low and clip_eps_high to the loss"),
        ("without importance correction", "terms are corrected as set", "multiply the terms by the correction's weights"),
        ("gradient clipping", "DeepSpeed clips as the trainer is set", "pass max_norm to DeepSpeed (gradient_clipping)"),
        ("KL term", "backward gets the KL term", "add the KL term to the loss before backward"),
        ("entropy term", "backward gets the entropy term", "add the entropy term to the loss before backward"),
        ("doubled loss", "backward gets a loss once", "add each loss once"),
        ("unknown term", "backward gets the loss and its terms alone", "look at what the trainer adds to the loss"),
        ("last micro-batch", "every micro-batch's gradient is applied",
         "use ZeRO 3, or turn dynamic batches off (--train.dynamic_batch_enable)"),
        ("first micro-batch", "every micro-batch's gradient is applied", "accumulate all of them"),
        ("gradient twice", "a gradient is applied once", "run backward once for each micro-batch"),
        ("sum over ranks", "gradients are averaged over ranks", "average, or leave dp_size out"),
        ("ranks twice", "gradients are averaged over ranks once", "scale by dp_size once"),
        ("log-probs", "log-probs are what the step's own weights give", "look at what Actor.forward returns"),
        ("unknown", "the norm is that of the whole step's gradient", ""),
        ("learning rate", "the optimizer has the trainer's learning rate", _GROUPS),
        ("betas", "Adam has the trainer's betas", _GROUPS),
        ("eps", "Adam has the trainer's eps", _GROUPS),
        ("weight decay", "each group decays as the trainer is set", _GROUPS),
        ("Adam's state", "moments follow from those before", "look at what replaces the optimizer's state"),
        ("update", "parameters move by what Adam's state gives", "look at what changes parameters or the learning rate"),
        ("configuration", "a step is right under this configuration too", "`actordbg check` says where it is not"),
    )
}  # fmt: skip
"""What must hold of a step, by its name."""


def broken(name: str, said: str) -> Finding:
    """Return a finding of the rule with this name."""
    return Finding(RULES[name], said)
