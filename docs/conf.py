"""Settings of Sphinx: the Markdown pages of this folder, and a page for every public name, from its docstring."""

import numpydoc.xref

import ascend_grad

project = "ascend_grad"
author = "ascend_grad developers"
copyright = author
version = release = ascend_grad.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
]
templates_path = ["_templates"]
# `name` is a link where it names something public, and code elsewhere.
default_role = "py:obj"

myst_heading_anchors = 3

autodoc_mock_imports = [
    "dask",
    "jax",
    "scipy",
    "sklearn",
    "torch",
]  # which are large, and only bases and decorators here
autodoc_typehints = "none"  # types stand in the docstrings, in words
autodoc_member_order = "bysource"
autosummary_generate = True
numpydoc_show_class_members = False  # the template of classes lists them
# Arguments that are missing, unknown or out of order, functions without a result, unknown or misplaced sections.
numpydoc_validation_checks = {"GL06", "GL07", "PR01", "PR02", "PR03", "RT01"}
# Nobody else makes these; a protocol is not called.
numpydoc_validation_exclude = {
    r"Error$",
    r"\.results\.",
    r"\.LossResult$",
    r"\.CrossEntropyOutput$",
    r"\.DeviceArray",
    r"\.Communicator$",
    r"LinearCrossEntropyImpl$",  # enum.IntEnum defines its parameters
}
# In the types of arguments and in lists of exceptions, only names of this package are links.
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"
numpydoc_xref_aliases = {name: f"ascend_grad.{name}" for name in ascend_grad.__all__}
numpydoc_xref_aliases |= {name: name for name in numpydoc.xref.DEFAULT_LINKS}

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = "ascend_grad"
html_show_sourcelink = False
html_show_copyright = False
