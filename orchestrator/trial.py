"""One trial: from a configuration and a seed to an outcome, without Ray, MLflow or Hydra.

`run_trial` trains and evaluates, `measure_speed` times optimizer steps. Both take plain inputs and
build everything else from them; the global random generators are neither read nor advanced. What
happens is told to a journal, event by event:

    start        what is known before the first step, and the step that was resumed from
    step         a curve point: the first and last step, every `log.every_steps`, every evaluation
    checkpoint   the step from which the trial can now be continued
    stop         asked to stop before the end; no result
    end          `completed` or `diverged`, with the fields of `TrialRecord` that were measured

A divergence is an outcome. A programming error propagates.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config import TrialConfig, trial_to_dict
from orchestrator.training.checkpoint import Checkpoint, load_newest, save_checkpoint
from orchestrator.training.evaluate import Evaluation
from orchestrator.training.export import export_model
from orchestrator.training.journal import JournalSink, ListJournal, NullJournal
from orchestrator.training.loop import StepMetrics, fit, is_due
from orchestrator.training.ranks import ALONE, Ranks
from orchestrator.training.recall import RecallResult, accuracies
from orchestrator.training.runtime import Runtime
from orchestrator.training.session import Session, open_session
from orchestrator.training.speed import SpeedOutcome, measure_speed

__all__ = [
    "JournalSink",
    "ListJournal",
    "NullJournal",
    "Runtime",
    "SpeedOutcome",
    "TrialOutcome",
    "measure_speed",
    "run_trial",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOutcome:
    """What came out of a trial; names are those of `TrialRecord`, where they have one.

    Attributes:
        status: `completed`, `diverged`, or `stopped` where the caller asked for it.
        failure_class: `diverged` for a diverged trial.
        diverged_because: what showed the divergence, in words.
        steps: optimizer steps done.
        tokens: training tokens seen.
        init_loss_nats: loss before the first step, on a few validation windows.
        val_loss_nats: evaluation loss after the last step of a completed trial.
        val_loss_se: its standard error over windows.
        val_bits_per_byte: the same in bits per byte.
        train_loss_nats: mean training loss over the last tenth of the steps of a completed trial.
        recall: one row per recall task that a completed trial was asked.
        recall_accuracy: mean over the tasks of associative recall.
        needle_accuracy: mean over lengths and depths of the needle.
        two_hop_accuracy: mean over the tasks of two look-ups.
        applied_lr_peak: largest rate of the first group, read back from the optimizer.
        wall_seconds: of all attempts that led here by checkpoints, set-up and evaluation included.
        device_seconds: time for which those attempts held their device.
        peak_memory_bytes: largest device memory; on CPU the process's largest resident memory.
    """

    status: str
    failure_class: str | None = None
    diverged_because: str | None = None
    steps: int
    tokens: int
    init_loss_nats: float
    val_loss_nats: float | None = None
    val_loss_se: float | None = None
    val_bits_per_byte: float | None = None
    train_loss_nats: float | None = None
    recall: list[dict[str, Any]] = field(default_factory=list)
    recall_accuracy: float | None = None
    needle_accuracy: float | None = None
    two_hop_accuracy: float | None = None
    applied_lr_peak: float
    wall_seconds: float
    device_seconds: float
    peak_memory_bytes: int

    def as_fields(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


@dataclass(kw_only=True, slots=True)
class _Progress:
    """What a trial carries from step to step, and across attempts.

    Attributes:
        init_loss_nats: loss before the first step, on a few validation windows.
        steps: optimizer steps done.
        training_seconds: of those steps.
        earlier_wall_seconds: of earlier attempts, up to their checkpoint.
        applied_lr_peak: largest rate of the first group so far.
        last_losses: training losses of the last tenth of the steps, as far as they are done.
        notes: about checkpoints that could not be used.
        evaluation: the newest one.
        diverged_because: of the step that ended the trial.
    """

    init_loss_nats: float
    steps: int = 0
    training_seconds: float = 0.0
    earlier_wall_seconds: float = 0.0
    applied_lr_peak: float = 0.0
    last_losses: list[float] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    evaluation: Evaluation | None = None
    diverged_because: str | None = None

    def advance(self, metrics: StepMetrics, num_steps: int) -> None:
        """Takes in one more step."""
        self.steps = metrics.step
        self.applied_lr_peak = max(self.applied_lr_peak, next(iter(metrics.lr.values())))
        if metrics.step > num_steps - math.ceil(num_steps / 10):
            self.last_losses.append(metrics.train_loss_nats)
        if metrics.seconds is not None:
            self.training_seconds = metrics.seconds
        if metrics.evaluation is not None:
            self.evaluation = metrics.evaluation
        self.diverged_because = metrics.diverged_because

    def carried(self, wall_seconds: float) -> dict[str, Any]:
        """What a checkpoint must hold besides tensors."""
        return {
            "init_loss_nats": self.init_loss_nats,
            "training_seconds": self.training_seconds,
            "earlier_wall_seconds": wall_seconds,
            "applied_lr_peak": self.applied_lr_peak,
            "last_losses": self.last_losses,
        }


def run_trial(
    config: TrialConfig,
    *,
    seed: int,
    data_folder: Path,
    runtime: Runtime,
    journal: JournalSink,
    checkpoint_folder: Path | None = None,
    export_folder: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    pause_step: int | None = None,
    ranks: Ranks = ALONE,
) -> TrialOutcome:
    """Trains one configuration with one seed to the end of its budget, or from its checkpoint on.

    On a CPU two runs with one seed are equal bit for bit, and a run that was interrupted and
    continued equals one that wasn't.

    Args:
        config: of the trial.
        seed: of initialisation, and of the data order where `config.data_seed` is null.
        data_folder: a prepared data set.
        runtime: device and arithmetic.
        journal: where the events go.
        checkpoint_folder: where checkpoints are written and looked for; None for neither.
        export_folder: where the trained model goes under `checkpoint.export`; None for a folder
            `model` beside that of the checkpoints.
        should_stop: asked after every step that has been read; true ends the trial, with a
            checkpoint where there is a folder for it.
        pause_step: after which the trial is evaluated and ended in the same way.
        ranks: that train together, each calling this with the same arguments; only the first one
            tells the journal and writes checkpoints.

    Raises:
        ValueError: inputs that cannot be trained with, no folder for a model to export, or a
            pause that lies behind the checkpoint.
        CheckpointMismatchError: the folder's checkpoint belongs to another trial.
    """
    if export_folder is None and checkpoint_folder is not None:
        export_folder = checkpoint_folder.with_name("model")
    if config.checkpoint.export and export_folder is None:
        raise ValueError("checkpoint.export=true needs export_folder or checkpoint_folder")
    started = time.perf_counter()
    with runtime.applied():
        runtime.reset_peak_memory()
        session = open_session(
            config, seed=seed, data_folder=data_folder, runtime=runtime, ranks=ranks
        )
        if not ranks.is_first:
            journal = NullJournal()
        progress = _begin(session, checkpoint_folder)
        if pause_step is not None and not progress.steps < pause_step < config.num_steps:
            raise ValueError(
                f"{pause_step=} must come after step {progress.steps}, which is done, and before "
                f"the last step {config.num_steps}"
            )
        started -= progress.earlier_wall_seconds
        journal.append(
            {
                "event": "start",
                "resumed_from_step": progress.steps,
                "checkpoint_notes": list(progress.notes),
                "init_loss_nats": progress.init_loss_nats,
                **session.facts(),
            }
        )

        def stops_now() -> bool:
            return progress.steps == pause_step or should_stop()

        is_stopped = _train(
            session, progress, journal, checkpoint_folder, stops_now, started, pause_step
        )
        status = _status(progress, is_stopped=is_stopped)
        recall = session.ask_recall() if status == "completed" else []
        outcome = _outcome(session, progress, status, recall, time.perf_counter() - started)
        if export_folder is not None and status == "completed" and ranks.is_first:
            _export(session, outcome, export_folder)
        kind = "stop" if is_stopped else "end"
        journal.append({"event": kind, **outcome.as_fields()})
        return outcome


def _begin(session: Session, checkpoint_folder: Path | None) -> _Progress:
    """The state to start from: the newest checkpoint's, or the freshly drawn model's."""
    if checkpoint_folder is not None:
        checkpoint = load_newest(checkpoint_folder, _identity(session))
        if checkpoint is not None:
            return _restore(session, checkpoint)
    return _Progress(init_loss_nats=session.evaluate_start().loss_nats)


def _restore(session: Session, checkpoint: Checkpoint) -> _Progress:
    session.model.load_state_dict(checkpoint.part("model"))
    session.optimizer.load_state_dict(checkpoint.part("optimizer"))
    return _Progress(steps=checkpoint.step, notes=checkpoint.notes, **checkpoint.facts)


def _train(
    session: Session,
    progress: _Progress,
    journal: JournalSink,
    checkpoint_folder: Path | None,
    should_stop: Callable[[], bool],
    started: float,
    pause_step: int | None,
) -> bool:
    """Trains to the end, to a divergence, or until asked to stop; returns whether it was asked."""
    config = session.config

    def save() -> None:
        if checkpoint_folder is not None and session.ranks.is_first:
            _save(session, progress, checkpoint_folder, time.perf_counter() - started)
            journal.append({"event": "checkpoint", "step": progress.steps})

    for metrics in fit(
        session.model,
        session.optimizer,
        session.batches,
        config,
        session.runtime,
        evaluate_now=session.evaluate,
        start_step=progress.steps,
        start_seconds=progress.training_seconds,
        pause_step=pause_step,
        ranks=session.ranks,
    ):
        progress.advance(metrics, config.num_steps)
        if _is_curve_point(metrics, config):
            journal.append(_step_event(session, metrics, progress))
        if metrics.seconds is None or metrics.diverged_because or metrics.step == config.num_steps:
            continue
        if is_due(config.checkpoint.every_steps, metrics.step):
            save()
        if session.ranks.any(should_stop()):
            if not is_due(config.checkpoint.every_steps, metrics.step):
                save()
            return True
    return False


def _is_curve_point(metrics: StepMetrics, config: TrialConfig) -> bool:
    return (
        metrics.step in (1, config.num_steps)
        or is_due(config.log.every_steps, metrics.step)
        or metrics.evaluation is not None
        or metrics.diverged_because is not None
    )


def _step_event(session: Session, metrics: StepMetrics, progress: _Progress) -> dict[str, Any]:
    evaluation = metrics.evaluation
    return {
        "event": "step",
        "step": metrics.step,
        "tokens": metrics.tokens,
        "wall_seconds": progress.training_seconds,
        "lr": next(iter(metrics.lr.values())),
        "lr_by_group": metrics.lr,
        "train_loss_nats": metrics.train_loss_nats,
        "grad_norm": metrics.grad_norm,
        "val_loss_nats": None if evaluation is None else evaluation.loss_nats,
        "val_loss_se": None if evaluation is None else evaluation.standard_error,
        "routing_norms": [] if evaluation is None else session.routing_norms(),
    }


def _save(session: Session, progress: _Progress, folder: Path, wall_seconds: float) -> None:
    tensors = {f"model/{n}": t for n, t in session.model.state_dict().items()}
    tensors |= {f"optimizer/{n}": t for n, t in session.optimizer.state_dict().items()}
    save_checkpoint(
        folder,
        step=progress.steps,
        tensors=tensors,
        facts=progress.carried(wall_seconds),
        identity=_identity(session),
    )


def _export(session: Session, outcome: TrialOutcome, folder: Path) -> None:
    if not session.config.checkpoint.export:
        return
    results = outcome.as_fields() | {"unigram_loss_nats": session.dataset.unigram_loss_nats}
    export_model(
        folder,
        session.model,
        session.config,
        seed=session.seed,
        data_folder=session.dataset.folder,
        data_id=session.dataset.data_id,
        results=results,
    )


def _identity(session: Session) -> dict[str, Any]:
    """What a checkpoint's trial and the one that continues from it must share."""
    return {
        "config": trial_to_dict(session.config),
        "seed": session.seed,
        "data_id": session.dataset.data_id,
        # Beside the id, in which they have no part; and only where they say something.
        **session.config.data.reading_options,
        "device_type": session.runtime.torch_device.type,
        "precision": session.runtime.precision,
    }


