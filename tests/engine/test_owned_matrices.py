"""Muon, SOAP and K-FAC by their keys: matrices are stepped whole, and all else by AdamW."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import axrt
from axrt.config import Optimizer
from axrt.errors import ConfigError
from axrt.observe.observer import Observer
from axrt.scheduler.message import Meaning
from axrt.store.muon import MuonAndAdamW, orthogonal
from axrt.store.presets import optimizer_factory
from axrt.transport.local import LocalWorld

from ..sweeps import swept
from .matrices import MICROBATCHES, Block, batches, six_blocks, trained_on
from .reference import Outcome, configured, plain_torch, train_on_a_rank

WIDTH, STEPS = 16, 3
OF_ALL = {"lr": 0.02, "rest_lr": 0.003, "weight_decay": 0.1}
MUON = {"name": "muon", "momentum": 0.95, "matrix_type": "bfloat16", **OF_ALL}
# Refreshes are due behind the steps 2, 3, 4 and so on, each of a third or half of the matrices.
SOAP = {"name": "soap", "refresh": 2, "lag": 1, **OF_ALL}
SLOW_SOAP = {"name": "soap", "refresh": 3, "lag": 2, **OF_ALL}
KFAC = {"name": "kfac", "refresh": 3, "lag": 2, "sample": 2, **OF_ALL}


def model() -> axrt.PipelineModule:
    first, last = axrt.LayerSpec(nn.Linear, 8, WIDTH), axrt.LayerSpec(nn.Linear, WIDTH, 5)
    return six_blocks(first, axrt.LayerSpec(Block, WIDTH, 3 * WIDTH), last)


class Both(torch.optim.Optimizer):
    """Torch's own Muon and AdamW, side by side."""

    def __init__(self, *both: torch.optim.Optimizer) -> None:
        self.both = both
        self.param_groups = [group for one in both for group in one.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.both:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.both:
            one.zero_grad()


def torchs(named: Any) -> Both:
    is_matrix = {name: p.dim() == 2 and name[0] in "123456" for name, p in named}
    matrices = [p for name, p in named if is_matrix[name]]
    rest = [p for name, p in named if not is_matrix[name]]
    groups = [
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    return Both(
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.95)),
    )


def trained(
    pipe: int, data: int, of: Callable[[], Any] = model, steps: int = STEPS, **sections: Any
) -> Outcome:
    return trained_on(pipe, data, of, steps, **{"optimizer": {**MUON, "clip": 0.5}, **sections})


@swept(
    ("memory", [{}, {"offload": "stream"}, {"bucket_mb": 0.002}]),
    ("policy", ["1f1b", "zb-h1", "breadth-first", "zb-v"]),
    ("pipe", [1, 2, 4]),
)
def test_one_replica_has_the_bits_of_torchs_own(
    memory: dict[str, Any], policy: str, pipe: int
) -> None:
    expected = plain_torch(model, batches(1), STEPS, torchs, clip=0.5)
    found = trained(pipe, 1, schedule={"policy": policy}, memory={"scratch": "host", **memory})
    assert (found.losses, found.norms) == (expected.losses, expected.norms)
    for name, value in expected.parameters.items():
        assert torch.equal(found.parameters[name], value), name


@swept(
    (
        "pipe, policy, memory",
        [
            (1, "1f1b", {}),
            (2, "1f1b", {"bucket_mb": 0.002}),
            (2, "zb-h1", {}),
            (2, "breadth-first", {"scratch": "host", "offload": "stream"}),
            (4, "zb-v", {"scratch": "disk", "offload": "stream"}),
            (2, "1f1b", {"recompute": "full"}),
            (2, "zb-h1", {"scratch": "host", "offload": "cpu"}),
        ],
    ),
    ("keys", [SOAP, SLOW_SOAP]),
)
def test_refreshes_in_idle_time_have_the_bits_of_a_plain_loop(
    pipe: int, policy: str, memory: dict[str, Any], keys: dict[str, Any], tmp_path: Any
) -> None:
    factory = optimizer_factory(Optimizer(**keys), model())
    expected = plain_torch(model, batches(1), 7, factory, clip=0.5)
    if memory.get("scratch") == "disk":
        memory = {**memory, "scratch": f"disk:{tmp_path}"}
    found = trained(
        *(pipe, 1),
        steps=7,
        optimizer={**keys, "clip": 0.5},
        schedule={"policy": policy},
        memory=memory,
    )
    assert (found.losses, found.norms) == (expected.losses, expected.norms)
    for name, value in expected.parameters.items():
        assert torch.equal(found.parameters[name], value), name


