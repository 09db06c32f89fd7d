"""FedTriNet's config files: the released code's values, written out."""

import pytest

from tests.configs.test_configs import check, settings

RELEASED = {
    "method.name": "fedtrinet",
    "method.labeled_rounds": 0.4,
    "method.threshold_protection": True,
    "model.variant": "released",
    "model.norm": "running",
    "data.num_clients": 10,
    "data.labels_at": "clients",
    "data.labeled_fraction": (0.01,),
    "data.partition": "iid",
    "data.weak": "none",
    "data.labeled": "default",
    "data.mean": (0.5,),
    "data.std": (0.5,),
    "rounds": 100,
    "cohort_size": 5,
    "client.epochs": 5,
    "client.batch_size": 50,
    "client.optimizer.name": "sgd",
    "client.optimizer.learning_rate": 0.01,
    "client.optimizer.schedule": "constant",
    "client.optimizer.momentum": 0.5,
    "client.optimizer.nesterov": False,
    "client.optimizer.weight_decay": 0.0,
    "client.optimizer.persistent": False,
    "server.momentum": 0.0,
    "server.learning_rate": 1.0,
}
FILES = {
    "fedtrinet_mnist": {"data.name": "mnist", "model.name": "mnist_cnn"},
    "fedtrinet_cifar10": {"data.name": "cifar10", "model.name": "cifar_cnn"},
    "fedtrinet_svhn": {"data.name": "svhn_cropped", "model.name": "cifar_cnn", "data.weak": "flip_crop4"},
}


@pytest.mark.parametrize("file", FILES)
def test_the_configs_are_the_released_codes(file):
    check(settings(file), RELEASED | FILES[file])
    fedsem = {key: value for key, value in RELEASED.items() if key != "method.threshold_protection"}
    split = {"data.partition": "dirichlet", "data.alpha": 0.3}
    check(settings(file, "fedsem,split=dir0.3"), fedsem | FILES[file] | split | {"method.name": "fedsem"})


def test_a_wrong_argument_is_named():
    with pytest.raises(ValueError, match="got 'fedmatch', accepted: fedtrinet, fedsem"):
        settings("fedtrinet_mnist", "fedmatch")
