"""Where a configuration goes wrong, in words, by what its results say (`records.locate_record`). No torch.

    local = verdict_of(results)
    local.word        # "WRONG"
    local.said        # "model.layers.1.mlp.down_proj.weight is 1.01 times the checkpoint's; model.layers.1.mlp.down_proj is ..."

A difference in what the model *is* is the cause, and is named first; a place says where it acts. Where a place has no such
difference, no parameter and no attribute shows its cause: code, a kernel, a mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actordbg.base.units import listed, plural
from actordbg.locate.rules import FORMULA, KERNEL, OPERATION, PLACES, SAME_MODEL, of_difference, of_operation, of_place
from actordbg.records.finding import Finding
from actordbg.records.locate_record import (
    BACK,
    GRADIENT,
    IDENTITY,
    INTO,
    LOCATED,
    OUT,
    ROUTING,
    Located,
    ModelDifference,
    ModelIdentity,
    PlaceResult,
    is_backward,
)  # fmt: skip
from actordbg.records.replay_record import ResultRecord

RIGHT, WRONG, NOT_CHECKED = "RIGHT", "WRONG", "NOT CHECKED"
_GAIN_SHOWS = 2e-4
"""A gain this far from 1 is worth a figure: rounding to bf16 alone does not reach it."""
_WITH_STATE = ("linear_attn", "mamba", "mixer")
"""Parts of the names of modules that carry a state from token to token, beside attention."""
_LOST = 1e-9
"""A gradient below this part of the truth's did not arrive."""


@dataclass(frozen=True)
class LocalVerdict:
    """Where a replay goes wrong. findings: what the model is and should not be, what most ranks share first.

    identities: of all ranks, the last of each. located: the forced forward of the input that shows the most, None without one.
    dump_id: that input. judged: all inputs with a forced forward.
    """

    identities: tuple[ModelIdentity, ...]
    findings: tuple[ModelDifference, ...]
    located: Located | None
    dump_id: str
    judged: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[str, ...]:
        """The findings in sentences, with the ranks where not all share one."""
        of = len(self.identities)
        return tuple(f"{each.said} (on {_ranks(each.ranks)} of {of})" if each.ranks else each.said for each in self.findings)

    @property
    def same_model(self) -> bool:
        """Check whether every rank's model was the checkpoint's after the last input, as far as it was compared."""
        return bool(self.identities) and not self.findings and all(identity.ran for identity in self.identities)

    @property
    def causes(self) -> list[Finding]:
        """Return what the model is and should not be, and code that computes something else: the first explains the others."""
        found = [
            Finding(SAME_MODEL, said, {"module": difference.name}, limit=0.0, remedy=of_difference(difference))
            for difference, said in zip(self.findings, self.differences, strict=True)
        ]
        located = self.located
        if located is None:
            return found
        if located.formulas is not None and located.formulas.differs:
            found.append(Finding(FORMULA, located.formulas.differs))
        if located.operation is not None and located.operation.word:
            operation = located.operation
            place = {"module": operation.module}
            found.append(Finding(OPERATION, operation.sentence, place, remedy=of_operation(operation)))
        if located.kernel:
            found.append(Finding(KERNEL, located.kernel, {"module": "attention"}))
        return found

    @property
    def places(self) -> list[Finding]:
        """The places that are further from the truth than a healthy model's."""
        located, found = self.located, []
        if located is None:
            return []
        for place in located.wrong:
            said = place_in_words(place, located.dtype, cause_known=bool(self.causes), same_model=self.same_model)
            at = {"dump": self.dump_id, "module": place.module} | ({} if place.position is None else {"token": place.position})
            found.append(Finding(PLACES[place.kind], said, at, size=place.ratio, limit=place.limit, remedy=of_place(place)))
        return found

    @property
    def found(self) -> list[Finding]:
        """Everything that is wrong, causes first."""
        return [*self.causes, *self.places]

    @property
    def word(self) -> str:
        """RIGHT, WRONG, or NOT CHECKED if no place or no tensor was judged."""
        if self.found:
            return WRONG
        return RIGHT if self.judged and self.looked_at else NOT_CHECKED

    @property
    def looked_at(self) -> int:
        """Number of parameters, buffers, attributes and ties that every rank compared."""
        return min((identity.looked_at for identity in self.identities), default=0)

    @property
    def said(self) -> str:
        """The cause, and the place with the largest excess; or how many places and tensors were judged."""
        located = self.located
        if causes := list({finding.rule: finding for finding in reversed(self.causes)}.values())[::-1]:
            parts = [finding.said for finding in causes if finding.rule != OPERATION or finding is causes[0]]
            more = max((identity.count for identity in self.identities), default=0) - 1
            if causes[0].rule == SAME_MODEL and more > 0:
                parts[0] += f" (and {plural(more, 'more difference')})"
        else:
            parts = []
        if located is not None and located.wrong and not located.kernel:
            parts.append(self.places[0].said)
            parts += [f"{plural(located.count - 1, 'other place')} above its limit"] if located.count > 1 else []
        if parts:
            return "; ".join(parts)
        if self.word == NOT_CHECKED:
            return next(iter(self.unchecked), "no input was judged place by place")
        assert located is not None
        backward = f" and {located.gradients:,} gradients" if located.gradients else ""
        dumps = f"each of {len(self.judged)} dumps" if len(self.judged) > 1 else "one dump"
        counts = f"{located.places:,} places{backward} in {dumps}, {self.looked_at:,} tensors and attributes"
        return f"held against the clean model module by module ({counts})"

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Everything that was not judged, by name, each with its reason."""
        of_model = [why for identity in self.identities for why in identity.unchecked]
        if self.identities and not all(identity.ran for identity in self.identities):
            of_model.append("what the model was after the last input: it was compared when it was loaded")
        return tuple(dict.fromkeys([*of_model, *(self.located.unchecked if self.located else ())]))


def verdict_of(results: Sequence[ResultRecord]) -> LocalVerdict | None:
    """Read what a replay's results say about their model; None if none of them was compared."""
    identities: dict[int, ModelIdentity] = {}
    judged: list[str] = []
    located, dump_id = None, ""
    for result in results:
        for identity in _read(result.extra.get(IDENTITY), list[ModelIdentity]) or ():
            identities[identity.rank] = identity
        if (judgement := _read(result.extra.get(LOCATED), Located)) is not None:
            if judgement.places:
                judged.append(result.dump_id)
            if _is_worse(judgement, located):
                located, dump_id = judgement, result.dump_id
    if not identities and located is None:
        return None
    ranks = defaultdict(list)
    for rank, identity in sorted(identities.items()):
        for difference in identity.differences:
            if isinstance(difference, str):  # of a record of before 2026-12: a sentence, which begins with the name
                difference = ModelDifference(difference.partition(" ")[0], "", difference)
            ranks[difference].append(rank)
    findings = tuple(
        replace(difference, ranks=() if len(of) == len(identities) else tuple(of))
        for difference, of in sorted(ranks.items(), key=lambda item: -len(item[1]))
    )
    return LocalVerdict(tuple(identities.values()), findings, located, dump_id, tuple(dict.fromkeys(judged)))


