"""The model shapes of ``gpu_matrix.py``: small, but with the layers of a model that people use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.shapes import Shape

_VOCABULARY = 2048
_POSITIONS = 4096
# Sizes are multiples of 128, so that blocks of 128 x 128 fit, also on each of two GPUs.
_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": _POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": _VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
_FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
_QWEN3_MOE = {**_EXPERTS, "num_experts": 16, "decoder_sparse_step": 1, "mlp_only_layers": []}
_LATENT_ATTENTION = {
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK = {
    **_LATENT_ATTENTION,
    **_EXPERTS,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_GEMMA3 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 128,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}
_GPT_OSS = {
    "num_attention_heads": 16,
    "head_dim": 64,
    "intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_QWEN3_NEXT = {
    **_QWEN3_MOE,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "shared_expert_intermediate_size": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
_FALCON_H1 = {
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 128,
    "mamba_expand": 1,
    "mamba_rms_norm": False,
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
}


_PICTURE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN2_VL = {
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_start_token_id": _VOCABULARY - 4,
    "vision_end_token_id": _VOCABULARY - 3,
    "image_token_id": _VOCABULARY - 2,
    "video_token_id": _VOCABULARY - 1,
    "vision_config": {
        "depth": 2,
        "embed_dim": 320,
        "hidden_size": 1024,
        "num_heads": 4,
        "mlp_ratio": 4,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
_PICTURE_SIZES = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 3136,
    "max_pixels": 200704,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_PICTURE_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
# Whisper's decoder asks for the language, the task and the form of the answer.
_SPEECH_TOKENS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>"),
    *("<|transcribe|>", "<|notimestamps|>"),
)
_SPEECH_POSITIONS = 448
_WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "activation_function": "gelu",
    "d_model": 256,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 1024,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
    "max_target_positions": _SPEECH_POSITIONS,
    "vocab_size": _VOCABULARY,
    "is_encoder_decoder": True,
    "decoder_start_token_id": _VOCABULARY - 4,
    "bos_token_id": _VOCABULARY - 5,
    "eos_token_id": _VOCABULARY - 5,
    "pad_token_id": _VOCABULARY - 5,
    "torch_dtype": "float16",
}
_SOUND_SIZES = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "padding_value": 0.0,
}


def _shape(architecture: str, model_type: str, more: dict[str, Any] | None = None) -> Shape:
    """Return a shape with the common configuration; ``more`` adds to it and replaces values."""
    config = {
        **_COMMON,
        "architectures": [architecture],
        "model_type": model_type,
        **(more or {}),
    }
    return Shape(_VOCABULARY, _POSITIONS, config)


def _quantized(quantization: dict[str, Any]) -> dict[str, Any]:
    return {"quantization_config": quantization}


MATRIX_SHAPES = {
    "llama": _shape("LlamaForCausalLM", "llama"),
    "llama-gptq": _shape("LlamaForCausalLM", "llama", _quantized(_GPTQ)),
    "llama-awq": _shape(
        "LlamaForCausalLM", "llama", {**_quantized(_AWQ), "torch_dtype": "float16"}
    ),
    "qwen3": _shape("Qwen3ForCausalLM", "qwen3"),
    "qwen3-fp8": _shape("Qwen3ForCausalLM", "qwen3", _quantized(_FP8_BLOCKS)),
    "qwen3-reranker": _shape(
        "Qwen3ForSequenceClassification",
        "qwen3",
        {"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}},
    ),
    "qwen3-moe": _shape("Qwen3MoeForCausalLM", "qwen3_moe", _QWEN3_MOE),
    "qwen3-moe-fp8": _shape(
        "Qwen3MoeForCausalLM", "qwen3_moe", {**_QWEN3_MOE, **_quantized(_FP8_BLOCKS)}
    ),
    "qwen3-next": _shape("Qwen3NextForCausalLM", "qwen3_next", _QWEN3_NEXT),
    "gemma3": _shape("Gemma3ForCausalLM", "gemma3_text", _GEMMA3),
    "deepseek-v3": _shape("DeepseekV3ForCausalLM", "deepseek_v3", _DEEPSEEK),
    "deepseek-v3-fp8": _shape(
        "DeepseekV3ForCausalLM", "deepseek_v3", {**_DEEPSEEK, **_quantized(_FP8_BLOCKS)}
    ),
    "gpt-oss": _shape("GptOssForCausalLM", "gpt_oss", _GPT_OSS),
    "falcon-h1": _shape("FalconH1ForCausalLM", "falcon_h1", _FALCON_H1),
    "qwen2-vl": replace(
        _shape("Qwen2VLForConditionalGeneration", "qwen2_vl", _QWEN2_VL),
        specials=_PICTURE_TOKENS,
        template=_PICTURE_TEMPLATE,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessor",
                "processor_class": "Qwen2VLProcessor",
                **_PICTURE_SIZES,
            },
            "video_preprocessor_config.json": {
                "video_processor_type": "Qwen2VLVideoProcessor",
                **_PICTURE_SIZES,
            },
        },
        has_weights=True,
    ),
    "whisper": Shape(
        _VOCABULARY,
        _SPEECH_POSITIONS,
        _WHISPER,
        specials=_SPEECH_TOKENS,
        files={"preprocessor_config.json": _SOUND_SIZES},
        has_weights=True,
    ),
}
