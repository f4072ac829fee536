"""The networks for pre-training: an encoder and the parts that predict.

A network is a module with an `encoder`, which is exported, a `normalize` for its input, and two texts for the model
card: its `method`, and the parts `on_top` of the encoder. It turns images (B, C, H, W) and their corruption into
predictions (B, K, outputs). To add one, write such a module and name it in NETWORKS. `StudentWithTeacher` joins a
network and a teacher, and returns targets with the predictions.
"""

from collections.abc import Sequence
from operator import attrgetter

from torch import nn

from mpp.config import Config, NetworkConfig
from mpp.config.imports import Registry
from mpp.errors import UserError
from mpp.models.adaptation import choose_trained
from mpp.models.autoencoder import MaskedAutoencoder
from mpp.models.encoder import Normalize, build_encoder
from mpp.models.predictor import MaskedPatchPredictor
from mpp.models.teachers import StudentWithTeacher, build_teacher
from mpp.models.timm_models import cell_grid
from mpp.objectives import Objective, build_objective

PARTS = ("encoder", "normalize.mean", "normalize.std", "method", "on_top")
"""Attributes of a network. The export, at the end of the training, is the first that reads some of them."""


def build_predictor(
    encoder: nn.Module, outputs: int, mean: Sequence[float], std: Sequence[float], config: NetworkConfig
) -> MaskedPatchPredictor:
    """The paper's network, which needs none of the decoder's settings."""
    return MaskedPatchPredictor(encoder, outputs, mean, std)


NETWORKS = Registry(
    "network.name",
    {
        "predictor": build_predictor,
        "autoencoder": MaskedAutoencoder,
    },
)
"""Networks by name: encoder, outputs, mean, std and `config`, the settings of the network -> module."""


def build_model(config: Config) -> tuple[nn.Module, Objective]:
    """The network for pre-training by the config, and its objective.

    Raises:
        UserError: parts that do not fit each other.
    """
    channels = config.data.channels
    encoder = build_encoder(config.model, channels)
    mean, std = config.model.normalization(channels)
    _, patch_size = cell_grid(encoder)
    teacher = None
    teacher_width = None
    if config.objective.name == "features":
        teacher = build_teacher(config.objective, encoder, Normalize(mean, std))
        teacher_width = teacher.width
    objective = build_objective(config.objective, patch_size, channels, teacher_width)
    network = build_network(config.network, encoder, objective.outputs, mean, std)
    choose_trained(encoder, config.model)
    if teacher is None:
        return network, objective
    return StudentWithTeacher(network, teacher, config.objective), objective


def build_network(
    config: NetworkConfig, encoder: nn.Module, outputs: int, mean: Sequence[float], std: Sequence[float]
) -> nn.Module:
    """The network that the config names.

    Raises:
        UserError: no such network, or one that does not fit the encoder.
    """
    network = NETWORKS[config.name](encoder, outputs, mean, std, config=config)
    for part in PARTS:
        try:
            attrgetter(part)(network)
        except AttributeError as error:
            needed = ", ".join(PARTS)
            raise UserError(
                f"network.name is {config.name}, which has no {part}; it must be a module with {needed}"
            ) from error
    return network
