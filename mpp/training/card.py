"""The model card of an exported encoder: with it, the folder is a complete model repository."""

from pathlib import Path

from mpp.training.tracking import last_scalars

CARD = """---
library_name: timm
pipeline_tag: image-feature-extraction
tags: [timm, image-feature-extraction, self-supervised, mpp]
---

# {name}

{model}. {method}.

Images: {images}.

## Load it

```python
import timm

encoder = timm.create_model("local-dir:FOLDER", pretrained=True)  # this folder; on the hub "hf-hub:NAME"
data_config = timm.data.resolve_model_data_config(encoder)  # input size, mean, std, crop
tokens = encoder.forward_features(images)  # (B, {prefix} + N, D), the [class] token first
```

## Held-out figures after {step} updates

| | |
|-|-:|
{figures}

## Settings

```yaml
{settings}```
"""


def model_card(folder: Path, model: str, method: str, images: str, prefix: int = 1) -> str:
    """The text of a run's encoder/README.md.

    Args:
        folder: of the run, with config.yaml and metrics.jsonl.
        model: what it is, in a few words.
        method: how it was trained, in a sentence without its full stop.
        images: what it was trained on.
        prefix: tokens before those of the patches.
    """
    scalars = last_scalars(folder, "heldout/loss")
    figures = "\n".join(f"| `{name}` | {value:.4g} |" for name, value in scalars.items() if name != "step")
    fields = dict(name=folder.name, model=model, method=method, images=images, prefix=prefix)
    fields |= dict(step=scalars["step"], figures=figures, settings=(folder / "config.yaml").read_text())
    return CARD.format(**fields)
