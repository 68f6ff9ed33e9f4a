"""Decoders in this process, for tests of their results."""

from __future__ import annotations

import pytest

from jaxllm.media import films, sound_files
from tests.fuzz.videos import InProcess, SoundInProcess


@pytest.fixture
def decoders_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(films, "RecordingProcess", InProcess)
    monkeypatch.setattr(sound_files, "SoundProcess", SoundInProcess)
