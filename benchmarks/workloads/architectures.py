"""Architectures of torchvision and transformers, each trained for a few steps with batches that differ in size.

``pyalloc dryrun python -m benchmarks.workloads.architectures NAME [--steps N] [--autocast]``
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

# Of one batch, whose sizes are drawn.  torch is imported where it is used, since some only ask for the names.
Loss: TypeAlias = "Callable[[random.Random], Tensor]"


def _made(auto: str, config: str, options: dict[str, Any]) -> nn.Module:
    """A model of transformers, by the names of its classes."""
    import transformers

    make: Callable[[Any], nn.Module] = getattr(transformers, auto).from_config
    return make(getattr(transformers, config)(**options)).cuda()


@dataclass(frozen=True)
class Images:
    """Pictures or films for a model of torchvision."""

    sizes: tuple[int, ...] = (224, 224)
    batches: tuple[int, ...] = (16, 21, 32)
    options: tuple[tuple[str, Any], ...] = ()

    def make(self, name: str) -> tuple[nn.Module, Loss]:
        import torch
        import torchvision
        from torch import nn

        model = torchvision.models.get_model(name, weights=None, **dict(self.options)).cuda()

        def loss(rng: random.Random) -> Tensor:
            n = rng.choice(self.batches)
            found = model(torch.empty(n, 3, *self.sizes, device="cuda"))
            if isinstance(found, dict):  # of a segmentation, beside an auxiliary one
                found = found["out"]
            elif isinstance(found, tuple):
                found = found[0]
            label = torch.zeros(n, *found.shape[2:], dtype=torch.long, device="cuda")
            return nn.functional.cross_entropy(found, label)

        return model, loss


@dataclass(frozen=True)
class Texts:
    """Token numbers for a model of transformers; its loss is the model's own."""

    auto: str  # transformers' class that makes the model
    config: str
    options: dict[str, Any]
    batches: tuple[int, ...] = (4, 8)
    lengths: tuple[int, int] = (64, 512)

    def make(self, name: str) -> tuple[nn.Module, Loss]:
        import torch

        model = _made(self.auto, self.config, self.options)

        def loss(rng: random.Random) -> Tensor:
            n = rng.choice(self.batches)
            numbers, labels = (
                torch.zeros(n, rng.randint(*self.lengths), dtype=torch.long, device="cuda")
                for _ in range(2)
            )
            is_pair = self.auto.endswith("Seq2SeqLM")
            return model(input_ids=numbers, labels=labels if is_pair else numbers).loss

        return model, loss


@dataclass(frozen=True)
class Pictures:
    """Pictures for a model of transformers."""

    config: str
    options: dict[str, Any]
    side: int = 224
    batches: tuple[int, ...] = (16, 21, 32)

    def make(self, name: str) -> tuple[nn.Module, Loss]:
        import torch

        model = _made("AutoModelForImageClassification", self.config, self.options)

        def loss(rng: random.Random) -> Tensor:
            n = rng.choice(self.batches)
            picture = torch.empty(n, 3, self.side, self.side, device="cuda")
            label = torch.zeros(n, dtype=torch.long, device="cuda")
            return model(pixel_values=picture, labels=label).loss

        return model, loss


_FILM = Images(sizes=(16, 224, 224), batches=(2, 3, 4))
_SEGMENTED = Images(sizes=(320, 320), batches=(4, 6, 8), options=(("weights_backbone", None),))
_causal = partial(Texts, "AutoModelForCausalLM")
_masked = partial(Texts, "AutoModelForMaskedLM", batches=(8, 16))
_pairs = partial(Texts, "AutoModelForSeq2SeqLM", batches=(4, 8, 16))


