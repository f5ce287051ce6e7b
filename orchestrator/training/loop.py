"""The training loop: `train_step` is one optimizer step, `fit` a run of them that yields metrics.

On a GPU the host runs ahead of the device, and reading a loss waits for it. `fit` therefore reads
only where something depends on it: at curve points, evaluations, checkpoints and the end. All steps
since the last reading are read together, so no loss is missed, and no checkpoint is written of
weights whose losses have not been judged. On a CPU nothing runs ahead, and every step is read.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from models.documents import Documents
from orchestrator.config import TrialConfig
from orchestrator.data import TrainingBatches
from orchestrator.training.evaluate import Evaluation
from orchestrator.training.optim.optimizer import Optimizer
from orchestrator.training.ranks import ALONE, Ranks
from orchestrator.training.runtime import Runtime
from orchestrator.training.schedule import lr_ratio, warmup_ratio
from orchestrator.training.windows import TensorBatch, on_device


class TrainableModel(Protocol):
    """A model with a loss to differentiate."""

    def loss(
        self,
        inputs: Tensor,
        targets: Tensor,
        documents: Documents | None = None,
        counted: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats per token, a scalar; see `LanguageModel.loss`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What one optimizer step was like.

    Attributes:
        step: optimizer steps done, this one included.
        tokens: training tokens seen.
        lr: rate that this step applied, by group; the first group's is the trial's.
        train_loss_nats: mean loss of the step's windows, before its update.
        grad_norm: global gradient norm before clipping.
        evaluation: on the fixed set, after this step; None where none was due.
        seconds: training time of this and all earlier steps, evaluations and checkpoints left out;
            None for a step that was read together with a later one.
        diverged_because: what makes this the last step, in words; None for a sound one.
    """

    step: int
    tokens: int
    lr: dict[str, float]
    train_loss_nats: float
    grad_norm: float
    evaluation: Evaluation | None = None
    seconds: float | None = None
    diverged_because: str | None = None


@dataclass(slots=True)
class _Unread:
    """Steps whose losses are still on the device."""

    steps: list[int] = field(default_factory=list)
    rates: list[dict[str, float]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, step: int, rates: dict[str, float], loss: Tensor, grad_norm: Tensor) -> None:
        self.steps.append(step)
        self.rates.append(rates)
        self.values.append(torch.stack((loss.float(), grad_norm.float())))

    def read(self) -> list[tuple[int, dict[str, float], float, float]]:
        """Step, rates, loss and gradient norm of each; waits for the device once."""
        values = torch.stack(self.values).tolist()
        rows = [
            (step, rates, loss, norm)
            for step, rates, (loss, norm) in zip(self.steps, self.rates, values, strict=True)
        ]
        self.steps, self.rates, self.values = [], [], []
        return rows


def fit(
    model: TrainableModel,
    optimizer: Optimizer,
    batches: TrainingBatches,
    config: TrialConfig,
    runtime: Runtime,
    *,
    evaluate_now: Callable[[], Evaluation],
    start_step: int = 0,
    start_seconds: float = 0.0,
    pause_step: int | None = None,
    ranks: Ranks = ALONE,
) -> Iterator[StepMetrics]:
    """Trains from `start_step` to the end of the budget, yielding each step once, in order.

    When a step is yielded at which a checkpoint is due, it is the last one that was trained. A step
    with `diverged_because` is the last one yielded.

    Args:
        model: on the runtime's device.
        optimizer: of this model.
        batches: windows by step.
        config: budget, batch, schedule, clipping and cadences.
        runtime: device and arithmetic.
        evaluate_now: scores the model as it is.
        start_step: optimizer steps already done.
        start_seconds: training time that they took.
        pause_step: a step after which the caller means to stop, so that it is evaluated and read.
        ranks: that share each step's windows; every rank yields the same losses and norms.
    """
    unread, seconds, since = _Unread(), start_seconds, time.perf_counter()
    for index in range(start_step, config.num_steps):
        rates = set_rates(optimizer, config, index)
        micro_batches = load_micro_batches(batches, config, index, runtime, ranks)
        loss, grad_norm = train_step(
            model, optimizer, micro_batches, config.clip_norm, runtime, ranks
        )
        unread.add(index + 1, rates, loss, grad_norm)
        is_pause = index + 1 == pause_step
        if not (is_pause or _is_read(config, index + 1, runtime)):
            continue
        rows = unread.read()
        seconds += time.perf_counter() - since
        for step, own_rates, step_loss, step_norm in rows:
            is_newest = step == index + 1
            reason = _divergence(step_loss, step_norm, config.diverged_above_nats)
            evaluation = None
            if is_newest and reason is None and (is_pause or _is_evaluated(config, step)):
                evaluation = evaluate_now()
                if not evaluation.is_finite:
                    reason = f"the evaluation loss is {evaluation.loss_nats}"
            yield StepMetrics(
                step=step,
                tokens=step * config.batch.tokens,
                lr=own_rates,
                train_loss_nats=step_loss,
                grad_norm=step_norm,
                evaluation=evaluation,
                seconds=seconds if is_newest else None,
                diverged_because=reason,
            )
            if reason is not None:
                return
        since = time.perf_counter()