class Sent(Observer):
    """Counts elements that a rank sends of gradients and of weights."""

    def __init__(self) -> None:
        self.elements = 0

    def sent(self, rank: int, message: Any, payload: Any) -> None:
        if getattr(message, "meaning", None) in (Meaning.PART, Meaning.SUM, Meaning.WEIGHTS):
            self.elements += numbers_in(payload)


def numbers_in(payload: Any) -> int:
    if isinstance(payload, Tensor):
        return payload.numel() if payload.is_floating_point() else 0
    return sum(map(numbers_in, payload)) if isinstance(payload, tuple | list) else 0


@pytest.mark.parametrize("keys", [MUON, SOAP, KFAC])
def test_owners_send_what_an_all_reduce_sends(keys: dict[str, Any]) -> None:
    """Summed over the ranks: who owns more of the bytes sends more weights and fewer parts."""
    sent = []
    for zero in (0, 1):
        optimizer = keys if zero else MUON
        config = configured(
            MICROBATCHES, parallel={"data": 4}, optimizer=optimizer, memory={"zero": zero}
        )

        def main(transport: Any, config: Any = config) -> int:
            by_key: Any = None
            counts = Sent()
            train_on_a_rank(transport, model(), batches(4), 5, config, by_key, observers=[counts])
            return counts.elements

        sent.append(sum(LocalWorld(4, 1).run(main)))
    assert sent[0] == sent[1] > 0


@pytest.fixture
def muon_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own Muon multiplies in float32: a bfloat16 that is rounded otherwise, after sums in
    another order, would be scaled up by its iterations."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self.clone())


def torchs_in_float32(named: Any) -> Both:
    """By a name of its own, since runs beside which others are held are kept."""
    return torchs(named)


@pytest.mark.usefixtures("muon_in_float32")
@pytest.mark.parametrize(("zero", "data"), [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
def test_replicas_train_as_torchs_own(zero: int, data: int) -> None:
    expected = plain_torch(model, batches(data), STEPS, torchs_in_float32, clip=0.5)
    keys = {**MUON, "matrix_type": "float32", "clip": 0.5}
    found = trained(3 - data, data, memory={"zero": zero, "bucket_mb": 0.004}, optimizer=keys)
    assert found.losses == pytest.approx(expected.losses, rel=0 if data == 1 else 1e-6)
    for name, value in expected.parameters.items():
        atol = 0.0 if data == 1 else 1e-6
        torch.testing.assert_close(found.parameters[name], value, rtol=0, atol=atol)


@swept(
    ("keys, bucket_mb", [(MUON, 0.004), (SOAP, 0.004), (SLOW_SOAP, 25.0), (MUON, 25.0)]),
    ("zero", [1, 2, 3]),
    quick=3,
)
def test_each_matrix_has_one_owner_among_replicas(
    zero: int, bucket_mb: float, keys: dict[str, Any]
) -> None:
    """Nobody steps a part of one, so bits are those of replicas that step all. Where gradients are
    clipped no parameter is cut, whatever steps it: here they are not."""
    found, expected = (
        trained(2, 2, steps=6, memory={"zero": of, "bucket_mb": bucket_mb}, optimizer=keys)
        for of in (zero, 0)
    )
    assert found.losses == expected.losses
    for name, value in expected.parameters.items():
        assert torch.equal(found.parameters[name], value), name


PLAIN: dict[str, Any] = {
    "nesterov": True,
    "ns_steps": 5,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
}
OTHERS: dict[str, Any] = {"nesterov": False, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)}


@pytest.mark.parametrize(
    ("adjust_lr", "iterations"),
    [("original", PLAIN), ("match_rms_adamw", PLAIN), ("original", OTHERS)],
)
def test_matrices_that_are_fused_are_stepped_one_by_one(
    adjust_lr: str, iterations: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    fused, bias = nn.Parameter(torch.randn(7, 4)), nn.Parameter(torch.randn(4))
    rows = [4, 2, 1]
    apart = [nn.Parameter(part.detach().clone()) for part in torch.split(fused, rows)]
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, **iterations}
    own = {"adjust_lr": adjust_lr, "matrix_type": "bfloat16"}
    group = {"params": [fused], "blocks": tuple(rows), **options, **own}
    found = MuonAndAdamW([group], [{"params": [bias], "lr": 0.1}])
    expected = torch.optim.Muon(apart, **options, adjust_lr_fn=adjust_lr)
    for _ in range(3):
        fused.grad, bias.grad = torch.randn(7, 4), torch.randn(4)
        for one, gradient in zip(apart, torch.split(fused.grad, rows), strict=True):
            one.grad = gradient.clone()
        version = fused._version
        found.step()
        expected.step()  # type: ignore[no-untyped-call]
        assert fused._version > version, "whoever looks at versions must see the step"
    assert torch.equal(fused, torch.cat([one.detach() for one in apart]))
    assert set(found.state[fused]) == {"momentum_buffer"}


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("rank one", 0.696436409470), ("2 x 2", 1.108111115683), ("4 x 4", 0.765438530454)],
)
def test_five_iterations_make_of_a_matrix_what_they_should(kind: str, factor: float) -> None:
    """Of one of rank one, and of orthogonal ones."""
    torch.manual_seed(2)
    if kind == "rank one":
        sides = [nn.functional.normalize(torch.randn(6).double(), dim=0) for _ in range(2)]
        matrix = torch.outer(*sides)
    else:
        matrix = torch.linalg.qr(torch.randn(int(kind[0]), int(kind[0])).double())[0]
    for given in (matrix, 7.0 * matrix):
        torch.testing.assert_close(
            orthogonal(given, torch.float64), factor * matrix, rtol=0, atol=1e-11
        )
    in_float32 = orthogonal(matrix.float(), torch.float32)
    torch.testing.assert_close(in_float32, factor * matrix.float(), rtol=0, atol=1e-4)


