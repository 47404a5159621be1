"""What must hold of a recorded step, and what to do where it does not."""

from __future__ import annotations

from actordbg.document.blocks import TRAINER
from actordbg.records.finding import Finding, Rule

_GROUPS = "look at what makes or changes the optimizer's param_groups"
RULES = {
    name: Rule(name, holds, remedy=remedy, side=TRAINER, fails=fails)
    for name, fails, holds, remedy in (
        (
            "dp_size",
            "dp_size is not the number of data-parallel ranks",
            "dp_size is the number of ranks that share a step",
            "pass the size of the data-parallel group, not the world size",
        ),
        (
            "engine accumulation",
            "DeepSpeed accumulates another number of micro-batches than the trainer",
            "DeepSpeed accumulates what the trainer normalizes over",
            "give DeepSpeed the accumulation of the trainer (gradient_accumulation_steps)",
        ),
        (
            "own means",
            "each micro-batch's loss is divided by its own count",
            "losses are divided by what the step has",
            "divide by the step's tokens or rows over all ranks, times the ranks where gradients are averaged",
        ),
        (
            "counts of ranks",
            "each rank's loss is divided by its own count",
            "ranks divide by one count",
            "divide by the count of all ranks (all-reduce), times the ranks where gradients are averaged",
        ),
        (
            "accumulation",
            "gradients are divided by the accumulation twice, or not at all",
            "a loss is divided by the accumulation once",
            "divide once, either the loss or in the engine (DeepSpeed, Accelerate: gradient_accumulation_steps)",
        ),
        (
            "token count",
            "losses are divided by a wrong number of tokens",
            "losses are divided by the step's tokens",
            "count the step's tokens over all ranks and micro-batches",
        ),
        (
            "row count",
            "losses are divided by a wrong number of rows",
            "losses are divided by the step's rows",
            "count the step's rows over all ranks and micro-batches",
        ),
        (
            "formula",
            "a recorded loss is not what its formula gives for its inputs",
            "a loss is what its formula gives",
            "minimize the negated objective; pass mask, clips and importance correction to the loss as they are set",
        ),
        (
            "gradient clipping",
            "DeepSpeed does not clip as the trainer is set",
            "DeepSpeed clips as the trainer is set",
            "pass max_norm to DeepSpeed (gradient_clipping)",
        ),
        (
            "KL term",
            "backward gets no KL term, or another than is set",
            "backward gets the KL term",
            "add the KL term to the loss before backward, with its sign and estimator",
        ),
        (
            "entropy term",
            "backward gets no entropy term, or its negative",
            "backward gets the entropy term",
            "subtract the entropy term from the loss before backward",
        ),
        (
            "doubled loss",
            "backward gets the loss twice",
            "backward gets a loss once",
            "add each loss once",
        ),
        (
            "unknown term",
            "backward gets more than the loss and its terms",
            "backward gets the loss and its terms alone",
            "look at what the trainer adds to the loss",
        ),
        (
            "last micro-batch",
            "only the last micro-batch's gradient is applied",
            "every micro-batch's gradient is applied",
            "zero gradients once a step; with dynamic batches on ZeRO 1 or 2: drop --train.dynamic_batch_enable, or use ZeRO 3",
        ),
        (
            "first micro-batch",
            "only the first micro-batch's gradient is applied",
            "every micro-batch's gradient is applied",
            "step, then zero the gradients, only after the last micro-batch",
        ),
        (
            "micro-batch left out",
            "a micro-batch's gradient is not applied",
            "every micro-batch's gradient is applied",
            "look for what skips a backward, or zeroes gradients between two",
        ),
        (
            "gradient twice",
            "a micro-batch's gradient is accumulated twice",
            "a gradient is applied once",
            "run backward once for each micro-batch",
        ),
        (
            "clipped early",
            "gradients are clipped at each micro-batch, not once",
            "gradients are clipped once, before the optimizer's step",
            "clip where gradients are complete (after the last micro-batch)",
        ),
        (
            "clipped by value",
            "elements of the gradient are cut at a value",
            "gradients are clipped by their norm alone",
            "clip by the norm (clip_grad_norm_), or record it as intended",
        ),
        (
            "lost gradient",
            "a parameter's gradient is not applied",
            "every trained parameter's gradient is applied",
            "look for a hook, a detach, or a parameter group that leaves it out",
        ),
        (
            "sum over ranks",
            "gradients are added over ranks, not averaged",
            "gradients are averaged over ranks",
            "average in the reduction, or do not multiply the loss by dp_size",
        ),
        (
            "ranks twice",
            "gradients are averaged over ranks twice",
            "gradients are averaged over ranks once",
            "the reduction averages already: do not divide the loss by dp_size too",
        ),
        (
            "log-probs",
            "log-probs are not what the step's weights give",
            "log-probs are what the step's own weights give",
            "look at what is applied after the logits (temperature, a wrapper), and for weights of another step",
        ),
        (
            "unknown",
            "the reported gradient norm is not that of the step's gradients",
            "the norm is that of the whole step's gradient",
            "look at what changes gradients between backward and the norm: hooks, scaling, clipping",
        ),
        (
            "learning rate",
            "the optimizer's learning rate is not the configured one",
            "the optimizer has the trainer's learning rate",
            _GROUPS,
        ),
        (
            "betas",
            "Adam's betas are not the configured ones",
            "Adam has the trainer's betas",
            _GROUPS,
        ),
        (
            "eps",
            "Adam's eps is not the configured one",
            "Adam has the trainer's eps",
            _GROUPS,
        ),
        (
            "weight decay",
            "the weight decay is not the configured one",
            "each group decays as the trainer is set",
            _GROUPS,
        ),
        (
            "Adam's state",
            "Adam's moments do not follow from those of the step before",
            "moments follow from those before",
            "look for code that resets, reloads or replaces the optimizer's state",
        ),
        (
            "update",
            "parameters were changed by something besides Adam's update",
            "parameters move by what Adam's state gives",
            "look for code that writes parameters, or changes the learning rate, around the step",
        ),
        (
            "configuration",
            "with these options, the replayed step gives another gradient than recorded",
            "a step is right under this configuration too",
            "run `actordbg check` with the same options: it names the module",
        ),
    )
}
"""What must hold of a step, by its name."""
UNKNOWN = "unknown"
"""The name of a fault that nothing known explains."""


def broken(name: str, said: str) -> Finding:
    """Return a finding of the rule with this name."""
    return Finding(RULES[name], said)


def near(value: float, wanted: float, tolerance: float) -> bool:
    """Check whether a figure is within a relative tolerance."""
    return abs(value - wanted) <= tolerance * abs(wanted)
