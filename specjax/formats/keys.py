"""Keys of a draft's config.json that change nothing of what it computes, at any value or at one value alone. They let a
whole published file be read; a key in no table is refused by name."""

from __future__ import annotations

from typing import Any

from specjax.models import hf

_NAMES = (
    *("_name_or_path", "name_or_path", "architectures", "auto_map", "model_type", "version", "transformers_version"),
    *("speculators_version", "dtype", "torch_dtype", "id2label", "label2id", "problem_type", "tokenizer_class"),
    *("finetuning_task", "task_specific_params", "has_no_defaults_at_init", "target_model_type", "modal_type"),
    *("target_model_name_or_path", "eagle_decoder_type", "unsloth_version", hf.DRAFTER),
)
_TOKENS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "eod_token_id", "pad_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id"),
    *("text_end_id", "mask_init_id", "image_token_id", "image_start_token_id", "image_end_token_id", "video_token_id"),
    *("image_newline_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id", "audio_token_id"),
    "org_vocab_size",
)
_OUTPUT = (
    *("use_cache", "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states"),
    *("output_scores", "output_router_logits", "torchscript", "chunk_size_feed_forward", "is_decoder"),
    *("use_bfloat16", "tf_legacy_loss", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
)
_GENERATION = (
    *("do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups", "early_stopping"),
    *("diversity_penalty", "length_penalty", "repetition_penalty", "no_repeat_ngram_size", "num_return_sequences"),
    *("encoder_no_repeat_ngram_size", "max_length", "min_length", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values", "prefix"),
)
_TRAINING = (
    *("initializer_range", "attention_dropout", "hidden_dropout", "embed_requires_grad", "router_aux_loss_coef"),
    *("aux_loss_alpha", "seq_aux", "num_anchors", "max_anchors", "ttt_length", "ttt_steps", "step_loss_decay"),
    *("loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "attention_backend"),
    *("num_depths", "down_sample_ratio", "down_sample_ratio_min", "max_sequence_length"),
)
# The reader of the layers has its own rules for these.
_OF_LAYERS = ("tie_word_embeddings", "use_sliding_window", "max_window_layers")
INERT = {*_NAMES, *_TOKENS, *_OUTPUT, *_GENERATION, *_TRAINING, *_OF_LAYERS}
"""Keys that change nothing at any value."""
AT: dict[str, Any] = {
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "bias", "qkv_bias"), False),
    **dict.fromkeys(("use_cla", "use_mrope", "add_classification_head", "use_moe"), False),
    **dict.fromkeys(("use_aux_hidden_state", "use_rotary_pos_emb", "is_causal"), True),
    "norm_type": "rms",
    "position_embedding_type": "rope",
    "pruned_heads": {},
}
"""Keys that change nothing at this value; at another they would."""
EXPERTS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size"),
)
"""Keys of a target with experts, copied into the config.json of a draft whose class has none. They may have any value,
since the tensor of an expert would be refused as one too many."""
HUNYUAN = ("use_qk_norm", "attention_head_dim", "dense_list", "cla_share_factor", "class_num", "pool_type")
"""Keys of Hunyuan's config.json about its own layers, copied in the same way; they may have any value."""
READS = "specjax_reads"
"""Key with the target's streams, for a draft whose own numbers of them have two meanings."""
FROM_ANCHOR = "sample_from_anchor"
STATE, RECYCLED = "specjax_state", "specjax_recycled"
"""Keys with the norms of an MTP head, which only we write."""
MAY_BE_UNSAID: dict[str, dict[str, str]] = {
    "eagle3": {"reads": READS},
    "p_eagle": {"reads": READS},
    "dspark": {"sample_from_anchor": FROM_ANCHOR},
    "mtp": {"state": STATE, "recycled": RECYCLED},
}
"""Kind -> the fields of its section that config.json may leave out, with their keys there."""
ASKED = {READS: "reads"}
"""Keys that stand for a field of a draft's section, and that no file needs -> that field."""
REPLACED = (STATE, RECYCLED)
"""Keys that may be asked for in another way than the file says."""
