"""Where text comes from: the embedded corpus, or the user's Parquet, JSONL and text files."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """One tokenised data set: its text, its split and its tokenizer.

    Attributes:
        name: name of the prepared folder, and of the set in reports.
        sources: `sotu` for the embedded corpus, or globs of .parquet, .jsonl (also .xz, .gz) and
            .txt files.
        text_field: column or key that holds the text.
        split: `year:2010` (documents of that year and later validate, embedded corpus only) or
            `last:0.01` (the last share of documents validates).
        tokenizer: `bpe` to train a byte-level BPE on the training part, or the path of a
            `tokenizer.json` or `tokenizer.model`.
        vocab_size: entries of the vocabulary, special tokens included.
        document_start: write `<s>` before each document.
        document_end: write `</s>` after each document.
    """

    name: str = "sotu"
    sources: list[str] = field(default_factory=lambda: ["sotu"])
    text_field: str = "text"
    split: str = "year:2010"
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    document_start: bool = True
    document_end: bool = False
