"""Replays with scripted workers (`fake_worker`): a bench that runs them and knows what they left running."""

import json
import os
import signal

from actordbg.base.processes import session_members
from actordbg.base.units import new_replay_id
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import make_folder
from actordbg.records.journal import read_events
from actordbg.records.replay_record import ReplayInput, ReplaySpec
from actordbg.replay.launch import launch
from actordbg.replay.supervise import run_replay


def make_spec(count, **settings):
    inputs = [ReplayInput(f"d{n}", f"dumps/d{n}", 0, 1, 8, 8) for n in range(count)]
    return spec_of(inputs, **({"timeout_s": 30.0} | settings))


def spec_of(inputs, **settings):
    return ReplaySpec(new_replay_id(), now_timestamp(), ReplayConfig(**settings), tuple(inputs))


def fake_launcher(sessions, module="fake_worker"):
    """Starts workers, scripted ones unless told otherwise, and remembers their sessions."""

    def start(config, group, work):
        launched = launch(config, group, work, module)
        sessions.append(launched.session)
        return launched

    return start


class Bench:
    """Runs a scripted replay and remembers the sessions that it started."""

    def __init__(self, store):
        self.store = store
        self.sessions = []
        self.news = []

    def run(self, spec, script, **options):
        folder = self.store.replays / spec.replay_id
        make_folder(folder)
        (folder / "script.json").write_text(json.dumps(script))
        on_event = options.pop("on_event", self.news.append)
        launcher = options.pop("launcher", None) or fake_launcher(self.sessions)
        return run_replay(self.store, spec, on_event, launcher=launcher, **options)

    def left_running(self):
        return [pid for session in self.sessions for pid in session_members(session)]


def ctrl_c_after(dump_id):
    """What presses Ctrl-C when this input has its result."""

    def hear(event):
        if event.result and event.result.dump_id == dump_id:
            os.kill(os.getpid(), signal.SIGINT)

    return hear


def booted(folder):
    """The process that was a replay's rank 0 first."""
    pid = next(event for event in read_events(folder / "rank0.jsonl") if event["event"] == "boot")["pid"]
    return pid


def statuses(outcome):
    return {dump_id: record.status for dump_id, record in sorted(outcome.results.items())}
