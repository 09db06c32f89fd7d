"""FedLabel on CIFAR-10 with ResNet-34, labels at the clients: 100 clients, 10 a round.

    python -m launch.run --config=configs/fedlabel_cifar10.py:paper,labels=0.2,alpha=0.1 --config.data.data_dir=DIR
    python -m launch.run --config=configs/fedlabel_cifar10.py:uda,labels=0.5 --config.data.data_dir=DIR

The first word is `paper`, `released` (FLUTE's code, with its 2,000 rounds), `local_only`, `global_only` (one expert alone), or
another method in this setting; `method.prox_mu=0.001` is its FedProx form, `data.reveal_labels=True` gives it all labels. Then
`tau=30` (labeled steps), `beta=0.3`, and `strong=`: `released`, `none` (no strong augmentation), or `paper`: RandAugment as the
text has it, ten operations at 1/30 of the code's scale, on which low is dark, flat and inverted: the harshest of the three.
`method.consistency_weight` is lambda_0, `method.measure=entropy` the other confidence. `method.unlabeled_rate` is w_U's
learning rate over w_L's; 1, 3.3 and 5.3 are worth a comparison, since FLUTE, which never resets w_U's gradients, goes about 5.5
times as far. The 60,000 images are split anew, 80/5/15, as the paper's appendix says, unless `released`: FLUTE has the official
split.

Expected (the paper, in %; not reproduced here), 20 % labels, alpha .1: fedlabel 46.05 (1.09), fedmatch 31.94, FedProx + uda
31.99, uda 31.32, fedprox 31.09, fedtrinet 29.56, fedavg 28.83, fixmatch 23.99, FedProx + fixmatch 22.38; with all labels
fedprox 44.72, fedavg 44.67. One expert: local_only 32.57, global_only 37.51, both 44.51; with 50 % labels 41.21, 38.43, 50.53.
Run time: made for an accelerator.
"""

from ml_collections import ConfigDict

from configs import fedlabel


def get_config(argument: str | None = None) -> ConfigDict:
    return fedlabel.cifar(fedlabel.make(argument, "cifar10", 34))
