"""The registry of mixers: name → (config class, module class)."""

from models.configs import (
    DeltaNetConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    GatedLinearConfig,
    KimiDeltaConfig,
    LinearConfig,
    LinearUnnormalizedConfig,
    MixerConfig,
)
from models.mixer import Mixer
from models.mixers.deltanet import DeltaNet
from models.mixers.gated_deltanet import GatedDeltaNet
from models.mixers.gated_deltanet2 import GatedDeltaNet2
from models.mixers.gated_linear import GatedLinear
from models.mixers.kimi_delta import KimiDelta
from models.mixers.linear import Linear, LinearUnnormalized
from models.mixers.softmax import Softmax

MIXERS: dict[str, tuple[type[MixerConfig], type[Mixer]]] = {
    "softmax": (MixerConfig, Softmax),
    "linear": (LinearConfig, Linear),
    "linear_unnormalized": (LinearUnnormalizedConfig, LinearUnnormalized),
    "gated_linear": (GatedLinearConfig, GatedLinear),
    "deltanet": (DeltaNetConfig, DeltaNet),
    "gated_deltanet": (GatedDeltaNetConfig, GatedDeltaNet),
    "kimi_delta": (KimiDeltaConfig, KimiDelta),
    "gated_deltanet2": (GatedDeltaNet2Config, GatedDeltaNet2),
}
"""Every mixer by its name; the config classes are those of `models.configs.MIXER_CONFIGS`."""
