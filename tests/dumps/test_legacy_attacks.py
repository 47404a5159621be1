"""Malicious pickles execute nothing and are refused: audited in-process, in the child, and beside a positive control.

Each attack is assembled here, and (where it is about execution) is real: `pickle.loads` of it, in another process, leaves a
canary file. The decoder is then watched by an audit hook, which sees imports, opens, exec, compile, os.system,
subprocesses, sockets and more: it must see nothing at all.
"""

import collections
import os
import pickle
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from oldpickles import decode
from roots import ROOT, json_of

from actordbg.base.errors import ActordbgError, UnsafeInput
from actordbg.dumps.child_pool import LegacyReader, Limits
from actordbg.dumps.decode_child import EXIT_AUDIT
from actordbg.dumps.importer import import_paths


class Asks:
    """Pickles as `function(*arguments)`, with a state if there is one."""

    def __init__(self, function, *arguments, state=None):
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.reduced

    def __call__(self):
        """pickle insists that what a `__reduce__` names is callable."""


def loads(blob):
    """Pickles as a call of `torch.storage._load_from_bytes`, whose bytes are the attack."""
    return Asks(torch.storage._load_from_bytes, blob)


def tensor_over(blob):
    """Pickles as a tensor with every part genuine but the bytes of its storage."""
    return Asks(torch._utils._rebuild_tensor_v2, loads(blob), 0, (2, 10), (10, 1), False, collections.OrderedDict())


class ClaimsTensor:
    """Pickles as a tensor over a genuine storage, with whatever shape, strides and hooks."""

    def __init__(self, shape, strides, hooks=None, offset=0):
        self.claims = (offset, shape, strides, False, collections.OrderedDict() if hooks is None else hooks)

    def __reduce__(self):
        storage = torch.arange(20)._typed_storage()
        return (torch._utils._rebuild_tensor_v2, (storage, *self.claims))


def genuine(protocol=4, **changes):
    """Pickle a dump of the old recorder; `changes` are what an attack puts into it."""
    content = {
        "sequences": torch.arange(20).reshape(2, 10),
        "action_mask": torch.ones(2, 3, dtype=torch.bool),
        "attention_mask": torch.ones(2, 10, dtype=torch.long),
        "timestamp": "20250619_052608_430740",
        "rank": 0,
    }
    return pickle.dumps(content | changes, protocol)


def touch(canary):
    return Asks(os.system, f"touch {canary}")


