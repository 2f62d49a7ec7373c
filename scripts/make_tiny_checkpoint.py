"""Writes a small random checkpoint: the same bytes for the same seed.

    python scripts/make_tiny_checkpoint.py OUT --model qwen-image     a whole pipeline that SGLang's engine runs
    python scripts/make_tiny_checkpoint.py OUT --model flux2          the transformer alone
    python scripts/make_tiny_checkpoint.py OUT --model qwen3          an LLM in block FP8, tokenizer included

The transformers are the real architectures with two blocks of each kind and two heads of 128, so that every
linear of attention and MLP stays a multiple of 128 in both directions when split over two ranks. Qwen3 has two
heads of k and v for the same reason.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Flux2Transformer2DModel,
    QwenImageTransformer2DModel,
)
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HEADS, HEAD_DIM = 2, 128
TEXT_WIDTH = 128
LATENT_CHANNELS = 16
SHARD_SIZE = "6MB"  # small enough for several shards and an index, as real checkpoints have

# The Qwen tokens that SGLang's prompt template and the text encoder's config refer to.
SPECIAL_TOKENS = [
    "<|endoftext|>",
    *(f"<|{token}|>" for token in ("im_start", "im_end", "vision_start", "vision_end", "vision_pad")),
    *(f"<|{token}|>" for token in ("image_pad", "video_pad")),
]
# Something to learn a few merges from; the byte alphabet alone already covers every prompt.
MERGE_TEXT = [
    "a cat and a dog in the rain",
    "the colour, shape and size of the objects in the image",
    "system user assistant",
]


def write_tokenizer(folder: Path) -> dict[str, int]:
    """A byte-level BPE tokenizer in the file formats of Qwen2Tokenizer; returns the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, min_frequency=1, show_progress=False)
    tokenizer.train_from_iterator(MERGE_TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="right",
        model_max_length=2048,
    ).save_pretrained(folder)
    bpe = json.loads(tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(bpe["vocab"], ensure_ascii=False))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", config | {"tokenizer_class": "Qwen2Tokenizer"})
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


def text_encoder(vocabulary: dict[str, int]) -> Any:
    token_ids = {
        "bos_token_id": vocabulary["<|endoftext|>"],
        "eos_token_id": vocabulary["<|im_end|>"],
        "pad_token_id": vocabulary["<|endoftext|>"],
    }
    vision_ids = {f"{name}_token_id": vocabulary[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
    vision_ids |= {f"{name}_token_id": vocabulary[f"<|{name}_pad|>"] for name in ("image", "video")}
    text_config = {
        "vocab_size": len(vocabulary),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        # time, height and width sections add up to half of the head's 32 channels
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        **token_ids,
    }
    vision_config = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config, vision_config=vision_config, tie_word_embeddings=False, **token_ids, **vision_ids
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen_image_transformer() -> Any:
    return QwenImageTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        joint_attention_dim=TEXT_WIDTH,
    )


def flux2_transformer() -> Any:
    return Flux2Transformer2DModel(
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        joint_attention_dim=TEXT_WIDTH,
    )


def write_transformer(model: Any, folder: Path) -> None:
    """Draws the matrices from a normal distribution with the variance of the default, uniform one.

    Uniform numbers have the same maximum in every 128 x 128 block, hence equal FP8 scales, and nobody would
    notice a scale at the wrong place.
    """
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=(3 * parameter.shape[1]) ** -0.5)
    write_model(model, folder)


def write_model(model: Any, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=SHARD_SIZE)


def write_qwen_image(out: Path) -> None:
    vocabulary = write_tokenizer(out / "tokenizer")
    write_model(text_encoder(vocabulary), out / "text_encoder")
    write_transformer(qwen_image_transformer(), out / "transformer")
    vae = AutoencoderKLQwenImage(base_dim=16, z_dim=LATENT_CHANNELS, num_res_blocks=1)
    write_model(vae, out / "vae")
    FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    ).save_pretrained(out / "scheduler")
    components = {
        "_class_name": "QwenImagePipeline",
        "_diffusers_version": "0.36.0",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }
    write_json(
        out / "model_index.json", {"_class_name": "QwenImagePipeline", "_diffusers_version": "0.36.0"} | components
    )


def write_flux2(out: Path) -> None:
    write_transformer(flux2_transformer(), out)


def write_qwen3(out: Path) -> None:
    """In one file, in the layout of Qwen's own FP8 checkpoints: embedding, head and norms stay in bf16."""
    from sglang_fastpath.loaders.quantize import quantize_block_fp8

    vocabulary = write_tokenizer(out)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        bos_token_id=vocabulary["<|endoftext|>"],
        eos_token_id=vocabulary["<|im_end|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
    )
    tensors = {}
    for name, parameter in Qwen3ForCausalLM(config).named_parameters():
        if parameter.ndim == 1:
            tensors[name] = (1 + 0.1 * torch.randn(parameter.shape)).to(torch.bfloat16)
        elif "_proj." in name:
            weight = torch.randn(parameter.shape) * parameter.shape[1] ** -0.5
            tensors[name], scale = quantize_block_fp8(weight.to(torch.bfloat16))
            tensors[f"{name}_scale_inv"] = scale
        else:
            tensors[name] = (torch.randn(parameter.shape) * parameter.shape[1] ** -0.5).to(torch.bfloat16)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    settings = config.to_dict() | {
        "architectures": ["Qwen3ForCausalLM"],
        "rope_theta": 1000000,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
    }
    write_json(out / "config.json", settings)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


WRITERS: dict[str, Callable[[Path], None]] = {
    "qwen-image": write_qwen_image,
    "flux2": write_flux2,
    "qwen3": write_qwen3,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to create")
    parser.add_argument("--model", choices=WRITERS, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists; remove it or choose another directory")
    if arguments.model == "qwen-image" and "qwen-image" not in arguments.out.name.lower():
        print(
            f"warning: '{arguments.out.name}' does not contain 'qwen-image', by which SGLang recognises the model; "
            "without --model-id Qwen-Image it will run the diffusers backend instead of its own",
            file=sys.stderr,
        )
    torch.manual_seed(arguments.seed)
    WRITERS[arguments.model](arguments.out)


if __name__ == "__main__":
    main()
