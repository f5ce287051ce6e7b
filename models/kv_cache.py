"""Keys and values of the tokens read so far: a cache that grows, or a ring of the last few.

A growing cache holds token t at place t of `keys` and `values` `[B, KV, capacity, hd]` and doubles
its capacity when full, so that appending costs constant time on average. A ring holds it at t mod
window of `ring_keys` and `ring_values` `[B, KV, window, hd]`. Both count in `length` what was read.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from models.mixer import MixerState

MIN_CAPACITY = 64


def empty_cache(
    shape: tuple[int, int, int],
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> MixerState:
    """A cache without tokens.

    Args:
        shape: B, KV and hd.
        window: places of a ring, allocated at once; None for a cache that grows from nothing.
        device: of keys and values; the length lives on the CPU.
        dtype: of keys and values.
    """
    batch_size, kv_heads, head_dim = shape
    keys = torch.zeros(batch_size, kv_heads, window or 0, head_dim, device=device, dtype=dtype)
    length = torch.zeros((), dtype=torch.int64, device="cpu")
    if window is None:
        return {"keys": keys, "values": keys.clone(), "length": length}
    return {"ring_keys": keys, "ring_values": keys.clone(), "length": length}


def append(
    state: MixerState,
    k: Float[Tensor, "B KV T hd"],
    v: Float[Tensor, "B KV T hd"],
    window: int | None,
) -> tuple[Tensor, Tensor, MixerState]:
    """Keys and values that T new tokens can read, and the cache after them; consumes `state`.

    The readable ones end with the new ones, in order of time; only a ring that gets a single token
    returns its places as they lie, all of which that token reads.
    """
    if window is None:
        return _append_growing(state, k, v)
    return _append_ring(state, k, v, window)


def filled(state: MixerState, name: str) -> Tensor:
    """`state[name]` without the places of a growing cache that hold no token yet."""
    tensor = state[name]
    if name in ("keys", "values"):
        return tensor[:, :, : int(state["length"])]
    return tensor


def _append_growing(state: MixerState, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, MixerState]:
    length = int(state["length"])
    total = length + k.shape[2]
    caches = []
    for name, new in (("keys", k), ("values", v)):
        cache = state[name]
        if total > cache.shape[2]:
            capacity = max(MIN_CAPACITY, 2 * cache.shape[2], total)
            grown = cache.new_zeros(*cache.shape[:2], capacity, cache.shape[3])
            grown[:, :, :length] = cache[:, :, :length]
            cache = grown
        cache[:, :, length:total] = new
        caches.append(cache)
    keys, values = caches
    after = {"keys": keys, "values": values, "length": torch.tensor(total)}
    return keys[:, :, :total], values[:, :, :total], after


def _append_ring(
    state: MixerState, k: Tensor, v: Tensor, window: int
) -> tuple[Tensor, Tensor, MixerState]:
    length, num_new = int(state["length"]), k.shape[2]
    total = length + num_new
    after = {**state, "length": torch.tensor(total)}
    # Only the last `window` of the new tokens find a place.
    kept = torch.arange(max(length, total - window), total, device=k.device)
    readable = []
    for name, new in (("ring_keys", k), ("ring_values", v)):
        ring = state[name]
        past = torch.arange(max(0, length - window), length, device=k.device)
        # Read before the new tokens write over the oldest ones.
        earlier = ring[:, :, past % window] if num_new > 1 else None
        ring[:, :, kept % window] = new[:, :, -len(kept) :].to(ring.dtype)
        if earlier is None:
            readable.append(ring[:, :, : min(total, window)])
        else:
            readable.append(torch.cat([earlier, new.to(ring.dtype)], dim=2))
    keys, values = readable
    return keys, values, after
