"""Models of the suites: real architectures, random weights, a few thousand parameters."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, LENGTH = 32, 8


def gpt2(layers: int = 2) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=layers, n_head=2,
        bos_token_id=None, eos_token_id=None,
        attn_implementation="eager", use_cache=False,
    )
    return GPT2LMHeadModel(config)


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 2], num_heads=[1, 2], window_size=2,
        num_labels=4, attn_implementation="eager", drop_path_rate=0.0,
    )
    return SwinForImageClassification(config)


class VGG(nn.Module):
    """Blocks of convolutions with a classifier, as Simonyan and Zisserman (2015), very thin."""

    def __init__(self) -> None:
        super().__init__()
        blocks, width = [], 3
        for wide in (4, 8):
            blocks.append(
                nn.Sequential(
                    nn.Conv2d(width, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(),
                    nn.Conv2d(wide, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(),
                    nn.MaxPool2d(2),
                )
            )
            width = wide
        self.features = nn.ModuleList(blocks)
        self.classifier = nn.Sequential(nn.Linear(8 * 4 * 4, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        for block in self.features:
            x = block(x)
        x = x.flatten(1)
        if skip is not None:  # a branch that leaves the first layer of the classifier out
            return x[:, :4]
        return self.classifier(x)


class Block(nn.Module):
    """A layer of a plain transformer, with the parts that tensor parallelism splits by name."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A plain transformer that predicts the next token."""

    def __init__(self, layers: int = 2, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            if i != skip:
                x = layer(x)
        return self.head(x)


def tokens(batch: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def images(batch: int, seed: int) -> torch.Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model."""
    if hasattr(model, "transformer"):
        return list(model.transformer.h)
    if hasattr(model, "swin"):
        return [b for layer in model.swin.encoder.layers for b in layer.blocks]
    return list(getattr(model, "layers", getattr(model, "features", [])))


class Skipped(nn.Module):
    """Stands for a layer that is dropped: gives on what it gets."""

    def forward(self, x: torch.Tensor, *_: object, **__: object) -> object:
        return x


def loss_of(model: nn.Module, kind: str, batch: int, seed: int) -> torch.Tensor:
    """A forward pass and its loss."""
    if kind in ("gpt2", "transformer"):
        data = tokens(batch, seed)
        out = model(data)
        logits = out.logits if hasattr(out, "logits") else out
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), data[:, 1:].flatten())
    out = model(images(batch, seed))
    logits = out.logits if hasattr(out, "logits") else out
    return nn.functional.cross_entropy(logits, torch.arange(batch) % 4)


MAKE = {"gpt2": gpt2, "swin": swin, "vgg": VGG, "transformer": Transformer}
