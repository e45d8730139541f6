"""Spectra of query-key updates against dense products; scores and entropy against a loop."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.about import about, says
from tests.monitors.test_matrices import draw
from workbench.errors import OptionError
from workbench.monitors import attention_health as attention
from workbench.monitors.attention_health import (
    measure_attention,
    measure_logits,
    qk_update_spectrum,
)
from workbench.monitors.matrices import effective_rank, frobenius_norm, spectral_entropy, stable_rank

TERMS = ("D2", "D3", "dWq", "dWk", "W")


def stored(*shape, seed=0):
    """Return numbers with few digits, so that their sums and differences are exact, like those of float32 weights."""
    return (2**12 * draw(*shape, seed=seed)).round() / 2**12


def low_rank(weight, rank, seed):
    n = weight.shape[-1]
    left, right = draw(*weight.shape[:-1], rank, seed=seed), draw(*weight.shape[:-2], rank, n, seed=seed + 1)
    return (4 * left).round() @ (4 * right).round() / 2**10


#: Changes of a pair of weights: (queries, keys) before -> (queries, keys) after.
MOVES = {
    "generic": lambda q, k: (q + 1e-3 * draw(*q.shape, seed=5), k + 1e-3 * draw(*k.shape, seed=6)),
    "as float32 stores it": lambda q, k: (q * (1 + 1e-6), k + 1e-7 * draw(*k.shape, seed=6)),
    "by rank one": lambda q, k: (q + low_rank(q, 1, 5), k + low_rank(k, 1, 7)),
    "along itself": lambda q, k: (1.001 * q, 1.001 * k),
    "queries alone": lambda q, k: (q + 1e-3 * draw(*q.shape, seed=5), k.clone()),
    "not at all": lambda q, k: (q.clone(), k.clone()),
    "far": lambda q, k: (draw(*q.shape, seed=5), draw(*k.shape, seed=6)),
}


@pytest.mark.parametrize(("d", "head_dim", "n_kv"), [(24, 4, 4), (24, 4, 2), (24, 4, 1), (10, 6, 4), (3, 5, 4)])
@pytest.mark.parametrize("move", MOVES)
def test_spectra_are_those_of_the_dense_products(move, d, head_dim, n_kv):
    wq0, wk0 = stored(4, d, head_dim), stored(n_kv, d, head_dim, seed=1)
    wq1, wk1 = MOVES[move](wq0, wk0)
    spectra = qk_update_spectrum(wq0, wk0, wq1, wk1)
    assert tuple(spectra) == TERMS
    for h in range(4):
        k = h // (4 // n_kv)
        dense = oracle.qk_terms(wq0[h].numpy(), wk0[k].numpy(), wq1[h].numpy(), wk1[k].numpy())
        for term, matrix in dense.items():
            s = spectra[term][h]
            assert len(s) == min(d, 2 * head_dim if term == "D2" else head_dim)
            assert (s.diff() <= 0).all()
            assert frobenius_norm(s).item() == pytest.approx(np.linalg.norm(matrix), rel=1e-9)
            # Values below 1e-7 of the largest, which have no digits, matter to small powers.
            for alpha, tolerance in {0.5: 1e-4, 1.0: 1e-6, 2.0: 1e-9}.items():
                found = effective_rank(s, alpha=alpha).item()
                if not matrix.any():
                    assert math.isnan(found)
                else:
                    assert found == pytest.approx(oracle.effective_rank(matrix, alpha), rel=tolerance)
            if matrix.any():
                expected = (np.linalg.norm(matrix) / np.linalg.norm(matrix, 2)) ** 2
                assert stable_rank(s).item() == pytest.approx(expected, rel=1e-9)


@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 12)),
    n_per_key=st.sampled_from([1, 2]),
    exponents=st.tuples(st.integers(-9, 0), st.integers(-9, 0)),
    rank=st.integers(0, 3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
@settings(deadline=None, max_examples=60)
def test_spectra_of_weights_of_any_shape_and_scale(seed, shape, n_per_key, exponents, rank, dtype):
    """Columns of weights and changes spread over up to nine decades, and changes of low rank."""
    d, head_dim = shape
    grades = [10.0 ** torch.linspace(0, e, head_dim, dtype=torch.float64) for e in exponents]
    wq0, wk0 = draw(2, d, head_dim, seed=seed) * grades[0], draw(2 // n_per_key, d, head_dim, seed=seed + 1)
    wq1, wk1 = (w + 2.0**-8 * low_rank(w, rank, seed + 2) * grades[1] for w in (wq0, wk0))
    wq0, wk0, wq1, wk1 = (w.to(dtype) for w in (wq0, wk0, wq1, wk1))
    spectra = qk_update_spectrum(wq0, wk0, wq1, wk1)
    for h in range(2):
        pair = (w[h // n_per_key if w is wk0 or w is wk1 else h].double().numpy() for w in (wq0, wk0, wq1, wk1))
        for term, matrix in oracle.qk_terms(*pair).items():
            s, dense = spectra[term][h], torch.from_numpy(np.linalg.svd(matrix, compute_uv=False))
            for measure in (frobenius_norm, stable_rank, effective_rank, spectral_entropy):
                torch.testing.assert_close(measure(s), measure(dense), rtol=1e-8, atol=1e-8, equal_nan=True)


def test_a_change_of_basis_alone_has_a_second_order_change_to_fewer_digits():
    """Its first order is zero; what remains is 1e-3 of each of the two terms that cancel."""
    wq0, wk0, turn = draw(4, 48, 8), draw(4, 48, 8, seed=1), 1e-3 * draw(4, 8, 8, seed=2)
    noise = 1e-6 * draw(2, 4, 48, 8, seed=3)
    wq1, wk1 = wq0 @ (torch.eye(8) + turn) + noise[0], wk0 @ (torch.eye(8) - turn.mT) + noise[1]
    spectra = qk_update_spectrum(wq0, wk0, wq1, wk1)
    for h in range(4):
        dense = oracle.qk_terms(*(w[h].numpy() for w in (wq0, wk0, wq1, wk1)))["D2"]
        assert frobenius_norm(spectra["D2"])[h].item() == pytest.approx(np.linalg.norm(dense), rel=1e-8)
        assert effective_rank(spectra["D2"])[h].item() == pytest.approx(oracle.effective_rank(dense, 2), rel=1e-8)


def test_terms_that_cancel_are_zero_without_rounding_errors():
    wq, wk = stored(2, 24, 4), stored(2, 24, 4, seed=1)
    spectra = qk_update_spectrum(wq, wk, (1 + 2**-10) * wq, (1 - 2**-10) * wk)  # D2 = (2^-10 - 2^-10) wq wk'
    assert (spectra["D2"] == 0).all()
    assert (spectra["D3"] > 0).all()


@given(st.integers(0, 10**6), st.sampled_from(["generic", "far"]))
@settings(deadline=None, max_examples=20)
def test_a_change_of_basis_within_the_heads_leaves_the_products(seed, move):
    """(Wq R, Wk R^-T) has the same attention; the basis R is the same before and after."""
    wq0, wk0 = draw(2, 12, 3, seed=seed), draw(2, 12, 3, seed=seed + 1)
    wq1, wk1 = MOVES[move](wq0, wk0)
    basis = draw(2, 3, 3, seed=seed + 2) + 3 * torch.eye(3)
    back = torch.linalg.inv(basis).mT
    plain = qk_update_spectrum(wq0, wk0, wq1, wk1)
    turned = qk_update_spectrum(wq0 @ basis, wk0 @ back, wq1 @ basis, wk1 @ back)
    scale = torch.linalg.cond(basis).amax().item()
    for term in ("D2", "D3", "W"):
        size = plain[term].amax().item()
        torch.testing.assert_close(turned[term], plain[term], rtol=1e-7, atol=1e-12 * scale**2 * (1 + size))
    assert not torch.allclose(turned["dWq"], plain["dWq"], rtol=1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_head_that_is_not_finite_is_unknown_and_the_others_are_not(bad):
    wq0, wk0 = draw(4, 12, 3), draw(2, 12, 3, seed=1)
    wq1, wk1 = MOVES["generic"](wq0, wk0)
    wq1[0, 0, 0] = bad
    wk0[1, 3, 1] = bad  # serves the heads 2 and 3
    for s in qk_update_spectrum(wq0, wk0, wq1, wk1).values():
        assert s[[0, 2, 3]].isnan().all()
        assert s[1].isfinite().all()


@pytest.mark.parametrize(
    ("shapes", "name", "value"),
    [
        (((4, 8, 3), (3, 8, 3)), "query heads", 4),
        (((4, 8, 3), (4, 8, 2)), "Query weights", (4, 8, 2)),
        (((4, 8, 3), (4, 7, 3)), "Query weights", (4, 7, 3)),
        (((2, 4, 8, 3), (4, 8, 3)), "Query weights", (4, 8, 3)),
        (((8, 3), (8, 3)), "Query weights", (8, 3)),
    ],
)
def test_shapes_that_do_not_match(shapes, name, value):
    wq, wk = torch.ones(shapes[0]), torch.ones(shapes[1])
    with pytest.raises(OptionError, check=about(name, value)):
        qk_update_spectrum(wq, wk, wq, wk)


# --- scores ----------------------------------------------------------------------------------------------------------

B, H, T, DH = 3, 4, 9, 5


def by_hand(q, k, scale, visible, rows=None):
    """Return (logit max, entropy, fraction) by head; visible has shape (batch, head, token, token)."""
    columns = []
    for h in range(q.shape[1]):
        found = []
        for b in range(len(q)):
            seen = visible[b, h] if rows is None else visible[b, h] & rows[b][:, None]
            found += oracle.attention_rows(q[b, h].numpy(), k[b, h].numpy(), scale, seen.numpy())
        shares = [entropy / math.log(n) for _, entropy, n in found if n > 1]
        columns.append((max(f[0] for f in found), np.mean([f[1] for f in found]), np.mean(shares)))
    return torch.tensor(columns, dtype=torch.float64).T


def check(health, expected, **tolerance):
    found = torch.stack([health.logit_max, health.entropy, health.entropy_share])
    torch.testing.assert_close(found, expected, **tolerance)


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
WINDOW = CAUSAL.triu(-2)
PADDED = torch.arange(T) < torch.tensor([T, 4, 6])[:, None]  # (batch, token)


@pytest.mark.parametrize("n_kv", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("kind", ["none", "causal", "window", "added", "padding", "both"])
def test_attention(kind, scale, n_kv, monkeypatch):
    monkeypatch.setattr(attention, "_SCORES_ON_HOST", 2 * H * T + 1)  # two queries at a time
    q, k = 3 * draw(B, H, T, DH), draw(B, n_kv, T, DH, seed=1)
    padding = PADDED[:, None, None, :]
    mask, is_causal, visible = {
        "none": (None, False, torch.ones(T, T, dtype=torch.bool)),
        "causal": (None, True, CAUSAL),
        "window": (WINDOW, False, WINDOW),
        "added": (torch.zeros(T, T).masked_fill(~WINDOW, -math.inf), False, WINDOW),
        "padding": (padding, False, padding),
        "both": (padding, True, CAUSAL & padding),
    }[kind]
    visible = visible.expand(B, H, T, T)
    rows = PADDED if kind == "both" else None
    health = measure_attention(q, k, scale=scale, is_causal=is_causal, mask=mask, rows=rows).health
    expected = by_hand(q, k.repeat_interleave(H // n_kv, 1), scale or DH**-0.5, visible, rows)
    check(health, expected, rtol=1e-10, atol=1e-12)


def test_a_mask_that_adds_a_bias():
    q, k, bias = draw(B, H, T, DH), draw(B, H, T, DH, seed=1), draw(1, H, T, T, seed=2)
    logits = q @ k.mT + bias
    p = logits.softmax(-1)
    health = measure_attention(q, k, scale=1.0, mask=bias).health
    torch.testing.assert_close(health.logit_max, logits.amax((0, 2, 3)))
    torch.testing.assert_close(health.entropy, torch.special.entr(p).sum(-1).mean((0, 2)))


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_scores_as_they_enter_a_softmax(hidden):
    q, k = draw(B, H, T, DH), draw(B, H, T, DH, seed=1)
    logits = (DH**-0.5 * q @ k.mT).float().masked_fill(~CAUSAL, hidden)
    expected = measure_attention(q.float(), k.float(), is_causal=True).health
    found = measure_logits(logits).health
    for name in ("logit_max", "entropy", "entropy_share"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-6)


def test_collapsed_and_even_attention():
    k = torch.eye(4)[None, None]
    health = measure_attention(1e6 * k, k, scale=1.0).health
    assert (health.logit_max.item(), health.entropy.item(), health.entropy_share.item()) == (1e6, 0, 0)
    health = measure_attention(0 * k, k).health
    assert health.entropy.item() == pytest.approx(math.log(4))
    assert health.entropy_share.item() == pytest.approx(1)


def test_a_head_that_is_not_finite():
    q, k = draw(B, H, T, DH), draw(B, H, T, DH, seed=1)
    q[1, 2, 3, 0] = math.nan
    health = measure_attention(q, k, is_causal=True).health
    for values in (health.logit_max, health.entropy, health.entropy_share):
        assert values[2].isnan()
        assert values[[0, 1, 3]].isfinite().all()


def test_without_visible_tokens():
    health = measure_attention(draw(1, 2, 3, 4), draw(1, 2, 3, 4), mask=torch.zeros(3, 3, dtype=torch.bool)).health
    assert all(values.isnan().all() for values in (health.logit_max, health.entropy, health.entropy_share))
    assert (
        measure_attention(draw(1, 2, 1, 4), draw(1, 2, 1, 4)).health.entropy_share.isnan().all()
    )  # only one visible token


def test_heads_that_do_not_match():
    with pytest.raises(OptionError, check=says("Query heads must be a multiple of the key heads")):
        measure_attention(draw(1, 4, 2, 3), draw(1, 3, 2, 3))
