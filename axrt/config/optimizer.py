"""`[optimizer]`: what steps, and at which rate."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from .section import Section, key

# names of the optimizers that read a key; the others are read by all
_READ_BY = {
    "matrices": ("muon", "soap", "kfac"),
    "rest_lr": ("muon", "soap", "kfac"),
    "nesterov": ("muon",),
    "ns_steps": ("muon",),
    "ns_coefficients": ("muon",),
    "adjust_lr": ("muon",),
    "matrix_type": ("muon",),
    "refresh": ("soap", "kfac"),
    "lag": ("soap", "kfac"),
    "damping": ("kfac",),
    "kl_clip": ("kfac",),
    "sample": ("kfac",),
}


@dataclass(frozen=True, slots=True)
class Optimizer(Section):
    """How weights follow gradients, where no optimizer is given in code."""

    name: str = key(
        "adamw", "the optimizer", choices=("adamw", "adam", "sgd", "muon", "soap", "kfac")
    )
    lr: float = key(3e-4, "learning rate at its highest", least=0)
    betas: tuple[float, ...] = key(
        (0.9, 0.95),
        "decay of the two moments (adamw, adam, soap); the second is that of kfac's factors, too",
        least=0,
        most=1,
    )
    momentum: float = key(0.9, "momentum of sgd, muon and kfac; 0 = off", least=0, most=1)
    matrices: str | tuple[str, ...] = key(
        "",
        "names of the matrices that muon, soap or kfac steps, or patterns such as '*.up.weight'; "
        "'*.qkv.weight:3' = each is fused of three, ':64,16,16' = of such rows; '' = what has two "
        "dimensions between the first and the last layer. AdamW steps all else",
    )
    rest_lr: float = key(
        0.0, "learning rate at its highest of all but matrices (muon, soap, kfac); 0 = lr", least=0
    )
    nesterov: bool = key(True, "muon: the gradient is added to its momentum once more")
    ns_steps: int = key(
        5, "Newton-Schulz iterations by which muon makes a matrix orthogonal", least=1, most=99
    )
    ns_coefficients: tuple[float, ...] = key(
        (3.4445, -4.7750, 2.0315),
        "muon: of the terms of first, third and fifth order of an iteration's polynomial",
    )
    adjust_lr: str = key(
        "original",
        "how muon's rate follows the shape of a matrix: 'original' = by the root of rows over "
        "columns, at least 1; 'match_rms_adamw' = so that steps are as large as AdamW's",
        choices=("original", "match_rms_adamw"),
    )
    matrix_type: str = key(
        "float32",
        "type of muon's products; 'bfloat16' has the bits of torch.optim.Muon, and is fast where a "
        "processor multiplies in it, as GPUs do",
        choices=("float32", "bfloat16"),
    )
    refresh: int = key(
        10, "steps from one refresh of soap's bases, or kfac's inverses, to the next", least=1
    )
    lag: int = key(
        1,
        "steps after which a refresh is used, which is computed meanwhile; at most refresh - 1, "
        "or 1",
        least=1,
    )
    damping: float = key(
        1e-3,
        "kfac: its root is split between both factors, and added to copies of them before they are "
        "inverted",
        least=0,
    )
    kl_clip: float = key(
        1e-3,
        "most that the square of the rate times a change of kfac times its gradient may be, over "
        "all matrices; 0 = off",
        least=0,
    )
    sample: int = key(
        1, "steps from one whose inputs and gradients count in kfac's factors to the next", least=1
    )
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

    @property
    def steps_matrices(self) -> bool:
        """The optimizer steps matrices as a whole."""
        return self.name in _READ_BY["matrices"]

    @property
    def refreshes(self) -> bool:
        """The optimizer computes something anew now and then."""
        return self.name in _READ_BY["refresh"]

    @property
    def preconditions(self) -> bool:
        """The optimizer makes changes of gradients before steps are voted on."""
        return self.name in _READ_BY["damping"]

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of the names of matrices; () where they are those between the first and the last
        layer."""
        found = self.matrices
        return (found,) * bool(found) if isinstance(found, str) else found

    def _of_all(self) -> Iterator[str]:
        default = {item.name: item.default for item in fields(self)}
        for name, readers in _READ_BY.items():
            found = getattr(self, name)
            if self.name not in readers and found != default[name]:
                yield (
                    f"optimizer.{name} = {found!r} with optimizer.name = {self.name!r}, which does "
                    f"not read it; expected {default[name]!r}, or optimizer.name = "
                    f"{' or '.join(map(repr, readers))}"
                )
        if len(self.ns_coefficients) != 3:
            yield (
                f"optimizer.ns_coefficients = {list(self.ns_coefficients)}; expected three numbers"
            )
        if self.refreshes and 1 in self.betas:
            yield (
                f"optimizer.betas = {list(self.betas)} with optimizer.name = {self.name!r}; "
                "expected less than 1"
            )
        if self.preconditions and self.clip:
            yield (
                f"optimizer.clip = {self.clip:g} with optimizer.name = 'kfac', whose changes "
                "optimizer.kl_clip makes shorter; expected optimizer.clip = 0"
            )
        if self.refreshes and self.lag > max(1, self.refresh - 1):
            yield (
                f"optimizer.lag = {self.lag} with optimizer.refresh = {self.refresh}: a refresh "
                "would be used after the next one; expected at most "
                f"{max(1, self.refresh - 1)}"
            )
