"""Command line: ``anyattn demo | show | explain | plan | bench | doctor | cache | warmup``. Mistakes and Ctrl-C end in a line on stderr."""

from __future__ import annotations

import sys
from typing import Any

import click

from anyattn import __version__

__all__ = ["cli", "main"]

BAD_ARGUMENTS, INTERRUPTED = 2, 130  # exit statuses by the shell's conventions
_COMMANDS = {
    "demo": ("anyattn.cli.demo", "Run the gallery of variants forward and backward, and draw it."),
    "show": ("anyattn.cli.show", "Draw a mask's tiles: full, partial, empty."),
    "explain": ("anyattn.cli.explain", "Say what anyattn makes of a mod, and how it would be run."),
    "plan": ("anyattn.cli.plan", "Place a sequence's rows on ranks, and say what travels between them."),
    "bench": ("anyattn.cli.bench", "Time your mod at your shape, beside what is installed."),
    "doctor": ("anyattn.cli.doctor", "Check versions, backends and a few results."),
    "cache": ("anyattn.cli.cache", "List or remove the compiled kernels on disk."),
    "warmup": ("anyattn.cli.warmup", "Compile the common kernels into the disk cache."),
}


class _LazyGroup(click.Group):
    """Loads a command's module when it is called: ``--help`` needs neither torch nor matplotlib."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        import importlib

        return importlib.import_module(_COMMANDS[name][0]).command if name in _COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="anyattn")
def cli() -> None:
    """Any attention that you can write as a few lines of Python."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0, 2 for bad arguments, 130 after Ctrl-C, or the command's own status."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        result: Any = cli.main(arguments, prog_name="anyattn", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (click.Abort, KeyboardInterrupt):
        click.echo("anyattn: interrupted", err=True)
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return BAD_ARGUMENTS
    except click.ClickException as error:
        click.echo(f"anyattn: {_one_line(error.format_message())}", err=True)
        return BAD_ARGUMENTS if isinstance(error, click.UsageError) else error.exit_code


def _one_line(text: str) -> str:
    return " ".join(text.split())
