"""The site: Sphinx reads the pages of this folder, and the reference comes from the code.

`scripts/docs` builds it. Pages are Markdown that GitHub shows as well; a directive stands only
where a page is made from the code (reference.py) and where index.md names the pages in order.
"""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # this checkout, wherever axrt is installed

project = "axrt"
author = "the authors of axrt"
version = release = version_of("axrt")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference"]
exclude_patterns = ["_build", "figures"]

# Anchors as GitHub makes them, and the same links.
myst_heading_anchors = 4
myst_fence_as_directive: list[str] = []

smartquotes = False  # quotes are often code's

# Docstrings are Google's form, with `names` in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_use_ivar = True
python_use_unqualified_type_names = True
# -n asks for every name in a signature; those of torch and of inner modules have no page here.
nitpick_ignore_regex = [("py:.*", r"(?!axrt\.[A-Z]).*")]

html_theme = "furo"
html_title = f"axrt {release}"
html_copy_source = False
html_show_copyright = False
