"""Greedy generation by a plain PyTorch decoder with a cache, for comparison; needs PyTorch alone.

    PYTHON tests/bench/torch_generate.py D HEADS LAYERS FF LENGTH VOCAB BATCH PROMPT ROUNDS

Run by `tests.bench.generate` with an interpreter that has PyTorch. The decoder of torch_decoder.py,
eager; keys and values are written into arrays of LENGTH tokens, and the tokens so far are read.
Prints one line of JSON: the seconds of each round, in which BATCH rows are gone on from PROMPT
tokens to LENGTH.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch_decoder import TorchDecoder


def read(model, tokens, start, caches):
    """Returns the likeliest token behind `tokens` [B, T], which are the ones from `start` on."""
    batch, count = tokens.shape
    end = start + count
    x = model.tokens(tokens) + model.positions(torch.arange(start, end, device=tokens.device))
    for block, (keys, values) in zip(model.blocks, caches, strict=True):
        parts = block.qkv(block.norms[0](x)).view(batch, count, 3, block.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        keys[:, :, start:end], values[:, :, start:end] = k, v
        mixed = F.scaled_dot_product_attention(
            q, keys[:, :, :end], values[:, :, :end], is_causal=count > 1
        )
        x = x + block.out(mixed.transpose(1, 2).reshape(batch, count, -1))
        x = x + block.down(F.gelu(block.up(block.norms[1](x)), approximate='tanh'))
    return model.readout(model.norm(x[:, -1:])).argmax(-1)


@torch.inference_mode()
def main():
    *shape, batch, prompt, rounds = map(int, sys.argv[1:])
    width, heads, layers, hidden, length, vocab = shape
    torch.manual_seed(0)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model = TorchDecoder(width, heads, layers, hidden, length, vocab).to(device)
    size = (batch, heads, length, width // heads)
    caches = [[torch.zeros(size, device=device) for _ in 'kv'] for _ in range(layers)]
    first = torch.randint(vocab, (batch, prompt), device=device)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        tokens = read(model, first, 0, caches)
        for place in range(prompt, length - 1):
            tokens = read(model, tokens, place, caches)
        tokens.tolist()  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    print(json.dumps({'seconds': seconds}))


if __name__ == '__main__':
    main()
