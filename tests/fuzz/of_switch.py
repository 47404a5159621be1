"""What training and desk exchange: the switch `control.json`, the counters files, hashes of weights, turns of rollouts."""

from fuzzing import damage, mutate_json, refused, work_folder

from actordbg.base.errors import NewerFormat, StoreProblem
from actordbg.capture.control import Control, parse
from actordbg.capture.ledger import Identity, Ledger
from actordbg.capture.switch_file import control_text
from actordbg.formats.record_reading import parse_timestamp
from actordbg.formats.ringfile import place, ring_paths
from actordbg.formats.store_files import StoreFiles
from actordbg.formats.turn_record import SampledTurn, Trajectory
from actordbg.formats.weight_hashes import ParameterHash, WeightRecord
from actordbg.formats.weight_syncs import EngineAnswer, SentParameter, WeightSync
from actordbg.records.run_files import read_counters, read_run_file, read_sync, read_trajectory, read_weights

PARSERS = (Control.from_json, parse, read_counters, read_run_file)
WORDS = (b'"nan"', b'"slow:3x"', b'"logprobs:-40:0"', b"-inf", b'"triggers":[', b'"ring_dir":"', b'"ranks":[')
mutate = mutate_json
_FOLDER = work_folder()
_FILE, _STORE = _FOLDER / "counters.json", StoreFiles(_FOLDER)


def seeds():
    control = Control(
        True, "r", "2026-11-20T12:00:00.000000Z", 3, ranks=(0, 1), triggers=("nan", "slow:3x", "logprobs:-40:0"), ring_dir="/x"
    )
    ledger = Ledger(Identity("r", 0, 4, "node-1", 7, "1-abc"), since=control.since)
    for close in (lambda: ledger.capture(5000, "nan"), lambda: ledger.drop("disk_full", "no space")):
        ledger.open(control, 30)
        close()
    ledger.publish(_STORE, "on", {"queue_bytes": 5, "ring": {"path": "/x", "in_flight_s": 2.5}, "heartbeat": control.since})
    hashes = {"a": ParameterHash("bfloat16", (4, 3), (6, 6), "0f" * 32), "b": ParameterHash("float32", (), why_not="offloaded")}
    weights = WeightRecord("r", 0, "node-1", 7, "actor0-ab", 12, None, control.since, 0.5, 12, hashes)
    counters = ledger.identity.counters(_STORE).read_bytes().strip()
    sent = SentParameter("bfloat16", (4, 3), "0f" * 32, None, (EngineAnswer(True, "0e" * 32, 1), EngineAnswer()))
    sync = WeightSync("r", 0, "node-1", 7, 0, 3, control.since, 0.5, 2, {"a": sent})
    turn = SampledTurn((1, 5), (6, 2), "a")
    trajectory = Trajectory("r", "node-1", 7, 0, control.since, 1, None, (turn,), (1, 5, 6, 2), ((2, 4),))
    return {"switch": control_text(control).encode(), "counters": counters, "weights": weights.to_json().encode(),
            "sync": sync.to_json().encode(), "turns": trajectory.to_json().encode()}  # fmt: skip


def one_input(data):
    with refused(StoreProblem, NewerFormat):
        control = Control.from_json(data)
        assert Control.from_json(control_text(control)) == control
        ring_paths(place(_STORE, control.ring_dir))
        assert not control.ranks or all(isinstance(rank, int) for rank in control.ranks)
    _FILE.write_bytes(data)
    with damage():
        counters = read_counters(_FILE)  # what `dump status` and `dump recover` take out of it
        parse_timestamp(counters["heartbeat"])
        assert isinstance(sum(sum(counters[name].values()) for name in ("dropped", "sampled_out", "triggered")), int)
        assert all(counters[name].encode() is not None for name in ("run", "host", "instance", "state", "since"))
    with damage():
        weights = read_weights(_FILE)
        assert all(sum(one.shape) >= 0 and (one.part is None or sum(one.part) >= 0) for one in weights.parameters.values())
    with damage():
        sync = read_sync(_FILE)
        assert all(answer.recorded in (True, False) for each in sync.parameters.values() for answer in each.answers)
    with damage():
        assert all(sum(turn.given) >= 0 and sum(turn.sampled) >= 0 for turn in read_trajectory(_FILE).turns)
