"""The datasets that are known by name: their default normalization and views, citation, terms, source and original files.

Photographs are mirrored by default; digits, letters, and organs of which there is a left and a right one are not.
"""

from typing import NamedTuple


class Known(NamedTuple):
    """A dataset that is known by name: its default views, the publication to cite, and the terms of use that `url` states."""

    kind: str  # how it is stored: `builtin`, `tfds`, `npz`, `image_folder` or `text_features`
    classes: int
    weak: str  # the default view, a key of `presets.WEAK_VIEWS`
    strong: str  # likewise, one of `presets.STRONG_VIEWS`
    citation: str
    terms: str
    url: str
    mean: tuple[float, ...] = ()  # of images in [0, 1], per channel or one for all; empty: measured on the training images
    std: tuple[float, ...] = ()  # likewise
    names: tuple[str, ...] = ()  # of the classes, where they are not numbers


class File(NamedTuple):
    """A file of a dataset as its authors offer it, with a checksum that somebody publishes."""

    name: str
    url: str
    checksum: str  # `sha256:...` or `md5:...`, in hexadecimal
    publisher: str  # who publishes the checksum
    size: int = 0  # bytes; 0: as the server says


class Sizes(NamedTuple):
    """The shape [H, W, ch] of a dataset's images, and the number of images in each of its splits."""

    shape: tuple[int, int, int]
    train: int
    validation: int
    test: int


_OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

_CIFAR10 = Known(
    "tfds", 10, "flip_crop4", "usb", names=_OBJECTS, mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616),
    citation="Krizhevsky 2009, Learning multiple layers of features from tiny images",
    terms="none stated; cite the report", url="https://www.cs.toronto.edu/~kriz/cifar.html",
)  # fmt: skip

_SVHN = Known(
    "tfds", 10, "crop4", "usb", mean=(0.4377, 0.4438, 0.4728), std=(0.198, 0.201, 0.197),
    citation="Netzer et al. 2011, Reading digits in natural images with unsupervised feature learning",
    terms="for non-commercial use only", url="http://ufldl.stanford.edu/housenumbers/",
)  # fmt: skip

