"""Text to ids and back: our own BPE, and tokenizers that the user brings."""

import importlib.util
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from orchestrator.data.corpus import DataConfig
from orchestrator.data.dataset import Dataset
from orchestrator.data.tokenize import (
    PIECE,
    Tokenizer,
    first_bytes,
    load_tokenizer,
    own_tokenizer,
    train_bpe,
)

SPECIALS = {"<unk>": 0, "<s>": 1, "</s>": 2}
TRAINING_TEXT = ["the people of the states", "the government of the people", "law </s> and order"]


OWN_JSON = train_bpe(TRAINING_TEXT, 270)
LIBRARY = tokenizers.Tokenizer.from_str(OWN_JSON)


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    return own_tokenizer(OWN_JSON, DataConfig(vocab_size=270))


def given_config(path: Path, **values: Any) -> DataConfig:
    return DataConfig(tokenizer=str(path), **values)


def save_llama_like(path: Path, pieces: dict[str, int], merges: list[tuple[str, str]]) -> Path:
    """A `tokenizer.json` built as LLaMA-2's is: byte fallback, and a space before the text."""
    vocab = SPECIALS | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)} | pieces
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(path))
    return path


def llama_pieces(hello: int, world: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """32,000 entries in which "▁Hello" and "▁world" have the given ids, merged letter by letter."""
    pieces = {"▁Hello": hello, "▁world": world}
    merges = [(word[:end], word[end]) for word in pieces for end in range(1, len(word))]
    missing = [*dict.fromkeys("▁Helowrd"), *(a + b for a, b in merges if a + b not in pieces)]
    free = (i for i in range(259, 32_000) if i not in (hello, world))
    pieces |= {piece: next(free) for piece in missing}
    pieces |= {f"filler{i}": i for i in free}
    return pieces, merges


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_any_text_comes_back_and_bytes_add_up(own: Tokenizer, texts: list[str]) -> None:
    for text, ids in zip(texts, own.encode(texts), strict=True):
        assert LIBRARY.decode(ids, skip_special_tokens=False) == text
        assert own.token_bytes[ids].sum() == len(text.encode())
        assert not {0, 1, 2} & set(ids)


@pytest.mark.parametrize(
    "form", ["a{c}b", "!{c}!", "1{c} 2", "'{c}'s {c}{c} x", "\x1c{c}\x1f", "{c}"]
)
def test_texts_are_cut_only_where_the_library_cuts_words(form: str) -> None:
    library = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for code in [*range(0x3100), *range(0x3100, 0xD800, 97), *range(0xE000, 0x110000, 997)]:
        text = form.format(c=chr(code))
        ends = {end for _, (_, end) in library.pre_tokenize_str(text)}
        pieces = PIECE.findall(text)
        assert "".join(pieces) == text
        assert set(accumulate(map(len, pieces))) <= ends, hex(code)


@given(st.lists(st.text("ab \n\t'!é\x1c\u3000", max_size=30), max_size=5))
def test_piece_by_piece_gives_the_librarys_ids(own: Tokenizer, texts: list[str]) -> None:
    assert own.encode(texts) == [LIBRARY.encode(text).ids for text in texts]


def test_training_is_repeatable_to_the_byte() -> None:
    assert train_bpe(TRAINING_TEXT, 270) == OWN_JSON
    assert train_bpe(iter(TRAINING_TEXT), 270) == OWN_JSON


def test_special_tokens_have_the_first_ids_and_no_bytes(own: Tokenizer) -> None:
    vocab = json.loads(OWN_JSON)["model"]["vocab"]
    assert {token: vocab[token] for token in SPECIALS} == SPECIALS
    assert own.token_bytes[:3].tolist() == [0, 0, 0]
    assert own.token_bytes[3:].min() == 1
    assert (own.start_id, own.end_id) == (1, None)


def test_merges_save_tokens(own: Tokenizer) -> None:
    assert len(own.encode(["the people of the states"])[0]) < 20


@pytest.mark.parametrize("spelled", ["</s>", "<s>", "<unk>", "a</s>b", "<s></s>" * 50])
def test_spelling_of_a_special_token_stays_text(sotu: Dataset, spelled: str) -> None:
    serialized = (sotu.folder / "tokenizer.json").read_text(encoding="utf-8")
    ids = own_tokenizer(serialized, DataConfig()).encode([spelled])[0]
    assert min(ids) > 2
    assert tokenizers.Tokenizer.from_str(serialized).decode(ids) == spelled


def test_very_long_word_is_encoded(own: Tokenizer) -> None:
    # Words of this length have hung tokenizers: tokenizers issue 1449.
    text = "a" * 200_000
    assert own.token_bytes[own.encode([text])[0]].sum() == 200_000


def test_larger_vocabulary_than_the_text_supports_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.vocab_size=5000 .* it yields \d+ entries"):
        train_bpe(TRAINING_TEXT, 5_000)


def test_training_text_ends_with_the_document_that_reaches_the_limit() -> None:
    assert list(first_bytes(["aaaa", "éé", "b", "c"], 8)) == ["aaaa", "éé"]
    assert list(first_bytes(["aaaa", "éé", "b", "c"], 9)) == ["aaaa", "éé", "b"]
    assert list(first_bytes(["a"], 100)) == ["a"]


def test_users_byte_level_tokenizer_is_used_as_it_is(tmp_path: Path, own: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(OWN_JSON, encoding="utf-8")
    loaded = load_tokenizer(given_config(path, vocab_size=270))
    assert loaded.kind == "tokenizer.json"
    assert loaded.serialized is None
    assert loaded.sha256 == own.sha256
    assert loaded.encode(["the law"]) == own.encode(["the law"])


def test_added_tokens_count_their_text(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(OWN_JSON)
    tokenizer.add_tokens(["    "])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    loaded = load_tokenizer(given_config(path, vocab_size=271))
    ids = loaded.encode(["x    y"])[0]
    assert 270 in ids
    assert loaded.token_bytes[ids].sum() == 6


def test_other_vocabulary_size_names_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(OWN_JSON, encoding="utf-8")
    with pytest.raises(ValueError, match=r"data\.vocab_size=4096 .*set data\.vocab_size=270"):
        load_tokenizer(given_config(path, vocab_size=4_096))


@pytest.mark.parametrize("place", ["start", "end"])
def test_missing_document_token_is_named(tmp_path: Path, place: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(OWN_JSON, encoding="utf-8")
    values = {f"{place}_token": "<|boundary|>", f"document_{place}": True}
    with pytest.raises(ValueError, match=rf"data\.{place}_token='<\|boundary\|>' is not in"):
        load_tokenizer(given_config(path, vocab_size=270, **values))
    values[f"document_{place}"] = False
    assert load_tokenizer(given_config(path, vocab_size=270, **values)).vocab_size == 270


def test_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(SPECIALS | {"law": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    with pytest.raises(ValueError, match="works neither on bytes nor with byte fallback"):
        load_tokenizer(given_config(path, vocab_size=4))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.json", b"{}", "cannot be read"),
        ("tokenizer.json", b"\xff", "is not UTF-8"),
        ("tokenizer.json", None, "cannot be read: No such file"),
        ("vocab.txt", b"a", "must end in .json or .model"),
    ],
    ids=["empty", "bytes", "missing", "ending"],
)
def test_unreadable_tokenizer_is_refused(
    tmp_path: Path, name: str, data: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(given_config(path, vocab_size=270))


@pytest.mark.skipif(
    importlib.util.find_spec("sentencepiece") is not None, reason="sentencepiece is installed"
)
def test_sentencepiece_model_without_the_package_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"model")
    with pytest.raises(ValueError, match="needs the package sentencepiece"):
        load_tokenizer(given_config(path, vocab_size=270))


def test_sentencepiece_model_agrees_with_its_own_decoding(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TRAINING_TEXT * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(texts),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
    )
    processor = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    config = given_config(tmp_path / "tokenizer.model", vocab_size=processor.vocab_size())
    tokenizer = load_tokenizer(config)
    assert tokenizer.prefix_bytes == 1
    for text in ("the people 🙂", "a</s>b", "two\nlines"):
        ids = tokenizer.encode([text])[0]
        assert not {0, 1, 2} & set(ids)
        assert processor.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode()) + 1


def test_llama2_by_name_accepts_its_ids(tmp_path: Path) -> None:
    path = save_llama_like(tmp_path / "tokenizer.json", *llama_pieces(15_043, 3_186))
    tokenizer = load_tokenizer(DataConfig(tokenizer=f"llama2:{path}", vocab_size=32_000))
    assert (tokenizer.start_id, tokenizer.prefix_bytes) == (1, 1)
    ids = tokenizer.encode(["Hello world", "é\n</s>"])
    assert ids[0] == [15_043, 3_186]
    # A space, the bytes of é, a newline; then four characters without a merge.
    assert tokenizer.token_bytes[ids[1]].tolist() == [1] * len(ids[1])
    assert len(ids[1]) == 1 + 2 + 1 + 4
    assert ids[1][3] == 13


def test_llama2_by_name_refuses_another_vocabulary_of_32000(tmp_path: Path) -> None:
    path = save_llama_like(tmp_path / "tokenizer.json", *llama_pieces(22_557, 1_526))
    config = DataConfig(tokenizer=f"llama2:{path}", vocab_size=32_000)
    message = r"is not LLaMA-2's: 'Hello world' gives \[22557, 1526\] instead of \[15043, 3186\]"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(config)
    assert load_tokenizer(given_config(path, vocab_size=32_000)).vocab_size == 32_000


def test_token_bytes_cover_the_vocabulary(own: Tokenizer) -> None:
    assert own.token_bytes.shape == (270,)
    assert own.token_bytes.dtype == np.uint32
