"""Learning a kind of label by heads and nearest neighbours: one class, several classes, or a number.

A learner is made of the training images' labels. N training images, M test images, B images of a batch, D width,
C classes, k neighbours.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from evaluation.config import NumberLoss
from evaluation.metrics.scoring import KINDS, Outcomes
from mpp.data.dataset import has_label
from mpp.features.metrics import Sums, is_right
from mpp.features.neighbours import knn_means, knn_predict

NUMBER_LOSSES = {"l2": F.mse_loss, "l1": F.l1_loss}


class Learner(ABC):
    """A kind of label, as a head and as nearest neighbours learn it."""

    kind: ClassVar[str]
    """Name of the kind of label."""
    meaning: ClassVar[str]
    """Meaning of a head's outputs, for users of an exported file."""
    mixes: ClassVar[bool] = False
    """Whether mixup, CutMix, label smoothing and distillation apply."""
    outputs: int
    """Of a head."""

    def complete(self, layer: nn.Module) -> nn.Module:
        """A head: a layer, (B, D) to (B, outputs), with the conversion of its outputs to the unit of the labels."""
        return layer

    def merge(self, layer: nn.Linear) -> nn.Linear:
        """The same head as one layer."""
        return layer

    def to_learn(self, labels: Tensor) -> Tensor:
        """The targets of a batch's labels (B, ...)."""
        return labels

    def knows(self, labels: NDArray) -> NDArray[np.bool_]:
        """Whether each image has a label that a head can predict: (N,)."""
        return has_label(labels)

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """The mean loss of a head's outputs (B, outputs); all targets (B, ...) are there.

        Args:
            smoothing: label smoothing, of one class.
        """

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """A head's outputs (M, outputs) as predictions (M, ...) that the kind of label measures."""

    @abstractmethod
    def sums(self, predicted: Tensor, labels: Tensor) -> Sums:
        """Sums over a batch's predictions, for `describe`."""

    @abstractmethod
    def describe(self, sums: Sums) -> dict[str, float]:
        """Figures of sums over batches, which have the number of `images`, too."""

    def figures(self, outcomes: Outcomes) -> dict[str, float]:
        """Figures that need the outcomes of all images at once."""
        return KINDS[self.kind].measure(outcomes)

    @abstractmethod
    def nearest(self, train: NDArray, test: Tensor, neighbours: Sequence[int], temperature: float) -> dict[int, Tensor]:
        """Predictions of a weighted kNN for each number of neighbours: see `knn_predict`.

        Args:
            train: (N, D) features of the images that the learner was made of.
        """


class ClassLearner(Learner):
    """One class: cross-entropy of the softmax.

    Args:
        targets: (N,) int64.
        classes: C.
    """

    kind = "class"
    meaning = "logits; their softmax has the probabilities"
    mixes = True

    def __init__(self, targets: NDArray[np.int64], classes: int):
        self.targets, self.outputs = targets, classes

    def to_learn(self, labels: Tensor) -> Tensor:
        return labels if labels.ndim == 1 else labels[:, 0]  # of several right ones the first

    def knows(self, labels: NDArray) -> NDArray[np.bool_]:
        return labels < self.outputs

    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=smoothing)

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(1)

    def sums(self, predicted: Tensor, labels: Tensor) -> Sums:
        return {"right": is_right(predicted, labels).double().sum()}

    def describe(self, sums: Sums) -> dict[str, float]:
        return {"accuracy": float(sums["right"] / sums["images"])}

    def figures(self, outcomes: Outcomes) -> dict[str, float]:
        return {"accuracy": super().figures(outcomes)["accuracy"]}

    def nearest(self, train: NDArray, test: Tensor, neighbours: Sequence[int], temperature: float) -> dict[int, Tensor]:
        return knn_predict(train, torch.from_numpy(self.targets), test, neighbours, temperature)


class SeveralLearner(Learner):
    """Several classes: the sum over classes of binary cross-entropies, as C logistic regressions.

    Args:
        targets: (N, C) of 0 and 1.
    """

    kind = "several"
    meaning = "logits; the sigmoid of each is the probability of its class"

    def __init__(self, targets: NDArray):
        self.targets, self.outputs = targets, targets.shape[1]

    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        summed = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="sum")
        return summed / len(targets)

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.double().sigmoid()  # in 32 bits all logits above 17 would be 1, and rank alike

    def sums(self, predicted: Tensor, labels: Tensor) -> Sums:
        return {"right_pairs": ((predicted > 0.5) == (labels == 1)).double().mean(1).sum()}

    def describe(self, sums: Sums) -> dict[str, float]:
        return {"pair_accuracy": float(sums["right_pairs"] / sums["images"])}

    def nearest(self, train: NDArray, test: Tensor, neighbours: Sequence[int], temperature: float) -> dict[int, Tensor]:
        return knn_means(train, torch.from_numpy(self.targets).float(), test, neighbours, temperature)


class Rescale(nn.Module):
    """From deviations to the unit of the labels: x * std + mean, in float32.

    Args:
        mean, std: of the training images' labels.
    """

    def __init__(self, mean: float, std: float):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.float() * self.std + self.mean


class NumberLearner(Learner):
    """A number: squared (l2) or absolute (l1) error of the prediction, in deviations of the training images' labels.

    Args:
        targets: (N,) float64.
        loss: l2 or l1.
    """

    kind = "number"
    meaning = "the number, in the unit of the labels"
    outputs = 1

    def __init__(self, targets: NDArray[np.float64], loss: NumberLoss = "l2"):
        self.targets = targets
        self.error = NUMBER_LOSSES[loss]
        self.mean, self.std = float(targets.mean()), float(targets.std()) or 1.0  # part of them may be all equal

    def complete(self, layer: nn.Module) -> nn.Module:
        return nn.Sequential(layer, Rescale(self.mean, self.std))

    def merge(self, layer: nn.Linear) -> nn.Linear:
        with torch.no_grad():
            layer.weight.mul_(self.std)
            layer.bias.mul_(self.std).add_(self.mean)
        return layer

    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        deviations = (outputs.squeeze(1).float() - self.mean) / self.std
        return self.error(deviations, ((targets - self.mean) / self.std).float())

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(1).float()

    def sums(self, predicted: Tensor, labels: Tensor) -> Sums:
        return {"absolute_errors": (predicted.detach().double() - labels).abs().sum()}

    def describe(self, sums: Sums) -> dict[str, float]:
        return {"mae": float(sums["absolute_errors"] / sums["images"])}

    def nearest(self, train: NDArray, test: Tensor, neighbours: Sequence[int], temperature: float) -> dict[int, Tensor]:
        targets = torch.from_numpy((self.targets - self.mean) / self.std).float()
        means = knn_means(train, targets[:, None], test, neighbours, temperature)
        return {k: predicted.squeeze(1).cpu().double() * self.std + self.mean for k, predicted in means.items()}


LEARNERS: dict[str, type[Learner]] = {each.kind: each for each in (ClassLearner, SeveralLearner, NumberLearner)}
"""By kind of label."""


def learner_of(kind: str, targets: NDArray, classes: int, loss: NumberLoss = "l2") -> Learner:
    """The learner of a kind of label.

    Args:
        targets: of the training images; missing ones do not count.
        classes: C, of one class an image.
        loss: of numbers.
    """
    known = targets[has_label(targets)]
    builders = {
        "class": lambda: ClassLearner(known, classes),
        "several": lambda: SeveralLearner(known),
        "number": lambda: NumberLearner(known, loss),
    }
    return builders[kind]()
