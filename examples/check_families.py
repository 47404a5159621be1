"""Two faults, named from a plain script: packed rows of Qwen3.5 meet, and a layer of Gemma2 has another soft cap.

python examples/check_families.py
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import actordbg

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}

torch.manual_seed(0)
torch.set_num_threads(1)  # of so small a model, more threads cost time
mask = ((torch.arange(16) >= torch.tensor([[3], [0], [0]])) & (torch.arange(16) < torch.tensor([[16], [16], [12]]))).long()
batch = {"input_ids": torch.randint(3, 256, (3, 16)), "attention_mask": mask}

qwen = AutoModelForCausalLM.from_config(
    AutoConfig.for_model("qwen3_5_text", **SIZES, **LINEAR, layer_types=["linear_attention", "full_attention"])
)
print("Qwen3.5:", actordbg.check_model(qwen, batch, backward=False))

gemma = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **SIZES), attn_implementation="eager")
gemma.model.layers[0].self_attn.attn_logit_softcapping = 5.0  # the configuration says 50
print("Gemma2:", actordbg.check_model(gemma, batch, packing=False, backward=False))
