"""Reading a prompt, writing on from it, and going back: prefill, decode, snapshot, rollback.

`LanguageModel.step` and its siblings consume the state they get. What outlives them is a copy:

    snapshot    everything, self-contained; can be written to a file and read in another process
    bookmark    recurrent memory copied, growing key-value caches shared: valid while the state that
                it was taken from only grows; what speculative decoding keeps for each token

A memory update cannot be undone by arithmetic: S~ = α S divides by α on the way back, which for a
small decay multiplies the rounding error of the state by 1/α. So going back takes a kept state, or
an older one and the tokens since.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.kv_cache import filled
from models.lm import LanguageModel, ModelState

# Pieces of a prompt that are read at once: bounds the activations, not the result.
PREFILL_TOKENS = 4096

ChooseToken = Callable[[Float[Tensor, "B vocab"]], Int[Tensor, " B"]]
"""The next token of every sequence from its logits."""


def greedy(logits: Float[Tensor, "B vocab"]) -> Int[Tensor, " B"]:
    """The most likely token; the lowest id among equals."""
    return logits.argmax(-1)


def sampled(generator: torch.Generator, temperature: float = 1.0) -> ChooseToken:
    """Draws from softmax(logits / temperature).

    Args:
        generator: on the device of the logits.
        temperature: greater than 0; towards 0 the draws approach `greedy`.

    Raises:
        ValueError: the temperature isn't positive.
    """
    if not temperature > 0:
        raise ValueError(f"{temperature=} must be positive; use greedy for the most likely token")

    def choose(logits: Tensor) -> Tensor:
        shares = (logits.float() / temperature).softmax(-1)
        return torch.multinomial(shares, 1, generator=generator)[:, 0]

    return choose


def prefill(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    state: ModelState | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "B vocab"], ModelState]:
    """Reads a prompt in parallel: the logits after it and the memory of it.

    Args:
        model: the model.
        tokens: at least one for each sequence.
        state: what was read before; consumed. None for nothing.
        dtype: of the caches of an empty state; see `LanguageModel.initial_state`.

    Raises:
        ValueError: there are no tokens.
    """
    if tokens.shape[1] == 0:
        raise ValueError(f"tokens has shape {list(tokens.shape)}; a prompt needs at least one")
    after = model.initial_state(tokens.shape[0], dtype) if state is None else state
    for piece in tokens.split_with_sizes(_pieces(tokens.shape[1]), dim=1):
        logits, after = model.extend(piece, after)
    return logits, after


def _pieces(length: int) -> list[int]:
    whole, rest = divmod(length, PREFILL_TOKENS)
    return [PREFILL_TOKENS] * whole + ([rest] if rest else [])


def decode(
    model: LanguageModel,
    logits: Float[Tensor, "B vocab"],
    state: ModelState,
    num_tokens: int,
    choose: ChooseToken = greedy,
) -> tuple[Int[Tensor, "B N"], Float[Tensor, "B vocab"], ModelState]:
    """Writes `num_tokens` tokens: these, the logits after them and the memory with them.

    Args:
        model: the model.
        logits: after what was read so far.
        state: memory of what was read so far; consumed.
        num_tokens: N, at least 1.
        choose: the next tokens from their logits.

    Raises:
        ValueError: `num_tokens` is less than 1.
    """
    if num_tokens < 1:
        raise ValueError(f"{num_tokens=} must be at least 1")
    written = []
    for _ in range(num_tokens):
        token = choose(logits)
        written.append(token)
        logits, state = model.step(token, state)
    return torch.stack(written, dim=1), logits, state


def snapshot(state: ModelState) -> ModelState:
    """A copy that later steps leave alone; key-value caches are cut to the tokens in them."""
    return [{name: filled(layer, name).clone() for name in layer} for layer in state]


def snapshot_bytes(state: ModelState) -> int:
    """Bytes that a snapshot of this state holds, over the whole batch, without bookkeeping."""
    return sum(
        filled(layer, name).nbytes
        for layer in state
        for name, tensor in layer.items()
        if tensor.is_floating_point()
    )


def save_snapshot(path: Path, model: LanguageModel, state: ModelState) -> None:
    """Writes a state to a safetensors file, with the shape of the model that made it."""
    tensors = {
        f"{index}.{name}": filled(layer, name).contiguous()
        for index, layer in enumerate(state)
        for name in layer
    }
    save_file(tensors, path, metadata={"model": _shape(model)})


def load_snapshot(path: Path, model: LanguageModel) -> ModelState:
    """Reads a state back, onto the model's device.

    Raises:
        ValueError: a model of another shape wrote the file.
    """
    device = model.embedding.weight.device
    state: ModelState = [{} for _ in range(model.config.num_layers)]
    with safe_open(path, framework="pt") as file:
        written, present = json.loads(file.metadata()["model"]), json.loads(_shape(model))
        differing = sorted(name for name in present if written.get(name) != present[name])
        if differing:
            raise ValueError(
                f"{path} holds the state of a model that differs in {', '.join(differing)}; load "
                "it into the model that wrote it"
            )
        for key in file.keys():  # noqa: SIM118 (a file, not a mapping)
            index, name = key.split(".")
            tensor = file.get_tensor(key)
            # The length of a cache is bookkeeping and stays on the CPU.
            state[int(index)][name] = tensor if name == "length" else tensor.to(device)
    return state


def _shape(model: LanguageModel) -> str:
    """What decides the meaning of a state, as JSON: all of the config but how it is computed."""
    values = asdict(model.config)
    for without_effect in ("impl", "recompute", "compile"):
        del values[without_effect]
    return json.dumps({**values, "vocab_size": model.vocab_size}, sort_keys=True)


def bookmark(state: ModelState) -> ModelState:
    """A copy that shares the growing caches: cheap, and valid while the original only grows.

    Tokens appended to either one write behind the shared tokens, so only one of the two may go on.
    """
    return [
        {
            name: tensor if name in ("keys", "values") else tensor.clone()
            for name, tensor in layer.items()
        }
        for layer in state
    ]


class Draft:
    """Tokens read ahead on trial, of which a first part is accepted, as in speculative decoding.

    Args:
        model: the model.
        state: memory of what is certain; consumed.
        keeps_every_state: keep one bookmark per drafted token, so that accepting costs nothing
            but each token is read alone; otherwise read all at once and, where not all are
            accepted, read the accepted ones again from the bookmark before them.
    """

    def __init__(self, model: LanguageModel, state: ModelState, *, keeps_every_state: bool) -> None:
        self._model = model
        self._keeps_every_state = keeps_every_state
        self._bookmarks = [bookmark(state)]
        self._state: ModelState | None = state
        self._tokens: Tensor | None = None

    def read(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N vocab"]:
        """The logits after each of N drafted tokens.

        Raises:
            ValueError: a draft was read already.
        """
        if self._tokens is not None or self._state is None:
            raise ValueError("this draft was read already; accept a part and start another")
        self._tokens = tokens
        if not self._keeps_every_state:
            logits, self._state = self._model.read(tokens, self._state)
            return logits
        each = []
        for token in tokens.unbind(1):
            step_logits, self._state = self._model.step(token, self._state)
            each.append(step_logits)
            self._bookmarks.append(bookmark(self._state))
        return torch.stack(each, dim=1)

    def accept(self, num_tokens: int) -> ModelState:
        """The memory after the first `num_tokens` drafted tokens; the draft is spent.

        Raises:
            ValueError: more tokens than were read, a negative number, or a spent draft.
        """
        if self._tokens is None or self._state is None:
            raise ValueError("nothing to accept: read a draft first, and accept it once")
        drafted = self._tokens.shape[1]
        if not 0 <= num_tokens <= drafted:
            raise ValueError(f"{num_tokens=} must lie between 0 and the {drafted} drafted tokens")
        whole, self._state = self._state, None
        if num_tokens == drafted:
            return whole
        if self._keeps_every_state or num_tokens == 0:
            return self._bookmarks[num_tokens]
        _, state = self._model.extend(self._tokens[:, :num_tokens], self._bookmarks[0])
        return state