def train_step(
    model: TrainableModel,
    optimizer: Optimizer,
    micro_batches: Iterable[TensorBatch],
    clip_norm: float,
    runtime: Runtime,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor]:
    """One optimizer step over all micro batches of all ranks, whose targets weigh alike.

    Args:
        model: on the runtime's device.
        optimizer: with its rates set.
        micro_batches: this rank's windows of the step, as many as every other rank's.
        clip_norm: largest global gradient norm.
        runtime: device and arithmetic.
        ranks: that train together.

    Returns:
        Mean loss in nats and global gradient norm before clipping, scalars on the device.
    """
    optimizer.zero_grad()
    micro_batches = list(micro_batches)
    num_windows = sum(len(batch.inputs) for batch in micro_batches)
    total: Tensor | None = None
    for inputs, targets, documents, counted, weight in micro_batches:
        if weight is None:
            weight = len(inputs) / num_windows
        with runtime.autocast():
            loss = model.loss(inputs, targets, documents, counted) * weight
        loss.backward()  # type: ignore[no-untyped-call]
        total = loss.detach() if total is None else total + loss.detach()
    if total is None:
        raise ValueError("a step needs at least one micro batch, got none")
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    ranks.average([*gradients, total])
    grad_norm = nn.utils.get_total_norm(gradients)
    # A factor of 1 is left out, except on a GPU, where looking would wait for the device.
    if runtime.is_cuda or not grad_norm <= clip_norm:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, grad_norm)
    optimizer.step()
    return total, grad_norm


def set_rates(optimizer: Optimizer, config: TrialConfig, index: int) -> dict[str, float]:
    """Sets the rates of update `index`; returns them by group, as the optimizer will apply them."""
    optimizer.set_lr_ratio(
        lr_ratio(config.schedule, index, config.num_steps),
        warmup_ratio=warmup_ratio(config.schedule, index, config.num_steps),
    )
    return {group.name: group.lr for group in optimizer.groups}


def load_micro_batches(
    batches: TrainingBatches,
    config: TrialConfig,
    index: int,
    runtime: Runtime,
    ranks: Ranks = ALONE,
) -> Iterator[TensorBatch]:
    """This rank's windows of update `index`, one forward pass after the other, on the device.

    Raises:
        ValueError: windows of a step that don't divide evenly over ranks and passes.
    """
    windows_at_once = windows_per_pass(config, ranks) * ranks.world_size
    num_micro_steps = max(1, config.windows_per_step // windows_at_once)
    device = runtime.torch_device
    for micro_step in range(num_micro_steps):
        batch = batches.batch(
            index,
            rank=ranks.rank,
            world_size=ranks.world_size,
            micro_step=micro_step,
            num_micro_steps=num_micro_steps,
        )
        tensors = on_device(batch, device)
        if batch.counted is not None:
            # Ranks are averaged, so each of their targets has the weight of world_size.
            share = int(batch.counted.sum()) * ranks.world_size
            tensors = tensors._replace(weight=share / max(1, batches.counted_targets(index)))
        yield tensors


def windows_per_pass(config: TrialConfig, ranks: Ranks = ALONE) -> int:
    """Windows of one forward pass of one rank: `batch.micro_windows`, or all that are its own."""
    return config.batch.micro_windows or max(1, config.windows_per_step // ranks.world_size)


def is_due(every_steps: int | None, step: int) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every_steps is not None and step % every_steps == 0


def _is_evaluated(config: TrialConfig, step: int) -> bool:
    return step == config.num_steps or is_due(config.eval.every_steps, step)


def _is_read(config: TrialConfig, step: int, runtime: Runtime) -> bool:
    return (
        not runtime.is_cuda
        or step == 1
        or _is_evaluated(config, step)
        or is_due(config.log.every_steps, step)
        or is_due(config.checkpoint.every_steps, step)
    )


def _divergence(loss: float, grad_norm: float, cap_nats: float | None) -> str | None:
    if not math.isfinite(loss):
        return f"the training loss is {loss}"
    if cap_nats is not None and loss > cap_nats:
        return f"the training loss of {loss:.4g} nats is above diverged_above_nats={cap_nats:g}"
    # A norm that is not finite has already turned every weight into NaN by clipping.
    if not math.isfinite(grad_norm):
        return f"the gradient norm is {grad_norm}"
    return None
