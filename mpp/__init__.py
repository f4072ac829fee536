"""mpp: self-supervised masked patch prediction for Vision Transformers.

    import mpp
    from mpp.pretrain import pretrain

    folder = pretrain({"run.steps": 600})             # the default run, with some settings changed
    encoder = mpp.load_encoder(folder)                # a timm model
    features = mpp.extract_features(encoder, images)  # (B, D) of PIL images, or of a tensor (B, C, H, W)

`import mpp.models` registers our architectures with timm: `timm.create_model` then loads any exported encoder.

Shapes in the whole package: B images, N patches, K corrupted patches, D width, C classes, P patch side.
"""

from typing import Any

from mpp.config import Config

__version__ = "0.1.0"
__all__ = ["Config", "extract_features", "load_encoder"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import names that need torch on first use: commands print help without it."""
    if name == "extract_features":
        from mpp.features.frozen import extract_features

        return extract_features
    if name == "load_encoder":
        from mpp.models.encoder import load_encoder

        return load_encoder
    raise AttributeError(f"module mpp has no attribute {name}")
