"""Calls that measure a model leave the model and the process unchanged, also if they raise an exception."""

from __future__ import annotations

import inspect
import math
import random
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.linear_model  # noqa: F401  (sklearn, the next two and zarr add filters of warnings when they are loaded)
import torch
import transformers
import xarray as xr
import zarr  # noqa: F401
from torch import nn
from torch.nn.functional import cross_entropy

import workbench as wb
from tests.model_state import differences, frozen, output_of, state_of, state_of_optimizer, state_of_process, structure
from workbench.callbacks.baselines.penalties import PenaltyTerms
from workbench.diagnosis import check_fits
from workbench.io.run_output import RecordingWarning
from workbench.koopman.spectra import RankWarning
from workbench.probes.update import update_effect
from workbench.training.callback import TrainingRun
from workbench.zoo.constructors import is_zoo_model

N_WORDS, N_ROWS, N_TOKENS = 32, 4, 8
SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2}
TEXT = {**SIZE, "vocab_size": N_WORDS, "max_length": 16, "seed": 1}
LLAMA = {
    "vocab_size": N_WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": N_WORDS, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
#: Options with which a model of transformers returns further outputs, by its own hooks.
OUTPUTS = {"output_hidden_states": True, "output_attentions": True}


def of_transformers(kind, options):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **options, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(config)


def of_torch():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(N_WORDS, 16), encoder, nn.Linear(16, N_WORDS))


MODELS = {
    "pre_ln": lambda: wb.zoo.transformer("pre_ln", **TEXT),
    "none": lambda: wb.zoo.transformer("none", **TEXT),
    "moe": lambda: wb.zoo.moe(n_experts=3, **TEXT),
    "mamba": lambda: wb.zoo.mamba(**{key: value for key, value in TEXT.items() if key != "n_heads"}),
    "vit": lambda: wb.zoo.vit(**SIZE, image_size=8, patch_size=4, n_channels=1, n_classes=N_WORDS, seed=1),
    "llama": lambda: of_transformers("llama", {**LLAMA, **OUTPUTS}),
    "gpt2": lambda: of_transformers("gpt2", {**GPT2, **OUTPUTS}),
    "mixtral": lambda: of_transformers(
        "mixtral", {**LLAMA, **OUTPUTS, "num_local_experts": 3, "output_router_logits": True}
    ),
    "encoder": of_torch,
}
ZOO = {"pre_ln", "none", "moe", "mamba", "vit"}
#: A model of transformers that was run before has hooks of its own, which must be kept.
STATES = [*((name, False) for name in MODELS), ("mixtral", True)]


class StopError(RuntimeError):
    """Raised inside a model."""


class Fuse:
    """Counter of the calls of all leaf modules of a model and its copies, which may raise an error at one of them."""

    def __init__(self, model):
        self.n_calls, self.at = 0, None
        for module in model.modules():
            if not any(module.children()):
                module.register_forward_pre_hook(lambda *_: self.burn())

    def burn(self):
        self.n_calls += 1
        if self.n_calls == self.at:
            raise StopError


def draw(*shape):
    return torch.randint(3, N_WORDS, shape, generator=torch.Generator().manual_seed(0))


