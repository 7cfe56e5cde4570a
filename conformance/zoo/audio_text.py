"""Sequences: transformers of the families in use, state-space and recurrent nets, mixtures of experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .base import Batch, Spec, tokens

WIDTH, HEADS, VOCABULARY = 32, 4, 64


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (batch, heads, length, width)."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * rate
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


class Attention(nn.Module):
    """Self- or cross-attention; rotary positions, grouped keys and values, a sliding window, a relative bias."""

    def __init__(
        self, *, rotary: bool = False, kv_heads: int = HEADS, window: int = 0, causal: bool = False, bias: int = 0
    ) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.rotary, self.kv_heads, self.window, self.causal = rotary, kv_heads, window, causal
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * kv_heads * size)
        self.bias = nn.Embedding(bias, HEADS) if bias else None

    def mask(self, length: int, device: torch.device) -> torch.Tensor:
        """Who may look at whom."""
        position = torch.arange(length, device=device)
        gap = position[:, None] - position
        return (gap >= 0) & (gap < self.window) if self.window else gap >= 0

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        memory = x if memory is None else memory
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(-1, (2, self.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = _rotate(q), _rotate(k)
        if self.kv_heads != HEADS:
            k, v = (t.repeat_interleave(HEADS // self.kv_heads, 1) for t in (k, v))
        if self.bias is not None:
            position = torch.arange(x.shape[1], device=x.device)
            gap = (position[:, None] - position).abs().clamp(max=self.bias.num_embeddings - 1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(gap).permute(2, 0, 1)[None].to(q.dtype))
        elif self.window:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x.shape[1], x.device))
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """The gated feed-forward of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _gelu(p: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(p))


class Block(nn.Module):
    """Pre-norm attention, maybe cross-attention, feed-forward."""

    def __init__(self, attention: Attention, mlp: nn.Module, norm: type[nn.Module], cross: bool = False) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.cross = Attention() if cross else None

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        if self.cross is not None:
            x = x + self.cross(x, memory)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Embedding, blocks, logits; the output weight may be the embedding's."""

    def __init__(self, blocks: list[nn.Module], *, positions: bool, tied: bool, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(64, WIDTH) if positions else None
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.position is not None:
            x = x + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def bert() -> nn.Module:
    """Both directions, LayerNorm, GELU, dropout, learnt positions."""
    return LanguageModel([Block(Attention(), _gelu(), nn.LayerNorm) for _ in range(2)], positions=True, tied=False)


def gpt2() -> nn.Module:
    """Causal, tied weights."""
    blocks = [Block(Attention(causal=True), _gelu(), nn.LayerNorm) for _ in range(2)]
    return LanguageModel(blocks, positions=True, tied=True)


def gpt2_checkpointed() -> nn.Module:
    """The same with activation checkpointing and dropout."""
    blocks = [Block(Attention(causal=True), _gelu(), nn.LayerNorm) for _ in range(2)]
    return LanguageModel(blocks, positions=True, tied=True, checkpointed=True)


def llama() -> nn.Module:
    """Rotary positions, grouped-query attention, RMSNorm, SwiGLU."""
    blocks = [Block(Attention(rotary=True, kv_heads=2, causal=True), SwiGLU(), nn.RMSNorm) for _ in range(2)]
    return LanguageModel(blocks, positions=False, tied=False)


def mistral() -> nn.Module:
    """Llama with a sliding window."""
    blocks = [Block(Attention(rotary=True, kv_heads=2, window=4), SwiGLU(), nn.RMSNorm) for _ in range(2)]
    return LanguageModel(blocks, positions=False, tied=False)


class EncoderDecoder(nn.Module):
    """T5's shape: relative position bias, RMSNorm, cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = Block(
            Attention(bias=8), nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)), nn.RMSNorm
        )
        self.decoder = Block(Attention(causal=True), _gelu(), nn.RMSNorm, cross=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(self.embed(source))
        logits = self.decoder(self.embed(target), memory) @ self.embed.weight.t() * WIDTH**-0.5
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)


class Whisper(nn.Module):
    """Convolutions over a spectrogram, sinusoidal positions, encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(16, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, 2, 1)
        angle = torch.arange(16)[:, None] * 10000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))
        self.register_buffer("positions", torch.cat([angle.sin(), angle.cos()], -1))
        self.encoder = Block(Attention(), _gelu(), nn.LayerNorm)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = Block(Attention(causal=True), _gelu(), nn.LayerNorm, cross=True)

    def forward(self, mel: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2) + self.positions
        return self.decoder(self.embed(ids), self.encoder(x)) @ self.embed.weight.t()


