"""The words of the manual and of messages: short sentences, and one word for one thing."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.stage import ROOT

LONGEST = 32
"""Words of a sentence. Two short ones are read faster than a longer one."""

PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "server" / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
]

MOST = 1500
"""Words of a page, without code and tables. A longer one is cut: one part teaches, the other lists."""

WHOLE = {
    "docs/complaints.md",  # a list of threads
    "docs/protocol.md",  # one who writes a client needs all of it
    "docs/reference/promises.md",  # a list of tests
}
"""Pages that are longer."""

SAY = {
    r"what becomes? of": "what happens to",
    r"whoever": "anyone who, or the client that",
    r"there are none of": "say it the other way round",
    r"that which|one that comes while": "name the thing",
    r"for ever": "forever",
    r"(is|are|was|were) to be": "should be, or must be",
    r"go(es)? on to work": "still works",
    r"hears? of|(is|are) told of by": "learns of, or is reported by",
    r"tells? of": "reports",
    r"as ever": "as usual",
    r"in the clear": "unencrypted",
    r"without an end": "endless",
    r"to be had": "available",
    r"also (when|where) ": "even if",
    r"(gives?|giving) (it|back the lock|the lock|its lock|a lock) back": "release",
    r"kept places?|places? in the queue": "position, or reserved position",
    r"patience": "timeout",
    r"park(s|ed|ing)?": "wait in the consumer",
    r"lock daemon|lock service process": "lock server",
}
"""What the manual does not say, and what it says instead."""

SAY_IN_PAGES = SAY | {
    r"simply|obviously|of course|basically|actually": "leave it out",
    r"in order to": "to",
    r"utili[sz]e[sd]?": "use",
    r"and/or": "say which",
    r"(those|all) who": "tasks that, waiters that, clients that",
    r"(servers?|keys?|locks?|leases?) (knows?|wants?|thinks?|hears?|believes?)": "has, accepts, or "
    "name the person or program that does",
    r"etc\.": "name the others, or say such as",
    r"above all such as|are such": "most often, or such as",
}
"""The same for pages: words that only make a sentence longer."""

SAY_IN_CODE = SAY | {
    r"(is|are|was|were|been|be) told of": "gets, learns, or is reported",
    r"hand(ed|s|ing)? on": "pass on, or hand over",
    r"nobody (else )?is there": "it is away, or gone",
    r"sent away": "refused",
    r"(?<=[.;] )who [^?:]{3,}": "say who it is: a waiter that, a client that",
}
"""The same for docstrings and comments of the product's code."""

CODE = re.compile(
    r"<!-- (begin: (?:\w+|\w+, .*?)) -->.*?<!-- end -->"  # made by a program that measures
    r"|<!--.*?-->|^ *```.*?^ *```|^(?: {4}|\t).*?$",
    re.DOTALL | re.MULTILINE,
)
QUOTED = re.compile(r'`[^`]*`|\]\([^)]*\)|"[^"]*"|<[^>]*>')
ENDS = re.compile(r"(?<=[.?!:;])[\"”)*_]*\s+")


def blocks(text: str) -> Iterator[str]:
    """The paragraphs, entries of lists, headings and cells of tables; without code."""
    block: list[str] = []
    for line in [*CODE.sub("\n", text).splitlines(), ""]:
        if block and (not line.strip() or re.match(r"\s*(?:[-*] |\d+\. |#|\|)", line)):
            yield " ".join(block)
            block = []
        if line.startswith("|"):
            yield from line.strip("|").split(" | ")
        elif line.strip():
            block.append(line.strip())


def long_sentences(text: str) -> list[str]:
    found = []
    for block in blocks(text):
        found += [
            each for each in ENDS.split(QUOTED.sub("x", block)) if len(each.split()) > LONGEST
        ]
    return found


def odd_words(text: str, say: dict[str, str] = SAY) -> list[str]:
    odd = re.compile(rf"\b(?:{'|'.join(say)})\b", re.IGNORECASE)
    plain = [block for each in blocks(text) if odd.search(block := QUOTED.sub("x", each))]
    return [
        f"{match[0]!r} (say: {instead}) in: {block}"
        for block in plain
        for words, instead in say.items()
        for match in re.finditer(rf"\b(?:{words})\b", block, re.IGNORECASE)
    ]


PRONOUN = re.compile(
    r"^\s{4,}\w+: (?:\.\.\. .*$|of \w.*$|(?:it|that|them|these|they|this|what|which|who|whose"
    r"|its own|one of them|see (?:there|above|below)|(?:to )?who \w+)\.$)",
    re.MULTILINE,
)
"""An argument that is described by what stands beside it."""

FRAGMENT = re.compile(r"^\.\.\. |^[Ww]ho [^?]*?[.:]$|(?<!\.)(?<!, )\.\.\.$", re.MULTILINE)
"""Of a docstring: the rest or the beginning of another one's sentence, or a riddle."""

