"""The networks that can be pre-trained: what the encoder sees, and what predicts.

A network has an `encoder`, which is exported, and a `normalize` for its input. In words it has the `method` and what is
`on_top` of the encoder, for the model card. It turns images (B, C, H, W) and their corruption into predictions
(B, K, outputs); where there is a teacher, into predictions and targets. To add one, write such a module and name it in
NETWORKS.
"""

from collections.abc import Callable, Sequence

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from mpp.config import Config, NetworkConfig
from mpp.errors import UserError
from mpp.models.autoencoder import MaskedAutoencoder
from mpp.models.encoder import Normalize, build_encoder
from mpp.models.predictor import MaskedPatchPredictor
from mpp.models.teachers import StudentWithTeacher, build_teacher
from mpp.models.timm_models import cell_grid
from mpp.objectives import Objective, build_objective

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "predictor": lambda *parts, config: MaskedPatchPredictor(*parts),
    "autoencoder": MaskedAutoencoder,
}


def build_model(config: Config) -> tuple[nn.Module, Objective]:
    """What is pre-trained, by the config, and what it is to predict.

    Raises:
        UserError: parts that do not fit each other.
    """
    channels = config.data.channels
    encoder, moments = build_encoder(config.model, channels), config.model.normalization(channels)
    patch_size, teacher = cell_grid(encoder)[1], None
    if config.objective.name == "features":
        teacher = build_teacher(config.objective, encoder, Normalize(*moments))
    objective = build_objective(config.objective, patch_size, channels, teacher and teacher.width)
    network = build_network(config.network, encoder, objective.outputs, *moments)
    return StudentWithTeacher(network, teacher, config.objective) if teacher else network, objective


def build_network(
    config: NetworkConfig, encoder: VisionTransformer, outputs: int, mean: Sequence[float], std: Sequence[float]
) -> nn.Module:
    """The network that the config names.

    Args:
        encoder: trained in place.
        outputs: numbers that are predicted for a patch.
        mean, std: of the input's channels, for pixels scaled to [0, 1].
    Raises:
        UserError: no such network, or one that does not fit the encoder.
    """
    if config.name not in NETWORKS:
        known = ", ".join(NETWORKS)
        raise UserError(f"network.name is {config.name}; it must be one of {known}, or registered by --import FILE")
    return NETWORKS[config.name](encoder, outputs, mean, std, config=config)
