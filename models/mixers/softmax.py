"""Causal softmax attention with grouped key and value heads and rotary positions."""
