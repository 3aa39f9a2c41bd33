"""Blockwise Parallel Decoding (Stern et al. 2018) for vLLM."""


def register() -> None:
    """vLLM's `general_plugins` entry point; called in every process, any number of times.

    Where vLLM is not what the plugin was made for, only `bpd` is refused, with the reason.
    """
    from vllm_bpd import entry, formats, patches, patching

    try:
        patches.install_entry()
    except patching.PatchError as error:
        entry.refuse(str(error))
        patching.apply_unchecked(patches.ENTRY)
        return
    formats.register_with_vllm()
