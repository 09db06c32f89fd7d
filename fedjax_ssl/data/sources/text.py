"""Texts as features that an encoder computed beforehand, see `launch.text_features`."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from fedjax_ssl.data.sources import npz
from fedjax_ssl.data.sources.checks import Dataset, Part, checked_labels, join, named
from fedjax_ssl.data.sources.labels import clients_of_splits
from fedjax_ssl.data.sources.values import array_of

_NEEDED = ("train_features", "train_labels", "test_features", "test_labels")
STRONG = "train_strong_features"
Raw = np.ndarray | Sequence
"""A user's array, or list of numbers, which is checked."""


def load(name: str, path: str) -> Dataset:
    """The dataset in an `.npz` file, whose keys are the arguments of `from_features`, but for those in `npz.CLIENTS`."""
    whose = {"clients": npz.CLIENTS["train"], "test_clients": npz.CLIENTS["test"]}
    arrays, names = npz.read(path, (*_NEEDED, STRONG, *whose.values(), npz.CLASSES))
    if not arrays.keys() >= set(_NEEDED):
        raise ValueError(
            f"path={path} holds {', '.join(names) or 'nothing'}: needed are {', '.join(_NEEDED)} (and {STRONG}, if there is "
            "a strong view), as `fedjax-ssl text_features` writes them"
        )
    ids = {argument: arrays.pop(key, None) for argument, key in whose.items()}
    return from_features(name=name, num_classes=None, **ids, **arrays)  # type: ignore[arg-type]


def from_features(
    *,
    train_features: Raw,
    train_labels: Raw,
    test_features: Raw,
    test_labels: Raw,
    train_strong_features: Raw | None = None,
    num_classes: int | None = None,
    clients: Raw | Sequence[Raw] | None = None,
    test_clients: Raw | None = None,
    classes: Sequence[str] | np.ndarray = (),
    name: str = "text_features",
) -> Dataset:
    """A dataset of feature vectors, float32 [N, D], checked; labels, clients and classes as in `sources.from_arrays`.

    `train_features` are the plain and the weak view. `train_strong_features` are the strong view of the same texts, row by row,
    such as the features of their back-translations; by default it is the weak one.
    """
    given = {"train": train_features, "train strong": train_strong_features, "test": test_features}
    vectors = {part: _checked(f"{name} {part}", array_of(array)) for part, array in given.items() if array is not None}
    test, *views = vectors["test"], *(array for part, array in vectors.items() if part != "test")
    if len({view.shape for view in views}) > 1 or test.shape[1] != views[0].shape[1]:
        got = ", ".join(f"{part} {array.shape}" for part, array in vectors.items())
        raise ValueError(f"{name}: features have shapes {got}: use one encoder for all, and every training text's strong view")
    where, number = f"{name} train", len(views[0])
    labels = checked_labels(where, array_of(train_labels), number, may_lack_labels=True)
    ids = {split: own for split, own in (("train", clients), ("test", test_clients)) if own is not None}
    whose = clients_of_splits(name, ids, {"train": number, "test": len(test)}, merged=False)
    train = Part(np.stack(views, 1), labels, whose.get("train"))
    tested = Part(test[:, None], checked_labels(f"{name} test", array_of(test_labels), len(test)), whose.get("test"))
    return named(join(name, train, tested, num_classes), classes)


def _checked(where: str, features: np.ndarray) -> Float32[np.ndarray, "N D"]:
    if np.ma.is_masked(features):
        raise ValueError(f"{where}: features are masked at {np.ma.count_masked(features)} values: compute them anew")
    if features.dtype != np.float32:
        raise ValueError(f"{where}: features have dtype {features.dtype}: store them as float32")
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(f"{where}: features have shape {features.shape}: needed is [N, D], neither of them 0")
    if not np.isfinite(features).all():
        row = np.flatnonzero(~np.isfinite(features).all(1))[0]
        raise ValueError(f"{where}: the features of example {row} are not all finite: compute them anew")
    return features
