"""Models on timm's parts. Importing this package registers the architecture `mpp_vit` with timm."""

from mpp.models.vit import VariantViT

__all__ = ["VariantViT"]
