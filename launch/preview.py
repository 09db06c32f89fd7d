"""Shows a config's split, without training: its table on standard output, and a heat map of clients x classes as PNG.

    python -m launch.preview --config=configs/splits.py:feddure_dir_dir [--output=preview.png] [--config.a.b=value ...]

Exit status: 0 done; 2 wrong config, arguments or data; 1 anything else.
"""

import pathlib
import sys

from absl import flags

from . import command

OUTPUT = flags.DEFINE_string("output", "preview.png", "The picture's file.")


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        config = command.parse(argv, __name__)
        output = pathlib.Path(OUTPUT.value)
        if output.suffix != ".png" or not output.parent.is_dir():
            raise ValueError(f"--output: got {output}, accepted: a file NAME.png in a folder that exists")
        # The package is imported after the flags: `--help` and a mistyped flag answer at once.
        from fedjax_ssl.data import preview, split
        from fedjax_ssl.experiment import build
        from fedjax_ssl.experiment.settings import Settings

        settings = Settings.from_dict(config.tree)
        dataset = build.load_dataset(settings)
        with build.naming("data"):
            holdings = split.draw(dataset.train_labels, dataset.num_classes, settings.data.split, settings.seed)
    except command.WRONG_INPUT as error:
        return command.refuse(error)
    seen = preview.preview(holdings, dataset.train_labels, dataset.num_classes)
    title = f"{config.name}: {settings.data.name}, seed {settings.seed}"
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without the bars' characters
    print(f"{title}\n\n{preview.table(seen)}")
    try:
        preview.heat_map(seen, output, title)
    except OSError as error:
        return command.refuse(error)
    print(f"picture: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
