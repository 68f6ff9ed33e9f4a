"""Find the placeholders of images in a prompt, and repeat each for the image's embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.errors import UserError


def marked(text: str, marks: tuple[str, str, str] | None) -> str:
    """Write the placeholder of each image into a text, as Gemma3Processor of transformers does.

    `marks`: the tokens before, for and after an image. The text has the first for each; None: no such tokens.
    """
    if marks is None:
        return text
    before, placeholder, after = marks
    whole = f"\n\n{before}{placeholder}{after}\n\n"
    first, *others = text.split(before)
    return first + "".join((before if rest.startswith(placeholder) else whole) + rest for rest in others)


def expanded(
    ids: Sequence[int], placeholder: int, lengths: Sequence[int], kind: str = "image"
) -> tuple[list[int], list[int]]:
    """Return token ids with a placeholder for each embedding, and each image's first position.

    `ids` have one placeholder for each image, or already one for each embedding. Raises UserError for other numbers.
    """
    count = sum(token == placeholder for token in ids)
    total = sum(lengths)
    if count not in (len(lengths), total):
        raise UserError(
            f"The prompt has {count} {kind} placeholders (token {placeholder}) for {len(lengths)} {kind}s; write one "
            f"for each {kind}, or one for each of their {total} embeddings.",
            "multi_modal_data",
        )
    repeats = list(lengths) if count == len(lengths) else [1] * total
    found: list[int] = []
    starts: list[int] = []
    left = iter(repeats)
    for token in ids:
        if token == placeholder:
            starts.append(len(found))
            found += [token] * next(left)
        else:
            found.append(token)
    if count == len(lengths):
        return found, starts
    firsts = [starts[sum(lengths[:index])] for index in range(len(lengths))]
    for first, length in zip(firsts, lengths, strict=True):
        if any(token != placeholder for token in found[first : first + length]):
            raise UserError(f"The placeholders of a {kind} must follow each other.", "multi_modal_data")
    return found, firsts
