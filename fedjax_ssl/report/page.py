"""The report as one HTML page that works without a network, and as files beside it."""

import html
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fedjax_ssl.files import replacing
from fedjax_ssl.report import tables
from fedjax_ssl.report.figures import FORMATS, Picture
from fedjax_ssl.report.groups import slug
from fedjax_ssl.report.tables import Table

LISTED = "files.txt"
"""The names of what a report has written into its folder, so that the next one removes what it does not write."""


class Words(NamedTuple):
    """A paragraph, or, where there are several lines, a list."""

    lines: tuple[str, ...]


class Code(NamedTuple):
    """A command; `anchor` is what links lead to."""

    title: str
    text: str
    anchor: str


Item = Words | Code | Table | Picture


class Section(NamedTuple):
    """A part of the page."""

    title: str
    items: tuple[Item, ...]


CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
body { color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid #ccc; }
a { color: #00528a; }
p, li { max-width: 46rem; overflow-wrap: anywhere; }
nav ul { list-style: none; padding: 0; margin: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
nav a { display: inline-block; padding: .25rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
.figures { gap: 1.2rem; align-items: start; }
figure { margin: 0; max-width: 36rem; min-width: 0; }
figure.table { max-width: 100%; margin: 0 0 1.4rem; }
figure img { width: 100%; height: auto; display: block; }
figcaption { font-weight: 600; overflow-wrap: anywhere; margin-bottom: .2rem; }
figcaption small { display: block; font-weight: 400; color: #444; }
.scroll { overflow-x: auto; max-width: 100%; margin: .2rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .7rem; text-align: left; white-space: nowrap; font-weight: 400; }
thead th { font-weight: 600; border-top: 2px solid #1a1a1a; border-bottom: 1px solid #1a1a1a; vertical-align: bottom; }
tbody tr:last-child > * { border-bottom: 2px solid #1a1a1a; }
tbody tr:nth-child(even) > * { background: #f6f6f6; }
tr > :first-child { padding-left: 0; }
.number { text-align: right; }
.note { font-size: .85rem; color: #444; margin: 0; }
h3 { font-size: 1rem; margin: 1rem 0 .2rem; overflow-wrap: anywhere; }
pre { margin: 0; padding: .6rem; background: #f3f3f3; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
pre span { display: inline-block; max-width: 100%; }
:target { outline: 2px solid #0072b2; outline-offset: 4px; }
@media (max-width: 40rem) {
  th { white-space: normal; }
  tr > :first-child { position: sticky; left: 0; background: #fff; }
  tr > :first-child { min-width: 7rem; max-width: 10rem; overflow-wrap: break-word; }
}
@media print {
  nav { display: none; }
  body { max-width: none; font-size: 10pt; }
  figure, tr { break-inside: avoid; }
  .scroll { overflow: visible; }
}
"""


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page: a heading, a sentence, a table of contents and the sections."""
    contents = "".join(f'<li><a href="#{slug(one.title)}">{html.escape(one.title)}</a></li>' for one in sections)
    body = "\n".join(
        f'<section id="{slug(one.title)}"><h2>{html.escape(one.title)}</h2>\n{_items(one.items)}</section>' for one in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<header><h1>{html.escape(title)}</h1>
<p>{html.escape(lead)}</p>
<nav aria-label="Contents"><ul>{contents}</ul></nav></header>
<main>
{body}
</main>
</body>
</html>
"""


def _items(items: Sequence[Item]) -> str:
    """The items in their order; pictures that follow each other stand side by side."""
    shown: dict[type, Callable[[Any], str]] = {Picture: _figure, Table: tables.as_html, Code: _code, Words: _words}
    parts: list[str] = []
    for kind, same in itertools.groupby(items, type):
        found = list(map(shown[kind], same))
        parts += [f'<div class="figures">{"".join(found)}</div>'] if kind is Picture else found
    return "\n".join(parts)


def _figure(one: Picture) -> str:
    small = f"<small>{html.escape(one.caption)}</small>" if one.caption else ""
    image = f'<img src="{one.source}" alt="{html.escape(one.alt)}">'
    return f'<figure id="figure-{one.name}"><figcaption>{html.escape(one.title)}{small}</figcaption>{image}</figure>\n'


def _words(words: Words) -> str:
    if len(words.lines) == 1:
        return f"<p>{html.escape(words.lines[0])}</p>"
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in words.lines) + "</ul>"


def _code(code: Code) -> str:
    """A command that breaks between its arguments."""
    lines = [" ".join(f"<span>{html.escape(word)}</span>" for word in line.split(" ")) for line in code.text.splitlines()]
    shown = "\n".join(lines)
    return f'<h3 id="{code.anchor}">{html.escape(code.title)}</h3>\n<pre><code>{shown}</code></pre>'


def files(sections: Sequence[Section]) -> dict[str, bytes]:
    """Figures as SVG, PNG and PDF, and tables as text, CSV and LaTeX: name -> content."""
    items = [item for section in sections for item in section.items]
    found = pictures([item for item in items if isinstance(item, Picture)])
    for item in (item for item in items if isinstance(item, Table)):
        written = {"txt": tables.text(item), "csv": tables.comma_separated(item), "tex": tables.latex(item)}
        found |= {f"{item.name}.{suffix}": content.encode() for suffix, content in written.items()}
    return found


def pictures(drawn: Sequence[Picture]) -> dict[str, bytes]:
    """Figures as SVG, PNG and PDF: name -> content."""
    return {f"{one.name}.{suffix}": getattr(one, suffix) for one in drawn for suffix in FORMATS}


def folder_of(out: pathlib.Path) -> pathlib.Path:
    """The folder of a page's files, beside it."""
    return out.with_name(f"{out.stem}_files")


def write(out: pathlib.Path, html: str, files: dict[str, bytes]) -> None:
    """Writes everything; of an earlier report's files, those that this one does not have are removed."""
    folder = folder_of(out)
    folder.mkdir(exist_ok=True)
    listed = folder / LISTED
    earlier = listed.read_text().splitlines() if listed.is_file() else []
    for name in {pathlib.Path(line).name for line in earlier} - set(files):
        (folder / name).unlink(missing_ok=True)
    files = files | {LISTED: "".join(f"{name}\n" for name in sorted(files)).encode()}
    for path, content in [*((folder / name, content) for name, content in sorted(files.items())), (out, html.encode())]:
        with replacing(path) as file:
            file.write(content)
