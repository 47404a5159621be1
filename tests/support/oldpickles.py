"""Old pickles of the trainer's earlier recorder: decoded in this process, as the child and its parent do together."""

from __future__ import annotations

import json

from actordbg.dumps.archives import pickle_value
from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.decode import OldCall, old_call
from actordbg.dumps.pickle_tree import tree


class InProcess(LegacyReader):
    """Decodes here."""

    def tree(self, data: bytes) -> tuple[object, memoryview]:
        value, numbers = tree(data)
        return json.loads(json.dumps(value)), memoryview(numbers)


def decode(data: bytes) -> OldCall:
    return old_call(pickle_value(InProcess(), data))
