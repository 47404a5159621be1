"""Recorded calls as the laws of recorded data read them: rows of tokens, masks and log-probs, as numpy arrays, without torch.

A call is an Actor's forward or a loss. Both have B rows of S tokens, whose last A next tokens are actions. `trim` keeps what laws
over `Calls`, those of a step or a run, need: keys and a few numbers of each row. A `RecordedLaw` declares, an `Answer` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from actordbg.base.units import plural
from actordbg.document.blocks import EITHER, ROLLOUT, TRAINER
from actordbg.dumps.file_rows import OF_LOG_PROBS
from actordbg.formats.dump_record import LOSS, OUTPUT_PREFIX, DumpRecord, make_dump_id, timestamp_of
from actordbg.formats.dumpfile import IMPORTED
from actordbg.formats.encoding import PlainTensor
from actordbg.formats.nested_values import CONTEXT
from actordbg.recorded.loss_terms import OF_ROWS, REWARDS, VALUES, Terms, loss_terms, other_settings, penalty
from actordbg.records.finding import Finding, Rule, RuleOutcome
from actordbg.store.payload import load_plain, numbers_of

HEAD = 16
"""Actions of a row's beginning that are kept of its log-probs."""
Numbers: TypeAlias = Any
"""A numpy array, whose shape the text beside it gives. (numpy's stubs do not follow comparisons of arrays.)"""
_TRIMMED = (
    "row_keys", "beginnings", "counts", "spans", "ends", "surprisal", "moved", "terms", "others", "weightless", "holes", "heads",
    "estimates", "learned",
)  # fmt: skip
LOW, HIGH, FIRST, LAST, LEAST, MOST, COUNT = range(7)
"""Columns of `RecordedCall.estimates`; five sums follow the last."""


def shifted(values: Numbers, by: int, fill: float = 0) -> Numbers:
    """Return a mask or values [B, A] shifted by some columns, without what leaves them; what comes in is `fill`."""
    moved, size = np.full_like(values, fill), values.shape[1] - abs(by)
    moved[:, max(by, 0) : max(by, 0) + size] = values[:, max(-by, 0) : max(-by, 0) + size]
    return moved


def key_of(ids: Numbers) -> bytes:
    """Return a key of token ids [n]."""
    return blake2b(np.asarray(ids, "<i8").tobytes(), digest_size=12).digest()


def side_of(name: str) -> str:
    """Return the side that a tensor comes from."""
    return ROLLOUT if name == "rollout_log_probs" else TRAINER


def side_apart(call: RecordedCall, name: str) -> str:
    """Return the side that is wrong where a tensor is not of the trainer's tokens or rows: in a file, either may have moved."""
    return EITHER if call.imported else side_of(name)


