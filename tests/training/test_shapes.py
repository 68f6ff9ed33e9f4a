"""The model of shapes: its pictures, questions and rows of tokens, and the answers of the trained model."""

from __future__ import annotations

import io
import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from tokenizers import Tokenizer

from jaxllm import LLM
from jaxllm.commands import cli
from jaxllm.embedded import SHAPES_DIR
from jaxllm.media.image_part import ImagePart
from jaxllm.text.tokenizer import load_tokenizer
from tests.support.sizes import FEW_SLOTS, MANY_SLOTS
from training import picture_questions, talks
from training.captioner import Shape
from training.picture_questions import ASKED, Turn
from training.scenes import COLOURS, Item, arrangement, held_out_picture, picture

SCENE = (
    Item("red", "circle", 0.17, 0.17, 0.1),
    Item("blue", "circle", 0.8, 0.5, 0.12),
    Item("red", "square", 0.5, 0.83, 0.11),
)
EXPECTED = {
    "How many shapes are there?": "There are 3 shapes.",
    "How many circles are there?": "There are 2 circles.",
    "How many red shapes are there?": "There are 2 red shapes.",
    "How many blue circles are there?": "There is 1 blue circle.",
    "How many green squares are there?": "There are no green squares.",
    "What colour is the circle on the right?": "It is blue.",
    "What colour is the circle at the top left?": "It is red.",
    "What colour is the square?": "It is red.",
    "What colour is the triangle?": "There are no triangles.",
    "What colour is the circle?": "There are 2 circles.",
    "What is at the bottom?": "It is a red square.",
    "What is at the bottom left?": "Nothing is there.",
    "What shape is the blue one?": "It is a circle.",
    "Is there a blue circle?": "Yes.",
    "Is there a blue square?": "No.",
    "Are there any red squares?": "Yes.",
    "Where is the red circle?": "It is at the top left.",
    "Where is the square?": "It is at the bottom.",
    "Where is the circle?": "There are 2 circles.",
    "Is the red circle left of the blue circle?": "The red circle is at the top left, the blue circle on the right, so "
    "yes.",
    "Is the red square above the blue circle?": "The red square is at the bottom, the blue circle on the right, so no.",
    "Describe the picture.": "There is a red circle at the top left, a blue circle on the right and a red square at "
    "the bottom.",
}


def test_questions_have_their_one_answer() -> None:
    rng, found = random.Random(0), {}
    for kind, _ in itertools.product(ASKED, range(4000)):
        if (turn := picture_questions.ask(rng, kind, SCENE)) is not None:
            assert found.setdefault(turn.question, turn.answer) == turn.answer
    assert {question: found.get(question) for question in EXPECTED} == EXPECTED


def test_pictures_have_the_shapes_of_their_questions_and_none_is_trained() -> None:
    held_out = {arrangement(held_out_picture(3, number).items) for number in range(100)}
    for number in range(100):
        items, image = picture(3, number, 0.5)
        again = picture(3, number, 0.5)
        assert (items, image.tobytes()) == (again.items, again.image.tobytes())
        assert arrangement(items) not in held_out
        assert len({item.place for item in items}) == len(items)
        for one, other in itertools.combinations(items, 2):
            assert math.dist(one[2:4], other[2:4]) > one.radius + other.radius
        pixels = np.asarray(image, float)
        for item in items:
            own = pixels[int(item.y * image.height), int(item.x * image.width)]
            distances = {name: min(math.dist(own, color) for color in pair) for name, pair in COLOURS.items()}
            assert min(distances, key=lambda name: distances[name]) == item.colour


def test_rows_are_the_tokens_of_chats() -> None:
    """The training's tokens are those that the engine makes of messages by the template."""
    tokenizer, engine = Tokenizer.from_file(str(SHAPES_DIR / "tokenizer.json")), load_tokenizer(SHAPES_DIR)
    turns = (Turn("", "How many circles are there?", "There are 2 circles."), Turn("", "where is the Square", "It is…"))
    chat = picture_questions.Question("", Image.new("RGB", (9, 9)), turns, Turn("", "Is there a red square?", "No."))
    messages = chat.messages()
    messages[0]["content"] = [messages[0]["content"][1], ImagePart()]  # the template writes pictures first
    messages = [{"role": "system", "content": "Left out."}, *messages]
    _, ids = engine.encode_chat(messages)
    _, without = engine.encode_chat([{"role": "user", "content": turns[0].question}])
    before = len(tokenizer.encode(talks.USER).ids)
    row, weights = talks.encode(tokenizer, iter([*turns, chat.turn]), 128)
    assert ids[before] == talks.IMAGE_ID
    assert ids[before + 1 :] == row[: len(ids) - before - 1].tolist()
    answers = [each.answer + "<|im_end|>" for each in (*turns, chat.turn)]
    assert tokenizer.decode(row[weights == 1].tolist(), skip_special_tokens=False) == "".join(answers)
    blind, _ = talks.encode(tokenizer, iter(turns), 128, is_blind=True)
    assert blind[: len(without)].tolist() == without


def test_patches_are_labelled_with_their_shapes() -> None:
    found = talks.at_patches(SCENE, Shape())
    due = np.zeros((9, 5), np.float32)
    due[0], due[5], due[7] = (1, 0, 0, -0.99, -0.99), (1, 4, 5, 0.9, 0), (2, 0, 7, 0, 0.99)
    np.testing.assert_allclose(found, due, atol=1e-6)


def drawn(kind: str = "PNG") -> bytes:
    """Return a file with a large red circle, drawn otherwise than the training's."""
    image = Image.new("RGB", (300, 300), "white")
    ImageDraw.Draw(image).ellipse((90, 100, 190, 200), fill="red", outline="darkred", width=3)
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def test_a_chat_about_a_red_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "circle.png"
    path.write_bytes(drawn())
    lines = "What color is the circle?", "How many red circles are there?", "is there a blue square", "Count the shapes"
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines * 3)))
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in FEW_SLOTS.items()]
    assert cli.main(["chat", "--model", "jaxllm-shapes", "--image", str(path), *sizes]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["It is red.", "There is 1 red circle.", "No.", "There is 1 shape."] * 3
    assert "oldest messages were dropped" in shown.err  # and not the picture


def test_some_held_out_questions_are_answered() -> None:
    """Test five pictures of a seed that the README does not have."""
    from training.evaluate_shapes import evaluate

    with LLM("jaxllm-shapes", **FEW_SLOTS) as llm:
        scores = evaluate(llm, 2, 5)
    assert scores["all"]["asked"] >= 30 and scores["all"]["rate"] >= 0.85, scores


@pytest.mark.ci
def test_held_out_pictures_are_answered() -> None:
    """Test questions about pictures of a seed that the README does not have: the guaranteed kinds."""
    from training.evaluate_shapes import PROMISED, evaluate

    with LLM("jaxllm-shapes", **MANY_SLOTS) as llm:
        scores = evaluate(llm, 1, 60)
    assert all(scores[kind]["rate"] >= least - 0.03 for kind, least in PROMISED.items()), scores
