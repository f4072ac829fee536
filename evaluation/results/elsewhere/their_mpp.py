"""Our encoder, pre-trained by vit-pytorch's masked patch prediction: what do its differences cost?

    python evaluation/results/elsewhere/their_mpp.py --config cifar10 --config cifar10_quarter

Its `MPP` corrupts the pixels and computes the loss, by its defaults; encoder, images, optimiser and schedule are those
of `mpp pretrain`, whose settings it takes. Those of `corruption`, `objective` and `network` have no effect.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from vit_pytorch.mpp import MPP

from mpp.config import Config
from mpp.config.parsing import parse
from mpp.data.loader import BatchLayout
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch
from mpp.features.metrics import Sums, add_sums
from mpp.models.networks import build_model
from mpp.models.plain import cell_grid
from mpp.runtime.randomness import FIXED_VIEW
from mpp.runtime.start import run_main
from mpp.training.flops import executed_flops
from mpp.training.log import Tracker
from mpp.training.run import train
from mpp.training.task import ImageTask


class Projection(nn.Module):
    """The encoder's projection of patches, for their pixels in vit-pytorch's order, (B, N, P P C)."""

    def __init__(self, convolution: nn.Conv2d):
        super().__init__()
        self.shared = [convolution]  # in a list: its parameters are the encoder's

    def forward(self, patches: Tensor) -> Tensor:
        (convolution,) = self.shared
        return F.linear(patches, convolution.weight.permute(0, 2, 3, 1).flatten(1), convolution.bias)


class TheirModel(nn.Module):
    """Their `MPP` on top of our encoder; forward(images (B, C, H, W) from 0 to 255) is the loss."""

    def __init__(self, encoder: nn.Module, normalize: nn.Module):
        super().__init__()
        self.encoder, self.normalize = encoder, normalize
        _, patch_size = cell_grid(encoder)
        by_their_names = SimpleNamespace(
            to_patch_embedding=nn.Sequential(nn.Identity(), Projection(encoder.patch_embed.proj)),
            cls_token=encoder.cls_token,
            pos_embedding=encoder.pos_embed,
            dropout=encoder.pos_drop,
            transformer=lambda tokens: encoder.norm(encoder.blocks(encoder.norm_pre(tokens))),
        )
        statistics = dict(mean=list(normalize.mean), std=list(normalize.std))
        self.mpp = MPP(by_their_names, patch_size, encoder.embed_dim, **statistics)

    def forward(self, images: Tensor) -> Tensor:
        return self.mpp(self.normalize(images))


class WithoutLoss(nn.Module):
    """The same network up to its logits, whose operations can be counted: `MPP` chooses patches by their values."""

    def __init__(self, model: TheirModel):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.mpp.to_bits(self.model.encoder.forward_features(self.model.normalize(images)))


class TheirPretraining(ImageTask):
    """The task: their loss."""

    method = "Pre-trained without labels by vit-pytorch's masked patch prediction"

    def __init__(self, config: Config, accelerator: Accelerator, layout: BatchLayout):
        super().__init__(accelerator, layout, config.run, config.data)
        ours, _ = build_model(config)
        self.model = TheirModel(ours.encoder, ours.normalize)
        self.img_size = ours.encoder.patch_embed.img_size
        self.train, self.held_out = load_image_datasets(config.data)
        evaluated = self.held_out.choose(config.data.eval_images, config.data.cut_seed)
        self.held_out_views = self.fixed_view_loader.add(self.views(evaluated))

    def loss(self, model: nn.Module, batch: Batch, measure: bool) -> tuple[Tensor, Sums]:
        return model(batch.images.to(self.accelerator.device)), {}

    def describe(self, sums: Sums) -> dict[str, float]:
        return {}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, Any]:
        sums: Sums = {}
        for batch in self.fixed_views(self.held_out_views, tracker):
            loss, _ = self.loss(model, batch, False)
            sums = add_sums(sums, self.loss_sums(loss, batch))
        return {f"heldout/{name}": value for name, value in self.describe_views(sums).items()}

    def flops(self) -> int:
        return executed_flops(WithoutLoss(self.model), self.views(self.held_out)[FIXED_VIEW, 0].images[None])


if __name__ == "__main__":
    run_main(lambda arguments=None: train(parse(Config, arguments), TheirPretraining))
