"""Logs of trainings for the tests: excerpts of real ones, and made-up ones that print as tqdm and OpenRLHF's trainers do."""

from __future__ import annotations

import random
from collections.abc import Sequence

SFT = (
    "\n"
    "\rTrain epoch:   0%|          | 0/5 [00:00<?, ?it/s]\n"
    "\rTrain step of epoch 0:   0%|          | 0/24 [00:00<?, ?it/s]\x1b[A/usr/lib/python3/site-packages/torchdata/stateful_dataloader/stateful_dataloader.py:431: UserWarning: 'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used.\n"
    "  super().__init__(loader)\n"
    "\n"
    "\rTrain step of epoch 0:   4%|▍         | 1/24 [00:00<00:02,  9.45it/s, gpt_loss=8.02, lr=2.5e-5, grad_norm=5.21]\x1b[A\n"
    "\rTrain step of epoch 0:   8%|▊         | 2/24 [00:00<00:01, 17.45it/s, gpt_loss=8.02, lr=2.5e-5, grad_norm=5.21]\x1b[A\n"
    "\rTrain step of epoch 0:   8%|▊         | 2/24 [00:00<00:01, 17.45it/s, gpt_loss=8.5, lr=5e-5, grad_norm=6.04]   \x1b[A\n"
    "\rTrain step of epoch 0:  12%|█▎        | 3/24 [00:00<00:01, 17.45it/s, gpt_loss=8.13, lr=7.5e-5, grad_norm=5.81]\x1b[A\n"
    "\rTrain step of epoch 0: 100%|██████████| 24/24 [00:01<00:00, 23.46it/s, gpt_loss=7.09, lr=9.42e-5, grad_norm=6.12]\x1b[A\n"
    "\rTrain step of epoch 0: 100%|██████████| 24/24 [00:01<00:00, 23.46it/s, gpt_loss=7.19, lr=9.36e-5, grad_norm=5.96]\x1b[A"
    "\rTrain epoch:  20%|██        | 1/5 [00:01<00:04,  1.15s/it]\n"
    "\n"
    "\rTrain step of epoch 1:   0%|          | 0/24 [00:00<?, ?it/s]\x1b[A\x1b[A"
    "\rTrain step of epoch 0: 100%|██████████| 24/24 [00:01<00:00, 20.79it/s, gpt_loss=7.19, lr=9.36e-5, grad_norm=5.96]\n"
    "\n"
    "\n"
    "\rTrain step of epoch 1:   4%|▍         | 1/24 [00:00<00:00, 39.48it/s, gpt_loss=6.96, lr=9.29e-5, grad_norm=6.32]\x1b[A\x1b[A\n"
    "\n"
    "\rTrain step of epoch 1:   8%|▊         | 2/24 [00:00<00:00, 34.76it/s, gpt_loss=7.37, lr=9.22e-5, grad_norm=5.38]\x1b[A\x1b[A\n"
)
"""From `openrlhf.cli.train_sft` 0.11.2 under DeepSpeed ZeRO 2 (24 steps an epoch): steps 1 to 3, 24 to 26."""

