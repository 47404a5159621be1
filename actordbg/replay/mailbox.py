"""How a group of workers that has done its work is told what comes next: a file beside its last work order.

    store/replays/<id>/work-0-1.json      the work order (`stay`: do not leave when it is done)
    store/replays/<id>/next-0-1.json      appears later: {"work": "/.../replays/<next id>/work-0-1.json"}, or null: leave

Every order has a mailbox of its own, which is written once, so there is nothing to clear and nothing to miss. Standard library
only.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from actordbg.formats.store_files import atomic_write

POLL_S = 0.02


def mailbox_of(work: Path) -> Path:
    """Where the workers of this order look for the next one."""
    return work.with_name(work.name.replace("work-", "next-", 1))


def announce(work: Path, following: Path | None) -> None:
    """Tell the workers that have done `work` what comes next; None: nothing, they may leave."""
    atomic_write(mailbox_of(work), json.dumps({"work": None if following is None else str(following)}).encode())


def await_next(work: Path) -> Path | None:
    """Wait, for as long as it takes, for the order after `work`; None when there is none. A worker calls this."""
    mailbox = mailbox_of(work)
    while True:
        try:
            following = json.loads(mailbox.read_bytes())["work"]
        except FileNotFoundError:
            time.sleep(POLL_S)
            continue
        return None if following is None else Path(following)
