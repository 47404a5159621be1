"""The columns of replays and of what was found about them, and those that the indexer keeps for itself (see `columns`)."""

# As in `columns`, annotations are read as objects.
from typing import Annotated, Any

from actordbg.catalog.columns import Column, Key, Number, Row
from actordbg.config.replay_config import SETTINGS
from actordbg.records.replay_record import ResultRecord

OF_REPLAY = {"references": ("replay.replay_id", "CASCADE")}


class ReplayColumns(Row):
    """Columns of a replay besides its settings."""

    replay_id: Key
    """unique name of the replay: its folder under replays/"""
    created_at: str
    """UTC time of its start"""
    finished_at: str | None
    """UTC time of its end; NULL while it runs, or if it was killed"""
    status: str
    """complete, interrupted, failed, or unfinished"""
    inputs: int
    """dumps to replay"""
    selection: str | None
    """the --where expression that selected them"""
    ordering: str | None
    """their order: time, length or shuffled"""
    command: str | None
    """the command line"""
    origin: str | None
    """who wrote it, if it was imported or downloaded; NULL if it was made in this store"""
    configuration: str | None
    """digest of the settings that change its numbers, as they ran; NULL for truths and variations, which judge nothing"""
    config: dict[str, Any]
    """the configuration as requested"""
    resolved: dict[str, Any] | None
    """the configuration as the workers reported it; NULL before that"""
    versions: dict[str, Any]
    """versions of the packages that ran it"""


class Replay(ReplayColumns, table="replay"):
    """A replay, with a column for each setting: the value that its workers reported, else the requested value."""


for _each in SETTINGS.values():
    Replay.columns[_each.stored] = Column(_each.kind, optional=True)
"""A catalog that lacks the column of a setting is rebuilt (`actordbg.catalog.migrate`)."""


class Result(Row, ResultRecord, table="result"):
    """Result of a dump in a replay: times in seconds, memory in bytes, log-probs in nats. Its columns are the record's fields."""

    replay_id: Annotated[str, OF_REPLAY]
    """the replay"""
    id: Number
    """number of the row"""


class LintAnswer(Row, table="lint_answer"):
    """Verdict of a law of recorded data on a dump, by `lint` or `check`."""

    lint_id: Key
    """its file under lints/"""
    dump_id: Key
    """the dump"""
    law: Key
    """the law: placeholder, ratio, ..."""
    created_at: str
    """UTC time of the lint"""
    verdict: str
    """broken, or kept where an earlier lint says broken"""
    looked_at: int
    """how often the lint judged the law"""


class DamagedFile(Row, table="damaged_file"):
    """A file of the store that could not be indexed. Code `odd-file`: a link, a FIFO, an invalid name.

    Read again when its folder changes; on every refresh if it has a newer format or is unreadable.
    """

    path: Key
    """path below the store"""
    code: str
    """corrupt-dump: broken; newer-format; store: unreadable, or in the wrong place"""
    reason: str
    """what is wrong with it"""
    folder: str
    """its folder below the store"""


class ScannedFolder(Row, table="scanned_folder"):
    """A folder whose listing is known; it is listed again when its modification time differs."""

    path: Key
    """path below the store"""
    mtime_ns: int
    """its modification time when it was listed; -1 if too fresh to rely on"""


class Unjudged(Row, table="unjudged"):
    """A dump with news since its verdict was folded."""

    dump_id: Key
    """the dump"""


class ReadFile(Row, table="read_file"):
    """A file of a replay, a comparison, a noise floor or a matrix, and its state when it was read."""

    path: Key
    """path below the store"""
    replay_id: str
    """its replay; empty for other files"""
    size: int
    """its size when it was read"""
    mtime_ns: int
    """its modification time when it was read; -1 if too fresh to rely on"""
    offset: int
    """where reading of a journal continues: after its last whole line"""


class ComparisonRun(Row, table="comparison_run"):
    """A run of `actordbg compare A B`: its file under comparisons/, and its result over all dumps."""

    comparison_id: Key
    """its file under comparisons/"""
    created_at: str
    """UTC time"""
    replay_id: str
    """A, the replay that was judged; it may be gone"""
    against: str
    """B: golden, or the other replay's id; it may be gone"""
    against_kind: str
    """what B is: replay, truth or golden"""
    verdict: str
    """match, within-noise, mismatch or not-compared"""
    dumps: int
    """dumps of either side"""
    compared: int
    """dumps that were compared"""
    mismatches: int
    """dumps that are a mismatch"""
    within_noise: int
    """dumps that are outside the thresholds and inside the noise"""
    worst_dump: str | None
    """the worst dump; NULL if none was compared"""
    max_abs: float | None
    """largest absolute difference of a log-prob, nats; NULL if not finite"""
    mean_abs: float | None
    """mean absolute difference over all tokens, nats; NULL if not finite"""
    clip_share: float | None
    """share of all tokens whose ratio is outside 0.8 to 1.2"""
    grad_norm_rel: float | None
    """largest relative difference of a gradient norm"""
    label: str | None
    """A's configuration in words"""
    against_label: str | None
    """B's configuration in words"""
    thresholds_from: str | None
    """where the thresholds are from"""
    thresholds: dict[str, Any]
    """the thresholds by measure"""
    noise_id: str | None
    """the noise floor that was applied; NULL without one"""
    reasons: str | None
    """reasons for the verdict as a whole, in words"""
    rounding_id: str | None
    """the replay whose rounding set the limits; NULL for flat ones"""
    origin: str | None
    """who wrote it, if it was imported or downloaded; NULL if it was made in this store"""
    excludes: dict[str, Any]
    """by fault, the smallest size that would have been a mismatch"""


class Comparison(Row, table="comparison"):
    """Distance of a replay's result for a dump from another replay or the recorded outputs, by `compare`."""

    comparison_id: Key
    """its file under comparisons/"""
    dump_id: Key
    """the dump"""
    replay_id: str
    """the replay; it may be gone"""
    against: str
    """golden: what the run itself recorded; else the other replay's id"""
    max_abs: float | None
    """largest absolute difference, nats; NULL if not finite"""
    created_at: str
    """UTC time of the comparison"""
    verdict: str
    """match, within-noise, mismatch or not-compared"""
    clip_share: float | None
    """share of tokens whose ratio is outside 0.8 to 1.2"""
    reasons: str | None
    """what made it a mismatch, or why it was not compared, in words"""


class LawAnswer(Row, table="law_answer"):
    """Verdict of a law on a dump in a replay."""

    replay_id: Annotated[str, {"key": True, **OF_REPLAY}]
    """the replay"""
    dump_id: Key
    """the dump"""
    law: Key
    """the law: rerun, neighbour, padding, ...; also identity and local (`locate`), ranks (`--align same`)"""
    verdict: str
    """kept, within-rounding, broken, nondeterministic, not-checked, or raised: checking it raised an error"""


class ReplayRow(ReplayColumns):
    """A replay as `query` returns it, with its inputs counted by result. `config` and `resolved` hold its settings."""

    passed: int
    failed: int
    crashed: int
    hung: int
