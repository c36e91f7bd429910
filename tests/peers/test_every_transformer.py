"""The recipe for transformers on each of its architectures that a few settings make small; minutes, so only nightly."""

import warnings

import pytest
from hypothesis import settings
from recipes import recipe

torch = pytest.importorskip("torch", reason="the recipe is for PyTorch")
transformers = pytest.importorskip("transformers", reason="the recipe is for transformers: pip install transformers")

SMALL = {
    2: "encoder_layers decoder_layers num_hidden_layers n_layer n_layers num_layers num_decoder_layers depth "
    "num_encoder_layers num_key_value_heads num_experts_per_tok num_global_key_value_heads index_n_heads num_codebooks",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads sliding_window "
    "num_local_experts num_experts n_routed_experts index_topk",
    8: "head_dim d_kv patch_size qk_rope_head_dim qk_nope_head_dim v_head_dim query_pre_attn_scalar index_head_dim "
    "hidden_size_per_layer_input global_head_dim",
    16: "moe_intermediate_size q_lora_rank kv_lora_rank num_mel_bins",
    32: "hidden_size d_model n_embd embed_dim dim image_size projection_dim embedding_size",
    48: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size max_source_positions "
    "shared_expert_intermediate_size",
    99: "vocab_size vocab_size_per_layer_input",
    1: "n_shared_experts first_k_dense_replace n_group topk_group",
}
REFUSED = "inkling2"  # by the recipe, with its reason
LARGEST = 3e7  # weights


def shrink(config):
    """Make a configuration small, and those inside it."""
    for size, names in SMALL.items():
        for name in names.split():
            if type(getattr(config, name, None)) is int and getattr(config, name) > size:
                setattr(config, name, size)
    for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
        if hasattr(config, name):
            setattr(config, name, 0)
    if kinds := list(dict.fromkeys(getattr(config, "layer_types", None) or [])):
        config.num_hidden_layers = max(2, len(kinds))
        config.layer_types = (kinds * 2)[: config.num_hidden_layers]
    for name in getattr(type(config), "sub_configs", {}):
        if hasattr(getattr(config, name, None), "to_dict"):
            shrink(getattr(config, name))


def made(kind):
    """Return a model with its inputs, or None where these few settings do not make one that runs."""
    try:
        config = transformers.CONFIG_MAPPING[kind]()
        model = transformers.MODEL_MAPPING[type(config)]
        model = model[0] if isinstance(model, tuple | list) else model
        shrink(config)
        with torch.device("meta"):
            if sum(x.numel() for x in model._from_config(config).parameters()) > LARGEST:
                return None
        torch.manual_seed(0)
        model = model._from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for x in model.parameters():
                x.normal_(0, 0.15) if x.ndim > 1 else x.add_(0.05 * torch.randn_like(x))
        inputs = {
            "input_ids": lambda: {"input_ids": torch.randint(4, 90, (2, 9)), "attention_mask": torch.ones(2, 9).long()},
            "pixel_values": lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
            "input_features": lambda: {"input_features": torch.randn(2, 16, 96)},
            "input_values": lambda: {"input_values": torch.randn(2, 2000)},
        }[model.main_input_name]()
        if "attention_mask" in inputs:
            inputs["attention_mask"][1, 6:] = 0
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(4, 90, (2, 5))
        return model, inputs, answer(model, inputs)
    except Exception:  # of any kind: the settings do not fit this architecture
        return None


def answer(model, inputs):
    torch.manual_seed(1)
    with torch.no_grad():
        result = model(**inputs)
    for name in ("last_hidden_state", "logits", "pooler_output"):
        if getattr(result, name, None) is not None:
            return getattr(result, name)
    raise LookupError


@pytest.mark.skipif(settings.default.max_examples < 1000, reason="minutes: pytest --hypothesis-profile=nightly")
def test_every_architecture_that_can_be_made_small(monkeypatch):
    bridge = recipe("torch", "transformers")
    attend, calls, compared, wrong = bridge.attend, [], [], {}
    counted = lambda *arrays, **options: calls.append(1) or attend(*arrays, **options)  # noqa: E731
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, bridge.NAME, counted)
    warnings.simplefilter("ignore")
    for kind in transformers.CONFIG_MAPPING:
        if (given := made(kind)) is None:
            continue
        model, inputs, right = given
        calls.clear()
        try:
            model.set_attn_implementation(bridge.NAME)
            off = float((answer(model, inputs) - right).abs().max() / right.abs().max())
        except Exception as error:
            if not kind.startswith(REFUSED):
                wrong[kind] = error
            continue
        if calls:
            compared.append(kind)
            if not off < 1e-4:
                wrong[kind] = off
    assert not wrong
    assert len(compared) > 200
