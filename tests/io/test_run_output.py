"""The output of a run: a part that cannot be written is reported once, and the others continue."""

import warnings

import workbench as wb
from tests.io.test_background_writer import spectra
from workbench.io.background_writer import BackgroundWriter
from workbench.io.run_output import RunOutput
from workbench.io.run_writer import RunWriter


def test_spectra_of_another_size_end_their_part_with_one_warning(tmp_path):
    output = RunOutput(BackgroundWriter(RunWriter(tmp_path / "run.zarr", {"state": "running"})))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, n_modes in ((0, 4), (1, 3), (2, 3), (3, 4)):
            output.add_dataset("spectra", spectra(step, n_modes=n_modes))
            output.add("monitors", step, {"loss": 1.0})
        output.close()
    run = wb.open_run(tmp_path / "run.zarr")
    assert len([w for w in caught if "Part 'spectra' is not written from step 1 on" in str(w.message)]) == 1
    events = run["events"].to_dataset()
    assert events["step"].values[events["kind"].values == "not recorded"].tolist() == [1]
    assert run["spectra"]["step"].values.tolist() == [0]
    assert run["monitors"]["step"].values.tolist() == [0, 1, 2, 3]
