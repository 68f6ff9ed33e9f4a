"""An engine's adapters, cached in host memory with tokenizers and templates. Thread-safe."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from jaxllm.checkpoints.lora_files import LoraFiles, read_adapter
from jaxllm.checkpoints.weights import resolve
from jaxllm.config import EngineConfig
from jaxllm.embedded import ADAPTERS
from jaxllm.engine.language import Language
from jaxllm.engine.model_info import ModelInfo
from jaxllm.errors import UserError
from jaxllm.lora_request import LoRARequest
from jaxllm.model import lora
from jaxllm.setup.model_setup import Setup
from jaxllm.text.confined_tokenizer import ConfinedTemplates, ConfinedTokenizer
from jaxllm.text.confinement import ConfinedError, Confinement, Source
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_files import digest_of, has_tokenizer, read_chat_templates


@dataclass(frozen=True, eq=False, kw_only=True)
class Adapter:
    """An adapter in the host's memory."""

    number: int  # per content, above 0, never reused
    request: LoRARequest
    digest: bytes
    weights: lora.Adapter[np.ndarray]
    language: Language  # the model's, or the folder's


class Known(NamedTuple):
    """Properties of an adapter that was read, in memory or not."""

    digest: bytes
    number: int
    rank: int
    eos_ids: frozenset[int]
    has_chat_template: bool


NAMES_KEPT = 4096  # of forgotten adapters, in reports of cached blocks


