"""Faults put into the real pipeline on purpose: workers in whose OpenRLHF one thing is wrong.

A `sitecustomize.py` on PYTHONPATH reaches every worker, and changes a module the moment that it is imported. Nothing in the
product knows of it.
"""

import os

POSITIONS_RUN_ON = """
import torch

def change(module):
    right = module.unpad_and_slice_tensor
    def unpad_and_slice_tensor(*args, **kwargs):
        sequences, positions, *rest = right(*args, **kwargs)
        return sequences, torch.arange(positions.shape[-1], device=positions.device)[None], *rest
    module.unpad_and_slice_tensor = unpad_and_slice_tensor

MODULE = "openrlhf.models.ring_attn_utils"
"""
"""Packing whose position ids do not begin again at the border of a row: nothing tells the rows apart any more."""


WRONG_GRADIENTS = """
def change(module):
    from actordbg.actor.backends import fsdp2
    from actordbg.actor.backends import backend
    right, alone = fsdp2.Fsdp2Backend.backward, backend.Backend.backward
    def flipped(self, loss, keeper=None):
        hooks = [p.register_hook(lambda g: -g) for name, p in self.model.named_parameters() if "layers.0.self_attn.k_proj" in name]
        try:
            return alone(self, loss, keeper)
        finally:
            for hook in hooks:
                hook.remove()
    fsdp2.Fsdp2Backend.backward = lambda self, loss, keeper=None: right(self, 2 * loss, keeper)
    backend.Backend.backward = flipped

MODULE = "actordbg.actor.sharing"
"""
"""Under fsdp2 twice the gradient, in plain PyTorch one parameter's gradient with its sign flipped, which no norm shows."""

EPSILON_OF_A_NORM = """
def change(module):
    right = module.RowsActors.build_actor
    def build_actor(self, *args, **kwargs):
        actor = right(self, *args, **kwargs)
        actor.model.model.layers[1].input_layernorm.variance_epsilon = 1e-3
        return actor
    module.RowsActors.build_actor = build_actor

MODULE = "actordbg.trainers.rows_actor"
"""
"""An epsilon in one norm that is not the checkpoint's: in bf16 no limit on outputs shows it."""

_OF_THE_MODEL = """
def change(module):
    right = module.RowsActors.build_actor
    def build_actor(self, *args, **kwargs):
        actor = right(self, *args, **kwargs)
        layer = actor.model.model.layers[1]
        FAULT
        return actor
    module.RowsActors.build_actor = build_actor

MODULE = "actordbg.trainers.rows_actor"
"""
EPSILON_AT_THE_FIRST_CALL = _OF_THE_MODEL.replace(
    "FAULT",
    """\
        norm = layer.input_layernorm
        norm.register_forward_pre_hook(lambda *_: setattr(norm, "variance_epsilon", 1e-3))""".strip(),
)
"""An epsilon that is not the checkpoint's once the model was called."""
LONG_PACKS_SCALED = _OF_THE_MODEL.replace(
    "FAULT",
    """\
        layer.mlp.register_forward_hook(lambda _, inputs, output: output * (1.02 if inputs[0].shape[1] > 300 else 1))""".strip(),
)
"""An MLP that is 1.02 times its formula in packs of more than 300 tokens: in bf16 no limit on outputs shows it."""
LATER_TOKENS_SKIP = _OF_THE_MODEL.replace(
    "FAULT",
    """\
        later = lambda output: torch.arange(output.shape[1])[None, :, None] >= 150
        layer.mlp.register_forward_hook(lambda _, inputs, output: output.masked_fill(later(output), 0))""".strip(),
)
"""Tokens from position 150 of what the model gets on skip a layer's MLP."""

