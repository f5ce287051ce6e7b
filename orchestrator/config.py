"""One trial and one sweep as dataclasses, assembled from the parts' own; plain Python, no Hydra.

`orchestrator.compose` makes these from YAML and the command line; below it only the resolved
values travel, to worker processes as a plain dict that survives JSON.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, cast, get_type_hints
from urllib.parse import urlsplit

from models.configs import MIXER_CONFIGS, ModelConfig
from orchestrator.data.corpus import DataConfig
from orchestrator.training.optim.configs import OPTIMIZER_CONFIGS, AdamWConfig, OptimizerConfig
from orchestrator.training.recall_config import RecallConfig
from orchestrator.training.schedule import ScheduleConfig

MATCH_RULES = ("params", "depth", "paper")
PURPOSES = ("compare", "search", "measure")
SAMPLERS = ("tpe", "gp", "qmc")
PRECISIONS = ("auto", "fp32", "bf16")
OTHER_CODE = ("reuse", "warn", "refuse")


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    """How long a trial trains.

    Attributes:
        tokens: training tokens, at least one step's worth; rounded down to whole steps.
    """

    tokens: int = 20_000_000

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"budget.tokens={self.tokens} must be at least 1")


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """How many tokens make one optimizer step.

    Attributes:
        tokens: tokens of one step over all devices, a multiple of `seq_len`.
        micro_windows: windows of one forward pass, a divisor of the windows in a step; null for
            all of them. Changes memory, not results beyond rounding.
    """

    tokens: int = 65_536
    micro_windows: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"batch.tokens={self.tokens} must be at least 1")
        if self.micro_windows is not None and self.micro_windows < 1:
            raise ValueError(f"batch.micro_windows={self.micro_windows} must be at least 1")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """The fixed evaluation set and when it is read.

    Attributes:
        windows: validation windows of `seq_len`, evenly spread; null for every one there is.
        every_steps: steps between two evaluations; null for the end only.
        recall: which recall probes are asked at the end.
    """

    windows: int | None = None
    every_steps: int | None = None
    recall: RecallConfig = field(default_factory=RecallConfig)

    def __post_init__(self) -> None:
        for name in ("windows", "every_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"eval.{name}={value} must be at least 1")


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """From where an interrupted trial can be continued; removed once it has its result.

    Attributes:
        every_steps: steps between two checkpoints; null for none.
        export: keep the trained model, as safetensors with a model card, in the folder `model`
            beside the replicate's journals; of trials that end from then on.
    """

    every_steps: int | None = 500
    export: bool = False

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"checkpoint.every_steps={self.every_steps} must be at least 1")


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """How often a trial writes a curve point.

    Attributes:
        every_steps: steps between two curve points; the first and the last are always written.
    """

    every_steps: int = 10

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"log.every_steps={self.every_steps} must be at least 1")


@dataclass(kw_only=True, slots=True)
class TrialConfig:
    """Everything that decides one trial's result, except its seed and its device.

    Attributes:
        size: name of the model size that `model`'s dimensions came from.
        match: how cells are made comparable: `params`, `depth` or `paper`.
        seq_len: tokens of a training window.
        data_seed: seed of the data order; null to follow the replicate's seed.
        clip_norm: largest global gradient norm; larger ones are scaled down to it.
        diverged_above_nats: a training loss above this ends the trial as `diverged`, as does a
            non-finite one; null for non-finite only.
    """

    size: str = "nano"
    match: str = "params"
    seq_len: int = 256
    data_seed: int | None = None
    clip_norm: float = 1.0
    diverged_above_nats: float | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.match not in MATCH_RULES:
            raise ValueError(f"match={self.match!r} must be one of {', '.join(MATCH_RULES)}")
        if self.seq_len < 2:
            raise ValueError(f"seq_len={self.seq_len} must be at least 2")
        if self.batch.tokens % self.seq_len:
            raise ValueError(
                f"batch.tokens={self.batch.tokens} must be a multiple of seq_len={self.seq_len}"
            )
        micro = self.batch.micro_windows
        if micro is not None and self.windows_per_step % micro:
            raise ValueError(
                f"batch.micro_windows={micro} must divide the {self.windows_per_step} windows "
                "of a step"
            )
        if self.budget.tokens < self.batch.tokens:
            raise ValueError(
                f"budget.tokens={self.budget.tokens} is less than one step of "
                f"batch.tokens={self.batch.tokens}"
            )
        if self.data_seed is not None and not 0 <= self.data_seed < 2**64:
            raise ValueError(f"data_seed={self.data_seed} must be between 0 and 2**64 - 1")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm} must be positive")
        if self.diverged_above_nats is not None and not self.diverged_above_nats > 0:
            raise ValueError(f"diverged_above_nats={self.diverged_above_nats} must be positive")
        if self.model.compile and self.data.mask_documents:
            raise ValueError(
                "model.compile=true with data.mask_documents=true is not served: documents cut "
                "every batch into other shapes, each of which would be compiled; set one of the "
                "two back"
            )
        self.eval.recall.check_vocabulary(self.data.vocab_size)

    def check_ranks(self, ranks: int) -> None:
        """Refuses a step whose windows some ranks could not share evenly.

        Args:
            ranks: processes that train together, each with its part of every step's windows.

        Raises:
            ValueError: the windows of a step do not divide evenly over ranks and passes.
        """
        if self.windows_per_step % (ranks * (self.batch.micro_windows or 1)):
            raise ValueError(
                f"the {self.windows_per_step} windows of a step do not divide evenly over "
                f"{ranks} devices with batch.micro_windows={self.batch.micro_windows}"
            )

    @property
    def windows_per_step(self) -> int:
        """Windows of `seq_len` tokens in one optimizer step."""
        return self.batch.tokens // self.seq_len

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole trial."""
        return self.budget.tokens // self.batch.tokens


