"""Small tokenizers of the kinds there are, trained on the spot: how tokens make text differs among them."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "<answer>\n42\n</answer>", "yes or no", "the cat sat on the mat, and 17 dogs ran", "naïve café, déjà vu", "日本語と英語",
    '{"name": "Ada", "age": 36}', "a b  c   d", "abab baba abba", "10 20 30 400 5000", "2024-01-31",
] * 4  # fmt: skip
KINDS = ("byte-level", "llama", "gemma", "metaspace", "words")
EOS = "</s>"


def _byte_level() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<pad>", EOS], show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens(["<think>"])  # not special, so text
    return core


def _unigram(strip: bool) -> Tokenizer:
    """With a token for each byte, for what has no other, as sentencepiece's; strip: a leading space is left out."""
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=["<unk>", EOS], unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator(["▁" + text.replace(" ", "▁") for text in CORPUS if text.isascii()], trainer)
    pieces = Tokenizer.get_vocab(core)
    scores: list[tuple[str, float]] = [("<unk>", 0.0), (EOS, 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    # Sorted, as they come in another order every time.
    scores += [(piece, -1.0 - pieces[piece] / 10) for piece in sorted(pieces) if piece not in ("<unk>", EOS)]
    scores += [(piece, -5.0) for piece in ("▁", "▁▁", "▁▁▁") if piece not in pieces]
    core = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    core.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    end = [decoders.Strip(" ", 1, 0)] if strip else []
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end])
    return core


def _metaspace() -> Tokenizer:
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", EOS], show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    return core


def _words() -> Tokenizer:
    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()  # and nothing that makes text of words again: spaces between all
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", EOS], show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    return core


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Its EOS is special, and so are ``<unk>`` and ``<pad>`` where it has them."""
    made = {
        "byte-level": _byte_level,
        "llama": lambda: _unigram(True),
        "gemma": lambda: _unigram(False),
        "metaspace": _metaspace,
        "words": _words,
    }[kind]()
    others = {"pad_token": "<pad>"} if kind == "byte-level" else {"unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=EOS, **others)
