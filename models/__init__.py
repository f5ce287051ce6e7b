"""Parameters and projections: tokens in, logits out. Knows `kernels` and torch, no sweeps."""
