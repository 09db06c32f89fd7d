"""FedSiam's and FedTriNet's config files: their papers' and released codes' values, written out (FedSiam: Tables 2 and 4)."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.methods.fedsiam_d import upload_share
from tests.configs.common import FIXMATCH, check, settings, values, without

OPTIMIZER = values("""
    client.optimizer, server.optimizer: name=sgd learning_rate=0.01 schedule=constant momentum=0.9 nesterov=False
    client.optimizer, server.optimizer: weight_decay=0.0001 clip_norm=0.0 persistent=False
""")
COMMON = OPTIMIZER | values("""
    method: consistency=mse consistency_weight=1.0 normalization=paper labeled_repeats=1 repeats_below=1.0
    model: variant=paper norm=running norm_momentum=0.1
    data: num_clients=100 exclude_labeled=True weak=fedsiam labeled=default
    server: momentum=0.0 learning_rate=1.0 pretrain=0 epochs=1 batch_size=10
    cohort_size=10
""")
CLIENTS = COMMON | values("data: labels_at=clients labeled_fraction=(0.1,)\nclient: epochs=5 batch_size=10\nrounds=50")
SERVER = COMMON | {"data.labels_at": "server", "client.epochs": 1, "client.batch_size": 100, "rounds": 200}
RELEASED = CLIENTS | values("""
    method: normalization=released labeled_repeats=3
    model: variant=released
    data: partition=class_balanced label_selection=stratified
""")
MNIST = {"data.name": "mnist", "model.name": "mnist_cnn"}
SVHN = {"data.name": "svhn_cropped", "model.name": "cifar_cnn"}
CIFAR = {"data.name": "cifar10", "model.name": "cifar_cnn"}
LINEAR = values("method: target_delay=0 curve=linear pi_rounds=0.06 saved=0.5 alpha_max=0.999")
RECTANGLE = LINEAR | {"method.curve": "rectangle", "method.pi_rounds": 0.2, "method.end_round": 0.8}
KL, PI, MT, D = ({"method.consistency": "kl"}, *({"method.name": f"fedsiam_{name}"} for name in ("pi", "mt", "d")))
EPOCHS, STEPS = {"method.alpha_counts": "epochs"}, {"method.alpha_counts": "steps"}
PLAIN = OPTIMIZER | {"client.optimizer.momentum": 0.5, "client.optimizer.weight_decay": 0.0, "model.variant": "released"}
FEDSEM = {"method.name": "fedsem", "method.labeled_rounds": 0.6, "method.labeled_repeats": 1}
CLIPPED = {"client.optimizer.clip_norm": 1.0, "server.optimizer.clip_norm": 1.0}
FEDMATCH = CLIPPED | {"method.confidence": 0.95, "method.helpers": 2, "method.lambda_s": 1.0, "method.lambda_l2": 0.01}
FEDTRINET = values("""
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
IN_ITS_SETTING = without(FEDTRINET, "method.threshold") | values("method: name=fedsem\ndata: partition=dirichlet alpha=0.3")
TRINET = {"method.name": "fedtrinet", "method.labeled_rounds": 0.4}
CLASSES, GRID = ({"data.partition": partition} for partition in ("random_classes", "class_grid"))
ON_GRID = {"data.labeled_partition": "class_grid", "data.unlabeled_partition": "iid", "data.labeled_fraction": (0.2,)}
SIX_TIMES = {"method.labeled_repeats": 6, "method.repeats_below": 0.4}
APART = {"data.labeled_partition": "random_classes", "data.unlabeled_partition": "iid"}
FIFTH, THIRD = {"data.labeled_fraction": (0.2,)}, {"data.labeled_fraction": (0.55,) * 10 + (0.05,) * 90}
TWICE = {"data.labeled_fraction": (0.15,), "data.weak": "none", "method.labeled_repeats": 2}
THRICE = {"client.epochs": 5, "method.labeled_repeats": 3}
PLAIN_VIEW, LARGE = {"data.weak": "none"}, {"client.batch_size": 30}

