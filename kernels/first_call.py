"""`python -m kernels.first_call OP IMPL B T H HV K V`: seconds of the first forward and backward.

Run in a fresh process by `benchmark.first_call_seconds`; the CUDA context exists before the clock
starts, so that compilation and loading are what is measured.
"""

import sys
import time

import torch

from kernels.benchmark_ops import BenchmarkShape, implementation, op_inputs


def main(arguments: list[str]) -> float:
    """Seconds of the first call."""
    op, impl, *sizes = arguments
    values = op_inputs(op, BenchmarkShape(*map(int, sizes)), torch.Generator("cuda").manual_seed(0))
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = implementation(op, impl)(**values)
    torch.autograd.grad(out, list(values.values()), torch.randn_like(out))
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.stdout.write(f"{main(sys.argv[1:]):.3f}\n")
