"""Settings of the evaluation's commands: typed, frozen, validated, and without torch, so that they are read at once."""

from evaluation.config.comparing import CompareConfig, GpuReportConfig, SweepConfig, ThroughputConfig
from evaluation.config.encoders import (
    COLOUR_BASELINE,
    EVERY,
    EmbedConfig,
    EncoderConfig,
    ExportConfig,
    ExtractionConfig,
    FeaturesConfig,
    LabelTask,
    MaskedDataConfig,
    NumberLoss,
    PredictConfig,
    ProbeDataConfig,
    ReportConfig,
    VisualizeConfig,
    is_colour_baseline,
)
from evaluation.config.probes import (
    FewshotConfig,
    FrozenProbeConfig,
    KnnConfig,
    LinearConfig,
    MaskedConfig,
    SegmentationConfig,
)
from evaluation.config.training import (
    CLASSIFIERS,
    ContrastiveConfig,
    DistillConfig,
    FinetuneConfig,
    HeadKind,
    OneRunConfig,
    Pooling,
    SupervisedConfig,
    ViewsConfig,
    config_class_of,
)
