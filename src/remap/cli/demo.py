"""`remap demo`: small programs that show, step by step, what remap does."""

from __future__ import annotations

import math

import click

from remap.cli.files import OutFile
from remap.drivers import NAMES
from remap.errors import InvalidValueError
from remap.sizes import parse_size


@click.group(invoke_without_command=True, short_help="Run programs that show what remap does.")
@click.pass_context
def demo(context: click.Context) -> None:
    """Small programs that show, step by step, what remap does."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _numbers(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read device numbers such as `0,1`."""
    try:
        return None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of device numbers such as 0,1.") from None


_FILE = click.Path()
_DRIVER = click.option(
    "--driver", type=click.Choice(NAMES), help="The driver; by default CUDA where it works, else host."
)
_DEVICE = click.option("--device", type=int, help="The number of the device; by default the fastest.")


@demo.command("vector-add", short_help="Add vectors striped over devices.")
@_DRIVER
@click.option("--device", type=int, help="The number of the device that adds; by default the fastest.")
@click.option(
    "--resident",
    callback=_numbers,
    metavar="N,N",
    help="The devices that hold the bytes, such as 0,1; by default all that fit.",
)
@click.option(
    "--accessing",
    callback=_numbers,
    metavar="N,N",
    help="The devices that may touch them; by default the one that adds.",
)
@click.option(
    "--n", type=click.IntRange(min=1), help="How many numbers to make up and add; 50,000 by default."
)
@click.option("--a", "a_file", type=_FILE, metavar="FILE.npy", help="The first vector: float32, any length.")
@click.option(
    "--b", "b_file", type=_FILE, metavar="FILE.npy", help="The second vector, as long as the first."
)
@click.option("--out", type=_FILE, metavar="FILE.npy", help="Where to write the sum.")
@click.option("--plain", is_flag=True, help="Run the same program on plain allocation (cuMemAlloc).")
def vector_add(
    driver: str | None,
    device: int | None,
    resident: tuple[int, ...] | None,
    accessing: tuple[int, ...] | None,
    n: int | None,
    a_file: str | None,
    b_file: str | None,
    out: str | None,
    plain: bool,
) -> int:
    """Add two vectors that are striped over devices, and show each step.

    Exits with 0 for PASS, 1 for FAIL or an error, 2 if it is waived (CUDA was asked for and is not here, or has no
    virtual memory management), and 64 for misuse.
    """
    if (a_file is None) != (b_file is None):
        raise click.UsageError("--a and --b go together: the program adds two vectors.")
    if a_file is not None and n is not None:
        raise click.UsageError("--n makes numbers up, and --a and --b read them: give one or the other.")
    if plain and (resident is not None or accessing is not None):
        raise click.UsageError(
            "--plain memory lies on the one device that uses it: leave --resident and --accessing out."
        )
    from remap.cli.vector_add import Request, run  # NumPy and rich load here, not for --help

    files = (a_file, b_file) if a_file is not None and b_file is not None else None
    request = Request(
        driver=driver,
        device=device,
        resident=resident,
        accessing=accessing,
        length=50_000 if n is None else n,
        files=files,
        out=out,
        plain=plain,
    )
    return 0 if run(request) else 1


@demo.command("share", short_help="Let two processes use one buffer.")
@_DRIVER
@click.option(
    "--device", type=int, help="The number of the device that holds the memory; by default the fastest."
)
def share(driver: str | None, device: int | None) -> int:
    """Let two processes look at one buffer, and show what each sees.

    Exits with 0 for PASS, 1 for FAIL or an error, 2 if it is waived, and 64 for misuse.
    """
    from remap.cli.share import run

    return 0 if run(driver, device) else 1


@demo.command("elastic", short_help="Grow and share a cache in place.")
@_DRIVER
@_DEVICE
@click.option("--capacity", default="64GiB", show_default=True, help="How many addresses are reserved.")
@click.option("--peak", default="64MiB", show_default=True, help="How far the cache grows.")
@click.option("--token", default="16KiB", show_default=True, help="What it grows by at each step.")
@click.option(
    "--sequences", type=click.IntRange(1, 64), default=4, show_default=True, help="How many share the prefix."
)
@click.option("--ahead", default="0", show_default=True, help="What a thread maps ahead of the growth.")
def elastic(
    driver: str | None, device: int | None, capacity: str, peak: str, token: str, sequences: int, ahead: str
) -> int:
    """Let a cache grow token by token under one address, share it, and shrink it; every byte is checked.

    Exits with 0 for PASS, 1 for FAIL or an error, 2 if CUDA was asked for and is not here, and 64 for misuse.
    """
    reserved, most, step = _size(capacity, "--capacity"), _size(peak, "--peak"), _size(token, "--token")
    if not step:
        raise click.BadParameter("a token has a byte at least.", param_hint="'--token'")
    if not step <= most <= reserved:
        raise click.UsageError(
            f"--token {token} must fit into --peak {peak}, and that into --capacity {capacity}."
        )
    from remap.cli.elastic import Request, run

    request = Request(
        driver=driver,
        device=device,
        capacity=reserved,
        peak=most,
        token=step,
        sequences=sequences,
        ahead=_size(ahead, "--ahead"),
    )
    return 0 if run(request) else 1


