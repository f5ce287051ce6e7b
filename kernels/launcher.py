"""Launching Triton kernels for less of the host's time than Triton itself takes.

Triton binds and specialises every argument at every call to find the compiled kernel, which took
half of the host's time for kernels of 35 arguments (log, "less of the host's time"). What it looks
at is little: of a tensor its dtype and whether it is aligned to 16 bytes, of a number its type,
whether it is 1 and whether 16 divides it. `launch_kernel` keeps the compiled kernel by the same
description, with numbers taken as they are, and hands it the arguments in the order that they are
declared in.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

MOST_KEPT = 4096
"""Kept kernels beyond which all are forgotten: every length of a sequence is an entry."""

OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""Options of Triton's that a call may have beside the kernel's arguments."""

_kept: dict[tuple[Any, ...], Any] = {}
_in_order: dict[Any, Callable[[dict[str, Any]], tuple[Any, ...]]] = {}
"""Of each kernel, what takes its arguments out of a call in the order of their declaration."""


def launch_kernel(kernel: Any, num_programs: int, **arguments: Any) -> None:
    """Runs `kernel` on a grid of `num_programs`, as `kernel[(num_programs,)](**arguments)` does.

    Args:
        kernel: of `triton.jit`, without hooks of its own; in the interpreter a call is passed on.
        num_programs: size of the grid, along its first axis.
        arguments: all by name: the kernel's own, and `OPTIONS` of Triton's.
    """
    in_order = _in_order.get(kernel)
    if in_order is None:
        in_order = _in_order[kernel] = itemgetter(*kernel.arg_names)
    values = in_order(arguments)
    key = (
        kernel,
        len(arguments),
        torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        *map(arguments.get, OPTIONS),
        *map(type, values),  # 2 and 2.0 are equal, but not one type of argument.
        *[(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in values],
    )
    compiled = _kept.get(key)
    if compiled is not None:
        compiled[num_programs, 1, 1](*values)
        return
    unknown = arguments.keys() - {*kernel.arg_names, *OPTIONS}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise TypeError(f"{names}: none of the arguments of {kernel}, nor of {OPTIONS}")
    compiled = kernel[(num_programs,)](**arguments)
    if compiled is None:  # The interpreter compiles nothing.
        return
    if len(_kept) >= MOST_KEPT:
        _kept.clear()
    _kept[key] = compiled
