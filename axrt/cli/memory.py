"""`axrt memory`: what each rank of a run will hold, without allocating any of it."""

import gc
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from axrt.scheduler.plural import plural

from .overrides import with_overrides

if TYPE_CHECKING:  # --help needs no torch
    from axrt.ledger.advice import Advice
    from axrt.ledger.prediction import Prediction

_MOST_SPANS = 5  # of ranks in a row of the table


@click.command(short_help="Say what each rank of a run will hold, and what would help.")
@click.argument("file", type=click.Path(dir_okay=False))
@with_overrides
@click.option("--ranks", type=click.IntRange(1), help="ranks of the job; default: pipe x data")
@click.option("--json", "as_json", is_flag=True, help="ledgers, owners and advice as JSON")
def memory(file: str, overrides: tuple[str, ...], ranks: int | None, as_json: bool) -> None:
    """Say what each rank will hold of the run that FILE (TOML) describes, by purpose and tier.

    \b
    a run on 32 ranks:   axrt memory big.toml --ranks 32
    another value:       axrt memory big.toml --ranks 32 memory.recompute=full

    Nothing is allocated, and no rank is started. Leaves with code 1 where a rank needs more than
    memory.device_gb or memory.scratch_gb, 2 where the configuration is refused, and 0 otherwise.
    """
    from axrt.config import Config
    from axrt.errors import ConfigError
    from axrt.exit_codes import exit_code_of
    from axrt.ledger.advice import advices, refusal
    from axrt.ledger.prediction import Predictor
    from axrt.models.registry import model_of
    from axrt.store.presets import optimizer_factory

    from .sample import sample_of

    gc.disable()  # a quarter of the time would go there, and the process ends soon
    try:
        config = Config.read(file, overrides)
        of = config.parallel
        size = ranks or max(1, of.pipe) * of.data * of.tensor
        model = model_of(config)
        predictor = Predictor(model, optimizer_factory(config.optimizer, model), sample_of(config))
        found = predictor.predict(config, size)
        helpful = advices(predictor, found)
        refused = refusal(predictor, found)
    except ConfigError as error:
        click.echo(f"axrt: {error}", err=True)
        sys.exit(exit_code_of(error))
    finally:
        gc.enable()
    click.echo(_as_json(found, helpful, refused) if as_json else _told(found, helpful, refused))
    sys.exit(bool(refused))


def _as_json(found: "Prediction", helpful: "list[Advice]", refused: str) -> str:
    from axrt.ledger.ownership import rows_of

    told: dict[str, Any] = {
        "policy": found.schedule.policy,
        "pipe": found.mesh.pipe,
        "data": found.mesh.data,
        "ranks": [{"rank": rank, **found.of_rank(rank).as_dict()} for rank in range(found.size)],
        "fullest": found.fullest,
        "refused": refused,
        "unknown": list(found.unknown),
        "owners": [*rows_of(found.owned)],
        "advice": [
            {
                "set": one.text,
                "saves_bytes": one.saves,
                "fullest": one.then.fullest,
                "device_bytes": one.then.most,
            }
            for one in helpful
        ],
    }
    return json.dumps(told, indent=1)


def _told(found: "Prediction", helpful: "list[Advice]", refused: str) -> str:
    from axrt.ledger.ownership import busiest_told, table_of

    size, fullest = found.config.schedule, found.of_rank(found.fullest)
    mesh = found.mesh
    members = f"members: {mesh.tensor}, " if mesh.tensor > 1 else ""
    lines = [
        f"ranks in the pipeline: {mesh.pipe}, {members}replicas: {mesh.data}, policy "
        f"{found.schedule.policy}, {plural(size.microbatches, 'microbatch')} of "
        f"{size.microbatch_size}",
        "",
        *_table(found),
        "",
        f"fullest: rank {found.fullest} with {found.unit.text(fullest.total())} on its device",
        *found.unknown,
        *filter(None, [busiest_told(found.owned), *table_of(found.owned)]),
    ]
    of = found.config.memory
    limits = {"memory.device_gb": of.device_gb, "memory.scratch_gb": of.scratch_gb}
    fit = [f"{key} = {limit:g}: that fits" for key, limit in limits.items() if limit]
    lines += [refused] if refused else fit
    lines += [str(one) for one in helpful] or ["no key that was tried would save 1 % of that"]
    return "\n".join(lines)


def _table(found: "Prediction") -> list[str]:
    """A row for all ranks that show the same, a column for each purpose on a tier.

    All cells are in one unit.
    """
    from axrt.ledger.ledger import Tier

    by_rank = [found.of_rank(rank) for rank in range(found.size)]
    ledgers = {id(one): one for one in by_rank}  # few, though ranks may be thousands
    columns = list(
        dict.fromkeys(
            (tier, entry.purpose)
            for tier in Tier
            for one in ledgers.values()
            for entry in one.entries
            if entry.tier is tier
        )
    )
    tiers = [tier for tier in Tier if any(one.total(tier) for one in ledgers.values())]
    heads = [
        purpose.value if tier is Tier.DEVICE else f"{purpose.value} ({tier.value})"
        for tier, purpose in columns
    ]
    unit = found.unit
    cells = {
        which: (
            *(unit.number(one.of_purpose(purpose, tier)) for tier, purpose in columns),
            *(unit.number(one.total(tier)) for tier in tiers),
        )
        for which, one in ledgers.items()
    }
    ranks_with: dict[tuple[str, ...], list[int]] = {}
    for rank, ledger in enumerate(by_rank):
        ranks_with.setdefault(cells[id(ledger)], []).append(rank)
    rows = [("ranks", *heads, *(f"on {tier.value}" for tier in tiers))]
    rows += [(_spans(ranks), *of) for of, ranks in ranks_with.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"in {unit.name}" + (f" ({unit.num_bytes:,.0f} bytes)" if unit.num_bytes > 1 else ""),
        *(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ),
    ]


def _spans(ranks: list[int]) -> str:
    """Ranks as text, such as "0-3,8"; of many spans the first ones, and how many ranks they are."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    told = [f"{first}-{last}" if first < last else f"{first}" for first, last in spans]
    if len(told) > _MOST_SPANS:
        told = [*told[: _MOST_SPANS - 1], f"... {told[-1]} ({plural(len(ranks), 'rank')})"]
    return ",".join(told)
