"""Text to token ids: a byte-level BPE of our own, or a tokenizer that the user brings.

Ours is the byte-pair encoding of Sennrich et al. (arXiv:1508.07909) over bytes, as in GPT-2: the
256 bytes are the alphabet, so every text has tokens and decodes to itself. Training is repeatable
to the byte for one version of `tokenizers`, whatever the number of threads.

Special tokens stand only where the document rule writes them: their spelling inside a text is
encoded as the plain characters it is.
"""

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from orchestrator.data.corpus import SPECIAL_TOKENS, DataConfig

LLAMA2_PROBE = ("Hello world", [15043, 3186])
"""LLaMA-2's ids of a text, without `<s>`; other vocabularies of 32,000 give others."""

WHITE_SPACE = r" \t-\r\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""Unicode's property, by which `tokenizers` goes; Python's own class has four more."""
PIECE = re.compile(f"[{WHITE_SPACE}]*[^{WHITE_SPACE}]+|[{WHITE_SPACE}]+")
"""A word with what stands around it, and the white space before."""

Encode = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokenizer:
    """Encodes documents, and knows how many bytes of text each of its tokens stands for.

    Attributes:
        kind: `bpe` for our own, else `tokenizer.json` or `tokenizer.model`.
        sha256: of the tokenizer's file.
        serialized: text of `tokenizer.json` to keep beside the tokens; None for a user's tokenizer,
            whose licence may not allow copies.
        vocab_size: entries.
        start_id: id that stands before a document; None where the rule writes none.
        end_id: id that stands after a document; None where the rule writes none.
        token_bytes: `[vocab_size]` uint32, UTF-8 bytes of each token, 0 for special tokens.
        prefix_bytes: bytes that encoding adds to a document: 1 for tokenizers that put a space
            before its first word, else 0.
        encode: ids of each text, special tokens neither added nor recognised.
        library: name and version of what encodes.
    """

    kind: str
    sha256: str
    serialized: str | None
    vocab_size: int
    start_id: int | None
    end_id: int | None
    token_bytes: NDArray[np.uint32]
    prefix_bytes: int
    encode: Encode
    library: str


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """The `tokenizer.json` of a byte-level BPE learnt from `texts`.

    Raises:
        ValueError: the texts hold too few different pairs for so many entries.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise ValueError(
            f"data.vocab_size={vocab_size} is more than the training text supports; it yields "
            f"{found} entries, so use that or fewer"
        )
    return tokenizer.to_str()


def own_tokenizer(serialized: str, config: DataConfig) -> Tokenizer:
    """The tokenizer that `train_bpe` made."""
    data = serialized.encode()
    tokenizer = _from_json(serialized, data, "bpe", config, keep=True)
    return replace(tokenizer, encode=_piecewise(tokenizer.encode))


def _piecewise(encode: Encode) -> Encode:
    """The same ids from encoding each different `PIECE` of the texts once.

    No token of ours reaches from the end of a word into the white space behind it, so texts may be
    cut there; and texts repeat their words: 12 MB of speeches took 4 s of a processor and not 10.
    """

    def encode_pieces(texts: list[str]) -> list[list[int]]:
        cut = [PIECE.findall(text) for text in texts]
        pieces = list(dict.fromkeys(chain.from_iterable(cut)))
        ids = dict(zip(pieces, encode(pieces), strict=True))
        return [list(chain.from_iterable(map(ids.__getitem__, parts))) for parts in cut]

    return encode_pieces


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The user's tokenizer at `config.tokenizer`.

    Raises:
        ValueError: no such file, a format that cannot be read, another vocabulary size than
            `config.vocab_size`, a document token that it lacks, text that it would not give back,
            or another vocabulary where LLaMA-2's was asked for.
    """
    path = config.tokenizer_path
    if path is None:
        raise ValueError("data.tokenizer='bpe' is trained, not loaded")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"data.tokenizer: {path} cannot be read: {error.strerror}") from error
    match path.suffix:
        case ".json":
            tokenizer = _from_json(_utf8(data, path), data, "tokenizer.json", config, keep=False)
        case ".model":
            tokenizer = _from_sentencepiece(data, config)
        case _:
            raise ValueError(f"data.tokenizer: {path} must end in .json or .model")
    if config.tokenizer.startswith("llama2:"):
        _require_llama2(tokenizer, path)
    return tokenizer


def _utf8(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"data.tokenizer: {path} is not UTF-8: {error}") from error


