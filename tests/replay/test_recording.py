"""The replay of a recording makes the engine's plans again: full or redacted, in one file or several."""

from __future__ import annotations

import io
import json
import random
import re
import urllib.request
from array import array
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from jaxllm.commands import cli
from jaxllm.commands.replay import Story
from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.errors import UserError
from jaxllm.replay import recording
from jaxllm.replay.recording import FileRecorder, Kind
from jaxllm.replay.replay import Moment, Replay
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.occupancy import NO_TOKEN, digests_of
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm.scheduler.state import Fork, Limits, Plan, Request, initial
from jaxllm.setup import model_setup
from tests.support import inspection
from tests.support.serving_process import QUICK, ServingProcess
from tests.support.sizes import MANY_SLOTS, SLOTS

LIMITS = Limits(num_slots=6, num_blocks=24, block_size=4, max_step_tokens=24, max_step_chunks=3, max_adapters=2)
DRAFTING = replace(LIMITS, max_drafts=3, max_verified=20, token_cost=20)
STOP = 7


class Driver:
    """Drive a core like an engine: two plans in flight, random tokens, occasional faults."""

    def __init__(self, path: Path, seed: int = 0, limits: Limits = LIMITS, **settings: object) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.recorder = FileRecorder(path, clock=lambda: self.now, **settings)  # type: ignore[arg-type]
        self.core = RecordedScheduler(limits, self.recorder)
        self.in_flight: list[Plan] = []
        self.plans: list[list[int]] = []
        self.num_added = self.num_verified = self.num_forks = 0

    def run(self, num_steps: int, num_requests: int = 10**9) -> None:
        random = self.random
        for _ in range(num_steps):
            self.now += 0.001
            if random.random() < 0.3 and self.num_added < num_requests:
                is_beam_group = not self.core.limits.max_drafts and random.random() < 0.3
                self.core.add(self._beam_group() if is_beam_group else [self.request() for _ in range(2)])
            if random.random() < 0.05 and self.core.requests:
                self._abort(random.choice(list(self.core.requests)))
            if random.random() < 0.01:
                self.core.reset()
                self.in_flight.clear()
            while len(self.in_flight) < 2:
                plan = self.core.plan(self.now)
                self.plans.append(recording.describe(plan))
                if not len(plan.slots):
                    break
                self.in_flight.append(plan)
            if self.in_flight:
                plan = self.in_flight.pop(0)
                tokens = np.asarray([random.randrange(9) for _ in plan.slots], np.int32)
                is_finite = np.asarray([random.random() > 0.01 for _ in plan.slots])
                sampled = None
                if plan.num_drafts:
                    tokens = tokens[:, None] * np.arange(1, 1 + plan.lengths.max(), dtype=np.int32) % 9
                    sampled = np.asarray([random.randint(1, length) for length in plan.lengths.tolist()], np.int32)
                    self.num_verified += plan.num_drafts
                for leader in self.core.commit(plan, tokens, is_finite, sampled, sampled).complete:
                    self._go_on(leader)

    def _abort(self, request_id: int) -> None:
        beam_group = self.core.requests[request_id].beam_group
        own = [one for one, request in self.core.requests.items() if beam_group and request.beam_group == beam_group]
        self.core.abort(dict.fromkeys(own or [request_id], "abort"))

    def _go_on(self, leader: int) -> None:
        beam_group = [one for one, request in self.core.requests.items() if request.beam_group == leader]
        first = self.core.requests[leader]
        if len(first.tokens) + 1 == first.limit:
            self._abort(leader)
            return
        is_new = len(first.tokens) == first.num_prompt
        sources = [leader if is_new else self.random.choice(beam_group) for _ in beam_group]
        moves = [Fork(one, source, at) for at, (one, source) in enumerate(zip(beam_group, sources, strict=True))]
        self.core.fork(moves)
        self.num_forks += 1

    def _beam_group(self) -> list[Request]:
        first = self.request()
        limit = min(first.limit, first.num_prompt + 12)
        first = replace(first, root=b"", beam_group=self.num_added, limit=limit, name="beams")
        others = [self.request() for _ in range(self.random.randint(1, 2))]
        return [first, *(replace(first, sequence_id=one.sequence_id, tokens=first.tokens[:]) for one in others)]

    def request(self) -> Request:
        self.num_added += 1
        number, random = self.num_added, self.random
        prompt = [random.choice((3, 4))] * random.randint(1, 20)
        stop_ids = random.choice([(STOP,), (STOP, 8), ()])
        root = random.choice([b"", b"", b"other", None])
        limit = len(prompt) + random.randint(1, 30)
        return Request(
            sequence_id=number,
            tokens=array("i", prompt),
            num_prompt=len(prompt),
            limit=limit,
            stop_ids=stop_ids,
            root=root,
            adapter=random.choice([0, 0, 1, 2, 3]),
            may_draft=number % 9 > 0,
            name=f"request-{number}",
        )