PPO = (
    "(PPOTrainer pid=7085) "
    "\rEpisode [1/1]:   0%|          | 0/32 [00:00<?, ?it/s]/usr/lib/python3/site-packages/torchdata/stateful_dataloader/stateful_dataloader.py:431: UserWarning: 'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used.\n"
    "(PPOTrainer pid=7085) INFO 11-21 17:43:40 experience_maker.py:116] 🚀 Starting experience making with 8 samples\n"
    "(PolicyModelActor pid=7022) "
    "\rTrain epoch [1/1]:   0%|          | 0/2 [00:00<?, ?it/s]/usr/lib/python3/site-packages/torch/utils/data/dataloader.py:759: UserWarning: 'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used.\n"
    "(PolicyModelActor pid=7022) "
    "\rTrain epoch [1/1]:   0%|          | 0/2 [00:00<?, ?it/s, act_loss=0.317, reward=0.324, return=-0.0119, gen_len=32, tot_len=106, kl=0, act_lr=0, grad_norm=0]\n"
    "(PolicyModelActor pid=7022) "
    "\rTrain epoch [1/1]:   0%|          | 0/2 [00:00<?, ?it/s, act_loss=-0.317, reward=0.4, return=0.0119, gen_len=32, tot_len=91, kl=0, act_lr=0.0001, grad_norm=1.74]"
    "\rTrain epoch [1/1]: 100%|██████████| 2/2 [00:00<00:00, 11.48it/s, act_loss=-0.317, reward=0.4, return=0.0119, gen_len=32, tot_len=91, kl=0, act_lr=0.0001, grad_norm=1.74]"
    "\rTrain epoch [1/1]: 100%|██████████| 2/2 [00:00<00:00, 11.46it/s, act_loss=-0.317, reward=0.4, return=0.0119, gen_len=32, tot_len=91, kl=0, act_lr=0.0001, grad_norm=1.74]\n"
    "(PPOTrainer pid=7085) "
    "\rEpisode [1/1]:  12%|█▎        | 4/32 [00:00<00:05,  5.26it/s]\n"
    "(PPOTrainer pid=7085) INFO 11-21 17:43:40 ppo_trainer.py:551] ✨ Global step 1: {'score': 0.36200106143951416, 'policy_loss': -7.635354995727539e-05, 'reward': 0.36200106143951416, 'kl': 0.0, 'actor_lr': 0.0001, 'actor_grad_norm': 1.7399299144744873, 'timing/ppo_train': 0.17873048782348633}\n"
    "(PPOTrainer pid=7085) INFO 11-21 17:43:41 experience_maker.py:116] 🚀 Starting experience making with 8 samples\n"
    "(PolicyModelActor pid=7022) "
    "\rTrain epoch [1/1]:   0%|          | 0/2 [00:00<?, ?it/s]\n"
    "(PolicyModelActor pid=7022) "
    "\rTrain epoch [1/1]:   0%|          | 0/2 [00:00<?, ?it/s, act_loss=0.23, reward=0.485, return=0.00295, gen_len=26, tot_len=50, kl=0, act_lr=0.0001, grad_norm=1.74]"
    "\rTrain epoch [1/1]:   0%|          | 0/2 [00:00<?, ?it/s, act_loss=-0.23, reward=0.358, return=-0.00295, gen_len=32, tot_len=69, kl=0, act_lr=9.55e-5, grad_norm=1.83]"
    "\rTrain epoch [1/1]: 100%|██████████| 2/2 [00:00<00:00, 19.38it/s, act_loss=-0.23, reward=0.358, return=-0.00295, gen_len=32, tot_len=69, kl=0, act_lr=9.55e-5, grad_norm=1.83]"
    "\rTrain epoch [1/1]: 100%|██████████| 2/2 [00:00<00:00, 19.33it/s, act_loss=-0.23, reward=0.358, return=-0.00295, gen_len=32, tot_len=69, kl=0, act_lr=9.55e-5, grad_norm=1.83]\n"
    "(PPOTrainer pid=7085) "
    "\rEpisode [1/1]:  25%|██▌       | 8/32 [00:01<00:03,  6.08it/s]\n"
    "(PPOTrainer pid=7085) INFO 11-21 17:43:41 ppo_trainer.py:551] ✨ Global step 2: {'score': 0.4213128834962845, 'policy_loss': -0.023798852131284517, 'reward': 0.4213128834962845, 'kl': 0.0, 'actor_lr': 9.554359905560886e-05, 'actor_grad_norm': 1.8294328451156616, 'timing/ppo_train': 0.10652709007263184}\n"
)
"""From `openrlhf.cli.train_ppo_ray` 0.11.2: global steps 1 and 2, with two micro-batches each; some figures left out."""


def sft_bars(losses: Sequence[float], epochs: int, chance: float = 0.0, seed: int = 0) -> str:
    """As the SFT trainer prints them: it counts (which tqdm prints when it likes, by `chance`), then sets the figures."""
    return _bars(losses, epochs, chance, seed, counts_first=True)


def dpo_bars(losses: Sequence[float], epochs: int, chance: float = 0.0, seed: int = 0) -> str:
    """As the DPO, RM and PPO trainers print them: figures first, then they count."""
    return _bars(losses, epochs, chance, seed, counts_first=False)


def _bars(losses: Sequence[float], epochs: int, chance: float, seed: int, counts_first: bool) -> str:
    clock = random.Random(seed)
    total = len(losses) // epochs
    text, shown = "\rTrain epoch:   0%|          | 0/3 [00:00<?, ?it/s]\n", ""
    for epoch in range(epochs):
        text += _bar(epoch, 0, total, "")
        for i in range(total):
            before, shown = shown if i else "", f", gpt_loss={losses[epoch * total + i]:.3g}, lr=1e-5"
            if counts_first:
                text += _bar(epoch, i + 1, total, before) if clock.random() < chance else ""
                text += _bar(epoch, i + 1, total, shown)
            else:
                text += _bar(epoch, i, total, shown)
                text += _bar(epoch, i + 1, total, shown) if clock.random() < chance else ""
        text += _bar(epoch, total, total, shown)
    return text


def _bar(epoch: int, count: int, total: int, figures: str) -> str:
    share = count / total
    bar = ("#" * round(10 * share)).ljust(10)
    return f"\rTrain step of epoch {epoch}: {share:4.0%}|{bar}| {count}/{total} [00:01<00:02,  9.45it/s{figures}]\x1b[A\n"


def lines(losses: Sequence[float], form: str = "gpt_loss: {}") -> str:
    """One line for each value, in a form that `compare_backends.py` finds."""
    return "".join(f"INFO {form.format(loss)}\n" for loss in losses)
