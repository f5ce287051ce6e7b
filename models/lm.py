"""The language model: embedding; norm, mixer, norm, MLP in each layer; norm and head."""

import hashlib
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kernels import linear_cross_entropy
from models.attention_residuals import SourceQuery
from models.configs import ModelConfig
from models.documents import Documents
from models.layers import Embedding, Projection, RMSNorm
from models.mixer import Layer, MixerState, ParameterInfo, collect_parameter_info
from models.stack import (
    Block,
    build_blocks,
    build_queries,
    run_attention_residuals,
    run_blocks,
)

ModelState = list[MixerState]
"""What a model remembers between two tokens: the state of each layer's mixer."""


class LanguageModel(nn.Module):
    """A causal language model over tokens 0 to `vocab_size` − 1; embedding and head are untied.

    Parameters are NaN until `initialize` has run; `build_model` does both.

    Args:
        config: the model's shape.
        vocab_size: number of tokens, from the data.

    Raises:
        ValueError: `vocab_size` is less than 1.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        if vocab_size < 1:
            raise ValueError(f"{vocab_size=} must be at least 1")
        self.config = config
        self.vocab_size = vocab_size
        self.embedding = Embedding(vocab_size, config.d_model)
        self.blocks = nn.ModuleList(build_blocks(config))
        self.queries = nn.ModuleList(build_queries(config))
        self.final_norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = Projection(config.d_model, (("head", vocab_size),), role="head")

    def initialize(self, generator: torch.Generator) -> None:
        """Draws every parameter from a stream of its own, named after its module.

        One number is taken from `generator`; each module's stream derives from it and from the
        module's name. So cells of one seed share the values of embedding, head and every other
        part of equal name and shape, whatever mixers stand between, and a difference between them
        is a difference of mixers.

        Args:
            generator: on the CPU, so that the values don't depend on the device.
        """
        if generator.device.type != "cpu":
            raise ValueError(f"generator lives on {generator.device}; initialisation needs the CPU")
        base = int(torch.randint(2**62, (), generator=generator))
        for name, module in self.named_modules():
            if isinstance(module, Layer):
                digest = hashlib.blake2b(f"{base}:{name}".encode(), digest_size=8).digest()
                seed = int.from_bytes(digest, "little") >> 1
                module.reset_parameters(torch.Generator().manual_seed(seed))

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T vocab"]:
        """Logits of the next token at every position."""
        logits: Tensor = self.head(self.hidden(tokens))
        return logits

    def hidden(
        self, tokens: Int[Tensor, "B T"], documents: Documents | None = None
    ) -> Float[Tensor, "B T D"]:
        """What the head reads: the normalised residual stream after the last layer.

        Args:
            tokens: windows.
            documents: the parts that the windows are read as, each as if it stood alone; None to
                read every window as one sequence.

        Raises:
            ValueError: documents of windows of another shape.
        """
        if documents is None:
            x, _ = self._run(self._embed(tokens), None)
        else:
            documents.check_fits(tokens)
            x, _ = self._run(self._embed(tokens.flatten()[None]), None, documents)
            x = x.view(*tokens.shape, -1)
        normed: Tensor = self.final_norm(x)
        return normed

    def loss(
        self,
        inputs: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        documents: Documents | None = None,
        counted: Int[Tensor, " counted"] | None = None,
    ) -> Float[Tensor, ""]:
        """Mean cross-entropy in nats per token, float32.

        Args:
            inputs: windows.
            targets: the token after each.
            documents: as in `hidden`.
            counted: rows of the flattened targets that the mean is taken over; None for all. The
                mean over none is 0.
        """
        if counted is None:
            return self._cross_entropy(self.hidden(inputs, documents), targets, "mean")
        hidden = self.hidden(inputs, documents).flatten(0, 1).index_select(0, counted)
        if not len(counted):
            return hidden.sum().float()
        chosen = targets.flatten().index_select(0, counted)
        return self._cross_entropy(hidden[None], chosen[None], "mean")

    def token_losses(
        self,
        inputs: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        documents: Documents | None = None,
    ) -> Float[Tensor, "B T"]:
        """Cross-entropy of each target in nats, float32; arguments as in `loss`."""
        hidden = self.hidden(inputs, documents)
        return self._cross_entropy(hidden, targets, "none").view(targets.shape)

    def initial_state(self, batch_size: int, dtype: torch.dtype = torch.float32) -> ModelState:
        """The empty memory of every layer, on the model's device.

        Args:
            batch_size: sequences, all of one length.
            dtype: of keys, values and convolution inputs; that of the arithmetic (bfloat16 under
                autocast). Recurrent memory is float32 always.
        """
        device = self.embedding.weight.device
        return [block.mixer.initial_state(batch_size, device, dtype) for block in self._blocks()]

    @torch.no_grad()
    def extend(
        self, tokens: Int[Tensor, "B T"], state: ModelState
    ) -> tuple[Float[Tensor, "B vocab"], ModelState]:
        """Reads T more tokens at once: the logits after the last, and the memory.

        Without gradients. Consumes `state`: keep a `models.generate.snapshot` to return to it.
        """
        x, after = self._run(self._embed(tokens), state)
        return self.head(self.final_norm(x[:, -1])), after

    @torch.no_grad()
    def read(
        self, tokens: Int[Tensor, "B T"], state: ModelState
    ) -> tuple[Float[Tensor, "B T vocab"], ModelState]:
        """As `extend`, with the logits after every one of the T tokens."""
        x, after = self._run(self._embed(tokens), state)
        return self.head(self.final_norm(x)), after

    @torch.no_grad()
    def step(
        self, tokens: Int[Tensor, " B"], state: ModelState
    ) -> tuple[Float[Tensor, "B vocab"], ModelState]:
        """As `extend` for one more token of every sequence."""
        x, after = self._run(self._embed(tokens), state)
        return self.head(self.final_norm(x)), after

    def parameter_info(self) -> dict[str, ParameterInfo]:
        """Role and blocks of every parameter, by the names of `named_parameters`."""
        return collect_parameter_info(self)

    @property
    def kernel_impl(self) -> str:
        """What serves the memory rule on the model's device; `sdpa` in a softmax stack."""
        served = {block.mixer.kernel_impl for block in self._blocks()}
        return served.pop() if len(served) == 1 else (served - {"sdpa"}).pop()

    def _run(
        self, x: Tensor, state: ModelState | None, documents: Documents | None = None
    ) -> tuple[Tensor, ModelState]:
        blocks, recompute = self._blocks(), self.config.recompute
        if self.config.routing.has_attention_residuals:
            queries = [cast(SourceQuery, query) for query in self.queries]
            return run_attention_residuals(
                blocks, queries, x, state, recompute=recompute, documents=documents
            )
        return run_blocks(blocks, x, state, recompute=recompute, documents=documents)

    def _cross_entropy(self, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
        hidden = hidden.flatten(0, 1)
        # Logits of all tokens are never held at once; under autocast they are bfloat16 products
        # of float32 masters, as any other projection, and the cross-entropy itself is float32.
        weight = self.head.weight.to(hidden.dtype)
        return linear_cross_entropy(hidden, weight, targets.flatten(), reduction=reduction)

    def _blocks(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    def _embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        # Under autocast the residual stream has the arithmetic's dtype, as in the published runs;
        # otherwise the first addition would widen it to float32 and double its memory traffic.
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        return x


def build_model(
    config: ModelConfig,
    vocab_size: int,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """A model with initial values that depend on `generator` alone, moved to `device`.

    Args:
        config: the model's shape.
        vocab_size: number of tokens.
        generator: on the CPU; advanced by one draw.
        device: where the model goes.

    Raises:
        ValueError: the generator is not on the CPU, or `config.impl` cannot serve on `device`.
    """
    model = LanguageModel(config, vocab_size)
    model.initialize(generator)
    model.to(device)
    # Refuses an implementation that the device lacks here, rather than in the first step.
    _ = model.kernel_impl
    return model
