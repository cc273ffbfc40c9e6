#!/bin/sh
# Make .venv with everything that the demo and the tests need. Does nothing when it is up to date.
#
# Uses the first Python >= 3.11 that really runs (a pyenv shim may not), else uv, which can
# fetch one. PYTHON=/path/to/python overrides the search.
set -eu

cd -- "$(dirname -- "$0")/.."
stamp=.venv/.expertd-setup

say() { printf 'setup: %s\n' "$*" >&2; }

recent_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    for candidate in "${PYTHON:-}" python3.14 python3.13 python3.12 python3.11 python3 python; do
        if [ -n "$candidate" ] && recent_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
}

# A venv and its editable install hold absolute paths, so a moved clone needs a new one.
want="$(pwd -P)
$(cksum pyproject.toml constraints.txt tools/setup.sh)"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && recent_enough .venv/bin/python; then
    exit 0
fi

if [ -n "${PYTHON:-}" ] && ! recent_enough "$PYTHON"; then
    say "PYTHON=$PYTHON is not a Python >= 3.11 that runs"
    exit 1
fi
python=$(find_python)
if command -v uv >/dev/null 2>&1; then have_uv=yes; else have_uv=no; fi

if [ -z "$python" ] && [ "$have_uv" = no ]; then
    say "needs Python >= 3.11 (brew install python@3.13, or apt install python3 python3-venv) or uv"
    exit 1
fi

use_uv=no
if [ -z "$python" ]; then
    use_uv=yes
elif ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    if [ "$have_uv" = no ]; then
        say "$python has no venv module: apt install python3-venv"
        exit 1
    fi
    use_uv=yes
fi

rm -rf .venv
if [ "$use_uv" = yes ]; then
    say "making .venv with uv (about a minute)"
    uv venv --quiet --python "${python:->=3.11}" .venv
    uv pip install --quiet --python .venv/bin/python -c constraints.txt -e '.[dev]'
else
    say "making .venv with $python (about a minute)"
    "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        -c constraints.txt -e '.[dev]'
fi
printf '%s\n' "$want" >"$stamp"
