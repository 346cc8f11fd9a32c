"""`remap map`: a snapshot that a program saved, as bars in the terminal or as a page."""

from __future__ import annotations

import click

from remap.cli.files import OutFile


@click.command("map", short_help="Draw a saved snapshot of memory.")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))
@click.option("--html", type=OutFile(), metavar="OUT", help="Write a page to look around in, instead.")
@click.option(
    "--since", type=click.Path(dir_okay=False), metavar="EARLIER", help="Show what changed since a snapshot."
)
@click.option(
    "--most", type=click.IntRange(min=1), default=40, show_default=True, help="How many bars to draw."
)
def map_(file: str, html: str | None, since: str | None, most: int) -> int:
    """Draw the snapshot in FILE, which remap.snapshot().save(FILE) wrote: who holds which bytes at which addresses."""
    from remap.observe.render.terminal import show
    from remap.observe.snapshot import Snapshot

    found = Snapshot.load(file)
    if since is not None:
        click.echo(str(found - Snapshot.load(since)))
    elif html is not None:
        from pathlib import Path

        Path(html).write_text(found.to_html(), encoding="utf-8")
        click.echo(f"written to {html}")
    else:
        show(found, most=most)
    return 0
