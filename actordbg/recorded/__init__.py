"""Laws of what a training run recorded: its calls read as rows, losses, advantages, turns, weights. Nothing is replayed."""
