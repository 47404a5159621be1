"""What a store holds, in a few figures: its dumps, its replays, and what failed last. For `actordbg status`."""

from __future__ import annotations

from dataclasses import dataclass

from actordbg.catalog.query import (
    Catalog,
    damaged_files,
    dump_bytes,
    dump_tally,
    dumps_by_trainer,
    list_own_replays,
    list_replays,
    select_dumps,
)


@dataclass(frozen=True)
class Holdings:
    """dumps: how many; in_packs of them lie in packs. newest: UTC time of the newest. never_replayed, failed: of dumps, by their
    last result. damaged: files that cannot be read. replays: of this user, and `other_replays` that commands ran by themselves.
    last: the newest one's id, with its status, inputs and passed ones. trainers: how many dumps are of each.
    """

    store: str
    dumps: int
    bytes: int
    in_packs: int
    newest: str | None
    never_replayed: int
    failed: int
    damaged: int
    replays: int
    other_replays: int
    trainers: dict[str, int]
    last: str | None = None
    last_status: str = ""
    last_at: str | None = None
    last_inputs: int = 0
    last_passed: int = 0


def holdings(catalog: Catalog) -> Holdings:
    """What the store of this catalog holds."""
    newest = select_dumps(catalog, order="newest", limit=1)
    own = list_own_replays(catalog)
    dumps, packed, fresh, failed = dump_tally(catalog)
    facts = Holdings(
        store=str(catalog.store.root),
        dumps=dumps,
        bytes=dump_bytes(catalog),
        in_packs=packed,
        newest=newest[0].timestamp if newest else None,
        never_replayed=fresh,
        failed=failed,
        damaged=len(damaged_files(catalog)),
        replays=len(own),
        other_replays=len(list_replays(catalog)) - len(own),
        trainers=dumps_by_trainer(catalog),
    )
    if not own:
        return facts
    last = own[0]
    found = {"last": last.replay_id, "last_status": last.status, "last_at": last.created_at}
    return Holdings(**(vars(facts) | found | {"last_inputs": last.inputs, "last_passed": last.passed}))
