"""The datasets that are known by name: what they are, how they are normalized and augmented unless a config says otherwise,
whom to cite, under which terms, and where they come from.

Weak and strong views are names of `fedjax_ssl.data.presets`. A mirror image keeps its class in most photographs; it does not in
digits and letters, nor in organs that have a left and a right one.
"""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A dataset that is known by name.

    Attributes:
        kind: how it is stored: `builtin`, `tfds`, `npz`, `image_folder` or `text_features`.
        classes: C.
        mean: per channel, or one value for all, of images scaled to [0, 1]; empty: measured on the training images.
        std: likewise.
        weak: default weak view, a key of WEAK_VIEWS.
        strong: default strong view, one of STRONG_VIEWS.
        image_size: side of the images as they are stored, in pixels; 0: not images.
        citation: whom to cite.
        terms: its license or terms of use, as far as its source states them.
        url: where it comes from.
        get: for what is not a TFDS dataset: which file to get there.
    """

    kind: str
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    weak: str
    strong: str
    image_size: int
    citation: str
    terms: str
    url: str
    get: str = ""


_CIFAR = ("Krizhevsky 2009, Learning multiple layers of features from tiny images", "none stated; cite the report")
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar.html"
_MNIST = ("LeCun, Bottou, Bengio and Haffner 1998, Gradient-based learning applied to document recognition", "see source")

DATASETS: dict[str, Known] = {
    "digits": Known(
        *("builtin", 10, (), (), "crop1", "usb", 8),
        "Alpaydin and Kaynak 1998, Optical recognition of handwritten digits (UCI), its test part",
        "see source",
        "https://archive.ics.uci.edu/dataset/80",
    ),
    "cifar10": Known(
        *("tfds", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "flip_crop4", "usb", 32, *_CIFAR, _CIFAR_URL)
    ),
    "cifar100": Known(
        *("tfds", 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), "flip_crop4", "usb", 32, *_CIFAR, _CIFAR_URL)
    ),
    "svhn_cropped": Known(
        *("tfds", 10, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), "crop4", "usb", 32),
        "Netzer et al. 2011, Reading digits in natural images with unsupervised feature learning",
        "for non-commercial use only",
        "http://ufldl.stanford.edu/housenumbers/",
    ),
    "mnist": Known(*("tfds", 10, (0.1307,), (0.3081,), "crop4", "usb", 28, *_MNIST), "http://yann.lecun.com/exdb/mnist/"),
    "fashion_mnist": Known(
        *("tfds", 10, (0.2860,), (0.3530,), "flip_crop4", "usb", 28),
        "Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747",
        "MIT",
        "https://github.com/zalandoresearch/fashion-mnist",
    ),
    "emnist/byclass": Known(
        *("tfds", 62, (0.1751,), (0.3332,), "crop4", "fedlabel_released", 28),
        "Cohen, Afshar, Tapson and van Schaik 2017, EMNIST: extending MNIST to handwritten letters",
        "see source",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
    ),
    # FedDure's views and normalization; the latter is also its authors'
    "cinic10": Known(
        *("image_folder", 10, (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
        *("flip_crop4", "randaugment_mc", 32),
        "Darlow, Crowley, Antoniou and Storkey 2018, arXiv:1810.03505",
        "see source; made of CIFAR-10 and ImageNet pictures",
        "https://datashare.is.ed.ac.uk/handle/10283/3192",
        "CINIC-10.tar.gz (to be unpacked: a folder with train/, valid/ and test/)",
    ),
    "ag_news": Known(
        *("text_features", 4, (), (), "none", "none", 0),
        "Zhang, Zhao and LeCun 2015, arXiv:1509.01626, of A. Gulli's AG corpus",
        "for research and other non-commercial use",
        "https://github.com/mhjabreel/CharCnn_Keras/tree/master/data/ag_news_csv",
        "train.csv and test.csv, to be turned into this file by python -m launch.text_features,",
    ),
}

# MedMNIST's multi-class images (ChestMNIST has several labels per image): classes, and whether a mirror image keeps its class.
_MEDMNIST = {
    "pathmnist": (9, True),
    "dermamnist": (7, True),
    "octmnist": (4, True),
    "pneumoniamnist": (2, True),
    "retinamnist": (5, True),
    "breastmnist": (2, True),
    "bloodmnist": (8, True),
    "tissuemnist": (8, True),
    "organamnist": (11, False),
    "organcmnist": (11, False),
    "organsmnist": (11, False),
}
for _name, (_classes, _mirrors) in _MEDMNIST.items():
    DATASETS[_name] = Known(
        *("npz", _classes, (0.5,), (0.5,), "flip_crop4" if _mirrors else "crop4", "fedlabel_released", 28),
        "Yang et al. 2023, MedMNIST v2, Scientific Data 10:41, and the study that its page names for this part",
        "CC BY-NC 4.0" if _name == "dermamnist" else "CC BY 4.0",
        "https://zenodo.org/records/10519652",
        f"{_name}.npz",
    )


def known(name: str) -> Known | None:
    """What is known of a dataset, by its name with or without a TFDS version."""
    return DATASETS.get(name.partition(":")[0])
