"""The command `remap`: each subcommand is one small module of this package.

Exit statuses: 0 for success, 1 for failure or an error, 2 for waived (what was asked for needs something that is not
here), 64 for misuse of the command (`EX_USAGE`, so that it cannot be taken for waived). Errors that a user can meet are
one message on the error stream; `REMAP_DEBUG=1` adds where they come from.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence

import click

from remap.cli.demo import demo
from remap.cli.doctor import doctor
from remap.cli.environment import VARIABLES
from remap.cli.explain import explain
from remap.cli.map import map_
from remap.cli.serve import serve
from remap.cli.trace import trace
from remap.cli.waived import Waived
from remap.errors import RemapError

FAILED, WAIVED, MISUSE, INTERRUPTED = 1, 2, 64, 130

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Command(click.Group):
    """The group at the top, whose help ends with the environment variables, and which knows what only demos are."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Say where a command is that is a demo."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if args[0] not in demo.commands:
                raise
            said = f'{error.message} Did you mean "remap demo {args[0]}"?'
            raise click.UsageError(said, ctx) from None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write them as click writes options."""
        del ctx
        with formatter.section("Environment"):
            formatter.write_dl(list(VARIABLES.items()))


@click.group(cls=_Command, context_settings=_SETTINGS, invoke_without_command=True)
@click.version_option(None, "--version", package_name="remap", help="Show the version and exit.")
@click.pass_context
def cli(context: click.Context) -> None:
    """GPU memory under addresses that do not change, on CUDA and on the host."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


cli.add_command(demo)
cli.add_command(doctor)
cli.add_command(map_)
cli.add_command(trace)
cli.add_command(explain)
cli.add_command(serve)


def main() -> None:
    """Run the command with the process's arguments and exit with its status."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal may not know a character of ours, or of a file's name.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status; no error that a user can cause leaves it as a traceback."""
    try:
        status = cli.main(list(arguments), prog_name="remap", standalone_mode=False)
        if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] (it was closed: >&-)
            sys.stdout.flush()
    except click.UsageError as error:
        error.show()
        return MISUSE
    except click.ClickException as error:
        error.show()
        return FAILED
    except Waived as reason:
        click.echo(f"waived: {reason}", err=True)
        return WAIVED
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; what is still buffered must not fail a second time when the interpreter ends.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (RemapError, OSError, MemoryError) as error:
        _show(error)
        return FAILED
    except ImportError as error:  # NumPy's is a page long; its cause is what the user can do something about
        cause = RemapError("a library", rule=f"it cannot be loaded ({error.__cause__ or error})")
        cause.__cause__ = error
        _show(cause)
        return FAILED
    return status if isinstance(status, int) else 0


def _show(error: BaseException) -> None:
    if os.environ.get("REMAP_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
        return
    said = str(error) or "the process ran out of memory"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        said = f"{os.fsdecode(error.filename)}: {error.strerror[0].lower()}{error.strerror[1:]}"
    for note in getattr(error, "__notes__", ()):
        said += f"\n  {note}"
    click.echo(f"error: {said}", err=True)
