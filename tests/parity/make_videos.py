"""Write tests/golden_videos.json: what transformers computes for videos, with models of tests/support/vision_models.py.

python -m tests.parity.make_videos
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tests.parity.make_images import Peer, longer
from tests.parity.media_peer import NUM_TOKENS
from tests.support import torchvision
from tests.support.paths import ROOT
from tests.support.vision_models import ANY_SIZE, AROUND, VIDEO, video_prompts, write_any_size

GOLDEN_VIDEOS = ROOT / "tests" / "golden_videos.json"


class VideoPeer(Peer):
    """A model in transformers, with its own processors of images and videos."""

    def __init__(self, folder: Path, as_trained: bool = True) -> None:
        """`as_trained`: with the positions below, instead of those of transformers."""
        torchvision.prepare()
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        super().__init__(folder)
        self.is_stamped = self.model.config.model_type == "qwen3_vl"
        kind: Any = Qwen3VLVideoProcessor if self.is_stamped else Qwen2VLVideoProcessor
        self.videos: Any = kind.from_pretrained(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if as_trained:
            self.model.model.get_rope_index = self._positions

    def read_videos(self, films: list[Any]) -> dict[str, Any]:
        """Return pixels, sizes in patches, and "video_metadata"; a film is frames with {"fps": …}."""
        frames = [film for film, _ in films]
        metadata = [{"total_num_frames": len(film), "frames_indices": [*range(len(film))], **of} for film, of in films]
        options: Any = {"return_tensors": "pt", "return_metadata": True, "input_data_format": "channels_last"}
        return dict(self.videos(frames, video_metadata=metadata, **options))

    def inputs(self, prompt: Any) -> dict[str, Any]:
        media = prompt.get("multi_modal_data", {}) if isinstance(prompt, dict) else {}
        ids = prompt if isinstance(prompt, list) else prompt["prompt_token_ids"]
        given = self.read(media["image"]) if media.get("image") else {}
        lengths, holder = iter(self.num_tokens(given) if given else ()), self.model.config.image_token_id
        films = self.read_videos(media["video"]) if media.get("video") else {}
        metadata = films.pop("video_metadata", [])
        left, found = iter(zip(metadata, films.get("video_grid_thw", ()), strict=True)), []
        for token in ids:
            found += (
                self._frames(*next(left)) if token == VIDEO else [token] * (next(lengths) if token == holder else 1)
            )
        if films and not self.is_stamped:
            films["second_per_grid_ts"] = self.torch.tensor([2 / each.sampled_fps for each in metadata])
        tokens = self.torch.tensor([found])
        kinds = (tokens == holder).int() + 2 * (tokens == VIDEO).int()
        if given or films:
            given = given | films | {"mm_token_type_ids": kinds}
        return given | {"input_ids": tokens, "attention_mask": self.torch.ones_like(tokens)}

    def _frames(self, metadata: Any, grid: Any) -> list[int]:
        """Return the tokens of a video in its prompt."""
        count, rows, columns = grid.tolist()
        each = [VIDEO] * (rows * columns // 4)
        if not self.is_stamped:
            return each * count
        from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

        own: Any = None
        times = Qwen3VLProcessor._calculate_timestamps(own, metadata.frames_indices, metadata.fps, 2)
        texts = (self.tokenizer.encode(f"<{time:.1f} seconds>", add_special_tokens=False).ids for time in times)
        return [token for text in texts for token in (*text, AROUND[0], *each, AROUND[1])]

    def _positions(
        self,
        input_ids: Any,
        mm_token_type_ids: Any = None,
        image_grid_thw: Any = None,
        video_grid_thw: Any = None,
        second_per_grid_ts: Any = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        """Return positions as Qwen2.5-VL was trained: what follows an image or video follows its greatest position.

        transformers 5 lets texts after a video follow its rows and columns only, and answers its time, too.
        """
        grids: dict[int, Any] = {1: iter(() if image_grid_thw is None else image_grid_thw.tolist()), 2: iter(())}
        if video_grid_thw is not None:
            whole = [(tuple(grid), at) for at, grid in enumerate(video_grid_thw.tolist())]
            split = [((1, *grid[1:]), at) for grid, at in whole for _ in range(grid[0])]
            grids[2] = iter(split if self.is_stamped else whole)
        found: list[Any] = []
        kinds, at, following = mm_token_type_ids[0].tolist(), 0, 0
        while at < len(kinds):
            if not kinds[at]:
                found.append((following,) * 3)
                at, following = at + 1, following + 1
                continue
            step = 0.0
            if kinds[at] == 1:
                count, rows, columns = next(grids[1])
            else:
                (count, rows, columns), number = next(grids[2])
                if not self.is_stamped:
                    rate = self.model.config.vision_config.tokens_per_second
                    step = np.float32(rate) * np.float32(second_per_grid_ts[number])
            own = [
                (following + int(np.float32(time) * np.float32(step)), following + row, following + column)
                for time in range(count)
                for row in range(rows // 2)
                for column in range(columns // 2)
            ]
            found += own
            at, following = at + len(own), max(map(max, own)) + 1
        positions = self.torch.tensor(found).T[:, None]
        return positions, self.torch.tensor([[following - len(kinds)]])


def main() -> None:
    """Write the file."""
    found: dict[str, Any] = {}
    for kind in ANY_SIZE:
        with tempfile.TemporaryDirectory() as folder:
            peer = VideoPeer(write_any_size(Path(folder), kind))
            given = video_prompts()
            tokens = [peer.greedy(prompt) for prompt in given]
            whole = [longer(prompt, own[: NUM_TOKENS - 1]) for prompt, own in zip(given, tokens, strict=True)]
            found[kind] = {
                "tokens": tokens,
                "logits": [peer.logits(prompt)[-1, :8].round(5).tolist() for prompt in given],
                "last": [peer.logits(prompt)[-1, :8].round(5).tolist() for prompt in whole],
            }
    GOLDEN_VIDEOS.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
