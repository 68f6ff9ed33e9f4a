"""`make prose`: which lines count as prose, and which changes it refuses."""

from __future__ import annotations

import pytest

from tests.support import prose
from tests.support.prose import Allowed, Line

MODULE = '''"""Return what it is."""

# behind a comment
text = "# whose string"


def own():
    """Do it.

    Nobody knows.
    """
'''


def test_lines_of_a_module():
    assert [line.number for line in prose.prose("a.py", MODULE)] == [1, 3, 8, 9, 10, 11]
    assert [line.number for line in prose.prose("a.py", MODULE, {4, 10})] == [10]
    assert sum(len(line.phrases) for line in prose.prose("a.py", MODULE)) == 4


def test_lines_of_markdown():
    document = "text\n```sh\nwhat\n```\n| what |\nend\n"
    assert [line.text for line in prose.prose("a.md", document)] == ["text", "end"]


def test_code_and_links_are_no_prose():
    line = Line("a.md", 1, "Run `what` from [what it is](what.md) or https://what.is/what now")
    assert (line.words, line.phrases) == (4, [])


def test_added_lines():
    diff = "--- a/x.md\n+++ b/x.md\n@@ -3 +3,2 @@ heading\n+one\n+two\n@@ -9,2 +10,0 @@\n-gone\n@@ -20 +19 @@\n+three\n"
    assert prose.added(diff) == {"x.md": {3, 4, 19}}


def test_a_rate_above_the_bound_is_refused_with_its_lines():
    lines = [Line("a.md", 1, "what " * 2), Line("a.md", 2, "word " * 300)]
    (summary, place) = prose.problems(lines, [])
    assert "2 phrases in 302 words, 6.6 per 1,000" in summary
    assert place.startswith("  a.md:1: what what")
    assert not prose.problems([*lines, Line("a.md", 3, "word " * 200)], [])
    assert not prose.problems([Line("a.md", 1, "what")], [])  # a single hit has no rate


def test_an_allowed_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prose, "ALLOWED", (Allowed("README.md", "An inference engine", "it is a test"),))
    assert not Line("README.md", 1, "An inference engine, and what it does").phrases
    assert Line("README.md", 1, "An engine, and what it does").phrases
    assert not prose.unused()
    monkeypatch.setattr(prose, "ALLOWED", (Allowed("README.md", "no such line", "it is a test"),))
    assert prose.problems([], []) == ["remove from ALLOWED, the line is gone: README.md: no such line"]


def test_a_long_subject_is_refused():
    assert len(prose.problems([], ["x" * 72])) == 1