def storage_header(*objects):
    """A legacy storage blob with a correct beginning, and then these pickles."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    return b"".join(pickle.dumps(item, protocol=2) for item in (0x1950A86A20F9469CFC6C, 1001, system, *objects))


def executing(canary):
    """Files that run a command when they are unpickled."""
    evil = touch(canary)
    chain = Asks(Asks(getattr, Asks(__import__, "os"), "system"), f"touch {canary}")  # type: ignore[arg-type]
    return {
        "direct": genuine(sequences=evil),
        "direct, protocol 2": genuine(2, rank=evil),
        "instead of the dict": pickle.dumps(evil),
        "nested in place of a tensor": genuine(sequences=loads(pickle.dumps(evil))),
        "nested in the storage blob": genuine(sequences=tensor_over(pickle.dumps(evil))),
        "nested behind the blob's header": genuine(sequences=tensor_over(storage_header(evil))),
        "nested in the blob's header": genuine(sequences=tensor_over(storage_header()[:15] + pickle.dumps(evil))),
        "nested twice": genuine(rank=loads(pickle.dumps(loads(pickle.dumps(evil))))),
        "chain of __reduce__": genuine(sequences=chain),
        "chain in the hooks of a tensor": genuine(sequences=ClaimsTensor((2, 10), (10, 1), hooks=chain)),
        "behind a genuine pickle's name": genuine()[:-1] + b"0" + pickle.dumps(evil)[2:],
        "INST opcode": b"(S'touch " + str(canary).encode() + b"'\nios\nsystem\n.",
        "OBJ opcode": b"(cos\nsystem\nS'touch " + str(canary).encode() + b"'\no.",
        "STACK_GLOBAL with computed names": b"\x80\x04(\x8c\x02os\x8c\x06system\x93X"
        + struct.pack("<I", len(f"touch {canary}")) + f"touch {canary}".encode() + b"\x85R.",
    }  # fmt: skip


def laughs(levels=60):
    """A tuple of two references to a tuple of two references to ..., 2**60 leaves for whoever walks it."""
    value = ()
    for _ in range(levels):
        value = (value, value)
    return genuine(rank=value)


def bombs():
    """Files of a few bytes or kilobytes that would take gigabytes, or hours."""
    return {
        "BINBYTES8 of 2**62": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
        "BINUNICODE of 4 GB": b"\x80\x04X" + struct.pack("<I", 2**32 - 1) + b".",
        "FRAME of 2**62": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
        "LONG1 of 255 bytes": b"\x80\x04\x8a\xff" + b"\x7f" * 255 + b".",
        "DUP flood": b"\x80\x04]" + b"2" * 200_000 + b".",
        "MARK flood": b"\x80\x04" + b"(" * 200_000 + b".",
        "deep tuple": b"\x80\x04)" + b"\x85" * 200_000 + b".",
        "string over the limit": b"\x80\x04X" + struct.pack("<I", 2**20) + b"x" * 2**20 + b".",
        "shape of 2**40 rows over one": genuine(sequences=ClaimsTensor((2**40, 10), (0, 1))),
        "shape beyond the storage": genuine(sequences=ClaimsTensor((2, 2**30), (2**30, 1))),
        "strides beyond the storage": genuine(sequences=ClaimsTensor((2, 10), (2**40, 1))),
        "offset beyond the storage": genuine(sequences=ClaimsTensor((2, 10), (10, 1), offset=1)),
        "storage that contradicts itself": genuine().replace(b"cpuq\x03K\x14", b"cpuq\x03K\xff"),
        "storage of 2**50 elements": genuine(sequences=tensor_over(storage_of(2**50))),
    }


def storage_of(numel):
    """A storage blob that says twice that it holds `numel` int64, and holds one."""
    identity = b"\x80\x02(X\x07\0\0\0storagectorch\nLongStorage\nX\x01\0\0\x000X\x03\0\0\0cpu\x8a\x08" + struct.pack("<q", numel)
    return storage_header() + identity + b"NtQ." + pickle.dumps(["0"], protocol=2) + struct.pack("<qq", numel, 1)


def truncated():
    whole = genuine()
    return {
        **{f"first {cut} bytes": whole[:cut] for cut in (1, 2, 40, 200)},
        "first half": whole[: len(whole) // 2],
        "all but the last byte": whole[:-1],
    }


def every_attack(canary):
    return executing(canary) | bombs() | {"billion laughs": laughs()} | truncated()


def outside(code, data, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, input=data, capture_output=True, timeout=120, cwd=ROOT, check=False)


AUDITED = """if True:
    import json, sys
    from actordbg.base.errors import ActordbgError
    sys.path.insert(0, 'tests/support')
    from oldpickles import decode
    import pickle
    files = pickle.loads(sys.stdin.buffer.read())     # trusted: the test's own dict of bytes
    read = pickle.loads if sys.argv[1] == 'pickle' else decode
    events, watching = {}, None
    def hook(event, arguments):
        if watching is not None:
            events.setdefault(watching, []).append(event)
    sys.addaudithook(hook)
    refused = {}
    for name, data in files.items():
        watching = name
        try:
            read(data)
        except ActordbgError as error:
            refused[name] = error.code
        except Exception as error:
            refused[name] = 'other'
        watching = None
    print(json.dumps([events, refused]))