def _sizes(width: int, layers: int, heads: int, inner: int, **more: int) -> dict[str, Any]:
    """As most configurations name them."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        **more,
    }


ARCHITECTURES: dict[str, Images | Texts | Pictures] = {
    **dict.fromkeys(
        (
            *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s"),
            *("mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large", "regnet_y_8gf", "resnet18"),
            *("resnet152", "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_0", "swin_t"),
            *("swin_v2_t", "vgg16_bn", "vit_b_32", "maxvit_t", "wide_resnet50_2"),
        ),
        Images(),
    ),
    "googlenet": Images(options=(("init_weights", False),)),
    "inception_v3": Images(sizes=(299, 299), options=(("init_weights", False),)),
    **dict.fromkeys(
        ("deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"), _SEGMENTED
    ),
    **dict.fromkeys(("mc3_18", "r2plus1d_18", "s3d", "mvit_v2_s", "swin3d_t"), _FILM),
    "gpt2": _causal("GPT2Config", {"n_embd": 768, "n_layer": 8}),
    "llama": _causal("LlamaConfig", _sizes(768, 8, 12, 2048, num_key_value_heads=4)),
    "mixtral": _causal(
        "MixtralConfig", _sizes(512, 6, 8, 1024, num_key_value_heads=4, num_local_experts=8)
    ),
    "qwen2_moe": _causal(
        "Qwen2MoeConfig",
        _sizes(
            *(512, 6, 8, 1024),
            moe_intermediate_size=512,
            shared_expert_intermediate_size=1024,
            num_key_value_heads=4,
            num_experts=8,
            num_experts_per_tok=2,
        ),
    ),
    "bloom": _causal("BloomConfig", {"hidden_size": 512, "n_layer": 6, "n_head": 8}),
    "falcon": _causal(
        "FalconConfig", {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12}
    ),
    "opt": _causal(
        "OPTConfig",
        {"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 6, "num_attention_heads": 12},
    ),
    "phi": _causal("PhiConfig", _sizes(768, 6, 12, 3072)),
    "albert": _masked("AlbertConfig", _sizes(768, 12, 12, 3072)),
    "bert": _masked("BertConfig", {}),
    "big_bird": _masked("BigBirdConfig", {"num_hidden_layers": 4}),
    "deberta_v2": _masked(
        "DebertaV2Config",
        {**_sizes(512, 6, 8, 2048), "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "distilbert": _masked("DistilBertConfig", {}),
    "electra": _masked("ElectraConfig", {}),
    "fnet": _masked("FNetConfig", {"num_hidden_layers": 6}),
    "longformer": _masked(
        "LongformerConfig",
        {"num_hidden_layers": 4, "attention_window": 64, "max_position_embeddings": 1024},
    ),
    "mobilebert": _masked("MobileBertConfig", {"num_hidden_layers": 8}),
    "nystromformer": _masked("NystromformerConfig", {"num_hidden_layers": 6}),
    "roberta": _masked("RobertaConfig", {"max_position_embeddings": 600}),
    "roformer": _masked("RoFormerConfig", {"num_hidden_layers": 6}),
    "squeezebert": _masked("SqueezeBertConfig", {"num_hidden_layers": 8}),
    "bart": _pairs("BartConfig", {"d_model": 512, "encoder_layers": 4, "decoder_layers": 4}),
    "led": _pairs(
        "LEDConfig",
        {"d_model": 512, "encoder_layers": 3, "decoder_layers": 3, "attention_window": 64},
    ),
    "pegasus": _pairs(
        "PegasusConfig",
        {"d_model": 512, "encoder_layers": 4, "decoder_layers": 4, "decoder_start_token_id": 0},
    ),
    "switch_transformers": _pairs(
        "SwitchTransformersConfig",
        {"d_model": 512, "num_layers": 4, "d_ff": 1024, "decoder_start_token_id": 0},
    ),
    "t5": _pairs(
        "T5Config", {"d_model": 512, "num_layers": 6, "d_ff": 2048, "decoder_start_token_id": 0}
    ),
    "beit": Pictures("BeitConfig", {}),
    "convnext": Pictures("ConvNextConfig", {}),
    "cvt": Pictures("CvtConfig", {}),
    "dinov2": Pictures("Dinov2Config", {"image_size": 224}),
    "focalnet": Pictures("FocalNetConfig", {}),
    "mobilevit": Pictures("MobileViTConfig", {}, side=256),
    "poolformer": Pictures("PoolFormerConfig", {}),
    "pvt": Pictures("PvtConfig", {}),
    "resnet": Pictures("ResNetConfig", {}),
    "segformer": Pictures("SegformerConfig", {}, side=256),
    "swin": Pictures("SwinConfig", {}),
    "swinv2": Pictures("Swinv2Config", {"image_size": 256, "window_size": 8}, side=256),
    "vit": Pictures("ViTConfig", {}),
}


def train(name: str, n_steps: int, is_half: bool) -> None:
    """Trains with AdamW, and evaluates two batches halfway; is_half: in bfloat16 by autocast."""
    import torch

    rng = random.Random(name)
    model, loss = ARCHITECTURES[name].make(name)
    optimizer = torch.optim.AdamW(model.parameters())

    def one() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=is_half):
            return loss(rng)

    for step in range(n_steps):
        model.train()
        one().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == n_steps // 2:
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    one()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ARCHITECTURES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--autocast", action="store_true", help="in bfloat16")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    train(asked.name, asked.steps, asked.autocast)


if __name__ == "__main__":
    main()
