"""Models on timm's parts. Importing this package registers the architecture `mpp_vit` with timm."""

from mpp.models.variants import VariantViT

__all__ = ["VariantViT"]
