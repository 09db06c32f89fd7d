"""FedSiam on SVHN (train split), labels at the clients or at the server.

    python -m launch.run --config=fedsiam_svhn:d,labels_at=clients,gamma=0.1,split=iid --config.data.data_dir=DIR

Argument as in fedsiam_mnist. Expected (the paper, in %, IID, gamma .1, labels at the clients; not reproduced here): Pi 87.33,
MT 87.66, D 88.76, no siamese 87.24, FedSem 85.70. Run time: for an accelerator.
"""

from .common import sized
from .fedsiam import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    config = make(argument, "svhn_cropped", "cifar_cnn", server_rounds=150, curve="linear")
    if config.model.variant == "released" and config.method.name == "fedsiam_d":
        config.data.weak = "none"  # of the code's three methods D alone
    return sized(config, argument)