def trial_from_dict(values: dict[str, Any]) -> TrialConfig:
    """The trial that `trial_to_dict` wrote; the mixer and optimizer classes follow their names.

    Raises:
        ValueError: a value that the owning dataclass refuses, or an unknown mixer or optimizer.
        TypeError: a key that no dataclass has.
    """
    return cast(TrialConfig, _build(TrialConfig, values))


def trial_to_dict(config: TrialConfig) -> dict[str, Any]:
    """Plain values, nested as the dataclasses are; survives JSON."""
    values = _plain(config)
    assert isinstance(values, dict)
    return values


def _plain(value: Any) -> Any:
    """As `dataclasses.asdict`, which deep-copies every leaf and takes four times as long."""
    names = _field_names(cast(Hashable, type(value)))
    if names is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


@cache
def _field_names(cls: Any) -> tuple[str, ...] | None:
    """Names of a dataclass's fields; None for another class."""
    return tuple(item.name for item in fields(cls)) if is_dataclass(cls) else None


def _build(cls: type[Any], values: dict[str, Any]) -> Any:
    hints = _hints(cast(Hashable, cls))
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        target = hints.get(name)
        if name == "mixer" and isinstance(value, dict):
            target = _registered("model.mixer", MIXER_CONFIGS, value["name"])
        elif name == "optimizer" and isinstance(value, dict):
            target = _registered("optimizer", OPTIMIZER_CONFIGS, value["name"])
        nested = dataclass_in(target)
        arguments[name] = (
            _build(nested, value) if nested is not None and isinstance(value, dict) else value
        )
    return cls(**arguments)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _registered(path: str, registry: dict[str, Any], name: str) -> Any:
    if name not in registry:
        raise ValueError(f"{path}={name!r} must be one of {', '.join(sorted(registry))}")
    return registry[name]


@cache
def dataclass_in(hint: Any) -> type[Any] | None:
    """The dataclass in `X` or `X | None`, if there is one."""
    for candidate in (hint, *getattr(hint, "__args__", ())):
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    return None


