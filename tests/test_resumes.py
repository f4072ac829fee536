"""A run that is killed and started again ends as one that was not: command x objective x moment, in this process.

Real processes are killed in tests/test_faults.py; shards, streams and branches in tests of their own.
"""

from conftest import ADAM, ONLY_MASKED, each_of, killed_at, tiny_without, weights_of, without_times
from test_distill import save_timm

from evaluation import contrastive, finetune, supervised
from mpp import pretrain
from mpp.training.checkpoint import MODEL_FILE, complete_checkpoints

# Beginnings of the settings in TINY that a command does not have.
LACKING = {pretrain: (), contrastive: (), supervised: ("--probe",), finetune: ("--probe", "--model")}
HARD = ("--data.batch_size=4", "--model.dropout=0.1", "--model.drop_path=0.1", "--run.steps=6")
HARD += ("--run.eval_every=2", "--probe.every=2")
AVERAGED = ("--optim.average=0.9", *ADAM)
DATA2VEC = ("--config=rivals/data2vec", "--objective.teacher_depths=1", *ONLY_MASKED)
PARTS = ("--objective.name=grid_color", "--objective.grid=2", "--corruption.pattern=blocks", *ONLY_MASKED)
MIXED = ("--augment.mixup=0.8", "--augment.cutmix=1", "--augment.randaugment=9", "--augment.label_smoothing=0.1")
TUNED = ("--optim.name=adam", "--lrs=0.001", "--optim.layer_decay=0.65", "--optim.weight_decay=0.05", "--drop_path=0.2")
TAUGHT = ("--distill.teacher={teacher}", "--distill.kind=soft", "--head.kind=linear", "--head.pooling=mean")

RUNS = {  # -> the command, the update (from 0) before which it is killed, options; a checkpoint is written every second
    "Muon, before a checkpoint": (pretrain, 1, HARD),
    "MaskFeat, between two": (pretrain, 3, (*HARD, "--optim.name=adam", "--config=rivals/maskfeat")),
    "SimMIM, at one": (pretrain, 4, (*HARD, "--config=rivals/simmim")),
    "MAE, before the last": (pretrain, 5, (*HARD, "--config=rivals/mae_mean_color")),
    "data2vec": (pretrain, 3, (*DATA2VEC, "--objective.export=teacher")),
    "a frozen teacher": (pretrain, 3, ("--config=rivals/feature_distillation", "--objective.teacher={run}")),
    "parts of patches": (pretrain, 3, ("--network.name=autoencoder", *PARTS)),
    "frozen start": (pretrain, 3, (*AVERAGED, "--model.init_from={run}", "--optim.frozen_steps=3")),
    "LoRA": (pretrain, 3, (*ADAM, *DATA2VEC, "--model.init_from={run}", "--model.lora_rank=2")),
    "SimCLR": (contrastive, 3, ("--optim.name=muon", "--data.batch_size=4", "--model.dropout=0.1")),
    "labels and a teacher": (supervised, 3, (*TAUGHT, *MIXED, *AVERAGED, "--model.drop_path=0.1")),
    "fine-tuning": (finetune, 3, (*TUNED, *MIXED, "--encoder={run}")),
}


@each_of("command, step, options", RUNS)
def test_a_killed_run_ends_with_the_same_bits_and_log(finished_run, tmp_path, command, step, options):
    paths = dict(run=finished_run, teacher=save_timm(tmp_path / "teacher", 9))
    words = [word.format(**paths) for word in (*tiny_without(*LACKING[command]), *options)]
    whole, killed = (tmp_path / name / ("lr_0.001" if command is finetune else "") for name in ("whole", "killed"))
    command.main([*words, f"--run.dir={tmp_path / 'whole'}"])
    with killed_at(step):
        command.main([*words, f"--run.dir={tmp_path / 'killed'}"])
    assert len(complete_checkpoints(killed)) == step // 2
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # torn by the kill
    command.main([*words, f"--run.dir={tmp_path / 'killed'}"])
    assert weights_of(killed) == weights_of(whole)
    of_killed, of_whole = ((complete_checkpoints(run)[-1] / MODEL_FILE).read_bytes() for run in (killed, whole))
    assert of_killed == of_whole  # heads and teachers, too
    assert without_times(killed) == without_times(whole)
