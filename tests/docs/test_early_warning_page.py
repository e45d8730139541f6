"""The numbers of the page on early warning are recomputed from the rows of the recorded runs."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy.stats import chi2

from tests.data_scripts import load_script
from tests.docs.page_numbers import ROOT, check_page, page_module
from workbench.probes.batch import BatchProbe

pytestmark = pytest.mark.recorded

PAGE = "docs/results/early_warning.md"
SOON, LATE = 50, 500
PROBES = ("arithmetic", "gradients", "data", "limits")


@pytest.fixture(scope="module")
def runs():
    with xr.open_dataset(ROOT / "data" / "early_warning.nc") as data:
        return data.load().to_dataframe().query("set == 'locked'")


@pytest.fixture(scope="module")
def faulted(runs):
    return runs[runs["start"].notna() & ~runs["settings_show_it"]]


@pytest.fixture(scope="module")
def harmed(faulted):
    return faulted[faulted["is_harmful"]]


def share(n, of):
    return f"{n} of {of} ({100 * n / of:.0f} %)"


def n_soon(harmed, step):
    return int((harmed[step] - harmed["start"]).between(0, SOON).sum())


def claims_by_hand():
    """Return what the page says about faults written by hand, and about healthy losses."""
    rows, floor = (pd.read_csv(ROOT / "data" / f"{name}.csv") for name in ("hand_faults", "loss_floor"))
    of_mask, healthy = rows[rows["fault"] == "lost mask"], rows[rows["fault"].isna()]
    at_once = rows[rows["fault"].isin(["random labels", "same batch"])]
    assert (at_once["delay"] <= 1).all()
    assert (at_once["cause"] == at_once["expected"]).all()
    assert (healthy["n_steps"] == 900).all()
    found = of_mask[of_mask["delay"] <= 5]
    assert (found["signal"] == "data").all()
    assert set(floor.query("set == 'locked'")["setup"]) == {"kan recall"}
    n_false = floor["n_rises"].sum() + floor["n_falls"].sum()
    return (
        f"found in {len(found)} of {len(of_mask)} runs within 5 steps",
        f"The loss reveals it in {found['signals'].str.contains('loss').sum()} of them",
        f"The {len(healthy)} healthy runs of 900 updates raise {healthy['n_alarms'].sum()} alarms",
        f"{n_false} false alarms in {floor['n_steps'].sum():,} healthy steps (`data/loss_floor.csv`)",
        f"{n_false} false alarms in {floor['n_steps'].sum():,} healthy steps",
        f"reaches {100 * floor['largest_fall'].max():.0f} % of the threshold",
    )


def claims_of_the_test_set():
    """Return what the page says about faults written by hand in the test set."""
    rows = pd.read_csv(ROOT / "data" / "hand_faults_locked.csv")
    healthy, faulted = rows[rows["kind"].isna()], rows[rows["kind"].notna()]
    n, n_steps = healthy["n_alarms"].sum(), healthy["n_steps"].sum()
    delay = faulted["first_step"] - faulted["start"]
    n_of = {name: healthy[f"n_{name}_alarms"].sum() for name in ("loss", "grad_norm")}
    missed = faulted[faulted["first_cause"] != faulted["expected_cause"]]
    assert (missed["first_cause"] == "unknown").all()
    assert sorted(zip(missed["setup"], missed["kind"], strict=True)) == [
        ("kan recall", "random labels"), ("kan recall", "same batch"), ("rms vit", "random labels"),
    ]  # fmt: skip
    assert missed.query("kind == 'same batch'")["first_signal"].item() == "loss fall"
    cases = load_script("warning_cases")
    task, probe = cases.build(cases.Case("kan recall", 1))[1], BatchProbe()
    common = np.mean([float(probe.take(task.batch(i)[0])["repeated_examples"]) for i in range(1500)])
    return (
        f"{(delay <= 25).sum()} of {len(faulted)} faults raise an alarm within 25 steps, the slowest after "
        f"{delay.max():g} steps",
        f"The {len(healthy)} healthy runs of 1,500 updates raise {n} alarms of any signal in {n_steps:,} steps",
        f"the rate is at most {np.ceil(1e5 * chi2.ppf(0.975, 2 * n + 2) / 2 / n_steps):g} in 100,000 steps (95 %)",
        f"the loss alone raises {n_of['loss']}, the gradient norm alone {n_of['grad_norm']}",
        f'In {len(missed)} runs the cause is "unknown"',
        f"where {100 * common:.0f} % of the examples of healthy batches occurred shortly before",
    )


def test_every_number_of_the_page(runs, faulted, harmed):
    of, healthy, failed_late = len(harmed), runs[runs["kind"] == ""], runs[runs["kind"] == "late"]
    soon = {name: n_soon(harmed, f"{name}_step") for name in ("first", "loss", "grad_norm")}
    delay = {name: (harmed[f"{name}_step"] - harmed["start"]).median() for name in soon}
    slow = harmed[harmed["harm_step"] - harmed["start"] > LATE]
    probed = slow[slow["first_signal"].isin(PROBES)]
    assert (probed["first_step"] - probed["start"]).max() < 20
    assert set(slow["first_signal"]) - set(PROBES) == {"grad_norm"}
    before = {name: int((slow[f"{name}_step"] < slow["harm_step"]).sum()) for name in ("loss", "grad_norm")}
    shown = runs[runs["settings_show_it"]]
    harmless = faulted[~faulted["is_harmful"]]
    attention = harmed[harmed["kind"].str.startswith("attention")]
    missed = harmed[harmed["first_step"].isna()]
    assert (set(missed["setup"]), set(missed["kind"])) == ({"kan recall"}, {"labels", "tokens"})
    assert missed["dose"].max() <= 0.05
    named = harmed["first_cause"] == harmed["expected_cause"]
    n_unknown = int((harmed["first_cause"] == "unknown").sum())
    others = harmed[~named & ~harmed["first_cause"].isin(["", "unknown"])]
    no_gradient = others[others["first_cause"] == "no_gradient"]
    assert (no_gradient["kind"] == "bucket").all()
    assert (no_gradient["dose"] == 1).all()
    false = healthy[healthy["n_alarms"] > 0].set_index("first_signal")
    floor = healthy["alarms_before"].str.contains("loss rise|loss fall")
    rate = 1e5 * chi2.ppf(0.975, 2 * floor.sum() + 2) / 2 / healthy["n_steps"].sum()
    fails = failed_late[failed_late["is_harmful"]]
    kinds = {name: failed_late[failed_late["name"].str.contains(name)]["is_harmful"] for name in ("qk_norm", "z_loss")}
    warned = int((fails["first_step"] < fails["harm_step"]).sum())
    assert not (fails[["loss_step", "grad_norm_step"]].lt(fails["harm_step"], axis=0)).any(axis=None)
    assert not harmed["first_signal"].str.contains("D2").any()
    assert (harmed["setup"].nunique(), harmed["family"].nunique(), faulted["kind"].nunique()) == (12, 12, 11)
    assert false["n_alarms"].tolist() == [1, 1, 1]
    assert (false.loc["largest_losses", "setup"], set(false.loc["loss rise", "setup"])) == ("glm4 bytes", {"rms vit"})
    assert f"at most {rate:.1f} in 100,000" in (ROOT / "docs/explanation/alarms.md").read_text()
    rates = sorted({name.split("_")[-2] for name in failed_late["name"]}, key=float)
    (length,) = {n for n, _ in failed_late["n_steps"].value_counts().head(1).items()}
    claims = (
        f"within 50 steps in {share(soon['first'], of).replace(' (', ' harmful faults (')}, with "
        f"{int(healthy['n_alarms'].sum())} false alarms in {int(healthy['n_steps'].sum()):,} healthy steps",
        f"the loss alone reaches {share(soon['loss'], of)}, the gradient norm alone {share(soon['grad_norm'], of)}",
        f"{len(faulted)} runs with a fault, {of} of them harmed",
        f"{delay['first']:g} step for all alarms, {delay['loss']:g} steps for the loss alone and "
        f"{delay['grad_norm']:g} steps for the gradient norm alone",
        f"corrupted data, is right in {share(int((harmed['expected_cause'] == 'corrupted_data').sum()), of)}",
        f"Of the {len(slow)} faults that harm after more than 500 steps, probes of arithmetic, gradients or labels are "
        f"the first to raise an alarm in {len(probed)}",
        f"the loss alone raises an alarm in {before['loss']} of them, the gradient norm alone in {before['grad_norm']}",
        f"in {int((shown['first_step'] - shown['start']).isin([0, 1]).sum())} of {len(shown)} runs",
        f"{int(harmless['first_step'].notna().sum())} of {len(harmless)} faults that did no harm within 1,000 steps",
        f"names the right cause in {share(int(named.sum()), of)}, another one in {len(others)}, and says that it is "
        f"unknown in {n_unknown}",
        f"All {len(missed)} harmed runs without an alarm",
        f"In {len(no_gradient)} runs all gradients are lost",
        f"in GLM-4, at step {false.loc['largest_losses', 'first_step']:g}",
        *(f"at step {step:g}" for step in false.loc["loss rise", "first_step"]),
        f"it raises {floor.sum()} in {int(healthy['n_steps'].sum()):,}",
        f"for {length:,} steps at peak learning rates of {rates[0]} and {rates[1]}",
        f"{len(fails)} of {len(failed_late)} fail: {kinds['qk_norm'].sum()} of {len(kinds['qk_norm'])} with QK-norm, "
        f"and {kinds['z_loss'].sum()} of {len(kinds['z_loss'])} with z-loss",
        f"visibly worse in {warned} of the {len(fails)}",
        f"first alarm in {int((attention['first_signal'] == 'arithmetic').sum())} of {len(attention)} harmful faults",
        *claims_by_hand(),
        *claims_of_the_test_set(),
    )
    settings = (
        "found 137 of 143 (96 %) with 1 false alarm", "restart of the learning rate at step 2,000",
        "its loss from 0.001 to 0.19", "standard deviations over 50 steps", "Intervals are 95 %",
        "an alarm within 50 steps", ", within 20 steps",
        "(Qwen2, GPT-NeoX, Gemma 2, Qwen3-MoE; width 64, three blocks)", "random step from 400 to 600",
        "learned abruptly after 2,500 steps", "watched for 100 steps", "count alarms within 100 steps",
        "about step 5,000, the spectrum of dW at 13,000, the gradient norm at 21,000, the loss at 22,000",  # published
    )  # fmt: skip
    check_page(PAGE, claims, settings=settings)


def test_goals_that_are_missed_are_counted(runs):
    """The page says how many; the table of the page is compared with counts of its own below."""
    table = page_module(PAGE).goals()
    counts = table["all alarms"][:-1].str.extract(r"(\d+) of (\d+)").astype(float)
    asked = table["target"][:-1].str.extract(r"(\d+) %")[0].astype(float) / 100
    is_missed = counts[0] < asked * counts[1]
    healthy = runs[runs["kind"] == ""]
    assert is_missed.sum() + (healthy["n_alarms"].sum() / healthy["n_steps"].sum() > 1e-5) == 5
    (nearly,) = table.index[:-1][is_missed & (counts[0] + 1 >= asked * counts[1])]
    assert table.loc[nearly, "goal"] == "alarm at the latest when the loss is visibly worse"
    assert len(table) == 6


def test_the_tables_have_the_counts_of_the_runs(runs, harmed):
    module = page_module(PAGE)
    goals = module.goals().set_index("goal")
    of = len(harmed)
    soon = goals.loc[f"alarm within {SOON} steps of the onset"]
    for column, step in {"all alarms": "first_step", "loss alone": "loss_step"}.items():
        assert soon[column].startswith(share(n_soon(harmed, step), of)[:-1])
    named = harmed["first_cause"] == harmed["expected_cause"]
    assert goals.loc["cause named by the first alarm", "all alarms"].startswith(f"{named.sum()} of {of} ")
    kinds = module.kinds().set_index("kind")
    assert kinds["harmed"].sum() == of
    for kind, own in harmed.groupby("kind"):
        assert kinds.loc[kind, "soon"] == n_soon(own, "first_step")
        assert kinds.loc[kind, "cause named first"] == (own["first_cause"] == own["expected_cause"]).sum()
        delay = (own["first_step"] - own["start"]).median()
        assert kinds.loc[kind, "delay"] == ("" if np.isnan(delay) else f"{delay:g}")
    misses = module.misses()
    late = ~(harmed["first_step"] - harmed["start"]).between(0, SOON)
    assert len(misses) == (late | ~named).sum()
    onsets = sorted(harmed["start"][late | ~named].map("{:g}".format))
    assert sorted(misses["onset"]) == onsets
    failed = runs[(runs["kind"] == "late") & runs["is_harmful"]]
    lead = (failed["harm_step"] - failed["first_step"]).map(lambda n: "none" if pd.isna(n) else f"{n:g}")
    assert sorted(module.late()["steps before"]) == sorted(lead)


def test_the_table_of_the_test_set_counts_every_fault_once():
    rows = pd.read_csv(ROOT / "data" / "hand_faults_locked.csv")
    table = page_module(PAGE).by_hand_locked().set_index("fault")
    assert set(table.index) == set(rows["kind"].dropna())
    for kind, own in rows.groupby("kind"):
        of, delay = table.loc[kind], own["first_step"] - own["start"]
        assert int(of["runs"]) == len(own)
        assert int(of["alarm within 25 steps"]) == (delay <= 25).sum()
        assert int(of["within 100 steps"]) == own["first_step"].notna().sum()
        named = [int(of[name]) for name in ("cause named right", "unknown", "wrong")]
        assert sum(named) == own["first_cause"].notna().sum()
        assert named[1] == (own["first_cause"] == "unknown").sum()
        assert named[0] == ((own["first_cause"] == own["expected_cause"]) & (own["first_cause"] != "unknown")).sum()
        alone = [own[step].notna().sum() for step in ("loss_step", "grad_norm_step")]
        assert [int(of[name]) for name in ("loss alone", "gradient norm alone")] == alone
        assert int(of["loss alone, with its floor"]) == (own["loss_step"].notna() | own["floor_step"].notna()).sum()
