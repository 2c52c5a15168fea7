"""`[optimizer]`: what steps, and at which rate."""

from dataclasses import dataclass

from .section import Section, key


@dataclass(frozen=True, slots=True)
class Optimizer(Section):
    """How weights follow gradients, where no optimizer is given in code."""

    name: str = key("adamw", "the optimizer", choices=("adamw", "adam", "sgd"))
    lr: float = key(3e-4, "learning rate at its highest", least=0)
    betas: tuple[float, ...] = key(
        (0.9, 0.95), "decay of the two moments (adamw, adam)", least=0, most=1
    )
    momentum: float = key(0.9, "momentum of sgd; 0 = off", least=0, most=1)
    clip: float = key(
        0.0,
        "most that the 2-norm of all gradients may be; 0 = off, and no step waits for the norm",
        least=0,
    )
    weight_decay: float = key(0.1, "on parameters of two and more dimensions; 0 = off", least=0)
    schedule: str = key(
        "constant",
        "the learning rate after the warm-up, until run.steps",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = key(0, "steps over which the learning rate rises from 0; 0 = off", least=0)
    final_lr: float = key(
        0.0, "where a linear or cosine schedule ends, as a share of lr", least=0, most=1
    )
