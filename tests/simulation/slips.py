"""Bugs that a person could make, as `mutants.Mutant`s; those that other engines had are in mutants.py."""

from tests.simulation.mutants import Mutant

SLIPS = [
    # scheduler
    Mutant(
        "the last in rank goes first",
        "scheduler.state.StateEditor.enqueue",
        "key=lambda entry: entry.rank",
        "key=lambda entry: entry.rank, reverse=True",
    ),
    Mutant("priorities are ignored", "scheduler.state.StateEditor.enqueue", "one.rank <= other.rank", "True"),
    Mutant("a preempted request loses its place", "scheduler.scheduler._requeue", "record.order", "editor.num_added"),
    Mutant("the first in rank is preempted", "scheduler.scheduler._grow", "victim = max(", "victim = min("),
    Mutant("who is ending is preempted", "scheduler.scheduler._grow", "* ~ending", ""),
    Mutant(
        "limits are one token too high",
        "scheduler.scheduler.commit",
        "ends >= slots.limit[row_slots]",
        "ends > slots.limit[row_slots]",
    ),
    Mutant(
        "limits are one token too low",
        "scheduler.scheduler.commit",
        "ends >= slots.limit[row_slots]",
        "ends >= slots.limit[row_slots] - 1",
    ),
    Mutant("only the usual stop token stops", "scheduler.scheduler.commit", "slots.has_more_stops.any()", "False"),
    Mutant(
        "stop tokens end with length", "scheduler.scheduler.commit", '"stop" if stopped[row] else "length"', '"length"'
    ),
    Mutant("rows that are not finite are taken", "scheduler.scheduler.commit", "live &= is_finite", "pass"),
    Mutant(
        "failed blocks stay in the index",
        "scheduler.scheduler.commit",
        "editor.pool.forget(editor.tables[slot], editor.owner(slot).digests)",
        "pass",
    ),
    Mutant("failed blocks are published", "scheduler.scheduler.commit", "may_publish=False", "may_publish=True"),
    Mutant(
        "decodes are not in the budget",
        "scheduler.scheduler.plan",
        "limits.max_step_tokens - num_decodes",
        "limits.max_step_tokens",
    ),
    Mutant(
        "admission goes on after a preemption",
        "scheduler.scheduler.plan",
        "if editor.waiting and not preempted:",
        "if editor.waiting:",
    ),
    Mutant("admissions are not bounded", "scheduler.scheduler._admit", " or len(rows) == limits.max_step_chunks", ""),
    Mutant(
        "the budget of admissions forgets chunks",
        "scheduler.scheduler._admit",
        "budget -= sum(length for _, _, length in rows)",
        "pass",
    ),
    Mutant(
        "the last token is taken from the cache",
        "scheduler.scheduler._admit",
        "(entry.known - 1) // limits.block_size",
        "entry.known // limits.block_size",
    ),
    Mutant(
        "cached prompts are read although they must not",
        "scheduler.scheduler._admit",
        "if entry.request.reads_cache else 0",
        "",
    ),
    Mutant("idle hits count as available", "scheduler.scheduler._admit", " - editor.pool.num_idle(hits)", ""),
    Mutant("no block is left for those that run", "scheduler.scheduler._admit", "available - num_running", "available"),
    Mutant(
        "too many blocks are left",
        "scheduler.scheduler._admit",
        "num_new > available - num_running",
        "num_new >= available - num_running",
    ),
    Mutant(
        "a large request is skipped for a small one",
        "scheduler.scheduler._admit",
        "num_new > available - num_running:\n            break",
        "num_new > available - num_running:\n            continue",
    ),
    Mutant(
        "admission takes a token too few",
        "scheduler.scheduler._admit",
        "min(entry.known - start, budget)",
        "min(entry.known - start, max(1, budget - 1))",
    ),
    Mutant(
        "blocks written by a step in flight are published",
        "scheduler.scheduler._vacate",
        'min(int(editor.read("issued")[slot]), int(editor.read("known")[slot]) - num_new)',
        'int(editor.read("length")[slot])',
    ),
    Mutant("the token being committed counts as written", "scheduler.scheduler._vacate", " - num_new)", ")"),
    Mutant("sampled blocks are never published", "scheduler.scheduler._vacate", "if may_publish:", "if False:"),
    Mutant(
        "prompt blocks are never published",
        "scheduler.scheduler._publish_prompt",
        "editor.pool.publish(zip(digests[full], table[full], strict=True))",
        "pass",
    ),
    Mutant(
        "a vacated slot keeps its limit",
        "scheduler.scheduler._vacate",
        '"known", "limit", "capacity"',
        '"known", "capacity"',
    ),
    Mutant(
        "a vacated slot keeps its length",
        "scheduler.scheduler._vacate",
        '"issued", "length", "known"',
        '"issued", "known"',
    ),
    Mutant(
        "a request keeps the other's stop token",
        "scheduler.scheduler._occupy",
        '("stop_id", request.stop_ids[0] if request.stop_ids else NO_TOKEN),',
        "",
    ),
    Mutant("epochs begin again", "scheduler.scheduler._occupy", "editor.num_admitted += 1", "editor.num_admitted = 1"),
    Mutant("a reset keeps the cache", "scheduler.scheduler.reset", "editor.forget_cache(limits)", "pass"),
    Mutant("a reset forgets who ran", "scheduler.scheduler.reset", "_requeue(editor, limits, slot)", "pass"),
    Mutant(
        "digests lack what stands before",
        "scheduler.scheduler.digests_of",
        "digests[-1] if digests else _root(request)",
        "_root(request)",
    ),
    Mutant(
        "the next sample's digests are another's",
        "scheduler.scheduler.add",
        " and before.request.tokens == request.tokens",
        "",
    ),
    # blocks
    Mutant(
        "the most recently used block is evicted",
        "scheduler.block_pool.PoolEditor._evict",
        "in zip(blocks, digests, their_stamps, now, strict=False):",
        "in reversed([*zip(blocks, digests, their_stamps, now, strict=False)]):",
    ),
    Mutant(
        "an evicted block stays in the index", "scheduler.block_pool.PoolEditor._evict", "self._drop(digest)", "pass"
    ),
    Mutant(
        "stale entries are evicted",
        "scheduler.block_pool.PoolEditor._evict",
        "if current == stamp:",
        "if self._find(digest) is not None:",
    ),
    Mutant(
        "a hit does not age the entry", "scheduler.block_pool.PoolEditor.share", "self._own_stamps()[idle] += 1", "pass"
    ),
    Mutant(
        "a hit is not counted off", "scheduler.block_pool.PoolEditor.share", "self._num_cached -= len(idle)", "pass"
    ),
    Mutant(
        "sharing does not count",
        "scheduler.block_pool.PoolEditor.share",
        "references[chosen] += 1",
        "references[idle] += 1",
    ),
    Mutant(
        "released shared blocks are freed",
        "scheduler.block_pool.PoolEditor.release",
        "references[chosen] == 0",
        "references[chosen] <= 1",
    ),
    Mutant(
        "prefixes are evicted before continuations",
        "scheduler.block_pool.PoolEditor.release",
        "[::-1].tolist()",
        ".tolist()",
    ),
    Mutant(
        "published content moves to the new block",
        "scheduler.block_pool.PoolEditor.publish",
        "if digest not in shard or _place(shard, digest) < 0:",
        "if True:",
    ),
    Mutant(
        "a foreign block counts as cached",
        "scheduler.block_pool.PoolEditor.release",
        "self._find(digests[position]) == block",
        "self._find(digests[position]) is not None",
    ),
    Mutant(
        "shared blocks are forgotten too", "scheduler.block_pool.PoolEditor.forget", " and references[block] == 1", ""
    ),
    Mutant("a gap in the prefix is skipped", "scheduler.block_pool.PoolEditor.look_up", "break", "continue"),
    Mutant(
        "compacting loses an entry",
        "scheduler.block_pool._compact",
        "cached_entries(pool)",
        "[*cached_entries(pool)][1:]",
    ),
    Mutant(
        "the queue is never swept",
        "scheduler.block_pool.PoolEditor.done",
        "return _compact(pool) if pool.num_entries > 2 * pool.num_cached + MOST_STALE else pool",
        "return pool",
    ),
    # core, engine
    Mutant("aborted requests are kept", "scheduler.recorded.Core.abort", "self.requests.pop(request_id, None)", "pass"),
    Mutant(
        "a recovered step stays in flight", "engine.llm_engine.LLMEngine._recover", "self._in_flight.clear()", "pass"
    ),
    Mutant(
        "the core is not told of a lost cache", "engine.llm_engine.LLMEngine._recover", "self._core.reset()", "pass"
    ),
    Mutant("failures add up over time", "engine.llm_engine.LLMEngine._step", "self._num_failures = 0", "pass"),
    Mutant(
        "the engine never gives up",
        "engine.llm_engine.LLMEngine._recover",
        "if self._num_failures % MAX_FAILURES:",
        "if True:",
    ),
    Mutant(
        "a stop string does not end the sample",
        "engine.llm_engine.LLMEngine._take_in",
        "self._core.abort({request_id: end[0]})",
        "pass",
    ),
    Mutant(
        "a failed text leaves its blocks",
        "engine.llm_engine.LLMEngine._end_group",
        'self._core.abort({sample.id: "error" for sample in samples})',
        "pass",
    ),
    Mutant(
        "one broken text fails the step", "engine.llm_engine.LLMEngine._take_in", "self._fail(sample.group)", "raise"
    ),
    Mutant("seeds of samples are equal", "engine.llm_engine.LLMEngine.add", "(seed + sample.index) % 2**64", "seed"),
    Mutant("a given seed is not used", "engine.llm_engine.LLMEngine.add", "seed = accepted.params.seed", "seed = None"),
    Mutant(
        "a request draws a seed although it has one",
        "engine.llm_engine.LLMEngine.add",
        "seed = accepted.params.seed",
        "seed = accepted.params.seed; self._random.integers(2**63)",
    ),
    Mutant(
        "extras are sent once",
        "engine.llm_engine.LLMEngine._admit",
        "extras.append((admission.slot, sample.extras))",
        "extras.append((admission.slot, sample.extras)); sample.extras = None",
    ),
    Mutant(
        "history is not sent", "engine.llm_engine.LLMEngine._admit", "sampler.reads_history(sample.params)", "False"
    ),
    Mutant(
        "cached tokens are counted again",
        "engine.llm_engine.LLMEngine._note_admitted",
        "if group.num_cached_tokens is None:",
        "if True:",
    ),
    Mutant(
        "preemptions are not counted",
        "engine.llm_engine.LLMEngine._admit",
        "self.metrics.preemptions += len(plan.preempted)",
        "pass",
    ),
    Mutant(
        "salts are dropped",
        "engine.llm_engine.LLMEngine._make_group",
        "salt: bytes | None = accepted.salt",
        'salt: bytes | None = b""',
    ),
    Mutant(
        "samples without a cache share with all",
        "engine.llm_engine.LLMEngine._make_group",
        'f"{self._num_samples}".encode()',
        'b"n"',
    ),
    Mutant(
        "end of sequence is not ignored",
        "engine.llm_engine.LLMEngine._make_sample",
        "frozenset() if params.ignore_eos else self.eos_ids",
        "self.eos_ids",
    ),
    Mutant(
        "the widest variant is not chosen",
        "engine.input_batch.Seats.variant",
        "self._variants[plan.slots].max()",
        "self._variants[plan.slots].min()",
    ),
    Mutant(
        "aborted requests end as aborted, whatever the reason",
        "engine.llm_engine.LLMEngine.abort_requests",
        "self._end(sample, why, None)",
        'self._end(sample, "abort", None)',
    ),
    Mutant(
        "the cache is reset while requests run",
        "engine.llm_engine.LLMEngine.reset_prefix_cache",
        "if self._core.state.num_running:",
        "if False:",
    ),
    Mutant(
        "finished groups are kept", "engine.llm_engine.LLMEngine._finish", "del self._groups[group.request_id]", "pass"
    ),
    # samples, text
    Mutant("deltas are shown twice", "engine.sequence.Sample.show", "self.text_shown = len(self.text)", "pass"),
    Mutant("held text is lost at the end", "engine.sequence.Sample.flush", "delta += self.matcher.held", "pass"),
    Mutant(
        "an unfinished character is lost",
        "engine.sequence.Sample.flush",
        "detokenizer.finish(self.detokenizer, tokenizer)",
        '""',
    ),
    Mutant(
        "the stop token is in the text",
        "engine.sequence.Sample.advance",
        "self.read(tokenizer, len(self.tokens) - 1)",
        "self.read(tokenizer)",
    ),
    Mutant(
        "stop strings match in min_tokens",
        "engine.sequence.Sample.read",
        "self.num_read > self.params.min_tokens",
        "True",
    ),
    Mutant(
        "an interval is one too long",
        "engine.sequence.Sample.is_due",
        ">= (self.params.stream_interval or interval)",
        "> (self.params.stream_interval or interval)",
    ),
    Mutant(
        "the end is not shown",
        "engine.sequence.Sample.is_due",
        "self.num_shown == 0 or self.finish_reason is not None",
        "self.num_shown == 0",
    ),
    Mutant("the first sample's end ends all", "engine.sequence.Group.is_finished", "all(", "any("),
    Mutant("the shortest stop string wins", "text.stop_strings.match_stops", "min(found)", "max(found)"),
    Mutant(
        "half a stop string is shown",
        "text.stop_strings.match_stops",
        "range(min(len(text), matcher.longest), 0, -1)",
        "range(min(len(text), matcher.longest - 1), 0, -1)",
    ),
    Mutant(
        "what was held is forgotten", "text.stop_strings.match_stops", "text = matcher.held + delta", "text = delta"
    ),
    Mutant("a broken character takes the next along", "text.detokenizer._advance_bytes", "text = text[1:]", "pass"),
    Mutant(
        "a repetition is seen too late",
        "text.repetition_detector.RepetitionDetector.push",
        "self._equal >= self._needed",
        "self._equal > self._needed",
    ),
    # what crosses to the device
    Mutant(
        "a row's position is one off",
        "runner.batch.pack",
        "plan.starts + plan.lengths - 1",
        "plan.starts + plan.lengths",
    ),
    Mutant(
        "entries beyond the buffer are lost",
        "runner.model_runner.Runner.dispatch",
        "plan.table[key.shape.entries :]",
        "plan.table[:0]",
    ),
    Mutant(
        "tiles are cut wrongly",
        "runner.batch.pack",
        "np.minimum(TILE, np.repeat(plan.lengths[rows], counts) - inside)",
        "np.minimum(TILE, np.repeat(plan.lengths[rows], counts))",
    ),
    Mutant(
        "chunks begin at the wrong token",
        "engine.input_batch.Seats.chunks",
        "tokens[start : start + length]",
        "tokens[: length]",
    ),
    Mutant("sampling rows are shifted", "runner.batch.pack", "sampling[plan.slots]", "sampling[np.sort(plan.slots)]"),
    Mutant(
        "a reset of the cache leaves a step in flight",
        "engine.llm_engine.LLMEngine.reset_prefix_cache",
        "self._in_flight.clear()",
        "pass",
    ),
    Mutant(
        "min_tokens are forgotten", "sampling.sampler.pack_row", "prompt_length + params.min_tokens", "prompt_length"
    ),
    Mutant("a shape too small is taken", "runner.batch.fits", "size.tiles <= shape.tiles", "True"),
    # the queue and the readers
    Mutant(
        "the queue is one too long",
        "engine.async_llm.AsyncLLM.check_queue",
        "waiting + num_samples > most",
        "waiting + num_samples - 1 > most",
    ),
    Mutant(
        "waiting tokens are not bounded",
        "engine.async_llm.AsyncLLM.check_queue",
        "load.waiting_tokens and load.waiting_tokens + num_tokens > most_tokens",
        "False",
    ),
    Mutant(
        "an id may be used twice",
        "engine.async_llm.AsyncLLM.generate",
        "if self._streams.has(request_id, owner):",
        "if False:",
    ),
    Mutant(
        "who leaves is not aborted",
        "engine.async_llm.AsyncLLM._close",
        'self._inbox.abort(stream.key, "abort")',
        "pass",
    ),
    Mutant("time limits abort", "engine.async_llm.AsyncLLM.generate", '"time_limit")', '"abort")'),
    Mutant(
        "a refused request waits for ever",
        "engine.async_llm.AsyncLLM._refused",
        "self._streams.fail(stream, RequestFailedError(why))",
        "pass",
    ),
    Mutant("the dead engine tells nobody", "engine.async_llm.AsyncLLM._died", "self._streams.fail_all(lost)", "pass"),
    Mutant(
        "draining takes work",
        "engine.async_llm.AsyncLLM._unavailable",
        "if self._is_draining and self._failure is None:",
        "if False:",
    ),
    Mutant(
        "a pause takes work",
        "engine.async_llm.AsyncLLM._working_state",
        '"paused" if self._is_paused else "serving"',
        '"serving"',
    ),
    Mutant(
        "merging loses text",
        "engine.output_streams.merge",
        "part.text += completion.text",
        "part.text = completion.text",
    ),
    Mutant("merging loses tokens", "engine.output_streams.merge", "part.token_ids += completion.token_ids", "pass"),
    Mutant(
        "merging loses the end",
        "engine.output_streams.merge",
        "pending.finished, pending.metrics = new.finished, new.metrics",
        "pending.metrics = new.metrics",
    ),
    Mutant(
        "what is not read is lost",
        "engine.output_streams.Stream.put",
        "merge(self._pending, output)",
        "self._pending = output",
    ),
    Mutant(
        "the inbox forgets aborts",
        "engine.inbox.Inbox.take",
        "Taken(self._added, self._aborted,",
        "Taken(self._added, [],",
    ),
    Mutant(
        "the inbox counts for ever",
        "engine.inbox.Inbox.settle",
        "self._num_samples -= sum(accepted.params.n for accepted in added)",
        "pass",
    ),
    Mutant("nobody wakes the thread for an abort", "engine.inbox.Inbox.abort", "self._changed.notify()", "pass"),
    Mutant("a paused engine computes", "engine.engine_thread.EngineThread._turn", "if not taken.is_paused and", "if"),
    Mutant(
        "outputs of aborted requests are lost",
        "engine.engine_thread.EngineThread._turn",
        "outputs += stepped",
        "outputs = stepped",
    ),
    Mutant(
        "one bad request takes the others along",
        "engine.engine_thread.EngineThread._take_in",
        "engine.add([accepted])\n",
        "raise\n",
    ),
    Mutant(
        "streams are kept",
        "engine.output_streams.StreamTable.close",
        "del owners[stream.owner], self._by_key[stream.key]",
        "del owners[stream.owner]",
    ),
    Mutant(
        "the load is not told",
        "engine.engine_thread.EngineThread._turn",
        "self.load = _with_speed(engine.load(), self.load)",
        "pass",
    ),
    # what the simulation did not see at first: found by somebody who planted sixty bugs of their own
    Mutant(
        "a preempted request keeps only the digests it brought",
        "scheduler.scheduler._requeue",
        "digests_of(record.request, limits, record.digests, known)",
        "record.digests",
    ),
    Mutant(
        "a result is taken by a slot's later owner",
        "scheduler.scheduler.commit",
        "slots.epochs[step.slots] == step.epochs[step.slots]",
        "slots.epochs[step.slots] >= step.epochs[step.slots]",
    ),
    Mutant(
        "has_more_stops of the slot's last owner stays",
        "scheduler.scheduler._occupy",
        '("has_more_stops", len(request.stop_ids) > 1),',
        "",
    ),
    Mutant(
        "running requests rank by arrival alone",
        "scheduler.state.Running.rank",
        "self.request.priority, self.order",
        "0, self.order",
    ),
    Mutant(
        "compacting keeps the newest list too", "scheduler.block_pool._compact", "newest=None", "newest=pool.newest"
    ),
    Mutant(
        "parents of stored blocks are not told",
        "scheduler.state.StateEditor.describe",
        "digests[index - 1] if index else None",
        "None",
    ),
    Mutant(
        "a cleared cache is not told", "scheduler.state.StateEditor.forget_cache", "self._was_cleared = True", "pass"
    ),
    Mutant(
        "requests that failed are kept by the core",
        "scheduler.recorded.Core.commit",
        "(*events.finished, *events.failed)",
        "events.finished",
    ),
    Mutant(
        "a prompt whose log-probabilities are missing goes on",
        "engine.llm_engine.LLMEngine._take_in",
        "if sample.index == 0 and sample.group.misses_prompt_logprobs:",
        "if False:",
    ),
    Mutant(
        "the smallest request is sacrificed",
        "engine.llm_engine.LLMEngine._largest",
        "sorted(rows, reverse=True)",
        "sorted(rows)",
    ),
    Mutant(
        "who is to blame does not end",
        "engine.llm_engine.LLMEngine._recover",
        "if isinstance(error, RequestFault):",
        "if False:",
    ),
    Mutant(
        "first_scheduled_time is that of the last admission",
        "engine.llm_engine.LLMEngine._note_admitted",
        "if group.metrics.first_scheduled_time is None:",
        "if True:",
    ),
    Mutant(
        "first_token_time is that of the last token",
        "engine.llm_engine.LLMEngine._take_in",
        "if sample.group.metrics.first_token_time is None:",
        "if True:",
    ),
    Mutant("32 streams are many", "engine.llm_engine.LLMEngine._outputs", "<= FEW_STREAMS", "< FEW_STREAMS"),
    Mutant(
        "held text of aborted requests is lost",
        "engine.llm_engine.LLMEngine.abort_requests",
        "sample.flush(self.tokenizer)",
        "pass",
    ),
    Mutant(
        "failures are forgotten before the result is there",
        "engine.llm_engine.LLMEngine._step",
        "plan, flight = self._in_flight.popleft()",
        "plan, flight = self._in_flight.popleft(); self._num_failures = 0",
    ),
    Mutant(
        "async_scheduling cannot be switched off",
        "engine.llm_engine.LLMEngine.__init__",
        "2 if config.async_scheduling else 1",
        "2",
    ),
    Mutant(
        "ended samples of a failing request end again",
        "engine.llm_engine.LLMEngine._end_group",
        "[sample for sample in group.samples if sample.finish_reason is None]",
        "group.samples",
    ),
    Mutant(
        "likeliest tokens of row 0 are told",
        "engine.sequence.Sample.add_logprobs",
        "result.top_ids[row], result.top_logprobs[row]",
        "result.top_ids[0], result.top_logprobs[0]",
    ),
    Mutant(
        "deltas repeat the prompt's log-probabilities",
        "engine.sequence.Group.show",
        "self.were_prompt_logprobs_shown = True",
        "pass",
    ),
    Mutant(
        "a greedy sample is told a seed",
        "engine.sequence.Sample.show",
        "None if self.params.temperature == 0.0 else _signed(self.seed)",
        "_signed(self.seed)",
    ),
    Mutant(
        "min_tokens does not hold back repetitions",
        "engine.sequence.Sample._repeats",
        " and self.num_tokens >= self.params.min_tokens",
        "",
    ),
    Mutant(
        "the detector does not hear of the first min_tokens",
        "engine.sequence.Sample._repeats",
        "self.repetition.push(token) and self.num_tokens >= self.params.min_tokens",
        "self.num_tokens >= self.params.min_tokens and self.repetition.push(token)",
    ),
    Mutant(
        "merging keeps the old sum of log-probabilities",
        "engine.output_streams.merge",
        "part.cumulative_logprob = completion.cumulative_logprob",
        "pass",
    ),
    Mutant(
        "merging drops samples that had no news yet",
        "engine.output_streams.merge",
        "pending.outputs.append(completion)",
        "pass",
    ),
    Mutant(
        "a deadline takes back what was finished and not read",
        "engine.output_streams.Stream.fail",
        "if not self.is_finished and self._error is None:",
        "if self._error is None:",
    ),
    Mutant(
        "the engine's id is the caller's",
        "engine.output_streams.StreamTable.open",
        'f"{self._num_opened}"',
        "request_id",
    ),
    Mutant(
        "a drain waits for nobody (idle never cleared)",
        "engine.output_streams.StreamTable.open",
        "self._idle.clear()",
        "pass",
    ),
    Mutant(
        "a pause waits for nobody (quiet never cleared)",
        "engine.output_streams.StreamTable.open",
        "self._quiet.clear()",
        "pass",
    ),
    Mutant("stop does not wake the thread", "engine.inbox.Inbox.stop", "self._changed.notify()", "pass"),
    Mutant("resume does not wake the thread", "engine.inbox.Inbox.set_paused", "self._changed.notify()", "pass"),
    Mutant("batches of block events are not numbered", "engine.kv_events.BlockLog.append", "self._next += 1", "pass"),
    Mutant(
        "first tokens are told to the observer twice",
        "engine.output_streams.Stream.put",
        "num_tokens -= len(counts)",
        "pass",
    ),
    Mutant("pause goes on computing", "engine.async_llm.AsyncLLM.pause", "self._inbox.set_paused(True)", "pass"),
    Mutant(
        "pause('wait') does not wait", "engine.async_llm.AsyncLLM.pause", 'if mode != "keep":', 'if mode == "abort":'
    ),
    Mutant(
        "pause('abort') aborts nobody",
        "engine.async_llm.AsyncLLM.pause",
        "await self.abort(self._streams.ids())",
        "pass",
    ),
    Mutant(
        "pause does not clear the cache", "engine.async_llm.AsyncLLM.pause", "await self.reset_prefix_cache()", "pass"
    ),
    Mutant(
        "a pause that was resumed meanwhile still pauses",
        "engine.async_llm.AsyncLLM.pause",
        "if self._num_resumed > resumed:\n            return",
        "if False:\n            return",
    ),
    Mutant("a drain leaves the engine paused", "engine.async_llm.AsyncLLM.drain", "await self.resume()", "pass"),
    Mutant(
        "a drain waits no time", "engine.async_llm.AsyncLLM.drain", "asyncio.timeout(timeout)", "asyncio.timeout(0)"
    ),
    Mutant(
        "a drain waits for ever", "engine.async_llm.AsyncLLM.drain", "asyncio.timeout(timeout)", "asyncio.timeout(None)"
    ),
    Mutant(
        "a drain of an engine that died was through",
        "engine.async_llm.AsyncLLM.drain",
        "is_through and self._failure is None and not",
        "is_through and not",
    ),
    Mutant(
        "calls do not notice that the engine dies",
        "engine.async_llm.AsyncLLM._call",
        "[answer, self._death]",
        "[answer]",
    ),
    Mutant(
        "half of hang_timeout is enough",
        "engine.async_llm.AsyncLLM._working_state",
        "> self.hang_timeout",
        "> self.hang_timeout / 2",
    ),
    Mutant(
        "a deadline counts from the call, not from arrival",
        "engine.async_llm.AsyncLLM.generate",
        "max(0.0, arrival + timeout - self._clock())",
        "timeout",
    ),
    Mutant("timers are not cancelled", "engine.async_llm.AsyncLLM.generate", "timer.cancel()", "pass"),
    Mutant(
        "a finished request counts as awaited until it is read",
        "engine.async_llm.AsyncLLM._deliver",
        "self._streams.note_over(stream)",
        "pass",
    ),
    Mutant(
        "the observer is not told of steps", "engine.async_llm.AsyncLLM._deliver", "self.observer.step(report)", "pass"
    ),
    Mutant(
        "an observer's error is everybody's",
        "engine.async_llm.AsyncLLM._deliver",
        '_log.exception("the observer failed")',
        "raise",
    ),
    Mutant(
        "the id is not looked at again once the prompt is made",
        "engine.async_llm.AsyncLLM.generate",
        "accepted = await self._accept(request_id, prompt, sampling_params, priority)\n"
        "    if self._streams.has(request_id, owner):",
        "accepted = await self._accept(request_id, prompt, sampling_params, priority)\n    if False:",
    ),
    Mutant(
        "new requests do not show in the load until the step has ended",
        "engine.engine_thread.EngineThread._turn",
        "if taken.added:",
        "if False:",
    ),
    Mutant(
        "a step that has ended still counts as running",
        "engine.engine_thread.EngineThread._step",
        "self.step_since = None",
        "pass",
    ),
    Mutant(
        "block events wait for a step",
        "engine.engine_thread.EngineThread._turn",
        "if blocks := engine.take_block_events():",
        "if report is not None and (blocks := engine.take_block_events()):",
    ),
    Mutant(
        "a step's report is another step's (tokens counted from the start)",
        "engine.engine_thread.EngineThread._step",
        "metrics.chunk_tokens - before[0]",
        "metrics.chunk_tokens",
    ),
    Mutant(
        "two bytes of the prompt are looked at",
        "text.detokenizer.begin",
        "sum(map(len, tail)) >= 3",
        "sum(map(len, tail)) >= 2",
    ),
    Mutant(
        "min_pattern_size is ignored",
        "text.repetition_detector.RepetitionDetector.__init__",
        "sizes < params.min_pattern_size",
        "sizes < 0",
    ),
    Mutant(
        "positions to score are shifted by rows that are not scored",
        "engine.input_batch.Seats.scored",
        "offset += length",
        "offset += length * bool(self._is_scored[slot])",
    ),
    Mutant(
        "only the first changes are sent ahead",
        "runner.model_runner.Runner._patch",
        "part[start : start + PATCH_ENTRIES]",
        "part[:PATCH_ENTRIES]",
    ),
    Mutant(
        "only the first extras are sent",
        "runner.model_runner.Runner._patch_extras",
        "extras[start : start + PATCH_EXTRAS]",
        "extras[:PATCH_EXTRAS]",
    ),
    Mutant(
        "history is sent only where the table is",
        "runner.model_runner.Runner.dispatch",
        "if len(ahead) or history is not None:",
        "if len(ahead):",
    ),
    Mutant(
        "presence and frequency are exchanged",
        "sampling.sampler.pack_row",
        "params.presence_penalty,\n            params.frequency_penalty,",
        "params.frequency_penalty,\n            params.presence_penalty,",
    ),
    Mutant(
        "top_p alone takes the cheap program",
        "sampling.sampler.needs",
        "params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0",
        "params.top_k > 0 or params.min_p > 0.0",
    ),
    Mutant("every row of a ragged step samples", "runner.batch.pack", "= plan.samples", "= 1"),
    Mutant("the summary lacks tokens", "engine.output_streams.Stream._count", "ids.extend(new)", "pass"),
    Mutant(
        "the summary says nobody ended",
        "engine.output_streams.Stream._count",
        "whole.finish_reason, whole.stop_reason = completion.finish_reason, completion.stop_reason",
        "pass",
    ),
    Mutant(
        "prompts being made are not counted",
        "engine.async_llm.AsyncLLM.preparing",
        "self._num_preparing += num_samples",
        "num_samples = 0",
    ),
    Mutant(
        "an abort of a queued one drops its twin samples' place: order reused",
        "scheduler.scheduler.add",
        "editor.num_added += 1",
        "editor.num_added += not entries[1:]",
    ),
    Mutant(
        "reset leaves the requests' late tokens (commit drops nothing)",
        "scheduler.scheduler.commit",
        "live = step.samples & (slots.known[step.slots] == ends)",
        "live = step.samples & (slots.known[step.slots] >= ends)",
    ),
    Mutant(
        "a drain that was cut off by a close was through",
        "engine.async_llm.AsyncLLM.drain",
        " and not self._is_stopped",
        "",
    ),
    Mutant(
        "who leaves while its prompt is made keeps its place",
        "engine.async_llm.AsyncLLM.preparing",
        "finally:",
        "except Exception:\n        self._num_preparing -= num_samples\n        raise\n    else:",
    ),
    Mutant(
        "the log of block events is never cut",
        "engine.kv_events.BlockLog.append",
        "while self._num_events > LOGGED_EVENTS and len(self._batches) > 1:",
        "while False:",
    ),
    Mutant(
        "a slot stays as wide as its widest sample was",
        "engine.input_batch.Seats.give",
        "self._variants[slot] = VARIANTS.index(sample.variant)",
        "self._variants[slot] = max(self._variants[slot], VARIANTS.index(sample.variant))",
    ),
    Mutant(
        "a preempted request's stop strings forget min_tokens",
        "engine.llm_engine.LLMEngine._admit",
        "extras: list[tuple[int, np.ndarray]] = []",
        "extras: list[tuple[int, np.ndarray]] = []\n    import dataclasses\n"
        "    for preempted in [self._samples[each] for each in plan.preempted]:\n"
        "        preempted.params = dataclasses.replace(preempted.params, min_tokens=0)",
    ),
    Mutant(
        "the last batch of block events is cut, too",
        "engine.kv_events.BlockLog.append",
        "len(self._batches) > 1",
        "len(self._batches) >= 1",
    ),
    Mutant(
        "a negative seed is told as another",
        "engine.sequence._signed",
        "seed - 2**64 if seed >= 2**63 else seed",
        "seed",
    ),
]