def _from_json(
    serialized: str, data: bytes, kind: str, config: DataConfig, *, keep: bool
) -> Tokenizer:
    # The library raises bare `Exception` for text that it cannot parse.
    try:
        tokenizer = tokenizers.Tokenizer.from_str(serialized)
    except Exception as error:
        raise ValueError(f"data.tokenizer={config.tokenizer!r} cannot be read: {error}") from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    vocab_size = _check_vocab_size(max(vocab.values()) + 1, config)
    token_bytes = _json_token_bytes(json.loads(serialized), vocab, vocab_size, config)

    def encode(texts: list[str]) -> list[list[int]]:
        return [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    return Tokenizer(
        kind=kind,
        sha256=hashlib.sha256(data).hexdigest(),
        serialized=serialized if keep else None,
        vocab_size=vocab_size,
        start_id=_document_id("start", vocab, config),
        end_id=_document_id("end", vocab, config),
        token_bytes=token_bytes,
        prefix_bytes=_prefix_bytes(encode, token_bytes),
        encode=encode,
        library=f"tokenizers {tokenizers.__version__}",
    )


def _json_token_bytes(
    spec: dict[str, Any], vocab: dict[str, int], vocab_size: int, config: DataConfig
) -> NDArray[np.uint32]:
    """Bytes per token, for tokens made of bytes, or of text with bytes to fall back on."""
    added = {token["content"]: bool(token["special"]) for token in spec["added_tokens"]}
    is_byte_level = "ByteLevel" in _types(spec["pre_tokenizer"])
    if not is_byte_level and not spec["model"].get("byte_fallback"):
        raise ValueError(
            f"data.tokenizer={config.tokenizer!r} works neither on bytes nor with byte fallback, "
            "so it loses text and bits per byte would be untrue; use a byte-level one"
        )
    counts = np.zeros(vocab_size, np.uint32)
    for piece, index in vocab.items():
        if piece in added:
            counts[index] = 0 if added[piece] else len(piece.encode())
        elif is_byte_level:
            # Its alphabet spells each byte as one character.
            counts[index] = len(piece)
        else:
            counts[index] = _piece_bytes(piece)
    return counts


def _types(part: Any) -> set[str]:
    """Types named anywhere in a component of a `tokenizer.json`."""
    if isinstance(part, list):
        return set().union(*map(_types, part))
    if isinstance(part, dict):
        own = {part["type"]} if isinstance(part.get("type"), str) else set()
        return own.union(*map(_types, part.values()))
    return set()


def _piece_bytes(piece: str) -> int:
    """Bytes of a sentencepiece piece, where `▁` is a space and `<0x0A>` one byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.replace("▁", " ").encode())


def _from_sentencepiece(data: bytes, config: DataConfig) -> Tokenizer:
    try:
        library: Any = importlib.import_module("sentencepiece")
    except ModuleNotFoundError:
        raise ValueError(
            f"data.tokenizer={config.tokenizer!r} needs the package sentencepiece, which is not "
            "installed; install it, or give the same tokenizer as a tokenizer.json"
        ) from None
    try:
        processor = library.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise ValueError(f"data.tokenizer={config.tokenizer!r} cannot be read: {error}") from error
    vocab_size = _check_vocab_size(processor.vocab_size(), config)
    pieces = [processor.id_to_piece(i) for i in range(vocab_size)]
    is_special = [processor.is_control(i) or processor.is_unknown(i) for i in range(vocab_size)]
    counts = [
        0 if special else _piece_bytes(piece)
        for piece, special in zip(pieces, is_special, strict=True)
    ]
    token_bytes = np.array(counts, np.uint32)
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return Tokenizer(
        kind="tokenizer.model",
        sha256=hashlib.sha256(data).hexdigest(),
        serialized=None,
        vocab_size=vocab_size,
        start_id=_document_id("start", vocab, config),
        end_id=_document_id("end", vocab, config),
        token_bytes=token_bytes,
        prefix_bytes=_prefix_bytes(processor.encode, token_bytes),
        encode=processor.encode,
        library=f"sentencepiece {library.__version__}",
    )


def _check_vocab_size(found: int, config: DataConfig) -> int:
    if found != config.vocab_size:
        raise ValueError(
            f"data.vocab_size={config.vocab_size} does not fit data.tokenizer="
            f"{config.tokenizer!r}, which has {found} entries; set data.vocab_size={found}"
        )
    return found


def _document_id(place: str, vocab: dict[str, int], config: DataConfig) -> int | None:
    """Id of the token at the start or end of a document; None where the rule writes none."""
    if not getattr(config, f"document_{place}"):
        return None
    token = getattr(config, f"{place}_token")
    if token not in vocab:
        raise ValueError(
            f"data.{place}_token={token!r} is not in the vocabulary of data.tokenizer="
            f"{config.tokenizer!r}; name one that is, or set data.document_{place}=false"
        )
    return vocab[token]


def _prefix_bytes(encode: Encode, token_bytes: NDArray[np.uint32]) -> int:
    return int(token_bytes[encode(["a"])[0]].sum()) - 1


def _require_llama2(tokenizer: Tokenizer, path: Path) -> None:
    text, expected = LLAMA2_PROBE
    found = tokenizer.encode([text])[0]
    if found != expected:
        raise ValueError(
            f"data.tokenizer: {path} is not LLaMA-2's: {text!r} gives {found} instead of {expected}"
        )


def first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Whole texts until `limit` bytes of UTF-8 are reached; the one that reaches it is the last."""
    total = 0
    for text in texts:
        yield text
        total += len(text.encode())
        if total >= limit:
            return
