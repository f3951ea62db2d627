"""How the manual is built: ``make docs``."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from celery_dflock import __version__

sys.path.insert(0, str(Path(__file__).parent))

import published

_repository = published.repository()
_urls = published.urls(_repository) if _repository else {}

project = "celery-dflock"
author = "The celery-dflock authors"
copyright = f"2026, {author}"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["images"]
highlight_language = "text"
# Two modules have an error of the same name, and docstrings name it without its module.
suppress_warnings = ["ref.python"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
default_role = "py:obj"

html_theme = "furo"
html_static_path = ["static"]
html_js_files = ["scrollable.js"]
html_css_files = ["site.css"]
html_title = f"celery-dflock {__version__}"
# Without the name of the repository, such as on your machine, pages have no link to their source.
html_baseurl = _urls.get("Documentation", "")
html_theme_options = (
    {
        "source_repository": _urls["Source"],
        "source_branch": "main",
        "source_directory": "docs/",
    }
    if _urls
    else {}
)
linkcheck_ignore = [r"http://127\.0\.0\.1.*", *(rf"{url}.*" for url in _urls.values())]
linkcheck_anchors = False


_PAGE = re.compile(r"`?\bdocs/([\w/-]+)\.md\b`?")


def _with_account(_app: Any, _page: str, source: list[str]) -> None:
    if _repository:
        source[0] = published.with_account(source[0], _repository)


def _with_links(_app: Any, page: str, source: list[str]) -> None:
    """The changelog names pages by their paths, for those who read the file."""
    if page == "changelog":
        text = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
        source[0] = _PAGE.sub(r"[\1](\1.md)", text.replace("# Changelog", "# Release notes", 1))


def _with_pages(*told: Any) -> None:
    """Docstrings do the same, for those who read the code."""
    lines: list[str] = told[-1]
    lines[:] = [_PAGE.sub(r":doc:`\1 </\1>`", line) for line in lines]


def _with_levels(
    _app: Any, _page: str, _template: str, context: dict[str, Any], _tree: Any
) -> None:
    """Sphinx makes headings of the captions in the sidebar, and does not say of which level."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )


_NAMED = {
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="All pages">',
    '<aside class="toc-drawer': '<aside aria-label="On this page" class="toc-drawer',
    '<div class="content-icon-container">': (
        '<div class="content-icon-container" role="region" aria-label="View of this page">'
    ),
    '<th class="head"><p></p></th>': "<td></td>",
    '<div id="search-results">': '<h1>Search</h1>\n<div class="found" id="search-results">',
}
"""What screen readers cannot use in the pages of the theme, and what they can."""


def _with_names(app: Any, _exception: Exception | None) -> None:
    """Name the landmarks of all pages, which the theme has in no template that can be replaced."""
    for path in Path(app.outdir).rglob("*.html") if app.builder.format == "html" else ():
        text = path.read_text()
        for theirs, ours in _NAMED.items():
            text = text.replace(theirs, ours)
        path.write_text(text)


def _with_images(app: Any, _exception: Exception | None) -> None:
    """Copy what pages show by HTML, a picture for each scheme: Sphinx copies those of Markdown."""
    if app.builder.format == "html":
        images = Path(app.srcdir, "images")
        shutil.copytree(images, Path(app.outdir, "images"), dirs_exist_ok=True)


def setup(app: Any) -> None:
    app.connect("build-finished", _with_images)
    app.connect("build-finished", _with_names)
    app.connect("html-page-context", _with_levels, priority=900)  # after the theme has made it
    app.connect("source-read", _with_account)
    app.connect("source-read", _with_links)
    app.connect("autodoc-process-docstring", _with_pages)
