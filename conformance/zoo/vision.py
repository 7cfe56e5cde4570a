"""Images: convolutional nets, vision transformers, U-Nets."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .base import Spec, image


def _conv(i: int, o: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    layers = [nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if act else []))


class Residual(nn.Module):
    """``x + body(x)``."""

    def __init__(self, *body: nn.Module, last: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        self.last = nn.Identity() if last is None else last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.body(x))


def _head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]


def resnet() -> nn.Module:
    """Basic blocks with BatchNorm and in-place ReLU."""

    def block() -> nn.Module:
        return Residual(_conv(16, 16), _conv(16, 16, act=False), last=nn.ReLU(inplace=True))

    return nn.Sequential(_conv(3, 16, stride=2), nn.MaxPool2d(2), block(), block(), *_head(16))


class SqueezeExcite(nn.Module):
    """Channels weighted by what a pooled bottleneck says."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.SiLU(inplace=True), nn.Conv2d(4, channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.fc(x.mean((2, 3), keepdim=True)).sigmoid()


class DropPath(nn.Module):
    """Drops whole samples of a residual branch."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        keep = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) > self.p
        return x * keep / (1 - self.p)


def efficientnet() -> nn.Module:
    """Inverted bottlenecks with squeeze-and-excitation and stochastic depth."""

    def block() -> nn.Module:
        parts = [_conv(16, 32, 1), _conv(32, 32, 5, groups=32), SqueezeExcite(32), _conv(32, 16, 1, act=False)]
        return Residual(*parts, DropPath(0.2))

    return nn.Sequential(_conv(3, 16, stride=2), block(), block(), nn.Dropout(0.2), *_head(16))


def mobilenet() -> nn.Module:
    """Depthwise separable convolutions with hard swish."""
    parts = [
        _conv(3, 16, stride=2),
        _conv(16, 16, groups=16, act=False),
        nn.Hardswish(),
        _conv(16, 32, 1, act=False),
        nn.ReLU6(inplace=True),
    ]
    return nn.Sequential(*parts, *_head(32))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scale(nn.Module):
    """A learnt factor per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels, 1, 1), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


def convnext() -> nn.Module:
    """Large depthwise kernels, LayerNorm, GELU, layer scale, channels last."""

    def block() -> nn.Module:
        parts = [nn.Conv2d(16, 16, 7, padding=3, groups=16), ChannelNorm(16), nn.Conv2d(16, 64, 1), nn.GELU()]
        return Residual(*parts, nn.Conv2d(64, 16, 1), Scale(16), DropPath(0.1))

    net = nn.Sequential(nn.Conv2d(3, 16, 4, 4), ChannelNorm(16), block(), block(), *_head(16))
    return net.to(memory_format=torch.channels_last)


class DenseNet(nn.Module):
    """Each layer sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 8)
        widths = range(8, 8 + 3 * 4, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(w), nn.ReLU(), nn.Conv2d(w, 4, 3, padding=1)) for w in widths
        )
        self.head = nn.Sequential(*_head(8 + 3 * 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1))


class ViT(nn.Module):
    """Patches, a class token, learnt positions, ``nn.TransformerEncoderLayer``."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        self.position = nn.Parameter(torch.randn(1, 17, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.body(x)[:, 0])


class WindowAttention(nn.Module):
    """Attention in shifted windows with a bias per relative position."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = grid[:, :, None] - grid[:, None] + window - 1
        self.register_buffer("index", relative[0] * (2 * window - 1) + relative[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        n = self.window
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        y = y.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)
        q, k, v = self.qkv(y).view(-1, n * n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[self.index].permute(2, 0, 1).to(q.dtype))
        y = self.out(y.transpose(1, 2).reshape(-1, n * n, c))
        y = y.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return x + torch.roll(y, (self.shift, self.shift), (1, 2))


class Swin(nn.Module):
    """Two stages of shifted windows with patch merging between."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.first = nn.Sequential(WindowAttention(16, 2, 4, 0), WindowAttention(16, 2, 4, 2))
        self.merge = nn.Linear(64, 32)
        self.second = nn.Sequential(WindowAttention(32, 4, 4, 0), WindowAttention(32, 4, 4, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.patch(x).permute(0, 2, 3, 1))
        x = torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)
        return self.head(self.second(self.merge(x)).mean((1, 2)))


class UNet(nn.Module):
    """Down, up with transposed convolutions, and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _conv(3, 8), _conv(8, 16), _conv(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join2, self.join1, self.out = _conv(32, 16), _conv(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        y = self.middle(F.max_pool2d(b, 2))
        y = self.join2(torch.cat([self.up2(y), b], 1))
        y = self.join1(torch.cat([self.up1(y), a], 1))
        return F.interpolate(self.out(y), scale_factor=2.0, mode="bilinear", align_corners=False)


class DiffusionBlock(nn.Module):
    """A residual block of a diffusion U-Net: GroupNorm, SiLU, time embedding, attention over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
        self.norm = nn.GroupNorm(4, 16)
        self.second = nn.Sequential(nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(16, 16, 3, padding=1))
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        rate = torch.exp(torch.arange(16, device=x.device) * (-9.21 / 15))
        angle = step[:, None].float() * rate
        shift, scale = self.time(torch.cat([angle.sin(), angle.cos()], -1))[:, :, None, None].chunk(2, 1)
        y = x + self.second(self.norm(self.first(x)) * (1 + scale) + shift)
        flat = y.flatten(2).transpose(1, 2)
        attended, _ = self.attention(flat, flat, flat, need_weights=False)
        return y + attended.transpose(1, 2).reshape(y.shape)


class VAE(nn.Module):
    """A variational autoencoder: random numbers between encoder and decoder, two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 32), nn.Tanh(), nn.Linear(32, 16))
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3 * 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return self.decode(z).view_as(x) - x, divergence


def mixer() -> nn.Module:
    """Patches mixed over positions and over channels by turns."""

    class Mix(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(size, 32), nn.GELU(), nn.Linear(32, size))
            self.norm = nn.LayerNorm(size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.net(self.norm(x))).transpose(1, 2)

    return nn.Sequential(
        nn.Conv2d(3, 24, 8, 8), nn.Flatten(2), Mix(16), Mix(24), Mix(16), Mix(24), nn.Flatten(), nn.Linear(384, 10)
    )


SPECS = [
    Spec("resnet", resnet, image()),
    Spec("efficientnet", efficientnet, image()),
    Spec("mobilenet", mobilenet, image()),
    Spec("convnext", convnext, image()),
    Spec("densenet", DenseNet, image()),
    Spec("vit", ViT, image()),
    Spec("swin", Swin, image()),
    Spec("unet", UNet, image()),
    Spec("diffusion-block", DiffusionBlock, lambda: ((torch.randn(2, 16, 8, 8), torch.randint(1000, (2,))), {})),
    Spec("vae", VAE, image(8)),
    Spec("mlp-mixer", mixer, image()),
]
