"""Settings of the evaluation's commands: typed, frozen, validated, and without torch, so that they are read at once."""

from evaluation.config.comparing import CompareConfig, GpuReportConfig, SweepConfig, ThroughputConfig
from evaluation.config.frozen import (
    EVERY,
    EmbedConfig,
    EncoderConfig,
    ExportConfig,
    ExtractionConfig,
    FeaturesConfig,
    FewshotConfig,
    FrozenProbeConfig,
    KnnConfig,
    LabelTask,
    LinearConfig,
    MaskedConfig,
    MaskedDataConfig,
    NumberLoss,
    PredictConfig,
    ProbeConfig,
    ProbeDataConfig,
    ReportConfig,
    SegmentationConfig,
    VisualizeConfig,
)
from evaluation.config.training import (
    ContrastiveConfig,
    DistillConfig,
    FinetuneConfig,
    HeadConfig,
    HeadKind,
    OneRunConfig,
    Pooling,
    SupervisedConfig,
    ViewsConfig,
)
