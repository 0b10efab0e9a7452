"""``anabranch COMMAND``: every command of this software by one name; also ``python -m anabranch``.

Each is a function of a module that can be run by itself, too. It is imported when it is asked for
and not before, so that those who only ask wait for nothing that a peer needs.
"""

import contextlib
import difflib
import io
import pkgutil
import re
import sys
import warnings
from dataclasses import dataclass
from typing import TextIO

from anabranch.own_parts import ShadowedWarning
from anabranch.standard_streams import prepare_streams

COMMAND = "anabranch"


@dataclass(frozen=True, slots=True)
class Command:
    """One command: where the function is that runs it, and a line for ``--help``."""

    function: str
    about: str


COMMANDS = {
    "join": Command("node.join:run", "lend this machine: found a network, or join one"),
    "ask": Command("client.generate:run", "get one answer"),
    "chat": Command("client.chat:run", "talk in the terminal"),
    "serve": Command("client.gateway.__main__:run", "serve OpenAI's HTTP interface"),
    "page": Command("client.health.__main__:run", "serve the public page on a network's health"),
    "status": Command("client.status:run", "show who serves what, and whether it is healthy"),
    "models": Command("client.models:run", "list the models that a network serves"),
    "networks": Command("client.networks:run", "list public networks, or announce yours"),
    "alive": Command("node.alive:run", "say whether this machine's peer is well"),
    "doctor": Command("node.doctor:run", "say what this machine lacks, and what to do"),
    "invite": Command("client.invite:run", "print an invitation to the remembered network"),
    "forget": Command("client.forget:run", "forget that network"),
    "plan": Command("node.plan:run", "say which peer, or GPU on paper, would get which layers"),
    "simulate": Command("coordinator.simulate:main", "say what a network on paper would serve"),
    "update": Command("anabranch.update:run", "install the newest version, as install.sh did"),
    "completion": Command(
        "anabranch.commands:completion", "print what bash or zsh needs to complete this"
    ),
}


def main() -> int:
    """Run the command that the arguments name; returns the exit code."""
    warnings.showwarning = _in_one_line
    prepare_streams()
    try:
        code = _main()
        sys.stdout.flush()
    except OSError as error:
        return _of_streams(error)
    except KeyboardInterrupt:  # while a command is imported
        return 130
    return code


def _of_streams(error: OSError) -> int:
    """The exit code where this module's own words could not be written, told as commands do."""
    from dht.command_line import exit_code_of

    def again() -> int:
        raise error

    return exit_code_of(again)


def _main() -> int:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        return _run(name, rest)
    if name in {"-h", "--help"}:
        sys.stdout.write(help_text())
        return 0
    if name == "--version":
        from node import VERSION

        print(f"{COMMAND} {VERSION}")
        return 0
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    sys.stderr.write(f"error: {name[:80]!r} is no command{meant} ({COMMAND} --help lists them)\n")
    return 2


_show_others = warnings.showwarning


def _in_one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show in a line that another module has the name of one of ours; other warnings as ever."""
    if issubclass(category, ShadowedWarning):
        sys.stderr.write(f"note: {message}\n")
    else:
        _show_others(message, category, filename, lineno, file, line)


def _run(name: str, rest: list[str]) -> int:
    sys.argv = [f"{COMMAND} {name}", *rest]
    try:
        code: int = pkgutil.resolve_name(COMMANDS[name].function)()
    except ModuleNotFoundError as error:
        from dht.command_line import say_missing

        return say_missing(error)
    return code


def help_text() -> str:
    """What ``--help`` prints."""
    lines = "".join(f"  {name:<12}{command.about}\n" for name, command in COMMANDS.items())
    return (
        f"usage: {COMMAND} COMMAND [options]\n\n"
        "Many people's GPUs serve one large language model together.\n\n"
        f"{lines}\n"
        f"{COMMAND} COMMAND --help says more of each; {COMMAND} --version\n"
        f"example: {COMMAND} ask anabranch:… --prompt 'One morning'\n"
    )


SCRIPT = """\
_{command}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" known=""
  case "${{COMP_WORDS[1]}}" in
{cases}  esac
  [ "$COMP_CWORD" -eq 1 ] && known="{names}"
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ] || [ "${{word#-}}" != "$word" ]; then
    while IFS= read -r each; do COMPREPLY+=("$each"); done < <(compgen -W "$known" -- "$word")
  fi
}}
complete -o default -F _{command} {command}
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def completion() -> int:
    """``anabranch completion SHELL``: print the script that completes commands and options."""
    from dht.command_line import EXIT_DONE, EXIT_USER

    shell, *more = sys.argv[1:] or ["--help"]
    if shell in {"-h", "--help"}:
        print(
            f"usage: {COMMAND} completion bash|zsh\n\n"
            f'example: eval "$({COMMAND} completion bash)", in ~/.bashrc or ~/.zshrc'
        )
        return EXIT_DONE
    if shell not in {"bash", "zsh"} or more:
        wrong = " ".join(more) if shell in {"bash", "zsh"} else shell
        sys.stderr.write(f"error: {wrong[:80]!r} is not known: give bash or zsh\n")
        return EXIT_USER
    cases = "".join(
        f'    {name}) known="{" ".join(_flags(name))}" ;;\n'
        for name in COMMANDS
        if name != "completion"
    )
    names = " ".join(COMMANDS)
    script = SCRIPT.format(command=COMMAND, cases=cases, names=names)
    sys.stdout.write((ZSH if shell == "zsh" else "") + script)
    return EXIT_DONE


def _flags(name: str) -> list[str]:
    """The options of a command, as it shows them itself."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        _run(name, ["--help-all"])
    return re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", shown.getvalue(), re.MULTILINE)
