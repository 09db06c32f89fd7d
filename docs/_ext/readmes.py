"""READMEs on the site: pages take them by `{include}`, and their links lead to the site's pages.

A link between READMEs becomes a link to the page, or the part of a page, that shows the target. A link to a module becomes one
to its documentation, and a link to any other file a download. Pages for `benchmarks/*.md` are written here, so that a new topic
needs no new file in `docs`, and so is the notebook, as Sphinx reads nothing outside of `docs`.
"""

import os
import pathlib
import re

from sphinx.application import Sphinx

DOCS = pathlib.Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
INCLUDE = re.compile(r"^```\{include\} (\S+)\n((?::.*\n)*)```", re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
NOTEBOOK = ROOT / "launch" / "tour.ipynb"
TEMPLATE = "report.md"  # from which those of benchmarks are written

_pages: dict[tuple[pathlib.Path, str], str] = {}
"""(README, anchor of a heading or "") -> where the site shows it, such as `commands.md#resume`."""


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers what is done before pages are read, and to each README."""
    app.connect("config-inited", lambda app, config: write_pages())
    app.connect("builder-inited", lambda app: find_pages())
    app.connect("include-read", adapt)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages() -> None:
    """Writes the notebook, and `results/<topic>.md` for each `benchmarks/<topic>.md`; a page whose topic is gone is removed."""
    write(DOCS / NOTEBOOK.name, NOTEBOOK.read_text())
    wanted = {path.name for path in (ROOT / "benchmarks").glob("*.md") if path.name != TEMPLATE}
    for path in DOCS.glob("results/*.md"):
        if path.name not in wanted:
            path.unlink()
    for name in wanted:
        write(DOCS / "results" / name, f"```{{include}} ../../benchmarks/{name}\n```\n")


def write(path: pathlib.Path, text: str) -> None:
    """Writes a generated page, unless it is there already: Sphinx then reads it anew only if it changed."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def find_pages() -> None:
    """Notes which page shows which headings of which README."""
    _pages.clear()
    _pages[NOTEBOOK, ""] = NOTEBOOK.name
    for page in sorted(DOCS.rglob("*.md")):
        docname = page.relative_to(DOCS).with_suffix("").as_posix()
        for target, given in INCLUDE.findall(page.read_text()):
            path = (page.parent / target).resolve()
            options = dict(re.findall(r":([\w-]+): *\"?(.*?)\"?$", given, re.MULTILINE))
            text = _part(marked(path.read_text()), options.get("start-after"), options.get("end-before"))
            headings = re.findall(r"^(#+) (.*)$", FENCE.sub("", text), re.MULTILINE)
            if (path, "") not in _pages or any(level == "#" for level, _ in headings):
                _pages[path, ""] = f"{docname}.md"
            _pages.update({(path, anchor(title)): f"{docname}.md#{anchor(title)}" for _, title in headings})
            # The heading that a page leaves out is the page's own.
            if (after := options.get("start-after", "")).startswith("#"):
                _pages[path, anchor(after.lstrip("#"))] = f"{docname}.md"


def methods() -> dict[str, str]:
    """The page of each method: the one that shows its options."""
    found = ((page, re.search(r"^```\{options\} (.*)$", page.read_text(), re.MULTILINE)) for page in DOCS.glob("methods/*.md"))
    return {name: f"methods/{page.name}" for page, names in found if names for name in names[1].split()}


def _part(text: str, after: str | None, before: str | None) -> str:
    if after:
        text = text.partition(after)[2]
    return text.partition(before)[0] if before else text


def marked(text: str) -> str:
    """A README with a comment before each heading, `% part (TITLE)`, by which pages take parts of it."""
    parts = FENCE.split(text)
    heading = re.compile(r"^##+ (.*)$", re.MULTILINE)
    return "".join(part if part.lstrip().startswith("```") else heading.sub(r"% part (\1)\n\n\g<0>", part) for part in parts)


def anchor(title: str) -> str:
    """The anchor that GitHub and MyST give a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def adapt(app: Sphinx, relative_path: pathlib.Path, parent: str, content: list[str]) -> None:
    """Rewrites the links of a README that is about to be included."""
    path = (DOCS / relative_path).resolve()
    parts = FENCE.split(marked(content[0]))
    parts = [part if part.lstrip().startswith("```") else LINK.sub(lambda link: _adapted(path, link), part) for part in parts]
    content[0] = "".join(parts)
    if path == ROOT / "README.md":  # its table of methods leads to their pages
        pages = methods()

        def linked(name: re.Match[str]) -> str:
            return f"[{name[0]}](/{pages[name[1]]})" if name[1] in pages else name[0]

        content[0] = re.sub(r"^\| `.*?\|", lambda cell: re.sub(r"`(\w+)`", linked, cell[0]), content[0], flags=re.MULTILINE)


def _adapted(readme: pathlib.Path, link: re.Match[str]) -> str:
    """A link as the site has it."""
    image, text, target = link.groups()
    if re.match(r"[a-z]+:", target):
        return link[0]
    text = LINK.sub(lambda inner: _adapted(readme, inner), text)
    name, _, heading = target.partition("#")
    path = (readme.parent / name).resolve() if name else readme
    if (path, "") in _pages:
        page = _pages.get((path, heading)) or f"{_pages[path, '']}#{heading}"  # Sphinx warns where the heading is not there
        return f"[{text}](/{page})"
    place = os.path.relpath(path, ROOT)
    if path.suffix == ".py" and place.startswith("fedjax_ssl/"):
        module = ".".join(pathlib.Path(place).with_suffix("").parts)
        return f"{{py:mod}}`{text.strip('`')} <{module}>`"
    return f"{image}[{text}](/../{place})"
