"""Read tokenizer files of any age, from a folder or the hub; never run its code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.checkpoints.files import inside, read_object, read_template
from jaxllm.errors import UserError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "config.json",
    "sentence_bert_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_CONVERTIBLE = ("tokenizer.model", "vocab.json", "vocab.txt")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFiles(NamedTuple):
    """A folder's tokenizer."""

    backend: Any  # tokenizers.Tokenizer, untyped for lazy import
    named_tokens: dict[str, str]
    chat_templates: dict[str, str]
    has_types: bool
    adds_eos: bool = False  # in tokenizer_config.json; tokenizer.json may not implement it


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", *_CONVERTIBLE))


def digest_of(folder: Path) -> bytes:
    digest = hashlib.sha256()
    files = (file for pattern in TOKENIZER_FILES if pattern != "config.json" for file in folder.glob(pattern))
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.digest()


def read_chat_templates(folder: Path) -> dict[str, str]:
    return _chat_templates(folder, _read_settings(folder, "tokenizer_config.json"))


def read_tokenizer_files(folder_or_id: str | Path, revision: str | None = None) -> TokenizerFiles:
    folder = _tokenizer_folder(folder_or_id, revision)
    settings = _read_settings(folder, "tokenizer_config.json")
    is_split = settings.get("split_special_tokens", False)
    if not isinstance(is_split, bool):
        raise UserError("tokenizer_config.json: split_special_tokens must be true or false.", "tokenizer")
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(inside(folder, "tokenizer.json", "tokenizer"))
        named_tokens = _add_special_tokens(backend, settings, folder)
    elif any((folder / name).is_file() for name in _CONVERTIBLE):
        backend, named_tokens = _convert(folder)
    else:
        raise UserError(f"{folder} has no tokenizer: expected tokenizer.json (or {', '.join(_CONVERTIBLE)}).")
    if _read_settings(folder, "sentence_bert_config.json").get("do_lower_case") is True:
        _add_lowercase(backend)
    # Files may contain those of training.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = is_split
    adds_eos = settings.get("add_eos_token") is True
    _try(backend, folder)
    return TokenizerFiles(backend, named_tokens, _chat_templates(folder, settings), _has_types(settings), adds_eos)


def _tokenizer_folder(folder_or_id: str | Path, revision: str | None) -> Path:
    folder = Path(folder_or_id).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(folder_or_id, Path) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", folder_or_id) or folder.exists():
        raise UserError(f"The tokenizer folder {folder_or_id} does not exist or is not a folder.", "tokenizer")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(folder_or_id, revision=revision, allow_patterns=list(TOKENIZER_FILES)))
    except (OSError, ValueError) as error:  # all of huggingface_hub
        raise UserError(
            f"No tokenizer for {folder_or_id!r}: it is not a local folder, and the hub answered: {_one_line(error)}",
            "tokenizer",
        ) from error


