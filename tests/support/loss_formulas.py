"""Compute losses of a linear layer and their outputs by the documented formulas, in plain operations of torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Formula:
    """The formula of `ascend_grad.linear_cross_entropy` with its options."""

    weight: torch.Tensor | None = None
    token_weight: torch.Tensor | None = None
    target_prob: torch.Tensor | None = None
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    temperature: float | torch.Tensor = 1.0
    denominator: float | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    ignore_index: int = -100

    def logits(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        u = x @ w.T
        z = self.logit_scale * (u if bias is None else u + bias)
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z / (self.temperature[:, None] if isinstance(self.temperature, torch.Tensor) else self.temperature)

    def loss(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, reduction: str
    ) -> torch.Tensor:
        z = self.logits(x, w, bias)
        rows, vocabulary = z.shape
        lse = torch.logsumexp(z, -1)
        classes = target[:, None] if target.dim() == 1 else target
        is_class = classes != self.ignore_index
        counted = is_class.any(-1)
        classes = torch.where(is_class, classes, 0)
        prob = (z.new_ones(classes.shape) if self.target_prob is None else self.target_prob) * is_class
        of_class = z.new_ones(vocabulary) if self.weight is None else self.weight
        of_row = (z.new_ones(rows) if self.token_weight is None else self.token_weight) * counted
        nll = (prob * of_class[classes] * (lse[:, None] - z.gather(1, classes))).sum(-1)
        smooth = (of_class * (lse[:, None] - z)).sum(-1) / vocabulary
        losses = of_row * ((1 - self.label_smoothing) * nll + self.label_smoothing * smooth)
        squares = of_row * self.lse_square_scale * lse**2
        if reduction == "none":
            return losses + squares
        if reduction == "sum":
            return (losses + squares).sum()
        if self.denominator is not None:
            return (losses + squares).sum() / self.denominator
        total = of_row if self.target_prob is not None else of_row * of_class[classes[:, 0]]
        return losses.sum() / total.sum() + squares.sum() / of_row.sum()

    def outputs(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        z = self.logits(x, w, bias)
        is_class = target != self.ignore_index
        counted = is_class if target.dim() == 1 else is_class.any(-1)
        classes = torch.where(is_class, target, 0)
        log_p = torch.log_softmax(z, -1)
        predicted = torch.where(counted, z.argmax(-1), -1)
        return {
            "lse": torch.logsumexp(z, -1) * counted,
            "log_prob": log_p.gather(1, classes.reshape(len(z), -1)).reshape(target.shape) * is_class,
            "entropy": -(log_p.exp() * log_p).sum(-1) * counted,
            "predicted": predicted,
            "correct": (predicted == (target if target.dim() == 1 else target[:, 0])).sum(),
        }
