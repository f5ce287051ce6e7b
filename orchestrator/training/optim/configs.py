"""Options of the optimizers as dataclasses, and their names; imports no torch, as `models.configs`.

Muon's matrix step is named by a variant; `MATRIX_STEPS` says what each name means, and every choice
in it can be replaced by a key of its own. `MuonConfig.matrix_step` resolves the two, so that a
record can hold what was really done.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace

ARITHMETICS = ("auto", "fp32", "bf16")
SHAPE_FACTORS = ("spectral", "original", "match_rms", "none")
SECOND_MOMENTS = ("off", "row", "longer_side")
SPLITS = ("blocks", "attention", "fused")
ADAM_SCHEDULES = ("decayed", "constant")

Triple = tuple[float, float, float]

NEWTON_SCHULZ: dict[str, tuple[Triple, ...]] = {
    # Jordan's quintic, github.com/KellerJordan/Muon: steepest at 0, singular values end in 0.7–1.2.
    "keller": ((3.4445, -4.7750, 2.0315),),
    # NVIDIA Emerging-Optimizers v0.2.0, "quintic": one triple per step, for exactly five steps.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., arXiv 2505.16932, for five steps with safety 2e-2 and cushion 2.
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # Order five of the Padé family: converges for every norm below √3, but slowly from small ones.
    "classical": ((15 / 8, -10 / 8, 3 / 8),),
}
"""Named coefficients (a, b, c) of X ← aX + (bA + cA²)X, one triple a step; the last one repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixStep:
    """Every choice that makes one Muon; the words are those of `MuonConfig`."""

    nesterov: bool
    coefficients: str
    ns_steps: int
    shape_factor: str
    second_moment: str
    second_moment_floor: float
    restore_norm: bool
    cautious_decay: bool


MATRIX_STEPS: dict[str, MatrixStep] = {
    # "adaptive_muon" with the normuon moment of Emerging-Optimizers v0.2.0; from v0.3.0 on the norm
    # is restored under the same name. The factor cancels in the second moment: it only keeps v
    # near 1, far from its floor.
    "paper": MatrixStep(
        nesterov=True,
        coefficients="quintic",
        ns_steps=5,
        shape_factor="spectral",
        second_moment="longer_side",
        second_moment_floor=1e-8,
        restore_norm=False,
        cautious_decay=False,
    ),
    # github.com/KellerJordan/Muon.
    "keller": MatrixStep(
        nesterov=True,
        coefficients="keller",
        ns_steps=5,
        shape_factor="original",
        second_moment="off",
        second_moment_floor=0.0,
        restore_norm=False,
        cautious_decay=False,
    ),
    # Li et al., arXiv 2510.05491, as in github.com/zichongli5/NorMuon; there 1e-10 is added to √v,
    # here v has the floor (1e-10)².
    "normuon": MatrixStep(
        nesterov=True,
        coefficients="keller",
        ns_steps=5,
        shape_factor="original",
        second_moment="row",
        second_moment_floor=1e-20,
        restore_norm=True,
        cautious_decay=False,
    ),
}
"""What each `optimizer.variant` means."""


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """What every optimizer has; each extends it.

    Attributes:
        name: the optimizer's name in `OPTIMIZERS`.
        lr: peak learning rate (of the matrix group where there are several groups).
    """

    name: str = "adamw"
    lr: float = 3e-4

    def __post_init__(self) -> None:
        _check_at_least("optimizer.lr", self.lr, 0.0)


