"""Constants of a run: what its warnings and its verdict need besides its history."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Constants of a run that the warnings need."""

    steps: int
    """Steps of the whole run."""
    images: int
    """Images a step."""
    lr: float = 0.0
    """Base learning rate."""
    warmup: int = 0
    """Steps of learning-rate warm-up."""
    stable: int | None = None
    """Steps up to the cooldown, in which the rate does not fall; None: it falls all along, as with cosine."""
    clip: float | None = None
    """Largest norm of the gradient."""
    known: int = 0
    """Training images; 0: unknown."""
    held_out: int = 0
    """Held-out images of an evaluation."""
    evaluated: int = 0
    """Held-out images that kNN accuracy, or agreement, is measured on."""
    gpu_tflops: float = 0.0
    """TFLOP/s that the GPUs reach in large matrix products; 0: there is none."""
    width: int = 0
    """Width of the encoder's tokens; 0: it has none."""
    moving: bool = False
    """Whether targets change while they are learned, those of a moving average: losses then cannot be compared."""
    duplicates: float = 0.0
    """Share of the held-out images that are copies of a training image; only `mpp check` looks for them."""
    constant: float = 0.0
    """Share of images of one colour; only `mpp check` looks for them."""
    largest_class: float = 0.0
    """Share of the labelled images that are of one class."""
    classes: int = 0
    """Different labels among them."""
