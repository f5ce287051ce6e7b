"""What a trial reads: training batches by step, and the windows that judge every trial."""

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.data.corpus import DataConfig
from orchestrator.data.dataset import Batch, Dataset, Split
from orchestrator.data.documents import DocumentRule
from orchestrator.data.manifest import digest
from orchestrator.data.order import WindowIds, evaluation_windows, share, window_ids


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingBatches:
    """The batches of a run, by step; holds no position, so resuming is asking for a later step.

    Attributes:
        split: what is read.
        data_seed: seed of the order.
        windows_per_step: windows of one optimizer step over all ranks.
        seq_len: T, tokens of a window.
        rule: how documents are told apart; None for the plain stream.
    """

    split: Split
    data_seed: int
    windows_per_step: int
    seq_len: int
    rule: DocumentRule | None = None

    def __post_init__(self) -> None:
        # Refuses a bad seed, length or batch before the first step.
        self.window_ids(0)

    @property
    def num_windows(self) -> int:
        """Windows of one epoch."""
        return self.split.num_windows(self.seq_len)

    def window_ids(self, step: int) -> WindowIds:
        """The windows of a step, `[windows_per_step]`."""
        return window_ids(self.data_seed, step, self.windows_per_step, self.num_windows)

    def batch(
        self,
        step: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        micro_step: int = 0,
        num_micro_steps: int = 1,
    ) -> Batch:
        """The windows of one rank in one micro step of a step."""
        ids = share(
            self.window_ids(step),
            rank=rank,
            world_size=world_size,
            micro_step=micro_step,
            num_micro_steps=num_micro_steps,
        )
        return _read(self.split, ids, self.seq_len, self.rule)

    def counted_targets(self, step: int) -> int:
        """Targets that count in the loss of a step, over all ranks and micro steps."""
        ids = self.window_ids(step)
        counted = None if self.rule is None else self.rule.counted(ids, self.seq_len)
        return len(ids) * self.seq_len if counted is None else int(counted.sum())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvaluationSet:
    """The windows that judge every trial; independent of all seeds.

    Attributes:
        split: what is read.
        seq_len: T, tokens of a window.
        window_ids: `[W]`, ascending.
        eval_id: id of the set: of the data, the length, the windows and how their documents are
            told apart; 16 hex digits.
        rule: how documents are told apart; None for the plain stream.
    """

    split: Split
    seq_len: int
    window_ids: WindowIds
    eval_id: str
    rule: DocumentRule | None = None

    def batches(self, windows_per_batch: int) -> Iterator[Batch]:
        """All windows in order; the last batch may be smaller.

        Raises:
            ValueError: `windows_per_batch` is below 1.
        """
        if windows_per_batch < 1:
            raise ValueError(f"{windows_per_batch=} must be at least 1")
        for first in range(0, len(self.window_ids), windows_per_batch):
            ids = self.window_ids[first : first + windows_per_batch]
            yield _read(self.split, ids, self.seq_len, self.rule)


def _read(split: Split, ids: WindowIds, seq_len: int, rule: DocumentRule | None) -> Batch:
    batch = split.batch(ids, seq_len)
    if rule is None:
        return batch
    return batch._replace(bounds=rule.bounds(ids, seq_len), counted=rule.counted(ids, seq_len))


def evaluation_set(
    dataset: Dataset,
    seq_len: int,
    count: int | None = None,
    config: DataConfig | None = None,
) -> EvaluationSet:
    """`count` validation windows, spread evenly; every one for None.

    Args:
        dataset: whose validation part is read.
        seq_len: T, tokens of a window.
        count: number of windows.
        config: whose options of reading hold; None for the plain stream.

    Raises:
        ValueError: a window longer than the validation part, or more windows than it has.
    """
    ids = evaluation_windows(dataset.val.num_windows(seq_len), count)
    described = [dataset.data_id, dataset.val.name, seq_len, ids.tolist()]
    rule = None
    if config is not None and config.reading_options:
        rule = DocumentRule.of(dataset.val, config)
        # Another task on the same windows; those of the plain stream keep the id they had.
        described.append(config.reading_options)
    return EvaluationSet(
        split=dataset.val,
        seq_len=seq_len,
        window_ids=ids,
        eval_id=digest(described)[:16],
        rule=rule,
    )
