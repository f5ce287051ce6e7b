"""Where documents end inside windows, read from the index beside the tokens.

A window is a stretch of the token stream, so documents begin anywhere in it. Which ones is looked
up by bisection in the ends that `.idx` states, never guessed from tokens: a literal `<s>` in a text
begins nothing. For two windows of five tokens laid end to end, with documents a, b and c:

    window        | a  a  a  b  b | b  c  c  c  c |
    bounds          0        3      5  6          10
    not counted           ^         ^

An input and the token after it, its target, may lie in different documents: at the last token of a
the first one of b is asked for, which says no more than that a ends. Whether such targets (^) count
in losses is an option of its own.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.data.corpus import DataConfig
from orchestrator.data.dataset import Split
from orchestrator.data.order import WindowIds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentRule:
    """How the documents of one split are told apart; one that does nothing is None instead.

    Attributes:
        starts: positions in the stream at which a document begins, ascending, each once; a document
            without tokens begins nothing.
        masks: windows are read as their documents, each by itself.
        counts_first: targets that begin a document count in losses.
    """

    starts: NDArray[np.int64]
    masks: bool
    counts_first: bool

    @classmethod
    def of(cls, split: Split, config: DataConfig) -> "DocumentRule | None":
        """The rule that a configuration asks for; None for the plain stream."""
        if not config.reading_options:
            return None
        ends = split.document_ends().astype(np.int64)
        starts = np.unique(np.concatenate([np.zeros(1, np.int64), ends[:-1]]))
        return cls(
            # A document without tokens at the very end would begin behind the stream.
            starts=starts[starts < split.num_tokens],
            masks=config.mask_documents,
            counts_first=config.first_token_loss,
        )

    def bounds(self, ids: WindowIds, seq_len: int) -> NDArray[np.int64] | None:
        """Where the parts of these windows, laid end to end, begin, and where the last one ends.

        Returns:
            `[parts + 1]`, increasing, from 0 to len(ids) · seq_len, the start of every window among
            them; None where documents are not told apart.
        """
        if not self.masks:
            return None
        rows, places = self._inside(ids, seq_len, first=0)
        edges = np.arange(len(ids) + 1, dtype=np.int64) * seq_len
        return np.unique(np.concatenate([edges, rows * seq_len + places]))

    def counted(self, ids: WindowIds, seq_len: int) -> NDArray[np.bool_] | None:
        """Which targets of these windows count, `[len(ids), seq_len]`; None for all of them."""
        if self.counts_first:
            return None
        rows, places = self._inside(ids, seq_len, first=1)
        counted = np.ones((len(ids), seq_len), np.bool_)
        counted[rows, places] = False
        return counted

    def _inside(
        self, ids: WindowIds, seq_len: int, *, first: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and place of every start among `seq_len` tokens from the window's `first` one on."""
        begins = ids * seq_len + first
        low = np.searchsorted(self.starts, begins)
        counts = np.searchsorted(self.starts, begins + seq_len) - low
        rows = np.repeat(np.arange(len(ids)), counts)
        # Places within each row's own run of starts: 0, 1, … counts - 1.
        runs = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        places = self.starts[np.repeat(low, counts) + runs] - begins[rows]
        return rows, places
