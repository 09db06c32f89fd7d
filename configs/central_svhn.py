"""FreeMatch and FixMatch on pooled SVHN (train split). Also with labels=250 or 1000.

    python -m launch.run --config=central_svhn:freematch,labels=40 --config.data.data_dir=DIR

No image is mirrored (Sohn et al. 2020), and FreeMatch's tau is cut off at .95, as in USB. Expected error (USB's table, in %;
not measured here; USB also trains on the `extra` split, and mirrors images) with 40, 250 and 1000 labels: freematch 3.79, 4.09,
4.31; fixmatch 2.08, 1.99, 2.00. Run time: for an accelerator, 2^20 steps on 960 images each; not measured.
"""

from .common import ConfigDict, central


def get_config(argument: str | None = None) -> ConfigDict:
    config = central("svhn_cropped", argument, labels=40)
    config.data.mean, config.data.std = (0.4380, 0.4440, 0.4730), (0.1751, 0.1771, 0.1744)  # its code's
    if "largest_threshold" in config.method:
        config.method.largest_threshold = 0.95
    return config
