"""What the loaded model is, and each of its places, judged in a worker."""

from dataclasses import asdict
from typing import Any

from actordbg.actor.session import ActorSession
from actordbg.locate.identity import identities_of
from actordbg.locate.locate_run import LocateRun
from actordbg.records.locate_record import IDENTITY, LOCATED
from actordbg.replay.instruments import Examined, Examiner


class LocateInWorker(Examiner):
    """The model is compared when it is loaded, and once more after the last input."""

    def __init__(self, session: ActorSession, *, together: bool) -> None:
        super().__init__(session, together=together)
        self._identities = identities_of(session)

    def examine(self, run: Examined) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if run.asked:
            locating = LocateRun(self.session, run.dump, run.outcome, run.backward, together=self.together, tell=run.tell)
            found[LOCATED] = asdict(locating.run())
            self.out_of_step = locating.out_of_step
        if run.at_end and not self.out_of_step:
            run.tell("what the model is")
            self._identities += identities_of(self.session, ran=True, alone=not self.together)
        if self._identities:
            found[IDENTITY], self._identities = self._identities, []
        return found
