"""Options of the memory rules as dataclasses, and the names of the mixers; imports no torch."""

from dataclasses import dataclass

DT_INITS = ("loguniform", "ones")
GATED_DELTANET2_VARIANTS = ("full", "lowrank")
GATED_LINEAR_DECAYS = ("none", "head", "channel")


@dataclass(kw_only=True, slots=True)
class MixerConfig:
    """Options of a memory rule; each mixer's own dataclass extends it.

    Attributes:
        name: the mixer's name in `models.mixers.MIXERS`.
    """

    name: str = "softmax"


@dataclass(kw_only=True, slots=True)
class LinearConfig(MixerConfig):
    """Additive memory with ELU + 1 features and a running normaliser.

    Attributes:
        unused_beta: keep one dead projection row per value head, as the published code does to
            give the additive rule the parameter count of DeltaNet.
    """

    name: str = "linear"
    unused_beta: bool = False


@dataclass(kw_only=True, slots=True)
class LinearUnnormalizedConfig(LinearConfig):
    """Additive memory over L2-normalised keys, read without a normaliser."""

    name: str = "linear_unnormalized"


@dataclass(kw_only=True, slots=True)
class DeltaNetConfig(MixerConfig):
    """The delta rule without decay.

    Attributes:
        negative_eigenvalues: double the write strength to (0, 2), so that the state's transition
            can have negative eigenvalues.
    """

    name: str = "deltanet"
    negative_eigenvalues: bool = False


@dataclass(kw_only=True, slots=True)
class DecayConfig(MixerConfig):
    """Options shared by every rule whose decay is learned from the input.

    Attributes:
        dt_init: how `dt_bias` starts: `loguniform`, the inverse softplus of step sizes drawn
            log-uniformly from [1e-3, 0.1], or `ones`, which starts almost memoryless.
    """

    dt_init: str = "loguniform"

    def __post_init__(self) -> None:
        if self.dt_init not in DT_INITS:
            raise ValueError(
                f"model.mixer.dt_init={self.dt_init!r} must be one of {', '.join(DT_INITS)}"
            )


@dataclass(kw_only=True, slots=True)
class GatedDeltaNetConfig(DecayConfig):
    """The delta rule with one decay per value head.

    Attributes:
        negative_eigenvalues: double the write strength to (0, 2), so that the state's transition
            can have negative eigenvalues.
    """

    name: str = "gated_deltanet"
    negative_eigenvalues: bool = False


@dataclass(kw_only=True, slots=True)
class KimiDeltaConfig(DecayConfig):
    """The delta rule with one decay per key channel of every value head.

    Attributes:
        negative_eigenvalues: double the write strength to (0, 2), so that the state's transition
            can have negative eigenvalues.
    """

    name: str = "kimi_delta"
    negative_eigenvalues: bool = False


@dataclass(kw_only=True, slots=True)
class GatedDeltaNet2Config(DecayConfig):
    """The delta rule with decay and erase gate per key channel and write gate per value channel.

    Attributes:
        variant: `full`, every gate a full-rank projection, or `lowrank`, decay and output gate
            through a bottleneck of one head's value dimension.
        negative_eigenvalues: double the erase gate to (0, 2).
    """

    name: str = "gated_deltanet2"
    variant: str = "full"
    negative_eigenvalues: bool = False

    def __post_init__(self) -> None:
        # A slots dataclass is a new class, which leaves the zero-argument super() of its body
        # without its cell.
        DecayConfig.__post_init__(self)
        if self.variant not in GATED_DELTANET2_VARIANTS:
            raise ValueError(
                f"model.mixer.variant={self.variant!r} must be one of "
                f"{', '.join(GATED_DELTANET2_VARIANTS)}"
            )


@dataclass(kw_only=True, slots=True)
class GatedLinearConfig(DecayConfig):
    """Additive memory with ELU + 1 features, a normalised read and a full-width output gate.

    Attributes:
        decay: `none` keeps everything; `head` and `channel` let memory and normaliser fade at a
            learned rate per value head, or per key channel of each. `dt_init` matters only then.
    """

    name: str = "gated_linear"
    decay: str = "none"

    def __post_init__(self) -> None:
        DecayConfig.__post_init__(self)
        if self.decay not in GATED_LINEAR_DECAYS:
            raise ValueError(
                f"model.mixer.decay={self.decay!r} must be one of {', '.join(GATED_LINEAR_DECAYS)}"
            )


MIXER_CONFIGS: dict[str, type[MixerConfig]] = {
    # The options of softmax layers stand in `model.softmax`, since hybrids have such layers too.
    "softmax": MixerConfig,
    "linear": LinearConfig,
    "linear_unnormalized": LinearUnnormalizedConfig,
    "gated_linear": GatedLinearConfig,
    "deltanet": DeltaNetConfig,
    "gated_deltanet": GatedDeltaNetConfig,
    "kimi_delta": KimiDeltaConfig,
    "gated_deltanet2": GatedDeltaNet2Config,
}
"""Every mixer's options by its name; `models.mixers.MIXERS` adds the module classes."""
