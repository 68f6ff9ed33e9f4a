"""The models in the package: a tiny Llama with adapters and an EAGLE-3 head, an embedder, one that answers questions
about pictures of shapes, and one that writes spoken words, made by `training/`.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
EMBEDDER_DIR: Path = Path(__file__).resolve().parent / "embedder"
SHAPES_DIR: Path = Path(__file__).resolve().parent / "shapes"
SPEECH_DIR: Path = Path(__file__).resolve().parent / "speech"
# By the names under which the server reports them.
SHIPPED: dict[str, Path] = {
    "jaxllm-embedded": MODEL_DIR,
    "jaxllm-embedder": EMBEDDER_DIR,
    "jaxllm-shapes": SHAPES_DIR,
    "jaxllm-speech": SPEECH_DIR,
}
# LoRA adapters of the model, by request name.
ADAPTERS: dict[str, Path] = {name: Path(__file__).resolve().parent / name for name in ("pirate", "tools")}
# EAGLE-3 heads that draft for the model, by request name.
HEADS: dict[str, Path] = {"jaxllm-eagle": Path(__file__).resolve().parent / "eagle"}
