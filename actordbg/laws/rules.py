"""The laws (invariance checks) as rules, in the order in which they are judged: the first that is broken explains the others.

`actordbg.laws.judging` explains each.
"""

from actordbg.records.finding import ISOLATION, Finding, Rule
from actordbg.records.replay_record import LawAnswer, in_words

RULES = {
    name: Rule(name, holds, remedy=remedy, fails=fails)
    for name, fails, holds, remedy in (
        (
            "state",
            "a call depends on the call before",
            "a call does not depend on the one before",
            "look for a cache or a buffer that outlives a call (`use_cache=False`)",
        ),
        (
            "rerun",
            "the same call, run twice, gives different log-probs",
            "a call repeats itself",
            "see that dropout is off; then `--attn eager`: if that repeats itself, the attention kernel does not",
        ),
        (
            "mask",
            "the action mask changes log-probs",
            "an action mask selects, and changes nothing",
            "compare the code with and without an action mask: is the mask shifted, scaled, or not applied?",
        ),
        (
            "normalisation",
            "log-probs are not the log-softmax of the logits",
            "log-probs are the log-softmax of logits over the temperature",
            "compute log-softmax in fp32, divide by the configured temperature once, and align labels by one",
        ),
        (
            "images",
            "the images that the model gets do not fit the call's tokens",
            "the images of a call reach the model, each with its own tokens",
            "compare what the model is given with what the processor returned: pixels, grids, token types, positions",
        ),
        (
            "routing",
            "the recorded experts (MoE routing) do not fit these tokens",
            "the recorded experts fit the router's own choice best as they are",
            "look for a shift by one token first, then at the order of rows and of layers, then at the gates",
        ),
        (
            "neighbour",
            "a row depends on other rows",
            "a row does not depend on other rows",
            ISOLATION,
        ),
        (
            "padding",
            "real tokens depend on padding",
            "real tokens do not depend on padding",
            "pass the attention mask to every layer, and positions that skip the padding",
        ),
        (
            "future",
            "tokens depend on later tokens",
            "a token does not depend on later ones",
            "check the causal mask, and that label t + 1 belongs to logits t",
        ),
        (
            "jacobian",
            "the backward adds gradients that no log-prob has, as an auxiliary loss does",
            "no gradient reaches other rows, later tokens or padding",
            "look for what adds gradients in the backward: an auxiliary loss in the graph, a hook",
        ),
        (
            "order",
            "log-probs change when the rows are reordered",
            "rows in another order give the same",
            ISOLATION,
        ),
        (
            "alone",
            "a row's log-probs differ between the batch and the row alone",
            "a row alone gives the same",
            ISOLATION,
        ),
        (
            "additivity",
            "gradients of two half-batches do not add up to the batch's",
            "gradients of two halves add up",
            "look for a mean over a call's own tokens, a loss over the batch (a router's), gradients left from the call before",
        ),
    )
}
LAWS = tuple(RULES)


def of_answer(dump_id: str, answer: LawAnswer) -> Finding:
    """Return the finding that an answer is which forbids a green verdict."""
    place = {"dump": dump_id, "row": answer.row, "token": answer.position}
    known = {name: value for name, value in place.items() if value is not None}
    rule = RULES.get(answer.law) or Rule(answer.law)  # a law of a later version
    return Finding(rule, f"{in_words(answer)} in {dump_id}", known, size=answer.size, limit=answer.limit)
