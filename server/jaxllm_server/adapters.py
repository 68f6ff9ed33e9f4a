"""LoRA adapters of a server by name.

Clients select an adapter as the model. Each load gets a new `LoRARequest` number, which distinguishes a reloaded
adapter. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxllm.engine.engine_client import EngineClient
from jaxllm.engine.features.adapters.store import Known
from jaxllm.errors import AdapterNotFoundError, FeatureDisabledError, UnavailableError, UserError
from jaxllm.lora_request import LoRARequest
from jaxllm_server.shared.options import ServerOptions

_log = logging.getLogger("jaxllm.server")
_NAME = re.compile(r"[A-Za-z0-9._/:@+-]+")  # commas separate names in a metric
_OFF = "LoRA is not enabled: this server was started without --enable-lora."
_MODULE_KEYS = frozenset({"name", "path", "base_model_name"})  # vLLM's; base_model_name is ignored


@dataclass(eq=False)
class Served:
    """An adapter with its request counts."""

    request: LoRARequest
    source: str
    num_finished: int = 0
    num_users: int = 0  # unfinished requests
    is_gone: bool = False  # unloaded or replaced: new requests cannot select it

    @property
    def name(self) -> str:
        return self.request.lora_name


class ServedAdapters:
    """A server's adapters by name."""

    def __init__(self, engine: EngineClient, options: ServerOptions, model_names: Sequence[str]) -> None:
        self.num_finished_others = 0
        self._engine = engine
        self._model_names = model_names
        self._most_chars = options.max_request_id_chars
        self._root = None if options.lora_root is None else Path(options.lora_root).resolve()
        self._loading = asyncio.Lock()
        self._loads: set[asyncio.Task[None]] = set()
        for name in ("lora_modules", "lora_root"):
            if getattr(options, name) and not engine.config.enable_lora:
                raise UserError(f"{name} needs --enable-lora.", name)
        self._served = {
            request.lora_name: Served(request, request.lora_path) for request in requests_of(options.lora_modules)
        }
        for name in self._served:
            self._check_name(name, "lora_modules")
        self._numbers = itertools.count(1 + len(self._served))

    def __iter__(self) -> Iterator[Served]:
        return iter(tuple(self._served.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._served

    def find(self, name: str) -> Served:
        self._check_enabled("adapter")
        served = self._served.get(name)
        if served is None:
            raise AdapterNotFoundError(f"The adapter `{name[:128]}` does not exist.", "adapter")
        return served

    def known(self, served: Served) -> Known | None:
        """Return the engine's record of an adapter, if read; it outlasts the weights."""
        return self._engine.known_adapter(served.request)

    @contextmanager
    def using(self, served: Served | None) -> Iterator[None]:
        """Keep an adapter in the engine within the context, even if unloaded."""
        if served is None:
            yield
            return
        served.num_users += 1
        try:
            yield
        finally:
            served.num_users -= 1
            self._forget_unused(served)

    def note_finished(self, served: Served) -> None:
        current = self._served.get(served.name)
        if current is None:
            self.num_finished_others += 1
        else:
            current.num_finished += 1

    async def load(self, name: str, path: str, *, in_place: bool = False, client: str | None = None) -> None:
        """Load an adapter from a folder below `--lora-root`; `in_place` may replace one of the same name.

        Completes even if the caller is cancelled; else the engine could hold an adapter without a name.
        """
        self._check_enabled()
        if self._root is None:
            message = "This server was started without --lora-root, so it cannot load adapters while it runs."
            raise FeatureDisabledError(message)
        if not name or not path:
            message = "Both 'lora_name' and 'lora_path' must be provided."
            raise UserError(message, "lora_path" if name else "lora_name")
        self._check_name(name, "lora_name")
        await self._engine.check_health()
        load = asyncio.ensure_future(self._load(self._root, name, path, in_place, client))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        await asyncio.shield(load)

    def unload(self, name: str) -> None:
        """Remove an adapter for new requests; running ones keep it. Raises AdapterNotFoundError."""
        self._check_enabled()
        if not name:
            raise UserError("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
        if name not in self._served:
            raise AdapterNotFoundError(f"The lora adapter '{name[:128]}' cannot be found.", "lora_name")
        if self._engine.state == "loading":
            raise UnavailableError("The model is still being loaded.")
        served = self._served.pop(name)
        self.num_finished_others += served.num_finished
        self._retire(served)
        _log.info("adapter %s: unloaded", name)

    async def _load(self, root: Path, name: str, path: str, in_place: bool, client: str | None) -> None:
        async with self._loading:
            if name in self._served and not in_place:
                message = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place"
                raise UserError(f"{message}, set 'load_inplace' to True.", "lora_name")
            folder = await self._engine.off_loop(_folder_of, root, name, path, client=client, language=b"")
            request = LoRARequest(name, next(self._numbers), str(folder))
            try:
                await self._engine.off_loop(self._engine.read_adapter, request, client=client, language=b"")
            except UserError as error:
                told = str(error)
                if root != root.parent:  # "/" hides no folder name
                    told = told.replace(f"{root}/", "").replace(str(root), path)
                raise UserError(told, "lora_path") from error
            before = self._served.get(name)
            self._served[name] = Served(request, path, 0 if before is None else before.num_finished)
            if before is not None:
                self._retire(before)
            _log.info("adapter %s: loaded from %s", name, folder)

    def _retire(self, served: Served) -> None:
        served.is_gone = True
        self._forget_unused(served)

    def _forget_unused(self, served: Served) -> None:
        if served.is_gone and not served.num_users:
            self._engine.forget_adapter(served.request.lora_int_id)

    def _check_enabled(self, parameter: str | None = None) -> None:
        if not self._engine.config.enable_lora:
            raise FeatureDisabledError(_OFF, parameter)

    def _check_name(self, name: str, parameter: str) -> None:
        if len(name) > self._most_chars or _NAME.fullmatch(name) is None:
            message = f"{parameter}: a name must be 1 to {self._most_chars} characters of A-Z, a-z, 0-9 and ._/:@+-"
            raise UserError(f"{message}, got {name!r:.80}.", parameter)
        if name in self._model_names:
            raise UserError(f"{parameter}: {name} is the name of the model.", parameter)


def requests_of(modules: Sequence[str]) -> tuple[LoRARequest, ...]:
    """Parse `--lora-modules`: NAME=PATH or a JSON object each."""
    requests: dict[str, LoRARequest] = {}
    for text in modules:
        name, _, path = text.partition("=")
        if text.lstrip().startswith("{"):
            name, path = _module_of(text)
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            message = 'lora_modules takes NAME=PATH, or {"name": NAME, "path": PATH}'
            raise UserError(f"{message}, got {text!r:.200}.", "lora_modules")
        if name in requests:
            raise UserError(f"lora_modules names {name!r:.80} twice.", "lora_modules")
        requests[name] = LoRARequest(name, len(requests) + 1, path)
    return tuple(requests.values())


def _module_of(text: str) -> tuple[object, object]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise UserError(f"lora_modules: {text!r:.200} is not JSON: {error}", "lora_modules") from error
    unknown = sorted(fields.keys() - _MODULE_KEYS)
    if unknown:
        raise UserError(f"lora_modules: {unknown[0]!r:.80} is not a field of an adapter.", "lora_modules")
    return fields.get("name"), fields.get("path")


def _folder_of(root: Path, name: str, path: str) -> Path:
    """Return an adapter's folder; raise UserError if it is missing, or leads outside `root`, perhaps by a link."""
    try:
        folder = (root / path).resolve()
        is_inside = folder.is_relative_to(root)
        is_there = is_inside and folder.is_dir()
        links = [file.resolve() for file in folder.rglob("*") if file.is_symlink()] if is_there else []
    except (OSError, ValueError, RuntimeError):  # invalid path or symlink loop
        is_inside, is_there, links = True, False, []
    if not is_inside or not all(link.is_relative_to(root) for link in links):
        raise UserError("lora_path must stay inside the folder that the server has for adapters.", "lora_path")
    if not is_there:
        raise AdapterNotFoundError(f"Loading lora {name} failed: No adapter found for {path[:256]}", "lora_path")
    return folder
