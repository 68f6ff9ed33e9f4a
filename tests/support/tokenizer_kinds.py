"""Tokenizers of every kind, which differ in how their tokens become text."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

TEXT = "Once upon a time, the naïve fox said: «日本語 is fun» 🎉👩‍👩‍👧 नमस्ते สวัสดี 한국어 don't, won't! 123\n\n  x = 3;\n"
KINDS = ["byte_level", "byte_fallback", "stripping", "wordpiece", "metaspace", "no_decoder", "unfused"]


def alphabet() -> dict[str, int]:
    """Vocabulary of a tokenizer with byte-fallback tokens: 256 bytes, then words and letters."""
    pieces = [
        "<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)],
        "▁", "▁the", "the", "▁▁", "a", "▁a", "b", "日", "é", "�", ",", "▁b▁c",
    ]  # fmt: skip
    return {piece: index for index, piece in enumerate(pieces)}


def build(kind: str) -> Backend:
    """Make the tokenizer of a kind."""
    if kind == "byte_level":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
        )
        backend.train_from_iterator([TEXT] * 3, trainer)
        backend.add_tokens(["<tool>", AddedToken("é", normalized=False)])  # é is also the character of a byte
    elif kind in ("byte_fallback", "stripping", "unfused"):
        backend = Backend(models.BPE(alphabet(), [("▁", "the")], unk_token="<unk>", byte_fallback=True))
        backend.normalizer = normalizers.Replace(" ", "▁")
        stages: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback()]
        if kind != "unfused":
            stages.append(decoders.Fuse())
        if kind == "stripping":
            stages.append(decoders.Strip(" ", 1, 0))
        backend.decoder = decoders.Sequence(stages)
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        backend.add_special_tokens(["<unk>", "<s>", "</s>", "<|end|>"])
        backend.add_tokens(["<tool>"])
    elif kind == "wordpiece":
        words = ["[UNK]", "the", "##ing", "don", "'", "t", ".", ",", "'s", "n't", "go", "##", "##x", "not", " do not"]
        backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        backend.add_special_tokens(["<|end|>"])
    elif kind == "metaspace":
        pieces = [
            ("<unk>", 0.0),
            ("▁", -1.0),
            ("▁the", -2.0),
            ("a", -3.0),
            ("b▁c", -4.0),
            ("▁▁a", -5.0),
            ("日本", -6.0),
        ]
        backend = Backend(models.Unigram(pieces, unk_id=0))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        backend.add_special_tokens(["<|end|>"])
    else:
        backend = Backend(models.WordLevel({"the": 0, "a": 1, "b": 2, "[UNK]": 3}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.add_special_tokens(["<|end|>"])
    return backend
