"""Reads a tokenizer's files: from a folder or the hub, and of every age that models come in.

Gives the backend of the `tokenizers` library, the named special tokens and the chat templates; what is made of them is
in tokenizer.py. No code of a model's repository is ever run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.errors import UserError

# What is fetched from a hub repository; also what the conversion by transformers may need.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_CONVERTIBLE = ("tokenizer.model", "vocab.json", "vocab.txt")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFiles(NamedTuple):
    """What a model's folder says of its tokenizer."""

    backend: Any  # a tokenizers.Tokenizer; not named as a type to keep the import lazy
    named_tokens: dict[str, str]  # as "eos_token": "</s>"
    chat_templates: dict[str, str]  # by name


def read_tokenizer_files(folder_or_id: str | Path, revision: str | None = None) -> TokenizerFiles:
    """Read the files of a local folder or of a hub repository (`revision`: its branch, tag or commit).

    Raises `UserError` when there are none, or when they cannot be read.
    """
    folder = _tokenizer_folder(folder_or_id, revision)
    settings = _read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
        named_tokens = _add_special_tokens(backend, settings, folder)
    elif any((folder / name).is_file() for name in _CONVERTIBLE):
        backend, named_tokens = _convert(folder)
    else:
        raise UserError(f"{folder} has no tokenizer: expected tokenizer.json (or {', '.join(_CONVERTIBLE)}).")
    # A file may carry the truncation and padding of its training run; a prompt is never cut or padded.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    return TokenizerFiles(backend, named_tokens, _chat_templates(folder, settings))


def _tokenizer_folder(folder_or_id: str | Path, revision: str | None) -> Path:
    """Give the local folder, fetched from the hub where it is an id; a local folder has no revisions."""
    folder = Path(folder_or_id).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(folder_or_id, Path) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", folder_or_id) or folder.exists():
        raise UserError(f"The tokenizer folder {folder_or_id} does not exist or is not a folder.", "tokenizer")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(folder_or_id, revision=revision, allow_patterns=list(TOKENIZER_FILES)))
    except (OSError, ValueError) as error:  # every error of huggingface_hub is one of the two
        raise UserError(
            f"No tokenizer for {folder_or_id!r}: not a local folder, and the hub says: {_one_line(error)}", "tokenizer"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {_one_line(error)}", "tokenizer") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}.", "tokenizer")
    return value


def _read_backend(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise UserError(f"{path} cannot be read as a tokenizer: {_one_line(error)}", "tokenizer") from error


def _convert(folder: Path) -> tuple[Any, dict[str, str]]:
    """Build the tokenizer of an older folder (sentencepiece, or vocabulary and merges) with transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(
            f"{folder} has no tokenizer.json; to convert what it has, install jaxllm[convert].", "tokenizer"
        ) from error

    advice = f"Save it once with save_pretrained() so that {folder} has a tokenizer.json."
    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # by kind of tokenizer: ImportError, ValueError, OSError, KeyError, RuntimeError …
        raise UserError(f"transformers cannot convert {folder}: {_one_line(error)} {advice}", "tokenizer") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{type(converted).__name__} has no fast form. {advice}", "tokenizer")
    return backend, dict(converted.special_tokens_map)


def _add_special_tokens(backend: Any, settings: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Add the special tokens the config names to the backend where it lacks them; give the named ones.

    The order decides the ids of new tokens: as transformers 5 does it (tokenization_utils_tokenizers.py), the config's
    table by id, then the named ones, then the others.
    """
    from tokenizers import AddedToken

    settings = dict(settings)
    table = settings.get("added_tokens_decoder")
    if table is None:  # an older folder has them in a file of its own
        settings.update(_read_json(folder / "special_tokens_map.json"))
    listed = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named: dict[str, Any] = {}
    for key in (*_NAMED_TOKENS, *settings):
        if key.endswith("_token") and isinstance(settings.get(key), str | dict):
            named[key] = settings[key]
    if isinstance(listed, dict):
        named.update(listed)
        listed = []
    backend.add_tokens(
        [
            AddedToken(**_token_fields(token))
            for _, token in sorted((table or {}).items(), key=lambda pair: int(pair[0]))
        ]
    )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in (*named.values(), *listed):
        fields = {**_token_fields(token), "special": True}
        if fields["content"] not in known:
            backend.add_tokens([AddedToken(**fields)])
            known.add(fields["content"])
    return {key: _token_fields(token)["content"] for key, token in named.items()}


def _token_fields(token: str | Mapping[str, Any]) -> dict[str, Any]:
    """Give the arguments of an AddedToken written as its text or as an object."""
    if isinstance(token, str):
        return {"content": token}
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    fields = {key: token[key] for key in names if key in token}
    if not isinstance(fields.get("content"), str):
        raise UserError(f"tokenizer_config.json has a special token without text: {dict(token)!r}.", "tokenizer")
    return fields


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Collect the model's chat templates by name; files come before the config's entry."""
    templates: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    entry = settings.get("chat_template")
    if templates or entry is None:
        return templates
    if isinstance(entry, str):
        return {"default": entry}
    return {template["name"]: template["template"] for template in entry}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
