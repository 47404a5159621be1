"""Laws: a captured input changed in a way that must not matter, run through the same loaded Actor."""
