"""Write tests/golden_images.json: what transformers computes for the random models of tests/support/vision_models.py.

python -m tests.parity.make_images
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.parity.media_peer import MediaPeer
from tests.support.paths import ROOT
from tests.support.vision_models import ANY_SIZE, BIDIRECTIONAL, TOWERS, prompts, write_model

GOLDEN_IMAGES = ROOT / "tests" / "golden_images.json"


class Peer(MediaPeer):
    """A model in transformers, with its own image processor."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForImageTextToText
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        self.torch = torch
        kind = json.loads((folder / "preprocessor_config.json").read_text())["image_processor_type"]
        kinds = {"C": CLIPImageProcessorPil, "S": SiglipImageProcessorPil, "Q": Qwen2VLImageProcessorPil}
        kinds["G"] = Gemma3ImageProcessorPil
        self.processor: Any = kinds[kind[0]].from_pretrained(folder)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    @property
    def is_bidirectional(self) -> bool:
        return hasattr(self.model.config, "mm_tokens_per_image")

    def read(self, images: list[Any]) -> dict[str, Any]:
        """Return pixels, and the sizes of images in patches if these vary."""
        found = dict(self.processor(images, return_tensors="pt"))
        found.pop("num_crops", None)
        return found

    def num_tokens(self, read: dict[str, Any]) -> list[int]:
        """Return the tokens of images."""
        vision = self.model.config.vision_config
        if self.is_bidirectional:
            return [self.model.config.mm_tokens_per_image] * len(read["pixel_values"])
        if "image_grid_thw" not in read:
            return [(vision.image_size // vision.patch_size) ** 2] * len(read["pixel_values"])
        return (read["image_grid_thw"].prod(-1) // vision.spatial_merge_size**2).tolist()

    def inputs(self, prompt: Any) -> dict[str, Any]:
        """Return a prompt's ids, with repeated placeholders, and pixels."""
        ids = prompt if isinstance(prompt, list) else prompt["prompt_token_ids"]
        given = self.read(prompt["multi_modal_data"]["image"]) if isinstance(prompt, dict) else {}
        lengths = iter(self.num_tokens(given) if given else ())
        holder = self.model.config.image_token_id
        ids = [token for each in ids for token in [each] * (next(lengths) if each == holder else 1)]
        tokens = self.torch.tensor([ids])
        if "image_grid_thw" in given:
            given["mm_token_type_ids"] = (tokens == holder).int()
        if self.is_bidirectional:
            given["token_type_ids"] = (tokens == holder).int()
        return given | {"input_ids": tokens, "attention_mask": self.torch.ones_like(tokens)}


def longer(prompt: Any, tokens: list[int]) -> Any:
    """Return a prompt with further tokens."""
    if isinstance(prompt, list):
        return prompt + tokens
    return prompt | {"prompt_token_ids": prompt["prompt_token_ids"] + tokens}


def main() -> None:
    """Write the file."""
    found: dict[str, Any] = {}
    for kind in (*TOWERS, *ANY_SIZE, *BIDIRECTIONAL):
        with tempfile.TemporaryDirectory() as folder:
            peer = Peer(write_model(Path(folder), kind))
            tokens = [peer.greedy(prompt) for prompt in prompts(kind)]
            whole = [longer(prompt, own[:-1]) for prompt, own in zip(prompts(kind), tokens, strict=True)]
            found[kind] = {
                "tokens": tokens,
                "logits": [peer.logits(prompt)[-1, :8].round(5).tolist() for prompt in prompts(kind)],
                "last": [peer.logits(prompt)[-1, :8].round(5).tolist() for prompt in whole],
            }
    GOLDEN_IMAGES.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