class Found:
    """Model in use, with mixed modes, a frozen parameter, gradients, hooks and an optimizer; and its data."""

    def __init__(self, name, *, was_run=False, shared=None):
        torch.manual_seed(5)
        self.name, self.shared = name, shared
        self.model = MODELS[name]()
        generator = torch.Generator().manual_seed(0)
        is_image = name == "vit"
        self.inputs = torch.randn(N_ROWS, 1, 8, 8, generator=generator) if is_image else draw(N_ROWS, N_TOKENS)
        self.targets = draw(N_ROWS) if is_image else draw(N_ROWS, N_TOKENS + 1)[:, 1:]
        self.batches = [(self.inputs, self.targets)] * 12
        self.model.train()
        next(self.model.children()).eval()
        weights = list(self.model.parameters())
        weights[-1].requires_grad_(False)
        for weight in weights[1:3]:
            weight.grad = torch.full_like(weight, 0.5)
        weights[1].register_hook(lambda gradient: None)
        weights[2].register_post_accumulate_grad_hook(lambda weight: None)
        self.model.register_forward_hook(lambda *_: None)
        list(self.model.modules())[-1].register_full_backward_hook(lambda *_: None)
        self.model.register_state_dict_pre_hook(lambda *_: None)
        self.model.register_load_state_dict_post_hook(lambda *_: None)
        self.optimizer = torch.optim.AdamW([w for w in weights if w.requires_grad], lr=1e-3)
        self.fuse = Fuse(self.model)
        if was_run:
            output_of(self.model, self.inputs)

    def loss(self, model):
        output = model(self.inputs)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        return cross_entropy(logits.flatten(0, -2), self.targets.flatten())

    def anatomy(self):
        return wb.read_anatomy(self.model, self.inputs)

    def state(self):
        data = {"inputs": frozen(self.inputs), "targets": frozen(self.targets)}
        return {**state_of(self.model), **state_of_optimizer(self.optimizer), **state_of_process(), **data}


@dataclass(frozen=True)
class Call:
    """Call with a model: the public names that it covers, its models, and where these raise an error."""

    do: Callable[[Found, Path], Any]
    covers: tuple[str, ...] = ()
    only: frozenset[str] = frozenset(MODELS)
    breaks_at: tuple[float, ...] = (0.4, 1.0)  # fractions of the calls of the model


def checkpoints(of):
    """Return the store of one run of a model of the same kind, with its checkpoints next to it."""
    store = of.shared / of.name / "run.zarr"
    if not store.exists():
        options = {"n_steps": 2, "checkpoint_every": 1, "learning_rate": 1e-9}
        list(wb.train(MODELS[of.name](), of.batches, store=store, **options))
    return store


def opened(of, folder):
    """Open the model itself, and a state dict that does not fit it."""
    assert wb.open_checkpoint(of.model).model is of.model
    torch.save({"other": torch.zeros(2)}, folder / "other.pt")
    with pytest.raises(wb.WorkbenchError):
        wb.open_checkpoint(folder / "other.pt", module=of.model)


def saved(of, folder):
    if is_zoo_model(of.model):
        wb.save_checkpoint(of.model, folder / "saved")
    with pytest.raises(wb.WorkbenchError):
        wb.save_checkpoint(of.model, folder / "saved")


def weights_read(of, _):
    for reading in (*wb.query_key_weights(of.model, of.inputs), *wb.router_weights(of.model, of.inputs)):
        if hasattr(reading, "read"):
            reading.read(of.model)


def measured(of, _):
    probe = wb.monitors.ModelProbe(of.model, of.anatomy(), of.inputs)
    probe.take()
    probe.take()


def recorded(of, folder):
    recorder = wb.Recorder(folder / "a.zarr" if of.name in FEW else None, probe=of.inputs)
    recorder.prepare(of.model, of.inputs)
    recorder.attach(of.model, of.optimizer).detach()


def watched(of, folder):
    with wb.watch(of.model, of.optimizer, store=folder / "watched.zarr", shows=False):
        pass


def broken(of, _):
    bucket, rate = wb.faults.dropped_bucket(), wb.faults.large_rate()
    with bucket.attach(of.model, of.optimizer), rate.attach(of.model, of.optimizer):
        pass


def shaped(of, _):
    with wb.KSS.recommended().attach(of.model, of.optimizer) as shaper:
        shaper.read_anatomy(of.inputs)
    wb.KSS().attach(of.model, of.optimizer).detach()


def penalized(of, _):
    terms = PenaltyTerms([wb.baselines.RandomL2()], model=of.model)
    terms.read_anatomy(of.inputs)
    with torch.no_grad(), terms.watch(0):
        pass


