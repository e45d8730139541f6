"""Measured properties of the colors: contrast on both themes, and the ramp with color vision deficiencies."""

import itertools

import numpy as np
import pytest

from workbench.plots.style import DEPTH_RAMP, MODEL_COLORS, NEUTRAL, depth_colors, model_style

BACKGROUNDS = ("#ffffff", "#111111")
#: Machado, Oliveira & Fernandes 2009, full severity, on linear RGB.
DEFICIENCIES = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(color):
    channel = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    dim, bright = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (one, other))
    return (bright + 0.05) / (dim + 0.05)


def lab(rgb):
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
    )
    xyz = to_xyz @ np.clip(rgb, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(one, other, deficiency):
    """Return the CIE 1976 color difference for a viewer with the deficiency; 2.3 is just noticeable."""
    matrix = np.array(DEFICIENCIES[deficiency])
    return float(np.linalg.norm(lab(matrix @ linear(one)) - lab(matrix @ linear(other))))


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("n_layers", [1, 2, 4, 7, 24, 96])
def test_every_depth_is_visible_in_both_themes(n_layers, background):
    colors = depth_colors(n_layers)
    assert len(colors) == n_layers
    assert min(contrast(color, background) for color in colors) >= 3


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_text_and_models_are_visible_in_both_themes(background):
    assert contrast(NEUTRAL, background) >= 4.2
    assert min(contrast(color, background) for color in MODEL_COLORS) >= 3.8


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_shallow_and_deep_layers_differ_with_any_color_vision(deficiency):
    assert distance(DEPTH_RAMP[0], DEPTH_RAMP[-1], deficiency) > 120


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("n_layers", range(2, 8))
def test_adjacent_layers_of_few_differ_with_any_color_vision(n_layers, deficiency):
    colors = depth_colors(n_layers)
    assert min(distance(a, b, deficiency) for a, b in itertools.pairwise(colors)) > 18


def test_models_differ_without_color():
    looks = [model_style(i) for i in range(12)]
    assert len({(look["marker"], look["dash"]) for look in looks}) == 12


def test_eight_models_differ_in_color():
    assert min(distance(a, b, "normal") for a, b in itertools.combinations(MODEL_COLORS, 2)) > 25
