"""Does packing leak, does padding matter, are the log-probs right? For a model and a batch in memory, without a store."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import actordbg

model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2))
ids = torch.randint(3, 512, (3, 24))
mask = (torch.arange(24) < torch.tensor([[24], [15], [20]])).long()

answer = actordbg.check_model(model, {"input_ids": ids, "attention_mask": mask})
print(answer)  # RIGHT: padded: 1 of 1 dump matches the truth to fp32 rounding; ...; packed: RIGHT; ...

truth = actordbg.truth(model, {"input_ids": ids, "attention_mask": mask})
print(truth.log_probs.shape, truth.grad_norm, sorted(truth.gradients)[0])
