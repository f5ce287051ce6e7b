"""Imports of large packages, out of the sight of the garbage collector.

What torch, Ray and MLflow make when they are imported stays until the process ends: 280,000 objects
in a trial's worker, and as many in a process with Tune, MLflow and matplotlib. The collector would
go through them again and again while they are made, in every full collection afterwards, and at the
end of the process.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collects nothing in a `with` block, and nothing of what is there at its end ever after.

    Blocks may be nested; the outermost counts. Not for blocks that are entered again and again:
    what becomes garbage later stays as well, where it refers to itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()
