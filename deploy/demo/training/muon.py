"""The optimizer of the demo models: Muon for the matrices of the blocks, AdamW for the embedding and the norms.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest orthogonal one, found by five Newton-Schulz
steps. Matrices of one shape are stacked, so that a step costs a few batched products instead of hundreds of small ones.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic, from the reference implementation
MOMENTUM = 0.95
ADAM_NAMES = ("embed", "lm_head", ".mix")  # matrices that AdamW updates; Muon updates the others


class MuonAdamW:
    """Both optimizers behind one `step`; learning rates are scaled by the schedule's `factor` at each step."""

    def __init__(
        self, parameters: Mapping[str, Tensor], matrix_lr: float, other_lr: float, weight_decay: float
    ) -> None:
        def is_adams(name: str) -> bool:
            return any(part in name for part in ADAM_NAMES)

        matrices = [p for name, p in parameters.items() if p.ndim == 2 and not is_adams(name)]
        embeddings = [p for name, p in parameters.items() if p.ndim == 2 and is_adams(name)]
        vectors = [p for p in parameters.values() if p.ndim == 1]
        self.matrix_lr, self.other_lr, self.weight_decay = matrix_lr, other_lr, weight_decay
        self.groups = [[p for p in matrices if p.shape == shape] for shape in dict.fromkeys(p.shape for p in matrices)]
        self.momenta = [torch.zeros((len(group), *group[0].shape), device=group[0].device) for group in self.groups]
        self.adamw = torch.optim.AdamW(
            [{"params": embeddings, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=other_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
        )

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update every parameter from its gradient, then forget the gradients."""
        lr = self.matrix_lr * factor
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradients = torch.stack([p.grad for p in group if p.grad is not None])  # [num_matrices, rows, columns]
            momentum.lerp_(gradients, 1 - MOMENTUM)
            update = _orthogonal(gradients.lerp(momentum, MOMENTUM))
            scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            for p, change in zip(group, update, strict=True):
                p.mul_(1 - lr * self.weight_decay).add_(change, alpha=-lr * scale)
                p.grad = None
        for param_group in self.adamw.param_groups:
            param_group["lr"] = self.other_lr * factor
        self.adamw.step()
        self.adamw.zero_grad()


def _orthogonal(matrices: Tensor) -> Tensor:
    """Approximately U V^T of each matrix U S V^T; [num_matrices, rows, columns], computed in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
