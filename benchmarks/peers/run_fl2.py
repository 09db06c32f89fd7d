"""A cohort of (FL)^2's clients on WRN-28-2 in a plain PyTorch loop: pseudo-labels, SACR with ASAM, weighted averaging."""

import sys

import torch
from job import Job
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Pre-activation block, whose 1x1 shortcut sees the activated input: [B, ch, H, W] -> [B, features, H', W']."""

    def __init__(self, inputs: int, features: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs, momentum=0.0), nn.BatchNorm2d(features, momentum=0.0)
        self.conv1 = nn.Conv2d(inputs, features, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(features, features, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, features, 1, stride, bias=False) if inputs != features else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        activated = functional.relu(self.norm1(x))
        y = self.conv2(functional.relu(self.norm2(self.conv1(activated))))
        return y + (x if self.shortcut is None else self.shortcut(activated))


class WideResNet(nn.Module):
    """WRN-depth-width: images [B, ch, H, W] -> logits [B, C]. Training leaves the stored statistics alone."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.conv, blocks, inputs = nn.Conv2d(3, 16, 3, 1, 1, bias=False), [], 16
        for stage in range(3):
            for block in range((depth - 4) // 6):
                blocks.append(Block(inputs, 16 * 2**stage * width, 2 if stage and not block else 1))
                inputs = 16 * 2**stage * width
        self.blocks, self.norm = nn.Sequential(*blocks), nn.BatchNorm2d(inputs, momentum=0.0)
        self.linear = nn.Linear(inputs, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self.linear(functional.relu(self.norm(self.blocks(self.conv(x)))).mean((2, 3)))


def pseudo_label(network: nn.Module, images: torch.Tensor, job: Job) -> tuple[torch.Tensor, ...]:
    """Labels, the masks of accepted and of confident examples, and tau_k ((FL)^2, Eqs. 7 to 11)."""
    network.eval()
    with torch.inference_mode():
        probs = torch.cat([functional.softmax(network(x), 1) for x in images.split(job.eval_batch_size)])
    confidence, label = probs.max(1)
    tau, mean = confidence.mean(), probs.mean(0)
    accepted = confidence > (mean / mean.max() * tau)[label]
    return label.clone(), accepted.clone(), (confidence > job.confidence).clone(), tau.clone()


def mean_over(values: torch.Tensor, mask: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """The sum over the examples of a mask, over `divisor`; 0 where that is 0."""
    return (values * mask).sum() / divisor.clamp(min=1) * (divisor > 0)


def step_gradient(network, x, label, accepted, confident, rho: float) -> list[torch.Tensor]:
    """The gradient of a step with SACR (Eqs. 10 to 14): two passes forward, three back."""
    params = list(network.parameters())
    logits = network(x)
    ce = functional.cross_entropy(logits, label, reduction="none")
    of_confident = torch.autograd.grad(mean_over(ce, confident, confident.sum()), params, retain_graph=True)
    of_accepted = torch.autograd.grad(mean_over(ce, accepted, accepted.sum()), params)
    with torch.no_grad():
        scales = [1.0 if name.endswith("bias") else p.abs() + 0.01 for name, p in network.named_parameters()]
        scaled = [scale * g for scale, g in zip(scales, of_confident, strict=True)]
        norm = torch.sqrt(sum(g.square().sum() for g in scaled))
        factor = torch.where(norm > 0, rho / norm, 0.0)  # on the device: no step waits for the host
        ascent = [factor * scale * g for scale, g in zip(scales, scaled, strict=True)]
        for p, a in zip(params, ascent, strict=True):
            p.add_(a)
    target = functional.log_softmax(logits.detach(), 1)
    kl = (target.exp() * (target - functional.log_softmax(network(x), 1))).sum(1)
    of_consistency = torch.autograd.grad(mean_over(kl, confident, accepted.sum()), params)
    with torch.no_grad():
        for p, a in zip(params, ascent, strict=True):
            p.sub_(a)
    return [a + b for a, b in zip(of_accepted, of_consistency, strict=True)]


if __name__ == "__main__":
    job = Job(sys.argv[1])
    network = WideResNet(job.depth, job.width).to(job.device, memory_format=job.layout)
    if job.dtype == "bfloat16" and not job.checked:
        forward = torch.autocast(job.device, torch.bfloat16)(network.forward)
        network.forward = lambda x: forward(x).float()
    start = {name: value.to(job.device, job.stored) for name, value in job.weights.items()}
    inputs = [job.inputs[client][0] for client in range(job.cohort)]
    at = [job.now()]
    for _ in range(job.warm_up + job.rounds):
        total, weight = {name: torch.zeros_like(value) for name, value in start.items()}, 0.0
        for images in inputs:
            network.load_state_dict(start, strict=False)
            label, accepted, confident, tau = pseudo_label(network, images, job)
            optimizer = torch.optim.SGD(network.parameters(), job.learning_rate, 0.9, weight_decay=5e-4, nesterov=True)
            network.train()
            for _ in range(job.epochs if accepted.any() else 0):
                for i in range(0, len(images), job.batch_size):
                    of = slice(i, i + job.batch_size)
                    gradient = step_gradient(network, images[of], label[of], accepted[of], confident[of], job.rho)
                    for p, g in zip(network.parameters(), gradient, strict=True):
                        p.grad = g
                    optimizer.step()
            share = (1.0 - tau).clamp(min=1e-20)
            weight += share
            for name, p in network.named_parameters():
                total[name] += share * p.detach()
        at.append(job.now())
    job.report(at, {name: total[name] / weight for name, _ in network.named_parameters()})
