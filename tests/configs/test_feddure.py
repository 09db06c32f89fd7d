"""FedDure's config files: the paper's values (its Section 4.1), written out, and the other methods in the same setting."""

import numpy as np
import pytest

from configs import common
from fedjax_ssl.data.split import Training, draw
from tests.configs.common import FIXMATCH, check, settings, values

COMMON = values("""
    method: prox_mu=0.0
    model: name=resnet9 variant=feddure norm=running norm_momentum=0.1
    data: labels_at=clients num_clients=100 num_labels=5000 label_selection=balanced reveal_labels=False exclude_labeled=True
    data: alpha=0.5 weak=flip_crop4 strong=randaugment_mc labeled=feddure
    client: batch_size=10 epochs=1 steps=0
    client.optimizer: name=adam learning_rate=0.0005 schedule=constant weight_decay=0.0 clip_norm=0.0 persistent=False
    server: momentum=0.0 learning_rate=1.0
    rounds=200 cohort_size=5
""")
OURS = COMMON | values("""
    method: name=feddure regulators=both meta_gradient=direct detach_freg_input=False confidence=0.6 eta_s=0.0005 eta_w=0.0005
    method: unlabeled_batch_size=0
""")
IID = {"data.partition": "class_balanced", "data.labeled_partition": "", "data.unlabeled_partition": ""}
IID_DIR = {"data.labeled_partition": "class_balanced", "data.unlabeled_partition": "dirichlet"}
DIR_DIR = {"data.labeled_partition": "dirichlet", "data.unlabeled_partition": "dirichlet"}
CIFAR, FASHION, CINIC = ({"data.name": name} for name in ("cifar10", "fashion_mnist", "cinic10"))
UDA, PROX = {"method.name": "uda"}, {"method.prox_mu": 0.01}
NO_C, NO_F, MANY = {"method.regulators": "no_c"}, {"method.regulators": "no_f"}, {"data.num_labels": 10000}
CASES = {
    "feddure_cifar10": OURS | CIFAR | IID,
    "feddure_fashion_mnist": OURS | FASHION | IID,
    "feddure_cinic10:feddure,split=dir_dir": OURS | CINIC | DIR_DIR,
    "feddure_cifar10:feddure,split=iid_dir,gamma=0.3": OURS | CIFAR | IID_DIR | {"data.alpha": 0.3},
    "feddure_cifar10:no_c_reg,split=dir_dir": OURS | CIFAR | DIR_DIR | NO_C,
    "feddure_cifar10:no_f_reg,clients=20,labels=1000": OURS | CIFAR | NO_F | {"cohort_size": 20, "data.num_labels": 1000},
    "feddure_cifar10:fedavg": COMMON | {"method.name": "fedavg"},
    "feddure_cifar10:fedavg_sl": COMMON | {"method.name": "fedavg", "data.reveal_labels": True},
    "feddure_cifar10:fedprox_sl": COMMON | {"method.name": "fedprox", "data.reveal_labels": True} | PROX,
    "feddure_cifar10:fixmatch": COMMON | FIXMATCH | {"method.unlabeled_batch_size": 90},
    "feddure_fashion_mnist:fedprox_fixmatch": COMMON | FIXMATCH | PROX | {"method.unlabeled_batch_size": 110},
    "feddure_cinic10:uda": COMMON | UDA | {"method.confidence": 0.8, "method.unlabeled_batch_size": 170},
    "feddure_cifar10:feddure,batch=paper": OURS | CIFAR | IID | {"method.unlabeled_batch_size": 10},
    "feddure_cifar10:fixmatch,batch=paper": COMMON | FIXMATCH | {"method.unlabeled_batch_size": 10},
    "feddure_cifar10:fedavg,batch=paper": COMMON | {"method.name": "fedavg"},
    "feddure_cifar10:fedprox_uda,labels=10000": COMMON | UDA | PROX | MANY | {"method.unlabeled_batch_size": 40},
    "feddure_cifar10:fedmatch": COMMON | values("method: name=fedmatch unlabeled_batch_size=90 lambda_l1=1e-4"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_configs_are_the_papers(name):
    check(settings(name), CASES[name])


@pytest.mark.parametrize("method", common.LABELS_AT_CLIENTS)
def test_every_method_that_reads_labels_at_the_clients_has_a_config_in_this_setting(method):
    own = {"fedprox": PROX, "fedsem": {"method.labeled_rounds": 0.6}, "fedtrinet": {"method.labeled_rounds": 0.4}}
    expected = COMMON | DIR_DIR | {"method.name": method} | own.get(method, {})
    check(settings("feddure_cifar10", f"{method},split=dir_dir"), expected)


@pytest.mark.parametrize(("split", "gamma"), [("iid_iid", 0.5), ("iid_dir", 0.3), ("dir_dir", 0.3), ("dir_dir", 0.5)])
@pytest.mark.parametrize(("dataset", "examples"), [("cifar10", 50_000), ("fashion_mnist", 60_000), ("cinic10", 90_000)])
def test_every_share_of_labels_can_be_drawn(dataset, examples, split, gamma):
    """2 to 20 % of the training examples; at 2 % no more than one label at every client is asked for."""
    labels = np.random.default_rng(0).permutation(np.arange(examples) % 10)
    for share in (0.02, 0.04, 0.1, 0.15, 0.2):
        given = settings(f"feddure_{dataset}", f"split={split},labels={round(share * examples)},gamma={gamma}")
        holdings = draw(Training(labels, 10), given.data.split, 0)
        least = 1 if split == "dir_dir" and share == 0.02 else 10
        assert given.data.min_size == least
        assert sum(map(len, holdings.labeled)) == round(share * examples)
        assert min(map(len, (*holdings.labeled, *holdings.unlabeled))) >= least
