"""What a runtime does to its process."""

import resource
import sys

import pytest
import torch

from orchestrator.training.runtime import Runtime


@pytest.mark.skipif(sys.platform != "linux", reason="what is kept is glibc's to say")
def test_memory_that_a_step_freed_is_not_faulted_in_again() -> None:
    def step() -> int:
        """Page faults of filling and freeing twenty tensors of 1 MiB."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.full((2**18,), 1.0) for _ in range(20)]
        assert sum(float(x[-1]) for x in kept) == 20
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with Runtime().applied():
        # The first ones find their places in a heap that other tests have used.
        faults = [step() for _ in range(5)]
        assert faults[-1] < 256  # pages of one tensor; 5,000 where all is given back
