"""Logs of trainings for the tests: made-up ones that print as tqdm and OpenRLHF's trainers do."""

import random


def sft_bars(losses, epochs, chance=0.0, seed=0):
    """As the SFT trainer prints them: it counts (which tqdm prints when it likes, by `chance`), then sets the figures."""
    return _bars(losses, epochs, chance, seed, counts_first=True)


def dpo_bars(losses, epochs, chance=0.0, seed=0):
    """As the DPO, RM and PPO trainers print them: figures first, then they count."""
    return _bars(losses, epochs, chance, seed, counts_first=False)


def _bars(losses, epochs, chance, seed, counts_first):
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


def _bar(epoch, count, total, figures):
    share = count / total
    bar = ("#" * round(10 * share)).ljust(10)
    return f"\rTrain step of epoch {epoch}: {share:4.0%}|{bar}| {count}/{total} [00:01<00:02,  9.45it/s{figures}]\x1b[A\n"


def lines(losses, form="gpt_loss: {}"):
    """One line for each value, in a form that `compare_backends.py` finds."""
    return "".join(f"INFO {form.format(loss)}\n" for loss in losses)
