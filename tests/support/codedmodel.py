"""A model folder with code of its own: the tiny Llama, and a modeling file that leaves a mark when it is executed.

The mark is a line in the file that ACTORDBG_TEST_MARK names, and without that variable one beside the folder. So a test sees
whether the code ran in any process, also one that ended badly.
"""

import json

from actordbg.actor.models import build_tiny

_CODE = """
import os
with open({mark!r}, "a") as file:
    file.write("%d\\n" % os.getpid())
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}


def make(folder, **config):
    """The folder of such a model, and the file in which it leaves its mark. `config`: what its config.json has besides."""
    build_tiny(folder)
    mark = folder.parent / f"{folder.name}.mark"
    (folder / "modeling_own.py").write_text(_CODE.format(mark=str(mark)))
    path = folder / "config.json"
    own = {"auto_map": AUTO_MAP, "model_type": "own-llama", "architectures": ["OwnModel"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | own | config))
    return folder, mark
