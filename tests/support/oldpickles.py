"""Old pickles of the trainer's earlier recorder: decoded in this process, as the child and its parent do together."""

import json

from actordbg.dumps.archives import pickle_value
from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.decode import old_call
from actordbg.dumps.pickle_tree import tree


class InProcess(LegacyReader):
    """Decodes here."""

    def tree(self, data):
        return json.loads(json.dumps(tree(data)))


def decode(data):
    return old_call(pickle_value(InProcess(), data))
