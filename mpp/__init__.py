"""mpp: self-supervised masked patch prediction for Vision Transformers.

    import mpp

    folder = mpp.pretrain({"run.steps": 600})     # the default run, with settings of yours
    encoder = mpp.load_encoder(folder)            # timm's model
    features = mpp.extract_features(encoder, images)  # (B, D) of PIL images, or of a tensor (B, C, H, W)

The shape vocabulary of the whole package: B images, N patches, K corrupted patches, D width, C classes, P patch side.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
__all__ = ["Config", "extract_features", "load_encoder", "pretrain"]
PLACES = {"Config": "mpp.config", "extract_features": "mpp.features.frozen", "load_encoder": "mpp.models.encoder"}


def __dir__() -> list[str]:
    """What a notebook offers after `mpp.`"""
    return __all__


def starts_a_command() -> bool:
    """Whether this process is `mpp COMMAND`, which reads its settings before it loads torch."""
    return Path(sys.argv[0]).stem == "mpp" if sys.argv else False


def __getattr__(name: str) -> Any:
    """What is loaded when somebody asks for it: datasets and command lines are not needed to load an encoder."""
    if name == "pretrain":
        return import_module("mpp.pretrain")  # which can be called
    if name in PLACES:
        return getattr(import_module(PLACES[name]), name)
    raise AttributeError(f"module mpp has no attribute {name}")


if not starts_a_command():
    import_module("mpp.models.vit")  # timm knows our architectures from here on
