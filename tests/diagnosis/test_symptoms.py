import json

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diagnosis.records import descent, monitors, optimizer, record, tree
from workbench.diagnosis import CAUSES, Rules, find_failure, read_record, read_symptoms
from workbench.diagnosis.diagnose import block_at_fault, diagnose
from workbench.diagnosis.symptoms.run_symptoms import odd_one, ramp
from workbench.schema.symptoms import SYMPTOM_TITLES, symptom_title


def symptoms_of(parts, **options):
    one = record(parts, **options)
    return read_symptoms(one, find_failure(one))


def test_a_jump_of_the_rate_is_found_at_its_step_and_a_warm_up_is_not_a_jump():
    loss, rate = descent(), np.full(200, 1e-3)
    loss[104:] += 4.0
    rate[:30] = 1e-3 * (np.arange(30) + 1) / 30
    assert symptoms_of({"monitors": monitors(loss, rate=rate)})["rate_jumps"].strength == 0
    rate[100:] *= 12
    symptom = symptoms_of({"monitors": monitors(loss, rate=rate)})["rate_jumps"]
    assert symptom.strength > 1
    assert symptom.step == 100
    assert symptom.value == pytest.approx(12)
    assert "by a factor of 12" in symptom.sentence


def test_a_decayed_rate_is_a_symptom_only_of_a_stalled_run():
    rate = np.maximum(1 - np.arange(200) / 20, 1e-3) * 1e-2
    stalled = symptoms_of({"monitors": monitors(descent(last=2.5), rate=rate)})
    assert stalled["rate_is_spent"].strength > 1
    loss = descent()
    loss[150:] += 3
    assert symptoms_of({"monitors": monitors(loss, rate=rate)})["rate_is_spent"].strength == 0


def test_a_failure_while_the_rate_rises_is_found():
    loss = descent()
    loss[40:] += 4.0
    rising = np.minimum(np.arange(200) + 1, 80) / 80 * 1e-2
    assert symptoms_of({"monitors": monitors(loss, rate=rising)})["fails_in_warm_up"].strength == 1
    early = np.minimum(np.arange(200) + 1, 10) / 10 * 1e-2
    assert symptoms_of({"monitors": monitors(loss, rate=early)})["fails_in_warm_up"].strength == 0


def test_a_large_eps_is_distinguished_from_lost_updates():
    # Adam changes a weight by about the learning rate; here 1e-3 for weights of RMS sqrt(25 / 1000).
    rms = 5 / np.sqrt(1000)
    ruled = symptoms_of(
        {"monitors": monitors(descent(last=2.9)), "optimizer": optimizer(over_eps=0.01, ratio=1e-5 / rms)}
    )
    lost = symptoms_of(
        {"monitors": monitors(descent(last=2.9)), "optimizer": optimizer(over_eps=1e5, ratio=1e-5 / rms)}
    )
    sound = symptoms_of(
        {"monitors": monitors(descent(last=2.9)), "optimizer": optimizer(over_eps=1e5, ratio=7e-4 / rms)}
    )
    assert ruled["eps_rules"].strength > 1
    assert ruled["updates_get_lost"].strength == 0
    assert lost["updates_get_lost"].strength > 1
    assert lost["updates_fall_short"].value == pytest.approx(0.01)
    assert sound["updates_fall_short"].strength < 0.2
    assert sound["updates_get_lost"].strength == 0


def test_changes_of_the_updates_are_found_without_the_rate():
    """Sudden, full-size initial and fading updates are found from their norm alone."""
    kinds = ("mechanism",)
    part = optimizer()

    def symptoms(sizes, loss):
        ratio = ("step", "module"), np.repeat(np.array(sizes)[:, None], 5, axis=1)
        one = record({"monitors": monitors(loss), "optimizer": part.assign(update_ratio=ratio)})
        return read_symptoms(one, find_failure(one), kinds=kinds)

    steady = np.concatenate([np.linspace(0.002, 0.01, 5), np.full(15, 0.01)])
    spiked = descent()
    spiked[105:] += 3
    leaping = np.where(np.arange(20) >= 10, 12 * steady, steady)
    leap = symptoms(leaping, spiked)["updates_leap"]
    assert leap.value == pytest.approx(12)
    assert leap.strength > 1
    assert (leap.step, leap.kind) == (109, "mechanism")
    assert symptoms(steady, spiked)["updates_leap"].strength == 0
    assert symptoms(np.full(20, 0.01), descent())["starts_with_full_updates"].strength == 1
    assert symptoms(steady, descent())["starts_with_full_updates"].strength == 0
    faded = np.where(np.arange(20) >= 6, 1e-4, steady)
    assert symptoms(faded, descent(last=2.5))["updates_fade"].strength > 1
    assert symptoms(steady, descent(last=2.5))["updates_fade"].strength == 0


