"""Fill a store, look at it, replay it: what the commands `dump ls`, `replay` and `check` do, as calls that return values."""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import actordbg

store = actordbg.open(sys.argv[1] if len(sys.argv) > 1 else "example-store")

store.add(torch.randint(3, 512, (2, 32)))  # token ids of one batch
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2))
with store.record(model, run="notebook") as recording:  # every call in the block, with its log-probs
    model(input_ids=torch.randint(3, 512, (2, 16)))

print(len(store.dumps()), [dump.seq_len for dump in store.dumps("seq_len<20")], recording.dumps()[0].tensors.keys())

answer = store.check(where=recording.where)  # of the built-in toy model, since none is named
print(answer.verdict, answer.figures, answer["replay_id"])
print(answer.next)
