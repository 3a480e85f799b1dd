"""Choosing public examples: by uncertainty, from many places, near private ones; labels, and fine-tuning."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels.accounting import BudgetExceededError, Gaussian, Ledger, PureEpsilon
from dpkernels.random import Key
from dpkernels.selection import (
    DiversePublic,
    FineTuning,
    NearPrivate,
    PCARelease,
    SupportRelease,
    Views,
    ask,
    difference,
    entropy,
    fine_tune,
    most_uncertain,
    public_pca,
    uncertain,
    views,
)


def test_uncertainty_is_the_formula() -> None:
    logits = torch.randn(20, 5)
    p = logits.double().softmax(1)
    torch.testing.assert_close(entropy(logits), -(p * p.log()).sum(1))
    ordered = logits.double().sort(1).values
    torch.testing.assert_close(difference(logits), ordered[:, -2] - ordered[:, -1])
    odd = torch.tensor([[0.0, 0.0], [1e30, -1e30], [math.nan, 0.0], [-math.inf, 0.0]])
    assert entropy(odd).tolist() == [math.log(2), 0.0, -math.inf, -math.inf]
    assert difference(odd)[2:].tolist() == [-math.inf, -math.inf]
    assert most_uncertain(torch.tensor([1.0, 3.0, 3.0, 2.0]), 3).tolist() == [1, 2, 3]
    assert entropy(logits[:0]).shape == (0,)
    with pytest.raises(ValueError, match=r"logits must be floating point \[rows, classes\]"):
        entropy(torch.zeros(3, 1))


def test_views_are_what_the_last_layer_sees() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    examples = torch.randn(7, 3)
    seen = views(model, examples.split(3))
    torch.testing.assert_close(seen.embeddings, model[0](examples).tanh())
    torch.testing.assert_close(seen.logits, model[3](seen.embeddings))
    assert len(seen) == 7
    assert model.training
    assert not seen.logits.requires_grad
    assert not model[3]._forward_pre_hooks
    with pytest.raises(ValueError, match="model must end in a linear layer"):
        views(nn.Tanh(), [examples])
    with pytest.raises(ValueError, match="batches must give at least one batch"):
        views(model, [])


def scene(rows: int = 400) -> Views:
    """Four blobs of embeddings; the model is sure of the first half of each."""
    centres = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    embeddings = centres.repeat(rows // 4, 1) + 0.05 * torch.randn(rows, 4)
    margin = torch.where(torch.arange(rows) < rows // 2, 5.0, 0.1) + 0.01 * torch.rand(rows)
    return Views(embeddings, torch.stack([margin, torch.zeros(rows)], 1))


def test_public_pca_is_centred_and_orthonormal() -> None:
    rows = torch.randn(200, 3) * torch.tensor([1.0, 5.0, 0.1]) + 100
    found = public_pca(rows, 2)
    torch.testing.assert_close(found @ found.T, torch.eye(2, dtype=torch.float64))
    assert found[0, 1].abs() > 0.99
    with pytest.raises(ValueError, match="components must be between 1 and 3, got 4"):
        public_pca(rows, 4)


def test_diverse_public_takes_as_many_from_every_cluster() -> None:
    seen = scene()
    method = DiversePublic(candidates=200, clusters=4, components=3)
    chosen = method.select(seen, 40)
    assert (chosen >= 200).all()  # uncertain ones
    assert len(chosen.unique()) == 40
    assert (chosen % 4).bincount(minlength=4).tolist() == [10] * 4
    places = seen.embeddings.double() @ public_pca(seen.embeddings, 3).T
    for blob in range(4):  # those nearest to the centre
        members = torch.arange(200 + blob, 400, 4)
        distance = (places[members] - places[members].mean(0)).norm(dim=1)
        assert set(chosen.tolist()) & set(members.tolist()) == set(members[distance.argsort()[:10]].tolist())
    assert torch.equal(chosen[:12], method.select(seen, 12))
    assert len(method.select(seen, 200).unique()) == 200
    with pytest.raises(ValueError, match="count must be between 0 and the 200 candidates, got 201"):
        method.select(seen, 201)


def test_near_private_leaves_what_no_private_example_is_near_to() -> None:
    public, private = scene(400), scene(4000)
    keep = torch.arange(4000) % 4 < 2
    private = Views(private.embeddings[keep], private.logits[keep])  # two of the four blobs
    how = NearPrivate(200, PCARelease(1.5, 4.0), SupportRelease(1.0), components=4)
    plan = dpk.plan(dataset_size=50, batch_size=5, steps=10, delta=1e-5, noise_multiplier=2.0, compose_with=how.events)
    ledger = Ledger(budget=plan)
    chosen = how.select(public, private, 60, ledger=ledger, key=Key.from_seed(1))
    assert (chosen >= 200).all()
    assert len(chosen.unique()) == 60
    assert (chosen % 4 < 2).double().mean() > 0.9
    assert [entry.event for entry in ledger.entries()] == [Gaussian(4.0), PureEpsilon(1.0)] == list(how.events)
    alone = dpk.accounting.bound(how.events, 1e-5).upper  # the ledger keeps a share of delta for noise not ideal
    assert alone <= ledger.epsilon(1e-5) <= alone * (1 + 1e-6)
    with pytest.raises(BudgetExceededError):
        NearPrivate(200, PCARelease(1.5, 0.01), SupportRelease(1.0), 4).select(public, private, 60, ledger=ledger)
    assert len(ledger.entries()) == 2
    smoothed = NearPrivate(200, PCARelease(1.5, 4.0), SupportRelease(0.1), components=4, smoothing=50)
    chosen = smoothed.select(public, private, 60, ledger=None, key=Key.from_seed(1))  # noise of 14, counts of 10
    assert (chosen % 4 < 2).double().mean() > 0.8
    rough = replace(smoothed, smoothing=1).select(public, private, 60, ledger=None, key=Key.from_seed(1))
    assert (rough % 4 < 2).double().mean() < 0.8
    screened = replace(smoothed, least_support=150).select(public, private, 60, ledger=None, key=Key.from_seed(1))
    assert (screened % 4 < 2).double().mean() > 0.8
    order = uncertain(public, 200).tolist()  # those that are kept come in the order of uncertainty
    assert [order.index(i) for i in screened.tolist()] == sorted(order.index(i) for i in screened.tolist())
    empty = Views(private.embeddings[:0], private.logits[:0])
    assert len(how.select(public, empty, 60, ledger=None)) == 60


def test_free_methods_are_told_by_their_numbers() -> None:
    seen = scene()
    scores = difference(seen.logits)
    chosen = uncertain(seen, 30, "difference")
    assert scores[chosen].min() >= scores.sort(descending=True).values[29]
    with pytest.raises(ValueError, match="uncertainty must be one of entropy, difference, got 'margin'"):
        uncertain(seen, 30, "margin")
    with pytest.raises(ValueError, match="candidates must be a positive integer, got 0"):
        DiversePublic(0)
    with pytest.raises(ValueError, match=r"must be .* of as many rows"):
        Views(torch.zeros(3, 2), torch.zeros(4, 2))


def test_labels_come_from_the_oracle() -> None:
    truth = torch.tensor([3, -1, 5, 1])
    indices, labels = ask(lambda wanted: truth[wanted], torch.tensor([2, 1, 0]))
    assert (indices.tolist(), labels.tolist()) == ([2, 0], [5, 3])
    with pytest.raises(ValueError, match=r"the oracle must give int64 \(3,\), one label an example, got"):
        ask(lambda wanted: wanted[:1], torch.tensor([2, 1, 0]))


def test_fine_tuning_learns_and_leaves_the_model() -> None:
    torch.manual_seed(0)
    examples: Tensor = torch.randn(300, 6)
    labels = (examples[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = dpk.DPSGD(model, noise_multiplier=1.0, batch_size=10, max_grad_norm=0.1, lr=0.1)
    before = [p.clone() for p in model.parameters()]
    tuned = fine_tune(model, examples, labels, FineTuning(epochs=5, lr=0.2))
    assert (tuned(examples).argmax(1) == labels).double().mean() > 0.95
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not tuned.training
    again = fine_tune(model, examples, labels, FineTuning(epochs=5, lr=0.2))
    assert all(torch.equal(p, q) for p, q in zip(tuned.parameters(), again.parameters(), strict=True))
    assert all(
        torch.equal(p, q) for p, q in zip(fine_tune(model, examples[:0], labels[:0]).parameters(), before, strict=True)
    )
    del optimizer
    with pytest.raises(ValueError, match=r"labels must be \[300\], one an example, got \(2,\)"):
        fine_tune(model, examples, labels[:2])
    with pytest.raises(ValueError, match="epochs must be a positive integer, got 0"):
        FineTuning(epochs=0)
