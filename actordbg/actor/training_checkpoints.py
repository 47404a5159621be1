"""Checkpoints of a training, from which a lost one continues: after a step, a safetensors file of each rank.

    STORAGE/<check>/cell-3/step-0004/rank-1.safetensors

torch.distributed.checkpoint is not used: its `.metadata` is a pickle, which it reads before any tensor, and a folder that all
ranks and other users may reach must not hold what is executed. It would also reshard for other ranks, which is not needed: the
ranks of a continued training are those of the lost one, so each reads what it wrote. Its storage for safetensors holds weights
only, without the optimizer's state.

A checkpoint counts once every rank's file is there. Each file has its name once it is whole. The last two are kept: a
kill may come between a checkpoint and the journals of its step. STORAGE is a folder, or a URL that fsspec opens.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from actordbg.base.errors import StoreProblem
from actordbg.store.staging import as_store_problem, opened

if TYPE_CHECKING:
    from torch import Tensor

_FILE = re.compile(r"step-(\d+)/rank-(\d+)\.safetensors\Z")
KEPT = 2
_THEN = "`actordbg train-check --resume` continues from the last checkpoint"


def _step_of(path: str) -> int:
    """Return the step in a file's name: as text, step 10000 would come before step 9999."""
    return int(match[1]) if (match := _FILE.search(path)) else 0


class Checkpoints:
    """The checkpoints of one cell in `folder`, a path or a URL. Errors of its file system are StoreProblems."""

    def __init__(self, folder: str) -> None:
        self._files, self._root = opened(folder)

    def newest(self, ranks: int, most: int) -> int:
        """Return the last step, up to `most`, after which all ranks wrote their files; 0 if there is none."""
        with as_store_problem(self._root, _THEN):
            written = [match for path in self._files.find(self._root) if (match := _FILE.search(path))]
        of_step: dict[int, set[int]] = {}
        for match in written:
            of_step.setdefault(int(match[1]), set()).add(int(match[2]))
        return max((step for step, there in of_step.items() if step <= most and there >= {*range(ranks)}), default=0)

    def save(self, step: int, rank: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a rank's file, and remove this rank's files of steps before the last two."""
        from safetensors.torch import save

        path = self._path(step, rank)
        data = save({name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()})
        with as_store_problem(path, _THEN):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(f"{path}.part", data)
            self._files.mv(f"{path}.part", path)
            for old in sorted(self._files.glob(self._path("*", rank)), key=_step_of)[:-KEPT]:
                self._files.rm_file(old)
                with contextlib.suppress(OSError):  # until the last of its ranks has removed its file
                    self._files.rmdir(old.rpartition("/")[0])

    def load(self, step: int, rank: int) -> dict[str, Tensor]:
        """Read a rank's file. Raises StoreProblem if it is damaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        path = self._path(step, rank)
        with as_store_problem(path, _THEN):
            data = self._files.cat_file(path)
        try:
            tensors: dict[str, Tensor] = load(data)
            return tensors
        except SafetensorError as error:
            raise StoreProblem(
                f"{path} is not a checkpoint: {error}", hint="remove its folder; the checkpoint before is used"
            ) from None

    def _path(self, step: int | str, rank: int) -> str:
        number = f"{step:04d}" if isinstance(step, int) else step
        return f"{self._root}/step-{number}/rank-{rank}.safetensors"
