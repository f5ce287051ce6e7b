"""What a trial reads: training batches by step, and the windows that judge every trial."""

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.data.dataset import Batch, Dataset, Split
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
    """

    split: Split
    data_seed: int
    windows_per_step: int
    seq_len: int

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
        """Inputs and targets `[W, T]` of one rank in one micro step of a step."""
        ids = share(
            self.window_ids(step),
            rank=rank,
            world_size=world_size,
            micro_step=micro_step,
            num_micro_steps=num_micro_steps,
        )
        return self.split.batch(ids, self.seq_len)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvaluationSet:
    """The windows that judge every trial; independent of all seeds.

    Attributes:
        split: what is read.
        seq_len: T, tokens of a window.
        window_ids: `[W]`, ascending.
        eval_id: id of the set: of the data, the length and the windows; 16 hex digits.
    """

    split: Split
    seq_len: int
    window_ids: WindowIds
    eval_id: str

    def batches(self, windows_per_batch: int) -> Iterator[Batch]:
        """Inputs and targets of all windows in order; the last batch may be smaller.

        Raises:
            ValueError: `windows_per_batch` is below 1.
        """
        if windows_per_batch < 1:
            raise ValueError(f"{windows_per_batch=} must be at least 1")
        for first in range(0, len(self.window_ids), windows_per_batch):
            ids = self.window_ids[first : first + windows_per_batch]
            yield self.split.batch(ids, self.seq_len)


def evaluation_set(dataset: Dataset, seq_len: int, count: int | None = None) -> EvaluationSet:
    """`count` validation windows, spread evenly; every one for None.

    Raises:
        ValueError: a window longer than the validation part, or more windows than it has.
    """
    ids = evaluation_windows(dataset.val.num_windows(seq_len), count)
    eval_id = digest([dataset.data_id, dataset.val.name, seq_len, ids.tolist()])[:16]
    return EvaluationSet(split=dataset.val, seq_len=seq_len, window_ids=ids, eval_id=eval_id)