def test_halves_that_are_made_orthogonal_apart_are_another_matrix() -> None:
    """What ZeRO by elements would do of it; `test_each_matrix_has_one_owner` would see that."""
    torch.manual_seed(3)
    matrix = torch.randn(64, 32)
    whole = orthogonal(matrix, torch.float32)
    halves = torch.cat([orthogonal(half, torch.float32) for half in torch.split(matrix, 32)])
    assert float((halves - whole).norm() / whole.norm()) > 0.4


def built_in(**sections: Any) -> axrt.PipelineModule:
    from axrt.models.registry import model_of

    sizes = {"vocab": 23, "width": 16, "heads": 4, "kv_heads": 2, "layers": 2, "context": 8}
    return model_of(axrt.Config.read({"model": sizes, "optimizer": MUON, **sections}))


def test_keys_of_muon_are_those_of_torch() -> None:
    named = [*model().sequential(1).named_parameters()]
    for keys in (PLAIN, OTHERS):
        made = optimizer_factory(Optimizer(name="muon", **keys), model())(named)
        assert all(
            {key: group[key] for key in keys} == keys
            for group in made.param_groups
            if group["blocks"]
        )


def test_the_built_in_model_tells_what_is_fused() -> None:
    module = built_in()
    made = optimizer_factory(Optimizer(name="muon"), module)(
        [*module.sequential(1).named_parameters()]
    )
    blocks = {group["blocks"]: len(group["params"]) for group in made.param_groups}
    # queries, keys and values of two blocks; what comes out of attention; up; down
    assert blocks == {(16, 8, 8): 2, (16,): 4, (64,): 2, (): blocks[()]}


@swept(
    ("keys", [SLOW_SOAP, KFAC, SOAP, MUON]),
    # A refresh of the slow ones is due behind the fourth step, and its use behind the sixth.
    ("saved_after", [4, 5, 3]),
)
def test_a_run_goes_on_on_another_layout(
    keys: dict[str, Any], saved_after: int, tmp_path: Any
) -> None:
    """Also between the step behind which a refresh is due and the one that uses it."""
    by_key: Any = None

    def run(pipe: int, act: Callable[[axrt.Engine], Any]) -> Any:
        config = configured(MICROBATCHES, parallel={"pipe": pipe}, optimizer=keys)

        def main(transport: Any) -> Any:
            with axrt.initialize(model(), by_key, config=config, transport=transport) as engine:
                return act(engine)

        return LocalWorld(pipe, 1).run(main)[0]

    def steps(engine: axrt.Engine, first: int, end: int) -> list[float]:
        return [
            engine.train_batch(iter(batches(1)(number)) if engine.reads else None).loss
            for number in range(first, end)
        ]

    def begin(engine: axrt.Engine) -> list[float]:
        steps(engine, 0, saved_after)
        engine.save_checkpoint(tmp_path / "one")
        return steps(engine, saved_after, 9)

    def go_on(engine: axrt.Engine) -> list[float]:
        engine.load_checkpoint(tmp_path / "one")
        return steps(engine, saved_after, 9)

    begun = run(1, begin)
    saved = [key for file in tmp_path.rglob("optimizer-*.safetensors") for key in load_file(file)]
    assert saved
    assert not any(key.endswith(".due") for key in saved), "what is saved depends on no timing"
    assert begun == run(2, go_on)


