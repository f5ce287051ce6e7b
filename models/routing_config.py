"""Options of cross-layer routing; imports no torch."""

from dataclasses import dataclass

ROUTING_KINDS = (
    "none",
    "cler",
    "cler_h",
    "clvr",
    "surprise_gated",
    "concatenated",
    "self_transform",
    "attention_residuals",
    "attention_residuals_cler_h",
    "attention_residuals_clvr",
)
ROUTED_RESIDUALS = ("written", "decayed", "paper")
GAMMA_SHAPES = ("scalar", "head", "channel")

# Mixers of the common shell, whose values can be routed; those with a delta rule, whose errors can
# be; and those whose decay, if any, is one number per head, which the residual before the decay or
# before the write strength needs.
VALUE_HOSTS = (
    "linear",
    "linear_unnormalized",
    "deltanet",
    "gated_deltanet",
    "kimi_delta",
    "gated_deltanet2",
)
ERROR_HOSTS = ("deltanet", "gated_deltanet", "kimi_delta", "gated_deltanet2")
PLAIN_ERROR_HOSTS = ("deltanet", "gated_deltanet")


@dataclass(kw_only=True, slots=True)
class RoutingConfig:
    """Signals of one memory layer that reach later layers past the residual stream's norms.

    Attributes:
        kind: `none`; `cler`, the error of the nearest lower memory layer added to the values to
            store; `cler_h` and `clvr`, a projection of the layer's own error or value added to the
            hidden stream after it; `surprise_gated`, `concatenated` and `self_transform`, controls
            of these; `attention_residuals`, learned averages of all earlier contributions, alone
            or together with `cler_h` or `clvr`.
        residual: the error that is routed: `written`, u = β (v − α Sᵀk), as the published numbers
            have it; `decayed`, v − α Sᵀk; `paper`, v − Sᵀk with the memory before its decay, as
            the text defines it. Not read where no error is routed.
        rank: rank of the projection into the hidden stream; null for a full matrix.
        normalized: divide the projected signal by its root mean square.
        gamma: under `cler`, one factor per layer (`scalar`), per value head or per channel.
        gamma_init: where these factors start.
    """

    kind: str = "none"
    residual: str = "written"
    rank: int | None = None
    normalized: bool = False
    gamma: str = "scalar"
    gamma_init: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", ROUTING_KINDS),
            ("residual", ROUTED_RESIDUALS),
            ("gamma", GAMMA_SHAPES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"model.routing.{name}={getattr(self, name)!r} must be one of "
                    f"{', '.join(allowed)}"
                )
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"model.routing.rank={self.rank} must be at least 1")

    @property
    def has_attention_residuals(self) -> bool:
        """Whether sub-layers read learned averages instead of the running sum."""
        return self.kind.startswith("attention_residuals")

    @property
    def hidden_signal(self) -> str | None:
        """What is projected into the hidden stream, by the name of its kind; None for nothing."""
        signal = self.kind.removeprefix("attention_residuals").removeprefix("_")
        return None if signal in ("", "none", "cler") else signal

    @property
    def routes_error(self) -> bool:
        """Whether `residual` matters."""
        errors = ("cler_h", "surprise_gated", "concatenated")
        return self.kind == "cler" or self.hidden_signal in errors


def check_routing_host(routing: RoutingConfig, mixer: str) -> None:
    """Refuses a mixer that has not the signal that is routed.

    Raises:
        ValueError: naming the mixers that have it.
    """
    if routing.kind in ("none", "attention_residuals"):
        return
    needs_plain_error = routing.routes_error and routing.residual != "written"
    hosts: tuple[str, ...] = VALUE_HOSTS
    if routing.routes_error:
        hosts = PLAIN_ERROR_HOSTS if needs_plain_error else ERROR_HOSTS
    if mixer not in hosts:
        residual = f" with model.routing.residual={routing.residual!r}" if needs_plain_error else ""
        raise ValueError(
            f"model.routing.kind={routing.kind!r}{residual} has no signal in "
            f"model.mixer.name={mixer!r}; its hosts are {', '.join(hosts)}"
        )
