"""The building blocks of semi-supervised learning as pure functions: thresholds, losses, mixup, averages and others."""