def unlocated(local: LocalVerdict | None, replay_id: str) -> tuple[str, ...]:
    """Say what of a replay's model was not judged, as a part of its verdict; () if all of it was."""
    command = f"`actordbg locate {replay_id}`"
    if local is None:
        return (f"the model, bit for bit and module by module ({command})",)
    first, count = next(iter(local.unchecked), ""), len(local.unchecked)
    more = f" and {count - 1} more ({command})" if count > 1 else ""
    return (f"module by module: {first}{more}",) if count else ()


def place_in_words(place: PlaceResult, dtype: str, *, cause_known: bool, same_model: bool = False) -> str:
    """Say how far a place is from the truth, where, and, unless the cause is known, what its kind of place rules out.

    same_model: what the model is was compared after the input, and is the checkpoint's.
    """
    unit = "fp32" if dtype == "float32" else "bf16" if dtype == "bfloat16" else dtype
    if is_backward(place.kind) and place.gain is not None and abs(place.gain) < _LOST:
        ends = {BACK[OUT]: "comes back to", BACK[INTO]: "goes back through", GRADIENT: "reaches"}
        return f"no gradient {ends[place.kind]} {place.module}"
    if place.kind == GRADIENT and place.pattern:
        return place.pattern
    if place.what.startswith(ROUTING):
        where = f": {place.pattern}" if place.pattern and place.tokens < place.of_tokens else ""
        return f"{place.what} is not the truth's (an overlap of {place.gain:.0%} of the experts chosen){where}"
    if place.ratio is None:
        far = "are not the input's" if place.limit == 1.0 else "is not finite"
    else:
        far = f"is {place.ratio:,.3g} times as far from the truth as a healthy {unit} model's"
    words = f"{place.what} {far}"
    shows = place.gain is not None and abs(place.gain - 1) > _GAIN_SHOWS and place.kind != INTO and place.ratio is not None
    if shows and place.kind == GRADIENT:
        words = f"{place.module}'s gradient is {place.gain:.4g} times the truth's"
        return f"{words}, an error {place.ratio:,.3g} times a healthy {unit} model's"
    details = [*_where(place), *([f"{place.gain:.4g} times the truth's"] if shows else [])]
    words += f" ({'; '.join(details)})" if details else ""
    if cause_known or place.ratio is None or is_backward(place.kind):
        return words
    between = place.kind == INTO or "rotary" in place.module
    if place.kind == INTO and any(part in place.module for part in _WITH_STATE):
        return f"{words}: its state runs on into the next packed row, or into padding"
    if between and 0 < len(place.rows) < place.of_rows and 0 not in place.rows:
        return f"{words}: rows behind the first see others, or their positions do not restart"
    if place.kind == INTO:
        return f"{words}: a mask, a scale, an angle or a kernel between the modules"
    return (
        f"{words}: its parameters and attributes are the checkpoint's, so its code or its kernel differs" if same_model else words
    )


def lines_of(local: LocalVerdict) -> Iterator[str]:
    """Yield every difference, every wrong place and everything unchecked, a line each."""
    yield from (finding.said for finding in local.causes)
    located = local.located
    if located is not None:
        yield from [located.operation.sentence] if located.operation and not located.operation.word else []
        yield from (place_in_words(place, located.dtype, cause_known=True) for place in located.wrong)
        yield from located.notes
    yield from (f"{NOT_CHECKED}: {why}" for why in local.unchecked)


def _where(place: PlaceResult) -> Iterator[str]:
    if place.pattern and place.tokens < place.of_tokens:
        return (yield place.pattern)
    if place.rows and len(place.rows) < place.of_rows:
        yield f"rows {listed(place.rows)} of {place.of_rows}"
    if place.position is not None and place.tokens < place.of_tokens:
        yield f"{place.tokens:,} of {plural(place.of_tokens, 'token')}, the first at position {place.position}"


def _is_worse(judged: Located, before: Located | None) -> bool:
    return before is None or (judged.count, judged.places) > (before.count, before.places)


def _ranks(ranks: Sequence[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {listed(ranks)}"


def _read(data: Any, kind: Any) -> Any:
    """Build a record from plain data; None for anything else, such as a newer version's."""
    from msgspec import ValidationError, convert

    try:
        return None if data is None else convert(data, kind)
    except ValidationError:
        return None
