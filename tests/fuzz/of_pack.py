"""A pack: head, blocks, index and foot; and whatever dumps it holds."""

import contextlib
import zlib
from pathlib import Path
from unittest.mock import patch

import packcases
import torch
from fuzzing import CAP, damage, work_folder

from actordbg.base.errors import StoreProblem
from actordbg.formats import dumpfile
from actordbg.formats.dumpfile import check
from actordbg.formats.encoding import compress
from actordbg.store import pack_bytes as layout, payload, places

PARSERS = (layout.check_head, layout.parse_foot, layout.decode_index, layout.decompress, places.Pack.read)
_FOLDER = work_folder()


def seeds():
    tensors = [{"sequences": torch.arange(70_000, 70_040).view(2, 20), "mask": torch.ones(2, width)} for width in (20, 9)]
    dumps = [payload.encode(packcases.catalogcases.record(n), one) for n, one in enumerate([*tensors, tensors[0]])]
    folder = work_folder()
    return {"three": Path(packcases.write_pack(folder, dumps).path).read_bytes()}


@patch.object(dumpfile, "DEFAULT_CAP", CAP)
def one_input(data):
    path = _FOLDER / "fuzzed.pack"
    path.write_bytes(data)
    with damage():
        pack = places.Pack(path)
        assert sum(pack.shares()) == len(data) or not pack.dump_ids
        assert len(set(pack.dump_ids)) == len(pack.dump_ids)
        assert layout.encode_index(*_lists(pack._index)) == _content(data), "the index is not what its numbers make"
        for dump_id in pack.dump_ids[:8]:
            with damage():
                line, stored = pack.read(dump_id)
                assert len(stored) <= CAP and line == pack.line(dump_id)
                check(dumpfile.parse_line(line), stored)


def _content(data):
    foot = layout.parse_foot(data[-layout.FOOT_BYTES :], len(data), "pack")
    return layout.decompress(data[foot.offset : foot.offset + foot.stored], foot.content, "pack")


def _lists(index):
    """What `encode_index` made it of: blocks, pieces and dumps."""
    blocks = [(block.stored, block.content) for block in index.blocks]
    return blocks, list(zip(index.piece_block, index.piece_bytes, index.piece_times, strict=True)), index.dumps


def mutate(data, chance, havoc):
    """The index as bytes or as numbers, or a block, under right sums."""
    with contextlib.suppress(StoreProblem, OverflowError, ValueError, UnicodeError):
        foot, content = layout.parse_foot(data[-layout.FOOT_BYTES :], len(data), "pack"), _content(data)
        if chance.random() < 0.4:
            return _sealed(data[: foot.offset], havoc(content), foot.dumps)
        lists = _lists(layout.decode_index(content, foot, "pack"))
        return _other_pack(data[layout.HEAD_BYTES : foot.offset], lists, chance, havoc)
    return havoc(data)


def _other_pack(frames, lists, chance, havoc):
    blocks, pieces, dumps = lists
    contents, at = [], 0
    for stored, content in blocks:
        contents.append(layout.decompress(frames[at : at + stored], content, "block"))
        at += stored
    kind = chance.randrange(4)
    if kind == 0 and contents:
        number = chance.randrange(len(contents))
        contents[number] = havoc(contents[number])
    elif kind == 1 and pieces:
        number, place = chance.randrange(len(pieces)), chance.randrange(3)
        pieces[number] = tuple(_other(value, chance) if n == place else value for n, value in enumerate(pieces[number]))
    elif dumps:
        dump_id = chance.choice([*dumps])
        line, header, refs, crc = dumps[dump_id]
        line, header = (havoc(line), header) if chance.random() < 0.5 else (line, havoc(header))
        refs = [_other(ref, chance) if chance.random() < 0.3 else ref for ref in refs] if kind == 2 else refs
        dumps[dump_id] = layout.PackedDump(line, header, refs, crc)
    stored = [compress(content, 1) for content in contents]
    blocks = [(len(one), len(content)) for one, content in zip(stored, contents, strict=True)]
    dumps = {dump_id: dump._replace(crc=_crc(dump, pieces, contents)) for dump_id, dump in dumps.items()}
    return _sealed(layout.head() + b"".join(stored), layout.encode_index(blocks, pieces, dumps), len(dumps))


def _crc(dump, pieces, contents):
    """Of a dump's line and payload as they are now."""
    starts, filled = [], [0] * len(contents)
    for block, size, _ in pieces:
        starts.append(filled[block] if block < len(filled) else 0)
        if block < len(filled):
            filled[block] += size
    found = dump.header
    for ref in dump.refs:
        block, size, times = pieces[ref] if ref < len(pieces) else (len(contents), 0, 0)
        if block < len(contents) and size * times < CAP:
            found += contents[block][starts[ref] : starts[ref] + size] * times
    return zlib.crc32(found, zlib.crc32(dump.line))


def _other(value, chance):
    return chance.choice((0, 1, value + 1, max(value - 1, 0), 2 * value, 2**31, 2**32 - 1))


def _sealed(front, content, dumps):
    index = compress(content, 1)
    return front + index + layout.foot(len(front), index, len(content), dumps)