@dataclass(kw_only=True, slots=True)
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay on every tensor that is neither 1-D nor a bias.

    Attributes:
        betas: decay of the first and of the second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: λ; each update shrinks a decayed weight by the factor 1 − rate · λ.
    """

    name: str = "adamw"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        _check_betas("optimizer.betas", self.betas)
        _check_above("optimizer.eps", self.eps, 0.0)
        _check_at_least("optimizer.weight_decay", self.weight_decay, 0.0)


@dataclass(kw_only=True, slots=True)
class MuonConfig(OptimizerConfig):
    """Muon on hidden matrices, Adam on the rest. A null among the choices means the variant's own.

    Attributes:
        lr: peak rate of the matrix group. Of `paper` it is the step per element at rest, so rates
            are Adam-like; `keller` and `normuon` were published with 0.02.
        adam_lr: peak rate of the Adam group.
        variant: the matrix step, one of `MATRIX_STEPS`.
        momentum: μ of the gradient average.
        second_moment_beta: decay of the second moment, where there is one.
        weight_decay: λ of the matrix group, whatever the variant; the published `keller` and
            `normuon` used 0.
        nesterov: look ahead by one more step of the average.
        coefficients: of the Newton–Schulz iteration, one of `NEWTON_SCHULZ`.
        ns_steps: its steps; a set with one triple per step takes no fewer than it was made for.
        shape_factor: `spectral` √max(rows, cols), `original` √max(1, rows/cols), `match_rms`
            0.2 √max(rows, cols), or `none`.
        second_moment: `off`; `row`, one per row; `longer_side`, one per index of the longer side.
        restore_norm: scale back to the norm from before the second moment.
        cautious_decay: decay only the elements whose update points away from zero's side, i.e.
            where update · weight ≥ 0.
        arithmetic: of the iteration: `auto` (bf16 on CUDA, fp32 on CPU), `fp32` or `bf16`.
        split: `blocks` orthogonalises q, k, v, gate and up of a fused projection each alone,
            `attention` only those of softmax layers, `fused` every stored matrix whole.
        adam_schedule: `decayed`, or `constant` after the same warm-up.
        adam_betas: as AdamW's.
        adam_eps: as AdamW's.
        adam_weight_decay: λ of the Adam group, on tensors that are neither 1-D nor biases.
        role_groups: role to `matrix` or `adam`, where it differs from the usual group.
    """

    name: str = "muon"
    lr: float = 3.6e-4
    adam_lr: float = 1.5e-3
    variant: str = "paper"
    momentum: float = 0.95
    second_moment_beta: float = 0.95
    weight_decay: float = 0.1
    nesterov: bool | None = None
    coefficients: str | None = None
    ns_steps: int | None = None
    shape_factor: str | None = None
    second_moment: str | None = None
    restore_norm: bool | None = None
    cautious_decay: bool | None = None
    arithmetic: str = "auto"
    split: str = "blocks"
    adam_schedule: str = "decayed"
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    adam_eps: float = 1e-8
    adam_weight_decay: float = 0.0
    role_groups: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        _check_choice("optimizer.variant", self.variant, MATRIX_STEPS)
        _check_choice("optimizer.arithmetic", self.arithmetic, ARITHMETICS)
        _check_choice("optimizer.split", self.split, SPLITS)
        _check_choice("optimizer.adam_schedule", self.adam_schedule, ADAM_SCHEDULES)
        _check_at_least("optimizer.adam_lr", self.adam_lr, 0.0)
        _check_at_least("optimizer.weight_decay", self.weight_decay, 0.0)
        _check_at_least("optimizer.adam_weight_decay", self.adam_weight_decay, 0.0)
        _check_above("optimizer.adam_eps", self.adam_eps, 0.0)
        _check_betas("optimizer.adam_betas", self.adam_betas)
        _check_beta("optimizer.momentum", self.momentum)
        _check_beta("optimizer.second_moment_beta", self.second_moment_beta)
        for role, group in self.role_groups.items():
            _check_choice(f"optimizer.role_groups.{role}", group, ("matrix", "adam"))
        _check_matrix_step(self.matrix_step())

    def matrix_step(self) -> MatrixStep:
        """The variant's choices, with those replaced that have a key of their own."""
        own = {
            f.name: value
            for f in fields(MatrixStep)
            if (value := getattr(self, f.name, None)) is not None
        }
        return replace(MATRIX_STEPS[self.variant], **own)


OPTIMIZER_CONFIGS: dict[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
    "muon": MuonConfig,
}
"""Every optimizer's options by its name; `orchestrator.training.optim.build` has the builders."""


def _check_matrix_step(step: MatrixStep) -> None:
    _check_choice("optimizer.coefficients", step.coefficients, NEWTON_SCHULZ)
    _check_choice("optimizer.shape_factor", step.shape_factor, SHAPE_FACTORS)
    _check_choice("optimizer.second_moment", step.second_moment, SECOND_MOMENTS)
    made_for = len(NEWTON_SCHULZ[step.coefficients])
    if step.ns_steps < made_for:
        raise ValueError(
            f"optimizer.ns_steps={step.ns_steps} must be at least {made_for}: the "
            f"{step.coefficients!r} coefficients were made for that many steps"
        )
    if step.restore_norm and step.second_moment == "off":
        raise ValueError(
            "optimizer.restore_norm=True needs a second moment that changes the norm: "
            "optimizer.second_moment must be row or longer_side"
        )


def _check_choice(path: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{path}={value!r} must be one of {', '.join(choices)}")


def _check_at_least(path: str, value: float, bound: float) -> None:
    if not bound <= value < float("inf"):
        raise ValueError(f"{path}={value} must be finite and at least {bound:g}")


def _check_above(path: str, value: float, bound: float) -> None:
    if not bound < value < float("inf"):
        raise ValueError(f"{path}={value} must be finite and above {bound:g}")


def _check_beta(path: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{path}={value} must lie in [0, 1)")


def _check_betas(path: str, values: list[float]) -> None:
    if len(values) != 2:
        raise ValueError(f"{path}={values} must be two numbers, one for each moment")
    for index, value in enumerate(values):
        _check_beta(f"{path}[{index}]", value)
