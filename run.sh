#!/usr/bin/env bash
# ./run.sh [preset] [key=value ...]    train; without a preset: record where there are GPUs and FineWeb, else tiny
# ./run.sh test [pytest arguments]     run the tests
# On a fresh machine this sets itself up in .venv; it needs Python 3.11 or newer and nothing else.
set -euo pipefail
cd "$(dirname "$0")"

say() { echo "run.sh: $*" >&2; }

imports() { "$1" -c "import $2" >/dev/null 2>&1; }

find_python() { # leaves in $python an interpreter that has what training needs
  if imports .venv/bin/python "numpy, torch"; then python=.venv/bin/python; return; fi
  if imports python3 "numpy, torch"; then python=python3; return; fi
  if ! python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    say "needs python3, version 3.11 or newer, with its venv module (Debian: apt-get install python3-venv)"
    exit 1
  fi
  say "torch cannot be imported: installing requirements.txt into .venv, once"
  python3 -m venv .venv
  .venv/bin/python -m pip install -r requirements.txt
  python=.venv/bin/python
}

if [ "${1:-}" = test ]; then
  shift
  find_python
  if ! imports "$python" "huggingface_hub, hypothesis, matplotlib, pyarrow, pytest, scipy, tiktoken, tqdm, triton, xdist"; then
    [ "$python" = .venv/bin/python ] || python3 -m venv --system-site-packages .venv
    say "installing tests/requirements.txt into .venv, once"
    .venv/bin/python -m pip install -r requirements.txt -r tests/requirements.txt
    python=.venv/bin/python
  fi
  exec "$python" -m pytest "$@"   # pytest.ini names the folder
fi

find_python
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
ranks=1
for n in 2 4 8; do [ "$gpus" -ge "$n" ] && ranks=$n; done

preset=record
case "${1:-=}" in
  load=* | sample=*) ;;
  *=*)
    real="For the real thing: 1, 2, 4 or 8 GPUs, then python data/cached_fineweb10B.py 9 and ./run.sh"
    if [ "$gpus" = 0 ]; then
      say "no GPU here, so this trains tiny on the shipped sample. $real"
      preset=tiny
    elif ! compgen -G "data/fineweb10B/fineweb_val_*.bin" >/dev/null \
      || ! compgen -G "data/fineweb10B/fineweb_train_*.bin" >/dev/null; then
      say "no FineWeb shards in data/fineweb10B, so this trains tiny on the shipped sample. $real"
      preset=tiny
    fi
    set -- "$preset" "$@" ;;
  *) preset=$1 ;;
esac

case "$preset" in
  tiny | solo) ranks=1 ;;
  *) [ "$gpus" -le "$ranks" ] || say "$gpus GPUs are no legal world size (1, 2, 4, 8): using $ranks" ;;
esac
case " $* " in *" load="*) ranks=1 ;; esac   # sampling is one process
if [ "$ranks" = 1 ]; then
  exec "$python" train_gpt.py "$@"
fi
exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$ranks" train_gpt.py "$@"