ONE_FAULT_EACH = """
def change(module):
    import functools
    right, product, calls, hooks = module.Actor.forward, module.log_probs_from_logits, [], []
    def bf16(logits, labels, **more):
        return product(logits.bfloat16(), labels, **more).float()
    def one_token(logits, labels, **more):
        found = product(logits, labels, **more).clone()
        found[..., -9] += 0.4
        return found
    def scaled(name, factor):
        def hook(model):
            hooks.extend(p.register_hook(lambda g: factor * g) for key, p in model.named_parameters() if name in key)
        return hook
    def epsilon(model):
        norms = [one for one in model.modules() if hasattr(one, "variance_epsilon")]
        for one in norms:
            one.variance_epsilon = 1e-3
    def attention(model):
        for one in model.modules():
            if hasattr(one, "scaling"):
                one.scaling *= 1.1
    faults = [None, bf16, one_token, scaled("layers.0.self_attn.q_proj", 0.0), scaled("layers.1.self_attn.q_proj", 0.0),
              scaled("layers.0.input_layernorm", 0.0), scaled("", 0.98), attention, epsilon]
    @functools.wraps(right)
    def forward(self, *args, **kwargs):
        while hooks:
            hooks.pop().remove()
        fault = faults[len(calls)]
        calls.append(fault)
        module.log_probs_from_logits = fault if fault in (bf16, one_token) else product
        if fault not in (None, bf16, one_token):
            fault(self.model)
        return right(self, *args, **kwargs)
    module.Actor.forward = forward

MODULE = "openrlhf.models.actor"
"""
"""The first call is right. Each later one has a fault that is small beside what bf16 does to any model; the last two stay."""

EPSILON = """
def change(module):
    import functools
    right = module.Actor.forward
    @functools.wraps(right)
    def forward(self, *args, **kwargs):
        for one in self.model.modules():
            if hasattr(one, "variance_epsilon"):
                one.variance_epsilon = 5e-6
        return right(self, *args, **kwargs)
    module.Actor.forward = forward

MODULE = "openrlhf.models.actor"
"""
"""Norms with five times the epsilon of the model's configuration: no token moves by 1e-4 nats."""

NORM_OF_TRANSFORMERS = """
def change(module):
    right = module.LlamaRMSNorm.forward
    module.LlamaRMSNorm.forward = lambda self, values: 1.05 * right(self, values)

MODULE = "transformers.models.llama.modeling_llama"
"""
"""A norm of transformers that gives 1.05 times its formula, in every model of the process, the truth's too."""

MASK_OF_TRANSFORMERS = """
def change(module):
    module.causal_mask_function = lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx <= q_idx + 1

MODULE = "transformers.masking_utils"
"""
"""A mask of transformers that shows each token the next one, in every model of the process, the truth's too."""

FULL_DISK = """
def change(module):
    import errno, os
    fsync = os.fsync
    def full(descriptor):
        if os.path.exists(os.environ["FULL_DISK"]) and "/tensors/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fsync(descriptor)
    os.fsync = full

MODULE = "actordbg.replay.actor_engine"
"""
"""No room for kept tensors while the file that FULL_DISK names is there."""

_HOOK = """
import importlib.machinery, os, sys

def planted(module):
    change(module)
    with open(os.environ["BROKEN_ACTOR"], "a") as file:
        file.write(f"{os.getpid()}\\n")

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            planted(module)
        spec.loader.exec_module = exec_module
        return spec

if MODULE in sys.modules:  # in a fork of the template of workers
    planted(sys.modules[MODULE])
else:
    sys.meta_path.insert(0, Finder())
if "TEMPLATE_OF_WORKERS" in os.environ:
    import template_of_workers
"""


def environment(folder, fault):
    """Variables under which every Python process has this fault. `folder / "reached"` gets a line from each that it reached."""
    folder.mkdir()
    late = fault.replace("import torch\n", "").replace("def change(module):\n", "def change(module):\n    import torch\n")
    (folder / "sitecustomize.py").write_text(late + _HOOK)
    path = os.pathsep.join(part for part in (str(folder), os.environ.get("PYTHONPATH", "")) if part)
    return {"PYTHONPATH": path, "BROKEN_ACTOR": str(folder / "reached")}
