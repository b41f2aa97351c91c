"""Tiny random checkpoints, one per switch of the two families, and transformers as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moe_model.reference import ReferenceModel

DEMO = Path(__file__).parents[3] / "demo" / "model"

_COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DEEPSEEK: dict[str, Any] = {
    **_COMMON,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
_MIXTRAL: dict[str, Any] = {
    **_COMMON,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 256,
}
# Large enough that absorbed matrices are not multiplied out, so long spans expand the latents.
_WIDE = {"hidden_size": 128, "q_lora_rank": 128, "kv_lora_rank": 128}

SWITCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek", {}),
    "no_q_lora": ("deepseek", {"q_lora_rank": None}),
    "one_group": ("deepseek", {"n_group": 1, "topk_group": 1}),
    "all_groups": ("deepseek", {"n_group": 2, "topk_group": 2}),
    "no_shared": ("deepseek", {"n_shared_experts": 0}),
    "two_shared": ("deepseek", {"n_shared_experts": 2}),
    "dense_layers": ("deepseek", {"first_k_dense_replace": 2}),
    "no_dense_layer": ("deepseek", {"first_k_dense_replace": 0}),
    "unnormalised": ("deepseek", {"norm_topk_prob": False}),
    "tied": ("deepseek", {"tie_word_embeddings": True}),
    "half_split_rope": ("deepseek", {"rope_interleave": False}),
    "biases": ("deepseek", {"attention_bias": True}),
    "norm_eps": ("deepseek", {"rms_norm_eps": 1e-3}),
    "yarn": (
        "deepseek",
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "yarn_plain": ("deepseek", {"rope_parameters": _YARN, "q_lora_rank": None}),
    "wide": ("deepseek", _WIDE),
    "wide_no_q_lora": ("deepseek", {**_WIDE, "q_lora_rank": None, "attention_bias": True}),
    "mixtral": ("mixtral", {}),
    "window": ("mixtral", {"sliding_window": 24}),
    "many_heads": ("mixtral", {"num_key_value_heads": 4, "head_dim": 16}),
    "one_kv_head": ("mixtral", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mixtral_yarn": ("mixtral", {"rope_parameters": {**_YARN, "truncate": False}}),
}


def _build(switch: str) -> Any:
    family, changes = SWITCHES[switch]
    if family == "deepseek":
        config = transformers.DeepseekV3Config(**_DEEPSEEK | changes)
        model = transformers.DeepseekV3ForCausalLM(config)
    else:
        config = transformers.MixtralConfig(**_MIXTRAL | changes)
        model = transformers.MixtralForCausalLM(config)
    generator = torch.Generator().manual_seed(sorted(SWITCHES).index(switch))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name in sorted(state):
            value = state[name]
            if "inv_freq" in name or value.numel() == 0:
                continue
            noise = torch.empty(value.shape).normal_(generator=generator)
            if "norm" in name:
                value.copy_(1 + 0.1 * noise)
            elif "e_score_correction_bias" in name or name.endswith("bias"):
                value.copy_(0.1 * noise)
            elif "embed" in name:
                value.copy_(noise)
            else:
                value.copy_(noise * 1.5 / value.shape[-1] ** 0.5)
    return model.eval()


@dataclass
class Oracle:
    """A checkpoint on disk, transformers' model of it and ours."""

    path: Path
    theirs: Any
    ours: ReferenceModel
    vocab: int
    _exact: list[ReferenceModel] = field(default_factory=list)

    @property
    def exact(self) -> ReferenceModel:
        if not self._exact:
            self._exact.append(ReferenceModel(self.path, weights="fp32", exact=True))
        return self._exact[0]

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(1000 * seed + length)
        return torch.randint(3, self.vocab, (length,), generator=generator).tolist()

    def their_logits(self, prompt: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.theirs(torch.tensor([prompt])).logits[0]

    def their_tokens(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """The checkpoint of a switch, or ``demo`` for the one that ships; made once a session."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made: dict[str, Oracle] = {}

    def get(switch: str) -> Oracle:
        if switch not in made:
            path = DEMO
            if switch != "demo":
                path = tmp_path_factory.mktemp(switch)
                _build(switch).save_pretrained(path)
            theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            ours = ReferenceModel(path)
            made[switch] = Oracle(path, theirs.eval(), ours, ours.model.spec.vocab_size)
        return made[switch]

    return get


@pytest.fixture
def three_threads() -> Iterator[None]:
    """ATen splits large calls over threads, at columns that whole rows do not know."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
