"""Write tests/golden_seq2seq.json: what transformers computes for the random models of tests/support/seq2seq_models.py.

python -m tests.parity.make_seq2seq
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.seq2seq_models import KINDS, NUM_FRAMES, NUM_MELS, START, STOP, prompts, write_seq2seq

GOLDEN_SEQ2SEQ = ROOT / "tests" / "golden_seq2seq.json"
NUM_TOKENS, NUM_BEAM_TOKENS, WIDTH = 32, 12, 3


class Peer:
    """A model in transformers."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, WhisperFeatureExtractor

        self.torch = torch
        is_sound = AutoConfig.from_pretrained(folder).model_type == "whisper"
        kind: Any = AutoModelForSpeechSeq2Seq if is_sound else AutoModelForSeq2SeqLM
        self.model: Any = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor: Any = WhisperFeatureExtractor(feature_size=NUM_MELS) if is_sound else None
        if is_sound:
            self.processor.n_samples = 160 * NUM_FRAMES

    def inputs(self, prompt: Any) -> dict[str, Any]:
        decoder = [START, *prompt.get("decoder_prompt", {}).get("prompt_token_ids", [])]
        made = {"decoder_input_ids": self.torch.tensor([decoder])}
        if "multi_modal_data" in prompt["encoder_prompt"]:
            samples, rate = prompt["encoder_prompt"]["multi_modal_data"]["audio"]
            found = self.processor(samples, sampling_rate=rate, return_tensors="pt")["input_features"]
            return made | {"input_features": found}
        made["input_ids"] = self.torch.tensor([prompt["encoder_prompt"]["prompt_token_ids"]])
        return made | {"attention_mask": self.torch.ones_like(made["input_ids"])}

    def logits(self, prompt: Any) -> Any:
        """Return the logits after each token of the decoder's prompt, float32[T, V]."""
        with self.torch.no_grad():
            return self.model(**self.inputs(prompt)).logits[0].numpy()

    def generate(self, prompt: Any, count: int, **options: Any) -> tuple[list[list[int]], list[float]]:
        """Return the new tokens of each output, and scores of beams."""
        given = self.inputs(prompt)
        options = {"num_beams": 1, "eos_token_id": None} | options
        from transformers import GenerationMixin

        found: Any = GenerationMixin.generate(  # not Whisper's own, which divides long sound
            self.model,
            **given,
            **options,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        first = given["decoder_input_ids"].shape[1]
        scores = [] if options["num_beams"] == 1 else found.sequences_scores.tolist()
        return found.sequences[:, first:].tolist(), scores

    def greedy(self, prompt: Any) -> list[int]:
        return self.generate(prompt, NUM_TOKENS)[0][0]

    def beams(self, prompt: Any, width: int = WIDTH) -> tuple[list[list[int]], list[float]]:
        """Return the beams' tokens, without padding after the end, and their scores."""
        options = {"num_beams": width, "num_return_sequences": width, "eos_token_id": STOP, "length_penalty": 1.0}
        found, scores = self.generate(prompt, NUM_BEAM_TOKENS, **options, early_stopping=False)
        return [ids[: ids.index(STOP) + 1] if STOP in ids else ids for ids in found], scores


def main() -> None:
    """Write the file."""
    made: dict[str, Any] = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            peer = Peer(write_seq2seq(Path(folder), kind))
            made[kind] = {
                "tokens": [peer.greedy(prompt) for prompt in prompts(kind)],
                "beams": [peer.beams(prompt) for prompt in prompts(kind)],
            }
    GOLDEN_SEQ2SEQ.write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
