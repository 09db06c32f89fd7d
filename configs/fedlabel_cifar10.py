"""FedLabel on CIFAR-10 with ResNet-34, labels at the clients: 100 clients, 10 a round.

    python -m launch.run --config=fedlabel_cifar10:paper,labels=0.2,alpha=0.1 --config.data.data_dir=DIR

First word: paper, released (FLUTE's code), local_only or global_only (one expert alone), or another method in this setting,
with `--config.method.prox_mu=0.001` in its FedProx form and with `--config.data.reveal_labels=true` knowing all labels. Then
tau (labeled steps), beta (the threshold) and strong: released, none, or paper (as the text has it). `method.consistency_weight`
is lambda_0. `method.unlabeled_rate` is w_U's learning rate over w_L's; 1, 3.3 and 5.3 are worth a comparison, as FLUTE, which
never resets w_U's gradients, goes about 5.5 times as far. All images are split anew, 80/5/15, unless `released`.

Expected (the paper, in %; not reproduced here), 20 % labels, alpha .1: fedlabel 46.05 (1.09), FedProx + uda 31.99, fedmatch
31.94, uda 31.32, fedprox 31.09, fedtrinet 29.56, fedavg 28.83, fixmatch 23.99, FedProx + fixmatch 22.38; with all labels
fedprox 44.72, fedavg 44.67. local_only 32.57, global_only 37.51, both 44.51; with 50 % labels 41.21, 38.43, 50.53.
Run time: for an accelerator.
"""

from .fedlabel import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "cifar10", 34)
