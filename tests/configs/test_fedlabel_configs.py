"""FedLabel's config files: the paper's settings (its Section 5.1) and FLUTE's values, written out."""

import pytest

from tests.configs.test_configs import check, settings

METHOD = {
    "method.name": "fedlabel",
    "method.prox_mu": 0.0,
    "method.confidence": 0.3,
    "method.measure": "variance",
    "method.experts": "both",
    "method.expert_view": "plain",
    "method.augment": "strong",
    "method.consistency_weight": 0.05,
    "method.consistency_target": "other",
    "method.kl_order": "target_first",
    "method.normalize": "batch",
    "method.unlabeled_steps": 10,
    "method.unlabeled_rate": 1.0,
    "method.proximity": 0.0,
    "method.burn_in": 0,
    "method.counts": "draws",
    "method.aggregation": "sum",
}
RELEASED = {
    "method.expert_view": "weak",
    "method.consistency_target": "local",
    "method.normalize": "passing",
    "method.proximity": 10.0,
    "method.burn_in": 50,
    "method.counts": "passing",
    "method.aggregation": "halves",
}
SETTING = {
    "model.name": "resnet",
    "model.norm": "running",
    "model.norm_momentum": 0.1,
    "data.labels_at": "clients",
    "data.partition": "dirichlet_classes",
    "data.alpha": 0.1,
    "data.labeled_fraction": (0.2,),
    "data.exclude_labeled": True,
    "data.strong": "fedlabel_released",
    "data.num_clients": 100,
    "data.resplit": (0.8, 0.05, 0.15),
    "data.mean": (),
    "client.batch_size": 64,
    "client.epochs": 0,
    "client.steps": 30,
    "client.optimizer.name": "sgd",
    "client.optimizer.learning_rate": 0.003,
    "client.optimizer.schedule": "constant",
    "client.optimizer.momentum": 0.0,
    "client.optimizer.weight_decay": 0.0,
    "client.optimizer.persistent": False,
    "server.momentum": 0.0,
    "server.learning_rate": 1.0,
    "rounds": 500,
    "cohort_size": 10,
}
CIFAR10 = {"data.name": "cifar10", "model.depth": 34, "data.weak": "flip_zero_crop4"}
CIFAR100 = {"data.name": "cifar100", "model.depth": 50, "data.weak": "flip_zero_crop4"}
EMNIST = {"data.name": "emnist/byclass", "model.depth": 18}
SILO = {"model.depth": 18, "data.labeled_fraction": (0.05,)}
ORGANS = SILO | {"data.name": "organamnist", "data.num_clients": 10, "cohort_size": 3}
BLOOD = SILO | {"data.name": "bloodmnist", "data.num_clients": 5, "cohort_size": 5}
STORED = {"data.resplit": ()}
FLUTE = RELEASED | STORED | {"rounds": 2000, "data.mean": (0.4914, 0.4822, 0.4465), "data.std": (0.2023, 0.1994, 0.201)}

CASES = {
    "fedlabel_cifar10": METHOD | SETTING | CIFAR10,
    "fedlabel_cifar10:paper,labels=0.65,alpha=1,tau=5,beta=0": METHOD
    | SETTING
    | CIFAR10
    | {"data.labeled_fraction": (0.65,), "data.alpha": 1.0, "client.steps": 5, "method.confidence": 0.0},
    "fedlabel_cifar10:released": METHOD | SETTING | CIFAR10 | FLUTE,
    "fedlabel_cifar10:local_only": METHOD | SETTING | CIFAR10 | {"method.experts": "local"},
    "fedlabel_cifar10:global_only,strong=paper": METHOD
    | SETTING
    | CIFAR10
    | {"method.experts": "global", "data.strong": "fedlabel_paper"},
    "fedlabel_cifar10:strong=none": METHOD | SETTING | CIFAR10 | {"method.augment": "none", "data.strong": "none"},
    "fedlabel_cifar10:fixmatch": SETTING
    | CIFAR10
    | {"method.name": "fixmatch", "method.pseudo_labels": "local", "method.divisor": "batch", "method.confidence": 0.95},
    "fedlabel_cifar10:uda": SETTING
    | CIFAR10
    | {"method.name": "uda", "method.confidence": 0.8, "method.unlabeled_batch_size": 0},
    "fedlabel_cifar10:fedprox": SETTING | CIFAR10 | {"method.name": "fedprox", "method.prox_mu": 0.001},
    "fedlabel_cifar10:fedavg": SETTING | CIFAR10 | {"method.name": "fedavg", "method.prox_mu": 0.0},
    "fedlabel_cifar10:fedtrinet": SETTING | CIFAR10 | {"method.name": "fedtrinet", "method.labeled_rounds": 0.4},
    "fedlabel_cifar10:fedsem": SETTING | CIFAR10 | {"method.name": "fedsem", "method.labeled_rounds": 0.6},
    "fedlabel_cifar100:released": METHOD | SETTING | CIFAR100 | FLUTE,
    "fedlabel_emnist": METHOD | SETTING | EMNIST,
    "fedlabel_organamnist": METHOD | SETTING | ORGANS,
    "fedlabel_bloodmnist": METHOD | SETTING | BLOOD,
    "fedlabel_bloodmnist:released": METHOD | SETTING | BLOOD | RELEASED | STORED,
}


@pytest.mark.parametrize("name", CASES)
def test_the_configs_are_the_papers_and_flutes(name):
    file, _, argument = name.partition(":")
    check(settings(file, argument or None), CASES[name])


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("fedlabel", ["'fedlabel'", "paper, released, local_only, global_only"]),
        ("supervised", ["'supervised'", "paper, released, local_only, global_only"]),
        ("paper,labels=20", ["labels", "'20'", "(0, 1]"]),
        ("paper,alpha=0", ["alpha", "'0'", "> 0"]),
        ("paper,beta=-1", ["beta", "'-1'", "[0, 1]"]),
        ("paper,beta=nan", ["beta", "'nan'", "[0, 1]"]),
        ("uda,beta=0.5", ["beta", "'0.5'", "with uda"]),
        ("paper,tau=many", ["tau", "'many'", "whole number"]),
        ("paper,strong=usb", ["strong", "'usb'", "released, paper, none"]),
    ],
)
def test_a_wrong_argument_is_named(argument, words):
    with pytest.raises(ValueError) as error:
        settings("fedlabel_cifar10", argument)
    assert all(word in str(error.value) for word in words)
