"""The CIFAR-10 benchmark of pfl-research, IID: FedAvg with all labels, 1,000 clients of 50 images, 50 a round.

    python -m launch.run --config=configs/pfl_cifar10.py --config.data.data_dir=DIR

One local epoch in batches of 10, SGD .1 without momentum or weight decay, the clients' mean as the new model, no augmentation,
evaluated every 10 of 1,500 rounds. The argument `cohort=50` is the number of clients a round. Where it differs: each round
draws its clients without replacement, and weights begin as PyTorch's do (`model.initialization`), there by Xavier's uniform.

Expected (its authors' report): an accuracy of about 70 %; not yet reproduced here.
Run time: made for an accelerator. `benchmarks/compare.py` measures rounds of it beside pfl-research, Flower and PyTorch.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(argument: str | None = None) -> ConfigDict:
    _, given = common.parse(argument, ("paper",), cohort="50")
    config = common.base("fedavg", "emnist_cnn")
    config.rounds, config.cohort_size = 1500, common.number("cohort", given["cohort"])
    config.eval_every, config.checkpoint_every = 10, 500
    config.data.update(name="cifar10", num_clients=1000, labels_at="clients", partition="iid")
    config.data.update(labeled_fraction=(1.0,), weak="none", labeled="none")
    config.client.update(batch_size=10, epochs=1)
    config.client.optimizer.update(
        learning_rate=0.1, schedule="constant", momentum=0.0, nesterov=False, weight_decay=0.0, persistent=False
    )
    config.server.update(momentum=0.0, pretrain=0)
    return config