"""


def audited(reader, files):
    done = outside(AUDITED, pickle.dumps(files), reader)
    assert done.returncode == 0, done.stderr.decode()
    events, refused = json_of(done)
    return events, refused


def test_an_audit_hook_sees_nothing_while_attacks_are_decoded(tmp_path):
    canary = tmp_path / "canary"
    files = every_attack(canary)
    events, refused = audited("decode", files)
    assert events == {}
    assert refused.keys() == files.keys() and set(refused.values()) <= {"unsafe-input", "corrupt-dump"}
    assert {refused[name] for name in executing(canary)} == {"unsafe-input"}
    assert {refused[name] for name in truncated()} == {"corrupt-dump"}
    assert not canary.exists()


@pytest.mark.slow
def test_the_attacks_are_real_and_the_hook_sees_them(tmp_path):
    """The positive control: each executing attack, really unpickled, leaves a canary."""
    names = list(executing(tmp_path))
    events, _ = audited("pickle", {name: executing(tmp_path / f"canary{n}")[name] for n, name in enumerate(names)})
    assert [name for n, name in enumerate(names) if not (tmp_path / f"canary{n}").exists()] == []
    assert events.keys() == set(names) and "os.system" in events["direct"]


@pytest.mark.slow
def test_a_memory_bomb_is_refused_before_anything_is_allocated():
    for name, data in bombs().items():
        tracemalloc.start()
        with pytest.raises(ActordbgError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 24 * 2**20, name
        tracemalloc.stop()


def test_an_import_refuses_every_attack_by_name_and_takes_the_rest(store, tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    canary = tmp_path / "canary"
    attacks = every_attack(canary)
    for number, data in enumerate(attacks.values()):
        (folder / f"attack{number:02d}.pkl").write_bytes(data)
    (folder / "zz_good.pkl").write_bytes(genuine())
    summary = import_paths(store, [folder])
    assert (summary.added, summary.present) == (1, 0)
    assert [Path(refusal.path).name for refusal in summary.refused] == [f"attack{n:02d}.pkl" for n in range(len(attacks))]
    asked = [name for name, refusal in zip(attacks, summary.refused, strict=True) if "posix.system" in refusal.reason]
    assert {"direct", "nested behind the blob's header"} <= {*asked}
    assert all(refusal.reason and "decoding process" not in refusal.reason for refusal in summary.refused), (
        "the child's walls hold"
    )
    assert not canary.exists()


@pytest.mark.parametrize("act", ["open('/dev/null')", "__import__('os').system('true')", "exec('1')", "__import__('wave')"])
def test_a_child_that_were_taken_over_ends_at_the_first_audited_event(act):
    code = f"import actordbg.dumps.decode_child as child; child.tree = lambda data: data and {act}; child.main(2**30, 10.0)"
    done = outside(code, len(genuine()).to_bytes(8, "little") + genuine())
    assert done.returncode == EXIT_AUDIT and done.stdout == b""


@pytest.mark.parametrize(
    "limits, data, said",
    [
        (Limits(cpu_seconds=0.004), b"\x80\x04]" + b"K\x01a" * 49_990 + b".", "CPU time"),
        (Limits(memory_bytes=96 * 2**20), bytes(128 * 2**20), "memory"),
        (Limits(wall_seconds=0.3), None, "longer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_takes_too_much_is_refused_and_the_next_one_is_read(limits, data, said):
    with LegacyReader(limits) as reader:
        if data is None:
            reader.tree(genuine())
            assert reader._child is not None
            os.kill(reader._child.pid, signal.SIGSTOP)
        with pytest.raises(UnsafeInput, match=said):
            for _ in range(50):
                reader.tree(data or genuine())
        reader.limits = Limits()
        assert reader.tree(genuine())["rank"] == 0
        assert reader.started == 2


def test_a_file_over_the_size_limit_is_not_read(tmp_path):
    path = tmp_path / "large.pkl"
    path.write_bytes(genuine())
    with LegacyReader(Limits(file_bytes=100)) as reader, pytest.raises(UnsafeInput, match="larger than 100"):
        reader.load(path)
    assert reader.started == 0