@swept(("keys", [MUON, SOAP, KFAC]), ("zero", [0, 1]))
def test_a_run_does_not_go_on_with_other_matrices(
    keys: dict[str, Any], zero: int, tmp_path: Any
) -> None:
    """State of a matrix is not that of AdamW, though one optimizer has both."""

    def run(matrices: str, act: Callable[[axrt.Engine], Any]) -> None:
        config = configured(
            MICROBATCHES,
            parallel={"data": 2},
            memory={"zero": zero or int(keys is KFAC)},
            optimizer={**keys, "matrices": matrices},
        )

        def main(transport: Any) -> None:
            by_key: Any = None
            with axrt.initialize(model(), by_key, config=config, transport=transport) as engine:
                act(engine)

        LocalWorld(2, 1).run(main)

    def begin(engine: axrt.Engine) -> None:
        first = engine.data_rank * MICROBATCHES
        engine.train_batch(iter(batches(2)(0)[first : first + MICROBATCHES]))
        engine.save_checkpoint(tmp_path / "one")

    run("*.up.weight", begin)
    with pytest.raises(
        ConfigError, match=r"expected the same \(optimizer\.name, optimizer\.matrices\)"
    ):
        run("*.down.weight", lambda engine: engine.load_checkpoint(tmp_path / "one"))


@pytest.mark.parametrize("keys", [SOAP, KFAC])
def test_what_has_factors_of_narrow_parameters_is_refused(keys: dict[str, Any]) -> None:
    def narrow() -> axrt.PipelineModule:
        specs = [
            axrt.LayerSpec(nn.Linear, *size, dtype=torch.bfloat16)
            for size in ((8, 16), (16, 16), (16, 5))
        ]
        return axrt.PipelineModule(specs, nn.functional.cross_entropy)

    with pytest.raises(
        ConfigError, match=r"1\.weight is torch\.bfloat16, in which nothing is factored"
    ):
        trained(1, 1, narrow, optimizer=keys)


@pytest.mark.parametrize(
    ("matrices", "text"),
    [
        (
            ["*.upp.weight"],
            r"'\*\.upp\.weight' matches nothing; .* the nearest is '\*\.up\.weight'",
        ),
        (["*.norm.weight"], r"names 1\.norm\.weight, which has 1 dimensions"),
        (["*.up.weight:5"], r"\*\.up\.weight:5 names 1\.up\.weight, which has 48 rows"),
        (["*.up.weight:0"], r"has '0' behind its colon"),
        (["?.up.weight", "*.up.weight:3"], r"patterns before '\*\.up\.weight' take all that"),
    ],
)
def test_names_of_matrices_are_checked(matrices: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        trained(1, 1, optimizer={**MUON, "matrices": matrices})


@pytest.mark.parametrize("said", ["3", "16,16,16"])
def test_a_pattern_says_of_what_a_matrix_is_fused(said: str) -> None:
    made = optimizer_factory(Optimizer(name="muon", matrices=(f"*.up.weight:{said}",)), model())(
        [*model().sequential(1).named_parameters()]
    )
    assert {group["blocks"] for group in made.param_groups} == {(16, 16, 16), ()}


def test_a_model_without_matrices_between_its_ends_is_refused() -> None:
    def ends() -> axrt.PipelineModule:
        specs = [axrt.LayerSpec(nn.Linear, 8, WIDTH), axrt.LayerSpec(nn.Linear, WIDTH, 5)]
        return axrt.PipelineModule(specs, nn.functional.cross_entropy)

    with pytest.raises(ConfigError, match="the model has none between its first and last layer"):
        trained(1, 1, ends)
    found = trained(1, 1, ends, optimizer={**MUON, "matrices": "0.weight"})
    assert found.losses[-1] < found.losses[0]


def test_a_key_that_nobody_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.rest_lr = 0\.1 with optimizer\.name = 'ad"):
        axrt.Config.read({"optimizer": {"rest_lr": 0.1}})


def test_members_of_a_team_do_not_cut_what_is_stepped_whole() -> None:
    with pytest.raises(ConfigError, match=r"'muon' with parallel\.tensor = 2: matrices are"):
        axrt.Config.read({"parallel": {"tensor": 2}, "optimizer": MUON})