STATEMENT_OF_WHO = re.compile(r"^Who [^?]*[.!:]$")
POINTING = re.compile(r"\b(?:see|as) (?:above|below)\b")

NOWHERE = re.compile(r"\[(?:here|link|this|this page)\]\(")


def dependent(text: str) -> list[str]:
    """What is understood only beside its neighbours, or only when it is read twice."""
    prose = CODE.sub("\n", text)
    cells = [
        cell
        for line in prose.splitlines()
        if line.startswith("|")
        for cell in QUOTED.sub("x", line).strip("|").split(" | ")
    ]
    sentences = [each for block in blocks(text) for each in ENDS.split(QUOTED.sub("x", block))]
    return [
        *(cell for cell in cells if POINTING.search(cell)),
        *(each for each in sentences if STATEMENT_OF_WHO.match(each)),
        *NOWHERE.findall(prose),
    ]


def repeated(text: str) -> list[str]:
    long = [block.strip() for block in blocks(text) if len(block.split()) > 12]
    return [block for block, number in Counter(long).items() if number > 1]


def texts_of(source: str) -> str:
    """The strings in this code, and the comments: lines of their own that follow each other are one."""
    found = [
        inspect.cleandoc(node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, text = token.start[0], token.string.lstrip("#: ").rstrip()
        is_alone = token.line.lstrip().startswith("#")
        if is_alone and row == last + 1:
            found[-1] += f" {text}"
        else:
            found.append(text)
        last = row if is_alone else -1
    return "\n\n".join(found)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def length(text: str) -> int:
    """Words that are read one after the other, and not looked up in a table."""
    lines = [line for line in CODE.sub("\n", text).splitlines() if not line.startswith("|")]
    return len(" ".join(lines).split())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_plain(page: Path) -> None:
    """Its sentences are short and stand alone, its words are the manual's, and none comes twice."""
    text = page.read_text()

    assert long_sentences(text) == []
    assert odd_words(text, SAY_IN_PAGES) == []
    assert dependent(text) == []
    assert repeated(text) == []
    assert (length(text) < MOST) is (name(page) not in WHOLE), "it is not read in one go"


def sources(folder: str) -> Iterator[tuple[str, str]]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert len(paths) > 50
    return ((name(path), path.read_text()) for path in paths)


@pytest.mark.parametrize("folder", ["celery_dflock", "server/dflockd"])
def test_code_is_plain(folder: str) -> None:
    """What it raises, logs and prints; docstrings and comments, those of private functions too.

    No argument is "it", and no docstring goes on with another one's sentence.
    """
    found = []
    for path, source in sources(folder):
        text = texts_of(source)
        odd = [*odd_words(text, SAY_IN_CODE), *long_sentences(text), *PRONOUN.findall(text)]
        odd += [each for each in blocks(text) if FRAGMENT.search(each)]
        found += [(path, each) for each in odd]

    assert found == []


def test_all_texts_of_code_are_found() -> None:
    source = '''"""Of whoever."""
# It is told
# of a turn.
X = 1  # Who waits.
"""What becomes of X."""
log("for ever")  # It waits; who asks gets it.
raise ValueError(f"{X} goes on to work")
'''
    assert [odd.split("'")[1] for odd in odd_words(texts_of(source), SAY_IN_CODE)] == [
        "whoever",
        "What becomes of",
        "for ever",
        "goes on to work",
        "is told of",
        "who asks gets it",
    ]


def test_the_checks_find_what_they_look_for() -> None:
    words = "word " * LONGEST
    text = f"Short. {words}{words}\n\n- Whoever waits\n  is told.\n\n| a | for ever |\n"
    code = f"```text\n{words}{words} whoever\n```\n\n    whoever {words}\n\n`whoever` asks.\n"

    assert len(long_sentences(text)) == 1
    assert [found.split("'")[1] for found in odd_words(text)] == ["Whoever", "for ever"]
    assert long_sentences(code) == odd_words(code) == []
    assert len(odd_words("It simply waits and/or fails.", SAY_IN_PAGES)) == 2
    assert (
        len(dependent("Who waits gets it.\n\nWho waits?\n\n| a | see below |\n\n[here](a.md)")) == 3
    )
    assert (
        len(FRAGMENT.findall("... and why.\n\nHow many...\n\nWho asks.\n\nThe run, who asks.")) == 3
    )
    defined = "    error: it.\n    token: of the grant,\n    key: the key of the lock.\n"
    assert PRONOUN.findall(defined) == ["    error: it.", "    token: of the grant,"]
    assert length(f"Two words.\n\n| a | cell |\n\n{code}") == len(
        ["Two", "words.", "`whoever`", "asks."]
    )
    assert len(repeated(f"{text}\n{text}")) == 1