class RecordedCall:
    """A recorded call. `rows`: B. Arrays that the call does not have are None. root: the store's folder, if it is known.

    estimated: what laws found out of the step that an imported loss is the first of.
    """

    root: Path | None = None
    estimated: tuple[Any, ...] | None = None

    def __init__(self, record: DumpRecord, tensors: Mapping[str, PlainTensor]) -> None:
        self.record, self.rows = record, record.batch_size
        self._tensors: Mapping[str, PlainTensor] = tensors

    @classmethod
    def read(cls, path: str) -> RecordedCall:
        """Read a dump file, or a dump in a pack. Raises StoreProblem."""
        return cls(*load_plain(path))

    def trim(self) -> RecordedCall:
        """Compute what laws over many calls read, and drop the tensors that are as long as the rows."""
        for name in _TRIMMED:
            getattr(self, name)
        self._tensors = {name: t for name, t in self._tensors.items() if t.values.ndim < 2}
        for name in ("sequences", "real", "active", "actions"):
            self.__dict__.pop(name, None)
        return self

    def array(self, *names: str) -> Numbers | None:
        """Return the first tensor of these names, whether an argument, a result or context; None if none was recorded."""
        known = (prefix + name for name in names for prefix in ("", OUTPUT_PREFIX, CONTEXT))
        tensor = next((self._tensors[name] for name in known if name in self._tensors), None)
        return None if tensor is None else numbers_of(tensor)

    def fact(self, name: str) -> Any:
        """Return a plain value of the call or its context, or a tensor of one element as a number; None if not recorded."""
        arguments = self.record.arguments
        value = arguments.get(CONTEXT + name, arguments.get(name))
        if value is None and (array := self.array(name)) is not None and array.size == 1:
            value = array.item()
        return value

    @property
    def recorded_names(self) -> set[str]:
        """Everything that the call has a value for, by the names that `fact` and `array` take; LOSS for a loss."""
        known = {*self._tensors, *(name for name, value in self.record.arguments.items() if value is not None)}
        names = {name.removeprefix(CONTEXT).removeprefix(OUTPUT_PREFIX) for name in known} | {self.record.point}
        return names | ({"old_log_probs"} if OF_ROWS[0] in names else set())

    @property
    def forward_id(self) -> str | None:
        """The dump id of the forward whose log-probs a loss got; None if that was not recorded."""
        parts = self.array("forward")
        if parts is None:
            return self.fact("forward")  # type: ignore[no-any-return]
        time_ns, number, pid, token = map(int, parts)
        return make_dump_id(timestamp_of(time_ns), number, pid, f"{token:08x}")

    @property
    def is_loss(self) -> bool:
        """Check whether the call is a loss."""
        return self.record.point == LOSS

    @property
    def imported(self) -> bool:
        """Check whether the call was read from a file that a run left behind: models, settings and order are not known then."""
        return self.record.source == IMPORTED

    @property
    def fp32(self) -> bool:
        """Check whether the model computes in fp32, whose rounding is far below that of other dtypes."""
        return self.record.model_dtype == "float32" and self.record.autocast_dtype is None

    @property
    def scaled(self) -> bool:
        """Check whether the model computes in float16: its loss is scaled, and a step whose gradient overflows is left out."""
        return "float16" in (self.record.model_dtype, self.record.autocast_dtype)

    @cached_property
    def sequences(self) -> Numbers | None:
        """The token ids [B, S]."""
        return self.array("sequences")

    @cached_property
    def real(self) -> Numbers | None:
        """Mark tokens that are not padding, bool [B, S]."""
        mask = self.array("attention_mask")
        return mask != 0 if mask is not None else None if self.sequences is None else np.ones(self.sequences.shape, bool)

    @cached_property
    def active(self) -> Numbers | None:
        """Mark actions, bool [B, A]; without an action mask every real next token counts."""
        mask = self.array("action_mask")
        if mask is not None:
            return mask != 0
        return None if self.real is None or self.is_loss else self.real[:, 1:] & self.real[:, :-1]

    @cached_property
    def actions(self) -> Numbers | None:
        """The token ids of the columns of `active`, [B, A]."""
        if self.sequences is None or self.active is None or self.active.shape[1] >= self.sequences.shape[1]:
            return None
        return self.sequences[:, self.sequences.shape[1] - self.active.shape[1] :]

    def log_probs(self) -> dict[str, Numbers]:
        """Return every recorded set of log-probs whose shape is that of `active`, by name."""
        named = ((name, self.array(name)) for name in (*OF_LOG_PROBS, "action_log_probs"))
        shape = None if self.active is None else self.active.shape
        return {name: values for name, values in named if values is not None and values.shape == shape}

    def between(self, one: str, other: str) -> Numbers | None:
        """Return two sets of log-probs' difference in nats, float64 with the shape of `active`; None without one of them."""
        known = self.log_probs()
        return known[one].astype("f8") - known[other] if one in known and other in known else None

    @cached_property
    def apart(self) -> Numbers | None:
        """The |rollout - trainer| of each action's log-prob in nats; None without a rollout's."""
        between = self.between("rollout_log_probs", "log_probs")
        return None if between is None else np.abs(between)[self.active]

    @cached_property
    def row_keys(self) -> list[bytes]:
        """A key for each row's real tokens; the same row has the same key however it is padded."""
        return self._keys(self.real)

    @cached_property
    def beginnings(self) -> list[tuple[bytes, int, int]]:
        """Each row's real tokens before its first action as a key of all but the last, and that token; and the first action, -1
        for a row without; empty without an action mask.
        """
        ids = self.sequences
        if self.array("action_mask") is None or self.actions is None or self.real is None or self.active is None or ids is None:
            return []
        (rows, length), width = self.real.shape, self.active.shape[1]
        first = np.where(self.active.any(1), length - width + self.active.argmax(1), length)
        columns = np.arange(length)
        ahead = self.real & (columns < first[:, None])
        last = np.where(ahead.any(1), length - 1 - ahead[:, ::-1].argmax(1), 0)
        ids = np.pad(ids, ((0, 0), (0, 1)), constant_values=-1)
        stems = self._keys(ahead & (columns < last[:, None]))
        return list(zip(stems, *(ids[range(rows), at].tolist() for at in (last, first)), strict=True))

    @property
    def prompts(self) -> list[bytes]:
        """A key for the real tokens before each row's first action; empty without an action mask."""
        return [stem + last.to_bytes(8, "little", signed=True) for stem, last, _ in self.beginnings]

    def _keys(self, where: Numbers | None) -> list[bytes]:
        if self.sequences is None or where is None or where.shape != self.sequences.shape:
            return []
        return [key_of(row[kept]) for row, kept in zip(self.sequences, where, strict=True)]

    @cached_property
    def counts(self) -> Numbers | None:
        """The number of actions of each row, [B]."""
        return None if self.active is None else self.active.sum(1)

    @cached_property
    def spans(self) -> Numbers | None:
        """The columns from each row's first action to its last, [B]."""
        if self.active is None:
            return None
        width = self.active.shape[1]
        return np.where(self.active.any(1), width - self.active[:, ::-1].argmax(1) - self.active.argmax(1), 0)

    @cached_property
    def holes(self) -> Numbers | None:
        """Mark rows whose actions have a gap, or end before the row's last real token, bool [B]."""
        if self.actions is None or self.active is None or self.real is None or self.counts is None or self.spans is None:
            return None
        behind = self.active.shape[1] - self.active[:, ::-1].argmax(1)
        last = self.active.shape[1] - self.real[:, ::-1].argmax(1)
        return (self.counts > 0) & ((self.counts != self.spans) | (behind != last))

    @cached_property
    def ends(self) -> Numbers | None:
        """The last two actions of each row, [B, 2]; -1 for rows with fewer, and for two that are not neighbors."""
        if self.actions is None or self.active is None or self.array("action_mask") is None:
            return None
        ends = np.full((len(self.actions), 2), -1)
        for row, (ids, mask) in enumerate(zip(self.actions, self.active, strict=True)):
            at = mask.nonzero()[0][-2:]
            ends[row, 2 - len(at) :] = ids[at]
            if len(at) == 2 and at[1] - at[0] > 1:
                ends[row, 0] = -1
        return ends

    @cached_property
    def surprisal(self) -> Numbers | None:
        """Return how unlikely each row's actions were, in nats: the negated sum of their log-probs, [B]."""
        known = self.log_probs()
        values = next((known[name] for name in ("old_log_probs", "action_log_probs", "log_probs") if name in known), None)
        return None if values is None or self.active is None else -np.where(self.active, values, 0.0).sum(1)

    @cached_property
    def heads(self) -> dict[str, Numbers]:
        """The log-probs of each row's first actions by name, float64 [B, HEAD]; NaN behind a row's last."""
        heads = {}
        for name, values in self.log_probs().items():
            assert self.active is not None
            heads[name] = head = np.full((len(values), HEAD), np.nan)
            for row, (own, mask) in enumerate(zip(values, self.active, strict=True)):
                kept = own[mask][:HEAD]
                head[row, : len(kept)] = kept
        return heads

    @cached_property
    def moved(self) -> Numbers | None:
        """The sum over each row's actions of |log_probs - old_log_probs|, [B]; of losses that get only a row's sum, of that."""
        between, sums, known = self.between("log_probs", "old_log_probs"), self.array("old_row_log_probs"), self.log_probs()
        if self.active is None or (between is None and (sums is None or "log_probs" not in known)):
            return None
        if between is None:
            return np.abs(np.where(self.active, known["log_probs"], 0.0).sum(1) - sums)
        return np.where(self.active, np.abs(between), 0.0).sum(1)

    @cached_property
    def weightless(self) -> Numbers | None:
        """Mark rows whose advantages are 0 at every action, bool [B]."""
        advantages = self.array("advantages")
        if advantages is None or self.active is None or advantages.shape != self.active.shape:
            return None
        return ~((advantages != 0) & self.active).any(1)

    @cached_property
    def estimates(self) -> Numbers | None:
        """Each row's advantages a and returns r, less its values, over its actions: the least, the largest and the first a; by r,
        the reward of the last action, the least and the largest of those before; and the sums of 1, a, a^2, r, a r and r^2;
        float64 [B, 12]. Where returns, or what GAE makes them of, were not recorded, there is NaN.
        """
        advantages, active = self.array("advantages"), self.active
        if advantages is None or active is None or advantages.shape != active.shape or not active.size:
            return None
        a, r, estimator = advantages.astype("f8"), np.full(active.shape, np.nan), self.fact("advantage.estimator")
        v, returns, values = np.zeros_like(r), self.array("returns"), self.array("values")
        if returns is not None and returns.shape == r.shape:
            v = np.where(active, values if values is not None and values.shape == r.shape else 0.0, 0.0)
            r = returns.astype("f8") - v
        gamma, kept = (self.fact(f"advantage.{name}") for name in ("gamma", "lambd"))
        gamma = gamma if estimator in ("gae", "reinforce") else 1.0
        kept = 1.0 if estimator != "gae" else None if values is None else kept
        first, last = active.argmax(1)[:, None], active.shape[1] - 1 - active[:, ::-1].argmax(1)[:, None]
        earlier = np.arange(active.shape[1]) < last
        known = gamma is not None and kept is not None
        following = gamma * shifted(v + kept * r, -1) if known else np.full_like(r, np.nan)
        rewards = r + v - np.where(earlier, following, 0.0)
        before = np.where(active & earlier, rewards, 0.0)
        ends = [np.where(active, a, np.inf).min(1), np.where(active, a, -np.inf).max(1), np.take_along_axis(a, first, 1)[:, 0]]
        ends += [np.take_along_axis(rewards, last, 1)[:, 0], before.min(1), before.max(1)]
        sums = [np.where(active, each, 0.0).sum(1) for each in (np.ones_like(a), a, a * a, r, a * r, r * r)]
        return np.stack([*ends, *sums], 1)

    @cached_property
    def learned(self) -> dict[bytes, bytes]:
        """The returns of each row's actions, and their values before the step, by the row's key; {} without them."""
        pair: list[Numbers] = [self.array("returns"), self.array("old_values", "values")]
        if self.active is None or any(each is None or each.shape != self.active.shape for each in pair):
            return {}
        rows = zip(self.row_keys, np.stack(pair, 2).astype("f4"), self.active, strict=True)
        return {key: both[own].tobytes() for key, both, own in rows}

    @cached_property
    def terms(self) -> Terms | None:
        """Return the sums of this loss's terms, recomputed from its arguments; None for a forward, and for an unknown loss."""
        return self.terms_with()

    def terms_with(self, *, masked: bool = True, sign: float = 1.0, **changed: Any) -> Terms | None:
        """Return `terms` with changed attributes of the loss, with another sign, or of all tokens."""
        pairs = self.array("chosen_reward")
        of = self.active if pairs is None else np.ones((len(pairs), 1), bool)
        if not self.is_loss or of is None:
            return None
        mask = of if masked else np.ones_like(of)
        named = {name: values.astype("f8") for name, values in self.log_probs().items()}
        others = {name: self.array(name) for name in ("advantages", "term_weights", "entropy", *OF_ROWS, *REWARDS, *VALUES)}
        named |= {name: values.astype("f8") for name, values in others.items() if values is not None}
        loss = self.loss_attributes | changed
        with np.errstate(all="ignore"):
            each = loss_terms(np, loss, named, mask)
        if each is None:
            return None
        each, count, apart = np.where(mask, sign * each, 0.0), mask.sum(1), 0.0
        if loss.get("kl_coef") and (share := loss.get("kl_share")) is not None:
            of_kl = penalty(np, "kl", loss, named)
            if of_kl is None:
                return None
            apart += share * loss["kl_coef"] * float((np.where(mask, of_kl, 0.0).sum(1) / np.maximum(count, 1)).mean())
        if loss.get("entropy_coef") and (share := loss.get("entropy_share")) is not None:
            if "entropy" not in named:
                return None
            apart -= share * loss["entropy_coef"] * float(named["entropy"][mask].mean()) if mask.any() else 0.0
        means, rows = each.sum(1)[count > 0] / count[count > 0], int((count > 0).sum())
        return Terms(float(each.sum()), float(means.sum()), float(np.abs(each).sum()), int(count.sum()), rows, apart)

    @cached_property
    def others(self) -> dict[str, Terms]:
        """Return `terms` of other formulas, by what they differ in. Those without a penalty begin with "no "."""
        if self.terms is None:
            return {}
        changes = other_settings(self.loss_attributes, moved=self.moved is not None and self.moved.any())
        made = {words: self.terms_with(**change) for words, change in changes.items()}
        return {words: terms for words, terms in made.items() if terms is not None}

    @property
    def loss_attributes(self) -> dict[str, Any]:
        """The recorded attributes of a loss: clips, correction, token or sequence mean."""
        own = f"{CONTEXT}loss."
        return {name.removeprefix(own): value for name, value in self.record.arguments.items() if name.startswith(own)}


