"""Checkpoints whose weights stay on disk have the same spectra and are read one block at a time."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.models.layout_models import PostNorms, Triples
from tests.models.model_families import BY_NAME, FAMILIES_BY_TIER, build, make_inputs
from tests.models.test_gguf_file import MAKERS, lfm2
from workbench.errors import CheckpointError, OptionError, SnapshotError
from workbench.models import capture


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def llama(tmp_path):
    """Return a folder with a Llama of three blocks."""
    model = build(BY_NAME["llama"])
    model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


IDS = torch.randint(0, 90, (12, 16), generator=torch.Generator().manual_seed(0))


def measured(subject, inputs=IDS, **options):
    return wb.profile(subject, inputs, **{"n_snapshots": 100, "progress": False, **options})


def assert_same(one, other):
    """Check that the variables of two datasets are bitwise identical; attributes may differ."""
    for name, variable in one.data_vars.items():
        np.testing.assert_array_equal(variable.values, other[name].values, err_msg=name)
    assert one.attrs["token_selection"] == other.attrs["token_selection"]


@pytest.mark.parametrize("family", FAMILIES_BY_TIER, ids=str)
def test_streamed_equals_resident_in_every_family(family, tmp_path):
    model, inputs = build(family), make_inputs(family, n_rows=6)
    model.save_pretrained(tmp_path / "folder")
    resident = wb.open_checkpoint(tmp_path / "folder", streaming=False)
    streamed = wb.open_checkpoint(tmp_path / "folder", streaming=True)
    options = {"n_snapshots": 40, "progress": False, "stack": family.stack}
    assert_same(wb.profile(resident, inputs, **options), wb.profile(streamed, inputs, **options))
    blocks = wb.read_anatomy(resident, inputs, stack=family.stack).sites
    names = {id(module): name for name, module in resident.model.named_modules()}
    for site in blocks:
        assert all(p.is_meta for p in streamed.model.get_submodule(names[id(site.module)]).parameters())
    # A module that the library shares between models, such as an activation, has no hook of ours.
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in build(family).modules())


class TestSameSpectra:
    """Tests with a Llama of three blocks, streamed and in memory."""

    @pytest.fixture
    def both(self, llama):
        return wb.open_checkpoint(llama, streaming=False), wb.open_checkpoint(llama, streaming=True)

    @pytest.mark.parametrize(
        "options",
        [{}, {"layers": [1]}, {"layers": [0, -1]}, {"rank": 5}, {"skip_first": 2}, {"n_snapshots": None}, {"seed": 3}],
        ids=str,
    )
    @pytest.mark.parametrize("split", [[12], [4, 3, 5]], ids=str)
    def test_with_every_option(self, both, options, split):
        inputs = list(IDS.split(split))
        assert_same(*(measured(subject, inputs, **options) for subject in both))

    def test_padding_and_iterators(self, both):
        mask = torch.ones_like(IDS)
        mask[:, 11:] = 0
        padded = {"input_ids": IDS, "attention_mask": mask}
        assert_same(*(measured(subject, padded) for subject in both))
        assert_same(*(measured(subject, iter(IDS.split(4))) for subject in both))

    def test_layers_are_numbered_as_in_the_model(self, both):
        spectra = measured(both[1], layers=[2, 0])
        assert spectra.layer.values.tolist() == [0, 2]
        assert spectra.layer_name.values.tolist() == ["model.layers.0", "model.layers.2"]
        every = measured(both[0])
        np.testing.assert_array_equal(spectra.spectral_radius, every.spectral_radius.sel(layer=[0, 2]))

    @pytest.mark.parametrize("layers", [[], [3], [-4]], ids=str)
    def test_layers_that_do_not_exist(self, both, layers):
        with pytest.raises(OptionError, check=about("layers", tuple(layers), "a list of layer numbers from 0 to 2")):
            measured(both[0], layers=layers)

    @pytest.mark.parametrize("rank", [None, 3])
    def test_few_snapshots_are_stored_instead_of_moments(self, both, monkeypatch, rank):
        exact = measured(both[0], n_snapshots=20, rank=rank)
        monkeypatch.setattr(capture, "_NARROW", 0)
        resident, streamed = (measured(subject, n_snapshots=20, rank=rank) for subject in both)
        assert_same(resident, streamed)
        for name in ("spectral_radius", "nonlinearity_ratio", "update_norm", "energy_gain", "rank"):
            np.testing.assert_allclose(streamed[name], exact[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(["safetensors", "shards", "bin", "module"]),
    dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
    rank=st.sampled_from([None, 4]),
    cuts=st.lists(st.integers(1, 11), max_size=3, unique=True),
)
def test_streamed_equals_resident_from_every_file(form, dtype, rank, cuts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("form")
    model = build(BY_NAME["llama"])
    source, options = folder, {"dtype": dtype}
    if form == "module":
        save_file(dict(model.state_dict().items()), folder / "weights.safetensors")
        source = folder / "weights.safetensors"
    elif form == "bin":
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        model.save_pretrained(folder, max_shard_size="20KB" if form == "shards" else "5GB")
    edges = [0, *sorted(cuts), len(IDS)]
    inputs = [IDS[a:b] for a, b in itertools.pairwise(edges)]
    found = []
    for streaming in (False, True):
        module = {"module": build(BY_NAME["llama"])} if form == "module" else {}
        subject = wb.open_checkpoint(source, streaming=streaming, **options, **module)
        assert (subject.streamed is not None) == streaming
        found.append(measured(subject, inputs, rank=rank))
    assert_same(*found)


class TestOneBlockAtATime:
    def test_each_block_is_read_once_for_all_batches(self, llama):
        subject = wb.open_checkpoint(llama, streaming=True)
        anatomy = wb.read_anatomy(wb.open_checkpoint(llama, streaming=False), IDS)
        anatomy = wb.models.anatomy.Anatomy(
            anatomy.stack,
            tuple(
                type(site)(
                    site.name, subject.model.get_submodule(site.name), site.call, site.input_slot, site.output_slot
                )
                for site in anatomy.sites
            ),
            anatomy.width,
        )
        measured(subject, list(IDS.split(3)), anatomy=anatomy)
        assert dict(subject.streamed.n_reads) == {f"model.layers.{i}": 1 for i in range(3)}

    def test_no_two_blocks_are_in_memory_at_the_same_time(self, llama, monkeypatch):
        subject = wb.open_checkpoint(llama, streaming=True)
        blocks = list(subject.model.model.layers)
        most = 0
        fill = type(subject.streamed)._fill

        def counting(self, module):
            nonlocal most
            found = fill(self, module)
            most = max(most, sum(not next(block.parameters()).is_meta for block in blocks))
            return found

        monkeypatch.setattr(type(subject.streamed), "_fill", counting)
        measured(subject, list(IDS.split(3)))
        assert most == 1
        assert all(parameter.is_meta for block in blocks for parameter in block.parameters())

    def test_an_error_leaves_the_blocks_on_disk(self, llama):
        subject = wb.open_checkpoint(llama, streaming=True)
        with torch.no_grad():
            subject.model.model.embed_tokens.weight[5] = float("nan")
        with pytest.raises(SnapshotError):
            measured(subject, list(IDS.split(3)))
        assert all(p.is_meta for p in subject.model.model.layers.parameters())


_KILLED = """
    import os, sys, torch
    import workbench as wb
    from workbench.models.capture import LayerResults

    keep, done = LayerResults._keep, []

    def keep_and_kill(self, layer, *rest):
        keep(self, layer, *rest)
        done.append(layer)
        if len(done) == 2 and self.journal is not None and "kill" in sys.argv:
            os.kill(os.getpid(), 9)

    LayerResults._keep = keep_and_kill
    import workbench.models.capture as results
    results._MOST_WAITING = 0
    subject = wb.open_checkpoint(sys.argv[1], streaming=True)
    ids = torch.randint(0, 90, (12, 16), generator=torch.Generator().manual_seed(0))
    subject.streamed.n_reads.clear()
    spectra = wb.profile(subject, list(ids.split(5)), n_snapshots=100, n_workers=1, progress=False)
    wb.save(spectra, sys.argv[2])
    print(dict(subject.streamed.n_reads), done)
