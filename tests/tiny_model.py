"""A GGUF file of a few kilobytes: a llama of one layer with random weights and a byte-level vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from paceline.model_card import CONTROL, NORMAL, USER_DEFINED, byte_alphabet

WIDTH = 32
MERGES = ["h e", "l l", "Ġ h", "he ll", "hell o", "Ġh e", "Ġhe ll", "Ġhell o"]
CONTROLS = ["<|im_start|>", "<|im_end|>", "<|s|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary(more: Sequence[str] = ()) -> tuple[list[str], list[int]]:
    """Tokens and attributes: three control tokens, a user-defined <tool>, all bytes, the merges, and `more`."""
    letters = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*CONTROLS, "<tool>", *letters, *merged, *more]
    return tokens, [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (len(tokens) - 4)


def write_gguf(
    path: Path,
    *,
    more: Sequence[str] = (),
    pre: str = "gpt-2",
    kind: str = "gpt2",
    seed: int = 0,
    add_bos: bool = False,
) -> Path:
    tokens, attributes = vocabulary(more)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(attributes)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    for name, shape in _shapes(len(tokens)).items():
        writer.add_tensor(name, np.random.default_rng(seed).normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    square = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    return {
        "token_embd.weight": (vocabulary_size, WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        **{f"blk.0.{name}.weight": (WIDTH, WIDTH) for name in square},
    }
