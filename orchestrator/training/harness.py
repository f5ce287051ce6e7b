"""Exported models under EleutherAI's lm-evaluation-harness: HellaSwag, PIQA, WinoGrande and others.

    python -m orchestrator.training.harness MODEL_FOLDER --tasks hellaswag,piqa,winogrande

Needs the extra `eval` of this project, which pins the harness: scores of other versions do not
compare. Contexts and continuations are encoded as the harness' own models do it, and scored by full
forward passes; an empty context is the token that stands between documents. Tasks that let a model
write freely are refused, since nothing here was trained to stop.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        "orchestrator.training.harness needs lm-evaluation-harness: pip install 'seedfront[eval]'"
    ) from error

from orchestrator.data.tokenize import Tokenizer, load_tokenizer, own_tokenizer
from orchestrator.training.continuations import score_continuations
from orchestrator.training.export import Exported, load_exported
from orchestrator.training.runtime import Runtime


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model of ours as the harness wants one.

    Args:
        exported: the model.
        runtime: device and arithmetic.
        pairs_per_batch: rows of one forward pass.
    """

    def __init__(self, exported: Exported, runtime: Runtime, pairs_per_batch: int = 8) -> None:
        super().__init__()
        self._model = exported.model.to(runtime.torch_device)
        self._runtime = runtime
        self._pairs_per_batch = pairs_per_batch
        self._encoder = _tokenizer(exported)
        # As long as the windows that the model was trained on.
        self._max_length = exported.config.seq_len

    @property
    def eot_token_id(self) -> int:
        """The token between documents."""
        token = self._encoder.end_id if self._encoder.start_id is None else self._encoder.start_id
        if token is None:
            raise ValueError(
                "the data of this model has no token between documents, so an empty context "
                "cannot be written; data.end_token names one"
            )
        return token

    def tok_encode(self, string: str, **options: Any) -> list[int]:
        """Ids of a text; special tokens are never added."""
        return self._encoder.encode([string])[0]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        scores = score_continuations(
            self._model,
            [(context, continuation) for _, context, continuation in requests],
            max_length=self._max_length,
            runtime=self._runtime,
            pairs_per_batch=self._pairs_per_batch,
        )
        return [(score.log_probability, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], **options: Any) -> list[float]:
        """Log-likelihood of whole texts, in windows that predict each token once."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            scores = self._loglikelihood_tokens([(None, *pair) for pair in pairs])
            totals.append(sum(score for score, _ in scores))
        return totals

    def generate_until(self, requests: Sequence[Any], **options: Any) -> list[str]:
        """Refuses; see the module.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "tasks that generate text are not served; choose tasks that score continuations, such "
            "as hellaswag, piqa and winogrande"
        )


def score_tasks(
    exported: Exported,
    tasks: Sequence[str | dict[str, Any]],
    *,
    runtime: Runtime,
    limit: int | None = None,
    pairs_per_batch: int = 8,
) -> dict[str, dict[str, Any]]:
    """Zero-shot scores by task, as the harness names them (`acc,none`, `acc_norm,none`, …).

    Args:
        exported: the model.
        tasks: names that the harness knows, or tasks in its own configuration format.
        runtime: device and arithmetic.
        limit: most documents of each task; None for all.
        pairs_per_batch: rows of one forward pass.
    """
    found = lm_eval.simple_evaluate(
        model=HarnessModel(exported, runtime, pairs_per_batch),
        tasks=list(tasks),
        num_fewshot=0,
        limit=limit,
        bootstrap_iters=0,
    )
    results: dict[str, dict[str, Any]] = found["results"]
    return results


def _tokenizer(exported: Exported) -> Tokenizer:
    if exported.tokenizer is not None:
        return own_tokenizer(exported.tokenizer.read_text(encoding="utf-8"), exported.config.data)
    return load_tokenizer(exported.config.data)


def main(arguments: Sequence[str]) -> int:
    """Scores an exported model and writes the result as JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.training.harness")
    parser.add_argument("folder", type=Path, help="an exported model")
    parser.add_argument("--tasks", required=True, help="names, separated by commas")
    parser.add_argument("--limit", type=int, help="most documents of each task")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--precision", default="fp32", help="fp32 or bf16")
    options = parser.parse_args(arguments)
    try:
        runtime = Runtime(device=options.device, precision=options.precision)
        exported = load_exported(options.folder)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    scores = score_tasks(exported, options.tasks.split(","), runtime=runtime, limit=options.limit)
    sys.stdout.write(json.dumps(scores, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