def plans_of(path: Path) -> list[list[int]]:
    """Replay a full recording, and return its plans."""
    moments = list(Replay(path).moments())
    assert [moment.difference for moment in moments if moment.difference] == []
    return [recording.describe(made) for moment in moments if (made := made_plan(moment)) is not None]


def made_plan(moment: Moment) -> Plan | None:
    return moment.plan if moment.kind is Kind.PLAN else None


@pytest.mark.parametrize("is_redacted", [False, True])
@pytest.mark.parametrize("limits", [LIMITS, DRAFTING], ids=["plain", "drafting"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.ci) for seed in range(1, 5))])
def test_a_replay_makes_the_same_plans(tmp_path: Path, limits: Limits, is_redacted: bool, seed: int) -> None:
    driver = Driver(tmp_path / "log", seed, limits, is_redacted=is_redacted)
    driver.run(400)
    assert sum(1 for plan in driver.plans if plan[2]) > 300
    assert (driver.num_verified > 100) == (limits is DRAFTING)
    assert (driver.num_forks > 20) == (limits is LIMITS)
    assert plans_of(tmp_path / "log") == driver.plans


@pytest.mark.ci
@pytest.mark.parametrize("ends", ["stop", "abort"])
def test_a_cache_that_is_reset_with_a_step_in_flight_can_be_replayed(tmp_path: Path, ends: str) -> None:
    """The request has ended on the host, while the step after its last one is still in flight."""
    recorder = FileRecorder(tmp_path / "log")
    engine = LLMEngine(EngineConfig(model=MODEL_DIR, **MANY_SLOTS), recorder=recorder)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    if ends == "stop":
        params = replace(params, stop=["a"])  # ends late: the scheduler sees no text
    for name in "once", "again":
        engine.add_request(name, "Once upon a time", params)
        while engine.has_unfinished_requests():
            engine.step()
            if ends == "abort":
                engine.abort_request(name)
        assert inspection.is_in_flight(engine) and engine.reset_prefix_cache()
    engine.close()
    assert len(plans_of(tmp_path / "log")) > 2


