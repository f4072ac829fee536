"""mpp: self-supervised masked patch prediction for Vision Transformers.

The shape vocabulary of the whole package: B images, N patches, K corrupted patches, D width, C classes, P patch side.
"""

from mpp.models.encoder import load_encoder

__all__ = ["load_encoder"]
