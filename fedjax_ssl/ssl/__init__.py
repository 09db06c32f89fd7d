"""The building blocks of semi-supervised learning as pure functions: thresholds, losses, mixup, averages and others."""

from fedjax_ssl.ssl import (
    agreement,
    ema,
    experts,
    freematch,
    losses,
    mixup,
    pseudo_labels,
    regulators,
    sharpness,
    siamese,
    thresholds,
    tsa,
)

__all__ = [
    "agreement", "ema", "experts", "freematch", "losses", "mixup", "pseudo_labels", "regulators", "sharpness", "siamese",
    "thresholds", "tsa",
]  # fmt: skip
