"""Compares tensors to the bit."""

import torch


def bits(tensor):
    """The bytes of its elements, in order."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def same(left, right):
    """Equal in dtype, shape, strides and bits."""
    alike = (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
    return alike and bits(left) == bits(right)


def all_same(left, right):
    """The same names, and the same tensors under them."""
    return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