def injected(of, _):
    faults = [wb.faults.low_precision_attention()] + [wb.faults.no_auxiliary_loss()] * (of.name == "moe")
    injection = wb.faults.Injection(faults)
    optimizer = torch.optim.SGD(of.model.parameters(), lr=0.1)
    injection.setup(
        TrainingRun(of.model, optimizer, lambda event: None, probe=lambda n_tokens: of.inputs, owns_loop=True)
    )
    try:
        injection.begin()
    except wb.errors.OptionError:  # not every model calls torch's attention
        assert of.name not in ("pre_ln", "none", "moe", "vit")
    finally:
        injection.end()


def recomputed(of, _):
    handles = wb.faults.FlashAttentionMode().register_recomputation_hooks(of.model.modules())
    for handle in handles:
        handle.remove()


def diagnosed(of, _):
    store, n = checkpoints(of), 60
    log = xr.Dataset(
        {
            "loss": ("step", np.r_[np.linspace(3, 1, n // 2), np.full(n // 2, 9.0)]),
            "grad_norm": ("step", np.r_[np.ones(n // 2), np.full(n // 2, 90.0)]),
            "learning_rate": ("step", np.r_[np.full(n // 2, 1e-3), np.full(n // 2, 1e-1)]),
        },
        coords={"step": np.arange(n)},
    )
    places = store.with_suffix(".checkpoints")
    check_fits(next(places.glob("step-*")), model=of.model)
    tree = wb.diagnose(log, model=of.model, checkpoints=places)
    tree["experiments"]["from_step"][:] = 0
    with suppress(wb.WorkbenchError):  # the log is synthetic, so its first loss may not be that of the model
        wb.run_experiment(tree, 0, model=of.model, task=of.batches, run=log, n_steps=2)


def optimizers(of, _):
    wb.TrainingPlan(n_steps=1, learning_rate=1e-3).optimizer_for(of.model)
    if of.name in ("pre_ln", "none"):
        mup = wb.baselines.MuP(base_width=8)
        assert mup.multiplier(of.model) == 2
        mup.optimizer(of.model, 1e-3)([w for w in of.model.parameters() if w.requires_grad])


def curved(of, _):
    wb.monitors.sharpness(of.model, of.loss, n_products=25, tolerance=1e-1)


def curved_for_adam(of, _):
    kind = torch.optim.AdamW(of.optimizer.param_groups[0]["params"])
    for weight in kind.param_groups[0]["params"]:
        kind.state[weight] = {"step": torch.tensor(1.0), "exp_avg_sq": torch.ones_like(weight)}
    wb.monitors.preconditioned_sharpness(of.model, of.loss, kind, n_products=25, tolerance=1e-1)


def with_arithmetic_checked(of, _):
    wb.probes.precision_errors(of.model, of.loss, anatomy=of.anatomy())


def with_gradients_projected(of, _):
    weights = [weight for weight in of.model.parameters() if weight.requires_grad]
    before = [weight.grad for weight in weights]
    try:
        for weight in weights:
            weight.grad = None
        with wb.probes.GradientProjections(weights, model=of.model) as projections:
            of.loss(of.model).backward()
            projections.take()
    finally:
        for weight, gradient in zip(weights, before, strict=True):
            weight.grad = gradient


def with_update_measured(of, _):
    before = {name: weight.detach() * 1.01 for name, weight in of.model.named_parameters()}
    update_effect(of.model, of.loss, before)


def assessed(of, _):
    plan = {"training": {"n_steps": 20, "learning_rate": 1e-3, "warmup": 5}}
    wb.assess(of.model, of.batches, plan=plan)


FEW = frozenset({"none", "mixtral"})
PLAN = {"training": {"precision": "bf16", "batch_size": 4}, "hardware": {"data_parallel": 2, "gradient_dtype": "bf16"}}
HAZARDS = ["allreduce_error", "activation_overflow", "tensor_parallel"]
SPECTRA = {"n_snapshots": 32, "progress": False}
FLOW = {"n_jacobian_tokens": 2, "n_singular": 1}
CASE = {"n_snapshots": 32, "n_steps": 5, "learning_rate": 1e-3}
MUP = ("baselines.MuP.multiplier", "baselines.MuP.optimizer")

CALLS = {
    "profile": Call(lambda of, _: wb.profile(of.model, of.inputs, **SPECTRA), ("profile",)),
    "profile of a subject": Call(
        lambda of, _: wb.profile(wb.Subject(of.model, "it", "here"), of.inputs, **SPECTRA), ("Subject",), FEW
    ),
    "anatomy": Call(lambda of, _: of.anatomy(), ("read_anatomy",)),
    "stacks": Call(lambda of, _: wb.list_stacks(of.model, of.inputs), ("list_stacks",)),
    "weights of attention and routers": Call(weights_read, ("query_key_weights", "router_weights")),
    "weight spectra": Call(
        lambda of, _: wb.weights.weight_spectra(of.model, reference=of.model, progress=False),
        ("weights.weight_spectra",),
    ),
    "opening": Call(opened, ("open_checkpoint",)),
    "saving": Call(saved, ("save_checkpoint",)),
    "flow": Call(lambda of, _: wb.flow.measure(of.model, of.inputs, targets=of.targets, **FLOW), ("flow.measure",)),
    "flow without Jacobians or targets": Call(lambda of, _: wb.flow.measure(of.model, of.inputs, jacobian=False)),
    "a case": Call(
        lambda of, _: wb.sweeps.measure_case(of.model, of.batches, runs_pilot=of.name == "none", **CASE),
        ("sweeps.measure_case",),
        breaks_at=(0.5,),
    ),
    "a design": Call(lambda of, _: wb.design(of.model), ("design",), frozenset({*ZOO, "llama"})),
    "hardware": Call(
        lambda of, _: wb.hardware.assess_hardware(of.model, of.batches, PLAN, n_batches=1, hazards=HAZARDS),
        ("hardware.assess_hardware",),
        breaks_at=(0.5,),
    ),
    "probe": Call(measured, ("monitors.ModelProbe",)),
    "sharpness": Call(curved, ("monitors.sharpness",)),
    "sharpness under Adam": Call(curved_for_adam, ("monitors.preconditioned_sharpness",), FEW),
    "arithmetic": Call(with_arithmetic_checked, ("probes.precision_errors",)),
    # The forward pass belongs to this test, and that of transformers leaves hooks of its own.
    "gradients": Call(with_gradients_projected, ("probes.GradientProjections",), frozenset({"none"})),
    "effect of an update": Call(with_update_measured),
    "first bad tensor": Call(
        lambda of, _: wb.probes.first_bad_tensor(of.model, lambda model: of.loss(model) * torch.inf),
        ("probes.first_bad_tensor",),
    ),
    "recorder": Call(recorded, ("Recorder.attach", "Recorder.prepare")),
    "watch": Call(watched, ("watch",), FEW),
    "attached fault": Call(broken, ("faults.Fault.attach",)),
    "KSS": Call(shaped, ("KSS.attach",)),
    "penalties": Call(penalized),
    "faults": Call(injected, ()),
    "recomputation": Call(recomputed, ("faults.FlashAttentionMode.register_recomputation_hooks",)),
    "diagnosis": Call(diagnosed, ("diagnose", "run_experiment"), frozenset({"none"})),
    "learning rates": Call(
        lambda of, _: wb.find_rate(of.model, of.batches, n_steps=20, budget=200, progress=False), ("find_rate",), FEW
    ),
    "optimizers": Call(optimizers, ("TrainingPlan.optimizer_for", *MUP)),
    "copies": Call(lambda of, _: wb.baselines.plain_copy(of.model), ("baselines.plain_copy",)),
    "assessment": Call(assessed, ("assess",), frozenset({"llama"}), (0.1,)),
}
#: Public calls that train a model or change it on purpose.
CHANGES = {
    "train": "trains it",
    "baselines.MuP.apply": "rescales it",
    "baselines.SpectralNorm.apply": "parametrizes it",
    "baselines.WeightNorm.apply": "parametrizes it",
    "course.Training": "trains it",
    "course.Training.converted": "changes its number format",
}


@cache
def expected_output(name, was_run):
    """Return the output of a model that was never measured."""
    untouched = Found(name, was_run=was_run)
    return output_of(untouched.model, untouched.inputs)


@pytest.fixture(autouse=True)
def _process():
    """Restore the random states of the process afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)  # tiny models span few directions
        warnings.simplefilter("ignore", RecordingWarning)  # six steps are a short window
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder to which no call writes."""
    return tmp_path_factory.mktemp("shared")


#: Calls that take seconds.
LONG = ("learning rates", "assessment")
CASES = [
    pytest.param(
        name,
        was_run,
        call,
        id=f"{call}-{name}{'-run before' * was_run}",
        marks=pytest.mark.slow if (name not in ("pre_ln", "moe", "llama") and not was_run) or call in LONG else (),
    )
    for name, was_run in STATES
    for call in CALLS
    if name in CALLS[call].only
]


@pytest.mark.medium
@pytest.mark.parametrize(("name", "was_run", "call"), CASES)
def test_a_model_is_unchanged(name, was_run, call, tmp_path, shared):
    """Bit for bit and object for object, also if the model raises an error halfway or at the end."""
    of, expected = Found(name, was_run=was_run, shared=shared), expected_output(name, was_run)
    do = CALLS[call].do
    folder = tmp_path / "complete"
    folder.mkdir()
    of.fuse.n_calls, before = 0, of.state()
    do(of, folder)
    assert not differences(before, of.state())
    n_calls = of.fuse.n_calls
    for fraction in CALLS[call].breaks_at if n_calls else ():
        folder = tmp_path / f"broken at {fraction}"
        folder.mkdir()
        of.fuse.n_calls, of.fuse.at = 0, max(1, math.ceil(fraction * n_calls))
        with suppress(StopError, wb.WorkbenchError):  # some calls raise another error, some continue
            do(of, folder)
        assert of.fuse.n_calls >= of.fuse.at
        of.fuse.at = None
        assert not differences(before, of.state()), fraction
    found = output_of(of.model, of.inputs)
    assert found == expected


@pytest.mark.parametrize(
    "control",
    [wb.baselines.SpectralNorm(), wb.baselines.WeightNorm(), wb.baselines.MuP(8)],
    ids=lambda c: type(c).__name__,
)
def test_a_control_that_is_removed_changes_only_the_parameters_on_which_it_acted(control):
    of = Found("none")
    needs = {name: weight.requires_grad for name, weight in of.model.named_parameters()}
    before = of.state()
    control.apply(of.model)()
    changed = differences(before, of.state())
    allowed = re.compile(r": (weight|bias|_parameters)(\.grad|\._\w+hooks)? has changed$|^optimizer: param_groups")
    assert [words for words in changed if not allowed.search(words)] == []
    assert {name: weight.requires_grad for name, weight in of.model.named_parameters()} == needs


# --- training --------------------------------------------------------------------------------------------------------


def off(kind):
    """Create a fault of a kind that is never switched on."""
    return wb.faults.catalog()[kind].make()


#: Faults of attention need other attention kernels, so test_faults_live.py tests them.
FAULTS = [kind for kind in wb.faults.catalog() if kind not in ("low_precision_attention", "no_auxiliary_loss")]
PENALTIES = (
    wb.baselines.GradientPenalty,
    wb.baselines.RandomL2,
    wb.baselines.JacobianPenalty,
    wb.baselines.ActivationVariance,
)
CADENCE = {"attention": 2, "router": 2, "optimizer": 1, "activations": 3, "curvature": None, "spectra": 4}
#: Name -> arguments of `train`, created for each run.
OBSERVERS = {
    "store": lambda folder: {"store": folder / "a.zarr"},
    "spectra": lambda folder: {"spectra_every": 2, "profile_options": {"n_snapshots": 32}},
    "recorder": lambda folder: {"recorder": wb.Recorder(every=CADENCE, n_probe_tokens=16)},
    "alarms": lambda folder: {"recorder": wb.Recorder(every=CADENCE), "alarms": wb.Alarms()},
    "checkpoints": lambda folder: {"checkpoints": folder / "checkpoints", "checkpoint_every": 2},
    "KSS switched off": lambda folder: {"kss": wb.KSS(enabled=False, interval=1)},
    "KSS of strength 0": lambda folder: {"kss": wb.KSS(strength=0.0, interval=1)},
    "penalties of strength 0": lambda folder: {"penalties": [penalty(0.0) for penalty in PENALTIES]},
    "faults switched off": lambda folder: {"faults": [off(kind) for kind in FAULTS]},
}


def everything(folder):
    """Return the arguments of all observers together."""
    given = {key: value for make in OBSERVERS.values() for key, value in make(folder).items()}
    return given | {"recorder": wb.Recorder(every=CADENCE | {"spectra": None})}


def trained(name, observers):
    """Train six steps; return the metrics of each step and all bits of the parameters and the optimizer state."""
    model = {"moe": MODELS["moe"], "gpt2": lambda: of_transformers("gpt2", {**GPT2, "resid_pdrop": 0.2})}[name]()
    made, tokens = [], draw(6, N_ROWS, N_TOKENS + 1)

    def optimizer(weights):
        made.append(torch.optim.AdamW(weights, lr=3e-3))
        return made[0]

    batches = [(rows[:, :-1], rows[:, 1:]) for rows in tokens]
    run = wb.train(model, batches, n_steps=6, seed=3, optimizer=optimizer, **observers)
    rows = [(r.loss, r.auxiliary_loss, r.grad_norm, r.accuracy, r.learning_rate) for r in run]
    assert len(rows) == 6
    return repr(rows), structure(model.state_dict()), structure(made[0].state_dict())


@cache
def trained_alone(name):
    return trained(name, {})


@pytest.mark.medium
@pytest.mark.parametrize("name", ["moe", "gpt2"])  # gpt2 draws random numbers during training
@pytest.mark.parametrize("observers", [*OBSERVERS, "everything"])
def test_training_is_bitwise_identical_with_all_observers(observers, name, tmp_path):
    before = state_of_process()
    watched = trained(name, everything(tmp_path) if observers == "everything" else OBSERVERS[observers](tmp_path))
    after = state_of_process()
    assert watched == trained_alone(name)
    if name == "moe":  # a global seed is set to create the other model
        assert not differences(before, after)


# --- completeness ----------------------------------------------------------------------------------------------------


def public_callables():
    """Return name -> callable of the public names, and of the public names of their modules and classes."""
    found = {}

    def add(name, thing):
        if inspect.isclass(thing):
            found[name] = thing
            for key, member in inspect.getmembers(thing, callable):
                if not key.startswith("_") and (getattr(member, "__module__", "") or "").startswith("workbench"):
                    found[f"{name}.{key}"] = member
        elif callable(thing):
            found[name] = thing

    for name in wb.__all__:
        thing = getattr(wb, name)
        if not inspect.ismodule(thing):
            add(name, thing)
            continue
        for key in getattr(thing, "__all__", [key for key in vars(thing) if not key.startswith("_")]):
            inner = getattr(thing, key)
            if not inspect.ismodule(inner) and getattr(inner, "__module__", "").startswith("workbench"):
                add(f"{name}.{key}", inner)
    return found


def takes_a_model(thing):
    """Return whether a parameter is annotated as one or several modules or subjects, but not as a function of one."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return False
    notes = [str(p.annotation) for p in signature.parameters.values() if p.annotation is not p.empty]
    return any(re.search(r"\b(Module|Subject)\b", note) for note in notes if "Callable[" not in note)


def test_all_public_calls_that_take_a_model_are_tested_here():
    by_thing = {}
    for name, thing in public_callables().items():
        if takes_a_model(thing):
            by_thing.setdefault(getattr(thing, "__wrapped__", thing), set()).add(name)
    known = {name for call in CALLS.values() for name in call.covers} | set(CHANGES)
    assert [sorted(names) for names in by_thing.values() if not names & known] == []
    assert len(by_thing) > 25
    callables = public_callables()
    assert known <= set(callables)
