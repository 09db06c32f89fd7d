"""FedCon on MNIST, 1 % of the labels at the server.

    python -m launch.run --config=configs/fedcon_mnist.py:paper,split=iid --config.data.data_dir=DIR

Split `iid` or `shards`. Its code does not augment MNIST: both views of an image are the image, and what tells them apart is
dropout. So the network is the code's (`released`), with dropout of .5 after the second convolution and in the classifier; in
FedSiam's table (`paper`) it has none. No result of its authors is at hand to compare with. Run time: made for an accelerator.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(argument: str | None = None) -> ConfigDict:
    _, given = common.parse(argument, ("paper",), split="iid")
    config = common.fedcon("mnist", "mnist_cnn", given["split"], rounds=200)
    config.data.weak, config.model.variant = "none", "released"
    return config
