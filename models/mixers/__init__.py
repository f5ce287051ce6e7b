"""The registry of mixers: name → (config class, module class)."""

from typing import Any

from models.mixer import MixerConfig
from models.mixers.softmax import Softmax

# The options of softmax layers stand in `model.softmax`, since hybrids have such layers too.
MIXERS: dict[str, tuple[type[MixerConfig], Any]] = {
    "softmax": (MixerConfig, Softmax),
}
