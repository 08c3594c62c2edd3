"""The lab's model: a tiny Llama with made-up weights, the same bytes on every machine."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from fp8fleet.errors import CheckFailed
from fp8fleet.headers import HEADERS, Header, header_from, headers_text
from lab.site import MIRROR_URL, build_once

NAME = "tiny-llama"
REVISION = "1"
COMMITTED = Path(__file__).resolve().parent.parent / "models" / NAME
MANIFEST = "manifest.toml"

HIDDEN = 256
INTERMEDIATE = 1024
LAYERS = 3  # as many as shards: each shard holds one
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
VOCABULARY = 384
CONTEXT = 2048

CONSONANTS = "bcdfghjklmnpqrstvwxz"
VOWELS = "aeiou"
SPECIALS = ("<bos>", "<eos>", "<pad>")
BYTES = 256
SYLLABLES = range(BYTES, BYTES + len(CONSONANTS) * len(VOWELS))
FIRST_SPECIAL = SYLLABLES.stop

ONE = struct.pack("<H", 0x3F80)  # 1.0 in BF16, the upper half of an IEEE 754 single
MINUS_ONE = struct.pack("<H", 0xBF80)
TWO = struct.pack("<H", 0x4000)
ZERO = struct.pack("<H", 0)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Tensor:
    """A BF16 tensor: its name, its shape and its little-endian bytes, row by row."""

    name: str
    shape: tuple[int, ...]
    content: bytes


def build(cache: Path) -> Path:
    """Make the model and compare every file with the committed manifest.

    Args:
        cache: the folder that keeps the lab's builds.

    Returns:
        The folder with config.json, the tokenizer and three safetensors shards.

    Raises:
        CheckFailed: a file that was made differs from its line in models/tiny-llama.
    """
    files = model_files()
    committed = (COMMITTED / MANIFEST).read_text(encoding="utf-8")
    if manifest_text(files) != committed:
        raise CheckFailed(
            f"{COMMITTED / MANIFEST}: lab/tiny_model.py makes other files than the manifest says; "
            "if that is meant, raise REVISION and run `python -m lab.tiny_model`"
        )
    key = hashlib.sha256(committed.encode()).hexdigest()[:12]
    return build_once(cache / f"{NAME}-{key}", lambda folder: _write(folder, files))


def model_files() -> dict[str, bytes]:
    """Return the model's files: name to content."""
    files = {
        "config.json": _json(_config()),
        "generation_config.json": _json(_generation_config()),
        "tokenizer.json": _json(_tokenizer()),
        "tokenizer_config.json": _json(_tokenizer_config()),
    }
    shards = {
        f"model-{number:05}-of-{LAYERS:05}.safetensors": tensors
        for number, tensors in enumerate(_shards(), start=1)
    }
    files |= {name: safetensors_bytes(tensors) for name, tensors in shards.items()}
    files["model.safetensors.index.json"] = _json(_index(shards))
    return files


def manifest_text(files: dict[str, bytes]) -> str:
    """Return the manifest.toml of these files."""
    head = (
        "# Written by `python -m lab.tiny_model`, which makes the model that the lab serves.\n"
        f'name = "{NAME}"\nrevision = "{REVISION}"\nquantization = "none"\n'
        f'sources = ["{MIRROR_URL}/models/{NAME}/"]\n'
    )
    entries = (
        f'\n[[files]]\npath = "{path}"\nsize = {len(content)}\n'
        f'sha256 = "{hashlib.sha256(content).hexdigest()}"\n'
        for path, content in sorted(files.items())
    )
    return head + "".join(entries)


def stored_headers(files: dict[str, bytes]) -> str:
    """Return the headers.json of these files."""
    shards = {name: content for name, content in files.items() if name.endswith(".safetensors")}
    return headers_text({name: _header(name, content) for name, content in shards.items()})


def _header(name: str, content: bytes) -> Header:
    return header_from(lambda at, count: content[at : at + count], name, len(content))