def test_a_run_whose_loss_rose_and_stayed_high_is_not_healthy():
    loss = descent(noise=0.0)
    loss[100:] = 2.4  # of 3.0, after 1.0
    found = symptoms_of({"monitors": monitors(loss)})["ends_above_its_best"]
    assert found.value == pytest.approx(1.3 / 1.9, abs=0.02)
    assert found.strength == 1
    assert symptoms_of({"monitors": monitors(descent())})["ends_above_its_best"].strength == 0
    assert Rules.shipped().probabilities({"ends_above_its_best": 1.0})["nothing"] == 0


def router(n_dead, n_experts, n_choices, *, n_measurements=10):
    """Return the part ``router``: some experts of one block receive no tokens, the others receive equally many."""
    n_used = n_experts - n_dead
    counts = np.append(np.full(n_used, n_choices // n_used), np.zeros(n_dead))
    counts[: n_choices - int(counts.sum())] += 1
    dims = ("step", "layer")
    return xr.Dataset(
        {
            "dead_experts": (dims, np.full((n_measurements, 1), float((counts == 0).sum()))),
            "expert_load": ((*dims, "expert"), np.tile(counts / n_choices, (n_measurements, 1, 1))),
        },
        {"step": np.arange(n_measurements) * 10 + 9, "layer": [2], "expert": np.arange(n_experts)},
    )


def test_experts_without_tokens_count_beyond_those_that_a_small_probe_misses():
    def strength(*numbers):
        return symptoms_of({"monitors": monitors(descent()), "router": router(*numbers)})["experts_die"].strength

    assert strength(0, 4, 128) == 0
    assert strength(2, 4, 129) == pytest.approx(1.0)  # all choices go to two experts
    assert strength(3, 4, 128) > 1.4
    assert strength(24, 64, 64) < 0.1  # a uniform router leaves 36 % of them without one of 64 tokens
    assert strength(60, 64, 64) > 1


def test_updates_that_leave_weights_unchanged_indicate_a_coarse_number_format():
    found = {
        fraction: symptoms_of({"monitors": monitors(descent()), "optimizer": optimizer(unchanged=fraction)})
        for fraction in (0.0, 0.1, 0.9)
    }
    strengths = [symptoms["weights_stay_unchanged"].strength for symptoms in found.values()]
    assert strengths[0] < strengths[1] == 0
    assert strengths[2] > 1
    assert "90 % of the weights" in found[0.9]["weights_stay_unchanged"].sentence
    without_rate = symptoms_of(
        {"monitors": monitors(descent(), rate=np.zeros(200)), "optimizer": optimizer(unchanged=1.0)}
    )
    assert "weights_stay_unchanged" not in without_rate


def test_noise_and_the_edge_of_stability_are_read_in_scale_free_numbers():
    noisy = symptoms_of({"monitors": monitors(descent()), "optimizer": optimizer(signal=0.0)})["gradients_are_noise"]
    clean = symptoms_of({"monitors": monitors(descent()), "optimizer": optimizer(signal=0.8)})["gradients_are_noise"]
    assert noisy.strength == pytest.approx(1)
    assert clean.strength < 0
    for name, edge in (("preconditioned_sharpness_rate", 38.0), ("sharpness_rate", 2.0)):
        part = xr.Dataset({name: ("step", np.array([0.5, 10.0, 3.0]) * edge)}, coords={"step": [49, 99, 149]})
        found = symptoms_of({"monitors": monitors(descent()), "curvature": part})["rate_over_edge"]
        assert found.value == pytest.approx(10)
        assert found.strength == pytest.approx(1)
        assert found.position == {"step": 99}
    assert "rate_over_edge" not in symptoms_of({"monitors": monitors(descent())})


@settings(max_examples=25, deadline=None)
@given(
    factor=st.one_of(st.floats(0.02, 0.1), st.floats(10, 100)),
    place=st.integers(0, 5),
    others=st.lists(st.floats(0.8, 1.25), min_size=6, max_size=6),
)
def test_an_unusual_block_is_found(factor, place, others):
    values = np.array(others)
    values[place] = factor
    found, log_ratio = odd_one(values)
    assert found == place
    assert log_ratio == pytest.approx(np.log10(factor / np.median(np.delete(values, place))))


def test_the_block_at_fault_is_named():
    weights = np.array([5.0, 5.2, 60.0, 4.9])
    symptoms = symptoms_of({"monitors": monitors(descent(last=2.5)), "optimizer": optimizer(weight=weights)})
    assert symptoms["odd_weights"].strength > 1
    assert symptoms["odd_weights"].position == {"step": 9, "module": 2}
    assert block_at_fault(symptoms) == 2
    alike = symptoms_of({"monitors": monitors(descent(last=2.5)), "optimizer": optimizer()})
    assert block_at_fault(alike) == -1


@pytest.mark.parametrize(("factor", "is_unusual"), [(1.02, False), (6.0, True)])
def test_a_joint_symptom_does_not_repeat_the_sentence_of_a_single_one(factor, is_unusual):
    parts = {"monitors": monitors(descent()), "optimizer": optimizer(weight=5 * np.array([1, factor, 1, 1]))}
    symptoms = symptoms_of(parts)
    own, joint = symptoms["odd_weights"], symptoms["a_block_stands_out"]
    assert joint.strength == own.strength
    assert joint.value == pytest.approx(own.strength)
    assert joint.sentence != own.sentence
    if is_unusual:
        assert joint.sentence == "Block 1 differs from the others, most clearly in the norm of its weights."
        assert own.sentence == "At step 9 the weight norm of block 1 is 6 times that of the other blocks."
    else:
        assert joint.sentence == "No block is unusual; the largest difference is in the norm of its weights."
        assert own.sentence.endswith("is 1.02 times that of the other blocks, which is not unusual.")
    assert symptoms["routing_is_off"].sentence == "No block routes tokens, so routing cannot be the cause."


def test_of_two_blocks_none_is_unusual():
    assert odd_one(np.array([1.0, 100.0])) == (-1, 0.0)


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(-5, 5), st.floats(0.1, 5))
def test_a_strength_is_always_within_its_bounds(value, zero, width):
    assert -1 <= ramp(value, zero, zero + width, low=-1, high=2) <= 2
    assert -1 <= ramp(value, zero, zero - width, low=-1, high=2) <= 2


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), kind=st.sampled_from(["spike", "divergence", "nothing", "flat"]))
def test_symptoms_are_finite_for_any_run(seed, kind):
    draw = np.random.default_rng(seed)
    loss = descent(80, seed=seed) if kind != "flat" else np.full(80, 2.0)
    if kind == "spike":
        loss[40:50] += draw.uniform(1, 50)
    if kind == "divergence":
        loss[60:] = np.nan
    norm = np.exp(draw.standard_normal(80))
    norm[draw.integers(80)] = np.nan
    parts = {"monitors": monitors(loss, grad_norm=norm, rate=np.abs(draw.standard_normal(80)) * 1e-3)}
    for symptom in symptoms_of(parts).values():
        assert np.isfinite(symptom.strength)
        assert symptom.sentence.endswith(".")


