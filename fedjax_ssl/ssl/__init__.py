"""Pure functions of semi-supervised methods: thresholds, losses, mixup, averages, perturbations, experts, regulators."""

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
    "agreement",
    "ema",
    "experts",
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
