"""Directives that show what the code and the measurements have, so that no page repeats it.

`{options} NAME ...`: the options of methods, each with its default, what it accepts and its meaning.
`{accuracies} FILE ...`: accuracies of benchmarks/results/FILE.json, of the rows and columns in its options.
`{curves} SWEEP`: the figures benchmarks/results/curves_SWEEP_*.svg, after a sentence about them; nothing where there are none.
"""

import inspect
import json
import pathlib
import re
import statistics
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from fedjax_ssl import options
from fedjax_ssl.methods import METHODS

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results"
DEFAULTS = {name: inspect.signature(factory).parameters["options"].default for name, factory in METHODS.items()}
"""The options of each method; they are taken before autodoc writes its own text over defaults in signatures."""


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directives."""
    app.add_directive("options", OptionsOf)
    app.add_directive("accuracies", Accuracies)
    app.add_directive("curves", Curves)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def escaped(text: str) -> str:
    """Plain text as Markdown, whose code between backticks stays code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_\[\]<>|$\\])", r"\\\1", part) for part in parts)


class OptionsOf(SphinxDirective):
    """The options of one or more methods; those of a later one are shown where no earlier one has them."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """A definition list."""
        seen: set[str] = set()
        lines: list[str] = []
        names = self.arguments[0].split()
        for name in names:
            default = DEFAULTS[name]
            for key, field in type(default).model_fields.items():
                if key not in seen:
                    lines += self.entry(key, field, getattr(default, key), "" if name == names[0] else f"`{name}`: ")
                    seen.add(key)
        return self.parse_text_to_nodes("\n".join(lines or ["It has no options of its own."]))

    def entry(self, key: str, field: Any, default: Any, whose: str) -> list[str]:
        """One option."""
        value = str(default).lower() if isinstance(default, bool) else default
        marks = [mark for mark in field.metadata if isinstance(mark, options.ReadWhere)]
        needs = " or ".join(" and ".join(asked.words.format(one) for one, asked in mark.conditions.items()) for mark in marks)
        about = f"{whose}{escaped(field.description or '')} Accepts {escaped(options.accepted(field))}."
        return [f"`method.{key}={value}`", f": {about}{f' Used only with {escaped(needs)}.' if needs else ''}", ""]


class Accuracies(SphinxDirective):
    """Accuracies in %, mean and standard deviation over seeds, with the paper's in brackets where it is known."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar = {"rows": directives.unchanged_required, "columns": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """A table, with a line that says what it is from."""
        rows = [row.strip() for row in self.options["rows"].split(";")]
        wanted = [column.strip() for column in self.options.get("columns", "").split(";") if column.strip()]
        cells: dict[str, dict[str, str]] = {row: {} for row in rows}
        found: list[str] = []
        seeds: set[int] = set()
        for name in self.arguments[0].split():
            path = RESULTS / f"{name}.json"
            self.env.note_dependency(str(path))
            for result in (one for entry in json.loads(path.read_text())["runs"] for one in entry["results"]):
                row, column = result["case"]["row"], result["case"]["column"]
                if row in cells and (not wanted or column in wanted) and column not in cells[row]:
                    cells[row][column] = _cell(result)
                    found += [column] if column not in found else []
                    seeds.add(len(result["runs"]))
        if missing := [row for row, values in cells.items() if not values] + [one for one in wanted if one not in found]:
            raise self.error(f"{self.arguments[0]}: no {', '.join(missing)}")
        columns = wanted or found
        heads = [escaped(one) or "last round" for one in columns]
        lines = [f"| accuracy, % | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {escaped(row)} | {' | '.join(cells[row].get(one, '') for one in columns)} |" for row in rows]
        number = f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else str(max(seeds))
        note = f"Mean ± standard deviation over {number} seeds, last round." if max(seeds) > 1 else "One seed, last round."
        with_paper = any("[" in cell for values in cells.values() for cell in values.values())
        return self.parse_text_to_nodes("\n".join([*lines, "", f"{note}{' In brackets: the paper.' if with_paper else ''}"]))


def _cell(result: dict[str, Any]) -> str:
    """One accuracy."""
    values = [100 * run["accuracy"] for run in result["runs"] if run.get("accuracy") is not None]
    mean = f"{100 * result['accuracy_mean']:.1f}"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    paper = rf" \[{result['paper']}\]" if result.get("paper") else ""
    return mean + spread + paper


class Curves(SphinxDirective):
    """The figures of a sweep, whose curves are accuracies and pseudo-labels by round."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The sentence, and the figures."""
        figures = sorted(RESULTS.glob(f"curves_{self.arguments[0]}_*.svg"))
        if not figures:
            return []
        lines = [" ".join(self.content)]
        for path in figures:
            split = path.stem.removeprefix(f"curves_{self.arguments[0]}_").partition("_")[2].replace("_", " ")
            split = split.replace("Dir 3", "Dirichlet .3").replace("DIR DIR", "(DIR, DIR)")
            lines += [f"![{split}: accuracy and pseudo-labels by round](/../benchmarks/results/{path.name})", f"*{split}*"]
        return self.parse_text_to_nodes("\n\n".join(lines))
