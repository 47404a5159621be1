"""The catalog's columns: each is declared here, once, with a text below it that says what it holds.

A class is a row. With `table="..."` it is a row of that table. Everything else that knows columns derives from these classes:

    statements, dump_rows   what is inserted and upserted, and from where in a record each value comes (`of`)
    query                   the lists of its SELECTs. A row of a query is an instance of its class: `DumpRow`, `ReplayRow`
    tables                  what `--where` knows
    models                  the SQLModel classes, with keys, references and indexes, for `Session` and `select`
    docs/generate.py        the reference page, and `head.sql`, the schema of a new catalog

They are plain classes, since importing SQLModel takes longer than all of `dump ls`. A reader of rows sees the same class as mypy.

The catalog is a cache: each row is derived from a file of the store, and `actordbg index --rebuild` rebuilds all of them.

    caller ──< dump           one row for each dump file with a readable header; `caller` has the columns that many calls share
                └── last_result  the newest result of that dump, so that `--where "status='failed'"` needs no search
                    verdict      its last verdict, from everything that judged it (`dump_verdicts`)
    replay ──< result         one row for each dump that a replay reached
           └──< comparison    distance of a result from another one, by `compare`
    comparison_run            one row for each file of `compare`; its dumps are in `comparison`
    law_answer                verdicts of the laws on a dump in a replay
    lint_answer               verdicts of the laws of recorded data on a dump
    damaged_file              invalid dump files, with the reason
    scanned_folder, read_file bookkeeping: what need not be read again
    unjudged                  bookkeeping: dumps whose verdict is folded again at the end of a refresh

A result may outlive its dump: pruning dumps keeps their results. Files that no query asks for (matrices, noise floors, memory
recordings) have no rows.

Example: `for name, column in Dump.columns.items(): print(name, column.type.__name__, Dump.meanings()[name])`
"""

# Annotations are read below as objects, so `from __future__ import annotations` is left out.
import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin

from actordbg.config.replay_config import SETTINGS


class Column(NamedTuple):
    """A column. type: int, float, str, bool or dict (stored as JSON). optional: it may be NULL.

    key: it is in the primary key. references: a column of another table, and what happens here if that row goes.
    of: where a dump's value comes from: an object of its record, `COMPUTED` or `JUDGED`; "" is the record itself.
    """

    type: type
    optional: bool
    key: bool = False
    references: tuple[str, str | None] | None = None
    of: str = ""


COMPUTED, JUDGED = "computed", "judged"
T = TypeVar("T")
RowType = TypeVar("RowType", bound="Row")
Key = Annotated[str, {"key": True}]
Number = Annotated[int | None, {"key": True}]
"""A number that SQLite gives."""
Argument = Annotated[bool | None, {"of": "arguments"}]
ActorFact = Annotated[str | None, {"of": "actor"}]
Version = Annotated[str | None, {"of": "versions"}]
Computed = Annotated[T, {"of": COMPUTED}]
Judged = Annotated[str | None, {"of": JUDGED}]


class Row:
    """A row, with its columns as attributes. `columns` of its class describes them, the inherited ones first."""

    table: ClassVar[str] = ""
    columns: ClassVar[dict[str, Column]] = {}

    def __init_subclass__(cls, table: str = "") -> None:
        cls.table, cls.columns = table, {}
        for declaring in cls.__mro__[-2::-1]:
            if declaring is not Row:
                declared = inspect.get_annotations(declaring, eval_str=True)
                cls.columns |= {name: _column(annotation) for name, annotation in declared.items()}

    @classmethod
    @cache
    def meanings(cls) -> dict[str, str]:
        """Return what each column holds: the text below its declaration, read from the source, as pydantic does.

        Only the reference pages and `dump columns` ask for it.
        """
        texts = {setting.stored: setting.column for setting in SETTINGS.values()}
        for declaring in cls.__mro__[-2::-1]:
            texts |= _texts_of(declaring.__module__)[declaring.__name__]
        return texts

    def __init__(self, columns: dict[str, Any]) -> None:
        self.__dict__ = columns

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.columns)})"


