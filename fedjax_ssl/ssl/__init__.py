"""Pure functions that semi-supervised methods share: thresholds, losses, mixup, averages, perturbations, regulators."""

from fedjax_ssl.ssl import (
    agreement,
    ema,
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
    "agreement",
    "ema",
    "freematch",
    "losses",
    "mixup",
    "pseudo_labels",
    "regulators",
    "sharpness",
    "siamese",
    "thresholds",
    "tsa",
]
