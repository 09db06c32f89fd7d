"""FedLabel's config files: the paper's settings (its Section 5.1) and FLUTE's values, written out."""

import pytest

from tests.configs.common import check, settings, values

METHOD = values("""
    method: name=fedlabel prox_mu=0.0 confidence=0.3 measure=variance experts=both expert_view=plain augment=strong
    method: consistency_weight=0.05 consistency_target=other kl_order=target_first normalize=batch unlabeled_steps=10
    method: unlabeled_rate=1.0 proximity=0.0 burn_in=0 counts=draws aggregation=sum
""")
RELEASED = values("""
    method: expert_view=weak consistency_target=local normalize=passing proximity=10.0 burn_in=50 counts=passing
    method: aggregation=halves
""")
SETTING = values("""
    model: name=resnet norm=running norm_momentum=0.1
    data: labels_at=clients partition=dirichlet_classes alpha=0.1 labeled_fraction=(0.2,) exclude_labeled=True
    data: strong=fedlabel_released num_clients=100 resplit=(0.8,0.05,0.15) mean=()
    client: batch_size=64 epochs=0 steps=30
    client.optimizer: name=sgd learning_rate=0.003 schedule=constant momentum=0.0 weight_decay=0.0 persistent=False
    server: momentum=0.0 learning_rate=1.0
    rounds=500 cohort_size=10
""")
CIFAR10 = {"data.name": "cifar10", "model.depth": 34, "data.weak": "flip_zero_crop4"}
CIFAR100 = {"data.name": "cifar100", "model.depth": 50, "data.weak": "flip_zero_crop4"}
EMNIST = {"data.name": "emnist/byclass", "model.depth": 18}
SILO = {"model.depth": 18, "data.labeled_fraction": (0.05,)}
ORGANS = SILO | {"data.name": "organamnist", "data.num_clients": 10, "cohort_size": 3}
BLOOD = SILO | {"data.name": "bloodmnist", "data.num_clients": 5, "cohort_size": 5}
STORED = {"data.resplit": ()}
FLUTE = RELEASED | STORED | {"rounds": 2000, "data.mean": (0.4914, 0.4822, 0.4465), "data.std": (0.2023, 0.1994, 0.201)}

ON_CIFAR10 = METHOD | SETTING | CIFAR10
CASES = {
    "fedlabel_cifar10": ON_CIFAR10,
    "fedlabel_cifar10:paper,labels=0.65,alpha=1,tau=5,beta=0": (
        ON_CIFAR10 | values("data: labeled_fraction=(0.65,) alpha=1.0\nclient: steps=5\nmethod: confidence=0.0")
    ),
    "fedlabel_cifar10:released": ON_CIFAR10 | FLUTE,
    "fedlabel_cifar10:local_only": ON_CIFAR10 | {"method.experts": "local"},
    "fedlabel_cifar10:global_only,strong=paper": ON_CIFAR10 | {"method.experts": "global", "data.strong": "fedlabel_paper"},
    "fedlabel_cifar10:strong=none": ON_CIFAR10 | {"method.augment": "none", "data.strong": "none"},
    "fedlabel_cifar100:released": METHOD | SETTING | CIFAR100 | FLUTE,
    "fedlabel_emnist": METHOD | SETTING | EMNIST,
    "fedlabel_organamnist": METHOD | SETTING | ORGANS,
    "fedlabel_bloodmnist": METHOD | SETTING | BLOOD,
    "fedlabel_bloodmnist:released": METHOD | SETTING | BLOOD | RELEASED | STORED,
}
OTHERS = {
    "fixmatch": "pseudo_labels=local divisor=batch confidence=0.95",
    "uda": "confidence=0.8 unlabeled_batch_size=0",
    "fedprox": "prox_mu=0.001",
    "fedavg": "prox_mu=0.0",
    "fedtrinet": "labeled_rounds=0.4",
    "fedsem": "labeled_rounds=0.6",
}
CASES |= {f"fedlabel_cifar10:{name}": SETTING | CIFAR10 | values(f"method: name={name} {own}") for name, own in OTHERS.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_configs_are_the_papers_and_flutes(name):
    check(settings(name), CASES[name])
