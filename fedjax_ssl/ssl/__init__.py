"""Pure functions that semi-supervised methods share: thresholds, losses, sharpness-aware perturbations."""

from fedjax_ssl.ssl import losses, pseudo_labels, sharpness, thresholds

__all__ = ["losses", "pseudo_labels", "sharpness", "thresholds"]
