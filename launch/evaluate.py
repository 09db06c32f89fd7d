"""Evaluates finished or stopped runs: accuracy (also per class and client), other scores, confusion matrix; saves predictions.

    python -m launch.evaluate DIR... [--best] [--data FILE_OR_FOLDER] [--clients] [--personalize EPOCHS] [--save] [--json]
        [--out predictions.csv]

DIR is a run's folder, or one that holds several runs, such as a sweep. Of runs that differ in their seeds alone, mean and
standard deviation are printed, too. By default the model is evaluated on the run's own test set. `--data` is an .npz file
(x_test, y_test; test_images, test_labels; or images and, if known, labels), or a folder of images, without labels or with one
folder for each class; of a folder that has a `test/`, only that is read. The runs are only read, unless `--save` writes what
was found into their folders as `evaluation.json`, for `launch.report`.

Exit status: 0 done; 2 wrong arguments, runs or data.
"""

import argparse
import json
import logging
import os
from collections.abc import Sequence

from fedjax_ssl.files import plain, read_json, write_json
from fedjax_ssl.programs import keep_programs
from fedjax_ssl.report import evaluations, tables
from fedjax_ssl.runs.folder import EVALUATION, RUN, diverged
from fedjax_ssl.runs.loading import load, run_folders

from . import arguments, command, config_file, devices

SAID = ("fedjax_ssl.data.split", "fedjax_ssl.experiment.warnings")
"""Loggers of what a run has said, which is not said again."""


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    waiting, log = command.logging_that_waits(), logging.getLogger("fedjax_ssl")
    waiting.setLevel(logging.WARNING)
    texts = set[str]()
    waiting.addFilter(lambda record: record.name not in SAID and _is_new(texts, getattr(record, "once", "")))
    try:
        options = _parser().parse_args(argv[1:])
        out = arguments.output("--out", options.out, ".csv", ".npz") if options.out else None
        if options.config:  # it may register methods and networks
            config_file.read(options.config)
        keep_programs()
        devices.find_devices()
        paths = [path for one in options.workdir for path in run_folders(one)]
        if options.personalize < 0:
            raise ValueError(f"--personalize: got {options.personalize}, accepted: a number of epochs")
        if options.save and options.data:
            raise ValueError(f"--save: got it with --data={options.data}, accepted: for the runs' own test sets")
        if options.save and options.which == "best":
            raise ValueError("--save: got it with --best, accepted: for the last round, of which reports show the log")
        if out and len(paths) > 1:
            raise ValueError(f"--out: got {options.out} for {len(paths)} runs, accepted: with the folder of one run")
        reports: dict[str, evaluations.Report] = {}
        kinds = {}
        for folder in paths:
            try:
                experiment, state = load(folder, data_dir=options.data_dir, path=options.path, which=options.which)
            except command.WRONG_INPUT as error:  # such as a run without a checkpoint: the others have their place
                if folder == paths[-1] and not reports:
                    raise
                log.warning("left out: %s", error)
                continue
            if diverged(folder):
                log.warning("%s has diverged: this is its checkpoint of round %d, which no mean has", folder, int(state.round))
            else:
                files = read_json(folder / RUN).get("files", {})
                kinds[str(folder)] = os.path.dirname(folder), evaluations.kind(experiment, files)
            given = evaluations.examples_of(experiment, options.data)
            each = {"clients": options.clients, "personalize": options.personalize}
            report = plain(evaluations.evaluated(experiment, state, given, **each, out=out))
            reports[str(folder)] = report
            if options.save:
                write_json(folder / EVALUATION, report)
    except command.WRONG_INPUT as error:
        return command.refuse(error)
    command.end_waiting(waiting, logging.StreamHandler())
    beside = evaluations.beside(reports, kinds)
    if options.json:
        found = {"runs": reports, "all": {name: evaluations.over(own) for name, own in beside.items()}}
        print(json.dumps(plain(found), indent=2))
    else:
        print("\n".join(map(tables.text, evaluations.as_tables(reports, beside))))
    return 0


def _is_new(texts: set[str], text: str) -> bool:
    """Whether a text, which is added, is not among the texts; what is empty always is new."""
    is_new = text not in texts
    texts.update(filter(None, [text]))
    return is_new


def _parser() -> argparse.ArgumentParser:
    parser = arguments.Parser("evaluate", __doc__)
    parser.add_argument("workdir", metavar="DIR", nargs="+", help="a run's folder, or a folder of several runs")
    best = "the model of the round that is the best by validation (keep_best), in place of the last round's"
    parser.add_argument("--best", dest="which", action="store_const", const="best", default="newest", help=best)
    parser.add_argument("--data", help="other examples than the run's test set: an .npz file, or a folder of images")
    parser.add_argument("--data_dir", default="", help="where the run's dataset is now, if its data.data_dir has moved")
    parser.add_argument("--path", default="", help="likewise for its data.path")
    own = "also evaluate on each client's own examples: those of data.client_test_fraction, or its training examples"
    parser.add_argument("--clients", action="store_true", help=own)
    after = "as --clients, also after each client has trained the model for so many epochs by the run's method"
    parser.add_argument("--personalize", type=int, default=0, metavar="EPOCHS", help=after)
    parser.add_argument("--save", action="store_true", help="write what is found into each run's folder, for launch.report")
    parser.add_argument("--out", help="a .csv or .npz file of predictions: id, prediction, confidence, label")
    parser.add_argument("--config", help="a config file that registers the run's method or network")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


if __name__ == "__main__":
    command.exit_with(main)
