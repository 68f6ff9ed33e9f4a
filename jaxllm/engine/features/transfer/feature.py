"""The feature of KV transfer: leases for prompts that another engine continues, and blocks of prompts from others.

A consumer's request waits outside the scheduler for its blocks or a deadline; missing blocks are computed.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

import numpy as np

from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Core, Feature
from jaxllm.engine.features.transfer.frames import Block, Fingerprint
from jaxllm.engine.features.transfer.params import TransferParams, read
from jaxllm.engine.features.transfer.rows import digest_of, receive_blocks
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.errors import FeatureDisabledError, UserError
from jaxllm.kv_transfer_config import KvTransferConfig
from jaxllm.outputs import RequestOutput
from jaxllm.runner.row_layout import Row, RowLayout
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler import windowed
from jaxllm.scheduler.block_pool import PoolEditor, chained, content_root
from jaxllm.setup.model_files import identity

_log = logging.getLogger(__name__)
NAME = "kv_transfer_params"
FORMAT = 1  # of a block's content
DONE = ("stop", "length")  # reasons to keep a prompt's blocks


@dataclass(slots=True)
class Transfer:
    """The state of a request with blocks here or elsewhere."""

    params: TransferParams
    digests: Sequence[bytes]  # of the prompt's full blocks
    pull: Future[Mapping[Block, Row]] | None = None
    num_asked: int = 0  # blocks of the pull


class NoTransfer(Feature):
    """Refuses transfers, for engines without `kv_transfer_config`."""

    name = "transfer"
    options = (NAME,)

    def accept(self, accepted: Accepted) -> None:
        if accepted.options.get(NAME):
            raise FeatureDisabledError("kv_transfer_params needs an engine with kv_transfer_config.", NAME)


class KvTransfer(Feature):
    """Keeps, sends and receives the blocks of prompts."""

    name = "transfer"
    options = (NAME,)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        config = core.config.kv_transfer_config
        assert isinstance(config, KvTransferConfig)
        try:
            from jaxllm.engine.features.transfer.consumer import Consumer
            from jaxllm.engine.features.transfer.producer import Producer
        except ModuleNotFoundError as error:
            message = f"kv_transfer_config needs {error.name}: pip install 'jaxllm[client]'."
            raise UserError(message, "kv_transfer_config") from error
        self._config = config
        self._engine_id = config.engine_id or uuid.uuid4().hex
        layouts = core.runner.row_layouts()
        fingerprint = fingerprint_of(core, layouts)
        self.producer = Producer(config, fingerprint, layouts) if config.produces else None
        self.consumer = Consumer(config, fingerprint, layouts) if config.consumes else None

    def accept(self, accepted: Accepted) -> None:
        params = read(accepted.options.get(NAME), self._config)
        if params is None:
            return
        if not isinstance(accepted.asked, SamplingParams | None):
            raise UserError("kv_transfer_params needs a request with SamplingParams.", NAME)
        tokens = np.asarray(accepted.prompt_token_ids, "<i4").tobytes()
        root = content_root(salt=accepted.salt, content=accepted.content)
        digests = chained(root, tokens, self.core.config.block_size)
        accepted.states[self.name] = Transfer(params, digests)

    def needs(self, accepted: Accepted) -> Future[Mapping[Block, Row]] | None:
        """Begin to pull the blocks of a prompt; release them if none is missing here."""
        state: Transfer | None = accepted.states.get(self.name)
        if state is None or state.params.remote is None or self.consumer is None:
            return None
        if state.pull is None:
            blocks = self._missing(accepted, state)
            if not blocks:
                self.consumer.release(state.params.remote)
                state.params = TransferParams()
                return None
            state.num_asked = len(blocks)
            state.pull = self.consumer.pull(state.params.remote, blocks)
        return state.pull

    def added(self, accepted: Accepted, group: SequenceGroup) -> None:
        """Give the blocks that arrived to the host's tier, while the request is queued."""
        state: Transfer | None = accepted.states.get(self.name)
        if state is None or state.pull is None:
            return
        try:
            received = state.pull.result(0)
        except (CancelledError, TimeoutError):  # aborted, or not awaited
            state.pull.cancel()
            return
        metrics = self.core.metrics
        metrics.received_blocks += len(received)
        metrics.transfer_failures += len(received) < state.num_asked
        indices = {digest: index for index, digest in enumerate(state.digests)}
        blocks = [(block.group, indices[block.digest], row) for block, row in received.items()]
        blocks.sort(key=lambda block: block[:2])
        receive_blocks(self.core.scheduler, self.core.runner, group.sequences[0].sequence_id, blocks)

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        state: Transfer | None = accepted.states.get(self.name)
        if state is not None and state.params.keeps:
            group.states[self.name] = state

    def show(self, group: SequenceGroup, output: RequestOutput) -> None:
        """Keep the prompt's blocks when its request has ended, and show their place."""
        state: Transfer | None = group.states.get(self.name)
        if state is None or self.producer is None or not group.is_finished:
            return
        if not all(own.finish_reason in DONE for own in group.sequences):
            return
        try:
            lease = self._keep(state)
        except Exception:  # the other engine computes the prompt
            _log.exception("the KV blocks of request %s could not be kept", group.request_id)
            return
        if lease is not None:
            output.kv_transfer_params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self._engine_id,
                "remote_request_id": lease,
                "remote_block_ids": list(range(len(state.digests))),
                "remote_host": self._config.kv_connector_extra_config.advertised_ip or self._config.kv_ip,
                "remote_port": self.producer.port,
            }

    def close(self) -> None:
        for each in (self.producer, self.consumer):
            if each is not None:
                each.close()

    def _keep(self, state: Transfer) -> str | None:
        """Copy the cached blocks of a prompt, before any step is planned; return the lease."""
        assert self.producer is not None
        rows: dict[Block, Row] = {}
        scheduled = self.core.scheduler.state
        pools = (scheduled.pool, scheduled.window_pool)[: self.core.runner.limits.num_groups]
        for group, pool in enumerate(pools):
            assert pool is not None
            editor = PoolEditor(pool)
            digests = state.digests[self._first(group, len(state.digests) - 1) :]
            found = {digest: block for digest in digests if (block := editor.find(digest)) is not None}
            blocks = [Block(group, digest) for digest in found]
            rows |= zip(blocks, self.core.runner.read_blocks(group, list(found.values())), strict=True)
        self.core.metrics.sent_blocks += len(rows)
        return self.producer.keep(rows) if rows else None

    def _missing(self, accepted: Accepted, state: Transfer) -> list[Block]:
        """Return the blocks that a request can use and this engine lacks, in any thread."""
        params = accepted.params
        if params.skip_reading_prefix_cache or (params.prompt_logprobs is not None and accepted.num_sequences == 1):
            return []
        digests = state.digests[: (len(accepted.prompt_token_ids) - 1) // self.core.config.block_size]
        scheduled = self.core.scheduler.state
        assert scheduled.host is not None
        missing: list[Block] = []
        for group, host in enumerate(scheduled.host.pools):
            pool = scheduled.window_pool if group else scheduled.pool
            assert pool is not None
            editors = PoolEditor(pool), PoolEditor(host)
            missing += [
                Block(group, digest)
                for digest in digests[self._first(group, len(digests)) :]
                if all(editor.find(digest) is None for editor in editors)
            ]
        return missing

    def _first(self, group: int, count: int) -> int:
        """Return the index of a group's first block that a token after `count` blocks attends to."""
        window, size = self.core.runner.limits.window, self.core.config.block_size
        return max(0, count - -(-(window - 1) // size)) if group == windowed.GROUP and window else 0


def fingerprint_of(core: Core, layouts: Sequence[RowLayout]) -> Fingerprint:
    setup, config = core.runner.setup, core.config
    model = digest_of(
        {
            "format": FORMAT,
            "files": identity(setup.folder),
            "random": config.seed if config.load_format == "dummy" else None,
            "quantization": config.quantization,
            "dtype": setup.dtype.name,
            "float8": setup.float8,
            "block_size": config.block_size,
            "window": core.runner.limits.window,
            "groups": [layout.about(are_drafts=False) for layout in layouts],
        }
    )
    about = [layout.about(are_drafts=True) for layout in layouts]
    if not any(about) or setup.draft is None:
        return Fingerprint(model)
    return Fingerprint(model, digest_of({"files": identity(setup.draft.folder), "groups": about}))
