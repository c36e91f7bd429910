"""The recipe of docs/bridges.md for models of transformers: small random ones, against their "eager" attention."""

import pytest
from recipes import recipe

import sdpa_ref

torch = pytest.importorskip("torch", reason="the recipe is for PyTorch")
transformers = pytest.importorskip("transformers", reason="the recipe is for transformers: pip install transformers")
masks = pytest.importorskip("transformers.masking_utils", reason="transformers is older than the masks of the recipe")

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
BOTH = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48, "init_std": 0.2,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
MODELS = {  # name: configuration, class, options
    "BERT": ("BertConfig", "BertModel", SIZES),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED),
    "Gemma 2": (
        "Gemma2Config", "Gemma2ForCausalLM",
        {**GROUPED, "sliding_window": 4, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 0.5},
    ),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {**GROUPED, **EXPERTS, "sliding_window": 4}),
    "T5": (
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    "BART": ("BartConfig", "BartForConditionalGeneration", BOTH),
    "Whisper": (
        "WhisperConfig", "WhisperForConditionalGeneration",
        {**BOTH, "num_mel_bins": 8, "max_source_positions": 16, "pad_token_id": 0, "begin_suppress_tokens": None},
    ),
    "ViT": ("ViTConfig", "ViTModel", {**SIZES, "image_size": 32, "patch_size": 8}),
    "DeepSeek V2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**SIZES, **LATENT, "first_k_dense_replace": 2}),
    "DeepSeek V3.2": (
        "DeepseekV32Config", "DeepseekV32ForCausalLM",
        {**SIZES, **LATENT, "first_k_dense_replace": 2, "num_key_value_heads": 4, "head_dim": 8}
        | {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "ModernBERT": ("ModernBertConfig", "ModernBertModel", {**SIZES, "local_attention": 4, "pad_token_id": 0}),
}  # fmt: skip
DECODERS = [name for name in MODELS if name not in ("BERT", "ViT", "ModernBERT")]
TOKENS = torch.randint(3, 99, (2, 11), generator=torch.Generator().manual_seed(0))
PADDED = {side: torch.ones(2, 11, dtype=torch.long) for side in ("left", "right")}
PADDED["left"][1, :3] = PADDED["right"][1, 8:] = 0
MOST = 1e-5  # of the largest number; the models run in float32


def made(name, **options):
    """Return a small model with random weights, in which attention matters, and its inputs."""
    bridge = recipe("torch", "transformers")
    configuration, kind, sizes = MODELS[name]
    if not hasattr(transformers, configuration):
        pytest.skip(f"transformers {transformers.__version__} has no {configuration}")
    torch.manual_seed(0)
    config = getattr(transformers, configuration)(**sizes, **options)
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager").eval()
    if hasattr(model, "generation_config"):
        model.generation_config.update(eos_token_id=None, decoder_start_token_id=1)  # it shall not end early
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    if name == "ViT":
        return bridge, model, {"pixel_values": torch.randn(2, 3, 32, 32)}
    inputs = {"input_ids": TOKENS} if name != "Whisper" else {"input_features": torch.randn(2, 8, 32)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = TOKENS[:, :5]
    return bridge, model, inputs


def answer(model, **inputs):
    with torch.no_grad():
        result = model(**inputs)
    return getattr(result, "logits", None) if "logits" in result else result.last_hidden_state


def assert_close(got, expected):
    assert got.dtype == expected.dtype
    assert (got - expected).abs().max() <= MOST * expected.abs().max()


@pytest.fixture(autouse=True)
def watched(monkeypatch, request):
    """Return the options of the recipe's calls, which go to one backend: the reference has nothing to compile."""
    calls, names = [], recipe("torch", "transformers").attend.__globals__
    backend = request.getfixturevalue("gradient_backend") if "gradient_backend" in request.fixturenames else "reference"

    def on_one(function):
        return lambda *arrays, **options: calls.append(options) or function(*arrays, **options, backend=backend)

    for name in ("sdpa_with_vjp", "sdpa_weights"):
        monkeypatch.setitem(names, name, on_one(getattr(sdpa_ref, name)))
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_model_as_with_its_own_attention(name, gradient_backend, watched):
    bridge, model, inputs = made(name)
    cases = [{}] if "input_ids" not in inputs else [{}, *({"attention_mask": mask} for mask in PADDED.values())]
    expected = [answer(model, **inputs, **more) for more in cases]
    model.set_attn_implementation(bridge.NAME)
    for more, right in zip(cases, expected, strict=True):
        assert_close(answer(model, **inputs, **more), right)
    assert len(watched) >= 2 * len(cases)
    if len(cases) > 1:
        assert (expected[0] - expected[1]).abs().max() > 1e-3, "padding must matter"


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 2", "BART"])
def test_boolean_masks(name, monkeypatch, watched):
    """They take less time, but a row that sees nothing is zero, where eager has the mean of all values."""
    bridge, model, inputs = made(name)
    seen = PADDED["right"]
    expected = answer(model, **inputs, attention_mask=seen)

    def boolean(**given):
        return masks.sdpa_mask(**given | {"allow_is_causal_skip": False})

    monkeypatch.setitem(masks.AttentionMaskInterface._global_mapping, bridge.NAME, boolean)
    model.set_attn_implementation(bridge.NAME)
    assert_close(answer(model, **inputs, attention_mask=seen), expected)
    assert any(options["mask"] is not None for options in watched)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", DECODERS)
def test_generating(name, cache):
    bridge, model, inputs = made(name)
    inputs = {k: v for k, v in inputs.items() if k != "decoder_input_ids"}
    if "input_ids" in inputs:
        inputs["attention_mask"] = PADDED["left"]
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    options |= {"output_logits": True, "use_cache": cache != "none"}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    right = model.generate(**inputs, **options)
    model.set_attn_implementation(bridge.NAME)
    got = model.generate(**inputs, **options)
    assert torch.equal(got.sequences, right.sequences)
    for ours, theirs in zip(got.logits, right.logits, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["BERT", "Llama", "gpt-oss", "T5", "Gemma 2"])
def test_training(name):
    bridge, model, inputs = made(name)

    def gradients():
        model.zero_grad()
        result = model(**inputs)
        (result.logits if "logits" in result else result.last_hidden_state).square().mean().backward()
        return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

    right = gradients()
    model.set_attn_implementation(bridge.NAME)
    got = gradients()
    assert got.keys() == right.keys()
    largest = max(x.abs().max() for x in right.values())
    for key, gradient in right.items():
        assert (got[key] - gradient).abs().max() <= MOST * largest, key


def test_dropout_only_in_training_and_by_the_seed_of_torch():
    bridge, model, inputs = made("Llama", attention_dropout=0.5)
    expected = answer(model, **inputs)
    model.set_attn_implementation(bridge.NAME)
    assert_close(answer(model, **inputs), expected)
    model.train()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(answer(model, **inputs))
    assert torch.equal(runs[0], runs[1])
    assert (runs[0] - runs[2]).abs().max() > 1e-3
    assert (runs[0] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["BERT", "Llama", "gpt-oss", "T5", "Gemma 2"])
def test_weights_where_they_are_asked_for(name):
    bridge, model, inputs = made(name)

    def weights():
        with torch.no_grad():
            result = model(**inputs, output_attentions=True)
        return [x for key in result if key.endswith("attentions") for x in result[key]]

    right = weights()
    model.set_attn_implementation(bridge.NAME)
    got = weights()
    assert len(got) == len(right) >= 2
    for ours, theirs in zip(got, right, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_types(dtype):
    bridge, model, inputs = made("Llama")
    precise = answer(model.double(), **inputs)
    model.to(getattr(torch, dtype))
    theirs = answer(model, **inputs).double()
    model.set_attn_implementation(bridge.NAME)
    ours = answer(model, **inputs)
    assert ours.dtype == getattr(torch, dtype)
    if dtype == "float64":  # their softmax is one of float32
        assert_close(ours, precise)
    else:
        assert (ours.double() - precise).abs().max() <= 2 * (theirs - precise).abs().max()


def test_it_can_be_chosen_when_a_model_is_made():
    bridge, model, inputs = made("gpt-oss")
    other = type(model)._from_config(model.config, attn_implementation=bridge.NAME).eval()
    other.load_state_dict(model.state_dict())
    assert_close(answer(other, **inputs), answer(model, **inputs))


@pytest.mark.parametrize("boolean", [True, False])
def test_keys_that_a_model_has_chosen(boolean):
    attend = recipe("torch", "transformers").attend
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(10)]).view(2, 5, 3)
    keep = torch.zeros(2, 5, 5, dtype=torch.bool).scatter(-1, chosen, True)[:, None]
    seen = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    mask = seen if boolean else torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    got, none = attend(torch.nn.Identity(), query, key, value, mask, indices=chosen)
    assert none is None
    rows = (keep & seen).any(-1)[:, 0]  # the others have no key that is chosen and seen
    expected = torch.from_numpy(sdpa_ref.sdpa(query, key, value, mask=keep & seen, backend="reference"))
    assert torch.equal(got[rows], expected.transpose(1, 2)[rows])


@pytest.mark.parametrize("name", ["sinks", "block_indices"])
def test_what_it_has_not_is_refused(name):
    attend = recipe("torch", "transformers").attend
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match=f"^Identity attends with {name}"):
        attend(torch.nn.Identity(), query, query, query, None, **{name: torch.zeros(1)})
