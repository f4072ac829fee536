"""MAE's linear probe (He et al., Masked Autoencoders Are Scalable Vision Learners, CVPR 2022, appendix A.1, Table 10).

As in the authors' public code (facebookresearch/mae, main_linprobe.py, util/lars.py and util/lr_sched.py):

- random resized crops (area 0.08 to 1, ratio 3/4 to 4/3) and flips; a centre crop at test.
- A batch norm without affine parameters (eps 1e-6, running statistics at test) before one linear layer, whose weights
  begin as normal numbers of deviation 0.01, and its bias at 0.
- LARS (You et al., 2017; timm.optim.Lars): trust coefficient 0.001, momentum 0.9, no weight decay. The bias is not
  adapted. Base rate 0.1 for a batch of 256.
- 90 epochs of batch 16,384; the rate rises over the first 10, then falls to 0 by half a cosine, from step to step.

Differences: crops are bilinear, as everywhere in mpp, and not bicubic. The authors' loader leaves an epoch's last part
of a batch out, and their batch norm takes its statistics on each GPU (of 512 images); here they are of the whole batch.
The mean of the patches is taken after the encoder's norm, theirs before it.
"""

import math
from collections.abc import Sequence

import torch
from timm.optim import Lars
from torch import Tensor, nn

from evaluation.frozen.encoder import FrozenEncoder
from evaluation.protocols.protocol import IMAGENET_IMAGES, Candidate, LinearProtocol, Plan, scaled_batch
from mpp.config import Representation
from mpp.runtime.messages import note

BATCH = 16_384
EPOCHS = 90
WARMUP_EPOCHS = 10
BASE_RATE = 0.1
LEAST_BATCH = 256
LEAST_STEPS = 1000
"""Images are seen more often where 90 epochs would be fewer steps. A step of LARS is a share of the weights' length, so
fewer steps would hardly leave the first weights."""
FEW_IMAGES = 20_000
"""With fewer, the sum of all rates is too small: on 430 birds, 7,000 steps of batch 256 still improved the head."""
TRUST = 0.001
MOMENTUM = 0.9
NORM_EPS = 1e-6
INIT_DEVIATION = 0.01


class Mae(LinearProtocol):
    """MAE's linear probe.

    Args:
        representation: feature that is probed; MAE's figures are of `class`, its code also has the `mean`.
        depths: after how many blocks; a head for each.
        chooses: whether dev images choose the depth.
    """

    name = "mae"
    published = Plan(IMAGENET_IMAGES, BATCH, round(EPOCHS * IMAGENET_IMAGES / BATCH))

    def __init__(self, representation: Representation, depths: Sequence[int], chooses: bool):
        self.representation = representation
        self.depths = depths
        self.chooses = chooses
        self.candidates = [Candidate(place, BASE_RATE, {"depth": depth}) for place, depth in enumerate(depths)]

    def plan(self, image_count: int) -> Plan:
        batch = scaled_batch(BATCH, image_count, LEAST_BATCH)
        steps = round(EPOCHS * image_count / batch)
        if image_count < FEW_IMAGES:
            note(f"MAE's learning rates and length train little on {image_count:,} images: use --protocol logistic")
        return Plan(image_count, batch, max(LEAST_STEPS, steps))

    def encode(self, encoder: FrozenEncoder, images: Tensor) -> list[Tensor]:
        return encoder(images, self.representation, self.depths)

    def build_head(self, width: int, classes: int, generator: torch.Generator) -> nn.Module:
        classify = nn.Linear(width, classes)
        nn.init.trunc_normal_(classify.weight, std=INIT_DEVIATION, generator=generator)
        nn.init.zeros_(classify.bias)
        return nn.Sequential(nn.BatchNorm1d(width, affine=False, eps=NORM_EPS), classify)

    def build_optimizer(self, heads: Sequence[nn.Module], rates: Sequence[float]) -> torch.optim.Optimizer:
        groups = []
        for (_, classify), rate in zip(heads, rates, strict=True):
            groups.append({"params": [classify.weight], "lr": rate, "always_adapt": True})
            groups.append({"params": [classify.bias], "lr": rate, "always_adapt": False})
        return Lars(groups, momentum=MOMENTUM, weight_decay=0, trust_coeff=TRUST)

    def rate_share(self, step: int, plan: Plan) -> float:
        epoch = EPOCHS * step / plan.steps
        if epoch < WARMUP_EPOCHS:
            return epoch / WARMUP_EPOCHS
        return 0.5 * (1 + math.cos(math.pi * (epoch - WARMUP_EPOCHS) / (EPOCHS - WARMUP_EPOCHS)))
