"""What is kept of what `forward` returned: its small tensors. Logits (B x S x V) are never copied."""

from __future__ import annotations

from typing import Any

import torch

from actordbg.capture.recorded_call import Kind
from actordbg.capture.trigger_verdicts import LOGITS_SUM
from actordbg.formats.dump_record import OUTPUT_PREFIX
from actordbg.formats.encoding import storable


def named_outputs(output: Any, of_actions: bool, logits: bool = False) -> dict[str, torch.Tensor]:
    """The small tensors of what `forward` returned, named `output.<name>`.

    A trainer returns log-probs, `(log-probs, model output)` or the model output. `of_actions` says whether log-probs are those
    of the actions. Since 0.7.2 the model output may carry `entropy`. With `logits`, where there are no log-probs, the sum of
    the logits (a scalar, float32) stands for them: that reads them once on their device, and waits for nothing.
    """
    found: dict[str, Any] = {}
    parts = list(output) if isinstance(output, (tuple, list)) and not hasattr(output, "logits") else [output]
    if parts and isinstance(parts[0], torch.Tensor):
        found["action_log_probs" if of_actions else "log_probs"] = parts.pop(0)
    for part in parts:
        found.setdefault("entropy", getattr(part, "entropy", None))
    if logits and "log_probs" not in found and "action_log_probs" not in found:
        found[LOGITS_SUM] = next((_sum(part.logits) for part in parts if hasattr(part, "logits")), None)
    return {
        OUTPUT_PREFIX + name: value
        for name, value in found.items()
        if type(value) is torch.Tensor and storable(value) and value.device.type != "meta"
    }


def wants_actions(kind: Kind) -> bool:
    """Log-probs are those of the actions if the call had an `action_mask` (or `num_actions`, in old trainers)."""
    names = {name for name, _ in kind.tensors}
    fields = kind.fields
    return (
        "action_mask" in names or "action_mask" in fields["extra"] or fields["arguments"].get("num_actions") is not None
    )


def _sum(logits: Any) -> torch.Tensor | None:
    if type(logits) is not torch.Tensor or not logits.is_floating_point():
        return None
    with torch.no_grad():
        return logits.detach().sum(dtype=torch.float32)
