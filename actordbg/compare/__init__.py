"""Two sides of the same inputs as figures, and what a difference means: limits, the truth, the noise floor."""
