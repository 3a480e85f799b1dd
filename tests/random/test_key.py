"""A fresh key lives in one object of one process; a seeded one is its seed."""

import copy
import io
import multiprocessing
import os
import pickle

import pytest
import torch

from dpkernels.random import Domain, Key

DRAW = (Domain.NOISE, 3, 50)


def same(a: Key, b: Key) -> bool:
    return torch.equal(a.bits(*DRAW), b.bits(*DRAW))


def test_values_depend_on_key_domain_step_and_index_alone() -> None:
    key = Key.from_seed(1)
    assert torch.equal(key.bits(*DRAW), key.bits(*DRAW))
    assert torch.equal(key.bits(*DRAW)[20:], key.bits(Domain.NOISE, 3, 30, offset=20))
    assert torch.equal(key.normal(*DRAW)[20:], key.normal(Domain.NOISE, 3, 30, offset=20))
    grid = {"noise_std": 2.0, "grid": 2.0**-20}
    assert torch.equal(key.grid_normal(*DRAW, **grid)[7:], key.grid_normal(Domain.NOISE, 3, 43, offset=7, **grid))
    draws = [key.bits(domain, step, 50) for domain in Domain for step in (0, 1)] + [Key.from_seed(2).bits(*DRAW)]
    assert len({tuple(draw.tolist()) for draw in draws}) == 2 * len(Domain) + 1


def test_fresh_keys_differ() -> None:
    assert not same(Key.fresh(), Key.fresh())
    assert not Key.fresh().seeded


def test_seeds() -> None:
    assert same(Key.from_seed(5), Key.from_seed(5))
    assert Key.from_seed(5).seeded
    assert len({tuple(Key.from_seed(s).value.tolist()) for s in (0, 1, -1, 2**64, 2**64 + 1)}) == 5
    for seed in (1.0, "1", True, None):
        with pytest.raises(TypeError, match="seed must be an int, got"):
            Key.from_seed(seed)  # type: ignore[arg-type]


def through_torch_save(key: Key) -> Key:
    buffer = io.BytesIO()
    torch.save(key, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda key: pickle.loads(pickle.dumps(key)), through_torch_save]
)
def test_copies_of_a_fresh_key_are_new_and_of_a_seeded_one_equal(duplicate) -> None:
    fresh, seeded = Key.fresh(), Key.from_seed(7)
    assert not same(duplicate(fresh), fresh)
    assert not duplicate(fresh).seeded
    assert same(duplicate(seeded), seeded)
    assert duplicate(seeded).seeded


def test_no_key_material_in_files_or_text() -> None:
    key = Key.fresh()
    material = bytes(key.value.tolist())
    for n in (4, 8):
        assert not any(material[i : i + n] in pickle.dumps(key) for i in range(0, 32, n))
    assert repr(key) == "Key(fresh)"
    assert repr(Key.from_seed(123456789)) == "Key(seeded)"


def child_draws(keys: list[Key], connection) -> None:
    connection.send([key.bits(*DRAW).tolist() for key in keys])
    connection.close()


def test_forked_processes_get_new_fresh_keys() -> None:
    fresh, seeded = Key.fresh(), Key.from_seed(7)
    before, reproducible = fresh.bits(*DRAW).tolist(), seeded.bits(*DRAW).tolist()
    context = multiprocessing.get_context("fork")
    draws = [before]
    for _ in range(3):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=child_draws, args=([fresh, seeded], send))
        process.start()
        from_fresh, from_seeded = receive.recv()
        process.join()
        assert from_seeded == reproducible
        assert from_fresh not in draws
        draws.append(from_fresh)
    assert fresh.bits(*DRAW).tolist() == before  # the parent keeps its own


def test_a_fork_is_noticed_when_the_process_id_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process ids are used again (and are 1 in every container): the fork itself is counted too."""
    key = Key.fresh()
    before = key.bits(*DRAW)
    pid = os.getpid()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.getpid = lambda: pid
        os.write(write, b"new" if not torch.equal(key.bits(*DRAW), before) else b"old")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 3) == b"new"


def test_unknown_domain() -> None:
    with pytest.raises(ValueError, match="99 is not a valid Domain"):
        Key.fresh().bits(99, 0, 1)  # type: ignore[arg-type]


def test_a_stream_is_claimed_once() -> None:
    """Steps of a domain go up, from any first one; domains know nothing of one another."""
    for key in (Key.fresh(), Key.from_seed(1)):
        assert [key.claim(Domain.SCORE) for _ in range(3)] == [0, 1, 2]
        assert key.claim(Domain.SCORE, count=4) == 3
        assert key.claim(Domain.SCORE, 10) == 10
        assert key.free(Domain.SCORE) == 11
        for step in (0, 8, 10):
            with pytest.raises(RuntimeError, match=f"score stream of step {step} was drawn from this key before"):
                key.claim(Domain.SCORE, step)
        assert key.claim(Domain.SAMPLING, 2) == 2
        assert key.free(Domain.NOISE) == 0
        key.give_back(Domain.SCORE, 9)
        key.give_back(Domain.SCORE, 20)  # nothing to give back
        assert key.claim(Domain.SCORE) == 9


def test_claims_are_of_the_key_and_not_of_its_copies() -> None:
    fresh = Key.fresh()
    fresh.claim(Domain.NOISE, 5)
    assert copy.deepcopy(fresh).free(Domain.NOISE) == 0
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(fresh.claim(Domain.NOISE)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 9) == b"0"
    assert fresh.free(Domain.NOISE) == 6
