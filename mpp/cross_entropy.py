"""Cross entropy whose backward pass has no dense gradient of the log-probabilities, which is as large as the logits."""

from typing import Any

import torch
from torch import Tensor

VALUES_PER_BLOCK = 2**22
"""Of that gradient at a time: 16 MB, which a GPU's cache holds."""
MEAN = 1  # torch's number of a reduction
NOT_IGNORED = -100  # torch's default of `ignore_index`
aten = torch.ops.aten


class CrossEntropy(torch.autograd.Function):
    """`F.cross_entropy` to the bit, for logits (N, classes) and classes (N,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_probabilities = logits.log_softmax(1)
        loss, count = aten.nll_loss_forward(log_probabilities, targets, None, MEAN, NOT_IGNORED)
        ctx.save_for_backward(log_probabilities, targets, count)
        return loss

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, None]:
        log_probabilities, targets, count = ctx.saved_tensors
        gradient = torch.empty_like(log_probabilities)
        rows = max(1, VALUES_PER_BLOCK // log_probabilities.shape[1])
        blocks = zip(log_probabilities.split(rows), targets.split(rows), gradient.split(rows), strict=True)
        for outputs, classes, of_logits in blocks:
            of_outputs = aten.nll_loss_backward(of_loss, outputs, classes, None, MEAN, NOT_IGNORED, count)
            aten._log_softmax_backward_data.out(of_outputs, outputs, 1, outputs.dtype, out=of_logits)
        return gradient, None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits (N, classes) float32 and classes (N,), a scalar."""
    return CrossEntropy.apply(logits, targets)
