"""Where text comes from: the embedded corpus, or the user's Parquet, JSONL and text files.

Imports the standard library only and opens no corpus: composing and planning a sweep needs the
configuration and the list of files, while reading them (`orchestrator.data.sources`) needs pyarrow.
"""

import glob
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

FILE_KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".jsonl.xz": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".txt": "txt",
}
"""How a file is read, by the end of its name."""

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
"""Ids 0, 1 and 2 of a trained tokenizer."""

MIN_BPE_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
"""A byte-level vocabulary holds the specials and every byte, else some text has no tokens."""

MAX_VOCAB_SIZE = 2**31
"""The widest token type, uint32, would allow twice that; tensors index with signed integers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedCorpus:
    """A corpus that ships with the package.

    Attributes:
        file: its name in `corpora/`.
        sha256: of the file as shipped.
        version: version of the package that the text comes from.
        licence: rights in one phrase; `corpora/PROVENANCE.md` says more.
    """

    file: str
    sha256: str
    version: str
    licence: str

    @property
    def path(self) -> Path:
        """Where the file stands."""
        return Path(__file__).parent / "corpora" / self.file


EMBEDDED = {
    "sotu": EmbeddedCorpus(
        file="sotu.jsonl.xz",
        sha256="6d13932e2edc0fa46b392eabc17baafd71ce5d43821bee4b261c85c6d11d660b",
        version="0.1.2",
        licence="public domain (17 U.S.C. 105)",
    ),
}
"""The embedded corpora by the name that `data.sources` gives them."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Which documents validate; always whole documents, decided before they are packed.

    Attributes:
        kind: `year` or `last`.
        threshold: first year that validates, or the share of documents at the end that does.
    """

    kind: str
    threshold: float

    @classmethod
    def parse(cls, text: str) -> "SplitRule":
        """The rule that `year:Y` or `last:SHARE` writes.

        Raises:
            ValueError: another form, or a share outside (0, 1).
        """
        if match := re.fullmatch(r"year:(\d{1,4})", text):
            return cls("year", int(match[1]))
        if match := re.fullmatch(r"last:(\d*\.?\d+)", text):
            share = float(match[1])
            if 0 < share < 1:
                return cls("last", share)
        raise ValueError(
            f"data.split={text!r} must be `year:Y` or `last:SHARE` with a share between 0 and 1, "
            "for example `year:2010` or `last:0.01`"
        )

    def first_validation(self, num_documents: int) -> int:
        """Position of the first validating document under `last`; at least one validates."""
        return num_documents - max(1, int(self.threshold * num_documents + 0.5))


READING_DEFAULTS = {"mask_documents": False, "first_token_loss": True}
"""Options of `DataConfig` about reading a prepared set, at what they are for the plain stream."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """One tokenised data set: its text, its split and its tokenizer.

    Attributes:
        name: name of the prepared folder, and of the set in reports; of letters, digits, `.`, `_`
            and `-`.
        sources: `sotu` for the embedded corpus, or globs of .parquet, .jsonl (also .xz, .gz, .zst)
            and .txt files. A Parquet row, a JSONL line and a .txt file are one document each; files
            are read in the order of the globs, by path within a glob.
        text_field: column or key that holds the text.
        licence: licence of the user's files, for the manifest; embedded corpora know theirs.
        split: `year:2010` (documents of that year and later validate, embedded corpus only) or
            `last:0.01` (the last share of documents validates).
        tokenizer: `bpe` to train a byte-level BPE on the training part, the path of a
            `tokenizer.json` or `tokenizer.model`, or `llama2:` and such a path, which is refused
            unless it is LLaMA-2's.
        tokenizer_bytes: `bpe` learns from this many bytes of text at most, the first ones of the
            training part.
        vocab_size: entries of the vocabulary, special tokens included; a given tokenizer must have
            exactly as many.
        start_token: what `document_start` writes; a trained tokenizer has `<s>`.
        end_token: what `document_end` writes; a trained tokenizer has `</s>`.
        document_start: write `start_token` before each document.
        document_end: write `end_token` after each document.
        mask_documents: read every document in a window by itself: memory and convolution start
            empty and attention begins anew where a document begins, in training, evaluation and
            the speed lane. False reads on across ends, the plain stream.
        first_token_loss: targets that begin a document, asked for at the end of the one before,
            count in training and evaluation losses.
    """

    name: str = "sotu"
    sources: list[str] = field(default_factory=lambda: ["sotu"])
    text_field: str = "text"
    licence: str | None = None
    split: str = "year:2010"
    tokenizer: str = "bpe"
    tokenizer_bytes: int = 200_000_000
    vocab_size: int = 4096
    start_token: str = "<s>"
    end_token: str = "</s>"
    document_start: bool = True
    document_end: bool = False
    mask_documents: bool = False
    first_token_loss: bool = True

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"data.name={self.name!r} names a folder: it must start with a letter or digit and "
                "hold only letters, digits, `.`, `_` and `-`"
            )
        if not self.sources:
            raise ValueError("data.sources is empty; give `sotu` or at least one glob of files")
        for source in self.sources:
            _check_source(source)
        rule = SplitRule.parse(self.split)
        if rule.kind == "year" and any(source not in EMBEDDED for source in self.sources):
            raise ValueError(
                f"data.split={self.split!r} needs the years that only the embedded corpora "
                f"({', '.join(EMBEDDED)}) carry; use `last:SHARE` for files"
            )
        if not self.text_field:
            raise ValueError("data.text_field is empty; name the column or key that holds the text")
        if not self.tokenizer or self.tokenizer == "llama2:":
            raise ValueError(
                f"data.tokenizer={self.tokenizer!r} must be `bpe`, or the path of a tokenizer.json "
                "or tokenizer.model, with `llama2:` before it to insist on LLaMA-2's"
            )
        if self.tokenizer_bytes < 1:
            raise ValueError(f"data.tokenizer_bytes={self.tokenizer_bytes} must be at least 1")
        smallest = MIN_BPE_VOCAB_SIZE if self.tokenizer == "bpe" else 2
        if not smallest <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(
                f"data.vocab_size={self.vocab_size} must be between {smallest} and "
                f"{MAX_VOCAB_SIZE} for data.tokenizer={self.tokenizer!r}"
            )
        if self.tokenizer == "bpe" and (self.start_token, self.end_token) != SPECIAL_TOKENS[1:]:
            raise ValueError(
                f"data.start_token={self.start_token!r} and data.end_token={self.end_token!r} must "
                "be '<s>' and '</s>' for data.tokenizer='bpe', which has no others"
            )

    @property
    def is_embedded(self) -> bool:
        """Whether the set can be prepared anywhere: embedded text, own tokenizer."""
        return self.tokenizer == "bpe" and all(source in EMBEDDED for source in self.sources)

    @property
    def reading_options(self) -> dict[str, bool]:
        """What makes the reading differ from the plain stream, by key; empty for that.

        These decide what is computed from the tokens and not the tokens: no part of a data id.
        """
        plain = READING_DEFAULTS
        return {name: value for name in plain if (value := getattr(self, name)) != plain[name]}

    @property
    def tokenizer_path(self) -> Path | None:
        """The tokenizer file that the user gave; None for `bpe`."""
        if self.tokenizer == "bpe":
            return None
        return Path(self.tokenizer.removeprefix("llama2:"))


def _check_source(source: str) -> None:
    if source in EMBEDDED:
        return
    if "://" in source:
        raise ValueError(
            f"data.sources: {source!r} is an address, and only local files are read; download the "
            "Parquet files (for example with `hf download --repo-type dataset`) and give their glob"
        )
    if not source.endswith(tuple(FILE_KINDS)):
        raise ValueError(
            f"data.sources: {source!r} is neither an embedded corpus ({', '.join(EMBEDDED)}) nor "
            f"a path or glob that ends in one of {', '.join(FILE_KINDS)}"
        )


def resolve_paths(config: DataConfig, folder: Path) -> DataConfig:
    """The same configuration with every relative path made absolute, starting from `folder`."""

    def absolute(path: str) -> str:
        return str(folder.absolute() / Path(path).expanduser())

    sources = [source if source in EMBEDDED else absolute(source) for source in config.sources]
    tokenizer = config.tokenizer
    if config.tokenizer_path is not None:
        prefix = "llama2:" if tokenizer.startswith("llama2:") else ""
        tokenizer = prefix + absolute(str(config.tokenizer_path))
    return replace(config, sources=sources, tokenizer=tokenizer)


def require_absolute(config: DataConfig) -> None:
    """Refuse paths whose meaning depends on the folder that a process happens to run in.

    Raises:
        ValueError: a relative path in `sources` or `tokenizer`.
    """
    paths = [("sources", source) for source in config.sources if source not in EMBEDDED]
    if config.tokenizer_path is not None:
        paths.append(("tokenizer", str(config.tokenizer_path)))
    for name, path in paths:
        if not Path(path).is_absolute():
            raise ValueError(
                f"data.{name}: {path!r} is relative; make it absolute, or resolve the "
                "configuration with `orchestrator.data.resolve_paths`"
            )


class MissingSourceError(ValueError):
    """A source names no file on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of a corpus, not opened yet.

    Attributes:
        path: absolute path.
        kind: `parquet`, `jsonl` or `txt`.
        num_bytes: size on disk.
        embedded: the embedded corpus that it is; None for a user's file.
    """

    path: Path
    kind: str
    num_bytes: int
    embedded: EmbeddedCorpus | None = None

    @property
    def name(self) -> str:
        """Name of the file without its folder."""
        return self.path.name


def list_sources(config: DataConfig) -> list[SourceFile]:
    """The files that `config.sources` names now, in reading order.

    Raises:
        MissingSourceError: a glob without a match.
        ValueError: a file matched twice, or a relative path.
    """
    require_absolute(config)
    files: dict[Path, SourceFile] = {}
    for source in config.sources:
        corpus = EMBEDDED.get(source)
        paths = (
            [corpus.path] if corpus else sorted(Path(p) for p in glob.glob(source, recursive=True))
        )
        paths = [path for path in paths if path.is_file()]
        if not paths:
            raise MissingSourceError(f"data.sources: {source!r} matches no file")
        for path in paths:
            if path in files:
                raise ValueError(
                    f"data.sources: {source!r} matches {path}, which an earlier source has read"
                )
            files[path] = SourceFile(
                path=path, kind=_kind(path), num_bytes=path.stat().st_size, embedded=corpus
            )
    return list(files.values())


def _kind(path: Path) -> str:
    for ending, kind in FILE_KINDS.items():
        if path.name.endswith(ending):
            return kind
    raise ValueError(f"data.sources: {path} must end in one of {', '.join(FILE_KINDS)}")
