"""Write tests/golden_sounds.json: outputs of transformers for the models of tests/support/sound_models.py.

python -m tests.parity.make_sounds
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from jaxllm.media.sound import RATE
from tests.parity.media_peer import MediaPeer
from tests.support.paths import ROOT
from tests.support.sound_models import KINDS, SECONDS, prompts, write_sound_model

GOLDEN_SOUNDS = ROOT / "tests" / "golden_sounds.json"


def exact(extractor: Any) -> Any:
    """Return a feature extractor with its numpy transform: torch's has errors of 4e-5 in quiet frames."""
    extractor._torch_extract_fbank_features = extractor._np_extract_fbank_features
    return extractor


class Peer(MediaPeer):
    """A model in transformers, with its feature extractor."""

    def __init__(self, folder: Path, kind: str) -> None:
        import torch
        from transformers import (
            Qwen2AudioForConditionalGeneration,
            VoxtralForConditionalGeneration,
            WhisperFeatureExtractor,
        )

        self.torch = torch
        torch.set_num_threads(1)
        self.is_masked = kind == "qwen2_audio"
        classes = {"qwen2_audio": Qwen2AudioForConditionalGeneration, "voxtral": VoxtralForConditionalGeneration}
        self.model: Any = classes[kind].from_pretrained(folder, dtype=torch.float32).eval()
        self.extractor: Any = exact(WhisperFeatureExtractor.from_pretrained(folder))

    def read(self, sounds: list[Any]) -> tuple[dict[str, Any], list[int]]:
        """Return features, and the tokens of sounds, as the model's processor in transformers computes them."""
        options = {"sampling_rate": RATE, "return_tensors": "pt"}
        if self.is_masked:
            found = self.extractor(sounds, padding="max_length", return_attention_mask=True, **options)
            mask = found["attention_mask"]
            lengths = [(((length - 1) // 2 + 1) - 2) // 2 + 1 for length in mask.sum(-1).tolist()]
            return {"input_features": found["input_features"], "feature_attention_mask": mask}, lengths
        window, features, lengths = SECONDS * RATE, [], []
        for sound in sounds:
            own = self.extractor(sound, padding=True, truncation=False, pad_to_multiple_of=window, **options)
            bands = own["input_features"].reshape(self.extractor.feature_size, -1, 100 * SECONDS).transpose(0, 1)
            features.append(bands)
            lengths.append(25 * SECONDS // 2 * len(bands))
        return {"input_features": self.torch.cat(features)}, lengths

    def embeddings(self, sound: Any) -> Any:
        """Return the rows of a sound's tokens, float32[N, D]."""
        given, (length,) = self.read([sound])
        model = self.model.model
        with self.torch.no_grad():
            if not self.is_masked:
                return model.get_audio_features(given["input_features"], return_dict=True).pooler_output.numpy()
            num_states = (given["feature_attention_mask"].sum(-1) - 1) // 2 + 1
            places = self.torch.arange(50 * SECONDS)
            mask = self.torch.zeros(1, 1, 1, len(places)).masked_fill(places >= num_states, -1e30)
            states = model.audio_tower(given["input_features"], attention_mask=mask).last_hidden_state
            return model.multi_modal_projector(states)[0, :length].numpy()

    def inputs(self, prompt: Any) -> dict[str, Any]:
        """Return a prompt's ids, with repeated placeholders, and features."""
        ids, given, lengths = prompt, {}, []
        if isinstance(prompt, dict):
            ids = prompt["prompt_token_ids"]
            given, lengths = self.read([samples for samples, _ in prompt["multi_modal_data"]["audio"]])
        left, holder = iter(lengths), self.model.config.audio_token_id
        ids = [token for each in ids for token in [each] * (next(left) if each == holder else 1)]
        tokens = self.torch.tensor([ids])
        return given | {"input_ids": tokens, "attention_mask": self.torch.ones_like(tokens)}


def main() -> None:
    """Write the file."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            peer = Peer(write_sound_model(Path(folder), kind), kind)
            found[kind] = {
                "tokens": [peer.greedy(prompt) for prompt in prompts(kind)],
                "logits": [peer.logits(prompt)[-1, :8].round(5).tolist() for prompt in prompts(kind)],
            }
    GOLDEN_SOUNDS.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
