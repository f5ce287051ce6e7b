"""Tensor to tensor: every memory rule as a reference loop, a chunked form and Triton kernels."""
