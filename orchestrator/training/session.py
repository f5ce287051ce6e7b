"""Everything one trial trains with, built from its configuration and one seed.

Random numbers come from generators that are named after their purpose, each made from the seed and
the name, so that what one consumer draws doesn't shift another. The data order has its own seed.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from models.accounting import flops_per_token, kv_bytes_per_token, state_bytes
from models.compilation import compile_layers, eager
from models.diagnostics import routing_norms
from models.layers import DecayGate
from models.lm import LanguageModel, build_model
from orchestrator.config import TrialConfig
from orchestrator.data import (
    Dataset,
    DocumentRule,
    EvaluationSet,
    TrainingBatches,
    evaluation_set,
    open_dataset,
)
from orchestrator.training.evaluate import Evaluation, evaluate
from orchestrator.training.loop import windows_per_pass
from orchestrator.training.optim.build import build_optimizer, resolved_choices
from orchestrator.training.optim.optimizer import Optimizer
from orchestrator.training.optim.roles import format_table
from orchestrator.training.ranks import ALONE, Ranks
from orchestrator.training.recall import RecallResult, ask_recall
from orchestrator.training.runtime import Runtime
from orchestrator.training.schedule import quartiles
from orchestrator.training.windows import on_device

DECAY_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

EVALUATION_PASSES = 4
"""Training passes whose windows an evaluation reads at once: it keeps nothing for a backward."""

START_WINDOWS = 8
"""Windows that the freshly drawn model is scored on: all its losses are near log(vocabulary), and a
whole evaluation would cost as much as the one that counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A model, its optimizer and its data, ready to train.

    Attributes:
        config: of the trial.
        seed: of initialisation, and of the data order where `config.data_seed` is null.
        runtime: device and arithmetic.
        dataset: the tokens.
        batches: training windows by step.
        windows: the fixed evaluation set.
        model: on the device.
        optimizer: of the model.
        ranks: that train together; all hold equal models.
    """

    config: TrialConfig
    seed: int
    runtime: Runtime
    dataset: Dataset
    batches: TrainingBatches
    windows: EvaluationSet
    model: LanguageModel
    optimizer: Optimizer
    ranks: Ranks

    def evaluate(self) -> Evaluation:
        """Scores the model as it is on the fixed evaluation set."""
        return self._evaluate(self.windows)

    def evaluate_start(self) -> Evaluation:
        """Scores the model as it is on `START_WINDOWS` validation windows, spread evenly."""
        count = min(START_WINDOWS, len(self.windows.window_ids))
        return self._evaluate(
            evaluation_set(self.dataset, self.config.seq_len, count, self.config.data)
        )

    def _evaluate(self, windows: EvaluationSet) -> Evaluation:
        return evaluate(
            self.model,
            self.dataset,
            windows,
            windows_per_batch=EVALUATION_PASSES * windows_per_pass(self.config, self.ranks),
            runtime=self.runtime,
            ranks=self.ranks,
        )

    def ask_recall(self) -> list[RecallResult]:
        """Asks the model as it is what `eval.recall` says."""
        with eager(self.model):
            return ask_recall(
                self.model, self.config.eval.recall, self.dataset.vocab_size, self.runtime
            )

    def routing_norms(self) -> list[dict[str, Any]]:
        """How much each layer routes, on the first evaluation windows; empty without routing."""
        if self.config.model.routing.hidden_signal is None:
            return []
        windows = next(iter(self.windows.batches(windows_per_pass(self.config, self.ranks))))
        batch = on_device(windows, self.runtime.torch_device)
        with self.runtime.autocast():
            found = routing_norms(self.model, batch.inputs, batch.documents)
        return [asdict(norms) for norms in found]

    def facts(self) -> dict[str, Any]:
        """What is known before the first step, JSON-ready; names are those of `TrialRecord`."""
        config, vocab_size = self.config, self.dataset.vocab_size
        # Keys, values and convolution inputs are kept in the type of the arithmetic.
        itemsize = 2 if self.runtime.precision == "bf16" else 4
        return {
            "data_id": self.dataset.data_id,
            "data_seed": self.batches.data_seed,
            "eval_id": self.windows.eval_id,
            "eval_tokens": len(self.windows.window_ids) * config.seq_len,
            "unigram_loss_nats": self.dataset.unigram_loss_nats,
            **parameter_counts(self.model),
            "flops_per_token": flops_per_token(config.model, vocab_size, config.seq_len),
            "state_bytes": state_bytes(config.model, cache_itemsize=itemsize),
            "kv_bytes_per_token": kv_bytes_per_token(config.model, itemsize=itemsize),
            "kernel_impl": self.model.kernel_impl,
            "decay_quantiles": decay_quantiles(self.model),
            "parameter_table": format_table(self.optimizer.table),
            "parameter_rows": [row.as_row() for row in self.optimizer.table],
            "optimizer_choices": resolved_choices(config.optimizer, self.runtime.torch_device.type),
            "schedule_quartiles": schedule_quartiles(self.optimizer, config),
            "precision": self.runtime.precision,
            "threads": self.runtime.threads,
            "ranks": self.ranks.world_size,
            "device_name": self.runtime.device_name(),
            "torch_version": str(torch.__version__),
        }


def open_session(
    config: TrialConfig,
    *,
    seed: int,
    data_folder: Path,
    runtime: Runtime,
    ranks: Ranks = ALONE,
) -> Session:
    """Opens the data, draws the model and builds its optimizer.

    Args:
        config: of the trial.
        seed: at least 0.
        data_folder: a prepared data set.
        runtime: device and arithmetic.
        ranks: that train together.

    Raises:
        ValueError: a negative seed, or what the parts refuse: data that cannot be read or is too
            short, an implementation that the device lacks, a parameter without a group.
    """
    if seed < 0:
        raise ValueError(f"{seed=} must be at least 0")
    dataset = open_dataset(data_folder)
    model = build_model(
        config.model, dataset.vocab_size, named_generator(seed, "init"), runtime.torch_device
    )
    if config.model.compile:
        compile_layers(model)
    return Session(
        config=config,
        seed=seed,
        runtime=runtime,
        dataset=dataset,
        batches=TrainingBatches(
            split=dataset.train,
            data_seed=seed if config.data_seed is None else config.data_seed,
            windows_per_step=config.windows_per_step,
            seq_len=config.seq_len,
            rule=DocumentRule.of(dataset.train, config.data),
        ),
        windows=evaluation_set(dataset, config.seq_len, config.eval.windows, config.data),
        model=model,
        optimizer=build_optimizer(config.optimizer, model),
        ranks=ranks,
    )


def named_generator(seed: int, purpose: str) -> torch.Generator:
    """A generator on the CPU whose stream depends on the seed and on what it is for."""
    digest = hashlib.blake2b(f"{purpose}:{seed}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def parameter_counts(model: LanguageModel) -> dict[str, int]:
    """All parameters, and those that are neither embedding nor head."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    outer = {n for n, info in model.parameter_info().items() if info.role in ("embedding", "head")}
    total = sum(sizes.values())
    return {
        "params_total": total,
        "params_non_embedding": total - sum(sizes[name] for name in outer),
    }


@torch.no_grad()
def decay_quantiles(model: LanguageModel) -> dict[str, list[float]]:
    """Quantiles of each gated layer's decay α in (0, 1) as it is now, at a zero logit.

    How much memory a rule starts with depends on its decay's initialisation more than on the rule:
    two cells whose medians differ by orders of magnitude are no comparison of rules.

    Returns:
        5, 25, 50, 75 and 95 % by the name of the gate; empty for rules without decay.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, DecayGate):
            alpha = module(torch.zeros_like(module.dt_bias)).exp().flatten().double()
            levels = torch.tensor(DECAY_QUANTILES, dtype=torch.float64, device=alpha.device)
            found[name] = torch.quantile(alpha, levels).tolist()
    return found


def schedule_quartiles(optimizer: Optimizer, config: TrialConfig) -> dict[str, list[float]]:
    """Each group's rate at 0, 25, 50, 75 and 100 % of the updates."""
    return {
        group.name: list(
            quartiles(
                config.schedule,
                config.num_steps,
                group.spec.peak_lr,
                is_decayed=group.spec.is_decayed,
            )
        )
        for group in optimizer.groups
    }