class Clip(nn.Module):
    """Two towers, normalised, a learnt temperature, a symmetric loss."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.see = nn.Conv2d(3, WIDTH, 8, 8), Block(Attention(), _gelu(), nn.LayerNorm)
        self.embed, self.read = nn.Embedding(VOCABULARY, WIDTH), Block(Attention(causal=True), _gelu(), nn.LayerNorm)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, image: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        a = self.see(self.patch(image).flatten(2).transpose(1, 2)).mean(1)
        b = self.read(self.embed(ids))
        b = b[torch.arange(ids.shape[0], device=ids.device), ids.argmax(-1)]
        logits = self.scale.exp() * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t()
        target = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


class Mamba(nn.Module):
    """A selective state space, its scan a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.states = nn.Embedding(VOCABULARY, WIDTH), 48, 4
        self.project, self.out = nn.Linear(WIDTH, 2 * self.inner), nn.Linear(self.inner, WIDTH)
        self.conv = nn.Conv1d(self.inner, self.inner, 3, padding=2, groups=self.inner)
        self.select, self.step = nn.Linear(self.inner, 2 * self.states + 1), nn.Linear(1, self.inner)
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, self.states + 1)).repeat(self.inner, 1))
        self.skip = nn.Parameter(torch.ones(self.inner))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, gate = self.project(self.embed(ids)).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2))
        b, c, step = self.select(x).split([self.states, self.states, 1], -1)
        step = F.softplus(self.step(step))
        decay = torch.exp(-step[..., None] * self.log_a.exp())
        drive = step[..., None] * b[:, :, None] * x[..., None]
        state = torch.zeros_like(drive[:, 0])
        outputs = []
        for t in range(ids.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            outputs.append((state * c[:, t, None]).sum(-1))
        y = (torch.stack(outputs, 1) + self.skip * x) * F.silu(gate)
        return self.out(y)


class Routed(nn.Module):
    """Gathers the tokens of each expert: shapes depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens.flatten(0, -2)
        weight, choice = self.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(choice == i)
            y.index_add_(0, token, (expert(x[token]) * weight[token, slot, None]).to(y.dtype))
        return y.view(tokens.shape)


def routed_experts() -> nn.Module:
    """A mixture of experts that gathers the tokens of each."""
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Routed())


def mixture() -> nn.Module:
    """A language model with such a mixture in each of its blocks: captured attention, eager experts, by turns."""
    blocks = [Block(Attention(rotary=True, causal=True), Routed(), nn.RMSNorm) for _ in range(2)]
    return LanguageModel(blocks, positions=False, tied=False)


class DenseExperts(nn.Module):
    """The same mixture with every expert on every token: shapes are static."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(0, 1)
        weight, choice = self.router(x).softmax(-1).topk(2, -1)
        gate = torch.zeros(x.shape[0], 4, device=x.device, dtype=weight.dtype).scatter(1, choice, weight)
        return torch.einsum("te,ted->td", gate, torch.stack([e(x) for e in self.experts], 1).to(gate.dtype))


class Recurrent(nn.Module):
    """An embedding, ``nn.LSTM`` or ``nn.GRU``, logits of the last step."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCABULARY, WIDTH), kind(WIDTH, 16, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y, _ = self.rnn(self.embed(ids))
        return self.head(y[:, -1])


class CellLoop(nn.Module):
    """``nn.LSTMCell`` in a loop, its state passed in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        h, c = state
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return h, c


class Translation(nn.Module):
    """``nn.Transformer`` as it comes, with a causal and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 64, 0.1, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        padding = torch.zeros(source.shape, device=source.device).masked_fill(source == 0, float("-inf"))
        return self.body(self.embed(source), self.embed(target), tgt_mask=mask, src_key_padding_mask=padding)


def temporal() -> nn.Module:
    """Dilated causal convolutions with weight norm."""
    layers: list[nn.Module] = []
    for dilation in (1, 2, 4):
        conv = nn.Conv1d(8, 8, 2, dilation=dilation)
        layers += [nn.ConstantPad1d((dilation, 0), 0.0), nn.utils.parametrizations.weight_norm(conv), nn.GELU()]
    return nn.Sequential(*layers)


def _pair() -> Batch:
    return (torch.randint(1, VOCABULARY, (2, 10)), torch.randint(1, VOCABULARY, (2, 10))), {}


def _state() -> Batch:
    return (torch.randn(2, 6, 8), (torch.randn(2, 16), torch.randn(2, 16))), {}


SPECS = [
    Spec("bert", bert, tokens()),
    Spec("gpt2", gpt2, tokens()),
    Spec("gpt2-checkpointed", gpt2_checkpointed, tokens()),
    Spec("llama", llama, tokens()),
    Spec("mistral", mistral, tokens()),
    Spec("t5", EncoderDecoder, _pair),
    Spec("whisper", Whisper, lambda: ((torch.randn(2, 16, 32), torch.randint(VOCABULARY, (2, 8))), {})),
    Spec("clip", Clip, lambda: ((torch.randn(4, 3, 32, 32), torch.randint(VOCABULARY, (4, 8))), {})),
    Spec("mamba", Mamba, tokens()),
    Spec("moe-routed", routed_experts, tokens()),
    Spec("moe-layers", mixture, tokens()),
    Spec("moe-dense", DenseExperts, tokens()),
    Spec("lstm", lambda: Recurrent(nn.LSTM), tokens()),
    Spec("gru", lambda: Recurrent(nn.GRU), tokens()),
    Spec("lstm-cell", CellLoop, _state),
    Spec("nn.Transformer", Translation, _pair),
    Spec("tcn", temporal, lambda: ((torch.randn(2, 8, 16),), {})),
]
