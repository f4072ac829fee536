"""The model card of an exported encoder: with it, the folder is a complete model repository."""

import re
from pathlib import Path

from torch import nn

from mpp.models.descriptions import EncoderFacts
from mpp.models.plain import has_class
from mpp.models.variants import VariantViT
from mpp.training.history import EVALUATED, History, last_logged_step
from mpp.training.log import read_history
from mpp.training.phases import saved_phases

HEAD_LEFT_OUT = "the classification head is left out"
BOTH_HEADS_LEFT_OUT = "both heads are left out"
"""Endings of the sentence on training, in the card of an encoder that learned labels."""
HOW_TO_LOAD = re.compile(r"^## Load it\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)

CARD = """---
{licence}library_name: timm
pipeline_tag: image-feature-extraction
tags: [{tags}, mpp]
---

# {name}: {kind}

{model}. {method}.{phases}

Images: {images}.

## Load it

```python
{imports}

encoder = timm.create_model("local-dir:FOLDER", pretrained=True)  # this folder; on the hub "hf-hub:NAME"
data_config = timm.data.resolve_model_data_config(encoder)  # input size, mean, std, crop
tokens = encoder.forward_features(images)  # {tokens}
```

{figures}## Settings

```yaml
{settings}```
"""


def model_card(folder: Path, encoder: nn.Module, facts: EncoderFacts) -> str:
    """The text of a run's encoder/README.md.

    Args:
        folder: of the run, with config.yaml and metrics.jsonl.
    """
    history = read_history(folder)
    tags = "timm, image-feature-extraction"
    if not facts.learned_labels:
        tags += ", self-supervised"
    imports = "import timm"
    if isinstance(encoder, VariantViT):
        imports = f"import mpp.models  # timm then knows this architecture\n{imports}"
    return CARD.format(
        licence=f"license: {facts.licence}\n" if facts.licence else "",
        name=folder.name,
        kind=facts.kind,
        tags=tags,
        model=facts.model,
        method=facts.method,
        phases=describe_phases(folder, last_logged_step(history)),
        images=facts.images,
        imports=imports,
        tokens=describe_output(encoder),
        figures=figures_section(history),
        settings=(folder / "config.yaml").read_text(encoding="utf-8"),
    )


def describe_phases(folder: Path, done: int) -> str:
    """A sentence on the cooldown and the trunk of a run after so many steps; "" where it has neither."""
    phases = saved_phases(folder)
    parts = [part for part in (phases.describe_branch(), phases.describe_cooldown(done)) if part]
    sentence = ", ".join(parts)
    return f" {sentence[0].upper()}{sentence[1:]}." if sentence else ""


def figures_section(history: History) -> str:
    """The figures of the last evaluation below a heading; empty where the run was never evaluated."""
    lines = [line for line in history if EVALUATED in line]
    if not lines:
        return ""
    scalars = lines[-1]
    figures = [f"| `{name}` | {value:.4g} |" for name, value in scalars.items() if name != "step"]
    rows = "\n".join(figures)
    return f"## Held-out figures after {scalars['step']} steps\n\n| | |\n|-|-:|\n{rows}\n\n"


def describe_output(encoder: nn.Module) -> str:
    """The output of `forward_features`, as a shape."""
    prefix = getattr(encoder, "num_prefix_tokens", None)
    if prefix is None:
        return "a feature map"
    shape = f"(B, {prefix} + N, D)" if prefix else "(B, N, D)"
    return f"{shape}, the [class] token first" if has_class(encoder) else shape


def card_of_file(card: str, has_head: bool) -> str:
    """The card of an encoder's folder as that of a file that was exported from it, which timm cannot load.

    Args:
        has_head: whether the file has the classification head, too, or both of a distilled encoder.
    """
    card = HOW_TO_LOAD.sub("", card)
    if has_head:
        card = card.replace(HEAD_LEFT_OUT, "this file has the classification head, too")
        card = card.replace(BOTH_HEADS_LEFT_OUT, "this file has the mean of both heads, too")
    return card
