"""Models of images, of timm and torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
)


def from_timm(name: str, small: dict[str, Any] | Callable[[], nn.Module], **settings: Any) -> Build:
    """Builds a model of timm; the small one by other settings, or by itself where the model's function fixes them."""

    def build(size: Size) -> nn.Module:
        import timm

        if size is SMALL and callable(small):
            return small()
        changed = {**settings, **small} if size is SMALL and isinstance(small, dict) else settings
        model: nn.Module = timm.create_model(name, num_classes=CLASSES, **changed)
        return model

    return build


def _mixer(**settings: Any) -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(num_classes=CLASSES, img_size=32, patch_size=16, num_blocks=1, embed_dim=16, **settings)


def _gmlp() -> nn.Module:
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import SpatialGatingBlock

    return _mixer(mlp_ratio=4, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp)


def _resmlp() -> nn.Module:
    from timm.models.mlp_mixer import Affine, ResBlock

    return _mixer(mlp_ratio=4, block_layer=ResBlock, norm_layer=Affine)


def _poolformer() -> nn.Module:
    from timm.layers import GroupNorm1
    from timm.models.metaformer import MetaFormer

    return MetaFormer(
        num_classes=CLASSES,
        depths=(1, 1),
        dims=(8, 16),
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=GroupNorm1,
        layer_scale_init_values=1e-5,
        res_scale_init_values=None,
        use_mlp_head=False,
    )


def _bit() -> nn.Module:
    from timm.layers import GroupNormAct, StdConv2d
    from timm.models.resnetv2 import ResNetV2

    return ResNetV2(
        [1, 1],
        channels=(16, 32),
        stem_chs=8,
        stem_type="fixed",
        num_classes=CLASSES,
        norm_layer=partial(GroupNormAct, num_groups=4),
        conv_layer=partial(StdConv2d, eps=1e-8),
    )


def _nf_resnet() -> nn.Module:
    from timm.models.nfnet import NfCfg, NormFreeNet

    config = NfCfg((1, 1), (16, 32), stem_type="7x7_pool", stem_chs=8, bottle_ratio=0.25, act_layer="relu")
    return NormFreeNet(config, num_classes=CLASSES)


def grouped_resnet(name: str) -> Build:
    """A ResNet of torchvision with group normalization; the small one has the first two stages, of one block."""

    def build(size: Size) -> nn.Module:
        import torchvision
        from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

        normalization = partial(nn.GroupNorm, 32)
        if size is not SMALL:
            model: nn.Module = getattr(torchvision.models, name)(norm_layer=normalization, num_classes=CLASSES)
            return model
        block = BasicBlock if name == "resnet18" else Bottleneck
        resnet = ResNet(block, [1, 1, 1, 1], norm_layer=normalization, num_classes=CLASSES)
        resnet.layer3, resnet.layer4 = nn.Identity(), nn.Identity()
        resnet.fc = nn.Linear(128 * block.expansion, CLASSES)
        return resnet

    return build


def torchvision_vit(size: Size) -> nn.Module:
    from torchvision.models import VisionTransformer

    sizes = (16, 8, 1, 2, 16, 32) if size is SMALL else (64, 8, 4, 4, 192, 768)
    return VisionTransformer(*sizes, num_classes=CLASSES)


def torchvision_swin(size: Size) -> nn.Module:
    from torchvision.models import SwinTransformer

    sizes = (8, [1, 2], [1, 2], [2, 2]) if size is SMALL else (48, [2, 2], [2, 4], [4, 4])
    return SwinTransformer([4, 4], *sizes, num_classes=CLASSES, stochastic_depth_prob=0.0)


def torchvision_convnext(size: Size) -> nn.Module:
    from torchvision.models import ConvNeXt, convnext_tiny
    from torchvision.models.convnext import CNBlockConfig

    if size is not SMALL:
        return convnext_tiny(num_classes=CLASSES, stochastic_depth_prob=0.0)
    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=CLASSES)


