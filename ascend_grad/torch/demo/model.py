"""The demo's next-token model as a torch module, whose loss can be exchanged.

Shapes in the comments: B sequences, T positions, N = B*T rows, W tokens in the local window, E numbers per embedded
token, D the width, K experts of F hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import rms_norm

import ascend_grad.torch as agt

from ...demo.language_model import Sizes


class LanguageModel(nn.Module):
    """A model that computes the mean of -log p(following token) from tokens.

    A window of the last W tokens is embedded and mixed; then come causal attention over the last T positions and a
    layer of experts mixed by a softmax gate. The last of the D numbers that the loss gets is 1 in every row, so that
    the last column of its weight is a bias.

    Parameters
    ----------
    sizes : Sizes
        The sizes.
    loss : torch.nn.LinearCrossEntropyLoss or LinearCrossEntropyLoss
        The last layer and the loss, for D features and the whole vocabulary.
    """

    def __init__(self, sizes: Sizes, loss: nn.Module):
        super().__init__()
        self.sizes = sizes
        width = sizes.width
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.embedding)
        self.window = nn.Linear(sizes.window * sizes.embedding, width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, sizes.experts, bias=False)
        self.up = nn.Linear(width, sizes.experts * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.experts * sizes.hidden, width, bias=False)
        self.loss = loss
        # True where attention may not look: at later positions.
        self.register_buffer("future", torch.ones(1, 1, sizes.context, sizes.context, dtype=torch.bool).triu(1))

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Compute the loss from tokens [B, W-1+T], the first W-1 only for the windows, and following tokens [B, T]."""
        windows = self.embedding(tokens).unfold(1, self.sizes.window, 1)  # [B, T, E, W]
        x = self.window(windows.flatten(2))  # [B, T, D]
        for layer in (self._attend, self._mix_experts):
            x = x + self._with_normal(layer, x)
        features = rms_norm(x, x.shape[-1:]).flatten(0, 1)  # [N, D]
        features = torch.cat([features[:, :-1], torch.ones_like(features[:, :1])], dim=1)
        return self.loss(features, following.flatten())

    @staticmethod
    def _with_normal(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return layer(rms_norm(x, x.shape[-1:]))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = (3, self.sizes.heads, self.sizes.width // self.sizes.heads)
        query, key, value = (
            self.query_key_value(x).unflatten(-1, heads).permute(2, 0, 3, 1, 4)
        )  # [B, heads, T, D/heads]
        scores = query @ key.transpose(-1, -2)  # [B, heads, T, T], of [B, heads, T, D/heads]
        weights = agt.scaled_masked_softmax(scores, self.future, 1 / math.sqrt(heads[-1]))
        return self.attended((weights @ value).transpose(1, 2).flatten(2))

    def _mix_experts(self, x: torch.Tensor) -> torch.Tensor:
        gate = agt.softmax(self.gate(x))  # [B, T, K]
        hidden = self.up(x).relu().unflatten(-1, (self.sizes.experts, self.sizes.hidden))  # [B, T, K, F]
        return self.down((hidden * gate[..., None]).flatten(2))
