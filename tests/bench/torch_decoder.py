"""A training step of a plain PyTorch decoder, for comparison; imports nothing but PyTorch.

    PYTHON tests/bench/torch_decoder.py D HEADS LAYERS FF LENGTH VOCAB BATCH STEPS

Run by `tests.bench.attention` and `tests.bench.accelerator` with an interpreter that has PyTorch.
Pre-norm blocks, learned positions, GELU, F.scaled_dot_product_attention, AdamW, a readout of its
own. On a CPU eager, in float32; on a GPU compiled, in bfloat16. Prints one line of JSON:
milliseconds of each step, and the peak memory in GB.
"""

import json
import resource
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


class TorchBlock(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, False), nn.Linear(width, width, False)
        self.up, self.down = nn.Linear(width, hidden, False), nn.Linear(hidden, width, False)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate='tanh'))


class TorchDecoder(nn.Module):
    def __init__(self, width, heads, layers, hidden, length, vocab):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TorchBlock(width, heads, hidden) for _ in range(layers)))
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, vocab, False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        return self.readout(self.norm(self.blocks(x)))


def main():
    *shape, vocab, batch, steps = map(int, sys.argv[1:])
    width, heads, layers, hidden, length = shape
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = 'cuda' if on_gpu else 'cpu'
    model = TorchDecoder(width, heads, layers, hidden, length, vocab).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=on_gpu)
    run = torch.compile(model) if on_gpu else model
    tokens = torch.randint(vocab, (batch, length + 1), device=device)
    milliseconds = []
    for _ in range(steps):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            logits = run(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        if on_gpu:
            torch.cuda.synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - start))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = (torch.cuda.max_memory_allocated() if on_gpu else peak) / 1e9
    print(json.dumps({'ms': milliseconds, 'peak_gb': peak}))


if __name__ == '__main__':
    main()
