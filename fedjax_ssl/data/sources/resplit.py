"""A dataset's own splits, merged and drawn anew."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_ssl.data.sources.checks import Dataset, Part, checked_part, dataset


def with_splits(
    name: str, splits: Mapping[str, Part], resplit: Sequence[float] | None, seed: int, num_classes: int | None = None
) -> Dataset:
    """A dataset of the splits `train` and `test`, or of all splits merged and split anew.

    `resplit` are fractions (train, validation, test), stratified by class; the validation part is not used. None: no new split.
    """
    if resplit is None:
        return dataset(name, splits["train"], splits["test"], num_classes)
    fractions = tuple(resplit)
    if len(fractions) != 3 or min(fractions) < 0 or not fractions[0] * fractions[2] > 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(
            f"resplit={fractions}: give three fractions (train, validation, test) that add up to 1, "
            "train and test above 0, such as (0.8, 0.05, 0.15)"
        )
    # Checked before they are merged, so that an error names the split that is wrong.
    whole = [checked_part(f"{name} {split}", arrays) for split, arrays in splits.items()]
    shapes = sorted({split.images.shape[1:] for split in whole})
    if len(shapes) > 1:
        raise ValueError(f"{name}: splits hold images of different shapes {shapes}: resize them to one shape")
    pool = Part(*(np.concatenate(arrays) for arrays in zip(*whole, strict=True)))
    counts = np.unique(pool.labels, return_counts=True)[1]
    num_train = round(fractions[0] * len(pool.labels))
    num_test = min(round(fractions[2] * len(pool.labels)), len(pool.labels) - num_train)
    if min(num_train, num_test) < len(counts) or np.min(counts) < 2:
        raise ValueError(
            f"resplit={fractions} of {len(pool.labels)} examples of {len(counts)} classes (the rarest has {np.min(counts)}) "
            "leaves classes without a training or test example: give larger fractions, or more examples of each class"
        )
    return dataset(name, *stratified(pool, num_train, num_test, seed), num_classes)


def stratified(pool: Part, num_train: int, num_test: int, seed: int) -> tuple[Part, Part]:
    """Two disjoint random subsets in which every class has its share; other examples are not used."""
    from sklearn.model_selection import train_test_split

    rows = np.arange(len(pool.labels))
    train, test = train_test_split(rows, train_size=num_train, test_size=num_test, stratify=pool.labels, random_state=seed)
    return Part(pool.images[train], pool.labels[train]), Part(pool.images[test], pool.labels[test])
