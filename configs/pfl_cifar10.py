"""The IID CIFAR-10 benchmark of pfl-research: FedAvg with all labels, 1,000 clients of 50 images, 50 a round.

    python -m launch.run --config=pfl_cifar10 --config.data.data_dir=DIR

`cohort=50` in the argument is the number of clients a round. Unlike there, a round draws its clients without replacement, and
weights begin as PyTorch's do (`model.initialization`), there by Xavier's uniform.
Expected (its authors' report): about 70 %; not reproduced here. Run time: for an accelerator; `benchmarks/compare.py` measures
rounds of it beside pfl-research, Flower and PyTorch.
"""

from .common import ConfigDict, base, number, parse


def get_config(argument: str | None = None) -> ConfigDict:
    _, given = parse(argument, ("paper",), cohort="50")
    config = base("fedavg", "emnist_cnn")
    config.rounds, config.cohort_size, config.checkpoint_every = 1500, number("cohort", given["cohort"]), 500
    config.data.update(name="cifar10", num_clients=1000, labels_at="clients", partition="iid")
    config.data.update(labeled_fraction=(1.0,), labeled="none")
    config.client.update(batch_size=10, epochs=1)
    config.client.optimizer.update(learning_rate=0.1, schedule="constant", momentum=0.0, weight_decay=0.0)
    config.client.optimizer.update(nesterov=False, persistent=False)
    config.server.optimizer.momentum = 0.0
    return config