@cache
def _texts_of(module: str) -> dict[str, dict[str, str]]:
    """Read the texts below the attributes of each class of a module: its source is parsed once for all of them."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            texts = found.setdefault(node.name, {})
            for column, below in pairwise(node.body):
                if isinstance(column, ast.AnnAssign) and isinstance(column.target, ast.Name) and isinstance(below, ast.Expr):
                    texts[column.target.id] = ast.literal_eval(below.value)
    return found


def _column(annotation: Any) -> Column:
    """Read a declaration: a type, and what `Annotated` says besides."""
    marks: dict[str, Any] = getattr(annotation, "__metadata__", ({},))[0]
    plain = annotation.__origin__ if marks else annotation
    optional = NoneType in get_args(plain)
    kind = get_args(plain)[0] if optional else plain
    return Column(get_origin(kind) or kind, optional, **marks)


class CallerColumns(Row):
    """Columns that the calls of a caller share."""

    run: str
    """the training run"""
    rank: int
    """global rank of the process that captured it"""
    source: str
    """capture, import or create"""
    point: str
    """capture point: forward, the default of every selection, or loss (`dump enable --calls`)"""
    trainer: ActorFact
    """package of the trainer whose call it is; NULL for a synthetic input"""
    adapter: ActorFact
    """adapter that read the call; NULL if none was needed"""
    function: ActorFact
    """function that was recorded, module:name; NULL for a synthetic input"""
    role: str | None
    """what the actor was: policy, reference, ema, sft, ..."""
    world_size: int | None
    """processes in the run"""
    local_rank: int | None
    """rank within its host"""
    host: str | None
    """host name"""
    pid: int | None
    """process id"""
    instance: str | None
    """distinguishes several actors in one process"""
    training: bool | None
    """whether the module was in training mode"""
    grad_enabled: bool | None
    """whether gradients were enabled"""
    packing_samples: bool | None
    """whether the actor packs samples"""
    autocast_dtype: str | None
    """dtype of the autocast context; NULL without one"""
    temperature: float | None
    """the actor's sampling temperature"""
    model_name: str | None
    """name or path of the model"""
    model_dtype: str | None
    """dtype of the model's parameters"""
    replayable: bool
    """whether everything the call needs was stored"""
    return_output: Argument
    """the call's return_output"""
    return_logprobs: Argument
    """the call's return_logprobs"""
    return_entropy: Argument
    """the call's return_entropy"""
    allgather_logits: Argument
    """the call's allgather_logits"""
    with_outputs: Computed[bool]
    """whether the call's outputs were also recorded"""
    openrlhf_version: Version
    """version of openrlhf in the run"""
    torch_version: Version
    """version of torch in the run"""
    transformers_version: Version
    """version of transformers in the run"""
    deepspeed_version: Version
    """version of deepspeed in the run"""
    pinned: bool
    """whether it is protected from rotation"""
    triggered: str | None
    """the trigger that kept it: nan, exception, oom, slow, logprobs, before; NULL if none"""
    recovered: str | None
    """in_flight or recent: recovered from the buffer of a process that died; NULL otherwise"""
    with_rng: Computed[bool]
    """whether the RNG state was also recorded"""


class Caller(CallerColumns, table="caller"):
    """A caller of dumps: run, process, actor, arguments, versions. One row for each combination that dumps have.

    Most dumps of a rank share a caller. In each dump's row, these columns would take more space than all others.
    """

    id: Number
    """number of the row"""


class DumpColumns(Row):
    """Columns that differ from dump to dump."""

    dump_id: Key
    """unique name of the dump; begins with its time"""
    timestamp: int
    """UTC time of the call, 2025-06-19T05:26:08.430740Z, in microseconds since 1970"""
    batch_size: int
    """B of sequences [B, S]"""
    seq_len: int
    """S of sequences [B, S], padding included"""
    tokens: int
    """real tokens: sum of attention_mask, B*S without one"""
    padding: Computed[int]
    """padded positions: B*S - tokens"""
    action_len: int | None
    """A of action_mask [B, A]; NULL without one"""
    step: int | None
    """global step of the DeepSpeed engine at the call"""
    call_index: int | None
    """number of calls that this process captured before"""
    bytes: Computed[int]
    """size of the dump file in bytes; for a packed dump, its share of the pack"""
    pack: Computed[str | None]
    """the pack file that holds it, below the store; NULL for a dump file"""
    verdict: Judged
    """last verdict: RIGHT, WRONG, FAILED or NOT CHECKED; NULL if nothing judged it"""
    broken: Judged
    """what made it WRONG or FAILED: laws, identity, local, ranks, truth, recorded, failed, crashed, hung; NULL otherwise"""
    theirs: Judged
    """last verdict by imported or downloaded replays, which do not count for `verdict`; NULL without any"""


class Dump(DumpColumns, table="dump"):
    """A captured `Actor.forward` call; its tensors lie in `dumps/<run>/rank<rank, 4 digits>/<dump_id>.safetensors.zst`.

    The other columns are those of its `caller`.
    """

    caller: Annotated[int, {"references": ("caller.id", None)}]
    """the caller, which has the shared columns"""
    last_result: Annotated[int | None, {"references": ("result.id", "SET NULL")}]
    """newest result of this dump; that of a truth or a variation only if there is no other"""


class DumpAndCaller(CallerColumns, DumpColumns, table="dump_and_caller"):
    """A view for your own queries: each dump with the columns of its caller, such as `rank` and `run`."""


class DumpRow(CallerColumns, DumpColumns):
    """A dump as `query` returns it, with its last result, if any: `status` to `model`. path: its place below the store.

    timestamp: UTC. bytes: size of the file, or its share of the pack. forward_s, backward_s: seconds. peak_memory: bytes.
    """

    timestamp: str  # type: ignore[assignment]
    status: str | None
    error: str | None
    signature: str | None
    forward_s: float | None
    backward_s: float | None
    peak_memory: int | None
    replay: str | None
    model: str | None
    path: str
