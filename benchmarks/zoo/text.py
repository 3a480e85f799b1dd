"""Models of text, of transformers and with the adapters of peft; and transformers' model of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.zoo.base import (
    CLASSES,
    SMALL,
    VIT_TOKENS,
    Build,
    Examples,
    Model,
    Size,
    class_losses,
    images,
    named,
    only,
    prompted_losses,
    sentences,
    texts,
    token_losses,
    translation_losses,
)
from dpkernels.bench.engines import Losses

Settings = Callable[[Size], dict[str, Any]]


def from_transformers(name: str, config: str, settings: Settings) -> Build:
    """Builds a class of transformers from its configuration."""

    def build(size: Size) -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**settings(size)))
        return model

    return build


def _like_bert(size: Size, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": size.layers,
        "hidden_size": size.width,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.width,
        "vocab_size": size.vocabulary,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": CLASSES,
        **more,
    }


def _like_llama(size: Size, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": size.layers,
        "hidden_size": size.width,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2,
        "intermediate_size": 43 * size.width // 16,
        "vocab_size": size.vocabulary,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _gpt2(size: Size) -> dict[str, Any]:
    return {
        "n_layer": size.layers,
        "n_head": size.heads,
        "n_embd": size.width,
        "vocab_size": size.vocabulary,
        "n_positions": size.positions,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _distilbert(size: Size) -> dict[str, Any]:
    return {
        "n_layers": size.layers,
        "n_heads": size.heads,
        "dim": size.width,
        "hidden_dim": 4 * size.width,
        "vocab_size": size.vocabulary,
        "num_labels": CLASSES,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    }


def _deberta(size: Size) -> dict[str, Any]:
    return _like_bert(
        size,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=size.positions // 2,
        position_buckets=size.positions // 4,
        pooler_dropout=0.0,
    )


def _opt(size: Size) -> dict[str, Any]:
    return {
        "num_hidden_layers": size.layers,
        "hidden_size": size.width,
        "word_embed_proj_dim": size.width,
        "num_attention_heads": size.heads,
        "ffn_dim": 4 * size.width,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": size.positions,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _gpt_neox(size: Size) -> dict[str, Any]:
    return {
        "num_hidden_layers": size.layers,
        "hidden_size": size.width,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.width,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": size.positions,
    }


def _t5(size: Size) -> dict[str, Any]:
    return {
        "num_layers": 2,
        "d_model": size.width,
        "d_kv": size.width // size.heads,
        "d_ff": 2 * size.width,
        "num_heads": size.heads,
        "vocab_size": size.vocabulary,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }


def _vit(size: Size) -> dict[str, Any]:
    settings = _like_bert(size, image_size=16 if size is SMALL else 64, patch_size=8)
    del settings["vocab_size"]
    return settings


def _mamba(size: Size) -> dict[str, Any]:
    return {"num_hidden_layers": 2, "hidden_size": size.width // 2, "vocab_size": size.vocabulary, "state_size": 8}


gpt2 = from_transformers("GPT2LMHeadModel", "GPT2Config", _gpt2)
llama = from_transformers("LlamaForCausalLM", "LlamaConfig", _like_llama)
bert = from_transformers("BertForSequenceClassification", "BertConfig", _like_bert)


# ---- adapters --------------------------------------------------------------------------------------------------------


def low_rank(base: Build, targets: list[str], **settings: Any) -> Build:
    """LoRA or a kin of it, with a second factor that is not zero as at its start."""

    def build(size: Size) -> nn.Module:
        import peft

        config = peft.LoraConfig(
            r=2 if size is SMALL else 8,
            lora_alpha=8,
            lora_dropout=0.0,
            target_modules=targets,
            task_type="CAUSAL_LM",
            **settings,
        )
        model = peft.get_peft_model(base(size), config)
        for name, p in model.named_parameters():
            if p.requires_grad and "lora_B" in name:
                nn.init.normal_(p, std=0.02)
        return model

    return build


def rescaled(size: Size) -> nn.Module:
    """IA3."""
    import peft

    config = peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(llama(size), config)


def prompted(size: Size) -> nn.Module:
    """Prompt tuning."""
    import peft

    config = peft.PromptTuningConfig(num_virtual_tokens=4 if size is SMALL else 8, task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(size), config)


# ---- the models ------------------------------------------------------------------------------------------------------


def _hf(name: str, config: str, settings: Settings, examples: Examples, losses: Losses, what: str = "") -> Model:
    return Model("transformers", named(name, what), from_transformers(name, config, settings), examples, losses)


def _peft(what: str, build: Build, examples: Examples, losses: Losses = token_losses) -> Model:
    return Model("peft", what, build, examples, losses)


MODELS: dict[str, Model] = {
    "gpt2": Model("transformers", "GPT2LMHeadModel, tied embedding and head", gpt2, texts(), token_losses),
    "bert": Model("transformers", "BertForSequenceClassification", bert, sentences(), class_losses),
    "bert-mlm": _hf("BertForMaskedLM", "BertConfig", _like_bert, texts(), token_losses, "tied embedding and head"),
    "roberta": _hf(
        "RobertaForSequenceClassification",
        "RobertaConfig",
        lambda size: _like_bert(size, pad_token_id=1),
        sentences(),
        class_losses,
    ),
    "distilbert": _hf(
        "DistilBertForSequenceClassification", "DistilBertConfig", _distilbert, sentences(), class_losses
    ),
    "albert": _hf(
        "AlbertForSequenceClassification",
        "AlbertConfig",
        lambda size: _like_bert(size, embedding_size=size.width // 4, classifier_dropout_prob=0.0),
        sentences(),
        class_losses,
        "layers share their weights",
    ),
    "deberta-v2": _hf(
        "DebertaV2ForSequenceClassification", "DebertaV2Config", _deberta, sentences(8, 32), class_losses
    ),
    "llama": Model("transformers", "LlamaForCausalLM", llama, texts(), token_losses),
    "qwen2": _hf("Qwen2ForCausalLM", "Qwen2Config", _like_llama, texts(), token_losses),
    "opt": _hf("OPTForCausalLM", "OPTConfig", _opt, texts(), token_losses, "tied embedding and head"),
    "gpt-neox": _hf("GPTNeoXForCausalLM", "GPTNeoXConfig", _gpt_neox, texts(), token_losses),
    "t5": _hf("T5ForConditionalGeneration", "T5Config", _t5, texts(8, 48), translation_losses),
    "vit": _hf("ViTForImageClassification", "ViTConfig", _vit, images(coincident=VIT_TOKENS), class_losses),
    "mamba": _hf("MambaForCausalLM", "MambaConfig", _mamba, texts(4, 32), token_losses),
    "lora-gpt2": _peft("LoRA of GPT-2's c_attn", low_rank(gpt2, ["c_attn"], fan_in_fan_out=True), texts()),
    "lora-llama": _peft("LoRA of Llama's q_proj and v_proj", low_rank(llama, ["q_proj", "v_proj"]), texts()),
    "dora-llama": _peft("DoRA of Llama's q_proj", low_rank(llama, ["q_proj"], use_dora=True), texts(4, 32)),
    "ia3-llama": _peft("IA3 of Llama's k_proj, v_proj and down_proj", rescaled, texts()),
    "prompt-llama": _peft("prompt tuning of Llama", prompted, texts(), prompted_losses),
    "bitfit-bert": Model(
        "transformers",
        "BertForSequenceClassification, biases alone",
        only(bert, lambda name: name.endswith("bias")),
        sentences(),
        class_losses,
    ),
}
