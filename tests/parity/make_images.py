"""Write tests/golden_images.json: what transformers computes for the random models of tests/support/vision_models.py.

python -m tests.parity.make_images
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.vision_models import TOWERS, prompts, write_llava

GOLDEN_IMAGES = ROOT / "tests" / "golden_images.json"
NUM_TOKENS = 32


class Peer:
    """A model in transformers, with its own image processor."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import LlavaForConditionalGeneration
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        self.torch = torch
        kind = json.loads((folder / "preprocessor_config.json").read_text())["image_processor_type"]
        processor = CLIPImageProcessorPil if kind.startswith("CLIP") else SiglipImageProcessorPil
        self.processor: Any = processor.from_pretrained(folder)
        self.model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        self.num_tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2

    def pixels(self, images: list[Any]) -> Any:
        return self.processor(images, return_tensors="pt")["pixel_values"]

    def inputs(self, prompt: Any) -> dict[str, Any]:
        """Return a prompt's ids, with repeated placeholders, and pixels."""
        ids = prompt if isinstance(prompt, list) else prompt["prompt_token_ids"]
        holder = self.model.config.image_token_id
        ids = [token for each in ids for token in [each] * (self.num_tokens if each == holder else 1)]
        given: dict[str, Any] = {"input_ids": self.torch.tensor([ids])}
        given["attention_mask"] = self.torch.ones_like(given["input_ids"])
        if isinstance(prompt, dict):
            given["pixel_values"] = self.pixels(prompt["multi_modal_data"]["image"])
        return given

    def logits(self, prompt: Any) -> Any:
        """Return the logits after each token of a prompt, float32[T, V]."""
        with self.torch.no_grad():
            return self.model(**self.inputs(prompt)).logits[0].numpy()

    def greedy(self, prompt: Any) -> list[int]:
        given = self.inputs(prompt)
        options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
        found = self.model.generate(**given, **options, eos_token_id=None, pad_token_id=0)
        return found[0, given["input_ids"].shape[1] :].tolist()


def main() -> None:
    """Write the file."""
    found: dict[str, Any] = {}
    for tower in TOWERS:
        with tempfile.TemporaryDirectory() as folder:
            peer = Peer(write_llava(Path(folder), tower))
            found[tower] = {
                "tokens": [peer.greedy(prompt) for prompt in prompts()],
                "logits": [peer.logits(prompt)[-1, :8].round(5).tolist() for prompt in prompts()],
            }
    GOLDEN_IMAGES.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