def safetensors_bytes(tensors: list[Tensor]) -> bytes:
    """Return a safetensors file: header length (u64), JSON header padded to 8 bytes, the tensors.

    Format: the README of huggingface/safetensors, "Format".
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + len(tensor.content)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.content for tensor in tensors)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _shards() -> list[list[Tensor]]:
    """One layer to a shard; the embedding in the first, the head in the last."""
    shards = [_layer(number) for number in range(LAYERS)]
    shards[0].insert(0, _embedding())
    shards[-1] += [_ones("model.norm.weight"), _head()]
    return shards


def _layer(number: int) -> list[Tensor]:
    """A decoder layer that leaves channel 0 of the residual stream as the embedding set it."""
    prefix = f"model.layers.{number}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return [
        _ones(f"{prefix}.input_layernorm.weight"),
        _noise(f"{attention}.q_proj.weight", HEADS * HEAD_DIM, HIDDEN, exponent=-4),
        _noise(f"{attention}.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN, exponent=-4),
        _noise(f"{attention}.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN, exponent=-5),
        _without_row_0(_noise(f"{attention}.o_proj.weight", HIDDEN, HEADS * HEAD_DIM, exponent=-5)),
        _ones(f"{prefix}.post_attention_layernorm.weight"),
        _noise(f"{mlp}.gate_proj.weight", INTERMEDIATE, HIDDEN, exponent=-5),
        _noise(f"{mlp}.up_proj.weight", INTERMEDIATE, HIDDEN, exponent=-5),
        _without_row_0(_noise(f"{mlp}.down_proj.weight", HIDDEN, INTERMEDIATE, exponent=-6)),
    ]


def _embedding() -> Tensor:
    """Noise, and 2 in channel 0 of every token: a constant that reaches the head."""
    noise = _noise("model.embed_tokens.weight", VOCABULARY, HIDDEN, exponent=-3)
    return _with_column_0(noise, [TWO] * VOCABULARY)


def _head() -> Tensor:
    """Noise; the constant channel lifts the syllables far above all other tokens.

    So every answer is ASCII letters, and neither <eos> nor <pad> ever ends or empties it.
    """
    noise = _noise("lm_head.weight", VOCABULARY, HIDDEN, exponent=-4)
    return _with_column_0(
        noise, [ONE if token in SYLLABLES else MINUS_ONE for token in range(VOCABULARY)]
    )


def _ones(name: str) -> Tensor:
    return Tensor(name, (HIDDEN,), ONE * HIDDEN)


def _noise(name: str, rows: int, columns: int, exponent: int) -> Tensor:
    """Values with random sign and mantissa and a magnitude of 2**exponent to 2**(exponent + 1).

    BF16 is a sign bit, 8 exponent bits (bias 127) and 7 mantissa bits. The seed is the name.
    """
    count = rows * columns
    # Seeding by text and getrandbits give the same bits in every CPython.
    bits = random.Random(name).getrandbits(16 * count).to_bytes(2 * count, "little")
    biased = exponent + 127
    content = bytearray(bits)
    content[0::2] = bits[0::2].translate(bytes((biased & 1) << 7 | b & 0x7F for b in range(256)))
    content[1::2] = bits[1::2].translate(bytes(b & 0x80 | biased >> 1 for b in range(256)))
    return Tensor(name, (rows, columns), bytes(content))


def _without_row_0(tensor: Tensor) -> Tensor:
    row = 2 * tensor.shape[1]
    return Tensor(tensor.name, tensor.shape, ZERO * tensor.shape[1] + tensor.content[row:])


def _with_column_0(tensor: Tensor, values: list[bytes]) -> Tensor:
    row = 2 * tensor.shape[1]
    content = bytearray(tensor.content)
    for number, value in enumerate(values):
        content[number * row : number * row + 2] = value
    return Tensor(tensor.name, tensor.shape, bytes(content))


def _index(shards: dict[str, list[Tensor]]) -> dict[str, object]:
    placed = {tensor.name: shard for shard, tensors in shards.items() for tensor in tensors}
    total = sum(len(tensor.content) for tensors in shards.values() for tensor in tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": FIRST_SPECIAL,
        "dtype": "bfloat16",
        "eos_token_id": FIRST_SPECIAL + 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": FIRST_SPECIAL + 2,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }


def _generation_config() -> dict[str, object]:
    return {
        "bos_token_id": FIRST_SPECIAL,
        "do_sample": True,
        "eos_token_id": FIRST_SPECIAL + 1,
        "pad_token_id": FIRST_SPECIAL + 2,
        "temperature": 0.7,
    }


def _tokenizer() -> dict[str, object]:
    """Byte-level BPE: a token a byte, merges for syllables. Format: huggingface/tokenizers."""
    syllables = [(consonant, vowel) for consonant in CONSONANTS for vowel in VOWELS]
    tokens = [*_byte_alphabet(), *("".join(pair) for pair in syllables)]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": FIRST_SPECIAL + number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, token in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate([*tokens, *SPECIALS])},
            "merges": [list(pair) for pair in syllables],
        },
    }


def _byte_alphabet() -> list[str]:
    """The visible character that byte-level BPE writes for each byte, as GPT-2 defined it."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(BYTES) if byte not in visible]
    return [chr(b) if b in visible else chr(BYTES + hidden.index(b)) for b in range(BYTES)]


def _tokenizer_config() -> dict[str, object]:
    bos, eos, pad = SPECIALS
    return {
        "bos_token": bos,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_max_length": CONTEXT,
        "pad_token": pad,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def main() -> int:
    """Write models/tiny-llama anew: the manifest and the files that describe the model."""
    files = model_files()
    for name in ("config.json", "generation_config.json"):
        (COMMITTED / name).write_bytes(files[name])
    (COMMITTED / HEADERS).write_text(stored_headers(files), encoding="utf-8")
    (COMMITTED / MANIFEST).write_text(manifest_text(files), encoding="utf-8")
    print(f"{COMMITTED}: {len(files)} files, {sum(map(len, files.values()))} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