CASES = {
    "fedsiam_mnist": CLIENTS | MNIST | D | LINEAR | STEPS | {"data.partition": "iid"},
    "fedsiam_mnist:mt,gamma=.2,split=noniid1": CLIENTS | MNIST | MT | CLASSES | FIFTH | {"data.classes_per_client": 2},
    "fedsiam_mnist:no_siamese": CLIENTS | MNIST | PI | {"method.consistency_weight": 0.0},
    "fedsiam_mnist:d,split=noniid2": CLIENTS | MNIST | APART,
    "fedsiam_mnist:d,split=noniid3": CLIENTS | MNIST | THIRD,
    "fedsiam_mnist:pi,labels_at=server,gamma=0.01": SERVER | MNIST | PI | {"data.labeled_fraction": (0.01,)},
    "fedsiam_mnist:mt,labels_at=server,split=noniid": SERVER | MNIST | MT | CLASSES,
    "fedsiam_mnist:d,variant=released": RELEASED | MNIST | D | EPOCHS | PLAIN_VIEW | {"method.target_delay": 1},
    "fedsiam_mnist:pi,variant=released,gamma=0.15": RELEASED | MNIST | PI | TWICE,
    "fedsiam_mnist:mt,variant=released,split=noniid3": RELEASED | MNIST | MT | THIRD | SIX_TIMES | PLAIN_VIEW,
    "fedsiam_mnist:fedavg_pp,variant=released,split=noniid3": PLAIN | MNIST | THIRD | SIX_TIMES | {"client.epochs": 5},
    "fedsiam_mnist:fedavg,variant=released,split=noniid3": PLAIN | MNIST | THIRD | {"method.labeled_repeats": 1},
    "fedsiam_svhn:mt,variant=released,split=noniid2,gamma=0.2": without(RELEASED, "data.partition")
    | SVHN
    | MT
    | ON_GRID
    | {"method.labeled_repeats": 2},
    "fedsiam_cifar10:mt,variant=released,split=noniid3": RELEASED | CIFAR | MT | KL | THIRD | SIX_TIMES | LARGE,
    "fedsiam_mnist:d,curve=rectangle": CLIENTS | MNIST | D | RECTANGLE,
    "fedsiam_svhn:d,labels_at=server,curve=rectangle": SERVER | (SVHN | RECTANGLE | {"rounds": 150}),
    "fedsiam_cifar10:d,curve=linear": CLIENTS | CIFAR | D | LINEAR,
    "fedsiam_svhn": CLIENTS | SVHN | D | LINEAR,
    "fedsiam_svhn:mt,labels_at=server": SERVER | SVHN | MT | {"rounds": 150, "data.labeled_fraction": (0.1,)},
    "fedsiam_svhn:mt,variant=released": RELEASED | SVHN | MT | EPOCHS,
    "fedsiam_svhn:d,variant=released": RELEASED | SVHN | D | PLAIN_VIEW,
    "fedsiam_cifar10": CLIENTS | CIFAR | D | RECTANGLE,
    "fedsiam_cifar10:mt,split=noniid3": CLIENTS | CIFAR | MT | KL | THIRD,
    "fedsiam_cifar10:pi,labels_at=server,split=noniid": SERVER | CIFAR | PI | KL,
    "fedsiam_cifar10:d,labels_at=server": SERVER | CIFAR | RECTANGLE,
    "fedsiam_cifar10:d,variant=released": RELEASED | CIFAR | KL | EPOCHS | LARGE,
    "fedsiam_cifar10:d,variant=released,split=noniid1": RELEASED | CIFAR | D | LARGE | GRID,
    # Other methods run in the same setting, the released code's with labeled data three times an epoch, FedAvg's once; those
    # without a loss on unlabeled data have momentum .5 and no weight decay there.
    "fedsiam_mnist:fedsem": OPTIMIZER | MNIST | FEDSEM | {"rounds": 50, "client.epochs": 5, "client.batch_size": 10},
    "fedsiam_mnist:fedsem,variant=released": PLAIN | MNIST | FEDSEM | {"method.labeled_repeats": 3, "client.epochs": 5},
    "fedsiam_svhn:fedsem,variant=released,gamma=0.2": PLAIN | SVHN | FEDSEM | {"method.labeled_repeats": 2},
    "fedsiam_mnist:fedtrinet,variant=released": OPTIMIZER | MNIST | TRINET | {"client.epochs": 5},
    "fedsiam_cifar10:fedavg": OPTIMIZER | CIFAR | {"client.epochs": 5},
    "fedsiam_cifar10:fedavg,variant=released": PLAIN | CIFAR | LARGE | {"client.epochs": 5, "data.labeled": "none"},
    "fedsiam_cifar10:fedavg_pp,variant=released": PLAIN | CIFAR | THRICE | {"data.labeled": "default"},
    "fedsiam_mnist:fixmatch,variant=released": OPTIMIZER | MNIST | THRICE | {"method.unlabeled_batch_size": 70},
    "fedsiam_cifar10:uda": OPTIMIZER | CIFAR | {"client.batch_size": 10, "method.unlabeled_batch_size": 70},
    "fedsiam_mnist:fedmatch,variant=released,gamma=0.15": OPTIMIZER | MNIST | CLIPPED | {"method.labeled_repeats": 2},
    "fedsiam_mnist:feddure,variant=released": OPTIMIZER | MNIST | {"client.epochs": 15},
    "fedsiam_svhn:fedavg": OPTIMIZER | SVHN | {"data.labeled": "none", "data.weak": "fedsiam"},
    "fedsiam_svhn:fedavg_pp": OPTIMIZER | SVHN | {"data.labeled": "default"},
    "fedsiam_mnist:fixmatch": OPTIMIZER | MNIST | FIXMATCH,
    "fedsiam_mnist:fedmatch": OPTIMIZER | MNIST | FEDMATCH | {"method.lambda_l1": 1e-4, "method.l1_thres": 5e-6},
    "fedsiam_mnist:fedmatch,labels_at=server": OPTIMIZER | MNIST | FEDMATCH | {"method.lambda_l1": 1e-5},
    "fedsiam_mnist:fixmatch,labels_at=server": OPTIMIZER | MNIST | FIXMATCH | {"data.strong": "fedsiam"},
    "fedtrinet_mnist": FEDTRINET | MNIST,
    "fedtrinet_cifar10": FEDTRINET | CIFAR,
    "fedtrinet_svhn": FEDTRINET | SVHN | {"data.weak": "flip_crop4"},
    "fedtrinet_mnist:fedsem,split=dir0.3": IN_ITS_SETTING | MNIST,
    "fedtrinet_cifar10:fedsem,split=dir0.3": IN_ITS_SETTING | CIFAR,
    "fedtrinet_svhn:fedsem,split=dir0.3": IN_ITS_SETTING | SVHN | {"data.weak": "flip_crop4"},
}


@pytest.mark.parametrize("name", CASES)
def test_the_configs_are_the_papers_and_the_released_codes(name):
    check(settings(name), CASES[name])


@pytest.mark.parametrize("place", ["clients", "server"])
@pytest.mark.parametrize("file", ["fedsiam_mnist", "fedsiam_cifar10", "fedsiam_svhn"])
def test_ds_curve_saves_the_share_of_layers_that_is_asked_for(file, place):
    """Over a whole run, to within a round: that at an end of the curve, and what is cut."""
    run = settings(file, f"d,labels_at={place}")
    options = run.method_options().for_rounds(run.rounds)
    shares = upload_share(options, run.rounds, jnp.arange(1, run.rounds + 1))
    np.testing.assert_allclose(jnp.sum(shares), (1 - options.saved) * run.rounds, atol=1)
