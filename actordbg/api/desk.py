"""What each piece of work on a store begins with: settings, a selection of dumps, a plan, and what refuses it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from actordbg.actor.hub_model import looks_like_path
from actordbg.actor.model_code import require_consent
from actordbg.actor.rules import RuleHit
from actordbg.api import planning
from actordbg.api.client import Advance, Client
from actordbg.api.planning import DumpSelection
from actordbg.base.errors import ActordbgError, NothingToDo, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import LAST, plural
from actordbg.catalog.query import Catalog, get_replay, open_fresh
from actordbg.config.as_ran import as_ran, label
from actordbg.config.choices import is_local
from actordbg.config.consent import typed_again
from actordbg.config.replay_config import SETTINGS, ReplayConfig
from actordbg.config.sources import Asked, Settings, build_config
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.plan import Plan
from actordbg.replay.supervise import spec_and_owner
from actordbg.store.layout import Store
from actordbg.store.places import dump_id_of


@dataclass(frozen=True)
class Desk:
    """A store, the settings around it, and who asks."""

    store: Store
    settings: Settings
    client: Client

    def asked(self, flags: Mapping[str, Any]) -> Asked:
        """Build the configuration. Raises UnsafeInput for a model that ships code, without consent."""
        requested = build_config(self.settings, flags)
        require_consent(requested.config.model)
        if requested.sources:
            self.client.note(f"not from the command line: {requested.in_words}")
        return requested

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
        plan = planning.planned(self.store, config, chosen, self.command(name, chosen.where, config))
        self.skipped(plan.skipped)
        if not plan.spec.inputs:
            raise self.nothing(purpose or name, chosen.where)
        return plan

    def judged(self, name: str, flags: dict[str, Any], chosen: DumpSelection) -> tuple[Plan, str | None]:
        """Plan a replay that will be judged. Also return the model that the dumps recorded, if another one is replayed."""
        requested, plan, own = self.of_recorded_model(flags, lambda config: self.planned(name, config, chosen), judged=True)
        return planning.with_affordable_laws(plan, requested, flags), own

    def of_recorded_model(
        self, flags: dict[str, Any], planned: Callable[[ReplayConfig], Plan], *, judged: bool = False, ask: bool = True
    ) -> tuple[Asked, Plan, str | None]:
        """Plan a replay, of the model that the dumps recorded if the user, once asked, chooses it; else also return its name."""

        def made() -> tuple[Asked, Plan]:
            requested = self.asked(flags)
            return requested, planned(planning.to_judge(requested, flags) if judged else requested.config)

        requested, plan = made()
        given = planning.settings_given(requested, flags)
        own = None if "model" in given else planning.recorded_model(self.store, plan.spec)
        if (
            own is None
            or not ask
            or (looks_like_path(own) and not is_local(own))
            or (model := self.client.model_for(own)) is None
        ):
            return requested, plan, own
        flags["model"] = model
        return *made(), None

    def runnable(self, spec: ReplaySpec, *, announce: bool = True, minor: bool = True) -> list[RuleHit]:
        """Refuse a configuration that is known to fail, or whose trainer or model is missing. Returns the findings about it.

        announce, minor: whether and how to note them.
        """
        findings = planning.require_runnable(self.store, spec)
        for finding in findings if announce else ():
            self.client.note(f"{finding.severity}[{finding.id}]: {finding.message}", minor=minor)
        return findings

    def replay_named(self, catalog: Catalog, name: str) -> str:
        """Resolve a name to a replay id. For `last`, note which replay it is: a store may be shared."""
        row = get_replay(catalog, name)
        if name == LAST:
            what = f"{label(as_ran(row.config, row.resolved))}, {row.status}; {typed_again(row.command) or 'no command recorded'}"
            self.client.note(f"last is {row.replay_id}: {what}", minor=True)
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
        """Return the error that says why nothing was selected."""
        return NothingToDo(f"nothing to {purpose}: {planning.why_nothing(self.store, where)}", hint=self.client.select)

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
    def progress(self, label: str, total: int | None) -> Iterator[Advance]:
        """Report the progress of work that writes results. The catalog is up to date afterwards, even after Ctrl-C."""
        try:
            with self.client.progress(label, total) as advance:
                yield advance
        finally:
            self.settle()

    def settle(self) -> None:
        """Index new results. If that fails, note it; whoever reads them next will index them."""
        from actordbg.catalog.indexer import refresh

        try:
            refresh(self.store)
        except (ActordbgError, OSError) as problem:  # a locked catalog, a full disk: the results are in their files
            self.client.note(f"the catalog could not be updated ({problem}); the results are in {self.store.root}")