DATASETS: dict[str, Known] = {
    "digits": Known(
        "builtin", 10, "crop1", "usb", terms="see source", url="https://archive.ics.uci.edu/dataset/80",
        citation="Alpaydin and Kaynak 1998, Optical recognition of handwritten digits (UCI), its test part",
    ),
    "cifar10": _CIFAR10,
    "cifar100": _CIFAR10._replace(classes=100, names=(), mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
    "svhn_cropped": _SVHN,
    "svhn_cropped/extra": _SVHN,  # trains on its further images, too; always read from the original files
    "mnist": Known(
        "tfds", 10, "crop4", "usb", mean=(0.1307,), std=(0.3081,),
        citation="LeCun, Bottou, Bengio and Haffner 1998, Gradient-based learning applied to document recognition",
        terms="CC BY-SA 3.0, as Keras states", url="http://yann.lecun.com/exdb/mnist/",
    ),
    "fashion_mnist": Known(
        "tfds", 10, "flip_crop4", "usb", names=_CLOTHES, mean=(0.286,), std=(0.353,),
        citation="Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747",
        terms="MIT", url="https://github.com/zalandoresearch/fashion-mnist",
    ),
    "emnist/byclass": Known(
        "tfds", 62, "zero_crop4", "fedlabel_released", mean=(0.1751,), std=(0.3332,),
        citation="Cohen, Afshar, Tapson and van Schaik 2017, EMNIST: extending MNIST to handwritten letters",
        terms="see source", url="https://www.nist.gov/itl/products-and-services/emnist-dataset",
    ),
    "cinic10": Known(  # views and normalization of FedDure
        "image_folder", 10, "flip_crop4", "randaugment_mc", names=_OBJECTS,
        mean=(0.47889522, 0.47227842, 0.43047404), std=(0.24205776, 0.23828046, 0.25874835),
        citation="Darlow, Crowley, Antoniou and Storkey 2018, arXiv:1810.03505",
        terms="see source; made of CIFAR-10 and ImageNet pictures", url="https://datashare.is.ed.ac.uk/handle/10283/3192",
    ),
    "ag_news": Known(
        "text_features", 4, "none", "none",
        citation="Zhang, Zhao and LeCun 2015, arXiv:1509.01626, of A. Gulli's AG corpus",
        terms="for research and other non-commercial use",
        url="https://github.com/mhjabreel/CharCnn_Keras/tree/master/data/ag_news_csv",
    ),
}  # fmt: skip

_ZENODO = "https://zenodo.org/records/10519652"
_MEDMNIST = {  # classes, MD5 as in medmnist 3.0.2, bytes or 0 (not published); ChestMNIST has several labels per image
    "pathmnist": (9, "a8b06965200029087d5bd730944a56c1", 205_615_438), "dermamnist": (7, "0744692d530f8e62ec473284d019b0c7", 0),
    "octmnist": (4, "c68d92d5b585d8d81f7112f81e2d0842", 0),
    "pneumoniamnist": (2, "28209eda62fecd6e6a2d98b1501bb15f", 4_170_669),
    "retinamnist": (5, "bd4c0672f1bba3e3a89f0e4e876791e4", 0), "breastmnist": (2, "750601b1f35ba3300ea97c75c52ff8f6", 0),
    "bloodmnist": (8, "7053d0359d879ad8a5505303e11de1dc", 0), "tissuemnist": (8, "ebe78ee8b05294063de985d821c1c34b", 0),
    "organamnist": (11, "68e3f8846a6bd62f0c9bf841c0d9eacc", 0), "organcmnist": (11, "b9ceb9546e10131b32923c5bbeaea2b1", 0),
    "organsmnist": (11, "9ab87b696fb54e2a387ebe992d6ed5f1", 0),
}  # fmt: skip

DATASETS |= {
    name: Known(
        "npz", classes, "zero_crop4" if name.startswith("organ") else "flip_zero_crop4", "fedlabel_released",
        mean=(0.5,), std=(0.5,), url=_ZENODO,
        citation="Yang et al. 2023, MedMNIST v2, Scientific Data 10:41, and the study that its page names for this part",
        terms="CC BY-NC 4.0" if name == "dermamnist" else "CC BY 4.0",
    )
    for name, (classes, _, _) in _MEDMNIST.items()
}  # fmt: skip

_COLOR, _GRAY = (28, 28, 3), (28, 28, 1)
SIZES: dict[str, Sizes] = {
    "cifar10": Sizes((32, 32, 3), 50_000, 0, 10_000), "cifar100": Sizes((32, 32, 3), 50_000, 0, 10_000),
    "svhn_cropped": Sizes((32, 32, 3), 73_257, 0, 26_032), "svhn_cropped/extra": Sizes((32, 32, 3), 604_388, 0, 26_032),
    "mnist": Sizes(_GRAY, 60_000, 0, 10_000), "fashion_mnist": Sizes(_GRAY, 60_000, 0, 10_000),
    "emnist/byclass": Sizes(_GRAY, 697_932, 0, 116_323), "cinic10": Sizes((32, 32, 3), 90_000, 90_000, 90_000),
    "pathmnist": Sizes(_COLOR, 89_996, 10_004, 7_180), "dermamnist": Sizes(_COLOR, 7_007, 1_003, 2_005),
    "octmnist": Sizes(_GRAY, 97_477, 10_832, 1_000), "pneumoniamnist": Sizes(_GRAY, 4_708, 524, 624),
    "retinamnist": Sizes(_COLOR, 1_080, 120, 400), "breastmnist": Sizes(_GRAY, 546, 78, 156),
    "bloodmnist": Sizes(_COLOR, 11_959, 1_712, 3_421), "tissuemnist": Sizes(_GRAY, 165_466, 23_640, 47_280),
    "organamnist": Sizes(_GRAY, 34_561, 6_491, 17_778), "organcmnist": Sizes(_GRAY, 12_975, 2_392, 8_216),
    "organsmnist": Sizes(_GRAY, 13_932, 2_452, 8_827),
}  # fmt: skip
"""The sizes of the datasets of images that can be fetched: with them a run's costs are counted before the data are there."""

_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist/"  # TFDS's source: LeCun's own host answers no more
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
_EDINBURGH = "https://datashare.ed.ac.uk/server/api/core/bitstreams/e8e186cc-2688-48f1-aa5a-3fda1a43f8b6/content"


def _listed(base: str, publisher: str, *files: tuple[str, int, str]) -> tuple[File, ...]:
    """Files in one place: name, bytes, SHA-256."""
    return tuple(File(name, base + name, f"sha256:{digest}", publisher, size) for name, size, digest in files)


_SVHN_FILES = _listed(
    _SVHN.url, "TFDS",
    ("train_32x32.mat", 182_040_794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
    ("test_32x32.mat", 64_275_384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
    ("extra_32x32.mat", 1_329_278_602, "a133a4beb38a00fcdda90c9489e0c04f900b660ce8a316a5e854838379a71eb3"),
)  # fmt: skip

ORIGINALS: dict[str, tuple[File, ...]] = {
    "cifar10": _listed(
        _TORONTO, "TFDS",
        ("cifar-10-binary.tar.gz", 170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
    ),
    "cifar100": _listed(
        _TORONTO, "TFDS",
        ("cifar-100-binary.tar.gz", 168_513_733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
    ),
    "svhn_cropped": _SVHN_FILES[:2],
    "svhn_cropped/extra": _SVHN_FILES,
    "mnist": _listed(
        _MNIST, "TFDS",
        ("train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    "fashion_mnist": _listed(
        _FASHION, "TFDS",
        ("train-images-idx3-ubyte.gz", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        ("train-labels-idx1-ubyte.gz", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        ("t10k-images-idx3-ubyte.gz", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        ("t10k-labels-idx1-ubyte.gz", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    "emnist/byclass": _listed(
        "https://biometrics.nist.gov/cs_links/EMNIST/", "TFDS",
        ("gzip.zip", 561_753_746, "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e"),
    ),
    # The authors publish no checksum: it is the one that loaders of others check. The older address answers with a page.
    "cinic10": (File("CINIC-10.tar.gz", _EDINBURGH, "md5:6ee4d0c996905fe93221de577967a372", "other loaders", 687_544_992),),
    "ag_news": _listed(
        _NEWS, "Hugging Face's datasets",
        ("train.csv", 29_470_338, "76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e"),
        ("test.csv", 1_857_427, "521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699"),
    ),
}  # fmt: skip
"""The files of each dataset that can be fetched: those that its authors offer, with published checksums."""

ORIGINALS |= {
    name: (File(f"{name}.npz", f"{_ZENODO}/files/{name}.npz?download=1", f"md5:{md5}", "the medmnist package", size),)
    for name, (_, md5, size) in _MEDMNIST.items()
}


def known(name: str) -> Known | None:
    """What is known of a dataset, by its name, which may end in a TFDS version."""
    return DATASETS.get(name.partition(":")[0])
