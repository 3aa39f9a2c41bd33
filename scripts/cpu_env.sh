#!/bin/sh
# Runs a command with what vLLM wants on a CPU: scripts/cpu_env.sh COMMAND [ARGUMENT...]
#
# Intel OpenMP (from .venv) and tcmalloc (if the system has it) are preloaded: without them vLLM
# warns and is slower. What the caller has set already is kept.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
preload=${LD_PRELOAD:-}

add_library() {
    # LD_PRELOAD is split at spaces and colons, so a path with either cannot be named in it.
    case "$1" in *[\ :]*) return ;; esac
    # A library that is preloaded already is not named twice.
    case "$preload" in *"$(basename "$1")"*) return ;; esac
    preload=${preload:+$preload:}$1
}

for library in \
    /usr/lib/*/libtcmalloc_minimal.so.4 /usr/lib64/libtcmalloc_minimal.so.4 \
    /usr/lib/libtcmalloc_minimal.so.4 /usr/local/lib/libtcmalloc_minimal.so.4 \
    "$root/.venv/lib/libiomp5.so"; do
    if [ -e "$library" ]; then add_library "$library"; fi
done
if [ -n "$preload" ]; then export LD_PRELOAD="$preload"; fi

# GiB. Enough for the demo's small target; the engine's own guess is half of the machine's memory.
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}"
# A demo or a test is no usage to report.
export VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"

exec "$@"
