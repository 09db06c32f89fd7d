"""Fetches datasets ahead of a run, or lists which are there.

    python -m launch.prepare cifar10 svhn_cropped [--data_dir=DIR]
    python -m launch.prepare --list [--data_dir=DIR]

A dataset's original files are fetched once, resumed where a connection was cut, and checked against published checksums. They
are stored in DIR, by default in FEDJAX_SSL_DATA or `~/.cache/fedjax_ssl/data`. Exit status: 0 done; 2 wrong arguments, or a
dataset that cannot be fetched; 130 on Ctrl-C.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from fedjax_ssl.data import download
from fedjax_ssl.data.catalog import DATASETS, ORIGINALS
from fedjax_ssl.data.sources import originals, tfds
from fedjax_ssl.data.sources.checks import first_line
from fedjax_ssl.experiment.settings import DataSettings
from fedjax_ssl.report.tables import aligned

from . import arguments, command


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        options = _parser().parse_args(argv[1:])
        if bool(options.names) == options.list:
            got, accepted = ("names and --list", "one of both") if options.list else ("nothing", "a dataset's name, or --list")
            raise ValueError(f"NAME: got {got}, accepted: {accepted}")
        if options.list:
            print(listed(options.data_dir))
        for name in _checked(options.names):
            print(prepared(name, options.data_dir))
    except command.WRONG_INPUT as error:
        return command.refuse(error)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = arguments.Parser("prepare", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="datasets, such as cifar10; --list has all names")
    parser.add_argument("--data_dir", help="the folder to keep them in; it is made if it is missing")
    parser.add_argument("--list", action="store_true", help="list each dataset: whether it is there, its size, place and terms")
    return parser


def _checked(names: Sequence[str]) -> Sequence[str]:
    """The names; ValueError where one is none that can be fetched."""
    for name in names:
        if name not in ORIGINALS:
            raise ValueError(f"NAME: got {name}, accepted: {', '.join(ORIGINALS)}{command.hint(name, ORIGINALS)}")
    return names


def prepared(name: str, data_dir: str | None) -> str:
    """Fetches a dataset unless it is there; what there is then, in a line."""
    if (builder := tfds.prepared(name, data_dir)) is not None:
        return f"{name}: prepared by TFDS in {builder.data_dir}"
    begun = time.monotonic()
    found = download.obtain(name, data_dir)
    size = sum(path.stat().st_size for path in found.values())
    algorithm = ORIGINALS[name][0].checksum.partition(":")[0].upper()
    publishers = ", ".join(sorted({place.file.publisher for place in download.places(name, data_dir)}))
    where = next(iter(found.values())).parent
    line = f"{name}: {size:,} bytes in {where}, {algorithm} as {publishers} has it, {time.monotonic() - begun:.1f} s"
    return f"{line}; {originals.text_hint(found)}" if DATASETS[name].kind == "text_features" else line


def fetch_missing(data: Iterable[DataSettings]) -> None:
    """Fetches the datasets of runs that are not there, once each; FileNotFoundError or OSError where that cannot be."""
    for name, data_dir in dict.fromkeys((one.name, one.data_dir) for one in data if one.download and not one.path):
        if name in ORIGINALS and tfds.prepared(name, data_dir) is None:
            download.obtain(name, data_dir)


def listed(data_dir: str | None) -> str:
    """A line for each dataset: its name, whether it is there, its size, its place and its terms."""
    rows = [("name", "there", "size", "place", "terms")]
    rows += [(name, *_state(name, data_dir), about.terms) for name, about in DATASETS.items()]
    return "\n".join(aligned(rows))


def _state(name: str, data_dir: str | None) -> tuple[str, str, str]:
    """Whether a dataset is there, its size, and its place; sizes are compared, checksums when it is read."""
    if name not in ORIGINALS:
        return "yes", "", "scikit-learn"
    try:
        builder = tfds.prepared(name, data_dir)
    except (ValueError, OSError) as error:
        return "damaged", "", first_line(error)
    if builder is not None:
        return "yes, TFDS", download.shown(builder.info.dataset_size), str(builder.data_dir)
    places = download.places(name, data_dir)
    size = sum(place.file.size for place in places)
    wanted = download.shown(size) if size else "?"
    stored = [download.have(place.path) for place in places]
    if all(stored) and all(place.file.size in (0, size) for place, size in zip(places, stored, strict=True)):
        return "yes", download.shown(sum(stored)), str(places[0].path.parent)
    begun = sum(stored) + sum(download.have(download.part_of(place.path)) for place in places)
    return (f"{download.shown(begun)} of it" if begun else "no"), wanted, f"from {urlsplit(places[0].url).netloc}"


if __name__ == "__main__":
    command.exit_with(main)