Calls: TypeAlias = Sequence[RecordedCall]


@dataclass
class Answer(RuleOutcome):
    """What a law found. looked_at: rows, calls or steps that it could judge."""

    def violated(self, call: RecordedCall, words: str, row: int | None = None, size: float | None = None, side: str = "") -> None:
        """Add a finding in a call. row: of the call; None for the whole call or step. size: how far, in the law's unit."""
        place = {"dump": call.record.dump_id} | ({} if row is None else {"row": row})
        self.found.append(Finding(self.rule, words, place, side, size))

    def rows(self, call: RecordedCall, bad: Numbers, words: str, sizes: Numbers | None = None, side: str = "") -> None:
        """Look at all rows of a call, and add a finding for the first of those that are `bad`, bool [B]."""
        self.looked_at += len(bad)
        for row in bad.nonzero()[0][:1]:
            many = f" ({plural(int(bad.sum()), 'row')})" if bad.sum() > 1 else ""
            step = f"step {call.record.step}: " if call.is_loss and call.record.step is not None else ""
            size = None if sizes is None or not np.isfinite(sizes[row]) else float(sizes[row])
            self.violated(call, step + words + many, int(row), size, side)


@dataclass(frozen=True)
class RecordedLaw(Rule):
    """A law of recorded data. judge: gets one whole call, or, if `over_calls`, all trimmed calls."""

    judge: Callable[[Any, Answer], None] = field(kw_only=True)
    over_calls: bool = field(default=True, kw_only=True)
