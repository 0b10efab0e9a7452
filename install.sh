#!/bin/sh
# Installs Anabranch into an environment of its own and puts `anabranch` on the path.
#
#   sh install.sh                # from a clone of the repository
#   ANABRANCH_SOURCE=anabranch-0.1.0-py3-none-any.whl sh install.sh
#
# Nothing outside your home is changed. To remove it: rm -r ~/.local/share/anabranch, and
# ~/.local/bin/anabranch. Settings, each an environment variable:
#   ANABRANCH_SOURCE       what pip installs: a directory, a wheel or an address (this clone)
#   ANABRANCH_PREFIX       where the environment is made (~/.local/share/anabranch)
#   ANABRANCH_BIN          where the command is put (~/.local/bin)
#   ANABRANCH_TORCH_INDEX  index of torch's builds (that for CPUs where there is no GPU; empty: pip's own)
#   ANABRANCH_PYTHON       the Python to use, 3.11 or newer (the first that is found)
set -eu

say() { printf '%s\n' "$*"; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# There is no release yet: a clone or a wheel must be named, and no package of that name is guessed.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" 2>/dev/null && pwd) || here=''
source=${ANABRANCH_SOURCE:-}
if [ -z "$source" ] && [ -f "$here/anabranch/commands.py" ]; then
    source=$here
fi
[ -n "$source" ] || fail "nothing to install: run this in a clone, or name a wheel with ANABRANCH_SOURCE=FILE"
case $source in
[!/]*) if [ -e "$source" ]; then source=$PWD/$source; fi ;;
esac

[ -n "${HOME:-}" ] || fail "HOME is not set"
prefix=${ANABRANCH_PREFIX:-$HOME/.local/share/anabranch}
bin=${ANABRANCH_BIN:-$HOME/.local/bin}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
python=''
for each in "${ANABRANCH_PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
    if [ -n "$each" ] && is_new_enough "$each"; then
        python=$each
        break
    fi
done
[ -n "$python" ] || fail "Python 3.11 or newer is needed: install it, or name it with ANABRANCH_PYTHON=/path/to/python3.11"

say "Anabranch from $source"
say "into $prefix, with $("$python" --version)"
mkdir -p "$prefix" "$bin"
"$python" -m venv "$prefix/venv" ||
    fail "no environment could be made; on Debian and Ubuntu: sudo apt install python3-venv"
pip() { "$prefix/venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Without an NVIDIA GPU pip would bring gigabytes of packages for one.
torch_index=${ANABRANCH_TORCH_INDEX-https://download.pytorch.org/whl/cpu}
if [ -z "${ANABRANCH_TORCH_INDEX+set}" ] && { [ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || [ "$(uname -s)" != Linux ]; }; then
    torch_index=''
fi
if [ -n "$torch_index" ]; then
    say "torch, its build for CPUs …"
    pip install --quiet --index-url "$torch_index" 'torch>=2.6,<2.14' || fail "torch could not be installed"
fi
say "the rest, which takes some minutes the first time …"
pip install --quiet --upgrade "$source" || fail "it could not be installed; what pip says stands above"
printf '%s\n' "$source" >"$prefix/venv/anabranch-source"

ln -sf "$prefix/venv/bin/anabranch" "$bin/anabranch"
say "$("$bin/anabranch" --version) is installed as $bin/anabranch"
case :$PATH: in
*":$bin:"*) ;;
*)
    line="export PATH=\"$bin:\$PATH\"  # anabranch"
    for file in "$HOME/.profile" "$HOME/.bashrc" "$HOME/.zshrc"; do
        if [ -e "$file" ] || [ "$file" = "$HOME/.profile" ]; then
            grep -qsF "$line" "$file" || printf '%s\n' "$line" >>"$file"
        fi
    done
    say "$bin was put on the path of new shells; in this one: export PATH=\"$bin:\$PATH\""
    ;;
esac
say
say "Lend this machine:    anabranch join"
say "Look what it lacks:   anabranch doctor"
say "The newest version:   anabranch update"
