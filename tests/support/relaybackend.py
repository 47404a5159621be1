"""A module that brings a backend of torch.distributed along, as a vendor's does: "relay", which is gloo by another name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def _group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("relay", _group, devices=["cpu"])