@dataclass(kw_only=True, slots=True)
class LossLane:
    """Resources of one loss trial.

    Attributes:
        gpus: share of a GPU, or a number of GPUs that a trial spans, with a process for each;
            ignored without one.
        cpus: cores of each process of a trial, also its number of torch threads.
        cpu_ranks: processes that a trial on CPUs spans; ignored with GPUs.
        max_minutes: how long one attempt may take, in either lane; null for no limit.
    """

    gpus: float = 1.0
    cpus: int = 1
    cpu_ranks: int = 1
    max_minutes: float | None = None

    def __post_init__(self) -> None:
        if self.gpus < 0:
            raise ValueError(f"lanes.loss.gpus={self.gpus} must not be negative")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"lanes.loss.gpus={self.gpus} must be a whole number above 1")
        if self.cpus < 1:
            raise ValueError(f"lanes.loss.cpus={self.cpus} must be at least 1")
        if self.cpu_ranks < 1:
            raise ValueError(f"lanes.loss.cpu_ranks={self.cpu_ranks} must be at least 1")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(f"lanes.loss.max_minutes={self.max_minutes} must be positive")

    def ranks(self, device: str) -> int:
        """Processes of one trial on `cpu` or `cuda`."""
        return max(1, int(self.gpus)) if device == "cuda" else self.cpu_ranks


@dataclass(kw_only=True, slots=True)
class SpeedLane:
    """How throughput is measured, alone on the device.

    Attributes:
        enabled: false leaves throughput unmeasured.
        steps: timed steps.
        warmup_steps: steps before them, untimed.
    """

    enabled: bool = True
    steps: int = 40
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"lanes.speed.steps={self.steps} must be at least 1")
        if self.warmup_steps < 0:
            raise ValueError(f"lanes.speed.warmup_steps={self.warmup_steps} must not be negative")


@dataclass(kw_only=True, slots=True)
class Lanes:
    """The lane that measures loss and the one that measures speed."""

    loss: LossLane = field(default_factory=LossLane)
    speed: SpeedLane = field(default_factory=SpeedLane)


@dataclass(kw_only=True, slots=True)
class AshaConfig:
    """Early stopping of a search: asynchronous successive halving on seed means.

    Rungs are `min_tokens`, `min_tokens * reduction`, … below the budget, and the budget.

    Attributes:
        min_tokens: training tokens of the first rung.
        reduction: of this many points that reach a rung, one goes on to the next.
    """

    min_tokens: int
    reduction: int = 3

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError(f"search.asha.min_tokens={self.min_tokens} must be at least 1")
        if self.reduction < 2:
            raise ValueError(f"search.asha.reduction={self.reduction} must be at least 2")


