"""Chooses the route of optimizer steps for `memory.offload = "auto"`: rates are measured, routes
simulated, and all ranks take the one that is fastest for the slowest rank."""

from collections.abc import Sequence
from dataclasses import replace

from axrt.config import Config
from axrt.device import CPU
from axrt.errors import ConfigError
from axrt.ledger.ledger import Ledger, Purpose, Tier
from axrt.ledger.prediction import Predictor
from axrt.model.module import PipelineModule
from axrt.rank import Rank
from axrt.scheduler.routes import Route, StepCosts, routes
from axrt.step_rates import StepRates, measured
from axrt.store.bucket import OptimizerFactory

_FLOAT32 = 4  # bytes


def chosen(config: Config, model: PipelineModule, factory: OptimizerFactory, rank: Rank) -> Route:
    """The route of a run, the same on every rank; every rank calls it.

    Where the optimizer cannot be measured, it is "stream", with no time.

    Args:
        config: settings of the run, with `memory.offload = "auto"`.
        model: layers and loss of the whole model.
        factory: function that makes the optimizer of a bucket.
        rank: this rank.
    """
    mine = [tuple(route) for route in _found(config, model, factory, rank)]
    of_ranks = rank.exchange.gathered(mine)
    fastest = None if of_ranks is None else tuple(_fastest(of_ranks))
    return Route(*rank.exchange.broadcast(fastest))


def with_route(config: Config, route: Route) -> Config:
    """The settings with a route in place of "auto"."""
    memory = replace(config.memory, offload=route.offload, host_share=route.host_share)
    return replace(config, memory=memory)


def told(route: Route, took_s: float | None = None) -> str:
    """A sentence about a route.

    Args:
        route: route that was chosen.
        took_s: median time that steps have taken; None: none has been taken yet.
    """
    share = f" with host_share = {route.host_share:g}" if route.offload == "hybrid" else ""
    if not route.seconds:
        return (
            "memory.offload = 'auto' takes 'stream': nothing could be measured. Name a route, "
            "'stream', 'cpu' or 'hybrid', to choose another one."
        )
    expected = f"{1e3 * route.seconds:.3g} ms"
    if took_s is None:
        return (
            f"memory.offload = 'auto' takes {route.offload!r}{share}: an optimizer step should "
            f"take {expected}."
        )
    return (
        f"optimizer steps took {1e3 * took_s:.3g} ms under memory.offload = "
        f"{route.offload!r}{share}, and {expected} were expected of copies and steps alone."
    )


def _fastest(of_ranks: Sequence[Sequence[tuple[str, float, float]]]) -> Route:
    """The route that is fastest for the slowest rank; some ranks may have no choice."""
    routes_of: dict[tuple[str, float], list[float]] = {}
    for of_rank in of_ranks:
        for offload, share, seconds in of_rank:
            routes_of.setdefault((offload, share), []).append(seconds)
    of_all = {which: max(of) for which, of in routes_of.items() if len(of) == len(of_ranks)}
    if not of_all:
        return Route("stream", 0.0, 0.0)
    offload, share = min(of_all, key=lambda which: of_all[which])
    return Route(offload, share, of_all[offload, share])


def _found(
    config: Config, model: PipelineModule, factory: OptimizerFactory, rank: Rank
) -> list[Route]:
    """Each route with the time that it takes on this rank; none where that is not known."""
    in_slots = with_route(config, Route("stream", 0.0, 0.0))
    try:
        ledger = Predictor(model, factory, None).predict(in_slots, rank.size).of_rank(rank.number)
        rates = measured(factory, rank.device)
    except ConfigError:  # whoever makes the schedule refuses it with the same text
        return []
    except Exception:  # of the user's optimizer, which may want parameters of its own
        return []
    buckets = _buckets(ledger, config)
    costs = step_costs(ledger, buckets, rates, config, rank.device != CPU)
    found = routes(costs, buckets, config.memory.slots, config.votes)
    return sorted(found, key=lambda route: (route.offload, route.host_share))


def _buckets(ledger: Ledger, config: Config) -> int:
    """The number of buckets, as if each were as large as the largest."""
    slot = ledger.of_purpose(Purpose.SLOTS) / config.memory.slots
    return max(1, round(_state_bytes(ledger) / slot)) if slot else 1


def _state_bytes(ledger: Ledger) -> int:
    return sum(map(ledger.scratch.total, (Tier.HOST, Tier.DISK)))


def step_costs(
    ledger: Ledger, buckets: int, rates: StepRates, config: Config, beside: bool
) -> StepCosts:
    """What a bucket takes on each route.

    Args:
        ledger: what the rank holds where state comes to slots.
        buckets: number of its buckets.
        rates: rates of the rank.
        config: settings of the run.
        beside: True if layers compute on an accelerator; on a CPU only what has another type is
            copied for a step on the host.
    """
    types = config.precision
    is_narrow = types.weights != "float32"
    of_gradients = 2 if is_narrow and types.gradients == "weights" else _FLOAT32
    parameters = ledger.of_purpose(Purpose.GRADIENTS) / of_gradients / buckets
    state = _state_bytes(ledger) / buckets
    gradient = _FLOAT32 * parameters * (beside or of_gradients < _FLOAT32)
    weights = ledger.of_purpose(Purpose.WEIGHTS) / buckets * (beside or is_narrow)
    return StepCosts(
        fetch=state / rates.copies_in,
        step=parameters / rates.on_device,
        store=state / rates.copies_out,
        unload=gradient / rates.copies_out,
        host_step=parameters / rates.on_host,
        load=weights / rates.copies_in,
    )
