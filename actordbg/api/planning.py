"""Turn a selection of dumps and settings into the plan of a replay, and refuse what cannot run. Commands and the API share it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actordbg.actor.engine_client import EngineClient
from actordbg.actor.hub_model import find_model, versions_of
from actordbg.actor.rules import RuleHit, check_config, find_trainer, refuse_hits
from actordbg.api.client import Advance
from actordbg.base.errors import Unsupported, UsageError
from actordbg.base.units import MOST_NAMED, plural
from actordbg.catalog import selections
from actordbg.catalog.query import count_dumps, dump_extent, open_fresh, select_dumps
from actordbg.config.replay_config import ENDPOINT, USUAL_LAWS, ReplayConfig
from actordbg.config.sources import Asked
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.launch import surrounding_launcher
from actordbg.replay.plan import DEFAULT_SHUFFLE_SEED, Plan, affordable_laws, make_plan
from actordbg.replay.selection import PICKLES, defaults_of, require_one_trainer, rows_of
from actordbg.replay.supervise import Progress
from actordbg.store.layout import Store


@dataclass(frozen=True)
class DumpSelection:
    """Which dumps to replay: a condition or files, at most `max_inputs` of them in this order (time, length or shuffle).

    failed: only dumps that did not pass last time. longest, diverse: the N longest, or the N most different.
    """

    where: str | None = None
    files: tuple[Path, ...] = ()
    order: str = "time"
    max_inputs: int | None = None
    seed: int = DEFAULT_SHUFFLE_SEED
    failed: bool = False
    longest: int | None = None
    diverse: int | None = None

    def sampled(self, count: int) -> DumpSelection:
        """Return a diverse sample, unless something selects particular dumps."""
        particular = self.longest or self.diverse or self.files
        return self if particular else replace(self, diverse=self.max_inputs or count)

    def narrowed(self, store: Store) -> DumpSelection:
        """Make `failed`, `longest` and `diverse` part of `where`, so that a record's selection can be repeated.

        Raises UsageError for two of these.
        """
        given = {name: count for name in _PRESETS if (count := getattr(self, name)) is not None}
        if (given or self.failed) and (len(given) > 1 or self.files):
            words = [f"--{name}" for name in (*["input-file"] * bool(self.files), *given)]
            raise UsageError(f"{' and '.join(words or ['--failed'])} cannot be combined", hint="use only one")
        where = selections.joined(self.where, selections.FAILED) if self.failed else self.where
        for name, count in given.items():
            where = getattr(selections, name)(open_fresh(store.require(), where), where, count)
        return replace(self, where=where, failed=False, longest=None, diverse=None)

    def imported(self, store: Store) -> tuple[DumpSelection, dict[Path, Path]]:
        """Import each pickle among the files as a dump, without unpickling it. Also return each pickle's dump.

        Creates a missing store. Raises UsageError for a pickle that does not exist.
        """
        pickles = [path for path in self.files if path.suffix in PICKLES]
        if not pickles:
            return self, {}
        from actordbg.dumps.importer import dumps_of

        for path in pickles:
            if not path.is_file():
                raise UsageError(f"--input-file {path} is not a file", hint="pass an existing pickle")
        if store.exists():
            store.require_writable()
        dumps = dict(zip(pickles, dumps_of(store, pickles), strict=True))
        return replace(self, files=tuple(dumps.get(path, path) for path in self.files)), dumps


_PRESETS = ("longest", "diverse")


def planned(store: Store, config: ReplayConfig, chosen: DumpSelection, command: str) -> Plan:
    """Plan the replay of the selected dumps. command: recorded with it."""
    enough = None if config.align == "rank" else chosen.max_inputs  # the number of rows in whole calls is not known in advance
    rows = rows_of(store, chosen.where, chosen.files, chosen.order, enough)
    plan = make_plan(
        rows,
        config,
        order=chosen.order,
        max_inputs=chosen.max_inputs,
        shuffle_seed=chosen.seed,
        where=chosen.where,
        command=command,
        versions=versions_of(config.model),
    )
    ids = {item.dump_id for item in plan.spec.inputs}
    require_one_trainer((row for row in rows if row.dump_id in ids), [config])
    return plan


def to_judge(requested: Asked, flags: Mapping[str, Any]) -> ReplayConfig:
    """Add what a judgement needs: saved outputs, and, unless set otherwise, saved gradients and laws."""
    config, given = requested.config, settings_given(requested, flags)
    gradients = config.keep_gradients if "keep_gradients" in given else config.backward is not False
    laws = config.laws if "laws" in given else USUAL_LAWS
    return replace(config, keep_tensors=True, keep_gradients=gradients, laws=laws, truth=None, vary=None)


def with_affordable_laws(plan: Plan, requested: Asked, flags: Mapping[str, Any]) -> Plan:
    """Check the laws of as many inputs as take about as long as the replay, unless their number is set."""
    if "laws" in settings_given(requested, flags):
        return plan
    config = replace(plan.spec.config, laws=affordable_laws(plan.spec.inputs))
    return replace(plan, spec=replace(plan.spec, config=config))


def settings_given(requested: Asked, flags: Mapping[str, Any]) -> Collection[str]:
    """Return the names of the settings that have a value from anywhere."""
    return flags.keys() | requested.sources.keys()


def recorded_model(store: Store, spec: ReplaySpec) -> str | None:
    """Return the model that all dumps of a plan recorded; None if they differ or recorded none."""
    ids = ", ".join(f"'{item.dump_id}'" for item in spec.inputs[:MOST_NAMED])
    condition = f"dump_id in ({ids}) and model_name is not null"
    names = {row.model_name for row in select_dumps(open_fresh(store), condition)} if ids else set()
    return names.pop() if len(names) == 1 else None


def require_runnable(store: Store, spec: ReplaySpec) -> list[RuleHit]:
    """Refuse a configuration that is known to fail, or whose trainer or model is missing. Returns the findings about it."""
    defaults = defaults_of(store.root, spec.inputs)
    findings = check_config(spec.config, defaults=defaults)
    refuse_hits(findings)
    find_trainer(spec.config, defaults)
    find_model(spec.config.model)
    if spec.config.backend == ENDPOINT:
        EngineClient(spec.config.url or "", spec.config.served_model, min(spec.config.timeout_s, 30.0)).connect()
    return findings


def launched(settings: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return settings plus those implied by a launcher around this process; None for its ranks that only exit.

    Under `deepspeed -m actordbg replay ...` a command runs once per rank. Rank 0 supervises, and starts as many workers as the
    launcher started processes, with the deepspeed backend if that launcher is deepspeed's.
    """
    flags, launcher = dict(settings), surrounding_launcher(environment)
    if launcher is None:
        return flags
    if launcher.local_size < launcher.world_size:
        raise Unsupported(
            "a replay starts its own ranks, but this launcher started processes on more than one machine",
            hint="drop the launcher: run `actordbg replay --nproc N`, with --engine ray for several machines",
        )
    if launcher.rank > 0:
        return None
    flags["nproc"] = flags.get("nproc") or launcher.world_size
    if launcher.deepspeed:
        flags["backend"] = flags.get("backend") or "deepspeed"
    return flags


def why_nothing(store: Store, where: str | None) -> str:
    """Explain why no dump was selected, in terms of what the store holds."""
    count, shortest, longest = dump_extent(store)
    if not count:
        return "the store has no dumps: add some with `actordbg dump enable`, `dump import` or `dump create`"
    if where and (matching := count_dumps(open_fresh(store, where), where)):
        return f"{matching:,} dumps match {where}, but none can be replayed"
    if where:
        return selections.no_match(open_fresh(store), where)
    return f"no dump can be replayed; the store has {plural(count, 'dump')} with seq_len {shortest} to {longest}"


def counting(advance: Advance) -> Callable[[Progress], None]:
    """Return a handler of a replay's events that advances by each result and notes the current input."""

    def on_event(event: Progress) -> None:
        if event.kind == "attempt":
            advance(0, note=f"restarting: {event.text[:100]}" if event.text else "starting the workers")
        elif event.kind in ("start", "leaving"):
            advance(0, note=event.text)
        elif event.kind == "result":
            advance(1, note="" if event.text == "passed" else f"last: {event.text}")

    return on_event