@demo.command("pause", short_help="Put buffers to sleep and wake them.")
@_DRIVER
@_DEVICE
@click.option("--buffers", type=click.IntRange(min=1), default=4, help="How many buffers; 4 by default.")
@click.option("--size", default="16MiB", help="The size of each, such as 1GiB; 16MiB by default.")
@click.option(
    "--keep",
    type=click.Choice(("host", "disk", "nothing")),
    default="host",
    help="Where the contents are kept; on the host by default.",
)
@click.option("--directory", type=_FILE, help="Where the file is written that --keep disk needs.")
@click.option(
    "--cycles", type=click.IntRange(min=1), default=2, help="How often to pause and resume; 2 by default."
)
@click.option("--keep-host", is_flag=True, help="Keep the host memory between the cycles.")
def pause(
    driver: str | None,
    device: int | None,
    buffers: int,
    size: str,
    keep: str,
    directory: str | None,
    cycles: int,
    keep_host: bool,
) -> int:
    """Put buffers to sleep and wake them; check contents and addresses, and show the figures against the link.

    Exits with 0 for PASS, 1 for FAIL or an error, 2 if CUDA was asked for and is not here, and 64 for misuse.
    """
    from remap.cli.pause import Request, run

    number = _size(size, "--size")
    if not number:
        raise click.BadParameter("a buffer has a byte at least.", param_hint="'--size'")
    if directory is not None and keep != "disk":
        raise click.UsageError(f"--directory is for files, and --keep {keep} writes none: add --keep disk.")
    if keep_host and keep == "nothing":
        raise click.UsageError("--keep-host keeps what backups lie in, and --keep nothing makes none.")
    request = Request(
        driver=driver,
        device=device,
        buffers=buffers,
        size=number,
        keep=keep,
        directory=directory,
        cycles=cycles,
        keep_host=keep_host,
    )
    return 0 if run(request) else 1


@demo.command("graph-memory", short_help="What graphs hold, in four experiments.")
@_DRIVER
@_DEVICE
@click.option(
    "--experiment",
    "experiments",
    type=click.IntRange(1, 4),
    multiple=True,
    help="Run this experiment only; may be given several times. All four by default.",
)
@click.option(
    "--bytes", "size", default="64MiB", show_default=True, metavar="SIZE", help="What each graph allocates."
)
@click.option(
    "--graphs", type=click.IntRange(1, 64), default=8, show_default=True, help="How many graphs are launched."
)
@click.option(
    "--spin",
    type=click.FloatRange(min=0.0, max=10_000.0),
    metavar="MS",
    help="How long each kernel stays; by default 200 ms on CUDA and 20 ms on the host.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON; the report goes to stderr.")
@click.option(
    "--plot", type=OutFile(), metavar="FILE.png|.svg", help="Draw the figures (needs the extra remap[plot])."
)
def graph_memory(
    driver: str | None,
    device: int | None,
    experiments: tuple[int, ...],
    size: str,
    graphs: int,
    spin: float | None,
    as_json: bool,
    plot: str | None,
) -> int:
    """Show in four experiments what graphs hold, when they use addresses and bytes again, and how to keep it low.

    Exits with 0 for PASS, 1 for FAIL or an error, 2 if it is waived (CUDA was asked for and is not here, or has no
    memory pools), and 64 for misuse.
    """
    if plot is not None and not plot.lower().endswith((".png", ".svg")):
        raise click.BadParameter("a picture is FILE.png or FILE.svg.", param_hint="'--plot'")
    if spin is not None and math.isnan(spin):
        raise click.BadParameter("it is a number of milliseconds.", param_hint="'--spin'")
    from remap.cli.graph_memory import Request, run

    request = Request(
        driver=driver,
        device=device,
        experiments=tuple(sorted(set(experiments))) or (1, 2, 3, 4),
        size=_size(size, "--bytes"),
        graphs=graphs,
        spin=spin,
        as_json=as_json,
        plot=plot,
    )
    return 0 if run(request) else 1


@demo.command("kernels", short_help="Kernels in Python, checked with NumPy.")
@_DRIVER
@_DEVICE
@click.option(
    "--rows", type=click.IntRange(1, 1 << 15), default=500, show_default=True, help="Of the matrix."
)
@click.option(
    "--cols", type=click.IntRange(1, 1 << 15), default=700, show_default=True, help="Of the matrix."
)
def kernels(driver: str | None, device: int | None, rows: int, cols: int) -> int:
    """Run kernels that are written in Python, and check them against NumPy, bit for bit.

    Exits with 0 for PASS, 1 for FAIL or an error, 2 if CUDA was asked for and is not here, and 64 for misuse.
    """
    from remap.cli.kernels import run

    return 0 if run(driver, device, rows, cols) else 1


def _size(text: str, option: str) -> int:
    try:
        return parse_size(text)
    except InvalidValueError as error:
        raise click.BadParameter(f"{error}.", param_hint=f"'{option}'") from None