def _status(progress: _Progress, *, is_stopped: bool) -> str:
    if is_stopped:
        return "stopped"
    return "diverged" if progress.diverged_because else "completed"


def _outcome(
    session: Session,
    progress: _Progress,
    status: str,
    recall: list[RecallResult],
    wall_seconds: float,
) -> TrialOutcome:
    evaluation = progress.evaluation if status == "completed" else None
    losses = progress.last_losses if status == "completed" else []
    return TrialOutcome(
        status=status,
        failure_class="diverged" if status == "diverged" else None,
        diverged_because=progress.diverged_because,
        steps=progress.steps,
        tokens=progress.steps * session.config.batch.tokens,
        init_loss_nats=progress.init_loss_nats,
        val_loss_nats=None if evaluation is None else evaluation.loss_nats,
        val_loss_se=None if evaluation is None else evaluation.standard_error,
        val_bits_per_byte=None if evaluation is None else evaluation.bits_per_byte,
        train_loss_nats=math.fsum(losses) / len(losses) if losses else None,
        recall=[asdict(result) for result in recall],
        **accuracies(recall),
        applied_lr_peak=progress.applied_lr_peak,
        wall_seconds=wall_seconds,
        device_seconds=wall_seconds * session.ranks.world_size,
        peak_memory_bytes=session.runtime.peak_memory_bytes(),
    )
