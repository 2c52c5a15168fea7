"""`[run]`: steps, ranks, devices and files of a run."""

from dataclasses import dataclass

from .section import Section, key


@dataclass(frozen=True, slots=True)
class Run(Section):
    """The run itself."""

    steps: int = key(1000, "optimizer steps", least=1)
    seed: int = key(0, "seed of weights, dropout and the order of samples", least=0, most=2**63 - 1)
    deterministic: bool = key(
        False,
        "where replicas share microbatches: sums with the same bits in every run, since gradients "
        "are kept apart until a step is over, and added in the order of a tree; other runs have "
        "fixed sums anyway",
    )
    device: str = key(
        "auto",
        "where to compute; auto = the accelerator where torch sees one; cpu; or the type of an "
        "accelerator, such as cuda or xpu",
    )
    compile: str = key(
        "",
        "a backend of torch.compile, such as inductor: it compiles each layer, and the loss, "
        "before the first step; backwards then run "
        "whole, whatever the policy; '' = off",
    )
    host_of: str = key(
        "",
        "for trials on one machine: a made-up host for each rank, such as '0,0,1,1'; '' = its own",
    )
    share_gpu: bool = key(False, "allow several ranks on one GPU")
    transport: str = key(
        "auto", "auto = mpi under a launcher, none alone", choices=("auto", "mpi", "local")
    )
    survive: bool = key(
        False,
        "axrt train: ranks that are left when one is lost go on in the same job, from their newest "
        "copies or checkpoint; under Open MPI's mpirun --with-ft ulfm",
    )
    cuda_aware: str = key(
        "auto",
        "MPI may touch GPU memory; auto = ask the library",
        choices=("auto", "true", "false"),
    )
    eval_every: int = key(
        0,
        "steps between validations; one before the first step and one at the end come anyway; 0 = "
        "only those",
        least=0,
    )
    eval_microbatches: int = key(8, "microbatches of a validation", least=1)
    out: str = key(
        "runs/run",
        "directory of the run's files; a number is added where it exists",
        is_path=True,
    )
    log_every: int = key(10, "steps between lines of metrics", least=1)
    trace_steps: int = key(
        0,
        "steps whose timeline is written and drawn, from the second on, which is warm; 0 = none",
        least=0,
    )
    patience_s: float = key(
        600.0,
        "seconds that a rank waits for one that shows no sign of life (it neither answers nor "
        "computes) before it ends the job with code "
        "69; 0 = for ever",
        least=0,
    )
    progress: str = key(
        "auto",
        "what the terminal shows; auto = live on a terminal",
        choices=("auto", "live", "plain", "off"),
    )
    tensorboard: bool = key(False, "metrics for TensorBoard too, in run.out")
    wandb: str = key("", "project of Weights & Biases that gets the metrics too; '' = none")
