"""The laws of an input, checked in a worker after it has run."""

from typing import Any

from actordbg.laws.law_run import LawRun
from actordbg.records.replay_record import LAWS
from actordbg.replay.instruments import Examined, Examiner


class LawsInWorker(Examiner):
    def examine(self, run: Examined) -> dict[str, Any]:
        if not run.asked:
            return {}
        asking = LawRun(self.session, run.dump, run.outcome, run.backward, together=self.together, tell=run.tell)
        answers = [answer.to_dict() for answer in asking.run()]
        self.out_of_step = asking.out_of_step
        return {LAWS: answers}
