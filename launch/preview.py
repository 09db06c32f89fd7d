"""Shows a config's split, without training: its table on standard output, and a heat map of clients x classes as PNG.

    python -m launch.preview --config=configs/splits.py:feddure_dir_dir [--output=preview.png] [--config.a.b=value ...]

It refuses what `launch.run` refuses, with the same message; nothing is compiled.

Exit status: 0 done; 2 wrong config, arguments or data; 1 anything else.
"""

import logging

from fedjax_ssl.data import preview
from fedjax_ssl.experiment import build
from fedjax_ssl.experiment.settings import Settings

from . import arguments, command


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    waiting = command.logging_that_waits()
    try:
        config, options = arguments.parse(_parser(), argv[1:], computes=True)
        output = arguments.output("--output", options.output, ".png")
        settings = Settings.from_dict(config.tree)
        drawn = build.drawn_runs(settings)
        build.assembled(drawn)  # what a run refuses is refused here
    except command.WRONG_INPUT as error:
        return command.refuse(error)
    command.end_waiting(waiting, logging.StreamHandler())
    dataset = drawn.plans[0].dataset
    seen = preview.preview(drawn.assignments[0], dataset.train_labels, dataset.num_classes)
    title = f"{config.name}: {settings.data.name}, seed {settings.seed}"
    print(f"{title}\n\n{preview.table(seen)}")
    try:
        preview.heat_map(seen, output, title)
    except OSError as error:
        return command.refuse(error)
    print(f"picture: {output}")
    return 0


def _parser() -> arguments.Parser:
    parser = arguments.Parser("preview", __doc__, has_config=True)
    parser.add_argument("--output", default="preview.png", help="the picture's file (%(default)s)")
    return parser


if __name__ == "__main__":
    command.exit_with(main)