class Adapters:
    """Reads adapters on first use, and caches the most recently used."""

    def __init__(
        self,
        config: EngineConfig,
        language: Language,
        read: Callable[[Path], LoraFiles],
    ) -> None:
        self._config = config
        self.language = language
        self._read = read
        self._most_kept = config.max_loras if config.max_cpu_loras is None else config.max_cpu_loras
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._kept: OrderedDict[LoRARequest, Adapter] = OrderedDict()  # most recently used last
        self._alive: WeakValueDictionary[LoRARequest, Adapter] = WeakValueDictionary()  # with those of requests
        self._known: dict[LoRARequest, Known] = {}
        self._names: dict[int, str] = {}
        self._num_read = 0
        self._readers: dict[int, set[object]] = {}  # by `lora_int_id`; removal drops them
        self._confinement = Confinement()  # for folders' tokenizers and templates
        self._languages: WeakValueDictionary[bytes, Language] = WeakValueDictionary()  # by digest

    def find(self, request: LoRARequest) -> Adapter | None:
        with self._lock:
            adapter = self._alive.get(request)
            if adapter is not None:
                self._keep(adapter)
            return adapter

    def get(self, request: LoRARequest) -> Adapter:
        """Return an adapter, read if not in memory; raise UserError if invalid."""
        if not self._config.enable_lora:
            message = f"Got lora_request {request!r:.200} but LoRA is not enabled! Start the engine with enable_lora."
            raise UserError(message, "lora_request")
        if not isinstance(request, LoRARequest):
            raise UserError(f"lora_request must be a LoRARequest, got {type(request).__name__}.", "lora_request")
        found = self.find(request)
        if found is not None:
            return found
        reader = object()
        with self._lock:
            self._readers.setdefault(request.lora_int_id, set()).add(reader)
        try:
            with self._reading:
                return self.find(request) or self._load(request, reader)
        finally:
            with self._lock:
                self._end(request, reader)

    def known(self, request: LoRARequest) -> Known | None:
        with self._lock:
            return self._known.get(request)

    def name_of(self, number: int) -> str:
        with self._lock:
            return self._names.get(number, f"adapter {number}")

    def remove(self, lora_int_id: int) -> bool:
        """Forget adapters by the caller's number; return whether any existed."""
        with self._lock:
            gone = [request for request in self._known if request.lora_int_id == lora_int_id]
            self._readers.pop(lora_int_id, None)
            for request in gone:
                del self._known[request]
                self._kept.pop(request, None)
                self._alive.pop(request, None)
        return bool(gone)

    def ids(self) -> set[int]:
        with self._lock:
            return {request.lora_int_id for request in self._known}

    def close(self) -> None:
        self._confinement.close()

    def _end(self, request: LoRARequest, reader: object) -> bool:
        """End a reader, with the lock held; return False if its adapter was removed."""
        readers = self._readers.get(request.lora_int_id, set())
        is_wanted = reader in readers
        readers.discard(reader)
        if is_wanted and not readers:
            del self._readers[request.lora_int_id]
        return is_wanted

    def _load(self, request: LoRARequest, reader: object) -> Adapter:
        """Read and return an adapter; keep it unless removed during the read."""
        with naming(request):
            folder = folder_of(request)
            files = self._read(folder)
            language = self._language_of(folder)
        with self._lock:
            before = self._known.get(request)
            if before is not None and before.digest == files.digest:
                number = before.number
            else:
                number = self._num_read = self._num_read + 1
                self._names[number] = request.lora_name
                self._forget_names()
            adapter = Adapter(
                number=number, request=request, digest=files.digest, weights=files.weights, language=language
            )
            if self._end(request, reader):
                tokenizer, eos_ids = language.model.tokenizer, language.model.eos_ids
                self._known[request] = Known(files.digest, number, files.rank, eos_ids, tokenizer.has_chat_template)
                self._alive[request] = adapter
                self._keep(adapter)
        return adapter

    def _forget_names(self) -> None:
        if len(self._names) > NAMES_KEPT + len(self._known):
            numbers = {known.number for known in self._known.values()}
            kept = range(self._num_read - NAMES_KEPT // 2, self._num_read + 1)
            self._names = {own: name for own, name in self._names.items() if own in numbers or own in kept}

    def _keep(self, adapter: Adapter) -> None:
        self._kept[adapter.request] = adapter
        self._kept.move_to_end(adapter.request)
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)

    def _language_of(self, folder: Path) -> Language:
        """Return a folder's language, shared by equal files; the model's without tokenizer and template."""
        templates = read_chat_templates(folder)
        brings = not self._config.skip_tokenizer_init and has_tokenizer(folder)
        if not brings and not templates:
            return self.language
        digest = digest_of(folder)
        language = self._languages.get(digest)
        if language is None:
            source = Source(str(folder), digest)
            tokenizer = self._tokenizer_of(source, templates) if brings else None
            language = self._language_with(tokenizer, templates, digest)
            if language is not self.language:
                self._languages[digest] = language
        return language

    def _tokenizer_of(self, source: Source, templates: Mapping[str, str]) -> ConfinedTokenizer | None:
        base = self.language.model
        told = self._confinement.call(source, "identity")
        if told["fingerprint"] == base.tokenizer.fingerprint():
            return None
        if told["vocab_size"] > base.vocab_size:
            raise UserError(
                f"its tokenizer has {told['vocab_size']} tokens, and the model only {base.vocab_size}; "
                "adapters that add tokens are not supported.",
                "lora_request",
            )
        vocabulary = self._confinement.call(source, "vocabulary", base.vocab_size)
        templates = templates or base.tokenizer.chat_templates
        return ConfinedTokenizer(templates, self._confinement, source, told["vocab_size"], vocabulary)

    def _language_with(
        self, tokenizer: ConfinedTokenizer | None, templates: Mapping[str, str], digest: bytes
    ) -> Language:
        base = self.language.model
        if tokenizer is not None:
            eos_ids = _eos_ids(tokenizer, base)
            return Language.of(replace(base, tokenizer=tokenizer, eos_ids=eos_ids))
        if not templates or templates == base.tokenizer.chat_templates:
            return self.language
        if self._config.skip_tokenizer_init:
            model = replace(base, tokenizer=base.tokenizer.with_chat_templates(templates))
        else:
            source = Source(base.tokenizer.name)
            own_tokenizer = ConfinedTemplates(base.tokenizer, templates, self._confinement, digest, source)
            model = replace(base, tokenizer=own_tokenizer)
        return replace(self.language, model=model)


def folder_of(request: LoRARequest) -> Path:
    return ADAPTERS.get(request.lora_path) or resolve(request.lora_path)


@contextmanager
def naming(request: LoRARequest) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        kind = ConfinedError if isinstance(error, ConfinedError) else UserError
        raise kind(f"adapter {request.lora_name!r:.80}: {error}", "lora_request") from error


def _eos_ids(tokenizer: Tokenizer, model: ModelInfo) -> frozenset[int]:
    """Return an adapter's end tokens: its tokenizer's, and the model's if the same in it."""
    same = {token for token in model.eos_ids if tokenizer.token(token) == model.tokenizer.token(token)}
    end_token = tokenizer.eos_token_id
    return frozenset(same if end_token is None else {end_token, *same})


def weights_reader(setup: Setup, config: EngineConfig) -> Callable[[Path], LoraFiles]:
    def read(folder: Path) -> LoraFiles:
        return read_adapter(folder, setup.spec, setup.family, setup.layout, config.max_lora_rank, setup.dtype)

    return read
