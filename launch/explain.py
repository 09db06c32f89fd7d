"""Explains a config's keys, or lists the methods, networks, datasets, splits, configs or sweeps.

    python -m launch.explain --config=digits:fl2 [KEY or GROUP ...] [--config.a.b=value ...]
    python -m launch.explain methods | networks | datasets | splits | configs | sweeps

Each key is printed with its value, its meaning, what it accepts and, unless every run uses it, what it is used with.
Exit status: 0 done; 2 wrong config or arguments.
"""

import ast
import inspect
import operator
import pathlib
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fedjax_ssl.options import accepted, as_text, fields_of, is_group, unknown_key

from . import arguments, command, config_file

if TYPE_CHECKING:  # what takes long to import is imported where it is used
    from fedjax_ssl.experiment.settings import Settings

LISTS = ("methods", "networks", "datasets", "splits", "configs", "sweeps")


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    words = argv[1:]
    try:
        if any(word.startswith("-") for word in words):
            config, options = arguments.parse(_parser(), words)
            lines = list(explained(config.tree, options.wanted))
        elif len(words) == 1 and words[0] in LISTS:
            from fedjax_ssl.report.tables import aligned

            lines = aligned(list(listed(words[0])))
        else:
            raise ValueError(f"got {' '.join(words) or 'nothing'}, accepted: --config=..., or one of {', '.join(LISTS)}")
    except command.WRONG_INPUT as error:
        return command.refuse(error)
    print("\n".join(lines))
    return 0


def _parser() -> arguments.Parser:
    parser = arguments.Parser("explain", __doc__, has_config=True)
    parser.add_argument("wanted", metavar="KEY", nargs="*", help=f"a key or a group, or one of {', '.join(LISTS)}")
    return parser


def listed(what: str) -> Iterator[tuple[str, str]]:
    """The names in one of LISTS, and what each is in a line."""
    if what == "configs":
        for name in config_file.names():
            source = pathlib.Path(config_file.CONFIGS, f"{name}.py").read_text()
            yield name, _first_line(ast.get_docstring(ast.parse(source)))
        return
    if what == "sweeps":
        yield from ((name, config_file.sweep(name, small=False).about) for name in config_file.sweep_names())
        return
    if what == "methods":
        from fedjax_ssl.methods import METHODS

        yield from ((name, _first_line(factory.__doc__)) for name, factory in METHODS.items())
    elif what == "networks":
        from fedjax_ssl.models import MODELS

        yield from ((name, _first_line(model.module.__doc__)) for name, model in MODELS.items())
    elif what == "splits":
        from fedjax_ssl.data.partition import PARTITIONS

        yield from ((name, _first_line(scheme.function.__doc__)) for name, scheme in PARTITIONS.items())
    else:
        from fedjax_ssl.data.catalog import DATASETS

        for name, known in DATASETS.items():
            yield name, f"{known.classes} classes, {known.kind}: {known.citation}"
        yield "npz", "a file of your own: arrays of images and labels"
        yield "image_folder", "a folder of your own: a folder of images for each class"
        yield "parquet", "a folder of your own: parquet files with a column of images, as Hugging Face's datasets has them"
        yield "hf/OWNER/NAME", "a dataset of images on the Hugging Face Hub"
        yield "text_features", "a file of your own: features of texts, from launch.text_features"
        yield "synthetic", "small random images of ten classes, for tests"


def explained(tree: dict[str, Any], wanted: list[str]) -> Iterator[str]:
    """Lines that explain the wanted keys or groups of a config, by default all; ValueError where one is unknown or wrong."""
    from fedjax_ssl.experiment import unread
    from fedjax_ssl.experiment.settings import Settings

    settings = Settings.from_dict(tree)
    settings = settings.model_copy(update={"data": settings.data.resolved()})
    known = dict(_keys(settings))
    for key in wanted:
        if not any(f"{one}.".startswith(f"{key}.") for one in known):
            groups = {one.rpartition(".")[0] for one in known} - {""}
            raise ValueError(unknown_key(key, [*known, *groups]))
    read_where = {key: unread.needs(asked) for key, asked in unread.readers(settings)}
    for key, (value, meaning, accepts) in known.items():
        if not wanted or any(f"{key}.".startswith(f"{one}.") for one in wanted):
            yield f"{key} = {as_text(value) or repr(value)}"
            yield from textwrap.wrap(meaning, 110, initial_indent="    ", subsequent_indent="    ")
            yield f"    accepts: {accepts}"
            if needs := read_where[key]:
                yield f"    used only with: {needs}"


def _keys(settings: "Settings") -> Iterator[tuple[str, tuple[Any, str, str]]]:
    """Each key with its value, its meaning and what it accepts."""
    for key, field in fields_of(settings):
        if not is_group(field):
            about = field.description or f"An option of the {'network' if key.startswith('model.') else 'method'}."
            yield key, (operator.attrgetter(key)(settings), about, accepted(field))


def _first_line(docstring: str | None) -> str:
    return inspect.cleandoc(docstring or "").partition("\n")[0]


if __name__ == "__main__":
    command.exit_with(main)
