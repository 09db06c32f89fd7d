"""FedTriNet's config files: the released code's values, written out."""

import pytest

from tests.configs.common import check, settings, values, without

RELEASED = values("""
    method: name=fedtrinet labeled_rounds=0.4 threshold_protection=True
    model: variant=released norm=running
    data: num_clients=10 labels_at=clients labeled_fraction=(0.01,) partition=iid weak=none labeled=default mean=(0.5,)
    data: std=(0.5,)
    rounds=100 cohort_size=5
    client: epochs=5 batch_size=50
    client.optimizer: name=sgd learning_rate=0.01 schedule=constant momentum=0.5 nesterov=False weight_decay=0.0
    client.optimizer: persistent=False
    server: momentum=0.0 learning_rate=1.0
""")
FILES = {
    "fedtrinet_mnist": {"data.name": "mnist", "model.name": "mnist_cnn"},
    "fedtrinet_cifar10": {"data.name": "cifar10", "model.name": "cifar_cnn"},
    "fedtrinet_svhn": {"data.name": "svhn_cropped", "model.name": "cifar_cnn", "data.weak": "flip_crop4"},
}


@pytest.mark.parametrize("file", FILES)
def test_the_configs_are_the_released_codes(file):
    check(settings(file), RELEASED | FILES[file])
    fedsem = without(RELEASED, "method.threshold_protection")
    split = {"data.partition": "dirichlet", "data.alpha": 0.3}
    check(settings(file, "fedsem,split=dir0.3"), fedsem | FILES[file] | split | {"method.name": "fedsem"})
