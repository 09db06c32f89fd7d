"""The datasets that are known by name: their default normalization and views, citation, terms and source.

Photographs are mirrored by default; digits, letters, and organs of which there is a left and a right one are not.
"""

from typing import NamedTuple


class Known(NamedTuple):
    """A dataset that is known by name, its publication to cite, and its terms of use as far as `url`, its source, has them."""

    kind: str  # how it is stored: `builtin`, `tfds`, `npz`, `image_folder` or `text_features`
    classes: int
    weak: str  # the default view, a key of `presets.WEAK_VIEWS`
    strong: str  # likewise, one of `presets.STRONG_VIEWS`
    citation: str
    terms: str
    url: str
    mean: tuple[float, ...] = ()  # of images in [0, 1], per channel or one for all; empty: measured on the training images
    std: tuple[float, ...] = ()  # likewise
    get: str = ""  # the file to download from `url`, unless it is a TFDS dataset


_CIFAR10 = Known(
    "tfds", 10, "flip_crop4", "usb", mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616),
    citation="Krizhevsky 2009, Learning multiple layers of features from tiny images",
    terms="none stated; cite the report", url="https://www.cs.toronto.edu/~kriz/cifar.html",
)  # fmt: skip

DATASETS: dict[str, Known] = {
    "digits": Known(
        "builtin", 10, "crop1", "usb", terms="see source", url="https://archive.ics.uci.edu/dataset/80",
        citation="Alpaydin and Kaynak 1998, Optical recognition of handwritten digits (UCI), its test part",
    ),
    "cifar10": _CIFAR10,
    "cifar100": _CIFAR10._replace(classes=100, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
    "svhn_cropped": Known(
        "tfds", 10, "crop4", "usb", mean=(0.4377, 0.4438, 0.4728), std=(0.198, 0.201, 0.197),
        citation="Netzer et al. 2011, Reading digits in natural images with unsupervised feature learning",
        terms="for non-commercial use only", url="http://ufldl.stanford.edu/housenumbers/",
    ),
    "mnist": Known(
        "tfds", 10, "crop4", "usb", mean=(0.1307,), std=(0.3081,),
        citation="LeCun, Bottou, Bengio and Haffner 1998, Gradient-based learning applied to document recognition",
        terms="CC BY-SA 3.0, as Keras states", url="http://yann.lecun.com/exdb/mnist/",
    ),
    "fashion_mnist": Known(
        "tfds", 10, "flip_crop4", "usb", mean=(0.286,), std=(0.353,),
        citation="Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747",
        terms="MIT", url="https://github.com/zalandoresearch/fashion-mnist",
    ),
    "emnist/byclass": Known(
        "tfds", 62, "zero_crop4", "fedlabel_released", mean=(0.1751,), std=(0.3332,),
        citation="Cohen, Afshar, Tapson and van Schaik 2017, EMNIST: extending MNIST to handwritten letters",
        terms="see source", url="https://www.nist.gov/itl/products-and-services/emnist-dataset",
    ),
    "cinic10": Known(  # views and normalization of FedDure
        "image_folder", 10, "flip_crop4", "randaugment_mc",
        mean=(0.47889522, 0.47227842, 0.43047404), std=(0.24205776, 0.23828046, 0.25874835),
        citation="Darlow, Crowley, Antoniou and Storkey 2018, arXiv:1810.03505",
        terms="see source; made of CIFAR-10 and ImageNet pictures", url="https://datashare.is.ed.ac.uk/handle/10283/3192",
        get="CINIC-10.tar.gz (to be unpacked: a folder with train/, valid/ and test/)",
    ),
    "ag_news": Known(
        "text_features", 4, "none", "none", get="train.csv and test.csv",
        citation="Zhang, Zhao and LeCun 2015, arXiv:1509.01626, of A. Gulli's AG corpus",
        terms="for research and other non-commercial use",
        url="https://github.com/mhjabreel/CharCnn_Keras/tree/master/data/ag_news_csv",
    ),
}  # fmt: skip

_MEDMNIST = {
    "pathmnist": 9, "dermamnist": 7, "octmnist": 4, "pneumoniamnist": 2, "retinamnist": 5, "breastmnist": 2, "bloodmnist": 8,
    "tissuemnist": 8, "organamnist": 11, "organcmnist": 11, "organsmnist": 11,
}  # fmt: skip
"""Classes of MedMNIST's multi-class images (ChestMNIST has several labels per image)."""

DATASETS |= {
    name: Known(
        "npz", classes, "zero_crop4" if name.startswith("organ") else "flip_zero_crop4", "fedlabel_released",
        mean=(0.5,), std=(0.5,), get=f"{name}.npz", url="https://zenodo.org/records/10519652",
        citation="Yang et al. 2023, MedMNIST v2, Scientific Data 10:41, and the study that its page names for this part",
        terms="CC BY-NC 4.0" if name == "dermamnist" else "CC BY 4.0",
    )
    for name, classes in _MEDMNIST.items()
}  # fmt: skip


def known(name: str) -> Known | None:
    """What is known of a dataset, by its name, which may end in a TFDS version."""
    return DATASETS.get(name.partition(":")[0])
