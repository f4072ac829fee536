"""Writes imagenet.npz: random features as large as ImageNet's (evaluation/results/speed.md, "Memory of probes")."""

import numpy as np

if __name__ == "__main__":
    random = np.random.default_rng(0)
    centres = random.normal(size=(1000, 768)).astype("f4")

    def draw(labels: np.ndarray) -> np.ndarray:
        """Features (N, 768) around the centres of their classes (N,)."""
        features = random.standard_normal((len(labels), 768), "f4")
        for start in range(0, len(labels), 1000):
            features[start : start + 1000] = 3 * features[start : start + 1000] + centres[labels[start : start + 1000]]
        return features

    train, test = random.permutation(1281167) % 1000, random.integers(0, 1000, 50000)
    splits = {"train_features": draw(train), "train_labels": train, "test_features": draw(test), "test_labels": test}
    np.savez("imagenet.npz", **splits)
