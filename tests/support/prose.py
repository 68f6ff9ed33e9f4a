"""`make prose`: bound the phrases that make a reader stop, in the comments, docstrings and Markdown that a change adds.

A change is the difference between the working tree and the merge base with origin/main, or with main; on that branch
itself, or in a clone without it, the previous commit. Subjects of the commits since then have a bound as well.
`python -m tests.support.prose FILE ...` counts whole files. The patterns come from the phrases that manuals of JAX,
Starlette and h11 avoid: each of those projects has fewer than 7 of them per 1,000 words.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

MOST_PER_1000 = 5.0
SUBJECT_CHARACTERS = 72  # a subject is shorter
SKIPPED = re.compile(r"^docs/history/|_pb2|^jaxllm/v1/|^tests/golden")  # history, and generated text
PATTERNS = {
    "what … as a noun": r"what\b(?!ever)",
    "say, tell, hear, ask, know of things": r"(?:says?|said|tells?|told|hears?|heard|asks|asked|knows|knew)",
    "beside, behind, ahead, anew, meanwhile": r"(?:beside|behind|ahead|anew|meanwhile|afterwards|thereof|hardly)",
    "who, whom, whose, nobody, somebody": r"(?:who|whom|whose|whoever|(?:no|some|any|every)body)",
    "of its own, its own, of theirs": r"(?:of (?:its|their|our|your) own|of theirs|of ours|its own|their own)",
    "so many, as many, that much": r"(?:so|as|that) (?:many|much)",
    "there is, are there": r"(?:there (?:is|are|was|were)|that there|is there|are there)",
    "is none, or none": r"(?:is|are|has|have|where|of|or) none",
    "comes, goes, stands, lies": r"(?:comes?|came|goes|went|stands?|stood|lies|lay)\b(?! from)",
}
_PATTERNS = {name: re.compile(rf"\b{pattern}\b", re.IGNORECASE) for name, pattern in PATTERNS.items()}
_CODE = re.compile(r"`[^`]*`|https?://\S+|\[[^\]]*\]\([^)]*\)")
_HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")


class Allowed(NamedTuple):
    """A line whose phrases do not count."""

    path: str
    text: str  # a part of the line
    reason: str


# A line that has a phrase for a good reason, as a quotation; an entry whose line is gone is an error.
ALLOWED: tuple[Allowed, ...] = ()


class Line(NamedTuple):
    """A line of prose."""

    path: str
    number: int
    text: str

    @property
    def words(self) -> int:
        """The number of words outside of code and links."""
        return len(re.findall(r"[A-Za-z']+", _CODE.sub(" ", self.text)))

    @property
    def phrases(self) -> list[str]:
        """The names of the patterns in this line, one for each match."""
        if any(self.path == entry.path and entry.text in self.text for entry in ALLOWED):
            return []
        plain = _CODE.sub(" ", self.text)
        return [name for name, pattern in _PATTERNS.items() for _ in pattern.findall(plain)]


def prose(path: str, source: str, numbers: set[int] | None = None) -> Iterator[Line]:
    """Yield the lines of comments, docstrings or Markdown (without code blocks and tables), `numbers` only."""
    lines = source.splitlines()
    if path.endswith(".md"):
        found = _of_markdown(lines)
    else:
        # Reading all tokens is slow, and a change without a # adds no comment.
        has_comment = any("#" in line for number, line in enumerate(lines, 1) if numbers is None or number in numbers)
        found = (*_docstrings(source, lines), *(_comments(source) if has_comment else ()))
    for number, text in sorted(found):
        if numbers is None or number in numbers:
            yield Line(path, number, text)


def _of_markdown(lines: list[str]) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.lstrip().startswith("|"):
            yield number, line


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def _docstrings(source: str, lines: list[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                for number in range(first.lineno, (first.end_lineno or first.lineno) + 1):
                    yield number, lines[number - 1].strip(' "')


def added(diff: str) -> dict[str, set[int]]:
    """Return the numbers of the lines that a diff without context adds, by file."""
    found: dict[str, set[int]] = {}
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line[6:]
        elif (hunk := _HUNK.match(line)) is not None:
            start, count = int(hunk[1]), int(hunk[2] or 1)
            found.setdefault(path, set()).update(range(start, start + count))
    return found


def base() -> str | None:
    """Return the commit that a change is compared with; None in a clone of one commit."""
    head = _git("rev-parse", "HEAD")
    for branch in ("origin/main", "main"):
        commit = _git("merge-base", "HEAD", branch)
        if commit and commit != head:
            return commit
    return _git("rev-parse", "--verify", "--quiet", "HEAD~1") or None


def changed(commit: str) -> list[Line]:
    """Return the prose that was added since a commit, untracked files included."""
    by_file: dict[str, set[int] | None] = {**added(_git("diff", "-U0", "-M", commit, "--", "*.py", "*.md"))}
    new = _git("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.md")
    by_file |= dict.fromkeys(new.splitlines())
    return list(_lines(by_file.items()))


def _lines(files: Iterable[tuple[str, set[int] | None]]) -> Iterator[Line]:
    for path, numbers in files:
        if not SKIPPED.search(path) and (ROOT / path).is_file():
            yield from prose(path, (ROOT / path).read_text(), numbers)


def long_subjects(commit: str) -> list[str]:
    """Return the subjects of commits since another one that are too long; those of merges are git's."""
    subjects = _git("log", "--no-merges", "--format=%s", f"{commit}..HEAD").splitlines()
    return [subject for subject in subjects if len(subject) >= SUBJECT_CHARACTERS]


def unused() -> list[Allowed]:
    """Return the entries of the allow-list whose line is gone."""
    return [
        entry
        for entry in ALLOWED
        if not (ROOT / entry.path).is_file() or entry.text not in (ROOT / entry.path).read_text()
    ]


def problems(lines: list[Line], subjects: list[str]) -> list[str]:
    """Describe each violation. One phrase is always accepted, since a change of few words has no rate."""
    words, phrases = sum(line.words for line in lines), sum(len(line.phrases) for line in lines)
    found = []
    if phrases > max(1, MOST_PER_1000 * words / 1000):
        rate = 1000 * phrases / words
        found.append(f"{phrases} phrases in {words} words, {rate:.1f} per 1,000, at most {MOST_PER_1000:g}; reword:")
        for line in lines:
            if line.phrases:
                found.append(f"  {line.path}:{line.number}: {line.text.strip()}  [{'; '.join(line.phrases)}]")
    found += [f"a commit subject has {len(text)} characters, not under 72: {text}" for text in subjects]
    return found + [f"remove from ALLOWED, the line is gone: {entry.path}: {entry.text}" for entry in unused()]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    """Check a change, or print the figures of whole files."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Reword the lines; for one that cannot be reworded add an entry to ALLOWED."
    )
    parser.add_argument("files", nargs="*", type=Path, help="count these instead of a change")
    parser.add_argument("--base", help="the commit to compare with")
    options = parser.parse_args()
    if options.files:
        paths = (str(path.resolve().relative_to(ROOT)) for path in options.files)
        lines, subjects = list(_lines((path, None) for path in paths)), []
    else:
        commit = options.base or base()
        if commit is None:
            print("prose: the clone has no earlier commit to compare with")
            return 0
        lines, subjects = changed(commit), long_subjects(commit)
    found = problems(lines, subjects)
    words, phrases = sum(line.words for line in lines), sum(len(line.phrases) for line in lines)
    print("\n".join((*found, f"prose: {words} words, {phrases} phrases")))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
