"""A tiny tokenizer for the tiny targets: printable ASCII, some pairs of letters, a few specials.

Pairs matter: a stop string or a grammar may then end inside a token.
"""

from __future__ import annotations

from pathlib import Path

SPECIALS = ("<bos>", "<eos>", "<think>", "</think>")
EOS = SPECIALS.index("<eos>")
THINK_END = SPECIALS.index("</think>")
PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", '":', '{"', '"}', "ab", "12",
         "zq", "qz", "}}", "--", "xy", "Qu", "tr", "ue", "ls")  # fmt: skip
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def byte_symbols() -> list[str]:
    """How the byte-level alphabet writes newline, space and the printable characters."""
    written = {"\n": "\u010a", " ": "\u0120"}
    return [written.get(char, char) for char in ["\n", *map(chr, range(0x20, 0x7F))]]


def vocabulary() -> dict[str, int]:
    """Token to id: specials, characters, pairs."""
    return {token: i for i, token in enumerate([*SPECIALS, *byte_symbols(), *PAIRS])}


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer beside a target's weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = models.BPE(vocab=vocabulary(), merges=[(pair[0], pair[1]) for pair in PAIRS])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
