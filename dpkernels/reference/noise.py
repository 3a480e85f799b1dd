"""ChaCha20 (RFC 8439, section 2.3) and the transformation of Box and Muller (1958), in 64-bit integers and doubles."""

import math

import torch
from torch import Tensor

_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_MASK = 0xFFFFFFFF


def _quarter_round(state: list[Tensor], a: int, b: int, c: int, d: int) -> None:
    for x, y, z, n in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[x] = (state[x] + state[y]) & _MASK
        t = state[z] ^ state[x]
        state[z] = (t << n | t >> (32 - n)) & _MASK


def chacha20_blocks(key: Tensor, counters: Tensor, nonce: tuple[int, int, int]) -> Tensor:
    """32-bit words int64 [blocks, 16] of the blocks ``counters``."""
    bytes_ = key.long().view(8, 4)
    words = [int(sum(int(b) << 8 * i for i, b in enumerate(word))) for word in bytes_]
    start = [torch.full_like(counters, w) for w in (*_CONSTANTS, *words)]
    start += [counters, *(torch.full_like(counters, w) for w in nonce)]
    state = list(start)
    for _ in range(10):
        for i in range(4):
            _quarter_round(state, i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            _quarter_round(state, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return torch.stack([(s + t) & _MASK for s, t in zip(start, state, strict=True)], 1)


def _groups(key: Tensor, domain: int, step: int, offset: int, count: int) -> Tensor:
    """Words int64 [groups, 8, 16] of the groups that the range touches."""
    counters = torch.arange(offset // 128 * 16, (offset + max(count, 1) - 1) // 128 * 16 + 16)
    blocks = chacha20_blocks(key, counters, (domain, step & _MASK, step >> 32))
    words = blocks[:, 0::2] | blocks[:, 1::2] << 32
    return words.view(-1, 16, 8).transpose(1, 2)


def random_bits(key: Tensor, domain: int, step: int, offset: int, count: int) -> Tensor:
    return _groups(key, domain, step, offset, count).reshape(-1)[offset % 128 :][:count]


def _unsigned(words: Tensor) -> Tensor:
    return (words >> 32 & _MASK).double() * 2**32 + (words & _MASK).double()


def _normals(n: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    radius = (-2 * torch.log((_unsigned(n) + 0.5) / 2.0**64)).sqrt()
    angle = math.pi / 2 * (_unsigned(m & 2**62 - 1) / 2**62 - 0.5)
    a = radius * angle.cos() * torch.where(m < 0, -1, 1)
    b = radius * angle.sin()
    swap = (m >> 62 & 1).bool()
    return torch.where(swap, b, a), torch.where(swap, a, b)


def gaussian(key: Tensor, domain: int, step: int, offset: int, count: int) -> Tensor:
    words = _groups(key, domain, step, offset, count)
    normals = torch.stack(_normals(words[:, 0::2], words[:, 1::2]), 2)
    return normals.reshape(-1)[offset % 128 :][:count]


def grid_gaussian(
    key: Tensor, domain: int, step: int, offset: int, count: int, *, noise_std: float, grid: float
) -> Tensor:
    return (gaussian(key, domain, step, offset, count) * noise_std / grid).round() * grid


def box_muller(words: Tensor) -> tuple[Tensor, Tensor]:
    normals = torch.stack(_normals(words[:, 0], words[:, 1]), 1)
    return torch.stack([normals, torch.zeros_like(normals)], 2), normals
