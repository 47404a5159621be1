"""Replays written as lines of text, for cases of comparisons and verdicts, and a comparison told as lines.

replay r-02 {"dtype": "bf16"}            settings of `comparecases.write_replay`
r-02 1 result {"status": "hung"}         of an input, or of `*` all: fields of its result
r-02 * add log_probs 1,2 0.5             to an element of a kept tensor; `set` puts it there
r-02 0 drop entropy                      a tensor was not kept; `gone`: none was; `cut`: each lacks its first column
r-02 * grad lm_head [1, 1]               a kept gradient
"""

import json

import torch
from comparecases import given, write_replay

from actordbg.actor.hub_model import versions_of
from actordbg.judge.comparison_document import meaning

SIZES = {"embed": 2**18, "q_proj": 64, "input_layernorm": 8, "mlp.experts.down_proj": 64, "mlp.experts.3.w1": 64}
"""Elements of parameters whose gradients are random."""


def places(text):
    """An index as it is written: `0,-1`, `:,:3`, or nothing for the only element."""
    parts = [part.split(":") for part in text.split(",") if part]
    return tuple(slice(*(int(end) if end else None for end in ends)) if len(ends) > 1 else int(ends[0]) for ends in parts)


def write_replays(store, lines, inputs=()):
    """Write the replays of the lines into a store, and return the other lines. inputs: by default four that no file is needed for."""
    inputs = inputs or [given(index) for index in range(4)]
    replays = {}
    changes = {}
    others = []
    for line in lines:
        name, _, rest = line.partition(" ")
        if name == "replay":
            name, _, settings = rest.partition(" ")
            replays[name], changes[name] = json.loads(settings or "{}"), []
        elif name in replays:
            at, verb, what = (*rest.split(" ", 2), "")[:3]
            changes[name].append((at, verb, what))
        else:
            others.append(line)
    for name, settings in replays.items():
        _write(store, name, inputs, changes[name], settings)
    return others


def _write(store, name, inputs, changes, settings):
    def of(index, *verbs):
        return [(verb, what) for at, verb, what in changes if verb in verbs and at in ("*", str(index))]

    def change(index, made):
        for verb, what in of(index, "add", "set", "drop", "cut", "gone", "random"):
            tensor, _, rest = what.partition(" ")
            where, _, value = rest.partition(" ")
            if verb == "gone":
                return None
            if verb == "random":
                size, seed, shift = map(float, what.split())
                errors = torch.Generator().manual_seed(1000 * int(seed) + index)
                made["log_probs"] += shift + size * torch.randn(made["log_probs"].shape, generator=errors)
                continue
            if verb == "cut":
                made = {key: each[:, 1:] for key, each in made.items()}
            elif verb == "drop":
                del made[tensor]
            else:
                before = made[tensor][places(where)] if verb == "add" else 0
                made[tensor][places(where)] = before + json.loads(value)
        return made

    def result(index):
        fields = {}
        for _, what in of(index, "result"):
            fields |= json.loads(what)
        return fields

    def gradients(index):
        kept = {what.split()[0]: torch.tensor(json.loads(what.partition(" ")[2])) for _, what in of(index, "grad")}
        for _, what in of(index, "random-grad"):
            size, _, factors = what.partition(" ")
            made, errors = (torch.Generator().manual_seed(seed + index) for seed in (7, int(1e6 * float(size))))
            right = {name: torch.randn(count, generator=made) for name, count in SIZES.items()}
            off = {name: each * (1 + float(size) * torch.randn(each.shape, generator=errors)) for name, each in right.items()}
            kept |= {name: each * json.loads(factors or "{}").get(name, 1.0) for name, each in off.items()}
        return kept

    kept = gradients if any("grad" in verb for _, verb, _ in changes) else None
    if "versions" in settings:
        settings["versions"] = versions_of("tiny") | settings["versions"]
    first = inputs[: settings.pop("inputs", None)]
    write_replay(store, name, first, change=change, result=result, gradients=kept, **settings)


def told(record, inputs):
    """A comparison as lines: verdict and thresholds, what it means, reasons, dumps by their numbers, the worst first."""
    numbers = {item.dump_id: str(number) for number, item in enumerate(inputs)}
    lines = [f"{record.verdict} by {record.thresholds_from}", f"means: {meaning(record)}"]
    lines += [f"for {reason}" for reason in record.reasons]
    plain = []
    for dump in record.dumps:
        number = numbers[dump.dump_id]
        said = [*dump.reasons, *(f"beyond the noise: {each}" for each in dump.beyond_noise)]
        left = [f"{what} not compared: {why}" for what, why in dump.not_compared.items()]
        if said or left:
            lines += [f"{number} {dump.verdict}: {each}" for each in (*said, *left)]
        else:
            plain.append(f"{number} {dump.verdict}")
    return lines + ([", ".join(plain)] if plain else [])
