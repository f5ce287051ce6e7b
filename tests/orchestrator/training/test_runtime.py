"""What a runtime does to its process."""

import re
import resource
import sys
from pathlib import Path

import pytest
import torch

from orchestrator.training.runtime import HUGE_HEAP_BYTES, Runtime, use_huge_pages

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
GIVES_HUGE_PAGES = HUGE_PAGES.is_file() and "[never]" not in HUGE_PAGES.read_text()


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


@pytest.mark.skipif(not GIVES_HUGE_PAGES, reason="the system gives no huge pages")
def test_tensors_lie_in_huge_pages() -> None:
    with Runtime().applied():
        kept = [torch.full((2**20,), 1.0) for _ in range(16)]
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    assert sum(float(x[-1]) for x in kept) == 16
    found = re.search(r"AnonHugePages:\s+(\d+) kB", text)
    assert found is not None
    assert int(found[1]) >= 32 << 10  # half of them; the others may lie where others lay before


def test_the_heap_grows_by_huge_pages_only_once() -> None:
    use_huge_pages()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls = use_huge_pages.cache_info().misses
    for _ in range(3):
        with Runtime().applied():
            pass
    assert use_huge_pages.cache_info().misses == calls
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb << 10 < HUGE_HEAP_BYTES // 8  # pages are taken when they are written to
