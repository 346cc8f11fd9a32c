"""`remap explain`: what an error means, shown on a small program that raises it."""

from __future__ import annotations

import shutil
import textwrap

import click

_NARROWEST, _WIDEST = 40, 100


@click.command(short_help="Show what an error means, on an example.")
@click.argument("error", metavar="[ERROR]", required=False)
def explain(error: str | None) -> int:
    """Show a small program that raises ERROR, what it says, why, and the cure. Without ERROR, list them all."""
    from remap.observe.mistakes import MISTAKES, find

    width = max(min(shutil.get_terminal_size().columns, _WIDEST), _NARROWEST)
    if error is None:
        most = max(map(len, MISTAKES)) + 2
        for name, one in MISTAKES.items():
            click.echo(textwrap.fill(f"{name:<{most}}{one.summary}", width, subsequent_indent=" " * most))
        return 0
    one = find(error)
    click.echo(f"{one.name}: {one.summary}\n")
    click.echo("\n".join(f"    {line}" if line else "" for line in one.program.splitlines()))
    click.echo()
    for label, text in (("says", one.message()), ("why", one.cause), ("cure", one.cure)):
        click.echo(textwrap.fill(f"{label:<6}{text}", width, subsequent_indent=" " * 6))
    return 0
