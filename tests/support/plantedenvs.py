"""Python environments with a fault in them, or without: interpreters of their own, beside this one's packages.

    python = environment(folder / "faulty", CRASH)       # `python -I script.py` has the fault
    fixed = environment(folder / "clean", "")            # has neither the fault nor actordbg

A fault is code that runs once a module of transformers is loaded, so it is there in every process of that interpreter. It does not
touch a model with eager attention, which the truth has.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_STARTED = """
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            plant(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
_IN_THE_MLP = """
MODULE = "transformers.models.llama.modeling_llama"

def plant(module):
    right = module.LlamaMLP.forward
    def forward(self, values):
        if self.config._attn_implementation != "eager":
            values = fault(values)
        return right(self, values)
    module.LlamaMLP.forward = forward
"""

CRASH = (
    _IN_THE_MLP
    + """
def fault(values):
    if values.shape[1] > 4:
        import ctypes
        ctypes.string_at(0)
    return values
"""
)
"""An operator that dies on more than four tokens."""
HANG = (
    _IN_THE_MLP
    + """
def fault(values):
    import torch.distributed as dist
    if dist.is_initialized() and dist.get_rank() == 0 and values.shape[1] > 3:
        dist.all_reduce(values.detach().clone())
    return values
"""
)
"""A collective that only the first rank calls, on more than three tokens."""


def from_the_table(name):
    """Return the fault of this name in `planted_table`: planted in each model that is built or loaded without eager attention."""
    return f"""
MODULE = "transformers.modeling_utils"

def plant(module):
    for called in ("_from_config", "from_pretrained"):
        original = getattr(module.PreTrainedModel, called).__func__
        setattr(module.PreTrainedModel, called, classmethod(planted(original)))

def planted(original):
    def build(cls, *args, **named):
        model = original(cls, *args, **named)
        if model.config._attn_implementation != "eager":
            sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "support")!r}]
            import planted_table
            del sys.path[:2]
            fault = next(each for each in planted_table.FAULTS if each.name == {name!r})
            held.append(fault.plant(model))
            held[-1].__enter__()
        return model
    return build

held = []
"""


def environment(folder, fault):
    """Make an environment, and return its interpreter. fault: "" for one without a fault and without actordbg."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    beside = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "packages.pth").write_text("\n".join(beside) + "\n")
    if fault:
        (packages / "planted_fault.py").write_text(_STARTED + fault)
        (packages / "planted.pth").write_text(f"{ROOT}\nimport planted_fault\n")
    return folder / "bin" / "python"


def actordbg(python, *words, store, code=0):
    """Run a command of this checkout's actordbg with this interpreter; returns what it printed."""
    ran = subprocess.run(
        [str(python), "-m", "actordbg", "--store", str(store), *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert code is None or ran.returncode == code, (words, ran.returncode, ran.stdout, ran.stderr)
    return ran.stdout
