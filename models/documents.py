"""Documents inside windows: what lets a packed batch be read as if each stood alone.

The windows of a batch are laid end to end as one row `[1, W · T]`, cut at the start of every window
and of every document inside one:

    window        | a  a  a  b  b | b  c  c  c  c |
    cu_seqlens      0        3      5  6          10

Each part is a sequence of its own. Recurrent memory and the short convolution start empty there,
which the ops of `kernels` do by `cu_seqlens`; softmax reads only inside a part. Rotary positions go
on counting through a window: scores depend on their differences alone, so there is nothing to
reset. Routing, norms and MLPs work token by token.

Softmax asks for the blocks on the diagonal of the mask instead of the mask: parts of equal length
are one batch of ordinary causal attention, with its own window where it has one. So nothing of size
T² is held beyond what attention holds anyway, on a CPU and on a GPU, and no work is spent on what
would be masked; the price is a call of attention per distinct length.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The parts that a batch of windows is read as; `of` makes them.

    Attributes:
        num_windows: W.
        seq_len: T, tokens of a window.
        cu_seqlens: where parts begin and the last one ends, `[parts + 1]` int64, on the device.
        groups: every distinct length, ascending, with the tokens of its parts, one after the other,
            as rows of the batch laid end to end; on the device.
        order: where each token of the batch stands when the groups are joined; on the device.
    """

    num_windows: int
    seq_len: int
    cu_seqlens: Int[Tensor, " bounds"]
    groups: tuple[tuple[int, Int[Tensor, " rows"]], ...]
    order: Int[Tensor, " tokens"]

    @classmethod
    def of(
        cls,
        cu_seqlens: Int[Tensor, " bounds"],
        seq_len: int,
        device: torch.device | str = "cpu",
    ) -> "Documents":
        """The parts of a batch of whole windows.

        Args:
            cu_seqlens: as the attribute, on the CPU; every multiple of `seq_len` is among them.
            seq_len: T.
            device: that of the model.

        Raises:
            ValueError: bounds that do not start at 0, do not increase, or pass the end of a window.
        """
        bounds = cu_seqlens.tolist()
        if len(bounds) < 2 or bounds[0] != 0 or any(b <= a for a, b in pairwise(bounds)):
            raise ValueError(f"cu_seqlens={bounds} must start at 0 and increase")
        missing = set(range(0, bounds[-1] + 1, seq_len)) - set(bounds)
        if bounds[-1] % seq_len or missing:
            raise ValueError(
                f"cu_seqlens={bounds} must have every multiple of {seq_len=} up to its end, since "
                "windows are read apart"
            )
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
        groups = []
        for length in sorted(set(lengths.tolist())):
            rows = starts[lengths == length, None] + torch.arange(length)
            groups.append((length, rows.flatten()))
        order = torch.cat([rows for _, rows in groups]).argsort()
        return cls(
            num_windows=bounds[-1] // seq_len,
            seq_len=seq_len,
            cu_seqlens=cu_seqlens.long().to(device),
            groups=tuple((length, rows.to(device)) for length, rows in groups),
            order=order.to(device),
        )

    def check_fits(self, tokens: Tensor) -> None:
        """Refuses a batch of another shape.

        Raises:
            ValueError: naming both shapes.
        """
        expected = (self.num_windows, self.seq_len)
        if tuple(tokens.shape) != expected:
            raise ValueError(
                f"documents of {self.num_windows} windows of {self.seq_len} tokens, but tokens "
                f"have shape {list(tokens.shape)}; expected {list(expected)}"
            )


def refuse_state(documents: Documents | None, state: object) -> None:
    """Refuses documents where reading goes on from a memory.

    Raises:
        ValueError: both are given.
    """
    if documents is not None and state is not None:
        raise ValueError(
            "documents are given together with a memory to go on from; documents cut whole windows "
            "that start empty, so read them without a memory, or a single text with one"
        )