@dataclass(kw_only=True, slots=True)
class SearchConfig:
    """`purpose: search`: points that a sampler asks for, instead of a grid.

    Attributes:
        sampler: `tpe` (tree-structured Parzen estimator), `gp` (Gaussian process) or `qmc`
            (scrambled Sobol points, which learn nothing).
        trials: points to ask for, each trained with every seed.
        batch: points asked for at once; the sampler sees results only between batches.
        seed: of the sampler; no part of any trial.
        startup_trials: points drawn at random before `tpe` and `gp` use their models.
        objectives: `loss` alone, or `loss` and `speed` for a front.
        space: dotted path to its choices, its range, or conditional ones; see
            `orchestrator.space`.
        asha: early stopping; null trains every point to the end.
    """

    sampler: str = "tpe"
    trials: int = 20
    batch: int = 4
    seed: int = 0
    startup_trials: int = 8
    objectives: list[str] = field(default_factory=lambda: ["loss"])
    space: dict[str, Any] = field(default_factory=dict)
    asha: AshaConfig | None = None

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise ValueError(
                f"search.sampler={self.sampler!r} must be one of {', '.join(SAMPLERS)}"
            )
        for name, least in (("trials", 1), ("batch", 1), ("seed", 0), ("startup_trials", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"search.{name}={getattr(self, name)} must be at least {least}")
        if self.objectives not in (["loss"], ["loss", "speed"]):
            raise ValueError(f"search.objectives={self.objectives} must be [loss] or [loss, speed]")
        if self.asha is not None and self.sampler == "gp":
            raise ValueError(
                "search.asha stops points early, but sampler: gp learns from finished ones only; "
                "use sampler: tpe or qmc, or remove asha"
            )
        if self.asha is not None and "speed" in self.objectives:
            raise ValueError(
                "search.asha halves by loss alone and could stop the fastest points; remove asha, "
                "or say objectives: [loss]"
            )


@dataclass(kw_only=True, slots=True)
class ComparisonConfig:
    """Two cells whose losses are compared, pair by pair of equal seeds.

    Attributes:
        first: conditions, path to value, that exactly one cell meets.
        second: the same for the other cell.
    """

    first: dict[str, Any]
    second: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class AdaptiveConfig:
    """Seeds that are added where a named comparison is undecided.

    Attributes:
        effect: nats per token; a difference below it does not matter.
        comparisons: what has to be decided.
        max_seeds: most seeds of a cell, those of `seeds` included: the budget.
        batch: seeds added between two looks.
        alpha: chance that any of the intervals, at any look, misses its true difference.
    """

    effect: float
    comparisons: list[ComparisonConfig]
    max_seeds: int = 16
    batch: int = 1
    alpha: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.effect < math.inf:
            raise ValueError(f"adaptive.effect={self.effect} must be a positive number of nats")
        if not self.comparisons:
            raise ValueError("adaptive.comparisons is empty; name at least one comparison")
        if self.max_seeds < 2:
            raise ValueError(f"adaptive.max_seeds={self.max_seeds} must be at least 2")
        if self.batch < 1:
            raise ValueError(f"adaptive.batch={self.batch} must be at least 1")
        if not 0 < self.alpha < 1:
            raise ValueError(f"adaptive.alpha={self.alpha} must lie between 0 and 1")


@dataclass(kw_only=True, slots=True)
class PriceConfig:
    """A gate on cost, no part of any identity.

    Attributes:
        max_gpu_hours: most hours that a sweep may take, of whole GPUs or, on a CPU, of the whole
            machine, by pilots of its shapes; null for no limit. `--yes` overrules it.
    """

    max_gpu_hours: float | None = None


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Where trials run.

    Attributes:
        name: `local`, or `ray` for a cluster that is there already.
        address: HOST:PORT of that cluster's head, or `auto` for the one this machine belongs to.
    """

    name: str = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        if self.name not in ("local", "ray"):
            raise ValueError(f"cluster={self.name} must be one of local, ray")
        if (self.name == "ray") != (self.address is not None):
            raise ValueError(
                f"cluster={self.name} with cluster.address={self.address}: ray needs the address "
                "of a cluster, local has none"
            )
        if self.address is not None and "://" in self.address:
            raise ValueError(
                f"cluster.address={self.address} must be HOST:PORT of the cluster's head, or auto, "
                "given on a machine of the cluster; Ray Client is not supported"
            )


@dataclass(kw_only=True, slots=True)
class TrackingConfig:
    """Where the MLflow view goes.

    Attributes:
        uri: an MLflow tracking URI; null for the embedded SQLite store under the root.
    """

    uri: str | None = None


@dataclass(kw_only=True, slots=True)
class NotifyConfig:
    """Who is told that a sweep has ended; no part of any identity.

    Attributes:
        webhook: http or https URL that gets one JSON POST, see `orchestrator.webhook`; null for
            none. All of it but scheme and host counts as secret and is written nowhere.
    """

    webhook: str | None = None

    def __post_init__(self) -> None:
        if self.webhook is not None and not _is_web_address(self.webhook):
            raise ValueError(
                "notify.webhook must be a URL like https://HOST/PATH (http or https, ASCII, "
                f"no spaces), but its scheme is {urlsplit(self.webhook).scheme!r} or its host or "
                "port cannot be read"
            )


def _is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, an address in brackets that is none
        return False
    return is_web and text.isascii() and text.isprintable() and " " not in text


@dataclass(kw_only=True, slots=True)
class RetriesConfig:
    """Attempts after the first that one call grants a replicate, by how the last one failed.

    `diverged` is a result and is never tried again. Being preempted or losing the machine uses up
    no other class's attempts.

    Attributes:
        oom_gpu: device memory ran out; each further attempt reads at most half as many windows
            in one forward pass, and as many in a step.
        oom_host: host memory ran out, or the process was killed from outside.
        preempted: the process was asked to end.
        node: the machine was lost.
        timeout: the attempt took too long.
        user_bug: an exception in our or the user's code.
        data: the token files could not be read.
    """

    oom_gpu: int = 3
    oom_host: int = 1
    preempted: int = 5
    node: int = 5
    timeout: int = 1
    user_bug: int = 0
    data: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ValueError(f"retries.{name}={getattr(self, name)} must not be negative")


@dataclass(kw_only=True, slots=True)
class SweepSpec:
    """One sweep file after overrides: a desired set of replicates and how to run them.

    Attributes:
        name: folder and MLflow name; letters, digits, `.`, `_` and `-`.
        purpose: `compare`, `search` or `measure`.
        match: rule that makes cells comparable.
        compare_within: axes across which nothing is compared.
        base: dotted path to value, for every cell.
        axes: dotted path to its values, or to conditional values (`when`, `values`).
        exclude: cells that match all entries of one of these are left out.
        search: how a search asks for its points; null for a grid.
        seeds: seeds of every cell.
        adaptive: seeds added where a comparison is undecided; null for `seeds` alone.
        device: `auto`, `cpu` or `cuda`.
        precision: `auto` (bf16 on CUDA, fp32 on CPU), `fp32` or `bf16`.
        reuse_workers: false gives every trial a process of its own.
        retries: further attempts by failure class.
        max_equal_failures: replicates that fail by a bug with one and the same traceback until the
            sweep stops; null to go on whatever happens.
        other_code: what to do about results that the ledger has from other code or other versions
            of what they depend on: `reuse` them, `warn`, or `refuse` to go on.
    """

    name: str = "???"
    purpose: str = "compare"
    match: str = "params"
    compare_within: list[str] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)
    exclude: list[dict[str, Any]] = field(default_factory=list)
    search: SearchConfig | None = None
    seeds: list[int] = field(default_factory=lambda: [0])
    adaptive: AdaptiveConfig | None = None
    device: str = "auto"
    precision: str = "auto"
    reuse_workers: bool = True
    retries: RetriesConfig = field(default_factory=RetriesConfig)
    max_equal_failures: int | None = 3
    other_code: str = "warn"
    lanes: Lanes = field(default_factory=Lanes)
    price: PriceConfig = field(default_factory=PriceConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)

    def __post_init__(self) -> None:
        if self.purpose not in PURPOSES:
            raise ValueError(f"purpose={self.purpose!r} must be one of {', '.join(PURPOSES)}")
        if self.match not in MATCH_RULES:
            raise ValueError(f"match={self.match!r} must be one of {', '.join(MATCH_RULES)}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device={self.device!r} must be one of auto, cpu, cuda")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} must be one of {', '.join(PRECISIONS)}")
        if self.max_equal_failures is not None and self.max_equal_failures < 1:
            raise ValueError(f"max_equal_failures={self.max_equal_failures} must be at least 1")
        if self.other_code not in OTHER_CODE:
            choices = ", ".join(OTHER_CODE)
            raise ValueError(f"other_code={self.other_code!r} must be one of {choices}")
        self._check_purpose()

    def _check_purpose(self) -> None:
        """A comparison has neither a sampler nor early stopping; a search is not a grid."""
        if self.purpose == "search":
            if self.search is None or not self.search.space:
                raise ValueError("purpose: search needs search.space: paths and what to try")
            if self.adaptive is not None:
                raise ValueError(
                    "adaptive compares fixed cells, which a search has not; use purpose: compare"
                )
            if "speed" in self.search.objectives and not self.lanes.speed.enabled:
                raise ValueError(
                    "search.objectives asks for speed, but lanes.speed.enabled is false"
                )
        elif self.search is not None:
            raise ValueError(
                f"purpose: {self.purpose} trains every cell of a grid to its end, without a "
                "sampler or early stopping; remove search, or say purpose: search"
            )
        elif self.adaptive is not None and self.purpose != "compare":
            raise ValueError(f"adaptive needs purpose: compare, not {self.purpose}")


SPEC_KEYS = tuple(f.name for f in fields(SweepSpec))
