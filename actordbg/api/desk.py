"""What each piece of work on a store begins with: settings, a selection of dumps, a plan, and what refuses it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actordbg.actor.hub_model import looks_like_path, versions_of
from actordbg.actor.model_code import require_consent
from actordbg.actor.models import require_model
from actordbg.actor.rules import KnownFailure, check_config, find_trainer, refusal_of, refuse_hits
from actordbg.api.client import Advance, Client
from actordbg.base.errors import ActordbgError, NothingToDo, Unsupported, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import LAST, MOST_NAMED, plural
from actordbg.catalog import selections
from actordbg.catalog.query import Catalog, count_dumps, dump_extent, get_replay, open_fresh, select_dumps
from actordbg.catalog.where import of_dumps
from actordbg.config.as_ran import as_ran, label
from actordbg.config.choices import gather_facts, is_local, recorded_backend
from actordbg.config.consent import typed_again
from actordbg.config.replay_config import ENDPOINT, SETTINGS, USUAL_LAWS, ReplayConfig
from actordbg.config.sources import Asked, Settings, build_config
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.replay_record import ReplayInput, ReplaySpec
from actordbg.replay.launch import surrounding_launcher
from actordbg.replay.plan import DEFAULT_SHUFFLE_SEED, Plan, affordable_laws, make_plan
from actordbg.replay.selection import PICKLES, defaults_of, require_one_trainer, rows_of
from actordbg.replay.supervise import Progress, spec_and_owner
from actordbg.store.layout import Store
from actordbg.store.places import dump_id_of

if TYPE_CHECKING:
    from actordbg.measure.log_lines import TrainLog


@dataclass(frozen=True)
class Desk:
    """A store, the settings around it, and who asks."""

    store: Store
    settings: Settings
    client: Client

    def asked(self, flags: Mapping[str, Any], record: DumpRecord | None = None) -> Asked:
        """Build the configuration. Raises UnsafeInput for a model that ships code, without consent.

        record: of the first dump; its backend applies if no backend is set. Where rules refuse that, the plain one applies.
        """
        recorded = recorded_backend(record, gather_facts())
        requested = build_config(self.settings, flags, recorded)
        as_recorded = bool(recorded) and requested.sources.get("backend") == recorded["backend"][1]
        if as_recorded and (refusal := refusal_of(requested.config, record)):
            with contextlib.suppress(UsageError):  # a setting that only DeepSpeed has is set
                plain = build_config(self.settings, flags, {"backend": ("plain", refusal)})
                requested = requested if refusal_of(plain.config, record) else plain
        require_consent(requested.config.model)
        if requested.sources:
            self.client.note(f"not from the command line: {requested.in_words}")
        return requested

    def first_record(self, chosen: DumpSelection) -> DumpRecord | None:
        """Return the record of the earliest dump of a resolved selection; None without one."""
        return defaults_of(self.store.root, rows_of(self.store, chosen.where, chosen.files[:1], "time", 1)[:1])

    def selected(self, chosen: DumpSelection, *, writes: bool = True) -> DumpSelection:
        """Resolve a selection to a condition or files. Pickles are imported as dumps, without unpickling, into a store that is
        made if there is none. writes: refuse a read-only store now, because results will be written."""
        chosen, dumps = chosen.narrowed(self.store).imported(self.store)
        if not dumps:
            (self.store.require_writable if writes else self.store.require)()
        for path, dump in dumps.items():
            self.client.note(f"{path} is dump {dump_id_of(str(dump))} of {self.store.root}")
        return chosen

    def planned(self, name: str, config: ReplayConfig, chosen: DumpSelection, purpose: str = "") -> Plan:
        """Plan the replay of a resolved selection. name: the command. Raises NothingToDo if nothing is left to `purpose`."""
        plan = planned(self.store, config, chosen, self.command(name, chosen.where, config))
        self.skipped(plan.skipped)
        if not plan.spec.inputs:
            raise self.nothing(purpose or name, chosen.where)
        return plan

    def judged(self, name: str, flags: dict[str, Any], chosen: DumpSelection) -> tuple[Plan, str | None]:
        """Plan a replay that will be judged. Also return the model that the dumps recorded, if another one is replayed."""
        requested, plan, own = self.of_recorded_model(name, flags, chosen, judged=True)
        return with_affordable_laws(plan, requested, flags), own

    def of_recorded_model(
        self, name: str, flags: dict[str, Any], chosen: DumpSelection, *, judged: bool = False, ask: bool = True
    ) -> tuple[Asked, Plan, str | None]:
        """Plan the replay of a resolved selection, of the model that the dumps recorded if the user chooses it when asked.

        Else also return that model's name.
        """

        record = self.first_record(chosen)

        def made() -> tuple[Asked, Plan]:
            requested = self.asked(flags, record)
            return requested, self.planned(name, to_judge(requested, flags) if judged else requested.config, chosen)

        requested, plan = made()
        given = settings_given(requested, flags)
        own = None if "model" in given else recorded_model(self.store, plan.spec)
        if (
            own is None
            or not ask
            or (looks_like_path(own) and not is_local(own))
            or (model := self.client.model_for(own)) is None
        ):
            return requested, plan, own
        flags["model"] = model
        return *made(), None

    def runnable(
        self, config: ReplayConfig, inputs: Sequence[ReplayInput], *, announce: bool = True, minor: bool = True
    ) -> list[KnownFailure]:
        """Refuse a configuration that is known to fail, or whose trainer or model is missing. Returns the findings about it.

        announce, minor: whether and how to note them.
        """
        defaults = defaults_of(self.store.root, inputs)
        findings = check_config(config, defaults=defaults)
        refuse_hits(findings)
        find_trainer(config, defaults)
        require_model(config.model, config.num_layers)
        if config.backend == ENDPOINT:
            from actordbg.actor.engine_client import EngineClient  # it imports ssl

            EngineClient(config.url or "", config.served_model, min(config.timeout_s, 30.0)).connect()
        for finding in findings if announce else ():
            self.client.note(f"{finding.severity}[{finding.id}]: {finding.message}", minor=minor)
        return findings

    def replay_named(self, catalog: Catalog, name: str) -> str:
        """Resolve a name to a replay id. For `last`, note which replay it is: a store may be shared."""
        row = get_replay(catalog, name)
        if name == LAST:
            command = typed_again(row.command) or "no command recorded"
            ran = label(as_ran(row.config, row.resolved))
            self.client.note(f"last is {row.replay_id}: {ran}, {row.status}; {command}", minor=True)
        return row.replay_id

    def replayed(self, name: str) -> ReplaySpec:
        """Read a replay's specification. Raises UsageError for a truth, Refused for what another user wrote."""
        spec, owner = spec_and_owner(self.store, self.replay_named(open_fresh(self.store), name))
        if spec.config.truth is not None:
            raise UsageError(f"replay {spec.replay_id} is itself a truth", hint="name a replay of the configuration to check")
        self.client.approve(f"replay {spec.replay_id}, whose model is {spec.config.model!r}", owner)
        require_consent(spec.config.model, self.store.models)
        return spec

    def skipped(self, skipped: Mapping[str, int]) -> None:
        """Note how many dumps are skipped, and why."""
        for reason, count in skipped.items():
            self.client.note(f"skipped {plural(count, 'dump')}: {reason}")

    def nothing(self, purpose: str, where: str | None) -> NothingToDo:
        """Return the error that says why nothing was selected, in terms of what the store holds."""
        count, shortest, longest = dump_extent(self.store)
        hint = self.client.widen if where else self.client.select
        only, reader = ("", "") if count else selections.without_dumps(open_fresh(self.store))
        if only and not (where and reader == f"actordbg {purpose}"):
            why, hint = f"the store has no dumps, only {only}", f"`{reader}` reads them"
        elif not count and not only:
            why, hint = "the store has no dumps", "add some with `actordbg dump enable`, `dump import` or `dump create`"
        elif where and (matching := count_dumps(self.store, where)):
            why = f"{matching:,} dumps match {where}, but none can be replayed"
        elif where:
            why = selections.no_match(open_fresh(self.store), where)
        else:
            why = f"no dump can be replayed; the store has {plural(count, 'dump')} with seq_len {shortest} to {longest}"
        return NothingToDo(f"nothing to {purpose}: {why}", hint=hint)

    def command(self, name: str, where: str | None, config: ReplayConfig, axes: Mapping[str, str] | None = None) -> str:
        """Return what a record keeps as its command: as typed, else the command line that does the same."""
        if self.client.command is not None:
            return self.client.command
        listed = dict(axes or {})
        options = [word for key, setting in SETTINGS.items() if name in setting.commands and key not in listed
                   for word in setting.options(getattr(config, key))]  # fmt: skip
        options += [word for key, values in listed.items() for word in (SETTINGS[key].flag, values)]
        return " ".join(map(in_shell, ["actordbg", name, *(["--where", where] if where else []), *options]))

    @contextlib.contextmanager
    def progress(self, label: str, total: int | None, resume: str = "") -> Iterator[Advance]:
        """Report the progress of work that writes results. The catalog is up to date afterwards, even after Ctrl-C.

        resume: the command that continues; with it, Ctrl-C ends the block if the client wants to answer with what there is.
        """
        try:
            with self.client.progress(label, total) as advance:
                yield advance
        except KeyboardInterrupt:
            if not (resume and self.client.stopped(f"interrupted; results so far are kept, run `{resume}` to continue")):
                raise
        finally:
            self.settle()

    def settle(self) -> None:
        """Index new results. If that fails, note it; whoever reads them next will index them."""
        from actordbg.catalog.indexer import refresh

        try:
            refresh(self.store)
        except (ActordbgError, OSError) as problem:  # a locked catalog, a full disk: the results are in their files
            self.client.note(f"the catalog could not be updated ({problem}); the results are in {self.store.root}")


