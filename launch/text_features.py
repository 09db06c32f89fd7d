"""Computes the features of texts with an encoder, for `data.name=text_features` and `ag_news`.

    python -m launch.text_features --train=train.csv --test=test.csv --out=ag_news.npz [--train_strong=back_translated.csv]

The files are AG News' `train.csv` and `test.csv`, or any CSV without a header whose first column is the label and whose other
columns, joined by spaces, are the text. Classes are numbered in the order of their labels; a training text labeled -1 is of no
known class. The default encoder is (FL)^2's.

`--train_strong` has the rows of `--train` in other words, such as back-translations: their features are the strong view.
`fedjax_ssl/data/README.md` says how (FL)^2 makes them. `--strong=words` makes a strong view by leaving out
and moving words, as no paper does. Without either, the strong view is the weak one.

Needs the optional dependencies of `pip install -e ".[text]"`. Exit status: 0 done; 2 wrong arguments or files.
"""

import argparse
import functools
import json
import os
from collections.abc import Sequence

import numpy as np
import tqdm

from fedjax_ssl.data import text_encoder
from fedjax_ssl.data.sources.text import STRONG
from fedjax_ssl.files import replacing

from . import arguments, command


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        options = _parser().parse_args(argv[1:])
        out = arguments.output("--out", options.out)
        if not (options.test or options.per_class):
            raise ValueError("--test: missing, accepted: a file, or --per_class, whose other rows of --train are the test part")
        train, others = text_encoder.first_of_each_class(text_encoder.read_csv(options.train), options.per_class)
        test, strong = text_encoder.read_csv(options.test) if options.test else others, None
        if not test.texts:
            raise ValueError(f"--per_class: got {options.per_class}, which leaves no row for the test part, accepted: less")
        if options.train_strong:
            strong = text_encoder.first_of_each_class(text_encoder.read_csv(options.train_strong), options.per_class)[0]
        elif options.strong == "words":
            strong = text_encoder.in_other_words(train)
        encoder = text_encoder.hugging_face_encoder(options.encoder, options.pooling, options.max_length)
        arrays = text_encoder.compute(
            train, test, strong, encoder, options.batch_size, functools.partial(tqdm.tqdm, unit="batch")
        )
        metadata = {key: getattr(options, key) for key in ("encoder", "pooling", "max_length", "per_class")}
        metadata["strong"] = "file" if options.train_strong else options.strong
        metadata["files"] = [os.path.basename(path) for path in (options.train, options.test, options.train_strong) if path]
        with replacing(out) as file:  # the whole file, or none
            np.savez(file, **arrays, metadata=np.array(json.dumps(metadata)))
    except (*command.WRONG_INPUT, ModuleNotFoundError) as error:
        return command.refuse(error)
    train_shape, test_shape = (list(arrays[f"{part}_features"].shape) for part in ("train", "test"))
    view = "a" if STRONG in arrays else "no"
    print(f"{out}: features {train_shape} of the training texts, {test_shape} of the test texts, {view} strong view")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser, path, positive = arguments.Parser("text_features", __doc__), os.path.expanduser, arguments.whole(1)
    parser.add_argument("--train", required=True, type=path, help="CSV file of the training texts")
    parser.add_argument("--test", type=path, help="CSV file of the test texts; default: what --per_class leaves of --train")
    strong = parser.add_mutually_exclusive_group()
    strong.add_argument("--train_strong", type=path, help="CSV file of the training texts' strong view; default: none")
    strong.add_argument("--strong", default="none", choices=("none", "words"), help="words: leave words out and move them")
    parser.add_argument("--out", required=True, help="the .npz file to write")
    encoder = "a model of the Hugging Face hub, or a folder that holds one (%(default)s)"
    parser.add_argument("--encoder", default="bert-base-uncased", type=path, help=encoder)
    pooling = "how the last layer's token outputs become one vector: the first token's (cls), or the mean; default: %(default)s"
    parser.add_argument("--pooling", default="cls", choices=text_encoder.POOLING, help=pooling)
    parser.add_argument("--max_length", type=positive, default=128, help="tokens of a text that are read (%(default)s)")
    parser.add_argument("--batch_size", type=positive, default=64, help="texts at a time (%(default)s)")
    parser.add_argument("--per_class", type=positive, default=0, help="how many rows of each class to read; default: all")
    return parser


if __name__ == "__main__":
    command.exit_with(main)
