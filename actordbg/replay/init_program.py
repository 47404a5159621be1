"""The program of the workers of `actordbg actor init`: `actordbg.actor.init_worker`, ended together with its supervisor.

    python -m actordbg.replay.init_program --work ORDER.json

If the terminal is killed, nobody is left to end the workers. So each looks once a second whether its supervisor lives.
"""

from __future__ import annotations

import os
import sys

from actordbg.actor.init_worker import main
from actordbg.replay.worker import end_with

if __name__ == "__main__":
    code = main(end_with)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what torch and gloo do at interpreter exit can hang or crash, and the result is on disk