@dataclass(frozen=True)
class DumpSelection:
    """Which dumps to replay: a condition or files, at most `max_inputs` of them in this order (time, length or shuffle).

    failed: only dumps whose last verdict is WRONG or FAILED. longest, diverse: the N longest, or the N most different.
    with_losses: the same condition, and losses, which are not replayed; None for `where` itself. logs: of the run, whose curves
    are judged too.
    """

    where: str | None = None
    files: tuple[Path, ...] = ()
    order: str = "time"
    max_inputs: int | None = None
    seed: int = DEFAULT_SHUFFLE_SEED
    failed: bool = False
    longest: int | None = None
    diverse: int | None = None
    with_losses: str | None = None
    logs: Sequence[TrainLog] = ()

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
            names = ["input-file", *given] if self.files else list(given) or ["failed"]
            words = " and ".join(f"--{name}" for name in names)
            raise UsageError(f"{words} cannot be combined", hint="use only one")
        where = selections.joined(self.where, selections.BAD) if self.failed else self.where
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
    ids = [item.dump_id for item in spec.inputs[:MOST_NAMED]]
    names = {row.model_name for row in select_dumps(store, of_dumps(ids)) if row.model_name is not None} if ids else set()
    return names.pop() if len(names) == 1 else None


def launched(settings: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return settings plus those implied by a launcher around this process; None for its ranks that only exit.

    Under `deepspeed -m actordbg replay ...` a command runs once per rank. Rank 0 supervises, and starts as many workers as the
    launcher started processes, with the deepspeed backend if that launcher is deepspeed's.
    """
    flags, launcher = dict(settings), surrounding_launcher(environment)
    if launcher is None:
        return flags
    rank, world_size, local_size, by_deepspeed = launcher
    if local_size < world_size:
        raise Unsupported(
            "a replay starts its own ranks, but this launcher started processes on more than one machine",
            hint="drop the launcher: run `actordbg replay --nproc N`, with --engine ray for several machines",
        )
    if rank > 0:
        return None
    flags["nproc"] = flags.get("nproc") or world_size
    if by_deepspeed:
        flags["backend"] = flags.get("backend") or "deepspeed"
    return flags


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