"""


@pytest.mark.slow
def test_no_finished_block_runs_again_after_the_process_was_killed(tmp_path, monkeypatch):
    build(BY_NAME["llama"], num_hidden_layers=5).save_pretrained(tmp_path / "five")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_KILLED))

    def run(store, *flags):
        return subprocess.run(
            [sys.executable, script, tmp_path / "five", tmp_path / store, *flags], capture_output=True, text=True
        )

    uninterrupted = run("uninterrupted.zarr")
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    assert run("resumed.zarr", "kill").returncode == -9
    assert list((tmp_path / "cache" / "unfinished-profiles").iterdir())
    resumed = run("resumed.zarr")
    assert resumed.returncode == 0, resumed.stderr
    reads, _ = resumed.stdout.split("} ")
    # All blocks share the weights of block 0 while the anatomy is read; block 1 was finished.
    assert "'model.layers.0': 1" in reads
    assert "model.layers.1" not in reads
    assert all(f"'model.layers.{i}': 1" in reads for i in (2, 3, 4))
    one, other = (wb.open_run(tmp_path / name)["spectra"].dataset for name in ("uninterrupted.zarr", "resumed.zarr"))
    assert_same(one, other)
    assert not list((tmp_path / "cache" / "unfinished-profiles").iterdir())


def test_states_in_the_journal_that_are_not_those_of_the_model_are_not_used(llama, monkeypatch):
    from workbench.models import streamed_capture
    from workbench.models.capture import ProfileJournal

    expected = measured(wb.open_checkpoint(llama, streaming=True))
    states = ProfileJournal.states
    finish = ProfileJournal.finish

    def fail_at_the_last(self, layer, *rest):
        finish(self, layer, *rest)
        if layer == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("workbench.models.capture._MOST_WAITING", 0)
    with monkeypatch.context() as patch:
        patch.setattr(ProfileJournal, "finish", fail_at_the_last)
        with pytest.raises(KeyboardInterrupt):
            measured(wb.open_checkpoint(llama, streaming=True), n_workers=1)

    def others(self, layer):
        found = states(self, layer)
        return None if found is None else {**found, "outputs": [output + 1 for output in found["outputs"]]}

    monkeypatch.setattr(ProfileJournal, "states", others)
    assert streamed_capture.digest_of([1, object()]) == b""
    assert_same(measured(wb.open_checkpoint(llama, streaming=True), n_workers=1), expected)


class TestWhetherToStream:
    def test_auto_streams_weights_that_need_more_than_half_of_the_memory(self, llama, monkeypatch):
        assert wb.open_checkpoint(llama).streamed is None
        monkeypatch.setattr("workbench.models.streaming.free_memory", lambda device: 1000)
        assert wb.open_checkpoint(llama).streamed is not None

    def test_a_model_of_the_zoo(self):
        folder = wb.samples.embedded("pre_ln")
        ids = torch.randint(0, 200, (6, 24), generator=torch.Generator().manual_seed(0))
        subjects = [wb.open_checkpoint(folder, streaming=flag) for flag in (False, True)]
        assert subjects[1].tokenize(["Hi"])["input_ids"].tolist() == [[72, 105]]
        assert_same(*(measured(subject, ids) for subject in subjects))

    @pytest.mark.parametrize("streaming", ["yes", 2, None])
    def test_unknown_values_are_rejected(self, llama, streaming):
        with pytest.raises((CheckpointError, OptionError), check=about("streaming", streaming)):
            wb.open_checkpoint(llama, streaming=streaming)


class TestOtherMeasurements:
    """Measurements that need all weights at once, which are then views of the files."""

    @pytest.fixture
    def mixtral(self, tmp_path):
        build(BY_NAME["mixtral"]).save_pretrained(tmp_path / "mixtral")
        return [wb.open_checkpoint(tmp_path / "mixtral", streaming=flag) for flag in (False, True)]

    def test_queries_keys_and_routers(self, mixtral):
        for one, other in zip(*(wb.query_key_weights(subject, IDS[:2]) for subject in mixtral), strict=True):
            assert torch.equal(one.query, other.query)
            assert torch.equal(one.key, other.key)
        for one, other in zip(*(wb.router_weights(subject, IDS[:2]) for subject in mixtral), strict=True):
            assert torch.equal(one.weight, other.weight)
        assert all(p.is_meta for p in mixtral[1].model.model.layers.parameters())

    def test_flow(self, mixtral):
        one, other = (wb.flow.measure(subject, IDS[:2], jacobian=False) for subject in mixtral)
        for name, variable in one.data_vars.items():
            np.testing.assert_array_equal(variable.values, other[name].values, err_msg=name)

    def test_weights_that_do_not_fit_into_memory_are_rejected(self, tmp_path, monkeypatch):
        build(BY_NAME["llama"]).save_pretrained(tmp_path / "llama")
        subject = wb.open_checkpoint(tmp_path / "llama", streaming=True, dtype="bfloat16")
        monkeypatch.setattr("workbench.models.streaming.free_memory", lambda device: 1000)
        with pytest.raises(CheckpointError, check=says("so that weights stay in the files, or use a larger machine.")):
            wb.query_key_weights(subject, IDS[:2])

    def test_training_is_rejected(self, mixtral):
        with pytest.raises(CheckpointError, check=says("Training needs all weights of MixtralForCausalLM in memory,")):
            wb.train(mixtral[1], wb.tasks.random_tokens(vocab_size=90), n_steps=1)


class _Conditioned(torch.nn.Module):
    """A model that calls a submodule of its first block, as DiT does with its embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(90, 16)
        self.blocks = torch.nn.ModuleList(_Shifted() for _ in range(3))

    def forward(self, tokens):
        states = self.embedding(tokens)
        shift = self.blocks[0].shift(states.mean(1, keepdim=True))
        for block in self.blocks:
            states = block(states, shift)
        return states


