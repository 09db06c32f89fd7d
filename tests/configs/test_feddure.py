"""FedDure's config files: the paper's values (its Section 4.1), written out, and the other methods in the same setting."""

import pytest

from fedjax_ssl.methods import METHODS
from tests.configs.test_configs import check, settings

COMMON = {
    "method.prox_mu": 0.0,
    "model.name": "resnet9",
    "model.variant": "feddure",
    "model.norm": "running",
    "model.norm_momentum": 0.1,
    "data.labels_at": "clients",
    "data.num_clients": 100,
    "data.num_labels": 5000,
    "data.label_selection": "balanced",
    "data.reveal_labels": False,
    "data.exclude_labeled": True,
    "data.alpha": 0.5,
    "data.weak": "flip_crop4",
    "data.strong": "randaugment_mc",
    "data.labeled": "feddure",
    "client.batch_size": 10,
    "client.epochs": 1,
    "client.steps": 0,
    "client.optimizer.name": "adam",
    "client.optimizer.learning_rate": 5e-4,
    "client.optimizer.schedule": "constant",
    "client.optimizer.weight_decay": 0.0,
    "client.optimizer.clip_norm": 0.0,
    "client.optimizer.persistent": False,
    "server.momentum": 0.0,
    "server.learning_rate": 1.0,
    "rounds": 200,
    "cohort_size": 5,
}
OURS = COMMON | {
    "method.name": "feddure",
    "method.regulators": "both",
    "method.meta_gradient": "direct",
    "method.detach_freg_input": False,
    "method.confidence": 0.6,
    "method.eta_s": 5e-4,
    "method.eta_w": 5e-4,
    "method.unlabeled_batch_size": 0,
}
IID = {"data.partition": "class_balanced", "data.labeled_partition": "", "data.unlabeled_partition": ""}
IID_DIR = {"data.labeled_partition": "class_balanced", "data.unlabeled_partition": "dirichlet"}
DIR_DIR = {"data.labeled_partition": "dirichlet", "data.unlabeled_partition": "dirichlet"}
CIFAR, FASHION, CINIC = ({"data.name": name} for name in ("cifar10", "fashion_mnist", "cinic10"))
PUBLISHED = {"method.name": "fixmatch", "method.pseudo_labels": "local", "method.divisor": "batch", "method.strict": False}
CASES = {
    "feddure_cifar10": OURS | CIFAR | IID,
    "feddure_fashion_mnist": OURS | FASHION | IID,
    "feddure_cinic10:feddure,split=dir_dir": OURS | CINIC | DIR_DIR,
    "feddure_cifar10:feddure,split=iid_dir,gamma=0.3": OURS | CIFAR | IID_DIR | {"data.alpha": 0.3},
    "feddure_cifar10:no_c_reg,split=dir_dir": OURS | CIFAR | DIR_DIR | {"method.regulators": "no_c"},
    "feddure_cifar10:no_f_reg,clients=20,labels=1000": OURS
    | CIFAR
    | {"method.regulators": "no_f", "cohort_size": 20, "data.num_labels": 1000},
    "feddure_cifar10:fedavg": COMMON | {"method.name": "fedavg"},
    "feddure_cifar10:fedavg_sl": COMMON | {"method.name": "fedavg", "data.reveal_labels": True},
    "feddure_cifar10:fedprox_sl": COMMON | {"method.name": "fedprox", "data.reveal_labels": True, "method.prox_mu": 0.01},
    "feddure_cifar10:fixmatch": COMMON | PUBLISHED | {"method.confidence": 0.95, "method.unlabeled_batch_size": 90},
    "feddure_fashion_mnist:fedprox_fixmatch": COMMON | PUBLISHED | {"method.prox_mu": 0.01, "method.unlabeled_batch_size": 110},
    "feddure_cinic10:uda": COMMON | {"method.name": "uda", "method.confidence": 0.8, "method.unlabeled_batch_size": 170},
    "feddure_cifar10:fedprox_uda,labels=10000": COMMON
    | {"method.name": "uda", "method.prox_mu": 0.01, "data.num_labels": 10000, "method.unlabeled_batch_size": 40},
    "feddure_cifar10:fedmatch": COMMON
    | {"method.name": "fedmatch", "method.unlabeled_batch_size": 90, "method.lambda_l1": 1e-4},
}


@pytest.mark.parametrize("name", CASES)
def test_the_configs_are_the_papers(name):
    file, _, argument = name.partition(":")
    check(settings(file, argument or None), CASES[name])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_config_in_this_setting(method):
    shared = COMMON | ({"method.prox_mu": 0.01} if method == "fedprox" else {})
    check(settings("feddure_cifar10", f"{method},split=dir_dir"), shared | DIR_DIR | {"method.name": method})


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("fedure", ["'fedure'", "feddure, no_c_reg"]),
        ("feddure,split=iid", ["split", "'iid'", "iid_iid, iid_dir, dir_dir"]),
        ("feddure,gamma=0", ["gamma", "'0'", "> 0"]),
        ("feddure,gamma=half", ["gamma", "'half'"]),
        ("feddure,clients=few", ["clients", "'few'"]),
    ],
)
def test_a_wrong_argument_is_named(argument, words):
    with pytest.raises(ValueError) as error:
        settings("feddure_cifar10", argument)
    assert all(word in str(error.value) for word in words)
