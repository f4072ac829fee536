"""Published protocols of linear probes: the interface of each, and the length of its training.

N training images, B images of a step, D width of a head's input, C classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evaluation.frozen.encoder import FrozenEncoder

IMAGENET_IMAGES = 1_281_167
"""Training images of ImageNet-1k, for which the published lengths and batches are."""
BASE_BATCH = 256
"""The batch that base learning rates are of: a rate is base rate x batch / 256 (Goyal et al., 2017)."""


class Plan(NamedTuple):
    """Length and batch of a training, scaled to the data."""

    images: int
    """N."""
    batch: int
    """B."""
    steps: int

    @property
    def epochs(self) -> float:
        """Number of times that each image is seen."""
        return self.steps * self.batch / self.images


class Candidate(NamedTuple):
    """A head that a protocol trains: its input and its learning rate."""

    input: int
    """Position in the list of inputs that `LinearProtocol.encode` returns."""
    base_rate: float
    """Learning rate at a batch of 256."""
    about: dict[str, Any]
    """Its entries in the report, such as its depth."""


class LinearProtocol(ABC):
    """A published protocol, for one encoder."""

    name: str
    """Value of `--protocol`."""
    published: Plan
    """Length and batch on ImageNet."""
    candidates: list[Candidate]
    """The heads; all are trained at once, on the same crops."""
    chooses: bool
    """Whether one of several heads is chosen on dev images; otherwise each is tested."""

    @abstractmethod
    def plan(self, image_count: int) -> Plan:
        """The published length and batch, scaled to the number of training images."""

    @abstractmethod
    def encode(self, encoder: FrozenEncoder, images: Tensor) -> list[Tensor]:
        """Inputs of heads, (B, D) float32 each, of images (B, C, H, W) from 0 to 255."""

    @abstractmethod
    def build_head(self, width: int, classes: int, generator: torch.Generator) -> nn.Module:
        """A head, (B, width) to logits (B, classes), whose first weights are drawn from `generator`."""

    @abstractmethod
    def build_optimizer(self, heads: Sequence[nn.Module], rates: Sequence[float]) -> torch.optim.Optimizer:
        """An optimiser of all heads, each at its highest learning rate."""

    @abstractmethod
    def rate_share(self, step: int, plan: Plan) -> float:
        """The learning rate of a step from 0, as a share of the highest one."""


def scaled_batch(published: int, image_count: int, least: int) -> int:
    """The batch that is the same share of the images as on ImageNet, but from `least` to the published one.

    It has no more than all images.
    """
    proportional = published * image_count // IMAGENET_IMAGES
    return min(image_count, max(least, min(published, proportional)))


def describe_plan(protocol: LinearProtocol, plan: Plan) -> str:
    """A plan compared with the published one, in a line."""
    published = protocol.published
    return (
        f"protocol {protocol.name}, scaled to {plan.images:,} training images: {plan.steps:,} steps of {plan.batch:,} "
        f"random crops, {plan.epochs:,.0f} epochs (published for ImageNet: {published.steps:,} steps of "
        f"{published.batch:,}, {published.epochs:,.0f} epochs)"
    )
