"""Settings of the site. Build it with `sphinx-build -W -b html docs OUT`, after `pip install -e ".[docs]"`."""

import pathlib
import sys
import tomllib

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext")]

project = "fedjax_ssl"
author = copyright = "the fedjax_ssl contributors"
version = release = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.viewcode", "sphinx_copybutton",
    "readmes", "tables", "modules", "docstrings",
]  # fmt: skip
exclude_patterns = ["_ext", "**.ipynb_checkpoints"]

nb_execution_mode = "off"  # a test runs the notebook
myst_enable_extensions = ["amsmath", "deflist", "dollarmath"]
myst_heading_anchors = 4  # links to a README's headings work as on GitHub
suppress_warnings = ["myst.header"]  # a part of a README may begin with a heading of the second level

add_module_names = False
autodoc_member_order = "bysource"
highlight_language = "none"  # where a README's block names no language
toc_object_entries = False  # they would be copied into the contents of every page
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
viewcode_line_numbers = True

html_theme = "furo"
html_title = "fedjax_ssl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
