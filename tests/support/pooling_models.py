"""Small models that embed, classify or score: BERT's shape and tokenizer, weights by `load_format="dummy"`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CONFIG: dict[str, Any] = {
    **{"hidden_act": "gelu", "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64},
    **{"model_type": "bert", "num_attention_heads": 4, "num_hidden_layers": 2, "type_vocab_size": 2, "vocab_size": 64},
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def word_pieces() -> Tokenizer:
    """Make a tokenizer of letters, with BERT's special tokens around a text and between two."""
    pieces = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(list(SPECIAL))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    return backend


def bert(folder: Path, labels: tuple[str, ...] = (), dimensions: tuple[int, ...] | None = None) -> Path:
    """Write a model that embeds; with one label it scores pairs, with several it classifies."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"architectures": ["BertForSequenceClassification" if labels else "BertModel"]}
    if labels:
        config |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    if dimensions is not None:
        config["matryoshka_dimensions"] = list(dimensions)
    (folder / "config.json").write_text(json.dumps(config))
    word_pieces().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    return folder
