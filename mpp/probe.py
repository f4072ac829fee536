"""Features of a frozen encoder at every depth, and the kNN classifier that judges them while training."""

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


@torch.no_grad()
def patch_means(encoder: VisionTransformer, images: Tensor) -> Tensor:
    """Mean of the patch tokens after each block.

    Args:
        images: (B, 3, H, W), normalised.
    Returns:
        (depth, B, D) float32.
    """
    tokens = encoder.forward_intermediates(images, output_fmt="NLC", intermediates_only=True)
    return torch.stack([of_block.float().mean(1) for of_block in tokens])


def knn_accuracy(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, neighbours: int, temperature: float = 0.07
) -> float:
    """Share of test images that a weighted kNN classifies rightly.

    Cosine similarity s; the nearest k training images vote with weight exp(s / temperature) (Wu et al., 2018).

    Args:
        train, test: (N, D) and (M, D) features.
        train_labels, test_labels: (N,) and (M,) int64, from 0.
        neighbours: k, at most N count.
    """
    similarity = F.normalize(test, dim=-1) @ F.normalize(train, dim=-1).T  # (M, N)
    nearest, index = similarity.topk(min(neighbours, len(train)), dim=-1)
    votes = torch.zeros(len(test), int(train_labels.max()) + 1, device=test.device)
    votes.scatter_add_(1, train_labels[index], (nearest / temperature).exp())
    return float((votes.argmax(-1) == test_labels).double().mean())
