"""The treaty between training and analysis: what one replicate's row and one curve point hold.

Standard library only. `trials.parquet` has one row per replicate with the fields of `TrialRecord`,
`curves.parquet` one row per replicate and logged step with those of `CurvePoint`. Units are in the
names: `_nats` natural-log loss per token, `_seconds`, `_bytes`, `_per_token`; a value that was not
measured is null, never zero.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

STATUSES = ("completed", "diverged", "failed", "running", "pending")
"""`diverged` is a result, not an error; `failed` ended without one."""

FAILURE_CLASSES = (
    "diverged",
    "oom_gpu",
    "oom_host",
    "preempted",
    "node",
    "timeout",
    "user_bug",
    "data",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """One replicate: what was asked for, what came out, on what it ran.

    Attributes:
        sweep: name of the sweep.
        cell_id: id of the configuration without its seed.
        arm_id: id of the configuration without seed, `lr` and `adam_lr`: what a learning rate is
            chosen for.
        replicate_id: cell and seed.
        seed: seed of initialisation, and of the data order unless `data_seed` was set.
        desired: whether the sweep as last described still asks for this replicate.
        status: one of `STATUSES`.
        failure_class: one of `FAILURE_CLASSES`; null for completed, running and pending.
        attempts: tries so far.
        mixer: name of the memory rule.
        stack: `pure` or `hybrid`.
        softmax_every: distance of softmax layers in a hybrid; null in a pure stack and where
            `model.softmax_layers` names them.
        routing: kind of cross-layer routing, `none` without.
        residual: which residual is routed; null without routing.
        dt_init: initialisation of the decay's step size; null for rules without decay.
        optimizer: name of the optimizer.
        optimizer_variant: variant of its matrix step; null where there is one only.
        lr: peak learning rate as asked for (of the matrix group under Muon).
        adam_lr: peak rate of the Adam group; null where there is one group.
        applied_lr_peak: largest rate read back from the optimizer during the run.
        size: name of the model size.
        match: rule that made cells comparable.
        data_seed: seed of the data order that was used.
        mask_documents: whether the documents in a window were read each by itself.
        first_token_loss: whether targets that begin a document counted in losses.
        seq_len: tokens of a training window.
        batch_tokens: tokens of one optimizer step.
        tokens: training tokens, planned until the trial has ended, then seen.
        steps: optimizer steps, planned until the trial has ended, then done.
        params_total: all parameters.
        params_non_embedding: parameters without embedding and head.
        flops_per_token: training FLOPs per token, forward and backward.
        init_loss_nats: loss before the first step, on a few validation windows.
        val_loss_nats: mean loss on the fixed evaluation set after the last step.
        val_loss_se: standard error of `val_loss_nats` over evaluation windows.
        val_bits_per_byte: the same loss in bits per byte of text.
        eval_id: id of the evaluation set.
        recall_accuracy: mean accuracy over the tasks of associative recall that were asked.
        needle_accuracy: the same over lengths and depths of a needle in a haystack.
        two_hop_accuracy: the same over chains of two look-ups.
        train_loss_nats: mean training loss over the last tenth of the steps.
        unigram_loss_nats: cross-entropy of the validation part under training unigrams.
        tokens_per_second: tokens of a step over its median time, from the speed lane only.
        step_seconds_median: median step time, from the speed lane only.
        exclusive: whether the speed was measured alone on the device.
        device_name: device of the speed measurement, else of the loss trial.
        device_seconds: device time of the loss trial over all attempts.
        wall_seconds: wall time of the loss trial over all attempts.
        peak_memory_bytes: largest device memory; on CPU the process's largest resident memory.
        state_bytes: recurrent state per sequence.
        kv_bytes_per_token: KV cache per token of context.
        decode_tokens_per_second: decoding speed where it was measured.
        kernel_impl: implementation of the recurrences that was used.
        precision: `fp32` or `bf16`.
        threads: torch threads on CPU.
        data_id: id of the tokenised data.
        git_commit: commit that ran.
        git_dirty: whether the checkout had changes.
        torch_version: torch that ran.
        worker_id: process of the last attempt, as host and pid.
        worker_position: trials that this worker had run before; 0 is fresh.
        error: last line of the traceback of a failed attempt.
        config_json: the resolved configuration.
    """

    sweep: str
    cell_id: str
    arm_id: str
    replicate_id: str
    seed: int
    desired: bool = True
    status: str = "pending"
    failure_class: str | None = None
    attempts: int = 0
    mixer: str
    stack: str
    softmax_every: int | None = None
    routing: str = "none"
    residual: str | None = None
    dt_init: str | None = None
    optimizer: str
    optimizer_variant: str | None = None
    lr: float
    adam_lr: float | None = None
    applied_lr_peak: float | None = None
    size: str
    match: str
    data_seed: int
    mask_documents: bool = False
    first_token_loss: bool = True
    seq_len: int
    batch_tokens: int
    tokens: int
    steps: int
    params_total: int | None = None
    params_non_embedding: int | None = None
    flops_per_token: int | None = None
    init_loss_nats: float | None = None
    val_loss_nats: float | None = None
    val_loss_se: float | None = None
    val_bits_per_byte: float | None = None
    eval_id: str | None = None
    recall_accuracy: float | None = None
    needle_accuracy: float | None = None
    two_hop_accuracy: float | None = None
    train_loss_nats: float | None = None
    unigram_loss_nats: float | None = None
    tokens_per_second: float | None = None
    step_seconds_median: float | None = None
    exclusive: bool | None = None
    device_name: str | None = None
    device_seconds: float | None = None
    wall_seconds: float | None = None
    peak_memory_bytes: int | None = None
    state_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    decode_tokens_per_second: float | None = None
    kernel_impl: str | None = None
    precision: str | None = None
    threads: int | None = None
    data_id: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    torch_version: str | None = None
    worker_id: str | None = None
    worker_position: int | None = None
    error: str | None = None
    config_json: str

    def as_row(self) -> dict[str, Any]:
        """The record as one row of `trials.parquet`."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """One logged step of one replicate; `None` where a quantity was not measured at this step.

    Attributes:
        sweep: name of the sweep.
        replicate_id: the replicate.
        attempt: the attempt, from 1, that trained this step.
        step: optimizer steps done.
        tokens: training tokens seen.
        wall_seconds: training time up to here, over all attempts.
        lr: rate that this step applied (of the matrix group under Muon).
        train_loss_nats: training loss of this step, before its update.
        grad_norm: global gradient norm before clipping.
        val_loss_nats: loss on the fixed evaluation set after this step.
    """

    sweep: str
    replicate_id: str
    attempt: int
    step: int
    tokens: int
    wall_seconds: float
    lr: float | None = None
    train_loss_nats: float | None = None
    grad_norm: float | None = None
    val_loss_nats: float | None = None

    def as_row(self) -> dict[str, Any]:
        """The point as one row of `curves.parquet`."""
        return asdict(self)


TRIAL_COLUMNS = tuple(f.name for f in fields(TrialRecord))
"""Columns of `trials.parquet`, in order."""

CURVE_COLUMNS = tuple(f.name for f in fields(CurvePoint))
"""Columns of `curves.parquet`, in order."""