def test_injected_faults_are_never_read():
    """A recorded fault, as an event or in the configuration, does not change the diagnosis."""
    loss = descent()
    loss[120:150] += 3
    configuration = {
        "training": {"learning_rate": 1e-3, "schedule": "constant"},
        "model": {"config": {"norm": "pre_ln"}},
    }
    parts = {"monitors": monitors(loss), "optimizer": optimizer()}
    clean = tree(parts, configuration=configuration, events=[(200, "finished")])
    with_fault = tree(
        parts,
        configuration=configuration | {"faults": {"corrupted_data": {"start": 120}}},
        events=[(120, "fault"), (150, "fault"), (200, "finished")],
    )
    assert "faults" not in read_record(with_fault).configuration
    found, expected = diagnose(with_fault), diagnose(clean)
    for name in ("causes", "evidence", "experiments"):
        xr.testing.assert_identical(found[name].to_dataset(), expected[name].to_dataset())
    assert "fault" not in json.dumps([str(s) for s in found["evidence"]["sentence"].values])


def test_evidence_from_settings_can_be_excluded():
    configuration = {"training": {"optimizer": "AdamW", "optimizer_options": {"eps": 0.5}, "warmup": 0}}
    one = record({"monitors": monitors(descent(), rows=np.full(200, 2.0))}, configuration=configuration)
    failure = find_failure(one)
    everything = read_symptoms(one, failure)
    assert everything["eps_setting"].strength > 1
    without = read_symptoms(one, failure, kinds=("mechanism", "log"))
    assert "eps_setting" not in without
    assert "few_rows" in without
    assert not {"few_rows", "rate_jumps", "eps_setting"} & set(read_symptoms(one, failure, kinds=("mechanism",)))


def test_every_cause_has_a_title_and_a_meaning():
    for cause in CAUSES.values():
        assert cause.title
        assert cause.meaning
        assert cause.kind in ("hyperparameter", "architecture", "precision", "routing", "data", "none")


def test_every_symptom_has_its_own_short_title():
    assert set(Rules.shipped().symptoms) <= set(SYMPTOM_TITLES)
    assert len(set(SYMPTOM_TITLES.values())) == len(SYMPTOM_TITLES)
    assert max(map(len, SYMPTOM_TITLES.values())) <= 40  # the width of a name in figures
    assert symptom_title("few_rows") == "batch size"
    assert symptom_title("an_unknown_one") == "an unknown one"