@contextmanager
def typed_errors(say: Callable[[str], UserError]) -> Iterator[None]:
    """Raise errors of the tokenizers library in the block as `say(message)`.

    It raises plain `Exception`, and Rust panics, BaseExceptions that would end a thread.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise say(_one_line(error)) from error
        raise


def _read_settings(folder: Path, name: str) -> dict[str, Any]:
    return read_object(folder, name, "tokenizer") or {}


def _read_backend(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    with typed_errors(lambda said: UserError(f"{path} cannot be read as a tokenizer: {said}", "tokenizer")):
        return Backend.from_file(str(path))


def _has_types(settings: Mapping[str, Any]) -> bool:
    names = settings.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return settings.get("tokenizer_class") != "TokenizersBackend"


def _add_lowercase(backend: Any) -> None:
    from tokenizers.normalizers import Lowercase, Sequence

    backend.normalizer = Sequence([Lowercase(), *([backend.normalizer] if backend.normalizer else [])])


def _try(backend: Any, folder: Path) -> None:
    """Refuse a tokenizer with contradictory parts, which fails only when used."""
    with typed_errors(lambda said: UserError(f"The tokenizer of {folder} cannot read texts: {said}", "tokenizer")):
        for text in ("a b", "\U0010fffe"):  # the second is in no vocabulary
            backend.decode(backend.encode(text).ids, skip_special_tokens=False)


def _convert(folder: Path) -> tuple[Any, dict[str, str]]:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(
            f"{folder} has no tokenizer.json; to convert what it has, install jaxllm[convert].", "tokenizer"
        ) from error

    advice = f"Save it once with save_pretrained() so that {folder} has a tokenizer.json."
    for pattern in TOKENIZER_FILES:
        for path in folder.glob(pattern):
            inside(folder, path.relative_to(folder).as_posix(), "tokenizer")

    def say(said: str) -> UserError:
        return UserError(f"transformers cannot convert {folder}: {said} {advice}", "tokenizer")

    try:
        with typed_errors(say):
            converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except UserError:
        raise
    except Exception as error:
        raise say(_one_line(error)) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{type(converted).__name__} has no fast form. {advice}", "tokenizer")
    return backend, dict(converted.special_tokens_map)


def _add_special_tokens(backend: Any, settings: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Add the config's special tokens that the backend lacks; return the named ones.

    New ids follow the order of transformers 5: the config's table by id, named tokens, others.
    """
    from tokenizers import AddedToken

    settings = dict(settings)
    table = settings.get("added_tokens_decoder")
    if table is None:  # older folders
        settings.update(_read_settings(folder, "special_tokens_map.json"))
    elif not isinstance(table, dict) or not all(key.isascii() and key.isdigit() and len(key) < 10 for key in table):
        raise UserError("tokenizer_config.json: added_tokens_decoder must have a token for each id.", "tokenizer")
    listed = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named: dict[str, Any] = {}
    for key in (*_NAMED_TOKENS, *settings):
        if key.endswith("_token") and isinstance(settings.get(key), str | dict):
            named[key] = settings[key]
    if isinstance(listed, dict):
        named.update(listed)
        listed = []
    if not isinstance(listed, list):
        raise UserError("tokenizer_config.json: the additional special tokens must be a list.", "tokenizer")
    added = [_token_fields(token) for _, token in sorted((table or {}).items(), key=lambda pair: int(pair[0]))]
    backend.add_tokens([AddedToken(**fields) for fields in added])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in (*named.values(), *listed):
        fields = {**_token_fields(token), "special": True}
        if fields["content"] not in known:
            backend.add_tokens([AddedToken(**fields)])
            known.add(fields["content"])
    return {key: _token_fields(token)["content"] for key, token in named.items()}


def _token_fields(token: Any) -> dict[str, Any]:
    given = {"content": token} if isinstance(token, str) else token if isinstance(token, dict) else {}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    fields = {key: given[key] for key in ("content", *flags) if key in given}
    if not _is_text(fields.get("content")):
        raise UserError(f"tokenizer_config.json has a special token without text: {token!r:.200}.", "tokenizer")
    if not all(isinstance(fields.get(flag, False), bool) for flag in flags):
        raise UserError(
            f"tokenizer_config.json: properties of a token must be true or false: {token!r:.200}.", "tokenizer"
        )
    return fields


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates by name: those in files, else those of tokenizer_config.json."""
    templates: dict[str, str] = {}
    single = read_template(folder, "chat_template.jinja")
    if single is None:  # of processors of images and sound, before transformers 5
        single = (read_object(folder, "chat_template.json", "tokenizer") or {}).get("chat_template")
    if single is not None and not _is_text(single):
        raise UserError("chat_template.json: chat_template must be a text.", "tokenizer")
    if single is not None:
        templates["default"] = single
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_template(folder, path.relative_to(folder).as_posix()) or ""
    entry = settings.get("chat_template")
    if templates or entry is None:
        return templates
    listed = [{"name": "default", "template": entry}] if isinstance(entry, str) else entry
    is_listed = isinstance(listed, list) and all(isinstance(one, dict) for one in listed)
    if not is_listed or not all(_is_text(one.get(key)) for one in listed for key in ("name", "template")):
        raise UserError("tokenizer_config.json: chat_template must be a text, or texts by name.", "tokenizer")
    return {one["name"]: one["template"] for one in listed}


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
