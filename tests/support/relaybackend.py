"""A module that brings a backend of torch.distributed along, as a vendor's does: "relay", which is gloo by another name."""

import torch.distributed as dist


def _group(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("relay", _group, devices=["cpu"])
