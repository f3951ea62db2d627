"""How the manual is built: ``make docs``."""

import tomllib
from pathlib import Path

from celery_dflock import __version__

_project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
_source = _project["urls"]["Source"]

project = "celery-dflock"
author = _project["authors"][0]["name"]
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
html_title = f"celery-dflock {__version__}"
html_baseurl = _project["urls"]["Documentation"]
html_theme_options = {
    "source_repository": _source,
    "source_branch": "main",
    "source_directory": "docs/",
}
# Links to a file of the repository that is no page lead to the repository.
linkcheck_ignore = [r"http://127\.0\.0\.1.*", rf"{_source}.*", rf"{html_baseurl}.*"]
linkcheck_anchors = False