class _Shifted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
        self.mlp = torch.nn.Linear(16, 16)

    def forward(self, states, shift):
        return states + torch.tanh(self.mlp(states) + shift)


def test_submodules_of_a_block_may_be_called_from_outside(tmp_path):
    save_file(_Conditioned().state_dict(), tmp_path / "x.safetensors")
    subjects = [
        wb.open_checkpoint(tmp_path / "x.safetensors", module=_Conditioned().eval(), streaming=streaming)
        for streaming in (False, True)
    ]
    assert_same(*(measured(subject) for subject in subjects))
    assert all(parameter.is_meta for parameter in subjects[1].model.blocks.parameters())
    with torch.no_grad():
        assert torch.equal(*(subject.model(IDS) for subject in subjects))
    assert all(parameter.is_meta for parameter in subjects[1].model.blocks.parameters())


class TestCheckpointsThatCannotBeStreamed:
    @pytest.fixture
    def scarce(self, monkeypatch):
        """Simulate so little memory that "auto" would stream every checkpoint."""
        monkeypatch.setattr("workbench.models.streaming.free_memory", lambda device: 1000)

    def test_weights_that_do_not_fit_open_in_memory(self, llama, scarce):
        config = (llama / "config.json").read_text()
        (llama / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
        subject = wb.open_checkpoint(llama, strict=False)
        assert subject.streamed is None
        assert "left at random values" in subject.unloaded
        with pytest.raises(CheckpointError, check=says("This checkpoint cannot be streamed: with strict=False,")):
            wb.open_checkpoint(llama, strict=False, streaming=True)

    def test_a_gguf_file_that_is_read_at_once(self, tmp_path, scarce):
        path = lfm2(tmp_path / "model.gguf")
        assert wb.open_checkpoint(path).streamed is None
        with pytest.raises(CheckpointError, check=says("This checkpoint cannot be streamed: transformers reads all")):
            wb.open_checkpoint(path, streaming=True)


def test_opening_a_gguf_file_dequantizes_nothing(tmp_path):
    subject = wb.open_checkpoint(MAKERS["llama"](tmp_path / "model.gguf"), streaming=True)
    assert all(parameter.is_meta for parameter in subject.model.parameters())
    assert not subject.streamed.n_reads


class WithHead(Triples):
    """A language model with a head, which adds no states."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, tokens):
        return self.head(super().forward(tokens))


class TestModulesOutsideOfTheBlocks:
    """Modules that run before the first block, such as an encoder, are read once for all batches."""

    @pytest.fixture
    def t5(self, tmp_path):
        build(BY_NAME["t5"]).save_pretrained(tmp_path / "t5")
        return tmp_path / "t5"

    @pytest.mark.parametrize("dtype", ["auto", "float64"])  # in another number format nothing is a view of the file
    @pytest.mark.parametrize("n_snapshots", [None, 100, 30])
    def test_an_encoder_is_read_once(self, t5, n_snapshots, dtype):
        resident, streamed = (wb.open_checkpoint(t5, streaming=flag, dtype=dtype) for flag in (False, True))
        batches, anatomy = list(IDS.split(3)), None
        with streamed.streamed.sharing_weights():
            anatomy = wb.read_anatomy(streamed.model, IDS[:2])
        streamed.streamed.n_reads.clear()
        found = measured(streamed, batches, anatomy=anatomy, n_snapshots=n_snapshots)
        reads = streamed.streamed.n_reads
        assert {"encoder.block.0", "encoder.block.1", "decoder.block.0"} <= set(reads)
        assert {n for name, n in reads.items() if ".block." in name or name == "shared"} == {1}
        assert_same(found, measured(resident, batches, n_snapshots=n_snapshots))

    def test_no_more_batches_of_an_iterator_are_read_than_in_memory(self, t5):
        taken = []

        def batches():
            for i, batch in enumerate(IDS.split(2)):
                taken.append(i)
                yield batch

        found = measured(wb.open_checkpoint(t5, streaming=True), batches(), n_snapshots=60)
        assert taken == [0, 1, 2]  # the last one is read before it is known that two are enough
        assert_same(found, measured(wb.open_checkpoint(t5, streaming=False), IDS.split(2).__iter__(), n_snapshots=60))

    @pytest.mark.parametrize("options", [{"n_snapshots": None}, {"n_snapshots": 3, "layers": [1, 2]}], ids=str)
    @pytest.mark.parametrize("kind", [Triples, WithHead, PostNorms])
    def test_layers_whose_residual_is_added_outside_are_read_once(self, kind, options, tmp_path):
        torch.manual_seed(0)
        model, path = kind(), tmp_path / "weights.safetensors"
        save_file(dict(model.state_dict().items()), path)
        resident, streamed = (wb.open_checkpoint(path, module=kind(), streaming=flag) for flag in (False, True))
        batches = list((IDS % 64).split(3))
        with streamed.streamed.filled():
            anatomy = wb.read_anatomy(streamed.model, batches[0])
        assert all(site.exit is not None for site in anatomy.sites)
        streamed.streamed.n_reads.clear()
        ran = []
        for head in (part for name, part in streamed.model.named_modules() if name == "head"):
            head.register_forward_hook(lambda *_: ran.append(1))
        found = measured(streamed, batches, anatomy=anatomy, **options)
        assert len(streamed.streamed.n_reads) >= 8
        assert set(streamed.streamed.n_reads.values()) == {1}
        assert not ran
        assert all(parameter.is_meta for parameter in streamed.model.layers.parameters())  # even of interrupted passes
        assert_same(found, measured(resident, batches, **options))
        assert_same(*(measured(subject, iter(batches), **options) for subject in (resident, streamed)))
