"""Log-probs under each cause of the bank, computed beside the truth in its worker."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.other_log_probs import Closed, Laid
from actordbg.actor.truth_session import TruthSession
from actordbg.causes import signatures
from actordbg.config.replay_config import DTYPES
from actordbg.replay.instruments import Examined, Examiner


class CausesInWorker(Examiner):
    """What it computes is kept beside the outcome's tensors."""

    session: TruthSession

    def __init__(self, session: TruthSession, *, together: bool) -> None:
        super().__init__(session, together=together)
        self._run_dtype: torch.dtype = getattr(torch, DTYPES[session.choices.dtype])
        session.resolved["causes"] = signatures.owns(session.model, self._run_dtype)

    def examine(self, run: Examined) -> dict[str, Any]:
        wanted = self.session.config.causes
        if not run.asked or wanted is None:
            return {}
        run.tell("causes")

        def rows(closed: Mapping[str, Closed]) -> dict[str, Tensor]:
            return self.session.closed(run.dump, closed)

        arranged: Callable[[Callable[[Tensor, Tensor, float], Laid], float], Tensor] = partial(self.session.arranged, run.dump)
        run.outcome.tensors |= signatures.tensors(self.session.model, wanted, self._run_dtype, rows, arranged)
        return {}
