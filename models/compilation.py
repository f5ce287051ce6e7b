"""Compiled layers: what `torch.compile` may fuse, and what it has to leave alone.

Each layer is compiled by itself, since all layers of a kind are one piece of code: compiling takes
as long for 3 layers as for 30. Memory rules stay outside (`Mixer.uncompiled`): they are kernels, or
chunked forms whose loops would be unrolled into thousands of operations. What is left to fuse are
norms, convolutions, gates, activations and residual additions. Reading and writing token by token
is not compiled: every length would be a graph of its own.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from models.lm import LanguageModel
from models.mixer import Mixer
from models.stack import Block


def compile_layers(model: LanguageModel, backend: str = "inductor") -> None:
    """Compiles the layers of a model in place; names of parameters and buffers stay.

    The first pass of each shape, with and without gradients, takes the time of a compilation.

    Args:
        model: on its device.
        backend: of `torch.compile`.
    """
    for block in model.blocks:
        assert isinstance(block, Block)
        _leave_apart(type(block.mixer))
        block.compile(backend=backend, dynamic=False)


def eager(model: LanguageModel) -> AbstractContextManager[object]:
    """In which a model runs uncompiled: for a pass of a shape, or with hooks, of its own."""
    # Asking for it imports the compiler, which takes seconds.
    return torch.compiler.set_stance("force_eager") if model.config.compile else nullcontext()


@cache
def _leave_apart(kind: type[Mixer]) -> None:
    """Marks the methods of a class once, which changes nothing outside of compiled graphs.

    Of the class and not of each mixer: a graph holds for the functions that it was traced with, so
    marks of one layer's own would make a graph per layer.
    """
    for name in kind.uncompiled:
        setattr(kind, name, torch.compiler.disable(getattr(kind, name)))  # type: ignore[no-untyped-call]
