"""Options of the recall probes that end a trial; imports no torch."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class RecallConfig:
    """Which recall tasks a trained model is asked; see `orchestrator.training.probes`.

    Attributes:
        num_sequences: sequences of each task; 0 asks nothing.
        pairs: numbers of pairs of associative recall, each a task of its own, of four tokens a
            pair.
        lengths: lengths of the haystacks.
        depths: places of the needle in each of them, in [0, 1].
        chains: numbers of chains of two hops, each a task of its own.
    """

    num_sequences: int = 0
    pairs: list[int] = field(default_factory=lambda: [4, 16])
    lengths: list[int] = field(default_factory=lambda: [64, 256])
    depths: list[float] = field(default_factory=lambda: [0.0, 0.5, 1.0])
    chains: list[int] = field(default_factory=lambda: [4])

    def __post_init__(self) -> None:
        if self.num_sequences < 0:
            raise ValueError(f"eval.recall.num_sequences={self.num_sequences} must be at least 0")
        for name, least in (("pairs", 1), ("lengths", 3), ("chains", 1)):
            values: list[int] = getattr(self, name)
            if any(value < least for value in values):
                raise ValueError(f"eval.recall.{name}={values} must each be at least {least}")
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"eval.recall.depths={self.depths} must each lie in [0, 1]")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses tasks that need more tokens than there are.

        Raises:
            ValueError: names the largest task that does not fit.
        """
        if not self.num_sequences:
            return
        needs = [(2 * pairs + 1, f"pairs={self.pairs}") for pairs in self.pairs]
        needs += [(3 * chains + 1, f"chains={self.chains}") for chains in self.chains]
        needed, name = max(needs, default=(0, ""))
        if vocab_size < needed:
            raise ValueError(
                f"eval.recall.{name} needs {needed} different tokens, but data.vocab_size is "
                f"{vocab_size}"
            )
