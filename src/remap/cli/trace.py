"""`remap trace`: a recorded run as plain driver calls, or in figures."""

from __future__ import annotations

import click


@click.command("trace", short_help="Print a recorded run, call by call.")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))
@click.option(
    "--as", "language", type=click.Choice(("c", "python")), help="Print the run as a program in a language."
)
def trace(file: str, language: str | None) -> int:
    """Say what the trace in FILE holds, call by call in figures; with --as, print it as the program it amounts to.

    REMAP_TRACE=FILE or remap.trace(FILE) records one; Perfetto (ui.perfetto.dev) and chrome://tracing open it, too.
    """
    from remap.observe.chrome import read
    from remap.observe.reading import printable

    found = read(file)
    driver = f"the {printable(found.driver)} driver" if found.driver else "no driver (none was opened)"
    if language is not None:
        from remap.observe.languages import writer
        from remap.observe.program import write_program

        about = f"A run on {driver}, {found.started[:19]}: {len(found.calls)} calls"
        click.echo(write_program(found, writer(language, about)), nl=False)
        return 0
    from remap.cli.report import Report
    from remap.sizes import counted

    report = Report()
    report.step("trace", f"{len(found.calls):,} calls of {driver}, begun {printable(found.started)}")
    if found.left_out:
        report.step("", f"{found.left_out:,} more were made than the trace keeps")
    times: dict[str, list[float]] = {}
    refused: dict[str, int] = {}
    for call in found.calls:
        times.setdefault(call.method, []).append(call.duration)
        refused[call.method] = refused.get(call.method, 0) + bool(call.error)
    for name, spent in sorted(times.items(), key=lambda entry: -sum(entry[1])):
        bad = f", {refused[name]} refused" if refused[name] else ""
        middle = sorted(spent)[len(spent) // 2]
        figures = f"median {middle:,.1f} µs, {sum(spent) / 1000:,.2f} ms in all"
        report.step("", f"{printable(name)}: {counted(len(spent), 'call')}, {figures}{bad}")
    return 0
