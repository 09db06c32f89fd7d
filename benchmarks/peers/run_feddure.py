"""A cohort of FedDure's clients on ResNet-9 in a plain PyTorch loop, with the meta-gradient through a look-ahead step."""

import sys

import torch
from job import Job
from torch import nn
from torch.func import functional_call
from torch.nn import functional


class ResNet9(nn.Module):
    """ResNet-9: 3x3 convolutions with bias, batch norm and ReLU; [B, 3, H, W] -> logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 64), (64, 128), (128, 128), (128, 128), (128, 256), (256, 512), (512, 512), (512, 512)]
        self.convs = nn.ModuleList(nn.Conv2d(inputs, features, 3, padding=1) for inputs, features in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(features, track_running_stats=False) for _, features in sizes)
        self.linear = nn.Linear(512, 10)

    def layer(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """A convolution, its batch norm and a ReLU."""
        return functional.relu(self.norms[i](self.convs[i](x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = functional.max_pool2d(self.layer(1, self.layer(0, x)), 2)
        x = x + self.layer(3, self.layer(2, x))
        x = functional.max_pool2d(self.layer(5, functional.max_pool2d(self.layer(4, x), 2)), 2)
        x = x + self.layer(7, self.layer(6, x))
        return self.linear(x.amax((2, 3)))


def weights_of(regulator: dict[str, torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """F-reg's weight of each example."""
    hidden = functional.relu(functional.linear(logits.softmax(1), regulator["hidden.weight"], regulator["hidden.bias"]))
    return functional.linear(hidden, regulator["output.weight"], regulator["output.bias"]).sigmoid()[:, 0]


def step(network: nn.Module, theta: dict, phi: dict, w: dict, optimizers: tuple, batch: tuple, job: Job) -> None:
    """One step of theta, of C-reg phi and of F-reg w (FedDure, Eqs. 1 to 10), in place."""
    images, labels, unlabeled = batch
    of_theta, of_phi, of_w = optimizers
    both = torch.cat((images, unlabeled, unlabeled))  # the weak and the strong view are plain ones
    logits = functional_call(network, theta, (both,))
    labeled, weak, strong = logits.split((len(images), len(unlabeled), len(unlabeled)))
    label = weak.detach().argmax(1)

    z = functional_call(network, phi, (unlabeled,))
    ce = functional.cross_entropy(z, label, reduction="none")
    grads = torch.autograd.grad((weights_of(w, z) * ce).mean(), list(phi.values()), create_graph=True)
    ahead = {name: p - job.eta_s * g for (name, p), g in zip(phi.items(), grads, strict=True)}
    loss = functional.cross_entropy(functional_call(network, ahead, (images,)), labels)
    for p, g in zip(w.values(), torch.autograd.grad(loss, list(w.values()), retain_graph=True), strict=True):
        p.grad = g
    of_w.step()

    with torch.no_grad():
        before = functional.cross_entropy(functional_call(network, phi, (images,)), labels)
    z = functional_call(network, phi, (unlabeled,))
    loss = (weights_of(w, z) * functional.cross_entropy(z, label, reduction="none")).mean()
    for p, g in zip(phi.values(), torch.autograd.grad(loss, list(phi.values())), strict=True):
        p.grad = g
    of_phi.step()
    with torch.no_grad():
        reward = before - functional.cross_entropy(functional_call(network, phi, (images,)), labels)
        factor = weights_of(w, strong) + reward

    loss = functional.cross_entropy(labeled, labels)
    loss = loss + (factor * functional.cross_entropy(strong, label, reduction="none")).mean()
    for p, g in zip(theta.values(), torch.autograd.grad(loss, list(theta.values())), strict=True):
        p.grad = g
    of_theta.step()


def copies(of: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies to be trained."""
    return {name: p.clone(memory_format=torch.preserve_format).requires_grad_() for name, p in of.items()}


if __name__ == "__main__":
    job = Job(sys.argv[1])
    network = ResNet9().to(job.device, memory_format=job.layout).train()
    names = [name for name, _ in network.named_parameters()]
    start = {name: job.weights[name].to(job.device, job.stored) for name in names}
    start = {name: p.contiguous(memory_format=job.layout) if p.ndim == 4 else p for name, p in start.items()}
    regulators = [{name: x[k].to(job.device, job.stored) for name, x in job.regulators.items()} for k in range(job.cohort)]

    fregs = [copies(w) for w in regulators]
    adams = [torch.optim.Adam(w.values(), job.eta_w) for w in fregs]
    at = [job.now()]
    for _ in range(job.warm_up + job.rounds):
        total = {name: torch.zeros_like(p) for name, p in start.items()}
        for client in range(job.cohort):
            theta, phi = copies(start), copies(start)
            of_theta = torch.optim.SGD(theta.values(), job.learning_rate)
            optimizers = of_theta, torch.optim.SGD(phi.values(), job.eta_s), adams[client]
            for _ in range(job.steps):
                step(network, theta, phi, fregs[client], optimizers, (*job.inputs[client], job.unlabeled[client]), job)
            for name, p in theta.items():
                total[name] += p.detach() / job.cohort
        at.append(job.now())
    job.report(at, total)
