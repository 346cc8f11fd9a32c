"""`remap serve`: the broker, and what it says of itself."""

from __future__ import annotations

import time

import click


@click.command(short_help="Keep named buffers alive (the broker).")
@click.option(
    "--path",
    type=click.Path(),
    help="The path of the broker's socket; by default one in this user's private directory.",
)
@click.option("--status", is_flag=True, help="Show what a running broker keeps, and who has it open.")
@click.option("--timeout", type=float, default=5.0, show_default=True, help="Seconds that --status may take.")
def serve(path: str | None, status: bool, timeout: float) -> int:
    """Keep named buffers alive, whatever becomes of the processes that use them.

    Runs until it is interrupted or terminated; then what only the broker held is freed, unless a service manager keeps
    it for the next start. Programs reach it with remap.connect.
    """
    if status:
        _show(path, timeout)
        return 0
    from remap.sharing.broker import Broker, serve

    def say(broker: Broker) -> None:
        click.echo(f"serving at {broker.path}")

    serve(path, on_ready=say)
    return 0


def _show(path: str | None, timeout: float) -> None:
    from remap.cli.report import Report
    from remap.sharing.client import connect
    from remap.sizes import counted, format_size

    report = Report()
    with connect(path, timeout=timeout) as broker:
        found, buffers = broker.status(), broker.list()
    up = time.time() - found.started
    report.step("broker", [f"process {found.process} at {found.path}, up {up:,.0f} s"])
    others = found.clients - 1  # without this command
    report.step("clients", f"{others}, {found.waiting} of them waiting; {found.requests:,} requests")
    kept = "keeps them through a restart" if found.survives_restart else "frees them when it stops"
    report.step("keeps", f"{counted(found.buffers, 'buffer')}, {format_size(found.bytes)}; {kept}")
    for one in buffers:
        users = [f"written by {one.writer}"] if one.writer else []
        users += [f"read by {', '.join(map(str, one.readers))}"] if one.readers else []
        places = ", ".join(one.locations)
        report.step("", f"{one.name}: {format_size(one.size)} on {places}; {', '.join(users) or 'not open'}")
