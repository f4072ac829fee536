"""The model card of an exported encoder: with it, the folder is a complete model repository."""

from pathlib import Path

from torch import nn

from mpp.models.descriptions import EncoderFacts
from mpp.models.variants import VariantViT
from mpp.training.history import History, evaluations
from mpp.training.log import read_history
from mpp.training.run_folder import CONFIG_FILE

CARD = """---
{licence}library_name: timm
pipeline_tag: image-feature-extraction
tags: [timm, image-feature-extraction{tags}, mpp]
---

# {name}: {facts.kind}

{facts.model}. {facts.method}.

Images: {facts.images}.

## Load it

```python
{imports}

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # this folder; on the hub "hf-hub:NAME"
data_config = timm.data.resolve_model_data_config(model)  # input size, mean, std, crop
tokens = model.forward_features(images)  # a transformer's: model.num_prefix_tokens, then those of patches
{call}
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
    imports = "import timm"
    if isinstance(encoder, VariantViT):
        imports = f"import mpp.models  # timm then knows this architecture\n{imports}"
    call = "features = model(images)  # (B, D): what mpp evaluates"
    if hasattr(encoder, "dist_token"):  # whose mean timm does not take
        call = call.replace("model(images)", "tokens[:, 2:].mean(1)")
    if encoder.num_classes:
        call = "outputs = model(images)  # of the head; model.pretrained_cfg['label_names'] names them"
    return CARD.format(
        licence=f"license: {facts.licence}\n" if facts.licence else "",
        name=folder.name,
        facts=facts,
        tags="" if facts.learned_labels else ", self-supervised",
        imports=imports,
        call=call,
        figures=figures_section(history),
        settings=(folder / CONFIG_FILE).read_text(encoding="utf-8"),
    )


def figures_section(history: History) -> str:
    """The figures of the last evaluation below a heading; empty where the run was never evaluated."""
    lines = evaluations(history)
    if not lines:
        return ""
    scalars = lines[-1]
    figures = [f"| `{name}` | {value:.4g} |" for name, value in scalars.items() if name != "step"]
    rows = "\n".join(figures)
    return f"## Held-out figures after {scalars['step']} steps\n\n| | |\n|-|-:|\n{rows}\n\n"
