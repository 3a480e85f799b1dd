"""ChaCha20 streams and their normals: published vectors, exactness, statistics, the same values however computed."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from dpkernels import _native
from dpkernels.ops.noise import STREAM_LENGTH, box_muller, gaussian, grid_gaussian, random_bits, total_variation
from dpkernels.reference import noise as reference

KEY = torch.arange(32, dtype=torch.uint8)
RANGES = [(0, 0), (0, 1), (0, 128), (5, 31), (100, 33), (127, 129), (1000, 1500), (2**34 - 7, 20)]


def key(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (32,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    yield
    torch.set_num_threads(before)


def blocks(key: torch.Tensor, domain: int, step: int, first: int, count: int) -> bytes:
    """Blocks of the RFC's key stream, from the stream's own order."""
    group = first // 16
    words = random_bits(key, domain, step, 128 * group, 128 * ((first + count - 1) // 16 - group + 1))
    ordered = words.view(-1, 8, 16).transpose(1, 2).reshape(-1, 8)[first - 16 * group :][:count]
    return ordered.contiguous().numpy().tobytes()


def nonce(text: str) -> tuple[int, int]:
    """(domain, step) of the RFC's 12 bytes: three little-endian words."""
    raw = bytes.fromhex(text.replace(":", ""))
    return int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:], "little")


