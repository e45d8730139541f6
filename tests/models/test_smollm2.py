"""Opening, tokenizing and profiling a real pretrained model."""

import numpy as np
import pytest

import workbench as wb
from workbench.errors import CheckpointError

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def subject():
    try:
        path = wb.samples.smollm2(download=False)
    except CheckpointError as error:
        pytest.skip(str(error))
    return wb.open_checkpoint(path)


def test_the_weights_continue_a_prompt_correctly(subject):
    prompt = subject.tokenize("The capital of France is")
    found = subject.model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert subject.tokenizer.decode(found[0]) == "The capital of France is Paris."


@pytest.mark.slow
def test_profile_of_a_real_model(subject):
    passages = wb.tasks.reference_passages(24, n_characters=300)
    with pytest.warns(wb.koopman.RankWarning, match=r"in layer 0 \(model.layers.0\)"):
        spectra = wb.profile(subject, passages, n_snapshots=1024, skip_first=1, progress=False)
    assert spectra.sizes == {"layer": 30, "mode": 576}
    assert spectra.attrs["stack"] == "model.layers"
    # The first block's input depends only on the token, so there are as many states as different tokens.
    assert 300 < int(spectra["rank"][0]) < 576
    assert (spectra["rank"][1:] == 576).all()
    assert np.isfinite(spectra.eigenvalue[1:]).all()
    assert (spectra.significant_digits > 5).all()
    thirds = wb.depth_thirds(spectra)
    assert list(thirds.third.values) == ["early", "middle", "late"]
    assert float(thirds.near_unit_mass.sel(third="late")) > float(thirds.near_unit_mass.sel(third="early"))