# ---- the models ------------------------------------------------------------------------------------------------------


def _timm(
    name: str, examples: Examples, small: dict[str, Any] | Callable[[], nn.Module], *, what: str = "", **settings: Any
) -> Model:
    return Model("timm", named(name, what), from_timm(name, small, **settings), examples, class_losses)


def _torchvision(what: str, build: Build, examples: Examples) -> Model:
    return Model("torchvision", what, build, examples, class_losses)


_PATCHES = {"img_size": 64, "patch_size": 8}
_FEW_PATCHES = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
vit_tiny = from_timm("vit_tiny_patch16_224", _FEW_PATCHES, **_PATCHES)

MODELS: dict[str, Model] = {
    "head-vit-tiny": Model(
        "timm",
        "vit_tiny_patch16_224, head alone",
        only(vit_tiny, lambda name: name.startswith("head")),
        images(coincident=VIT_TOKENS),
        class_losses,
    ),
    "vit-tiny": _timm("vit_tiny_patch16_224", images(coincident=VIT_TOKENS), _FEW_PATCHES, **_PATCHES, depth=6),
    "deit-tiny": _timm("deit_tiny_distilled_patch16_224", images(coincident=(4, 6)), _FEW_PATCHES, **_PATCHES, depth=4),
    "beit": _timm(
        "beit_base_patch16_224",
        images(coincident=VIT_TOKENS),
        _FEW_PATCHES,
        what="narrower",
        **_PATCHES,
        embed_dim=192,
        depth=4,
        num_heads=3,
        init_values=0.1,
    ),
    "eva02-tiny": _timm(
        "eva02_tiny_patch14_224",
        images(8, 56, small=28, coincident=VIT_TOKENS),
        {"img_size": 28, "embed_dim": 16, "depth": 1, "num_heads": 2},
        img_size=56,
        depth=4,
    ),
    "swin-tiny": _timm(
        "swin_tiny_patch4_window7_224",
        images(8, coincident=(4, 16)),
        {"img_size": 16, "window_size": 2, "depths": (2, 1), "embed_dim": 8, "num_heads": (1, 2)},
        what="narrower",
        img_size=64,
        window_size=4,
        depths=(2, 2, 2, 2),
        embed_dim=48,
        num_heads=(2, 4, 8, 16),
        drop_path_rate=0.0,
    ),
    "cait": _timm(
        "cait_xxs24_224",
        images(8, coincident=VIT_TOKENS),
        {**_FEW_PATCHES, "depth_token_only": 1},
        **_PATCHES,
        depth=4,
    ),
    "convnext-atto": _timm("convnext_atto", images(small=32), {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
    "mixer": _timm("mixer_s32_224", images(4, 224, small=32), _mixer),
    "gmlp": _timm("gmlp_ti16_224", images(8, small=32), _gmlp, img_size=64),
    "resmlp": _timm("resmlp_12_224", images(4, 128, small=32), _resmlp, img_size=128),
    "poolformer": _timm("poolformer_s12", images(8, small=32), _poolformer),
    "bit-resnet50": _timm("resnetv2_50x1_bit", images(8, small=32), _bit, what="standardized weights"),
    "nf-resnet26": _timm("nf_resnet26", images(small=32), _nf_resnet, what="standardized weights"),
    "resnet18-gn": _torchvision("resnet18, group norm", grouped_resnet("resnet18"), images(small=32)),
    "resnet50-gn": _torchvision("resnet50, group norm", grouped_resnet("resnet50"), images(small=32)),
    "tv-vit": _torchvision("VisionTransformer", torchvision_vit, images(coincident=VIT_TOKENS)),
    "tv-swin": _torchvision("SwinTransformer, two stages", torchvision_swin, images(8, coincident=(4, 16))),
    "tv-convnext": _torchvision("convnext_tiny", torchvision_convnext, images(4, small=32)),
}
