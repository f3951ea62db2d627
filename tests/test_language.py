"""The words of the manual and of messages: short sentences, and one word for one thing."""

from __future__ import annotations

import ast
import importlib
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

API = (ROOT / "docs" / "reference" / "api.md").read_text()
NAMED = re.findall(r"^\.\. auto(?:class|function|module):: (\S+)", API, re.MULTILINE)

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

FRAGMENT = re.compile(r"^\.\.\. |^[Ww]ho [^?]*?[.:]$|(?<!\.)\.\.\.$", re.MULTILINE)
"""Of a docstring: the rest or the beginning of another one's sentence, or a riddle."""

STATEMENT_OF_WHO = re.compile(r"^Who [^?]*[.!:]$")
POINTING = re.compile(r"\b(?:see|as) (?:above|below)\b")
ENTRY = re.compile(r"    [*\w]+(?:, [*\w]+)*: ")
"""The first line of an entry in a section of a docstring."""

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


def strays(docstring: str) -> list[str]:
    """The lines of a section that begin no entry, and are not indented as the rest of one."""
    found, is_inside = [], False
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            is_inside = line in ("Args:", "Attributes:")
        elif is_inside and re.match(r"    \S", line) and not ENTRY.match(line):
            found.append(line)
    return found


def repeated(text: str) -> list[str]:
    long = [block.strip() for block in blocks(text) if len(block.split()) > 12]
    return [block for block, number in Counter(long).items() if number > 1]


def docstrings(named: str) -> Iterator[str]:
    """Those that the reference prints under this name."""
    module, _, attribute = named.rpartition(".")
    try:
        found = importlib.import_module(named)
        members = [found, *(getattr(found, each) for each in getattr(found, "__all__", dir(found)))]
    except ModuleNotFoundError:
        found = getattr(importlib.import_module(module), attribute)
        # Statically: to get `app` of a task class would bind it, and all that are derived from it.
        members = [
            found,
            *(value for each, value in inspect.getmembers_static(found) if each[0] != "_"),
        ]
    for member in members:
        where = getattr(member, "__name__" if inspect.ismodule(member) else "__module__", "")
        own = str(where).startswith(("celery_dflock", "dflockd"))
        if own and member.__doc__:
            yield inspect.cleandoc(member.__doc__)


def messages(source: str) -> str:
    """The texts in this code that are no docstrings, as paragraphs."""
    tree = ast.parse(source)
    described = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    texts = [
        node.value.strip()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in described
    ]
    return "\n\n".join(texts)


def docstrings_of(source: str) -> str:
    """The docstrings in this code, those behind constants too, as paragraphs."""
    return "\n\n".join(
        inspect.cleandoc(node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def comments_of(source: str) -> str:
    """The comments in this code as paragraphs: lines of their own that follow each other are one."""
    found: list[str] = []
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


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_sentences_are_short(page: Path) -> None:
    assert long_sentences(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_words_are_those_of_the_manual(page: Path) -> None:
    assert odd_words(page.read_text(), SAY_IN_PAGES) == []


def length(text: str) -> int:
    """Those that are read one after the other, and not looked up in a table."""
    lines = [line for line in CODE.sub("\n", text).splitlines() if not line.startswith("|")]
    return len(" ".join(lines).split())


@pytest.mark.parametrize("page", [page for page in PAGES if name(page) not in WHOLE], ids=name)
def test_a_page_is_read_in_one_go(page: Path) -> None:
    assert length(page.read_text()) < MOST


def test_no_page_is_left_whole_that_need_not_be() -> None:
    assert [each for each in WHOLE if length((ROOT / each).read_text()) < MOST] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_nothing_is_said_twice(page: Path) -> None:
    """A merge that takes both sides of a page leaves the same text there twice."""
    assert repeated(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_sentences_and_cells_stand_alone(page: Path) -> None:
    """A reader who comes by a link or a search does not read what stands before them."""
    assert dependent(page.read_text()) == []


@pytest.mark.parametrize("named", NAMED)
def test_no_argument_is_described_by_a_pronoun(named: str) -> None:
    assert [found for text in docstrings(named) for found in PRONOUN.findall(text)] == []


@pytest.mark.parametrize("named", NAMED)
def test_words_of_the_reference_are_those_of_the_manual(named: str) -> None:
    texts = list(docstrings(named))

    assert texts
    assert [found for text in texts for found in odd_words(text) + long_sentences(text)] == []


def test_words_of_messages_are_those_of_the_manual() -> None:
    """What is raised, logged and printed."""
    folders = (ROOT / "celery_dflock", ROOT / "server" / "dflockd")
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    found = [(name(path), odd) for path in paths for odd in odd_words(messages(path.read_text()))]

    assert len(paths) > 100
    assert found == []


@pytest.mark.parametrize("folder", ["celery_dflock", "server/dflockd"])
def test_docstrings_and_comments_are_plain(folder: str) -> None:
    """Those of private functions too: somebody reads them for the first time."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = []
    for path in paths:
        source = path.read_text()
        described, commented = docstrings_of(source), comments_of(source)
        odd = odd_words(described, SAY_IN_CODE) + odd_words(commented, SAY_IN_CODE)
        found += [
            (name(path), each) for each in odd + long_sentences(f"{described}\n\n{commented}")
        ]

    assert len(paths) > 50
    assert found == []


@pytest.mark.parametrize("folder", ["celery_dflock", "server/dflockd"])
def test_docstrings_define_without_riddles(folder: str) -> None:
    """Of all code: no argument is "it", and no docstring goes on with another one's sentence.

    Nor does a line of a section look like another argument.
    """
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = []
    for path in paths:
        described = docstrings_of(path.read_text())
        found += [(name(path), each) for each in PRONOUN.findall(described)]
        found += [(name(path), each) for each in blocks(described) if FRAGMENT.search(each)]
        found += [(name(path), each) for each in strays(described)]

    assert len(paths) > 50
    assert found == []


BRANCH = re.compile("[├└]")


def test_a_drawing_has_a_line_for_each_branch() -> None:
    """What fills paragraphs anew would join them."""
    lines = [
        (name(path), line)
        for folder in ("celery_dflock", "server/dflockd")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in path.read_text().splitlines()
    ]
    assert sum(bool(BRANCH.search(line)) for _, line in lines) >= 5
    assert [(page, line) for page, line in lines if len(BRANCH.findall(line)) > 1] == []


def test_docstrings_are_found() -> None:
    source = '"""Of whoever."""\nX = 1\n"""What becomes of X."""\nlog("for ever")\n'

    assert docstrings_of(source) == "Of whoever.\n\nWhat becomes of X."
    assert len(odd_words(docstrings_of(source))) == 2


def test_comments_are_found() -> None:
    source = (
        "# It is told\n# of a turn.\nX = 1  # Who waits.\nY = 2  # It waits; who asks gets it.\n"
    )

    assert (
        comments_of(source) == "It is told of a turn.\n\nWho waits.\n\nIt waits; who asks gets it."
    )
    assert [odd.split("'")[1] for odd in odd_words(comments_of(source), SAY_IN_CODE)] == [
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
    args = "Args:\n    a, b: both,\n        for people.\n    c: it is cut\n    here.\n\nThe rest."
    assert strays(args) == ["    here."]
    assert length(f"Two words.\n\n| a | cell |\n\n{code}") == len(
        ["Two", "words.", "`whoever`", "asks."]
    )
    assert len(repeated(f"{text}\n{text}")) == 1
    source = 'def f():\n    """Whoever."""\n    raise ValueError(f"{1} waits for ever")'
    assert [found.split("'")[1] for found in odd_words(messages(source))] == ["for ever"]
