"""DINOv2's linear probe (Oquab et al., DINOv2: Learning Robust Visual Features without Supervision, TMLR 2024, B.3).

As in the authors' public code (facebookresearch/dinov2, dinov2/eval/linear.py):

- random resized crops (area 0.08 to 1, ratio 3/4 to 4/3) and flips; a centre crop at test.
- Linear layers that are trained at once, on the same crops: 13 learning rates, on the [class] tokens of the last block
  or of the last 4, side by side, without and with the mean of the last block's patches. All tokens have passed the
  encoder's final norm. Weights begin as normal numbers of deviation 0.01, the bias at 0.
- SGD: momentum 0.9, no weight decay, 12,500 steps of batch 1,024; the rate falls to 0 by half a cosine, from step to
  step. Each rate is multiplied by batch / 256.

Differences: the layer is chosen on a tenth of the training images, and then trained again on all of them. The authors
choose among the layers by the images that they report. Crops are bilinear, as everywhere in mpp, and not bicubic.
An encoder without a [class] token has the mean of each block's patches instead.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evaluation.frozen.encoder import FrozenEncoder, patch_grid
from evaluation.protocols.protocol import IMAGENET_IMAGES, Candidate, LinearProtocol, Plan, scaled_batch
from mpp.features.frozen import pool, tokens_at
from mpp.models.plain import has_class

BATCH = 1024
STEPS = 12_500
RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
LAST_BLOCKS = (1, 4)
LEAST_BATCH = 128
LEAST_STEPS = 1250
"""A tenth of the published number."""
MOMENTUM = 0.9
INIT_DEVIATION = 0.01


class Dinov2(LinearProtocol):
    """DINOv2's linear probe.

    Args:
        encoder: a ViT; of one with fewer than 4 blocks, all are taken.
    Raises:
        Unavailable: it has no patches.
    """

    name = "dinov2"
    published = Plan(IMAGENET_IMAGES, BATCH, STEPS)
    chooses = True

    def __init__(self, encoder: FrozenEncoder):
        patch_grid(encoder.model)
        deepest = len(encoder.stages)
        self.has_class = has_class(encoder.model)
        self.blocks = sorted({min(blocks, deepest) for blocks in LAST_BLOCKS})
        self.depths = list(range(deepest - self.blocks[-1] + 1, deepest + 1))
        self.candidates = []
        for place, (blocks, adds_mean) in enumerate(self.inputs()):
            for rate in RATES:
                about = {"blocks": blocks, "adds_mean": adds_mean, "base_lr": rate}
                self.candidates.append(Candidate(place, rate, about))

    def inputs(self) -> list[tuple[int, bool]]:
        """Number of last blocks, and whether the mean of the last one's patches is added, of each input."""
        with_mean = (False, True) if self.has_class else (False,)
        return [(blocks, adds_mean) for blocks in self.blocks for adds_mean in with_mean]

    def plan(self, image_count: int) -> Plan:
        batch = scaled_batch(BATCH, image_count, LEAST_BATCH)
        published_epochs = self.published.epochs
        steps = round(published_epochs * image_count / batch)
        return Plan(image_count, batch, min(STEPS, max(LEAST_STEPS, steps)))

    def encode(self, encoder: FrozenEncoder, images: Tensor) -> list[Tensor]:
        model = encoder.model
        *earlier, last = tokens_at(model, encoder.normalize(images), self.depths)
        tokens = [*(model.norm(each) for each in earlier), last]
        of_block = [pool(model, each, "class" if self.has_class else "mean").float() for each in tokens]
        mean = pool(model, last, "mean").float()
        inputs = []
        for blocks, adds_mean in self.inputs():
            parts = of_block[-blocks:]
            inputs.append(torch.cat([*parts, mean] if adds_mean else parts, dim=-1))
        return inputs

    def build_head(self, width: int, classes: int, generator: torch.Generator) -> nn.Module:
        head = nn.Linear(width, classes)
        nn.init.normal_(head.weight, std=INIT_DEVIATION, generator=generator)
        nn.init.zeros_(head.bias)
        return head

    def build_optimizer(self, heads: Sequence[nn.Module], rates: Sequence[float]) -> torch.optim.Optimizer:
        groups = [{"params": head.parameters(), "lr": rate} for head, rate in zip(heads, rates, strict=True)]
        return torch.optim.SGD(groups, momentum=MOMENTUM, weight_decay=0)

    def rate_share(self, step: int, plan: Plan) -> float:
        return 0.5 * (1 + math.cos(math.pi * step / plan.steps))
