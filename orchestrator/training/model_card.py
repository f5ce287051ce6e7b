"""The model card of an exported model: what it is, what it was trained on, what it scored."""

from collections.abc import Mapping
from typing import Any

from orchestrator.config import TrialConfig

SCORES = {
    "val_loss_nats": "validation loss, nats per token",
    "val_loss_se": "its standard error over windows",
    "val_bits_per_byte": "the same loss in bits per byte",
    "train_loss_nats": "training loss, last tenth of the steps",
    "unigram_loss_nats": "validation loss of token frequencies alone",
    "recall_accuracy": "associative recall, share of questions answered",
    "needle_accuracy": "needle in a haystack, share of questions answered",
    "two_hop_accuracy": "two look-ups, share of questions answered",
}


def model_card(config: TrialConfig, facts: Mapping[str, Any], parameters: int) -> str:
    """The card as Markdown with a YAML head, as model hubs read it.

    Args:
        config: of the trial.
        facts: what `config.json` holds beside it.
        parameters: of the model.
    """
    model, schedule = config.model, config.schedule
    title = f"{model.mixer.name}, {model.stack}, {parameters:,} parameters"
    results = facts["results"]
    scores = [
        f"| {text} | {results[name]:.4f} |"
        for name, text in SCORES.items()
        if results.get(name) is not None
    ]
    lines = [
        "---",
        "library_name: seedfront",
        f"tags: [language-model, {model.mixer.name}, {model.stack}]",
        "---",
        "",
        f"# {title}",
        "",
        "A causal language model from one seeded trial of a sweep. It is made to be compared with "
        "others of its sweep, not to be used: it has had no instruction tuning and no filter.",
        "",
        "## Architecture",
        "",
        f"- layers: {', '.join(model.layer_mixers())}",
        f"- width {model.d_model}, MLP {model.ffn_dim}, vocabulary {facts['vocab_size']}",
        f"- cross-layer routing: {model.routing.kind}",
        "",
        "## Training",
        "",
        f"- data: {config.data.name}, id `{facts['data_id']}`; {_reading(config)}",
        f"- {config.num_steps * config.batch.tokens:,} tokens in {config.num_steps:,} steps of "
        f"{config.batch.tokens:,}, windows of {config.seq_len}, seed {facts['seed']}",
        f"- {config.optimizer.name}, peak rate {config.optimizer.lr:g}, schedule {schedule.kind} "
        f"(warm-up {schedule.warmup_fraction:g}, decay {schedule.decay_fraction:g} of the steps)",
        "",
        "## Results",
        "",
        "| measured | value |",
        "|---|---|",
        *scores,
        "",
        "One seed: the spread over seeds is in the sweep's report, not here.",
        "",
        "## Loading",
        "",
        "```python",
        "from pathlib import Path",
        "from orchestrator.training.export import load_exported",
        "",
        'exported = load_exported(Path("."))',
        "```",
        "",
        f"`config.json` has the whole configuration and the sha256 of `model.safetensors`, "
        f"`{facts['weights_sha256']}`.",
    ]
    return "\n".join(lines) + "\n"


def _reading(config: TrialConfig) -> str:
    """How windows were read that hold several documents."""
    masked = config.data.mask_documents
    reading = "each document in a window by itself" if masked else "windows across document ends"
    left_out = "" if config.data.first_token_loss else ", targets that begin a document left out"
    return f"{reading}{left_out}"
