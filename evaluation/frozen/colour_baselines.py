"""Names of colour baselines, which take an encoder's place."""

COLOUR_BASELINE = "floor:"
"""Beginning of the names."""


def is_colour_baseline(encoder: str) -> bool:
    """Whether the setting `encoder` names a colour baseline, which has no weights."""
    return encoder.startswith(COLOUR_BASELINE)