@pytest.mark.slow
def test_a_text_that_ends_among_kept_drafts_can_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler has tokens that were cut from the request's output; their indexed blocks are hit later."""
    monkeypatch.setitem(model_setup.TOKEN_COST, "cpu", 0)  # so that all drafts are verified
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    config = EngineConfig(model=MODEL_DIR, block_size=1, speculative_config=ngram, **SLOTS)
    engine = LLMEngine(config, recorder=FileRecorder(tmp_path / "log"))
    prompt, text, num_told = "one two three four one two three four", "", 0
    for number in range(1, 16):
        # After the first request's output is known, each request stops at a longer prefix of it.
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, stop=[text[: 4 * number]] * bool(text))
        engine.add_request(str(number), {"prompt": prompt, "cache_salt": str(number)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                text = text or output.outputs[0].text * output.finished
                num_told += len(output.outputs[0].token_ids) * output.finished
    engine.close()
    assert engine.metrics.generated_tokens > num_told, "none was cut off"
    assert len(plans_of(tmp_path / "log")) > 15


def test_a_full_file_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "MIN_BYTES", 0)
    driver = Driver(tmp_path / "log", max_bytes=12_000)
    driver.run(500)
    assert (tmp_path / "log").stat().st_size < 12_100
    made = plans_of(tmp_path / "log")
    assert made == driver.plans[: len(made)] and len(made) > 50
    assert [record.message for record in caplog.records] == [
        f"the recording ends: {tmp_path / 'log'} has 12000 bytes (--record-max-bytes)"
    ]


def test_a_redacted_recording_holds_no_token(tmp_path: Path) -> None:
    for is_redacted in (False, True):
        secret = array("i", [1_234_567 + number for number in range(64)])
        request = Request(
            sequence_id=1, tokens=secret, num_prompt=len(secret), limit=70, stop_ids=(NO_TOKEN - 1,), name="one"
        )
        path = tmp_path / f"{is_redacted}"
        core = RecordedScheduler(LIMITS, FileRecorder(path, is_redacted=is_redacted))
        core.add([request])
        for _ in range(4):
            plan = core.plan(0.0)
            core.commit(plan, np.full(len(plan.slots), 2_345_678, np.int32))
        data = path.read_bytes()
        for token in (1_234_567, 2_345_678):
            assert (np.int32(token).tobytes() in data) is not is_redacted
            assert msgpack.packb(token) not in data
        # Nor does the recording contain the digest of the prompt, which would confirm a guess.
        assert not any(digest in data for digest in digests_of(request, LIMITS, (), 64))


def test_a_plan_that_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    path = tmp_path / "log"
    Driver(path).run(50)
    entries = list(msgpack.Unpacker(path.open("rb"), strict_map_key=False))
    place = [place for place, entry in enumerate(entries) if entry[0] == Kind.PLAN][20]
    entries[place][-1] ^= 1  # a table like another scheduler's
    path.write_bytes(b"".join(map(msgpack.packb, entries)))
    moments = list(Replay(path).moments())
    assert moments[-1].difference is not None and "checksum" in moments[-1].difference
    assert cli.main(["replay", str(path)]) == 1


@pytest.mark.parametrize("part", ["header", "events", "end"])
def test_a_recording_of_a_killed_process_is_replayed_to_its_end(
    tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    driver = Driver(path)
    driver.run(50)
    data = path.read_bytes()
    path.write_bytes(data[: {"header": 20, "events": len(data) - 3, "end": len(data)}[part]])
    assert cli.main(["replay", str(path)]) == (0 if part == "end" else 1)
    out, err = capsys.readouterr()
    assert ("no end mark: its process was killed" in out) is (part != "header")
    assert (f"{path} breaks off at byte {path.stat().st_size}" in err) is (part != "end")
    made = re.search(r"all (\d+) plans are the same", out)
    assert (part != "header") is (made is not None and int(made[1]) >= len(driver.plans) - 2)


def test_a_restarted_process_keeps_the_recording_of_the_one_before(tmp_path: Path) -> None:
    first = Driver(tmp_path / "log", 1)
    first.run(30)
    first.core.close()
    second = Driver(tmp_path / "log", 2)
    second.run(30)
    assert plans_of(tmp_path / "log.old") == first.plans
    assert plans_of(tmp_path / "log") == second.plans
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(tmp_path / "log")
    driver.run(20)

    class Full:
        def write(self, _: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    driver.recorder.file = Full()  # type: ignore[assignment]
    driver.run(50)
    assert len(driver.plans) > 60
    assert [record.message for record in caplog.records] == [
        f"the recording ends: {tmp_path / 'log'}: No space left on device"
    ]


def test_where_nothing_can_be_written_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        FileRecorder(tmp_path / "file" / "log")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"text, and no recording", "no recording|damaged"),
        (msgpack.packb(["jaxllm recording", 99, {}]), "format 99"),
        (msgpack.packb(["another", 2, {}]), "not a recording"),
        (msgpack.packb(["jaxllm recording", recording.FORMAT, {"jaxllm": 1}]), "damaged"),
        (b"\x9f" * 100_000, "damaged"),
    ],
)
def test_what_is_no_recording_is_refused(
    tmp_path: Path, data: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        list(Replay(path).moments())
    assert cli.main(["replay", str(path)]) == 1
    assert capsys.readouterr().err.startswith("jaxllm: error: ")


HEADER = {"jaxllm": "0", "started": 1e9, "is_redacted": False, "limits": {}, "about": {}}


@pytest.mark.parametrize(
    "changes",
    [
        *({"started": started} for started in ("x", True, float("nan"), float("inf"), 1e300, -1e300, -1, 1 << 63)),
        *({"about": about} for about in ([1], "x", {"x": [1]}, {1: "x"})),
        *({name: [1]} for name in ("jaxllm", "is_redacted", "limits")),
        {"more": 1},
    ],
)
def test_a_header_of_other_kinds_is_refused(
    tmp_path: Path, changes: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(msgpack.packb(["jaxllm recording", recording.FORMAT, HEADER | changes]))
    assert cli.main(["replay", str(path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"jaxllm: error: {path} is damaged at event 0: its header") and told.count("\n") == 1


@pytest.mark.parametrize("entry", [[99, 1], [[], 1], ["x", 1], [0, "x"], [1, 1], [2, 1, 5], [0, 1, {}], [0, 1, [5]]])
def test_a_damaged_entry_is_told_without_pythons_words(tmp_path: Path, entry: list[object]) -> None:
    path = tmp_path / "log"
    path.write_bytes(msgpack.packb(["jaxllm recording", recording.FORMAT, HEADER]) + msgpack.packb(entry))
    with pytest.raises(UserError) as caught:
        list(Replay(path).moments())
    assert not re.search(r"Error|\bint\b|\blist\b|Kind|jaxllm\.|__", str(caught.value).replace(str(path), ""))


@pytest.mark.parametrize("damage", ["none", "too many", "of fewer rows", "half a number", "text", "no counts"])
def test_damaged_counts_of_sampled_tokens_are_told(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log"
    Driver(path, limits=DRAFTING).run(60)
    entries = list(msgpack.Unpacker(path.open("rb"), strict_map_key=False))
    entry = next(entry for entry in entries if entry[0] == Kind.COMMIT and entry[-1] is not None)
    sampled = np.frombuffer(entry[-1], np.int32)
    entry[-1] = {
        "none": np.zeros_like(sampled).tobytes(),
        "too many": (sampled + DRAFTING.max_drafts).tobytes(),
        "of fewer rows": entry[-1][4:],
        "half a number": entry[-1][:-2],
        "text": "one",
        "no counts": entry[-1],
    }[damage]
    if damage == "no counts":
        entry[-2] = None
    path.write_bytes(b"".join(map(msgpack.packb, entries)))
    with pytest.raises(UserError, match="damaged at event"):
        list(Replay(path).moments())


def test_foreign_names_neither_end_a_line_nor_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "\x1b[31m\nall 9 plans are the same\r\x9b"
    driver = Driver(tmp_path / "log", about={f"a{name}": f"b{name}"})
    driver.core.add([replace(driver.request(), name=f"c{name}")])
    driver.run(20)
    driver.core.abort({next(iter(driver.core.requests)): f"d{name}"})
    for flags in ((), ("--plans",), ("--at", "1"), ("--request", "c"), ("--json",)):
        assert cli.main(["replay", str(tmp_path / "log"), *flags]) == 0
        shown = capsys.readouterr().out
        assert r"\x1b[31m\nall" in shown or "--json" in flags
        lines = shown.removesuffix("\n").split("\n")
        assert all(line.isprintable() and not line.startswith("all 9") for line in lines)
    entries = list(msgpack.Unpacker(io.BytesIO((tmp_path / "log").read_bytes()), strict_map_key=False))
    next(entry for entry in entries if entry[0] == Kind.PLAN)[2] = name
    (tmp_path / "log").write_bytes(b"".join(map(msgpack.packb, entries)))
    assert cli.main(["replay", str(tmp_path / "log")]) == 1
    assert capsys.readouterr().err.removesuffix("\n").isprintable()


def test_the_command_tells_plans_states_and_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "log")
    driver = Driver(tmp_path / "log")
    driver.run(120, num_requests=20)

    def told(*arguments: str) -> str:
        assert cli.main(["replay", path, *arguments]) == 0
        return capsys.readouterr().out

    assert f"all {len(driver.plans)} plans are the same as the server's" in told()
    assert len(told("--plans").splitlines()) >= len(driver.plans)
    state = told("--at", "30")
    assert "plan 30 " in state and "slot" in state and "blocks:" in state and "adapters, " in state
    assert "plan" in told("--at", "0.050s")
    story = told("--request", "request-3")
    assert "arrives" in story and "gets slot" in story
    events = [json.loads(line) for line in told("--json").splitlines()]
    assert {"add", "plan", "commit"} <= {event["event"] for event in events}
    own = [json.loads(line) for line in told("--json", "--request", "request-3").splitlines()]
    assert {one for event in own for one in event.get("tokens", {})} <= {"3"}
    assert cli.main(["replay", path, "--at", "99999"]) == 2
    assert cli.main(["replay", path, "--request", "nobody"]) == 2
    assert "the recording has no request nobody" in capsys.readouterr().err
    assert cli.main(["replay", path, "--at", "1", "--request", "request-20"]) == 2
    assert "there is no request request-20 at 0.00" in capsys.readouterr().err
    for name in "cmpl-request-3", "chatcmpl-request-3":
        assert told("--request", name) == story


def test_a_request_is_found_by_each_of_its_names() -> None:
    request = Request(sequence_id=1, tokens=array("i", [3]), num_prompt=1, limit=2, name="9255563d (my-req)")
    moment = Moment(0, 0.0, Kind.ADD, initial(LIMITS), added=(request,))
    for name in "9255563d", "9255", "cmpl-9255563d", "chatcmpl-9255563d", "my-req", "9255563d (my-req)":
        assert Story(name).take(moment) == {1: "9255563d (my-req)"}
    for name in "req", "5563d", "tcmpl-9255563d":
        assert Story(name).take(moment) == {}


def test_a_recording_in_which_nothing_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Driver(tmp_path / "log")
    assert cli.main(["replay", str(tmp_path / "log")]) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert lines == ["0.000 s: nothing happened", "all 0 plans are the same as the server's"]


@pytest.mark.ci
@pytest.mark.parametrize("flags", [(), ("--record-redacted",)])
def test_a_server_that_was_killed_is_replayed(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "incident"
    with ServingProcess("--record", str(path), *flags, *QUICK) as server:
        for number in range(3):
            body = {"prompt": "Once upon a time", "max_tokens": 20, "request_id": f"mine-{number}"}
            headers = {"Content-Type": "application/json", "X-Request-Id": f"theirs-{number}"}
            answer = urllib.request.urlopen(
                urllib.request.Request(f"{server.http}/v1/completions", json.dumps(body).encode(), headers)
            )
            assert answer.status == 200
        server.process.kill()
    assert cli.main(["replay", str(path)]) == 0
    told = capsys.readouterr().out
    assert "3 requests" in told and "are the same as the server's" in told
    assert ("as pseudonyms" in told) is bool(flags)
    for name in "mine-1", "cmpl-mine-1", "theirs-1":
        assert cli.main(["replay", str(path), "--request", name]) == 0
        told = capsys.readouterr().out
        assert "ends: " in told and "mine-1 (theirs-1)" in told
