"""`remap explain`: what an error means, shown on a small program that raises it."""

from __future__ import annotations

import textwrap

import click


@click.command(short_help="Show what an error means, on an example.")
@click.argument("error", metavar="[ERROR]", required=False)
def explain(error: str | None) -> int:
    """Show a small program that raises ERROR, what it says, why, and the cure. Without ERROR, list them all."""
    from remap.observe.mistakes import MISTAKES, find

    if error is None:
        width = max(map(len, MISTAKES))
        for name, one in MISTAKES.items():
            click.echo(f"{name:<{width}}  {one.summary}")
        return 0
    one = find(error)
    click.echo(f"{one.name}: {one.summary}\n")
    click.echo("\n".join(f"    {line}" if line else "" for line in one.program.splitlines()))
    click.echo()
    for label, text in (("says", one.message()), ("why", one.cause), ("cure", one.cure)):
        click.echo(textwrap.fill(f"{label:<6}{text}", 100, subsequent_indent=" " * 6))
    return 0
