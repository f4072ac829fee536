"""Names that settings have in other libraries and papers."""

NAMES_ELSEWHERE = {
    "mask_ratio": "corruption.rate",
    "masking_ratio": "corruption.rate",
    "mask_patch_size": "corruption.block",
    "embed_dim": "model.width",
    "hidden_size": "model.width",
    "num_layers": "model.depth",
    "num_heads": "model.heads",
    "model_kwargs": "model.arguments",
    "pretrained": "model.init_from",
    "lora_r": "model.lora_rank",
    "freeze_steps": "optim.frozen_steps",
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "opt": "optim.name",
    "optimizer": "optim.name",
    "sched": "optim.schedule",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.clip",
    "clip_grad": "optim.clip",
    "ema_decay": "optim.average",
    "batch_size": "optim.global_batch_size",
    "micro_batch_size": "data.batch_size",
    "epochs": "run.steps",
    "num_workers": "data.workers",
    "scale": "data.crop_area",
    "ratio": "data.crop_ratio",
    "crop_pct": "data.eval_crop",
    "report_to": "run.trackers",
    "output_dir": "run.dir",
    "seed": "run.seed",
    "pooling": "representation",
}
"""Name elsewhere -> the setting."""
REMARKS = {
    "batch_size": "images per step over all processes; data.batch_size is the micro-batch of a process",
    "epochs": "steps = epochs x images / optim.global_batch_size",
}
"""Name elsewhere -> the difference."""


def names_elsewhere(key: str) -> list[str]:
    """Names of a setting in other libraries, but for its own name and those that mean something else."""
    not_shown = {key.rpartition(".")[2], *REMARKS}
    return [name for name, setting in NAMES_ELSEWHERE.items() if setting == key and name not in not_shown]
