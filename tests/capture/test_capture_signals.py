"""A signal handler that raises while a call is recorded: its exception reaches the training, and the books stay exact.

A handler runs between two instructions of the main thread: when a function begins, after a call of a C function, and at the end of a
loop's turn. `Interrupter` raises at the nth of these points inside of actordbg, for each n in turn.
"""

import dis
import functools
import gc
import signal
import sys

import pytest
from capturekit import Recording, TinyActor, ids

from actordbg.base.fault import from_outside
from actordbg.capture import hook
from actordbg.store.layout import Store

SWITCHES = {
    "plain": {},
    "everything": {"with_outputs": True, "with_rng": True, "triggers": ("nan", "slow:1000x"), "before": 2, "min_seq_len": 1},
    "no ring": {"ring": 0},
    "sampled": {"every": 2, "max_dumps": 100},
}
INTERRUPTIBLE = {number for name, number in dis.opmap.items() if name.startswith(("CALL", "JUMP_BACKWARD"))}


OUTSIDE = ("wrap.<locals>.forward begins", "is_compiling begins", "is_scripting begins", "Recorder.enter begins")
"""Points before a call begins to be recorded."""


class Alarm(TimeoutError):
    """What the handler raises: as a trainer's own limit of time does."""


@pytest.fixture(autouse=True)
def handler():
    def ring(number, frame):
        raise Alarm("the trainer's own")

    before = signal.signal(signal.SIGUSR1, ring)
    yield
    signal.signal(signal.SIGUSR1, before)


class Interrupter:
    """Raises a signal at the nth point at which Python runs handlers, in frames of a hooked call. where: the frame's function."""

    def __init__(self, nth):
        self.left, self.where = nth, ""
        self._model = False
        self._last = {}

    def __enter__(self):
        gc.disable()  # what a weak reference calls when others' cycles are collected raises nothing
        sys.settrace(self._begins)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        gc.enable()

    def _point(self, frame, more=""):
        self.left -= 1
        if not self.left:
            self.where = frame.f_code.co_qualname + more
            signal.raise_signal(signal.SIGUSR1)

    def _begins(self, frame, event, _):
        if self._last.get(frame.f_back) == dis.opmap["CALL"]:  # of a Python function: no handler runs when it returns
            self._last[frame.f_back] = 0
        if self._model or frame.f_code is type(self).__exit__.__code__:
            return None
        if frame.f_code is TinyActor.forward.__code__:
            self._model = True
            return self._in_model
        frame.f_trace_opcodes = True
        if frame.f_code.co_code[frame.f_lasti] == dis.opmap["RESUME"]:  # not where a generator is closed
            self._point(frame, " begins")
        return self._instruction

    def _in_model(self, frame, event, _):
        self._model = self._model and event != "return"
        return self._in_model

    def _instruction(self, frame, event, _):
        if event == "opcode":
            last, self._last[frame] = self._last.get(frame), frame.f_code.co_code[frame.f_lasti]
            if last in INTERRUPTIBLE:
                self._point(frame)
        return self._instruction


def interrupted_calls(recording, fresh):
    """Interrupt a call at each of its points in turn; the first call of an actor, which has hundreds, at a sixth of them.

    Returns how many calls began to be recorded, and the interruptions.
    """
    begun, actor, rows = 0, TinyActor(), ids()
    forward = hook.wrap(TinyActor.forward, recording.slot)
    forward(actor, rows, return_logprobs=True)
    for nth in range(1, 5000, 6 if fresh else 1):
        if fresh:
            actor = TinyActor()
        with Interrupter(nth) as at:
            try:
                forward(actor, rows, return_logprobs=True)
                raised = False
            except Alarm:
                raised = True
        assert raised == (at.left <= 0), f"point {nth}, in {at.where}, was swallowed"
        begun += at.where not in OUTSIDE
        if not raised:
            return begun + 1, nth
    raise AssertionError("the call has no end")


def test_a_handler_of_any_form_is_known_by_the_frame_that_it_interrupted():
    class Limit:
        def __call__(self, number, frame):
            raise ValueError("over")

    def raised_in(handler):
        signal.signal(signal.SIGUSR1, handler)
        with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
            signal.raise_signal(signal.SIGUSR1)
        return caught.value

    partial = functools.partial(lambda why, *given: int(why), "no number")
    assert all(from_outside(raised_in(each)) for each in (Limit(), Limit().__call__, partial, signal.default_int_handler))
    with pytest.raises(ValueError) as own:
        int("no number")
    assert not from_outside(own.value)


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_what_a_handler_raises_anywhere_in_the_hook_reaches_the_training_and_the_books_are_exact(tmp_path, switch, fresh):
    recording = Recording(Store(tmp_path / "store").create(), **SWITCHES[switch])
    begun, points = interrupted_calls(recording, fresh)
    assert points > 50
    assert recording.close()
    found, ring = recording.recorder, recording.ring
    assert all(each.pending == 0 for each in recording.ledgers)
    assert sum(each.calls for each in recording.ledgers) == begun
    files = len(list(recording.store.iter_dumps()))
    assert files == sum(each.captured for each in recording.ledgers)
    assert found.writer._bytes == 0 and not ring._running and len(ring.arena._extents) == len(ring._recent)
