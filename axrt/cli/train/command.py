"""`axrt train`: the command. What it does is imported when it is called: torch comes with it, and
help and a shell's completion do without."""

import click

from axrt.config import described

from ..overrides import with_overrides


def _print_keys(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo("\n".join(described()))
        context.exit()


@click.command(short_help="Train a model, alone or on the ranks of a job.")
@click.option(
    "--keys",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_keys,
    help="Every key, its default and meaning.",
)
@click.option("-v", "--verbose", is_flag=True, help="Say why this schedule, and where memory goes.")
@click.argument("file", type=click.Path(dir_okay=False))
@with_overrides
def train(file: str, overrides: tuple[str, ...], verbose: bool) -> None:
    """Train what FILE (TOML) describes; values after it override single keys.

    \b
    alone:            axrt train examples/quickstart.toml
    on two ranks:     mpirun -n 2 axrt train examples/quickstart.toml
    something else:   axrt train examples/quickstart.toml run.steps=50 data.source=my.txt
    going on:         axrt train runs/quickstart/config.toml checkpoint.resume=auto

    Ctrl-C (or SIGUSR1) ends after the present step and saves a checkpoint; Ctrl-C once more ends at
    once. Open MPI's mpirun ends all ranks half a second after Ctrl-C: send it SIGUSR1 instead.
    """
    from .process import run

    run(file, overrides, verbose)
