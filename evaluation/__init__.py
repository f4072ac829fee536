"""Evaluation of encoders: probes, training with labels, comparisons, pictures and pages.

cli.py, registry.py, config/: the command `mpp`; all evaluations by name; settings of all commands.
metrics/: outcomes of test images to figures with intervals, by kind of label.
frozen/, patches/: frozen encoders, a run's images, known labels; segmentation.
supervision/: networks with a head, distillation, kinds of labels as a head learns them; classifiers that exist.
comparison/: entries, cases, digests, rows of reports, differences, tables and plots.
pictures.py, figures/, pages/: numbers of pictures; style, charts and images; HTML pages of reports.
tables.py, predictions.py: tables in parts (`mpp embed`, `mpp predict`); rows, masks and figures of predictions.

A new evaluation is one file: see README.md. One of this repository does not register itself: its line is in
registry.py, and its module in the import contracts of pyproject.toml. A new kind of label needs a `LabelKind`
(metrics/scoring.py), a `Learner` (supervision/learners.py) and a kind of `read_labels` (mpp/data/labels.py).
"""
