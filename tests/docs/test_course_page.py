"""The table of the page of the course is that of the recorded practice cases."""

import numpy as np
import pytest
import xarray as xr

from tests.docs.page_numbers import ROOT, page_module, text_of

pytestmark = pytest.mark.recorded


@pytest.fixture(scope="module")
def cases():
    return xr.load_dataset(ROOT / "data" / "patients.nc")


def test_the_board_has_the_means_of_the_cases(cases):
    table = page_module("docs/course.md").board().set_index(["level", "program"])
    for (level, player), row in table.iterrows():
        at = np.ones(cases.sizes["patient"], bool) if level == "all" else cases["level"].values == level
        of = cases.sel(player=player).isel(patient=at)
        assert row["cases"] == at.sum()
        assert float(row["points"]) == pytest.approx(of["board_points"].values.mean(), abs=0.06)
        assert float(row["causes right"]) == pytest.approx(of["board_are_causes_right"].values.mean(), abs=0.006)
        assert float(row["cures that work"]) == pytest.approx(of["board_does_cure_work"].values.mean(), abs=0.006)


def test_what_the_page_says_about_the_settings_alone_is_so(cases):
    text = text_of("docs/course.md")
    assert "more points than the settings alone in levels 1 to 4; in level 5, fewer" in text

    def lead(name, level):
        """Return by how much the mean of `wb.diagnose` is larger than that of the settings alone."""
        of = cases[f"board_{name}"].isel(patient=cases["level"].values == level)
        return float(of.sel(player="wb.diagnose").mean() - of.sel(player="settings alone").mean())

    assert min(lead("points", level) for level in (1, 2, 3, 4)) > 2
    assert lead("points", 5) < -2
    assert lead("are_causes_right", 5) == pytest.approx(0, abs=0.06)
    assert lead("spent", 5) == pytest.approx(0.45, abs=0.05)