def test_rfc_8439_block_function(isa: str) -> None:
    """Section 2.3.2."""
    domain, step = nonce("00:00:00:09:00:00:00:4a:00:00:00:00")
    assert blocks(KEY, domain, step, 1, 1).hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_rfc_8439_encryption(isa: str) -> None:
    """Section 2.4.2: the key stream of two blocks from counter 1, by its ciphertext."""
    plain = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
        b"sunscreen would be it."
    )
    domain, step = nonce("00:00:00:00:00:00:00:4a:00:00:00:00")
    stream = blocks(KEY, domain, step, 1, 2)
    assert bytes(a ^ b for a, b in zip(plain, stream, strict=False)).hex() == (
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b357"
        "1639d624e65152ab8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )


@pytest.mark.parametrize(
    ("secret", "nonce_text", "counter", "start"),
    [  # Appendix A.1, test vectors 1 to 5
        ("00" * 32, "00" * 12, 0, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"),
        ("00" * 32, "00" * 12, 1, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"),
        ("00" * 31 + "01", "00" * 12, 1, "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"),
        ("00ff" + "00" * 30, "00" * 12, 2, "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"),
        ("00" * 32, "00" * 11 + "02", 0, "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"),
    ],
)
def test_rfc_8439_more_vectors(secret: str, nonce_text: str, counter: int, start: str) -> None:
    domain, step = nonce(nonce_text)
    got = blocks(torch.tensor(list(bytes.fromhex(secret)), dtype=torch.uint8), domain, step % 2**63, counter, 1)
    assert got.hex()[:64] == start


@pytest.mark.parametrize(("offset", "count"), RANGES)
def test_matches_reference(isa: str, offset: int, count: int) -> None:
    args = (key(1), 3, 2**40 + 5, offset, count)
    assert torch.equal(random_bits(*args), reference.random_bits(*args))
    torch.testing.assert_close(gaussian(*args), reference.gaussian(*args), rtol=0, atol=1e-13)
    for grid in (0.5, 2.0**-20):
        got = grid_gaussian(*args, noise_std=0.75, grid=grid)
        assert torch.equal(got, reference.grid_gaussian(*args, noise_std=0.75, grid=grid))


def test_last_values_of_a_stream(isa: str) -> None:
    args = (KEY, 0, 0, STREAM_LENGTH - 40, 40)
    assert torch.equal(random_bits(*args), reference.random_bits(*args))


def test_same_values_for_any_chunks_threads_and_instruction_set() -> None:
    args = (key(2), 1, 9)
    calls = [
        random_bits,
        gaussian,
        lambda *a: grid_gaussian(*a, noise_std=3.0, grid=2.0**-30),
    ]
    for call in calls:
        with threads(1):
            whole = call(*args, 0, 70_000)
        for n in (2, 5):
            with threads(n):
                assert torch.equal(call(*args, 0, 70_000), whole)
        cut = [0, 1, 17, 128, 1000, 40_001, 70_000]
        pieces = [call(*args, a, b - a) for a, b in itertools.pairwise(cut)]
        assert torch.equal(torch.cat(pieces), whole)
    before, words, integers = _native.active_isa(), [], []
    for isa in _native.isas():
        _native.set_isa(isa)
        words.append(random_bits(*args, 0, 5000))
        integers.append(
            grid_gaussian(*args, 0, 200_000, noise_std=1.0, grid=2.0**-38)
        )  # thousands need more than double
    _native.set_isa(before)
    assert all(torch.equal(w, words[0]) for w in words)
    assert all(torch.equal(k, integers[0]) for k in integers)


def exact_pair(words: list[int]) -> tuple[mpmath.mpf, mpmath.mpf]:
    """The definition of csrc/common/exact_normal.h in 400 bits."""
    n, m, x, y = (w % 2**64 for w in words)
    with mpmath.workprec(400):
        u = (n + (x + mpmath.mpf(1) / 2) / 2**64) / mpmath.mpf(2) ** 64
        t = (m % 2**62 + (y + mpmath.mpf(1) / 8) / 2**64) / mpmath.mpf(2) ** 62 - mpmath.mpf(1) / 2
        radius = mpmath.sqrt(-2 * mpmath.log(u))
        a, b = radius * mpmath.cos(t * mpmath.pi / 2) * (-1 if m >> 63 else 1), radius * mpmath.sin(t * mpmath.pi / 2)
        return (b, a) if m >> 62 & 1 else (a, b)


def errors(words: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Absolute errors of double-double and of vector code, [pairs, 2] each; NaN where vector code declines."""
    exact, fast = box_muller(words)
    results = []
    with mpmath.workprec(400):
        for row, parts, quick in zip(words.tolist(), exact.tolist(), fast.tolist(), strict=True):
            truth = exact_pair(row)
            results.append(
                [abs(mpmath.mpf(p[0]) + p[1] - w) for p, w in zip(parts, truth, strict=True)]
                + [abs(mpmath.mpf(q) - w) for q, w in zip(quick, truth, strict=True)]
            )
    table = np.array(results, dtype=np.float64)
    return table[:, :2], table[:, 2:]


def test_normals_are_exact_to_the_stated_bounds(isa: str) -> None:
    """The mean error of double-double is what the total-variation bound rests on."""
    words = torch.from_numpy(np.random.default_rng(3).integers(-(2**63), 2**63, (1500, 4)))
    exact, fast = errors(words)
    assert exact.mean() < 2.0**-100 / 16
    assert np.nanmax(fast) < 2.0**-46 / 2
    assert np.isnan(fast).mean() < 0.01


def test_extreme_words(isa: str) -> None:
    """Radii of u near 2^-64 and near 1, and angles at the ends of their interval."""
    radii = [0, 1, 2, 2**40, 2**45, 2**46 + 3, 2**63 - 1, -(2**63), -1, -2, -(2**40), -(2**51), -(2**53)]
    angles = [0, -1, 2**61, 2**62, 2**62 - 1, -(2**63), 2**63 - 1, 12345]
    words = torch.tensor([(n, m, x, x) for n in radii for m in angles for x in (0, -1)])
    exact, fast = errors(words)
    assert exact.max() < 2.0**-80  # at the smallest radii, whose probability is 2^-60
    assert np.nanmax(fast) < 2.0**-46
    normals = box_muller(words)[0][..., 0]
    assert normals.isfinite().all()
    assert normals.abs().max() > 13.3  # u = 2^-129
    assert normals.square().sum(1).min() < 2.0**-120


def test_rounding_is_that_of_the_exact_normal(isa: str) -> None:
    """At a scale where a hundred of these values are too close to a boundary for double."""
    args, scale = (key(4), 0, 1, 0, 4096), 2.0**40
    got = grid_gaussian(*args, noise_std=1.0, grid=1 / scale).mul(scale)
    words = random_bits(*args).view(-1, 8, 16)
    firsts, seconds = words[:, 0::2].reshape(-1), words[:, 1::2].reshape(-1)
    integers = got.view(-1, 8, 16)
    pairs = torch.stack([integers[:, 0::2].reshape(-1), integers[:, 1::2].reshape(-1)], 1)
    # Extension words: the domain's top bit set, four pairs to a block in the order of the RFC.
    extension = reference.chacha20_blocks(args[0], torch.arange(512), (2**31, 1, 0)).view(-1, 2, 2)
    extension = extension[..., 0] | extension[..., 1] << 32
    exact = box_muller(torch.stack([firsts, seconds, extension[:, 0], extension[:, 1]], 1))[0]
    high, low = exact.mul(scale).unbind(2)
    nearest = (high + 0.5).floor()
    rest = high - nearest + low
    nearest = nearest + (rest > 0.5).double() - (rest < -0.5).double()
    assert ((rest.abs() - 0.5).abs() < 2.0**-46 * scale).sum() > 50
    assert torch.equal(pairs, nearest)


def test_values_lie_on_the_grid_and_addition_is_exact() -> None:
    """x + round(Z) == round(x + Z) for x on the grid, and no bit is lost."""
    grid = 2.0**-26
    args = (key(5), 0, 2, 0, 20_000)
    noise = grid_gaussian(*args, noise_std=0.7, grid=grid)
    assert torch.equal(noise / grid, (noise / grid).round())
    on_grid = (torch.randn(20_000, dtype=torch.float64) * 1000 / grid).round() * grid
    assert torch.equal((on_grid + noise) - on_grid, noise)
    shifted = ((on_grid + gaussian(*args) * 0.7) / grid).round() * grid
    assert ((on_grid + noise) != shifted).sum() <= 2  # only where double cannot round x + Z


@pytest.fixture(scope="module")
def normals() -> np.ndarray:
    return gaussian(key(6), 0, 7, 0, 2_000_000).numpy()


def test_moments(normals: np.ndarray) -> None:
    n = len(normals)
    for power, (expected, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96), 6: (15, 10170)}.items():
        assert abs((normals**power).mean() - expected) < 4.5 * math.sqrt(variance / n)


def test_distribution(normals: np.ndarray) -> None:
    assert stats.kstest(normals, "norm").pvalue > 1e-3
    for threshold in (1.0, 2.0, 3.0, 4.0, 4.5):
        probability = 2 * stats.norm.sf(threshold)
        count = int((np.abs(normals) > threshold).sum())
        assert 1e-4 < stats.binom.cdf(count, len(normals), probability) < 1 - 1e-4
    edges = stats.norm.ppf(np.linspace(0, 1, 201))
    assert stats.chisquare(np.histogram(normals, edges)[0]).pvalue > 1e-3


def test_pairs_are_independent(normals: np.ndarray) -> None:
    first, second = normals[: 15 * 128 * 1000].reshape(-1, 4, 2, 16).transpose(2, 0, 1, 3).reshape(2, -1)
    for f, g in ((first, second), (first**2, second**2), (np.abs(first), second)):
        assert abs(np.corrcoef(f, g)[0, 1]) < 4.5 / math.sqrt(len(first))
    angle = np.arctan2(second, first)
    assert stats.kstest(angle, stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > 1e-3


def test_steps_domains_keys_and_ranges_are_independent() -> None:
    count = 50_000
    streams = [
        gaussian(k, domain, step, offset, count)
        for k, domain, step, offset in [
            (key(7), 0, 0, 0),
            (key(7), 0, 1, 0),
            (key(7), 0, 2**32, 0),
            (key(7), 1, 0, 0),
            (key(8), 0, 0, 0),
            (key(7), 0, 0, count),
        ]
    ]
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert correlations.abs().max() < 4.5 / math.sqrt(count)
    for lag in (1, 2, 16, 32, 128):
        assert abs(float((streams[0][:-lag] * streams[0][lag:]).mean())) < 4.5 / math.sqrt(count)


def test_bits_are_fair() -> None:
    words = random_bits(key(9), 2, 0, 0, 200_000)
    for bit in range(64):
        assert abs(int((words >> bit & 1).sum()) - 100_000) < 4.5 * math.sqrt(50_000)


def test_total_variation_is_small_where_used() -> None:
    assert total_variation(10**11, noise_std=1.0, grid=2.0**-30) < 1e-9
    assert total_variation(1, noise_std=1.0, grid=0.5) == 2 * 3 * 2.0**-100


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.dpkernels.random_bits.default, (KEY, 1, 2, 3, 40))
    torch.library.opcheck(torch.ops.dpkernels.gaussian.default, (KEY, 1, 2, 3, 40))
    torch.library.opcheck(torch.ops.dpkernels.grid_gaussian.default, (KEY, 1, 2, 3, 40, 1.0, 0.25))
    torch.library.opcheck(torch.ops.dpkernels.box_muller.default, (torch.tensor([[2**60, 5, 6, 7]]),))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((KEY[:31], 0, 0, 0, 1), r"key must be a uint8 CPU tensor \[32\]"),
        ((KEY.long(), 0, 0, 0, 1), r"key must be a uint8 CPU tensor \[32\]"),
        (("secret", 0, 0, 0, 1), "key must be a uint8 CPU tensor"),
        ((KEY, 2**31, 0, 0, 1), "domain must be in"),
        ((KEY, -1, 0, 0, 1), "domain must be in"),
        ((KEY, 0, -1, 0, 1), "step must be in"),
        ((KEY, 0, 2**63, 0, 1), "step must be in"),
        ((KEY, 0, 0, STREAM_LENGTH, 1), "offset and count must stay within"),
        ((KEY, 0, 0, 0, -1), "offset and count must stay within"),
    ],
)
def test_errors_name_the_argument(args: tuple, words: str) -> None:
    for call in (random_bits, gaussian, lambda *a: grid_gaussian(*a, noise_std=1.0, grid=0.5)):
        with pytest.raises((ValueError, TypeError), match=words):
            call(*args)


@pytest.mark.parametrize(
    ("noise_std", "grid", "words"),
    [
        (1.0, 0.3, "grid must be a power of two"),
        (1.0, -0.5, "grid must be a power of two"),
        (1.0, math.nan, "grid must be a power of two"),
        (0.0, 0.5, "noise_std must be in"),
        (math.inf, 0.5, "noise_std must be in"),
        (2.0**41, 1.0, "noise_std must be in"),
    ],
)
def test_grid_errors_name_the_argument(noise_std: float, grid: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        grid_gaussian(KEY, 0, 0, 0, 1, noise_std=noise_std, grid=grid)
    with pytest.raises(RuntimeError):
        torch.ops.dpkernels.grid_gaussian(KEY, 0, 0, 0, 1, noise_std, grid)


def test_operators_refuse_what_would_leave_the_stream() -> None:
    for args in [(KEY, 0, 0, STREAM_LENGTH, 1), (KEY, 0, 0, -1, 1), (KEY, 0, 0, 0, -1), (KEY[:5], 0, 0, 0, 1)]:
        with pytest.raises(RuntimeError):
            torch.ops.dpkernels.random_bits(*args)
